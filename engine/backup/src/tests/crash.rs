//! A daemon that ends, or a store that fails, between any two operations.

use std::fmt::Debug;
use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::faulty::{Fault, Faulty};
use super::{Bytes, OBJECT_BYTES, back_up, files, removed, request, restored, some_data};
use crate::{Created, Failure, Progress, Request, Store, Target, create, restore, verify};

/// Checks that all backups are complete and those in `needed` are there. The deletion of all leaves
/// nothing.
async fn check(
    inner: &Arc<InMemory>,
    needed: &[(u128, &[u8])],
    may_be: &[(u128, &[u8])],
    why: &str,
) {
    let store = Store::new(inner.clone(), Path::default());
    let listed = store.list(None).await.unwrap();
    assert!(listed.bad.is_empty(), "{why}: {:?}", listed.bad);
    let is_listed = |number: u128| {
        let id = request(number).id;
        listed.backups.iter().any(|backup| backup.id == id)
    };
    for (number, data) in needed {
        assert!(is_listed(*number), "{why}: backup {number} is gone");
        assert_eq!(&restored(&store, *number).await.unwrap(), data, "{why}");
    }
    for (number, data) in may_be {
        if is_listed(*number) {
            assert_eq!(&restored(&store, *number).await.unwrap(), data, "{why}");
        }
    }
    for backup in &listed.backups {
        let progress = Progress::default();
        let verified = verify(&store, backup.volume.id, backup.id, &progress).await;
        let damaged = verified.unwrap().damaged;
        assert!(damaged.is_empty(), "{why}: {damaged:?}");
    }
    // The next backup and deletions work, and nothing remains.
    let data = some_data(77);
    back_up(&store, 9, &data).await.unwrap();
    assert_eq!(restored(&store, 9).await.unwrap(), data, "{why}");
    for backup in &listed.backups {
        super::remove(
            &store,
            backup.volume.id,
            backup.id,
            super::HOLDER,
            &Default::default(),
        )
        .await
        .unwrap();
    }
    removed(&store, 9).await.unwrap();
    let left = files(&**inner).await;
    assert!(left.is_empty(), "{why}: {left:?}");
}

/// Repeats work on copies of a store that fail at the first operation, the second one, and so on,
/// until the work needs no more operations: more than `least`. `judge` gets the copy and the result
/// of each failure. Returns the results of whole work.
async fn at_each_operation<T: Debug>(
    inner: &InMemory,
    least: u32,
    work: impl AsyncFn(Store) -> Result<T, Failure>,
    judge: impl AsyncFn(Arc<InMemory>, Result<T, Failure>, &str),
) -> Vec<T> {
    let mut whole = Vec::new();
    for fault in [Fault::Before, Fault::After, Fault::Once] {
        for at in 0.. {
            let copy = Arc::new(inner.fork());
            let faulty = Arc::new(Faulty::new(copy.clone(), fault, at));
            let dynamic: Arc<dyn ObjectStore> = faulty.clone();
            let ended = work(Store::new(dynamic, Path::default())).await;
            if faulty.is_unused() {
                assert!(at > least, "{at}");
                whole.push(ended.unwrap());
                break;
            }
            let why = format!("{fault:?} at {at}: {ended:?}");
            judge(copy, ended, &why).await;
        }
    }
    whole
}

/// A backup that fails at any operation does not exist or is complete. The earlier one is as it
/// was.
#[test]
fn a_backup_that_fails_anywhere_harms_nothing() {
    super::runtime().block_on(async {
        let mut first = some_data(1);
        first[..OBJECT_BYTES].fill(0);
        let mut second = first.clone();
        second[0] = 1;
        second[super::SIZE - 1] ^= 1;
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        back_up(&store, 1, &first).await.unwrap();
        let work = async |store| back_up(&store, 2, &second).await;
        let judge = async |copy, ended: Result<Created, Failure>, why: &str| {
            let both: [(u128, &[u8]); 2] = [(1, &first), (2, &second)];
            let needed = if ended.is_ok() { 2 } else { 1 };
            check(&copy, &both[..needed], &both[needed..], why).await;
        };
        at_each_operation(&inner, 8, work, judge).await;
    });
}

/// A deletion that fails at any operation leaves the other backup whole, and can be repeated.
#[test]
fn a_deletion_that_fails_anywhere_harms_nothing() {
    super::runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        let first = some_data(1);
        let mut second = first.clone();
        second[0] ^= 1;
        back_up(&store, 1, &first).await.unwrap();
        back_up(&store, 2, &second).await.unwrap();
        let work = async |store| removed(&store, 1).await;
        let judge = async |copy, _, why: &str| {
            check(&copy, &[(2, &second)], &[(1, &first)], why).await;
        };
        for removed in at_each_operation(&inner, 5, work, judge).await {
            assert_eq!(removed.objects, 1);
        }
    });
}

/// Goal: a store that is empty from one moment on is not reported as damage. Method: the first
/// write of a restore empties the store; objects of the second half are read later.
#[test]
fn a_store_that_disappears_is_no_damage() {
    struct Empties(Arc<InMemory>);
    impl Target for Empties {
        async fn write(&mut self, _: u64, _: Vec<u8>) -> Result<(), String> {
            for path in files(&*self.0).await.into_keys() {
                self.0.delete(&Path::from(path)).await.unwrap();
            }
            Ok(())
        }
        async fn flush(&mut self) -> Result<(), String> {
            Ok(())
        }
    }
    super::runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        let data = [some_data(1), some_data(2), some_data(3)].concat();
        let large = Request {
            size_bytes: data.len() as u64,
            ..request(1)
        };
        let progress = Progress::default();
        let created = create(&store, &large, &mut Bytes::new(&data), &progress).await;
        assert_eq!(created.unwrap().header.objects, 8);
        let mut target = Empties(inner);
        let ended = restore(&store, super::VOLUME, large.id, &mut target, &progress).await;
        assert!(matches!(ended, Err(Failure::Gone(_))), "{ended:?}");
    });
}

/// A restore or verification that fails anywhere reports it, and never reports damage.
#[test]
fn a_store_that_fails_is_no_damage() {
    super::runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        back_up(&store, 1, &some_data(1)).await.unwrap();
        for at in 0..4 {
            let faulty = || Arc::new(Faulty::new(inner.clone(), Fault::Once, at));
            let store = Store::new(faulty(), Path::default());
            let ended = restored(&store, 1).await;
            assert!(
                matches!(ended, Err(Failure::Store { .. })),
                "{at}: {ended:?}"
            );
            let store = Store::new(faulty(), Path::default());
            let id = request(1).id;
            let ended = verify(&store, super::VOLUME, id, &Default::default()).await;
            assert!(
                matches!(ended, Err(Failure::Store { .. })),
                "{at}: {ended:?}"
            );
        }
    });
}

//! A daemon that ends, or a store that fails, between any two operations.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;

use super::faulty::{Fault, Faulty};
use super::{OBJECT_BYTES, back_up, files, removed, request, restored, some_data};
use crate::{Failure, Progress, Store, verify};

const FAULTS: [Fault; 3] = [Fault::Before, Fault::After, Fault::Once];

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

fn copy_of(inner: &InMemory) -> Arc<InMemory> {
    Arc::new(inner.fork())
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
        for fault in FAULTS {
            let mut at = 0;
            loop {
                let copy = copy_of(&inner);
                let faulty = Arc::new(Faulty::new(copy.clone(), fault, at));
                let dynamic: Arc<dyn ObjectStore> = faulty.clone();
                let created = back_up(&Store::new(dynamic, Path::default()), 2, &second).await;
                let why = format!("{fault:?} at {at}");
                if faulty.is_unused() {
                    created.unwrap();
                    break;
                }
                match created {
                    Ok(_) => {
                        let needed: [(u128, &[u8]); 2] = [(1, &first), (2, &second)];
                        check(&copy, &needed, &[], &why).await;
                    }
                    Err(_) => check(&copy, &[(1, &first)], &[(2, &second)], &why).await,
                }
                at += 1;
            }
            assert!(at > 8, "{at}");
        }
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
        for fault in FAULTS {
            let mut at = 0;
            loop {
                let copy = copy_of(&inner);
                let faulty = Arc::new(Faulty::new(copy.clone(), fault, at));
                let dynamic: Arc<dyn ObjectStore> = faulty.clone();
                let ended = removed(&Store::new(dynamic, Path::default()), 1).await;
                let why = format!("{fault:?} at {at}: {ended:?}");
                if faulty.is_unused() {
                    assert_eq!(ended.unwrap().objects, 1);
                    break;
                }
                check(&copy, &[(2, &second)], &[(1, &first)], &why).await;
                at += 1;
            }
            assert!(at > 5, "{at}");
        }
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

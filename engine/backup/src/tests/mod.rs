//! Backups in memory and in directories, with stores that fail.

mod crash;
mod damage;
mod directory;
mod faulty;
mod s3;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::TryStreamExt;
use nacre_random::Random;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use uuid::Uuid;

use crate::{
    Created, Failure, OBJECT_BYTES, Piece, Progress, Request, Source, Store, Target, Volume,
    create, remove, restore, verify,
};

const VOLUME: Uuid = Uuid::from_u128(0x11);
const HOLDER: Uuid = Uuid::from_u128(0x22);
const MIB: usize = 1 << 20;

/// A volume of two objects and a half.
const SIZE: usize = 10 * MIB;

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

fn request(number: u128) -> Request {
    Request {
        id: Uuid::from_u128(0x1000 + number),
        holder: HOLDER,
        created: 1_700_000_000 + number as u64,
        volume: Volume {
            id: VOLUME,
            name: "v1".into(),
        },
        snapshot: Volume {
            id: Uuid::from_u128(0x2000 + number),
            name: format!("v1@{number}"),
        },
        size_bytes: SIZE as u64,
        full: false,
    }
}

/// The contents of a snapshot.
struct Bytes {
    data: Vec<u8>,
    next: u32,
}

impl Bytes {
    fn new(data: &[u8]) -> Self {
        let data = data.to_vec();
        Self { data, next: 0 }
    }
}

impl Source for Bytes {
    async fn begin(&mut self) -> Result<u64, String> {
        Ok(self.data.len().div_ceil(OBJECT_BYTES) as u64)
    }

    async fn next(&mut self) -> Result<Option<Piece>, String> {
        let index = self.next;
        self.next += 1;
        let piece = self.data.chunks(OBJECT_BYTES).nth(index as usize);
        Ok(piece.map(|piece| Piece {
            index,
            data: piece.to_vec(),
        }))
    }
}

/// A device that fails when zeroes are written.
struct Device(Vec<u8>);

impl Target for Device {
    async fn write(&mut self, offset: u64, data: Vec<u8>) -> Result<(), String> {
        let at = offset as usize;
        assert!(data.iter().any(|byte| *byte != 0));
        self.0[at..at + data.len()].copy_from_slice(&data);
        Ok(())
    }

    async fn flush(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// Data of which half can be compressed.
fn some_data(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut data = vec![0; SIZE];
    for chunk in data.chunks_exact_mut(16) {
        chunk[..8].copy_from_slice(&random.draw().to_le_bytes());
    }
    data
}

async fn back_up(store: &Store, number: u128, data: &[u8]) -> Result<Created, Failure> {
    let mut source = Bytes::new(data);
    create(store, &request(number), &mut source, &Progress::default()).await
}

async fn restored(store: &Store, number: u128) -> Result<Vec<u8>, Failure> {
    let mut device = Device(vec![0; SIZE]);
    let id = request(number).id;
    restore(store, VOLUME, id, &mut device, &Progress::default()).await?;
    Ok(device.0)
}

async fn removed(store: &Store, number: u128) -> Result<crate::Removed, Failure> {
    let id = request(number).id;
    remove(store, VOLUME, id, HOLDER, &Progress::default()).await
}

async fn files(inner: &dyn ObjectStore) -> BTreeMap<String, u64> {
    let all: Vec<_> = inner.list(None).try_collect().await.unwrap();
    let all = all.into_iter();
    all.map(|meta| (meta.location.to_string(), meta.size))
        .collect()
}

/// A restore has the data of its backup. A second backup shares unchanged objects, which a deletion
/// of the first one keeps. The deletion of the last one leaves nothing.
#[test]
fn a_second_backup_shares_unchanged_objects() {
    runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::from("some/prefix"));
        let mut data = some_data(1);
        // The second object is all zero.
        data[OBJECT_BYTES..2 * OBJECT_BYTES].fill(0);
        let first = back_up(&store, 1, &data).await.unwrap().header;
        assert_eq!((first.objects, first.base), (2, None));
        assert_eq!(first.new_bytes, first.stored_bytes);
        assert!(
            first.stored_bytes < 5 * MIB as u64,
            "{}",
            first.stored_bytes
        );
        assert_eq!(restored(&store, 1).await.unwrap(), data);

        let old = data.clone();
        data[SIZE - 1] ^= 1;
        data[OBJECT_BYTES] = 7;
        let second = back_up(&store, 2, &data).await.unwrap().header;
        assert_eq!((second.objects, second.base), (3, Some(first.id)));
        assert!(second.new_bytes < second.stored_bytes);
        assert_eq!(files(&*inner).await.len(), 2 + 2 + 2);
        assert_eq!(restored(&store, 2).await.unwrap(), data);
        let found = store.list(None).await.unwrap();
        assert_eq!(found.backups, [first.clone(), second]);
        assert_eq!(store.volume_of(first.id).await.unwrap(), VOLUME);

        // The first object of the first backup is also one of the second.
        let gone = removed(&store, 1).await.unwrap();
        assert_eq!((gone.objects, gone.deferred), (1, false));
        assert_eq!(restored(&store, 2).await.unwrap(), data);
        assert!(matches!(
            restored(&store, 1).await,
            Err(Failure::Unknown(_))
        ));
        assert!(matches!(removed(&store, 1).await, Err(Failure::Unknown(_))));
        let third = back_up(&store, 3, &old).await.unwrap().header;
        assert_eq!((third.objects, third.base), (2, Some(request(2).id)));
        removed(&store, 2).await.unwrap();
        assert_eq!(restored(&store, 3).await.unwrap(), old);
        removed(&store, 3).await.unwrap();
        assert!(files(&*inner).await.is_empty());
    });
}

/// A backup is newer than the last one, whatever the clock says.
#[test]
fn a_clock_that_was_set_back_changes_no_order() {
    runtime().block_on(async {
        let store = Store::new(Arc::new(InMemory::new()), Path::default());
        let data = some_data(2);
        let first = back_up(&store, 9, &data).await.unwrap().header;
        for number in [3, 2] {
            back_up(&store, number, &data).await.unwrap();
        }
        let listed = store.list(None).await.unwrap().backups;
        let found: Vec<_> = listed.iter().map(|one| (one.id, one.created)).collect();
        let expected = [9, 3, 2].into_iter().zip(first.created..);
        let expected: Vec<_> = expected
            .map(|(number, created)| (request(number).id, created))
            .collect();
        assert_eq!(found, expected);
        assert_eq!(listed[2].base, Some(request(3).id));
    });
}

/// A full backup shares nothing.
#[test]
fn a_full_backup_shares_nothing() {
    runtime().block_on(async {
        let store = Store::new(Arc::new(InMemory::new()), Path::default());
        let data = some_data(2);
        back_up(&store, 1, &data).await.unwrap();
        let full = Request {
            full: true,
            ..request(3)
        };
        let mut source = Bytes::new(&data);
        let created = create(&store, &full, &mut source, &Progress::default()).await;
        let header = created.unwrap().header;
        assert_eq!((header.new_bytes, header.base), (header.stored_bytes, None));
    });
}

/// A volume that grew: its last object of then is a whole one now.
#[test]
fn a_volume_can_grow_between_backups() {
    runtime().block_on(async {
        let store = Store::new(Arc::new(InMemory::new()), Path::default());
        let mut data = some_data(3);
        back_up(&store, 1, &data).await.unwrap();
        data.extend_from_slice(&some_data(4));
        let grown = Request {
            size_bytes: data.len() as u64,
            ..request(2)
        };
        let mut source = Bytes::new(&data);
        let created = create(&store, &grown, &mut source, &Progress::default()).await;
        assert_eq!(created.unwrap().header.objects, 5);
        let mut device = Device(vec![0; data.len()]);
        let header = restore(&store, VOLUME, grown.id, &mut device, &Progress::default()).await;
        assert_eq!(header.unwrap().size_bytes, data.len() as u64);
        assert_eq!(device.0, data);
    });
}

/// Another daemon backs up the volume: a deletion leaves its objects, until the mark is old.
#[test]
fn objects_of_another_daemons_backup_stay() {
    runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        let data = some_data(5);
        back_up(&store, 1, &data).await.unwrap();
        let (other, running) = (Uuid::from_u128(0x99), Uuid::from_u128(0x98));
        store.mark(VOLUME, other, running).await.unwrap();
        let gone = removed(&store, 1).await.unwrap();
        assert!(gone.deferred && gone.objects == 0, "{gone:?}");
        assert_eq!(files(&*inner).await.len(), 1 + 3);
        // The other daemon's backup is complete, and shares an object.
        store.unmark(VOLUME, other, running).await.unwrap();
        back_up(&store, 2, &data).await.unwrap();
        assert_eq!(removed(&store, 2).await.unwrap().objects, 6);
        assert!(files(&*inner).await.is_empty());
    });
}

/// A cancelled backup leaves nothing. A cancelled restore ends.
#[test]
fn a_cancelled_backup_leaves_nothing() {
    struct Waits<'a>(Bytes, &'a Progress);
    impl Source for Waits<'_> {
        async fn begin(&mut self) -> Result<u64, String> {
            self.0.begin().await
        }
        async fn next(&mut self) -> Result<Option<Piece>, String> {
            if self.0.next == 2 {
                self.1.cancel();
                std::future::pending::<()>().await;
            }
            self.0.next().await
        }
    }
    runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        let progress = Progress::default();
        let mut source = Waits(Bytes::new(&some_data(6)), &progress);
        let ended = create(&store, &request(1), &mut source, &progress).await;
        assert!(matches!(ended, Err(Failure::Cancelled)), "{ended:?}");
        assert!(files(&*inner).await.is_empty());

        let data = some_data(6);
        back_up(&store, 2, &data).await.unwrap();
        let mut device = Device(vec![0; SIZE]);
        let ended = restore(&store, VOLUME, request(2).id, &mut device, &progress).await;
        assert!(matches!(ended, Err(Failure::Cancelled)), "{ended:?}");
    });
}

/// An error of the snapshot ends the backup, which leaves nothing.
#[test]
fn an_error_of_the_snapshot_leaves_nothing() {
    struct Fails(Bytes);
    impl Source for Fails {
        async fn begin(&mut self) -> Result<u64, String> {
            self.0.begin().await
        }
        async fn next(&mut self) -> Result<Option<Piece>, String> {
            match self.0.next {
                1 => Err("the disk is gone".into()),
                _ => self.0.next().await,
            }
        }
    }
    runtime().block_on(async {
        let inner = Arc::new(InMemory::new());
        let store = Store::new(inner.clone(), Path::default());
        let mut source = Fails(Bytes::new(&some_data(7)));
        let ended = create(&store, &request(1), &mut source, &Progress::default()).await;
        let text = ended.unwrap_err().to_string();
        assert_eq!(text, "cannot read the snapshot: the disk is gone");
        assert!(files(&*inner).await.is_empty());
    });
}

#[test]
fn progress_counts_objects() {
    runtime().block_on(async {
        let store = Store::new(Arc::new(InMemory::new()), Path::default());
        let progress = Progress::default();
        let mut source = Bytes::new(&some_data(8));
        let created = create(&store, &request(1), &mut source, &progress).await;
        let bytes = created.unwrap().header.new_bytes;
        assert_eq!(
            (progress.total(), progress.done(), progress.stored()),
            (3, 3, bytes)
        );
        let progress = Progress::default();
        let verified = verify(&store, VOLUME, request(1).id, &progress).await;
        assert!(verified.unwrap().damaged.is_empty());
        assert_eq!(
            (progress.total(), progress.done(), progress.stored()),
            (3, 3, bytes)
        );
    });
}

/// Overwrites a file of the store.
async fn put(inner: &dyn ObjectStore, path: &str, bytes: Vec<u8>) {
    inner.put(&Path::from(path), bytes.into()).await.unwrap();
}

async fn get(inner: &dyn ObjectStore, path: &str) -> Vec<u8> {
    let found = inner.get(&Path::from(path)).await.unwrap();
    found.bytes().await.unwrap().to_vec()
}

//! Tests of both stores. Both pass the conformance tests. The embedded store survives a power cut
//! after any write, reports errors of its file, and recovers from a full disk. The store in memory
//! fails as scripted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use nacre_reactor::Nanos;
use parking_lot::Mutex;
use redb::Database;
use tempfile::TempDir;

use super::suite::{Subject, block_on, record, run};
use super::*;

struct Memory(MemoryStore);

impl Subject for Memory {
    fn store(&self) -> Arc<dyn VolumeStore> {
        Arc::new(self.0.clone())
    }

    fn reopen(&mut self) {}
}

struct Embedded {
    store: Option<Arc<EmbeddedStore>>,
    dir: TempDir,
}

impl Embedded {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let mut new = Self { store: None, dir };
        new.reopen();
        new
    }
}

impl Subject for Embedded {
    fn store(&self) -> Arc<dyn VolumeStore> {
        Arc::clone(self.store.as_ref().expect("open")) as Arc<dyn VolumeStore>
    }

    fn reopen(&mut self) {
        self.store = None;
        let store = EmbeddedStore::open(self.dir.path()).expect("it opens");
        self.store = Some(Arc::new(store));
    }
}

#[test]
fn in_memory() {
    run(|| Memory(MemoryStore::new()));
}

#[test]
fn embedded() {
    run(Embedded::new);
}

fn next(record: &VolumeRecord) -> VolumeRecord {
    VolumeRecord {
        revision: record.revision + 1,
        ..record.clone()
    }
}

/// `None`: no reply yet.
fn look<T>(future: &mut StoreFuture<T>) -> Option<Result<T, StoreError>> {
    match future
        .as_mut()
        .poll(&mut Context::from_waker(Waker::noop()))
    {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

/// Every plan has its effect, and the caller of each call is known.
#[test]
fn failures_of_the_store_in_memory() {
    let store = MemoryStore::new();
    let (old, new) = (record("ant"), next(&record("ant")));
    block_on(store.create(old.clone())).expect("created");
    let swap = || store.swap(old.version(), new.clone());

    store.plan_next([Outcome::Refuse, Outcome::Lose].map(Plan::outcome));
    let unavailable = |answer| matches!(answer, Err(StoreError::Unavailable { .. }));
    assert!(unavailable(block_on(swap())));
    assert_eq!(store.records(), std::slice::from_ref(&old));
    assert!(unavailable(block_on(swap())));
    assert_eq!(
        store.records(),
        std::slice::from_ref(&new),
        "carried out all the same"
    );

    store.plan_next([Plan::outcome(Outcome::Intrude)]);
    let third = next(&new);
    let answer = block_on(store.swap(new.version(), third.clone()));
    let found = Stamp {
        revision: new.revision + 1,
        ..new.version()
    };
    let (id, expected) = (new.id, new.version());
    let conflict = StoreError::Conflict {
        id,
        expected,
        found,
    };
    assert_eq!(answer, Err(conflict));

    store.plan(Some(Box::new(|call| {
        let cut_off = call.client == 7 && call.request == StoreRequest::Load;
        Plan::outcome(if cut_off {
            Outcome::Refuse
        } else {
            Outcome::Do
        })
    })));
    assert!(block_on(store.load(id)).is_ok());
    assert!(block_on(store.client(7).load(id)).is_err());
    assert!(block_on(store.client(7).list()).is_ok());
}

/// Calls in progress proceed at their time, in order, also when their futures were dropped.
#[test]
fn a_store_in_memory_takes_its_time() {
    let store = MemoryStore::new();
    let (old, new) = (record("ant"), next(&record("ant")));
    block_on(store.create(old.clone())).expect("created");
    let at = |ms| Nanos::ZERO + Duration::from_millis(ms);
    store.plan_next([(5, 5), (6, 0), (1 << 50, 0)].map(|(before, after)| Plan {
        before: Duration::from_millis(before),
        outcome: Outcome::Do,
        after: Duration::from_millis(after),
    }));
    let mut first = store.swap(old.version(), new.clone());
    let mut second = store.swap(old.version(), new.clone());
    drop(store.delete(old.id, new.version()));
    assert_eq!((look(&mut first), look(&mut second)), (None, None));
    assert_eq!(store.next_due(), Some(at(5)));
    store.advance(at(4));
    assert_eq!(store.records(), [old]);
    store.advance(at(5));
    assert_eq!(store.records(), std::slice::from_ref(&new));
    assert_eq!((look(&mut first), store.next_due()), (None, Some(at(6))));
    store.advance(at(9));
    assert!(matches!(
        look(&mut second),
        Some(Err(StoreError::Conflict { .. }))
    ));
    assert_eq!(look(&mut first), None);
    store.advance(at(10));
    assert_eq!(look(&mut first), Some(Ok(())));
    assert_eq!(store.records(), [new], "the deletion never arrives");
}

#[test]
#[should_panic(expected = "a swap from")]
fn a_swap_must_raise_the_version() {
    drop(MemoryStore::new().swap(record("ant").version(), record("ant")));
}

/// A second opener and the dump are refused while the file is open; the dump shows its contents.
#[test]
fn one_opener_at_a_time() {
    let subject = Embedded::new();
    let path = subject.dir.path().join(FILE);
    let open = || EmbeddedStore::open(subject.dir.path()).map(drop);
    for name in ["zebra", "ant"] {
        block_on(subject.store().create(record(name))).expect("created");
    }
    let in_use = StoreError::InUse {
        path: path.display().to_string(),
    };
    assert_eq!(open(), Err(in_use.clone()));
    assert_eq!(dump(&path), Err(in_use));
    let Embedded { store, dir } = subject;
    drop(store);
    let before = std::fs::read(&path).expect("the file");
    let shown = dump(&path).expect("a dump");
    assert_eq!(shown["schema"], 1);
    assert_eq!(shown["damaged"], serde_json::json!([]));
    let json = |name| serde_json::to_value(record(name)).expect("plain");
    let want = ["zebra", "ant"].map(|name| crate::model::shown(json(name)));
    assert_eq!(shown["volumes"], serde_json::Value::from(want.to_vec()));
    assert_eq!(std::fs::read(&path).expect("the file"), before);
    assert!(matches!(
        dump(&dir.path().join("no such file")),
        Err(StoreError::Unavailable { .. })
    ));
}

/// A file of another kind, one of a later version, and an unreadable record.
#[test]
fn damage_is_reported_with_its_remedy() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join(FILE);
    let open = || EmbeddedStore::open(dir.path()).map(drop);
    let damage = |result: Result<(), StoreError>| match result {
        Err(StoreError::Damaged { what }) => {
            assert!(what.contains("backup"), "no remedy: {what}");
        }
        other => panic!("{other:?}"),
    };
    std::fs::write(&path, b"no database at all").expect("written");
    damage(open());
    damage(dump(&path).map(drop));
    std::fs::remove_file(&path).expect("removed");
    open().expect("a new one");
    let whole = std::fs::read(&path).expect("the file");
    std::fs::write(&path, &whole[..whole.len() / 2]).expect("written");
    damage(open());
    damage(dump(&path).map(drop));

    std::fs::write(&path, &whole).expect("written");
    let change = |key: &str, value: u64, record: Option<&[u8]>| {
        let database = Database::open(&path).expect("it opens");
        let txn = database.begin_write().expect("a transaction");
        {
            let meta = redb::TableDefinition::<&str, u64>::new("meta");
            let mut meta = txn.open_table(meta).expect("the table");
            meta.insert(key, value).expect("inserted");
            let volumes = redb::TableDefinition::<u64, &[u8]>::new("volumes");
            let mut volumes = txn.open_table(volumes).expect("the table");
            if let Some(bytes) = record {
                volumes.insert(0, bytes).expect("inserted");
            }
        }
        txn.commit().expect("committed");
    };
    change("schema", 1, Some(b"{\"id\": 5"));
    let store = EmbeddedStore::open(dir.path()).expect("it opens");
    damage(block_on(store.list()).map(drop));
    drop(store);
    let shown = dump(&path).expect("a dump");
    assert_eq!(shown["damaged"][0]["text"], "{\"id\": 5");
    change("schema", 2, None);
    let path = path.display().to_string();
    assert_eq!(open(), Err(StoreError::Newer { path, found: 2 }));
}

/// Memory that records every operation, so that the file at any moment can be rebuilt, and that is
/// full on demand.
#[derive(Debug, Clone, Default)]
struct Recorder {
    inner: Arc<Mutex<(Vec<u8>, Vec<Step>)>>,
    full: Arc<AtomicBool>,
}

#[derive(Debug, Clone)]
enum Step {
    Len(u64),
    Write(u64, Vec<u8>),
    Sync,
}

impl Recorder {
    fn holding(image: &[u8]) -> Self {
        let new = Self::default();
        new.inner.lock().0 = image.to_vec();
        new
    }

    fn steps(&self) -> Vec<Step> {
        self.inner.lock().1.clone()
    }

    fn open(&self) -> Result<EmbeddedStore, StoreError> {
        let backend = self.clone();
        let open = move || Database::builder().create_with_backend(backend.clone());
        EmbeddedStore::on(PathBuf::from("(memory)"), Box::new(open))
    }

    fn room(&self) -> Result<(), std::io::Error> {
        if self.full.load(Ordering::Relaxed) {
            Err(std::io::ErrorKind::StorageFull.into())
        } else {
            Ok(())
        }
    }
}

impl redb::StorageBackend for Recorder {
    fn len(&self) -> Result<u64, std::io::Error> {
        Ok(self.inner.lock().0.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), std::io::Error> {
        let inner = self.inner.lock();
        let bytes = inner.0.get(offset as usize..offset as usize + out.len());
        out.copy_from_slice(bytes.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), std::io::Error> {
        self.room()?;
        let mut inner = self.inner.lock();
        inner.0.resize(len as usize, 0);
        inner.1.push(Step::Len(len));
        Ok(())
    }

    fn sync_data(&self) -> Result<(), std::io::Error> {
        self.room()?;
        self.inner.lock().1.push(Step::Sync);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        self.room()?;
        let mut inner = self.inner.lock();
        inner.0[offset as usize..][..data.len()].copy_from_slice(data);
        inner.1.push(Step::Write(offset, data.to_vec()));
        Ok(())
    }
}

fn apply(image: &mut Vec<u8>, step: &Step) {
    match step {
        Step::Len(len) => image.resize(*len as usize, 0),
        Step::Write(offset, data) => image[*offset as usize..][..data.len()].copy_from_slice(data),
        Step::Sync => {}
    }
}

/// Goal: after any power cut, the store opens, and holds the last acknowledged state or the state
/// in progress. Method: after every write of a run three images: all writes so far, only synced
/// writes and this write's first half, and synced writes with the last write alone.
#[test]
fn a_power_cut_after_any_write_leaves_old_or_new() {
    let live = Recorder::default();
    let store = live.open().expect("it opens");
    let mut states = vec![(live.steps().len(), Vec::new())];
    let mut current = record("ant");
    block_on(store.create(current.clone())).expect("created");
    for round in 0..10u64 {
        states.push((live.steps().len(), block_on(store.list()).expect("a list")));
        let other = record(&format!("other{}", round / 3 * 3));
        match round % 3 {
            0 => block_on(store.create(other)).expect("created"),
            1 => {
                let new = next(&current);
                block_on(store.swap(current.version(), new.clone())).expect("swapped");
                current = new;
            }
            _ => block_on(store.delete(other.id, other.version())).expect("deleted"),
        }
    }
    states.push((live.steps().len(), block_on(store.list()).expect("a list")));
    drop(store);
    let steps = live.steps();
    let (mut image, mut synced) = (Vec::new(), Vec::new());
    let mut cuts = 0;
    for (at, step) in steps.iter().enumerate() {
        apply(&mut image, step);
        if matches!(step, Step::Sync) {
            synced.clone_from(&image);
            continue;
        }
        // Before the store was created there is nothing to lose.
        let Some(acknowledged) = states.iter().rposition(|(done, _)| *done <= at + 1) else {
            continue;
        };
        let mut images = vec![image.clone()];
        for torn in [false, true] {
            let mut alone = synced.clone();
            alone.resize(image.len(), 0);
            match step {
                Step::Write(offset, data) if torn => {
                    apply(
                        &mut alone,
                        &Step::Write(*offset, data[..data.len() / 2].to_vec()),
                    );
                }
                step => apply(&mut alone, step),
            }
            images.push(alone);
        }
        for (kind, image) in images.iter().enumerate() {
            let store = Recorder::holding(image).open();
            let found = store.and_then(|store| block_on(store.list()));
            let found = found.unwrap_or_else(|e| panic!("cut {kind} after step {at}: {e}"));
            let old = &states[acknowledged].1;
            let new = &states[(acknowledged + 1).min(states.len() - 1)].1;
            assert!(
                found == *old || found == *new,
                "cut {kind} after step {at}: {found:?}, neither {old:?} nor {new:?}"
            );
            cuts += 1;
        }
    }
    assert!(cuts > 60, "only {cuts} cuts were tried");
}

/// While the disk is full changes are refused, and afterwards they succeed, by the same store.
#[test]
fn a_full_disk_that_has_room_again() {
    let disk = Recorder::default();
    let store = disk.open().expect("it opens");
    let (old, new) = (record("ant"), next(&record("ant")));
    block_on(store.create(old.clone())).expect("created");
    disk.full.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let answer = block_on(store.swap(old.version(), new.clone()));
        assert!(
            matches!(answer, Err(StoreError::Unavailable { .. })),
            "{answer:?}"
        );
    }
    disk.full.store(false, Ordering::Relaxed);
    assert_eq!(block_on(store.load(old.id)), Ok(old.clone()));
    assert_eq!(block_on(store.swap(old.version(), new.clone())), Ok(()));
    assert_eq!(block_on(store.load(old.id)), Ok(new));
}

/// A folder that cannot be created is reported as unreachable, not as damaged.
#[test]
fn no_folder() {
    let answer = EmbeddedStore::open(Path::new("/dev/null/volumes")).map(drop);
    assert!(
        matches!(answer, Err(StoreError::Unavailable { .. })),
        "{answer:?}"
    );
}

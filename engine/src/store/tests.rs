//! Goal: an acknowledged commit survives any stop; an unacknowledged one survives completely or not
//! at all; order and keys are kept.
//!
//! Method: the rules on a file; a power cut after each write of a run, on a backend that records
//! all writes; and a child process killed (SIGKILL) while it commits.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::json;

use super::*;

fn keys(store: &mut impl StateStore) -> Vec<String> {
    store.load().unwrap().into_iter().map(|r| r.key).collect()
}

fn put(key: &str, n: u64) -> Change {
    Change::put(key, "make", json!({ "n": n }))
}

#[test]
fn records_keep_their_order_and_are_replaced_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = RedbStore::open(dir.path()).unwrap();
    for (n, key) in ["c", "a", "b", "s/1/ns/1", "s/1", "s/10"]
        .into_iter()
        .enumerate()
    {
        store.commit(&put(key, n as u64)).unwrap();
    }
    store
        .commit(&put("a", 99).and(Change::remove("b")))
        .unwrap();
    assert_eq!(keys(&mut store), ["c", "a", "s/1/ns/1", "s/1", "s/10"]);
    assert_eq!(store.load().unwrap()[1].params["n"], 99);
    store
        .commit(&Change(vec![
            Edit::RemoveAll("s/1/".into()),
            Edit::Remove("nothing".into()),
        ]))
        .unwrap();
    store.commit(&put("b", 1)).unwrap();
    assert_eq!(
        keys(&mut store),
        ["c", "a", "s/1", "s/10", "b"],
        "a reused name moves to the end"
    );
    drop(store);
    let mut store = RedbStore::open(dir.path()).unwrap();
    assert_eq!(keys(&mut store), ["c", "a", "s/1", "s/10", "b"]);
}

#[test]
fn a_second_daemon_and_a_later_schema_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = RedbStore::open(dir.path()).unwrap();
    let refused = RedbStore::open(dir.path()).unwrap_err();
    assert!(
        matches!(refused, StoreError::InUse { pid: Some(p), .. } if p == std::process::id()),
        "{refused}"
    );
    store
        .transact(|txn| {
            let mut meta = txn.open_table(redb::TableDefinition::<&str, u64>::new("meta"))?;
            meta.insert("schema", SCHEMA_VERSION + 1)?;
            Ok(())
        })
        .unwrap();
    drop(store);
    let refused = RedbStore::open(dir.path()).unwrap_err();
    assert!(
        matches!(refused, StoreError::Newer { found, .. } if found == SCHEMA_VERSION + 1),
        "{refused}"
    );
}

/// Storage that records every operation, so that the file can be rebuilt at any point.
#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<(Vec<u8>, Vec<Op>)>>);

#[derive(Debug, Clone)]
enum Op {
    Len(u64),
    Write(u64, Vec<u8>),
    Sync,
}

impl redb::StorageBackend for Recorder {
    fn len(&self) -> Result<u64, std::io::Error> {
        Ok(self.0.lock().0.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), std::io::Error> {
        let inner = self.0.lock();
        let at = offset as usize;
        out.copy_from_slice(
            inner
                .0
                .get(at..at + out.len())
                .ok_or(std::io::ErrorKind::UnexpectedEof)?,
        );
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), std::io::Error> {
        let mut inner = self.0.lock();
        inner.0.resize(len as usize, 0);
        inner.1.push(Op::Len(len));
        Ok(())
    }

    fn sync_data(&self) -> Result<(), std::io::Error> {
        self.0.lock().1.push(Op::Sync);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        let mut inner = self.0.lock();
        let at = offset as usize;
        inner.0[at..at + data.len()].copy_from_slice(data);
        inner.1.push(Op::Write(offset, data.to_vec()));
        Ok(())
    }
}

#[test]
fn a_power_cut_after_any_write_leaves_old_or_new() {
    let live = Recorder::default();
    let storage = live.clone();
    let mut store = RedbStore::on_backend(move || storage.clone()).unwrap();
    // The expected content after each commit, and the number of operations until then.
    let mut states = vec![(live.0.lock().1.len(), Vec::new())];
    for n in 0..12u64 {
        let change = match n % 4 {
            3 => Change::remove(format!("k{}", n - 3)).and(put(&format!("k{n}"), n)),
            _ => put(&format!("k{n}"), n),
        };
        store.commit(&change).unwrap();
        states.push((live.0.lock().1.len(), keys(&mut store)));
    }
    drop(store);
    let ops = live.0.lock().1.clone();
    let mut image = Vec::new();
    let mut cuts = 0;
    for (at, op) in ops.iter().enumerate() {
        match op {
            Op::Len(len) => image.resize(*len as usize, 0),
            Op::Write(offset, data) => {
                image[*offset as usize..][..data.len()].copy_from_slice(data)
            }
            Op::Sync => continue,
        }
        // Before the store exists there is nothing to lose.
        let Some(acknowledged) = states.iter().rposition(|(done, _)| *done <= at + 1) else {
            continue;
        };
        let cut = Recorder::default();
        cut.0.lock().0 = image.clone();
        let found = keys(&mut RedbStore::on_backend(move || cut.clone()).unwrap());
        let old = &states[acknowledged].1;
        let new = &states[(acknowledged + 1).min(states.len() - 1)].1;
        assert!(
            found == *old || found == *new,
            "cut after operation {at}: {found:?}, neither {old:?} nor {new:?}"
        );
        cuts += 1;
    }
    assert!(cuts > 24, "only {cuts} cuts were tried");
}

/// Storage that fails from operation `left.0` on, for `left.1` operations.
#[derive(Debug, Clone, Default)]
struct Failing {
    disk: Recorder,
    left: Arc<Mutex<Option<(u64, u64)>>>,
}

impl Failing {
    fn step(&self) -> Result<(), std::io::Error> {
        let mut left = self.left.lock();
        match &mut *left {
            Some((0, 0)) => *left = None,
            Some((0, more)) => {
                *more -= 1;
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            Some((before, _)) => *before -= 1,
            None => {}
        }
        Ok(())
    }
}

impl redb::StorageBackend for Failing {
    fn len(&self) -> Result<u64, std::io::Error> {
        self.disk.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), std::io::Error> {
        self.step().and_then(|()| self.disk.read(offset, out))
    }

    fn set_len(&self, len: u64) -> Result<(), std::io::Error> {
        self.step().and_then(|()| self.disk.set_len(len))
    }

    fn sync_data(&self) -> Result<(), std::io::Error> {
        // Earlier writes may or may not have reached the disk; here they have.
        self.step().and_then(|()| self.disk.sync_data())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        self.step().and_then(|()| self.disk.write(offset, data))
    }
}

/// Goal: after a full disk, or a temporary failure, changes are accepted again without a restart.
/// Refused changes never appear, neither now nor after a crash. Method: every operation of a commit
/// fails in turn, alone or with many after it; then the disk is checked.
#[test]
fn a_failed_write_is_refused_and_does_not_return() {
    for more in [1, 2, 5, 200] {
        let mut refusals = 0;
        for at in 0.. {
            let storage = Failing::default();
            let (shared, disk) = (storage.clone(), storage.disk.clone());
            let mut store = RedbStore::on_backend(move || shared.clone()).unwrap();
            store.commit(&put("a", 1)).unwrap();
            store.commit(&put("b", 2)).unwrap();
            *storage.left.lock() = Some((at, more));
            let refused = put("x", 3).and(Change::remove("a")).and(put("b", 4));
            if store.commit(&refused).is_ok() {
                break;
            }
            refusals += 1;
            assert_eq!(keys(&mut store), ["a", "b"], "operation {at}");
            let is_over = storage.left.lock().is_none();
            if is_over {
                // A crash now.
                let crashed = Recorder::default();
                crashed.0.lock().0 = disk.0.lock().0.clone();
                let mut found = RedbStore::on_backend(move || crashed.clone()).unwrap();
                assert_eq!(keys(&mut found), ["a", "b"], "operation {at}");
                assert_eq!(found.load().unwrap()[1].params["n"], 2, "operation {at}");
            }
            while storage.left.lock().is_some() {
                // While the disk is full, changes are refused with the reason.
                match store.commit(&put("c", 5)) {
                    Ok(()) => break,
                    Err(error) => assert!(error.to_string().contains("memory"), "{error}"),
                }
                assert_eq!(keys(&mut store), ["a", "b"], "operation {at}");
            }
            store.commit(&put("c", 5)).unwrap();
            let all = ["a", "b", "c"];
            assert_eq!(keys(&mut store), all, "operation {at}");
            drop(store);
            let mut store = RedbStore::on_backend(move || disk.clone()).unwrap();
            assert_eq!(keys(&mut store), all, "operation {at}");
            store.commit(&put("d", 6)).unwrap();
            assert_eq!(keys(&mut store), ["a", "b", "c", "d"]);
        }
        assert!(refusals > 3, "only {refusals} operations could fail");
    }
}

/// Goal: a damaged file is refused with a message, unless the damage is harmless. Method: each page
/// in turn is overwritten, and the file is truncated there.
#[test]
fn a_damaged_file_is_refused_with_a_message() {
    const PAGE: usize = 4096;
    let whole = Recorder::default();
    let storage = whole.clone();
    let mut store = RedbStore::on_backend(move || storage.clone()).unwrap();
    for n in 0..40 {
        store.commit(&put(&format!("k{n}"), n)).unwrap();
    }
    drop(store);
    let image = whole.0.lock().0.clone();
    let mut refused = 0;
    let is_used = |at: &usize| image[*at..].iter().take(PAGE).any(|byte| *byte != 0);
    for at in (0..image.len()).step_by(PAGE).filter(is_used) {
        let filled = |byte| {
            let mut image = image.clone();
            let end = image.len().min(at + PAGE);
            image[at..end].fill(byte);
            image
        };
        for image in [filled(0), filled(0xff), image[..at].to_vec()] {
            let damaged = Recorder::default();
            damaged.0.lock().0 = image;
            let opened = RedbStore::on_backend(move || damaged.clone());
            let used = opened.and_then(|mut store| {
                store.load()?;
                store.commit(&put("more", 1))
            });
            refused += usize::from(used.is_err());
        }
    }
    assert!(refused > 0, "no damage was detected");
}

const CHILD: &str = "NACRE_TEST_STORE_CHILD";

/// Not a test itself: the child process of [`a_killed_process_loses_nothing_acknowledged`].
#[test]
fn child_commits_until_killed() {
    let Some(dir) = std::env::var_os(CHILD) else {
        return;
    };
    let mut store = RedbStore::open(Path::new(&dir)).unwrap();
    let from = store.load().unwrap().len() as u64;
    for n in from.. {
        store.commit(&put(&format!("k{n}"), n)).unwrap();
        println!("\nacknowledged {n}");
    }
}

#[test]
fn a_killed_process_loses_nothing_acknowledged() {
    let dir = tempfile::tempdir().unwrap();
    let mut kept = 0;
    for round in 0..4u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "store::tests::child_commits_until_killed",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(CHILD, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut last = None;
        for line in lines.map_while(Result::ok) {
            if let Some(n) = line.strip_prefix("acknowledged ") {
                last = Some(n.parse::<u64>().unwrap());
                if n.parse::<u64>().unwrap() >= kept + 20 + 7 * round {
                    // SIGKILL at an arbitrary moment.
                    let _ = child.kill();
                }
            }
        }
        child.wait().unwrap();
        let last = last.expect("the child committed something");
        let mut store = RedbStore::open(dir.path()).unwrap();
        let found = keys(&mut store);
        let whole: Vec<String> = (0..found.len()).map(|n| format!("k{n}")).collect();
        assert_eq!(found, whole, "a prefix, without holes");
        assert!(
            found.len() as u64 > last,
            "acknowledged {last}, found {}",
            found.len()
        );
        kept = found.len() as u64;
    }
}

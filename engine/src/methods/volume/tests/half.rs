//! Goal: a volume is published completely or not at all, whenever the daemon dies. Method: the
//! store drops everything after a given number of commits, as after a kill; the next start is
//! checked.

use std::path::Path;

use nacre_random_ports::local_port;
use serde_json::{Value, json};

use super::super::super::testing::TestDaemon;
use super::{file, until};
use crate::config::Settings;
use crate::services::volumes::published::PUBLISH;
use crate::store::{Change, Record, RedbStore, StateStore, Store, StoreError};

const NQN: &str = "nqn.2025-01.io.nacre:v";

/// A store that keeps a given number of commits and drops all later ones.
struct Dying {
    inner: RedbStore,
    left: usize,
    /// Later commits fail instead, and the daemon continues.
    fails: bool,
}

impl StateStore for Dying {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        self.inner.load()
    }

    fn commit(&mut self, change: &Change) -> Result<(), StoreError> {
        match (self.left.checked_sub(1), self.fails) {
            (Some(left), _) => {
                self.left = left;
                self.inner.commit(change)
            }
            (None, false) => Ok(()),
            (None, true) => Err(StoreError::Io {
                what: "write",
                path: "state".into(),
                source: std::io::ErrorKind::StorageFull.into(),
            }),
        }
    }
}

fn test_daemon(dir: &Path, left: usize, fails: bool) -> TestDaemon {
    let dir = dir.join("state");
    let inner = RedbStore::open(&dir).unwrap();
    let dying = Dying { inner, left, fails };
    let daemon = TestDaemon::with(Settings::default(), Some(Store::on(dying, &dir)));
    for record in daemon.engine.journal.waiting() {
        daemon.run(daemon.engine.replay(&record));
    }
    daemon
}

fn publish_params() -> Value {
    let port = local_port().to_string();
    let listener = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port });
    let host = "nqn.2025-01.io.nacre:host";
    json!({ "name": "v", "hosts": [host], "listeners": [listener] })
}

/// True if the volume is published with everything that was requested. Panics if it is half
/// published.
fn is_published(daemon: &TestDaemon, when: &str) -> bool {
    let all = daemon.call("nvmf_get_subsystems", Value::Null);
    let ours = all.as_array().unwrap().iter().find(|s| s["nqn"] == NQN);
    let volume = daemon.call("volume_get", json!({ "name": "v" }));
    let Some(found) = ours else {
        assert_eq!(volume["subsystems"], json!([]), "{when}");
        return false;
    };
    for part in ["namespaces", "hosts", "listen_addresses"] {
        assert_eq!(
            found[part].as_array().unwrap().len(),
            1,
            "{when}: {found:#}"
        );
    }
    assert_eq!(volume["subsystems"], json!([NQN]), "{when}");
    let again = daemon.refused(PUBLISH, publish_params());
    assert_eq!(again.code, -17, "{when}");
    true
}

#[test]
fn a_crash_while_publishing_leaves_no_half() {
    let (mut undone, mut done) = (0, 0);
    // The first commit of a start records that the file is open. A daemon that died before it wrote
    // nothing to the file.
    for commits in 1.. {
        let dir = tempfile::tempdir().unwrap();
        {
            let daemon = test_daemon(dir.path(), usize::MAX, false);
            file(&daemon, dir.path(), "a", 8);
            daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
        }
        {
            let daemon = test_daemon(dir.path(), commits, false);
            until(&daemon, "open", |v| v["state"] == "healthy");
            daemon.call(PUBLISH, publish_params());
        }
        let when = format!("dead after {commits} commits");
        let daemon = test_daemon(dir.path(), usize::MAX, false);
        until(&daemon, "open", |v| v["state"] == "healthy");
        if is_published(&daemon, &when) {
            done += 1
        } else {
            undone += 1;
            daemon.call(PUBLISH, publish_params());
            assert!(is_published(&daemon, "again"));
        }
        // Further commits are not part of publishing.
        if done == 2 {
            break;
        }
        assert!(commits < 20, "it is never published");
    }
    assert!(undone > 0, "no commit before publishing");
}

/// Goal: if the store refuses the commit, everything created is removed at once.
#[test]
fn publishing_is_undone_if_the_store_refuses() {
    let dir = tempfile::tempdir().unwrap();
    {
        let daemon = test_daemon(dir.path(), usize::MAX, false);
        file(&daemon, dir.path(), "a", 8);
        daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
    }
    let daemon = test_daemon(dir.path(), 0, true);
    until(&daemon, "open", |v| v["state"] == "healthy");
    let refused = daemon.refused(PUBLISH, publish_params());
    assert!(
        format!("{refused:?}").contains("could not be stored"),
        "{refused:?}"
    );
    assert!(!is_published(&daemon, "refused"));
}

/// Goal: a daemon that dies while it unpublishes leaves the volume published completely or not at
/// all. Method: as for publishing, from a published volume.
#[test]
fn a_crash_while_unpublishing_leaves_no_half() {
    let (mut undone, mut done) = (0, 0);
    // The first commit records that the file is open.
    for commits in 1..20 {
        let dir = tempfile::tempdir().unwrap();
        {
            let daemon = test_daemon(dir.path(), usize::MAX, false);
            file(&daemon, dir.path(), "a", 8);
            daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
            daemon.call(PUBLISH, publish_params());
        }
        {
            let daemon = test_daemon(dir.path(), commits, false);
            until(&daemon, "open", |v| v["state"] == "healthy");
            daemon.call("volume_unpublish", json!({ "name": "v" }));
        }
        let when = format!("dead after {commits} commits");
        let daemon = test_daemon(dir.path(), usize::MAX, false);
        until(&daemon, "open", |v| v["state"] == "healthy");
        if is_published(&daemon, &when) {
            undone += 1;
            daemon.call("volume_unpublish", json!({ "name": "v" }));
            assert!(!is_published(&daemon, "again"));
        } else {
            done += 1;
            let again = daemon.refused("volume_unpublish", json!({ "name": "v" }));
            assert_eq!(again.code, -2, "{when}");
        }
        if done == 2 {
            break;
        }
    }
    assert!(undone > 0 && done == 2, "{undone} {done}");
}

/// Goal: if the store refuses the commit, the volume stays published.
#[test]
fn unpublishing_is_undone_if_the_store_refuses() {
    let dir = tempfile::tempdir().unwrap();
    {
        let daemon = test_daemon(dir.path(), usize::MAX, false);
        file(&daemon, dir.path(), "a", 8);
        daemon.call("volume_create", json!({ "name": "v", "devices": ["a"] }));
        daemon.call(PUBLISH, publish_params());
    }
    let daemon = test_daemon(dir.path(), 0, true);
    until(&daemon, "open", |v| v["state"] == "healthy");
    daemon.refused("volume_unpublish", json!({ "name": "v" }));
    assert!(is_published(&daemon, "refused"));
}

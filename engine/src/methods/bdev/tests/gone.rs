//! Goal: removed devices, and devices that cannot be removed, do not affect others.

use serde_json::json;

use super::super::super::testing::TestDaemon;
use crate::config::Settings;
use crate::store::Store;

/// Goal: deleting a missing device deletes everything on it. Another device of the same name must
/// not get, for example, a namespace with an identity that hosts know.
#[test]
fn namespaces_of_a_deleted_missing_device_do_not_return() {
    const NQN: &str = "nqn.2026-01.org.example:a";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let state = dir.path().join("state");
    let start = || TestDaemon::with(Settings::default(), Some(Store::open(&state).unwrap()));
    {
        let daemon = start();
        let file = json!({ "name": "u", "filename": path, "block_size": 512 });
        daemon.call("bdev_uring_create", file);
        let passthru = json!({ "name": "p", "base_bdev_name": "u" });
        daemon.call("bdev_passthru_create", passthru);
        daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
        let namespace = json!({ "nqn": NQN, "namespace": { "bdev_name": "p" } });
        daemon.call("nvmf_subsystem_add_ns", namespace);
        let limit = json!({ "name": "p", "rw_ios_per_sec": 10000 });
        daemon.call("bdev_set_qos_limit", limit);
    }
    std::fs::remove_file(&path).unwrap();
    let daemon = start();
    assert_eq!(daemon.engine.journal.waiting().len(), 4);
    daemon.call("bdev_uring_delete", json!({ "name": "u" }));
    assert_eq!(daemon.engine.journal.waiting(), []);
    daemon.call(
        "bdev_null_create",
        json!({ "name": "p", "num_blocks": 2048, "block_size": 512 }),
    );
    daemon.call("state_retry", json!(null));
    let subsystem = &daemon.call("nvmf_get_subsystems", json!({ "nqn": NQN }))[0];
    assert_eq!(subsystem["namespaces"], json!([]));
}

/// Goal: I/O that never ends blocks only the call that deletes its device. Method: a reactor keeps
/// a queue on the device open.
#[test]
fn a_device_that_stays_open_does_not_block_other_calls() {
    thread_local! {
        static HELD: std::cell::RefCell<Option<Box<dyn nacre_bdev::Queue>>> = const { std::cell::RefCell::new(None) };
    }
    let mut settings = Settings::default();
    settings.rpc.deadline_s = 2;
    let daemon = TestDaemon::with(settings, None);
    let disk = |name: &str| json!({ "name": name, "num_blocks": 2048, "block_size": 512 });
    daemon.call("bdev_null_create", disk("n"));
    let plane = daemon.engine.plane().unwrap();
    let backing = plane.backing("n", "test".into()).unwrap();
    let reactor = plane.reactors[0].clone();
    let opened = daemon.run(reactor.run(move |_| {
        let queue = backing.open(&crate::plane::pool_here().unwrap());
        HELD.set(Some(queue.unwrap()));
    }));
    opened.unwrap();
    let refused = daemon.refused("bdev_null_delete", json!({ "name": "n" }));
    assert_eq!(refused.code, -110);
    let cause = refused.data.unwrap().cause;
    assert!(cause.contains("\"n\" is deleted, but I/O"), "{cause}");
    // Other calls proceed, and the name is free once the device is gone.
    daemon.call("bdev_null_create", disk("m"));
    assert_eq!(daemon.refused("bdev_null_create", disk("n")).code, -16);
    daemon.run(reactor.run(|_| HELD.set(None))).unwrap();
    let name = json!({ "name": "n" });
    for _ in 0..2000 {
        if daemon.try_call("bdev_null_create", disk("n")).is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    daemon.call("bdev_get_bdevs", name);
}

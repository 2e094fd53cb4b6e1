//! Goal: a namespace has its stored reservation from the moment it is created, by any path; an
//! unreadable one keeps the namespace away. Method: records and files as the daemon writes them.
//! The tests of the whole daemon cover reservations made by hosts.

use std::rc::Rc;

use nacre_nvmf_wire::Nqn;
use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::super::key;
use super::{NQN, UUID, malloc, namespace, subsystem};
use crate::config::{Settings, load_text};
use crate::services::reservations::store_reservations;
use crate::services::stored_reservation::RESTORE;
use crate::store::{Change, Store};

const HOLDER: &str = "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a";

fn stored_reservation(uuid: &str) -> Value {
    json!({
        "ptpl": true, "rtype": 2, "crkey": 10, "bdev_uuid": uuid, "holder_uuid": HOLDER,
        "registrants": [{ "rkey": 10, "host_uuid": HOLDER }], "generation": 4,
    })
}

fn keep(daemon: &TestDaemon, reservation: Value) {
    let own = key::reservation(&Nqn::new(NQN).unwrap(), 1);
    let record = json!({ "nqn": NQN, "nsid": 1, "reservation": reservation });
    let stored = daemon
        .engine
        .journal
        .commit(Change::put(own, RESTORE, record));
    daemon.run(stored).unwrap();
}

fn get(daemon: &TestDaemon) -> Value {
    daemon.call("nvmf_ns_get_reservation", json!({ "nqn": NQN, "nsid": 1 }))
}

fn expected() -> Value {
    json!({
        "known": true, "rtype": 2, "type": "exclusive access", "generation": 4, "ptpl": true, "ptpl_capable": true,
        "conflicts": 0,
        "registrants": [{ "hostid": HOLDER, "rkey": "000000000000000a", "holder": true }],
    })
}

fn states(daemon: &TestDaemon) -> Vec<Value> {
    let state = daemon.call("state_get", json!(null));
    let objects = state["objects"].as_array().unwrap();
    objects.iter().map(|o| o["state"].clone()).collect()
}

#[test]
fn a_reservation_stored_in_the_state_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Some(Store::open(dir.path()).unwrap());
    {
        let daemon = TestDaemon::with(Settings::default(), open());
        malloc(&daemon, "m0", Some(UUID));
        subsystem(&daemon, NQN);
        keep(&daemon, stored_reservation(UUID));
        namespace(&daemon, NQN, "m0");
        assert_eq!(get(&daemon), expected());
    }
    let daemon = TestDaemon::with(Settings::default(), open());
    assert_eq!(get(&daemon), expected());
    assert!(states(&daemon).iter().all(|s| s == "live"));
    let config = daemon.call("framework_get_config", json!({ "name": "nvmf" }));
    assert!(
        !config.to_string().contains(RESTORE),
        "SPDK has no such call"
    );
    let own = json!({ "nqn": NQN, "nsid": 1 });
    daemon.call("nvmf_subsystem_remove_ns", own);
    namespace(&daemon, NQN, "m0");
    assert_eq!(
        get(&daemon)["registrants"],
        json!([]),
        "the record is deleted with the namespace"
    );
}

/// Goal: an administrator clears a reservation whose holder is gone; it stays away after a restart.
/// A state that hosts have changed since, and a namespace without registrants, are refused.
#[test]
fn an_administrator_clears_a_reservation() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Some(Store::open(dir.path()).unwrap());
    let clear = |more: Value| {
        let mut params = json!({ "nqn": NQN, "nsid": 1 });
        params
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        params
    };
    const CLEAR: &str = "nvmf_ns_clear_reservation";
    {
        let daemon = TestDaemon::with(Settings::default(), open());
        let storing = store_reservations(Rc::clone(&daemon.engine));
        daemon.run(async { drop(tokio::task::spawn_local(storing)) });
        malloc(&daemon, "m0", Some(UUID));
        subsystem(&daemon, NQN);
        keep(&daemon, stored_reservation(UUID));
        namespace(&daemon, NQN, "m0");
        let refused = daemon.refused(CLEAR, clear(json!({ "generation": 3 })));
        assert_eq!(refused.data.unwrap().field.as_deref(), Some("generation"));
        assert_eq!(get(&daemon), expected());
        let cleared = daemon.call(CLEAR, clear(json!({ "generation": 4 })));
        assert_eq!(cleared["type"], "exclusive access");
        assert_eq!(cleared["registrants"], expected()["registrants"]);
        let now = get(&daemon);
        assert_eq!((&now["rtype"], &now["generation"]), (&json!(0), &json!(5)));
        assert_eq!(now["registrants"], json!([]));
        let refused = daemon.refused(CLEAR, clear(json!({ "force": true })));
        let cause = refused.data.unwrap().cause;
        assert!(cause.contains("nothing to clear"), "{cause}");
        let unknown = json!({ "nqn": NQN, "nsid": 2 });
        daemon.refused(CLEAR, unknown);
    }
    let daemon = TestDaemon::with(Settings::default(), open());
    let now = get(&daemon);
    assert_eq!(
        (&now["rtype"], &now["registrants"]),
        (&json!(0), &json!([]))
    );
}

/// Goal: namespaces of the file get their reservations, although they are created after the store
/// is loaded.
#[test]
fn a_declared_namespace_gets_its_reservation() {
    let dir = tempfile::tempdir().unwrap();
    let open = || Some(Store::open(dir.path()).unwrap());
    let text = format!(
        "[[bdev]]\nname = \"d0\"\ntype = \"malloc\"\nsize = \"1MiB\"\nuuid = \"{UUID}\"\n\
         [[nvmf.subsystem]]\nnqn = \"{NQN}\"\n[[nvmf.subsystem.namespace]]\nbdev = \"d0\"\nnsid = 1\n"
    );
    let settings = || {
        let loaded = load_text(Some(("nacre.toml", &text)), [], &[]);
        loaded.unwrap_or_else(|e| panic!("{e}")).settings
    };
    {
        let daemon = TestDaemon::with(settings(), open());
        assert_eq!(get(&daemon)["ptpl_capable"], true);
        keep(&daemon, stored_reservation(UUID));
    }
    let daemon = TestDaemon::with(settings(), open());
    assert_eq!(get(&daemon), expected());
    assert!(states(&daemon).iter().all(|s| s == "live"));
}

#[test]
fn a_foreign_reservation_is_ignored_and_a_damaged_one_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let daemon = TestDaemon::with(Settings::default(), Some(store));
    malloc(&daemon, "m0", Some(UUID));
    subsystem(&daemon, NQN);
    keep(
        &daemon,
        stored_reservation("7b1d3f6e-52ab-4a0c-9a0e-0d9e6c1f2b3b"),
    );
    namespace(&daemon, NQN, "m0");
    assert_eq!(get(&daemon)["registrants"], json!([]));
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 }));

    let add = json!({ "nqn": NQN, "namespace": { "bdev_name": "m0" } });
    let mut empty = stored_reservation(UUID);
    empty["registrants"] = json!([]);
    for damaged in [empty, json!({ "ptpl": true })] {
        keep(&daemon, damaged);
        let refused = daemon.refused("nvmf_subsystem_add_ns", add.clone());
        let data = refused.data.unwrap();
        assert!(data.cause.contains("damaged"), "{}", data.cause);
        assert!(data.remedy.unwrap().contains("state_forget"));
    }
}

#[test]
fn a_reservation_stored_in_a_file_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ptpl.json");
    let daemon = test_daemon();
    malloc(&daemon, "m0", Some(UUID));
    subsystem(&daemon, NQN);
    let add = |file: &str| {
        let namespace = json!({ "bdev_name": "m0", "ptpl_file": file });
        json!({ "nqn": NQN, "namespace": namespace })
    };
    daemon.call("nvmf_subsystem_add_ns", add(""));
    assert_eq!(get(&daemon)["ptpl_capable"], false, "no store");
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 }));

    let mut spdks = stored_reservation(UUID);
    spdks.as_object_mut().unwrap().remove("generation");
    std::fs::write(&file, spdks.to_string()).unwrap();
    daemon.call("nvmf_subsystem_add_ns", add(file.to_str().unwrap()));
    let mut found = expected();
    found["generation"] = 0.into();
    assert_eq!(get(&daemon), found);
    let config = daemon
        .call("framework_get_config", json!({ "name": "nvmf" }))
        .to_string();
    assert!(config.contains("ptpl.json"), "{config}");
    daemon.call("nvmf_subsystem_remove_ns", json!({ "nqn": NQN, "nsid": 1 }));
    std::fs::write(&file, "{").unwrap();
    let refused = daemon.refused("nvmf_subsystem_add_ns", add(file.to_str().unwrap()));
    assert_eq!(
        refused.data.unwrap().field.as_deref(),
        Some("namespace.ptpl_file")
    );
    let unknown = json!({ "nqn": NQN, "nsid": 1 });
    assert_eq!(
        daemon.refused("nvmf_ns_get_reservation", unknown).code,
        -32602
    );
}

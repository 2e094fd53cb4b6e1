//! Goal: objects and settings that RPC adds to a subsystem of the configuration file are restored
//! before hosts reconnect after a restart. Objects of the file stay out of the store.

use nacre_random_ports::local_port;
use serde_json::{Value, json};

use super::super::super::testing::TestDaemon;
use super::{HOST, NQN, events, get, listen, malloc, namespace};
use crate::config::{Settings, load_text};
use crate::store::Store;

/// The host that the file allows.
const OWN: &str = "nqn.2026-01.org.example:own";

const OTHER: &str = "nqn.2026-01.org.example:other";

/// A subsystem on one disk of the file, and a second disk. An object that cannot be restored at
/// once is never retried.
fn settings() -> Settings {
    let text = format!(
        "[data]\nretry_s = 0\n\
         [[bdev]]\nname = \"disk0\"\ntype = \"malloc\"\nsize = \"1MiB\"\n\
         [[bdev]]\nname = \"disk1\"\ntype = \"malloc\"\nsize = \"1MiB\"\n\
         [[nvmf.listener]]\nname = \"data\"\nport = {}\n\
         [[nvmf.subsystem]]\nnqn = \"{NQN}\"\nana_reporting = true\nhosts = [\"{OWN}\"]\nnamespace = [{{ bdev = \"disk0\" }}]\n",
        local_port()
    );
    load_text(Some(("nacre.toml", &text)), [], &[])
        .unwrap_or_else(|e| panic!("{e}"))
        .settings
}

fn start(settings: &Settings, dir: &std::path::Path) -> TestDaemon {
    TestDaemon::with(settings.clone(), Some(Store::open(dir).unwrap()))
}

/// Host names, devices of namespaces with their groups, and the number of listeners.
fn contents(daemon: &TestDaemon) -> Value {
    let subsystem = get(daemon, NQN);
    let each = |field: &str, of: fn(&Value) -> Value| -> Value {
        subsystem[field]
            .as_array()
            .unwrap()
            .iter()
            .map(of)
            .collect()
    };
    json!({
        "any": subsystem["allow_any_host"],
        "hosts": each("hosts", |h| h["nqn"].clone()),
        "namespaces": each("namespaces", |n| json!([n["nsid"], n["bdev_name"], n["anagrpid"]])),
        "listeners": subsystem["listen_addresses"].as_array().unwrap().len(),
    })
}

/// Goal: restored before hosts are admitted, without failures in the log.
#[test]
fn objects_added_by_rpc_are_restored_before_hosts_connect() {
    let (dir, settings) = (tempfile::tempdir().unwrap(), settings());
    let before = {
        let daemon = start(&settings, dir.path());
        malloc(&daemon, "ram", None);
        assert_eq!(namespace(&daemon, NQN, "ram"), 2);
        daemon.call(
            "nvmf_subsystem_add_host",
            json!({ "nqn": NQN, "host": HOST }),
        );
        listen(&daemon, NQN);
        // A subsystem of RPC on a device of the file.
        daemon.call("nvmf_create_subsystem", json!({ "nqn": OTHER }));
        namespace(&daemon, OTHER, "disk1");
        contents(&daemon)
    };
    assert_eq!(before["hosts"], json!([HOST, OWN]));
    assert_eq!(
        before["namespaces"],
        json!([[1, "disk0", 1], [2, "ram", 2]])
    );
    assert_eq!(before["listeners"], 2);

    let daemon = start(&settings, dir.path());
    assert_eq!(contents(&daemon), before);
    assert_eq!(get(&daemon, OTHER)["namespaces"][0]["bdev_name"], "disk1");
    assert_eq!(daemon.engine.journal.waiting(), []);
    assert_eq!(events(&daemon, "state_restore_failed"), [] as [&str; 0]);
    // In the saved configuration the subsystem comes before its contents.
    let config = daemon.call("framework_get_config", json!({ "name": "nvmf" }));
    let about = |c: &&Value| c["params"]["nqn"] == NQN;
    let first = config.as_array().unwrap().iter().find(about).unwrap();
    assert_eq!(first["method"], "nvmf_create_subsystem");
}

/// Goal: settings that RPC makes about the file's subsystem, and about a namespace without an NSID
/// in the file, survive a restart. Objects of the file stay unchanged.
#[test]
fn rpc_settings_do_not_replace_those_of_the_file() {
    const ALLOW: &str = "nvmf_subsystem_allow_any_host";
    let (dir, settings) = (tempfile::tempdir().unwrap(), settings());
    let allow = |daemon: &TestDaemon, any: bool| {
        let params = json!({ "nqn": NQN, "allow_any_host": any });
        assert_eq!(daemon.call(ALLOW, params), true);
    };
    let group = |daemon: &TestDaemon, group: u32| {
        let params = json!({ "nqn": NQN, "nsid": 1, "anagrpid": group });
        assert_eq!(daemon.call("nvmf_subsystem_set_ns_ana_group", params), true);
    };
    let expected = |any: bool, group: u32| json!({ "any": any, "hosts": [OWN], "namespaces": [[1, "disk0", group]], "listeners": 1 });
    {
        let daemon = start(&settings, dir.path());
        assert_eq!(contents(&daemon), expected(false, 1));
        allow(&daemon, true);
        group(&daemon, 3);
        assert_eq!(contents(&daemon), expected(true, 3));
    }
    for (any, to) in [(false, 1), (true, 2)] {
        let daemon = start(&settings, dir.path());
        assert_eq!(contents(&daemon), expected(!any, if any { 1 } else { 3 }));
        let objects = daemon.call("state_get", json!(null))["objects"].clone();
        let of_the_file =
            |o: &&Value| o["method"] == "nvmf_create_subsystem" && o["kept_in"] == "config";
        assert!(
            objects.as_array().unwrap().iter().any(|o| of_the_file(&o)),
            "{objects}"
        );
        allow(&daemon, any);
        group(&daemon, to);
    }
    // A subsystem that RPC creates after the file dropped it has only the settings of that call.
    {
        let daemon = start(&Settings::default(), dir.path());
        assert_eq!(daemon.engine.journal.waiting().len(), 2);
        daemon.call(
            "nvmf_create_subsystem",
            json!({ "nqn": NQN, "ana_reporting": true }),
        );
        daemon.call("state_retry", json!(null));
        assert_eq!(get(&daemon, NQN)["allow_any_host"], false);
    }
    let daemon = start(&Settings::default(), dir.path());
    assert_eq!(get(&daemon, NQN)["allow_any_host"], false);
}

/// Goal: settings of RPC's own subsystem and namespace are part of their one record each.
#[test]
fn settings_of_rpc_objects_are_part_of_their_record() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = super::durable(dir.path());
    malloc(&daemon, "ram", None);
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": NQN, "ana_reporting": true }),
    );
    namespace(&daemon, NQN, "ram");
    let before = daemon.engine.journal.len();
    daemon.call(
        "nvmf_subsystem_allow_any_host",
        json!({ "nqn": NQN, "allow_any_host": true }),
    );
    daemon.call(
        "nvmf_subsystem_set_ns_ana_group",
        json!({ "nqn": NQN, "nsid": 1, "anagrpid": 2 }),
    );
    assert_eq!(daemon.engine.journal.len(), before);
    drop(daemon);
    let there = get(&super::durable(dir.path()), NQN);
    assert_eq!(there["allow_any_host"], true);
    assert_eq!(there["namespaces"][0]["anagrpid"], 2);
}

/// Goal: a namespace of the file is not stored when its device goes and returns. Otherwise the file
/// would find its NSID taken by RPC at the next start.
#[test]
fn a_declared_namespace_is_not_stored_when_its_device_returns() {
    let (dir, settings) = (tempfile::tempdir().unwrap(), settings());
    let before = {
        let daemon = start(&settings, dir.path());
        let before = contents(&daemon);
        let uuid = daemon.call("bdev_get_bdevs", json!({ "name": "disk0" }))[0]["uuid"].clone();
        // Simulates a hot removal.
        let bdevs = daemon.engine.plane().unwrap().bdevs.clone();
        let ticket = bdevs.remove("disk0", nacre_bdev::Removal::Hot).unwrap();
        daemon.run(ticket);
        daemon.run(async { tokio::time::sleep(std::time::Duration::from_millis(20)).await });
        assert_eq!(contents(&daemon)["namespaces"], json!([]));
        daemon.call(
            "bdev_malloc_create",
            json!({ "name": "disk0", "num_blocks": 2048, "block_size": 512, "uuid": uuid }),
        );
        daemon.call("state_retry", json!(null));
        assert_eq!(contents(&daemon), before);
        daemon.call("bdev_malloc_delete", json!({ "name": "disk0" }));
        before
    };
    let daemon = start(&settings, dir.path());
    assert_eq!(contents(&daemon), before);
    let stored = daemon.engine.journal.select(|entry| entry.durable);
    assert_eq!(stored, [], "all objects belong to the file");
}

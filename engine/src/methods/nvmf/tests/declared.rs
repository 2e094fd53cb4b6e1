//! Goal: what RPC adds to a subsystem that the configuration file declares, and sets about it, is there again when
//! hosts come back after a restart, and what the file declares stays the file's.

use serde_json::{Value, json};

use super::super::super::testing::Bench;
use super::{HOST, NQN, events, get, listen, malloc, namespace};
use crate::config::{Settings, load_text};
use crate::store::Store;

/// The host of the file.
const OWN: &str = "nqn.2026-01.org.example:own";

const OTHER: &str = "nqn.2026-01.org.example:other";

/// A subsystem on a disk of the file, and another disk. What cannot be restored at once is never tried again.
fn settings() -> Settings {
    let text = format!(
        "[data]\nretry_s = 0\n\
         [[bdev]]\nname = \"disk0\"\ntype = \"malloc\"\nsize = \"1MiB\"\n\
         [[bdev]]\nname = \"disk1\"\ntype = \"malloc\"\nsize = \"1MiB\"\n\
         [[nvmf.listener]]\nname = \"data\"\nport = {}\n\
         [[nvmf.subsystem]]\nnqn = \"{NQN}\"\nana_reporting = true\nhosts = [\"{OWN}\"]\nnamespace = [{{ bdev = \"disk0\" }}]\n",
        super::ana::free_port()
    );
    load_text(Some(("nacre.toml", &text)), [], &[])
        .unwrap_or_else(|e| panic!("{e}"))
        .settings
}

fn start(settings: &Settings, dir: &std::path::Path) -> Bench {
    Bench::with(settings.clone(), Some(Store::open(dir).unwrap()))
}

/// Host names, devices of namespaces with their groups, and how many listeners.
fn what_is_there(bench: &Bench) -> Value {
    let subsystem = get(bench, NQN);
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

/// Before hosts are let in, and without a word of failures.
#[test]
fn what_rpc_added_is_there_when_hosts_are_let_in() {
    let (dir, settings) = (tempfile::tempdir().unwrap(), settings());
    let before = {
        let bench = start(&settings, dir.path());
        malloc(&bench, "ram", None);
        assert_eq!(namespace(&bench, NQN, "ram"), 2);
        bench.call(
            "nvmf_subsystem_add_host",
            json!({ "nqn": NQN, "host": HOST }),
        );
        listen(&bench, NQN);
        // On a device of the file, in a subsystem of RPC's.
        bench.call("nvmf_create_subsystem", json!({ "nqn": OTHER }));
        namespace(&bench, OTHER, "disk1");
        what_is_there(&bench)
    };
    assert_eq!(before["hosts"], json!([HOST, OWN]));
    assert_eq!(
        before["namespaces"],
        json!([[1, "disk0", 1], [2, "ram", 2]])
    );
    assert_eq!(before["listeners"], 2);

    let bench = start(&settings, dir.path());
    assert_eq!(what_is_there(&bench), before);
    assert_eq!(get(&bench, OTHER)["namespaces"][0]["bdev_name"], "disk1");
    assert_eq!(bench.engine.journal.waiting(), []);
    assert_eq!(events(&bench, "state_restore_failed"), [] as [&str; 0]);
    // Saved, the subsystem comes before what is in it.
    let config = bench.call("framework_get_config", json!({ "name": "nvmf" }));
    let about = |c: &&Value| c["params"]["nqn"] == NQN;
    let first = config.as_array().unwrap().iter().find(about).unwrap();
    assert_eq!(first["method"], "nvmf_create_subsystem");
}

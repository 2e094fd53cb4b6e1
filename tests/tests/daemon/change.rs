//! Goal: configuration changes are atomic across kill -9.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nacre_engine_rpc::client::ClientError;
use nacre_random::Random;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::seed;
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.nacre:change";

/// Contents of a subsystem: namespaces as (id, device), listeners, hosts.
#[derive(Debug, Clone, Default, PartialEq)]
struct SubsystemContents {
    namespaces: BTreeSet<(u64, String)>,
    listeners: BTreeSet<String>,
    hosts: BTreeSet<String>,
}

type Model = BTreeMap<String, SubsystemContents>;

/// Goal: after a crash each change is complete or absent, never partial. Method: random creations,
/// additions and deletions of subsystems with their contents, and kill -9 at random moments. After
/// each restart the state is the last acknowledged one, or includes the call that was in flight.
#[test]
fn a_change_in_flight_is_complete_or_absent() {
    let mut rng = seed::announced("a_change_in_flight_is_complete_or_absent");
    let place = Place::new();
    let mut daemon = place.start();
    for n in 0..4 {
        daemon.create_ram(&format!("ram{n}"), 512, 64 << 10);
    }
    let listeners: Vec<String> = (0..2)
        .map(|_| free_address("127.0.0.1").to_string())
        .collect();
    let (mut model, mut changes) = (Model::new(), 0);
    for round in 0..8 {
        let (enough, late) = (rng.below(12), Duration::from_micros(rng.below(3000)));
        let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
        let (finished, done) = std::sync::mpsc::channel();
        let next = std::thread::scope(|scope| {
            scope.spawn(move || {
                (0..enough).for_each(|_| done.recv().unwrap());
                std::thread::sleep(late);
                // Our child, not reaped yet, so its pid cannot be reused.
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            });
            loop {
                let (method, params, next) = change(&model, &listeners, &mut rng);
                match daemon.try_call(method, params) {
                    Ok(_) => model = next,
                    Err(ClientError::Refused { method, error }) => panic!("{method}: {error}"),
                    Err(_) => break next,
                }
                changes += 1;
                // The receiver is gone after enough changes.
                let _ = finished.send(());
            }
        });
        daemon.kill();
        // A kill during startup must be harmless too.
        for _ in 0..rng.below(3) {
            let starting = place.spawn();
            std::thread::sleep(Duration::from_micros(rng.below(60_000)));
            starting.kill();
        }
        daemon = place.start();
        let found = state(&mut daemon);
        assert!(
            found == model || found == next,
            "round {round}: found {found:#?}\nneither before {model:#?}\nnor after {next:#?}"
        );
        let failed = daemon.call("state_get", Value::Null).to_string();
        assert!(!failed.contains("\"failed\""), "round {round}: {failed}");
        model = found;
    }
    println!("{changes} changes");
}

/// A random call that is possible now, and the model after it.
fn change(model: &Model, listeners: &[String], rng: &mut Random) -> (&'static str, Value, Model) {
    let mut next = model.clone();
    let nqn = format!("{NQN}-{}", rng.below(3));
    let Some(made) = next.get_mut(&nqn) else {
        next.insert(nqn.clone(), SubsystemContents::default());
        return ("nvmf_create_subsystem", json!({ "nqn": nqn }), next);
    };
    loop {
        match rng.below(8) {
            0 => {
                next.remove(&nqn);
                return ("nvmf_delete_subsystem", json!({ "nqn": nqn }), next);
            }
            1..4 => {
                let bdev = format!("ram{}", rng.below(4));
                let used = |m: &SubsystemContents| m.namespaces.iter().any(|(_, b)| *b == bdev);
                if model.values().any(used) {
                    continue;
                }
                let taken = |id: &u64| made.namespaces.iter().any(|(n, _)| n == id);
                let nsid = (1..).find(|id| !taken(id)).unwrap();
                let namespace = json!({ "bdev_name": bdev, "nsid": nsid });
                made.namespaces.insert((nsid, bdev));
                let params = json!({ "nqn": nqn, "namespace": namespace });
                return ("nvmf_subsystem_add_ns", params, next);
            }
            4 => {
                let Some((nsid, bdev)) = made.namespaces.first().cloned() else {
                    continue;
                };
                made.namespaces.remove(&(nsid, bdev));
                return (
                    "nvmf_subsystem_remove_ns",
                    json!({ "nqn": nqn, "nsid": nsid }),
                    next,
                );
            }
            5..7 => {
                let address = &listeners[rng.below(2) as usize];
                let (ip, port) = address.rsplit_once(':').unwrap();
                let listen_address = json!({ "trtype": "TCP", "traddr": ip, "trsvcid": port });
                let params = json!({ "nqn": nqn, "listen_address": listen_address });
                let method = if made.listeners.remove(address) {
                    "nvmf_subsystem_remove_listener"
                } else {
                    made.listeners.insert(address.clone());
                    "nvmf_subsystem_add_listener"
                };
                return (method, params, next);
            }
            _ => {
                let host = format!("nqn.2025-01.io.nacre:host-{}", rng.below(2));
                let params = json!({ "nqn": nqn, "host": host });
                let method = if made.hosts.remove(&host) {
                    "nvmf_subsystem_remove_host"
                } else {
                    made.hosts.insert(host);
                    "nvmf_subsystem_add_host"
                };
                return (method, params, next);
            }
        }
    }
}

fn state(daemon: &mut Daemon) -> Model {
    let listed = daemon.call("nvmf_get_subsystems", Value::Null);
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let list = |v: &Value| v.as_array().unwrap().clone();
    let nvm = list(&listed).into_iter().filter(|s| s["subtype"] == "NVMe");
    let made = |s: &Value| SubsystemContents {
        namespaces: list(&s["namespaces"])
            .iter()
            .map(|n| (n["nsid"].as_u64().unwrap(), text(&n["bdev_name"])))
            .collect(),
        listeners: list(&s["listen_addresses"])
            .iter()
            .map(|l| format!("{}:{}", text(&l["traddr"]), text(&l["trsvcid"])))
            .collect(),
        hosts: list(&s["hosts"]).iter().map(|h| text(&h["nqn"])).collect(),
    };
    nvm.map(|s| (text(&s["nqn"]), made(&s))).collect()
}

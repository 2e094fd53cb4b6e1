//! Tests of listeners that follow the network interfaces of the machine, and of hosts that follow
//! the discovery log.
//!
//! Method: the daemon runs in its own network namespace, with a virtual interface whose addresses
//! the test adds and removes. That needs root; without it the test reports that it is skipped.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use nacre_bdev::Status;
use nacre_tests::daemon::{Daemon, Place, free_address};
use nacre_tests::host::{Host, options, pattern};
use nacre_tests::skip;
use serde_json::{Value, json};

const NQN: &str = "nqn.2025-01.io.nacre:listeners";

/// Creates `data0`; its peer carries no traffic.
const INTERFACE: &str = "link add data0 type veth peer name data1";

/// A network namespace, deleted on drop.
struct Namespace(String);

impl Namespace {
    /// `None`: this user or machine cannot create one.
    fn new(name: &str) -> Option<Self> {
        let name = format!("nacre-{name}-{}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &name]).output();
        made.ok()
            .filter(|output| output.status.success())
            .map(|_| Self(name))
    }

    fn try_ip(&self, words: &str) -> bool {
        let mut command = Command::new("ip");
        command.args(["-n", &self.0]).args(words.split(' '));
        command.output().is_ok_and(|output| output.status.success())
    }

    fn ip(&self, words: &str) {
        assert!(self.try_ip(words), "ip {words}");
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

/// The reply of `nvmf_get_listeners`: address, transport, actual state and reason.
fn listeners(daemon: &mut Daemon) -> Vec<(String, String, String, String)> {
    let all = daemon.call("nvmf_get_listeners", Value::Null);
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let one = |l: &Value| {
        (
            text(&l["address"]["traddr"]),
            text(&l["address"]["trtype"]),
            text(&l["actual"]),
            text(&l["reason"]),
        )
    };
    all["listeners"]
        .as_array()
        .unwrap()
        .iter()
        .map(one)
        .collect()
}

fn until(
    daemon: &mut Daemon,
    what: &str,
    done: impl Fn(&[(String, String, String, String)]) -> bool,
) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let now = listeners(daemon);
        if done(&now) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {now:?}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn listens(of: &[(String, String, String, String)], address: &str, transport: &str) -> bool {
    of.iter()
        .any(|(a, t, actual, _)| a == address && t == transport && actual == "listening")
}

/// True if a socket listens on the address inside the namespace.
fn accepts(namespace: &Namespace, address: &str) -> bool {
    let listening = Command::new("ip")
        .args([
            "netns",
            "exec",
            &namespace.0,
            "cat",
            "/proc/net/tcp",
            "/proc/net/tcp6",
        ])
        .output()
        .expect("ip runs");
    let text = String::from_utf8_lossy(&listening.stdout).into_owned();
    // Addresses are hexadecimal in host byte order; 0A is LISTEN, 1144 is port 4420.
    let octets: Vec<u8> = address.split('.').map(|o| o.parse().unwrap()).collect();
    let hex = format!(
        "{:08X}:1144",
        u32::from_le_bytes(octets.try_into().unwrap())
    );
    text.lines().any(|l| {
        l.split_whitespace().nth(1) == Some(&hex) && l.split_whitespace().nth(3) == Some("0A")
    })
}

/// Goal: the daemon listens on an address that appears, stops on one that disappears, and reports
/// both. RDMA that is preferred but not available has a reason, next to the TCP listener. A whole
/// interface may disappear and return.
#[test]
fn listeners_follow_the_interfaces() {
    let Some(namespace) = Namespace::new("follow") else {
        return skip(
            "listeners_follow_the_interfaces",
            "no network namespaces here: not root?",
        );
    };
    namespace.ip("link set lo up");
    if !namespace.try_ip(INTERFACE) {
        return skip(
            "listeners_follow_the_interfaces",
            "no virtual interfaces here",
        );
    }
    namespace.ip("addr add 10.90.0.1/24 dev data0");
    namespace.ip("link set data0 up");
    let place = Place::new().in_network(&namespace.0);
    std::fs::write(
        place.path("nacre.toml"),
        format!(
            "[[bdev]]\nname = \"ram\"\ntype = \"malloc\"\nsize = \"1MiB\"\n\
             [[nvmf.listener]]\nname = \"data\"\niface = [\"name:data0\"]\nrdma = \"prefer\"\n\
             [[nvmf.subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\nnamespace = [{{ bdev = \"ram\" }}]\n"
        ),
    )
    .unwrap();
    let config = place.path("nacre.toml");
    let place = place.with("NACRE_CONFIG", config.display());
    let mut daemon = place.start();
    let now = listeners(&mut daemon);
    assert!(
        listens(&now, "10.90.0.1", "TCP"),
        "{now:?}\n{}",
        daemon.log()
    );
    assert!(
        now.contains(&(
            "10.90.0.1".into(),
            "RDMA".into(),
            "absent".into(),
            "no_rdma_dev".into()
        )),
        "{now:?}"
    );
    assert!(accepts(&namespace, "10.90.0.1"));

    // With a label, as administrators assign it.
    namespace.ip("addr add 10.90.0.2/24 dev data0 label data0:1");
    until(&mut daemon, "a second address", |now| {
        listens(now, "10.90.0.1", "TCP") && listens(now, "10.90.0.2", "TCP")
    });
    assert!(accepts(&namespace, "10.90.0.2"));

    namespace.ip("addr del 10.90.0.2/24 dev data0");
    until(&mut daemon, "the second address is gone", |now| {
        !now.iter().any(|(address, ..)| address == "10.90.0.2")
    });
    assert!(!accepts(&namespace, "10.90.0.2") && accepts(&namespace, "10.90.0.1"));

    namespace.ip("link del data0");
    until(&mut daemon, "the interface is gone", <[_]>::is_empty);
    let unmatched = daemon.call("nvmf_get_listeners", Value::Null)["unmatched"][0].clone();
    assert!(
        unmatched.as_str().unwrap().starts_with(
            "listener \"data\": no interface matches \"name:data0\"; have: lo 127.0.0.1"
        ),
        "{unmatched}"
    );

    namespace.ip(INTERFACE);
    namespace.ip("addr add 10.90.0.3/24 dev data0");
    namespace.ip("link set data0 up");
    until(&mut daemon, "the interface is back", |now| {
        listens(now, "10.90.0.3", "TCP")
    });
    namespace.ip("addr add 10.90.0.2/24 dev data0");
    until(&mut daemon, "the second address is back", |now| {
        listens(now, "10.90.0.2", "TCP")
    });
    // The events report the same state.
    let notifications = daemon.call("notify_get_notifications", json!({}));
    let of_it = notifications
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|event| {
            let (_, after) = event["ctx"]
                .as_str()?
                .split_once("10.90.0.2 port 4420, TCP")?;
            Some(format!("{}{after}", event["type"].as_str()?))
        });
    assert_eq!(
        of_it.collect::<Vec<_>>(),
        ["transport_downgraded: no_address", "transport_restored"],
        "{notifications}"
    );
    daemon.stop();
}

/// Goal: an inaccessible path refuses I/O while the other path serves it. The host gets an event,
/// and the state survives `kill -9`. Method: two real listeners, one of our hosts on each.
#[test]
fn paths_have_states_of_their_own() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_file("disk", 512, 1 << 20);
    daemon.call(
        "nvmf_create_subsystem",
        json!({ "nqn": NQN, "allow_any_host": true, "ana_reporting": true }),
    );
    let nsid = daemon.add_namespace(NQN, "disk");
    let (best, other) = (
        daemon.listen(NQN, "127.0.0.1:0"),
        daemon.listen(NQN, "127.0.0.1:0"),
    );
    let set = |daemon: &mut Daemon, address: SocketAddr, state: &str| {
        let place = json!({ "trtype": "tcp", "traddr": address.ip(), "trsvcid": address.port().to_string() });
        let params = json!({ "nqn": NQN, "listen_address": place, "ana_state": state });
        daemon.call("nvmf_subsystem_listener_set_ana_state", params);
    };
    let data = pattern(512, 3);
    let mut over_best = Host::connected(best, options(NQN), &[nsid]);
    let mut over_other = Host::connected(other, options(NQN), &[nsid]);
    set(&mut daemon, other, "non_optimized");
    assert_eq!(over_other.write(0, 0, 1, &data), Status::Ok);
    set(&mut daemon, other, "inaccessible");
    assert_ne!(over_other.write(0, 1, 1, &data), Status::Ok);
    assert_eq!(over_best.write(0, 1, 1, &data), Status::Ok);
    set(&mut daemon, other, "optimized");
    assert_eq!(over_other.read(0, 1, 1, data.len()), data);
    set(&mut daemon, other, "inaccessible");
    daemon.kill();
    let mut daemon = place.start();
    let mut over_best = Host::connected(best, options(NQN), &[nsid]);
    let mut over_other = Host::connected(other, options(NQN), &[nsid]);
    assert_eq!(over_best.write(0, 2, 1, &data), Status::Ok);
    assert_ne!(over_other.write(0, 2, 1, &data), Status::Ok);
    set(&mut daemon, other, "optimized");
    assert_eq!(over_other.write(0, 2, 1, &data), Status::Ok);
    daemon.stop();
}

/// Goal: a selector that matched at one start need not match at the next. A daemon with a selector
/// that matches nothing starts, and its log lists the interfaces of the machine.
#[test]
fn a_missing_interface_is_named() {
    let place = Place::new();
    let config = place.path("nacre.toml");
    let text = "[[nvmf.listener]]\nname = \"data\"\niface = [\"name:eth99\"]\n";
    std::fs::write(&config, text).unwrap();
    let place = place.with("NACRE_CONFIG", config.display());
    let (status, log) = place.spawn().ended();
    assert!(!status.success());
    let said = "listener \"data\": no interface matches \"name:eth99\"; have: ";
    assert!(log.contains(said) && log.contains("lo 127.0.0.1"), "{log}");
}

/// Goal: a first start and a first publication are not the return of a lost path. Method: the
/// notifications after a listener of the file has a published volume.
#[test]
fn a_first_start_restores_nothing() {
    let place = Place::new();
    let (config, port) = (place.path("nacre.toml"), free_address("127.0.0.1").port());
    let text =
        format!("[[nvmf.listener]]\nname = \"data\"\naddress = \"127.0.0.1\"\nport = {port}\n");
    std::fs::write(&config, text).unwrap();
    let place = place.with("NACRE_CONFIG", config.display());
    let mut daemon = place.start();
    daemon.create_ram("disk", 512, 8 << 20);
    daemon.call(
        "volume_create",
        json!({ "name": "vol", "devices": ["disk"] }),
    );
    daemon.call(
        "volume_publish",
        json!({ "name": "vol", "allow_any_host": true }),
    );
    let notifications = daemon.call("notify_get_notifications", json!({}));
    let types = notifications
        .as_array()
        .unwrap()
        .iter()
        .map(|event| &event["type"]);
    assert!(
        types.clone().all(|kind| kind != "transport_restored"),
        "{notifications}"
    );
    assert!(types.count() > 0, "there are notifications at all");
    daemon.stop();
}

/// Goal: what `config check --here` calls good starts and serves, and stays good meanwhile. Method:
/// a file with a device, a subsystem, a listener, a log and metrics, all on this machine.
#[test]
fn a_checked_configuration_serves() {
    let place = Place::new();
    let (listener, metrics) = (free_address("127.0.0.1"), free_address("127.0.0.1"));
    std::fs::write(place.path("disk"), vec![0; 1 << 20]).unwrap();
    let at = |name: &str| place.path(name).display().to_string();
    let text = format!(
        "[rpc]\nsocket = \"{}\"\n[data]\ndir = \"{}\"\n[log]\nfile = \"{}\"\n\
         [metrics]\nlisten = \"{metrics}\"\n\
         [[bdev]]\nname = \"disk\"\npath = \"{}\"\nblock_size = 512\n\
         [[nvmf.listener]]\nname = \"data\"\naddress = \"127.0.0.1\"\nport = {}\n\
         [[nvmf.subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\n\
         [[nvmf.subsystem.namespace]]\nbdev = \"disk\"\n",
        at("nacre.sock"),
        at("data"),
        at("daemon.log"),
        at("disk"),
        listener.port()
    );
    let config = place.path("nacre.toml");
    std::fs::write(&config, text).unwrap();
    let check = |place: &Place| {
        let mut command = place.nacre();
        let output = command
            .args(["config", "check", "--here"])
            .arg(&config)
            .output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.ends_with("nacre.toml: good\n"), "{said}{output:?}");
    };
    check(&place);
    let place = place.with("NACRE_CONFIG", config.display());
    let daemon = place.start();
    check(&place);
    let mut host = Host::connected(listener, options(NQN), &[1]);
    let data = pattern(512, 3);
    assert_eq!(host.write(0, 1, 1, &data), Status::Ok);
    assert_eq!(host.read(0, 1, 1, data.len()), data);
    daemon.stop();
}

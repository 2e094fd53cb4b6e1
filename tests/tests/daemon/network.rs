//! Tests of the configuration from the view of hosts: addresses, discovery, refusals, and changes
//! while connected.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use nacre_bdev::Status;
use nacre_nvmf::host::{ControllerState, HostError};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::aen::AsyncEvent;
use nacre_nvmf_wire::fabrics::{DISCOVERY_NQN, InvalidParameter};
use nacre_nvmf_wire::log::discovery::subtype;
use nacre_tests::daemon::{Place, free_address};
use nacre_tests::host::{HOSTNQN, Host, options, pattern};
use nacre_tests::skip;
use serde_json::json;

const NQN: &str = "nqn.2025-01.io.nacre:network";

/// Goal: IPv6 works like IPv4. Method: the same subsystem on both, written through one and read
/// through the other; both are in the discovery log.
#[test]
fn ipv6_and_ipv4_lead_to_the_same_subsystem() {
    if TcpListener::bind("[::1]:0").is_err() {
        return skip("ipv6_and_ipv4_lead_to_the_same_subsystem", "no ::1 here");
    }
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_ram("ram", 512, 1 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "ram");
    let v6 = daemon.listen(NQN, "[::1]:0");
    let v4 = daemon.listen(NQN, "127.0.0.1:0");
    assert!(v6.is_ipv6() && v4.is_ipv4());
    let mut over_v6 = Host::connected(v6, options(NQN), &[nsid]);
    let mut over_v4 = Host::connected(v4, options(NQN), &[nsid]);
    let data = pattern(8 * 512, 6);
    assert_eq!(over_v6.write(0, 8, 8, &data), Status::Ok);
    assert_eq!(over_v4.read(0, 8, 8, data.len()), data);

    let mut asks = Host::connected(v6, options(DISCOVERY_NQN), &[]);
    let records = asks.discovery_log();
    for address in [v4, v6] {
        let is_it = |r: &nacre_nvmf_wire::log::discovery::DiscoveryRecord| {
            let (ip, port) = (address.ip().to_string(), address.port().to_string());
            r.subnqn.as_str() == NQN && r.traddr == ip && r.trsvcid == port
        };
        assert!(records.iter().any(is_it), "{address} is not in {records:?}");
    }
    daemon.stop();
}

/// Goal: hosts of both families reach a listener on `::`, and the log shows the address that each
/// host used. Method: one listener; write by IPv6, read by IPv4, read the log by each.
#[test]
fn a_listener_on_every_address() {
    if TcpListener::bind("[::1]:0").is_err() {
        return skip("a_listener_on_every_address", "no ::1 here");
    }
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_ram("ram", 512, 1 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "ram");
    let port = daemon.listen(NQN, "[::]:0").port();
    let data = pattern(8 * 512, 9);
    for ip in ["::1", "127.0.0.1"] {
        let at = SocketAddr::new(ip.parse().unwrap(), port);
        let mut host = Host::connected(at, options(NQN), &[nsid]);
        if ip == "::1" {
            assert_eq!(host.write(0, 8, 8, &data), Status::Ok);
        }
        assert_eq!(host.read(0, 8, 8, data.len()), data);
        let mut asks = Host::connected(at, options(DISCOVERY_NQN), &[]);
        let records = asks.discovery_log();
        let of_ours = records.iter().filter(|r| r.subnqn.as_str() == NQN);
        let places: Vec<_> = of_ours
            .map(|r| (r.traddr.clone(), r.trsvcid.clone()))
            .collect();
        assert_eq!(places, [(ip.to_owned(), port.to_string())]);
    }
    daemon.stop();
}

/// Goal: a listener on a link-local address keeps the name of its interface across restarts until
/// it is removed. Method: add it if this machine has such an address; list, restart, list, connect,
/// remove; without an interface it is refused.
#[test]
fn a_listener_on_a_link_local_address() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_subsystem(NQN);
    let listener = |traddr: &str| json!({ "nqn": NQN, "listen_address": { "trtype": "TCP", "traddr": traddr, "trsvcid": "0" } });
    let refused = daemon.try_call("nvmf_subsystem_add_listener", listener("fe80::1"));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("name the interface"), "{refused}");
    let Some(traddr) = link_local() else {
        return skip("a_listener_on_a_link_local_address", "no such address here");
    };
    daemon.call("nvmf_subsystem_add_listener", listener(&traddr));
    let listed = daemon.subsystem(NQN)["listen_addresses"][0].take();
    assert_eq!(
        (&listed["traddr"], &listed["adrfam"]),
        (&json!(traddr), &json!("IPv6"))
    );
    daemon.stop();
    let mut daemon = place.start();
    let again = daemon.subsystem(NQN)["listen_addresses"].take();
    assert_eq!(again, json!([listed]));
    let socket = format!("[{traddr}]:{}", listed["trsvcid"].as_str().unwrap());
    let socket = nacre_engine_values::address::endpoint(&socket).unwrap();
    drop(Host::connected(socket, options(NQN), &[]));
    daemon.call(
        "nvmf_subsystem_remove_listener",
        json!({ "nqn": NQN, "listen_address": listed }),
    );
    assert_eq!(daemon.subsystem(NQN)["listen_addresses"], json!([]));
    daemon.stop();
}

/// A link-local address of this machine, with its interface.
fn link_local() -> Option<String> {
    let table = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let bits = u128::from_str_radix(fields.first()?, 16).ok()?;
        let address = std::net::Ipv6Addr::from_bits(bits);
        let is_it = address.is_unicast_link_local();
        is_it.then(|| format!("{address}%{}", fields[5]))
    })
}

/// Goal: a host finds the subsystems that it may use, through the well-known discovery port and
/// through a listener. It gets an event when they change. Method: the discovery service on its own
/// port (a free one stands for 8009) and on a subsystem's listener; a subsystem for another host; a
/// new subsystem.
#[test]
fn discovery_on_its_port_and_on_the_listener() {
    let port = free_address("127.0.0.1").port();
    let place = Place::new().with("NACRE_NVMF_DISCOVERY_PORT", port);
    let mut daemon = place.start();
    daemon.create_subsystem(NQN);
    let listener = daemon.listen(NQN, "127.0.0.1:0");
    let hidden = format!("{NQN}-hidden");
    daemon.call("nvmf_create_subsystem", json!({ "nqn": hidden }));
    daemon.listen(&hidden, &listener.to_string());
    let well_known = SocketAddr::new(listener.ip(), port);
    for address in [listener, well_known] {
        let mut host = Host::connected(address, options(DISCOVERY_NQN), &[]);
        assert!(host.controller.is_discovery());
        let found = nvm_subsystems(&mut host);
        assert_eq!(
            found,
            [(NQN.to_owned(), listener.port().to_string())],
            "at {address}"
        );
        host.disconnect();
    }
    // The discovery subsystem is listed by its unique name, whichever name is queried.
    let shown = daemon.call("nvmf_get_subsystems", json!({ "nqn": DISCOVERY_NQN }));
    let own = shown[0]["unique_nqn"].as_str().expect("its own name");
    let mut host = Host::connected(well_known, options(own), &[]);
    assert!(host.controller.is_discovery());
    let names = host.discovery_log().into_iter();
    let of_itself = names.filter(|r| r.subtype == subtype::CURRENT_DISCOVERY);
    assert!(of_itself.map(|r| r.subnqn).all(|nqn| nqn.as_str() == own));
    assert_eq!(nvm_subsystems(&mut host).len(), 1);
    let allow = json!({ "nqn": hidden, "host": HOSTNQN });
    daemon.call("nvmf_subsystem_add_host", allow);
    host.until("the event arrives", |h| {
        h.controller.take_event() == Some(AsyncEvent::DISCOVERY_LOG_CHANGE)
    });
    assert_eq!(nvm_subsystems(&mut host).len(), 2);

    // The same through the operator's command.
    let url = format!("tcp://127.0.0.1:{port}");
    let output = place
        .nacre()
        .args(["discover", &url, "--json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains(NQN),
        "{said}{complaint}"
    );
    daemon.stop();
}

fn nvm_subsystems(host: &mut Host) -> Vec<(String, String)> {
    let records = host.discovery_log().into_iter();
    let nvm = records.filter(|r| r.subtype == subtype::NVM);
    nvm.map(|r| (r.subnqn.to_string(), r.trsvcid)).collect()
}

/// Goal: a host without permission gets a permanent refusal with the reason at once. It connects
/// once allowed, and is disconnected when the permission is revoked. Method: a host that is not on
/// the list, a name that does not exist, a listener of another subsystem.
#[test]
fn refusals_report_the_reason() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let address = daemon.listen(NQN, "127.0.0.1:0");
    let refusal = |nqn: &str| Host::new(address, options(nqn), 1).refusal();

    match refusal(NQN) {
        HostError::Refused { status, .. } => {
            assert_eq!(status.code(), StatusCode::CONNECT_INVALID_HOST);
            assert!(status.dnr());
        }
        other => panic!("{other}"),
    }
    let elsewhere = format!("{NQN}-elsewhere");
    daemon.create_subsystem(&elsewhere);
    let other = daemon.listen(&elsewhere, "127.0.0.1:0");
    for nqn in [&elsewhere, "nqn.2025-01.io.nacre:nobody"] {
        match refusal(nqn) {
            HostError::InvalidParameter { parameter, .. } => {
                assert_eq!(parameter, InvalidParameter::SUBNQN);
            }
            other => panic!("{nqn}: {other}"),
        }
    }
    Host::connected(other, options(&elsewhere), &[]).disconnect();

    let host = json!({ "nqn": NQN, "host": HOSTNQN });
    daemon.call("nvmf_subsystem_add_host", host.clone());
    let mut inside = Host::connected(address, options(NQN), &[]);
    assert_eq!(daemon.controllers(NQN), 1);
    daemon.call("nvmf_subsystem_remove_host", host);
    assert_eq!(daemon.controllers(NQN), 0);
    assert!(matches!(inside.refusal(), HostError::Refused { .. }));
}

/// Goal: a connected host sees namespaces that are added, removed and resized. Method: the host
/// never polls, it reacts to events; I/O on each namespace as known at that moment.
#[test]
fn namespaces_change_under_a_connected_host() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_file("disk", 4096, 4 << 20);
    daemon.create_ram("ram", 512, 1 << 20);
    daemon.create_subsystem(NQN);
    let first = daemon.add_namespace(NQN, "disk");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    let mut wish = options(NQN);
    wish.io_queues = 2;
    let mut host = Host::new(address, wish, 4);
    host.until("live", |h| h.controller.is_live());
    host.open_queue(first);
    host.until("its queue", |h| h.queues[0].is_live());

    let second = daemon.add_namespace(NQN, "ram");
    host.until("the new namespace", |h| {
        h.controller.link().namespace(second).is_some()
    });
    host.open_queue(second);
    let data = pattern(512, 2);
    assert_eq!(host.write(1, 2047, 1, &data), Status::Ok);
    assert_eq!(host.read(1, 2047, 1, 512), data);

    let file = std::fs::File::options()
        .write(true)
        .open(place.path("disk.img"));
    file.unwrap().set_len(8 << 20).unwrap();
    assert_eq!(
        host.write(0, 1024, 1, &pattern(4096, 1)),
        Status::OutOfRange
    );
    daemon.call("bdev_uring_rescan", json!({ "name": "disk" }));
    host.until("the new size", |h| {
        h.controller
            .link()
            .namespace(first)
            .is_some_and(|n| n.blocks == 2048)
    });
    assert_eq!(host.write(0, 2047, 1, &pattern(4096, 3)), Status::Ok);

    daemon.call(
        "nvmf_subsystem_remove_ns",
        json!({ "nqn": NQN, "nsid": second }),
    );
    host.until("gone", |h| h.controller.link().namespace(second).is_none());
    let refused = host.write(1, 0, 1, &data);
    assert_ne!(refused, Status::Ok);
    // The other namespace and the association are unaffected.
    assert_eq!(host.read(0, 2047, 1, 4096), pattern(4096, 3));
    assert_eq!(host.queues[0].stats().losses, 0);
    assert_eq!(*host.controller.state(), ControllerState::Live);

    // Deleting a bdev removes its namespaces.
    daemon.call("bdev_uring_delete", json!({ "name": "disk" }));
    host.until("gone", |h| {
        h.controller.link().state().namespaces.is_empty()
    });
    host.pass(Duration::from_millis(20));
    assert!(host.controller.is_live());
    daemon.stop();
}

/// Goal: a device never shrinks under a connected host, whatever happens to its file. The rest of
/// the file is served, the lost part fails, and a restart does not change that. Method: truncate
/// the file, then rescan with the host connected, after a restart, with force, and without hosts.
#[test]
fn nothing_shrinks_under_a_connected_host() {
    let place = Place::new();
    let mut daemon = place.start();
    daemon.create_file("disk", 4096, 8 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "disk");
    let address = daemon.listen(NQN, &free_address("127.0.0.1").to_string());
    let mut host = Host::connected(address, options(NQN), &[nsid]);
    assert_eq!(host.write(0, 2047, 1, &pattern(4096, 1)), Status::Ok);
    let cut = |bytes: u64| {
        let file = std::fs::File::options()
            .write(true)
            .open(place.path("disk.img"));
        file.unwrap().set_len(bytes).unwrap();
    };
    let rescan = |force: bool| json!({ "name": "disk", "force": force });
    let blocks = |daemon: &mut nacre_tests::daemon::Daemon| {
        let listed = daemon.call("bdev_get_bdevs", json!({ "name": "disk" }));
        listed[0]["num_blocks"].as_u64()
    };
    let seen = |host: &Host| host.controller.link().namespace(nsid).map(|n| n.blocks);

    // The command line runs this check before it truncates a file.
    let resized = place.client(&["bdev", "resize", "disk", "4MiB", "--shrink"]);
    let said = String::from_utf8_lossy(&resized.stderr);
    assert!(
        !resized.status.success() && said.contains(HOSTNQN),
        "{said}"
    );
    assert_eq!(host.write(0, 2047, 1, &pattern(4096, 2)), Status::Ok);

    cut(4 << 20);
    let refused = daemon
        .try_call("bdev_uring_rescan", rescan(false))
        .expect_err("a host is connected");
    let refused = refused.to_string();
    for fact in ["4194304", "8388608", HOSTNQN, NQN, "-16"] {
        assert!(refused.contains(fact), "{fact} is not in {refused}");
    }
    assert_eq!(host.write(0, 1023, 1, &pattern(4096, 3)), Status::Ok);
    assert_eq!(
        host.write(0, 1024, 1, &pattern(4096, 3)),
        Status::OutOfRange
    );
    host.pass(Duration::from_millis(50));
    assert_eq!((seen(&host), blocks(&mut daemon)), (Some(2048), Some(2048)));

    daemon.kill();
    let mut daemon = place.start();
    assert_eq!(blocks(&mut daemon), Some(2048), "hosts know this size");
    let mut host = Host::connected(address, options(NQN), &[nsid]);
    assert_eq!(seen(&host), Some(2048));
    assert_eq!(
        host.write(0, 1024, 1, &pattern(4096, 4)),
        Status::OutOfRange
    );
    let file = std::fs::metadata(place.path("disk.img")).unwrap();
    assert_eq!(file.len(), 4 << 20, "a write does not make it longer");

    // A larger size is applied at once, a smaller one with force.
    cut(16 << 20);
    daemon.call("bdev_uring_rescan", rescan(false));
    host.until("the larger size", |h| seen(h) == Some(4096));
    cut(6 << 20);
    daemon.call("bdev_uring_rescan", rescan(true));
    host.until("the smaller size", |h| seen(h) == Some(1536));

    host.disconnect();
    while daemon.controllers(NQN) > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let resized = place.client(&["bdev", "resize", "disk", "4MiB", "--shrink"]);
    let said = String::from_utf8_lossy(&resized.stderr);
    assert!(resized.status.success(), "{said}");
    assert_eq!(blocks(&mut daemon), Some(1024));
    let file = std::fs::metadata(place.path("disk.img")).unwrap();
    assert_eq!(file.len(), 4 << 20);

    // A missing file is not recreated empty under the same identity at the next start.
    daemon.kill();
    std::fs::remove_file(place.path("disk.img")).unwrap();
    let mut daemon = place.start();
    assert!(!place.path("disk.img").exists());
    let missing = daemon.try_call("bdev_get_bdevs", json!({ "name": "disk" }));
    assert!(missing.is_err(), "{missing:?}");
    daemon.stop();
}

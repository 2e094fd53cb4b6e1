//! Goal: a host connected over TCP sees management changes, and management reports the host.
//! Method: our own host side, on the test's thread.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::host::{Connector, HostController, HostOptions};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::commands::admin::Identify;
use nacre_nvmf_wire::identify::cns;
use nacre_nvmf_wire::tcp::Digests;
use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::{DISCOVERY, HOST, NQN, events, get, listen, malloc, namespace, subsystem, turn_until};
use nacre_transport_connect::{Session, SessionError, TcpConnector};

fn connect(port: u16, subnqn: &str) -> Result<Session, SessionError> {
    let subnqn = Nqn::new(subnqn).unwrap();
    connect_as(
        port,
        HostOptions::new(Nqn::new(HOST).unwrap(), [7; 16], subnqn),
    )
}

pub(super) fn connect_as(port: u16, options: HostOptions) -> Result<Session, SessionError> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let connector: Arc<dyn Connector> = Arc::new(TcpConnector::new(address, Digests::NONE, 32));
    let options = HostOptions {
        queue_entries: 32,
        loss_timeout: Some(Duration::ZERO),
        ..options
    };
    Session::connect("the target", options, &connector)
}

/// Goal: the idle timeout of a listener applies over TCP, as given in the call. A host with Keep
/// Alive stays connected.
#[test]
fn silent_hosts_are_disconnected() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let params = json!({
        "nqn": NQN, "listen_address": super::address("0"), "options": { "idle_timeout_s": 1 },
    });
    daemon.call("nvmf_subsystem_add_listener", params);
    let port = super::ports(&daemon, NQN)[0].parse().unwrap();
    let host = |keep_alive| {
        let nqn = |text| Nqn::new(text).unwrap();
        let options = HostOptions {
            keep_alive,
            ..HostOptions::new(nqn(HOST), [7; 16], nqn(NQN))
        };
        connect_as(port, options).unwrap()
    };
    let mut active = host(Duration::from_millis(800));
    let silent = host(Duration::ZERO);
    assert_eq!(controllers(&daemon).len(), 2);
    let started = std::time::Instant::now();
    while started.elapsed() < Duration::from_secs(3) {
        active.poll();
        daemon.run(async { tokio::time::sleep(Duration::from_millis(5)).await });
    }
    let left = controllers(&daemon);
    assert_eq!(left.len(), 1, "{left:?}");
    assert!(active.controller_mut().is_live());
    drop(silent);
}

fn active_namespaces(session: &mut Session) -> Vec<u32> {
    let list = session
        .identify(Identify::new(cns::ACTIVE_NAMESPACES), 0)
        .unwrap();
    let ids = list
        .chunks_exact(4)
        .map(|id| u32::from_le_bytes(id.try_into().unwrap()));
    ids.take_while(|id| *id != 0).collect()
}

fn controllers(daemon: &TestDaemon) -> Vec<Value> {
    let list = daemon.call("nvmf_subsystem_get_controllers", json!({ "nqn": NQN }));
    list.as_array().unwrap().clone()
}

/// Polls the host until `done`.
#[track_caller]
fn poll_until(
    session: &mut Session,
    what: &str,
    mut done: impl FnMut(&mut HostController) -> bool,
) {
    for _ in 0..10_000 {
        session.poll();
        if done(session.controller_mut()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{what}: not within 10 seconds");
}

#[test]
fn a_connected_host_is_listed_and_counted() {
    let daemon = test_daemon();
    malloc(&daemon, "m0", None);
    subsystem(&daemon, NQN);
    namespace(&daemon, NQN, "m0");
    let port = listen(&daemon, NQN);
    let session = connect(port, NQN).unwrap();
    let listed = controllers(&daemon);
    let cntlid = listed[0]["cntlid"].clone();
    assert_eq!(
        listed,
        [json!({
            "cntlid": cntlid, "cntrltype": "io", "hostnqn": HOST,
            "hostid": "07070707-0707-0707-0707-070707070707", "num_io_qpairs": 1,
        })]
    );
    let qpairs = daemon.call("nvmf_subsystem_get_qpairs", json!({ "nqn": NQN }));
    let peer = qpairs[0]["peer_address"]["trsvcid"].clone();
    let thread = daemon.call("thread_get_stats", json!(null))["threads"][0]["name"].clone();
    assert_eq!(
        qpairs,
        json!([{
            "cntlid": cntlid, "qid": 0, "state": "enabled", "thread": thread, "hostnqn": HOST,
            "listen_address": { "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port.to_string() },
            "peer_address": { "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": peer },
        }])
    );
    let stats = daemon.call("nvmf_get_stats", json!(null));
    let group = &stats["poll_groups"][0];
    assert_eq!(
        (
            &group["name"],
            &group["admin_qpairs"],
            &group["current_admin_qpairs"],
            &group["current_io_qpairs"],
            &group["transports"]
        ),
        (
            &thread,
            &json!(1),
            &json!(1),
            &json!(0),
            &json!([{ "trtype": "TCP" }])
        )
    );
    let done = group["completed_nvme_io"].as_u64().unwrap();
    assert!(done > 3, "Connect, enabling and Identify: {done}");
    let service = port.to_string();
    let came = || {
        let stats = daemon.call("nvmf_get_stats", json!(null));
        let all = stats["listeners"].as_array().unwrap().clone();
        let here = |of: &&Value| of["address"]["trsvcid"].as_str() == Some(&service);
        all.iter().find(here).cloned().unwrap()
    };
    let before = came();
    assert_eq!(
        (&before["accepted"], &before["refused"]),
        (&json!(1), &json!(0))
    );
    assert!(
        before["completed_nvme_io"].as_u64().unwrap() >= done,
        "{before}"
    );
    let metrics = daemon.call("metrics_get", json!({ "format": "text" }));
    let line = format!(
        "nacre_listener_accepted_total{{transport=\"TCP\",address=\"127.0.0.1:{port}\"}} 1"
    );
    assert!(
        metrics.as_str().unwrap().contains(&line),
        "{line} in {metrics}"
    );
    let of = format!("{{subsystem=\"{NQN}\",host=\"{HOST}\",transport=\"TCP\",op=\"other\"}} ");
    for name in ["operations_total", "latency_seconds_count"] {
        let line = format!("nacre_nvmf_{name}{of}");
        let metrics = metrics.as_str().unwrap();
        let value = metrics.lines().find_map(|l| l.strip_prefix(&line));
        let value = value.unwrap_or_else(|| panic!("{line} in {metrics}"));
        assert!(value.parse::<f64>().unwrap() > 3.0, "{line}{value}");
    }
    session.disconnect();
    turn_until(&daemon, "the controller disconnects", || {
        controllers(&daemon).is_empty()
    });
    let group = &daemon.call("nvmf_get_stats", json!(null))["poll_groups"][0];
    assert_eq!(
        (&group["admin_qpairs"], &group["current_admin_qpairs"]),
        (&json!(1), &json!(0))
    );
    assert!(
        group["completed_nvme_io"].as_u64().unwrap() >= done,
        "counters are kept"
    );
    let (before, after) = (&before["completed_nvme_io"], &came()["completed_nvme_io"]);
    assert!(after.as_u64() >= before.as_u64(), "{after} after {before}");
}

#[test]
fn hosts_see_the_limits_of_the_transport() {
    let daemon = test_daemon();
    let transport = json!({
        "trtype": "TCP", "max_queue_depth": 17, "max_io_qpairs_per_ctrlr": 3, "max_io_size": 65536,
        "in_capsule_data_size": 4096, "kas": 50, "min_kato": 20_000,
    });
    daemon.call("nvmf_create_transport", transport);
    subsystem(&daemon, NQN);
    let port = listen(&daemon, NQN);
    let mut session = connect(port, NQN).unwrap();
    let data = session.identify(Identify::new(cns::CONTROLLER), 0).unwrap();
    let number = |at: usize, bytes: usize| {
        let digits = data[at..at + bytes].iter().rev();
        digits.fold(0u32, |sum, byte| sum << 8 | u32::from(*byte))
    };
    // Base figure 313: MDTS, KAS, MAXCMD, IOCCSZ.
    let limits = (
        number(77, 1),
        number(320, 2),
        number(514, 2),
        number(1792, 4),
    );
    assert_eq!(limits, (4, 50, 17, (64 + 4096) / 16));
    session.disconnect();
}

#[test]
fn only_allowed_hosts_connect_and_removed_hosts_are_disconnected() {
    let daemon = test_daemon();
    daemon.call("nvmf_create_subsystem", json!({ "nqn": NQN }));
    let port = listen(&daemon, NQN);
    assert!(connect(port, NQN).is_err(), "no host is allowed");
    let host = json!({ "nqn": NQN, "host": HOST });
    daemon.call("nvmf_subsystem_add_host", host.clone());
    let mut session = connect(port, NQN).unwrap();
    assert_eq!(daemon.call("nvmf_subsystem_remove_host", host), true);
    assert_eq!(
        controllers(&daemon),
        [] as [Value; 0],
        "disconnected when the call returns"
    );
    poll_until(&mut session, "the host notices", |c| !c.is_live());
    assert!(connect(port, NQN).is_err(), "no longer allowed");
}

#[test]
fn a_subsystem_with_connected_hosts_is_deleted() {
    let daemon = test_daemon();
    malloc(&daemon, "m0", None);
    subsystem(&daemon, NQN);
    namespace(&daemon, NQN, "m0");
    let port = listen(&daemon, NQN);
    let mut session = connect(port, NQN).unwrap();
    assert_eq!(
        daemon.call("nvmf_delete_subsystem", json!({ "nqn": NQN })),
        true
    );
    poll_until(&mut session, "the host notices", |c| !c.is_live());
    assert!(connect(port, NQN).is_err(), "no listener");
    assert_eq!(events(&daemon, "nvmf_subsystem_remove"), [NQN]);
    // The device is free: a stacked device can claim it exclusively.
    let passthru = json!({ "name": "p0", "base_bdev_name": "m0" });
    assert_eq!(daemon.call("bdev_passthru_create", passthru), "p0");
}

/// Goal: a host has one controller per port; counters of a departed controller are kept.
#[test]
fn host_counters_do_not_fall_when_a_controller_leaves() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let port = listen(&daemon, NQN);
    let counted = || -> Option<f64> {
        let metrics = daemon.call("metrics_get", json!({ "format": "text" }));
        let name = format!(
            "nacre_nvmf_operations_total{{subsystem=\"{NQN}\",host=\"{HOST}\",transport=\"TCP\",op=\"other\"}} "
        );
        let mut lines = metrics.as_str().unwrap().lines();
        lines.find_map(|line| line.strip_prefix(&name)?.parse().ok())
    };
    let (mut one, other) = (connect(port, NQN).unwrap(), connect(port, NQN).unwrap());
    for _ in 0..20 {
        active_namespaces(&mut one);
    }
    let before = counted().unwrap();
    assert!(before > 20.0, "{before}");
    for (session, left) in [(one, 1), (other, 0)] {
        session.disconnect();
        turn_until(&daemon, "a controller disconnects", || {
            controllers(&daemon).len() == left
        });
        match counted() {
            Some(after) => assert!(left == 1 && after >= before, "{after}, {before} before"),
            None => assert_eq!(left, 0),
        }
    }
}

/// Goal: the transport's cost of a session is visible: system calls, and PDUs by direction.
#[test]
fn tcp_system_calls_and_pdus_are_counted() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let port = listen(&daemon, NQN);
    let mut session = connect(port, NQN).unwrap();
    assert_eq!(active_namespaces(&mut session), [] as [u32; 0]);
    let metrics = daemon.call("metrics_get", json!({ "format": "text" }));
    let count = |what: &str| -> f64 {
        let name = format!("nacre_transport_work_total{{transport=\"TCP\",what=\"{what}\"}} ");
        let mut lines = metrics.as_str().unwrap().lines();
        let value = lines.find_map(|line| line.strip_prefix(&name));
        value.expect(&name).parse().unwrap()
    };
    for what in ["receive", "send", "epoll", "pdu_received", "pdu_sent"] {
        assert!(count(what) >= 1.0, "{what}");
    }
    assert_eq!((count("send_partial"), count("buffer_wait")), (0.0, 0.0));
}

#[test]
fn hosts_receive_events_for_changes() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    malloc(&daemon, "m0", None);
    let port = listen(&daemon, NQN);
    let mut session = connect(port, NQN).unwrap();
    assert_eq!(active_namespaces(&mut session), [] as [u32; 0]);
    let line = format!("nacre_nvmf_namespace{{subsystem=\"{NQN}\",nsid=\"1\",bdev=\"m0\"}} 1");
    let counted = || {
        let metrics = daemon.call("metrics_get", json!({ "format": "text" }));
        metrics
            .as_str()
            .unwrap()
            .lines()
            .any(|l| l.starts_with(&line))
    };
    assert!(!counted());
    namespace(&daemon, NQN, "m0");
    assert_eq!(active_namespaces(&mut session), [1]);
    assert!(counted(), "the metrics name its device: {line}");
    daemon.call("bdev_malloc_delete", json!({ "name": "m0" }));
    assert_eq!(active_namespaces(&mut session), [] as [u32; 0]);
    assert!(!counted());
    assert_eq!(get(&daemon, NQN)["namespaces"], json!([]));
    session.disconnect();
}

#[test]
fn the_discovery_log_lists_subsystems_and_addresses() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let port = listen(&daemon, NQN);
    let own = listen(&daemon, DISCOVERY);
    let referral =
        json!({ "address": { "trtype": "tcp", "traddr": "192.0.2.9", "trsvcid": "8009" } });
    daemon.call("nvmf_discovery_add_referral", referral);
    for asked in [port, own] {
        let mut session = connect(asked, DISCOVERY).unwrap();
        let mut entries: Vec<(String, String)> = session
            .discovery_log()
            .unwrap()
            .records
            .into_iter()
            .map(|r| (r.subnqn.to_string(), r.trsvcid))
            .collect();
        entries.sort();
        let mut expected = vec![
            (DISCOVERY.to_owned(), own.to_string()),
            (DISCOVERY.to_owned(), "8009".to_owned()),
            (NQN.to_owned(), port.to_string()),
        ];
        if asked == port {
            expected.push((DISCOVERY.to_owned(), port.to_string()));
        }
        expected.sort();
        assert_eq!(entries, expected);
        session.disconnect();
    }
}

//! Goal: the RDMA transport is created, listed, stored and refused like TCP. Method: simulated
//! devices.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use nacre_nvmf::transport::{HostCommand, HostEvent, HostTransport};
use nacre_nvmf_wire::Sqe;
use nacre_nvmf_wire::opcode::io;
use nacre_reactor::Nanos;
use nacre_transport_rdma::{RdmaHostOptions, RdmaHosts, bytes_per_core};
use nacre_transport_rdma_verbs::WcStatus;
use nacre_transport_rdma_verbs::sim::{Target, attributes};
use serde_json::{Value, json};

use super::super::super::testing::{TestDaemon, test_daemon};
use super::{NQN, durable, subsystem};

const PORT0: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 10));

fn on(traddr: &str) -> Value {
    json!({ "nqn": NQN, "listen_address": { "trtype": "rdma", "adrfam": "ipv4", "traddr": traddr, "trsvcid": "4420" } })
}

fn listeners(daemon: &TestDaemon) -> Value {
    daemon.call("nvmf_subsystem_get_listeners", json!({ "nqn": NQN }))
}

#[test]
fn a_transport_is_listed_as_spdk_lists_it() {
    let daemon = TestDaemon::nvmf_tgt();
    let asked = json!({
        "trtype": "rdma", "max_srq_depth": 128, "no_srq": false, "acceptor_backlog": 7,
        "no_wr_batching": false, "c2h_success": true, "max_queue_depth": 64,
    });
    daemon.call("nvmf_create_transport", asked);
    daemon.call("nvmf_create_transport", json!({ "trtype": "tcp" }));
    let listed = daemon.call("nvmf_get_transports", json!({ "trtype": "RDMA" }));
    assert_eq!(listed.as_array().unwrap().len(), 1);
    for (field, value) in [
        ("trtype", json!("RDMA")),
        ("max_queue_depth", json!(64)),
        ("max_srq_depth", json!(128)),
        ("no_srq", json!(false)),
        ("acceptor_backlog", json!(7)),
        ("no_wr_batching", json!(false)),
        ("in_capsule_data_size", json!(4096)),
    ] {
        assert_eq!(listed[0][field], value, "{field} in {listed}");
    }
    assert_eq!(listed[0].get("c2h_success"), None);
    let tcp = daemon.call("nvmf_get_transports", json!({ "trtype": "TCP" }));
    assert_eq!(tcp[0]["c2h_success"], json!(true));
    assert_eq!(tcp[0].get("max_srq_depth"), None);
    let again = daemon.refused("nvmf_create_transport", json!({ "trtype": "RDMA" }));
    assert_eq!(again.message, "Transport type 'RDMA' already exists");
}

#[test]
fn a_listener_creates_its_transport_and_both_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let before = {
        let daemon = durable(dir.path());
        daemon
            .fabric
            .add_device(attributes("sim0"), &[PORT0])
            .unwrap();
        subsystem(&daemon, NQN);
        let needed = || {
            let plane = daemon.engine.plane().unwrap();
            let config = daemon.engine.settings.rdma_transport();
            let rdma = &daemon.engine.rdma;
            rdma.memory_needed(&plane.arenas, plane.target.cores(), &config)
        };
        assert!(needed() > 16 << 20, "{} bytes to register", needed());
        daemon.call("nvmf_subsystem_add_listener", on("192.0.2.10"));
        assert_eq!(needed(), 0, "the memory is registered");
        let rdma = daemon.engine.rdma.plug().expect("it was made");
        assert_eq!(rdma.listening(), (1, 1));
        listeners(&daemon)
    };
    assert_eq!(before[0]["address"]["trtype"], "RDMA");
    let daemon = durable(dir.path());
    // The device is missing now. The record is kept, and the restore is retried.
    assert_eq!(listeners(&daemon), json!([]));
    daemon
        .fabric
        .add_device(attributes("sim0"), &[PORT0])
        .unwrap();
    for record in daemon.engine.journal.waiting() {
        daemon.run(daemon.engine.replay(&record));
    }
    assert_eq!(listeners(&daemon), before);
    daemon.call("nvmf_subsystem_remove_listener", on("192.0.2.10"));
    assert_eq!(daemon.engine.rdma.plug().unwrap().listening(), (0, 0));
}

/// Goal: a listener without its device is reported as absent, and as present when the device
/// returns.
#[test]
fn a_listener_without_its_device_is_absent() {
    let daemon = test_daemon();
    let add = || {
        let added = daemon.fabric.add_device(attributes("sim0"), &[PORT0]);
        added.unwrap()
    };
    let device = add();
    subsystem(&daemon, NQN);
    daemon.call("nvmf_subsystem_add_listener", on("192.0.2.10"));
    let becomes = |actual: &str| {
        let begun = Instant::now();
        loop {
            let all = daemon.call("nvmf_get_listeners", json!(null));
            let listener = all["listeners"][0].clone();
            if listener["actual"] == actual {
                return listener;
            }
            assert!(begun.elapsed().as_secs() < 20, "{all}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    assert_eq!(becomes("listening").get("reason"), None);
    daemon.fabric.remove_device(device);
    let absent = becomes("absent");
    assert_eq!(absent["reason"], "no_rdma_dev", "{absent}");
    assert!(absent["remedy"].as_str().unwrap().contains("is back"));
    add();
    assert_eq!(becomes("listening").get("reason"), None);
}

#[test]
fn an_address_without_a_device_is_refused_with_a_remedy() {
    let daemon = test_daemon();
    subsystem(&daemon, NQN);
    let refused = daemon.refused("nvmf_subsystem_add_listener", on("192.0.2.99"));
    assert_eq!(refused.code, -32602);
    let facts = refused.data.unwrap();
    assert!(facts.cause.contains("nacre rdma gids"), "{}", facts.cause);
    // TCP is unaffected.
    let tcp = json!({ "nqn": NQN, "listen_address": { "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "0" } });
    daemon.call("nvmf_subsystem_add_listener", tcp);
}

/// Goal: listener options apply as far as the transport's receive buffers have room; otherwise the
/// reason is reported.
#[test]
fn listener_options_are_limited_by_the_receive_buffers() {
    let daemon = test_daemon();
    daemon
        .fabric
        .add_device(attributes("sim0"), &[PORT0])
        .unwrap();
    subsystem(&daemon, NQN);
    let add = |service: &str, options: Value| {
        let mut params = on("192.0.2.10");
        params["listen_address"]["trsvcid"] = service.into();
        params["options"] = options;
        params
    };
    for bytes in [100, 2 << 20] {
        let params = add("4420", json!({ "in_capsule_data_size": bytes }));
        let refused = daemon.refused("nvmf_subsystem_add_listener", params);
        let facts = refused.data.unwrap();
        assert_eq!(facts.field.as_deref(), Some("options.in_capsule_data_size"));
    }
    let options = json!({ "tos": 104, "max_queue_depth": 32, "fabric": "roce" });
    daemon.call("nvmf_subsystem_add_listener", add("4420", options));
    for (service, bytes) in [("4421", 1024), ("4422", 8192)] {
        let options = json!({ "in_capsule_data_size": bytes });
        daemon.call("nvmf_subsystem_add_listener", add(service, options));
    }
    let all = listeners(&daemon);
    assert_eq!(all[0].get("in_capsule_data_size"), None);
    assert_eq!(all[1]["in_capsule_data_size"], 1024);
    assert_eq!(all[1].get("in_capsule_reason"), None);
    assert_eq!(all[2]["in_capsule_data_size"], 4096, "{all}");
    let reason = all[2]["in_capsule_reason"].as_str().unwrap();
    assert!(
        reason.contains("raise rdma.in_capsule_data_size"),
        "{reason}"
    );
    // Another subsystem on the same address.
    subsystem(&daemon, "nqn.2024-01.io.nacre:another");
    let mut second = add("4421", json!({ "in_capsule_data_size": 512 }));
    second["nqn"] = "nqn.2024-01.io.nacre:another".into();
    daemon.call("nvmf_subsystem_add_listener", second.clone());
    let all = daemon.call(
        "nvmf_subsystem_get_listeners",
        json!({ "nqn": second["nqn"] }),
    );
    assert_eq!(all[0]["in_capsule_data_size"], 1024);
    let reason = all[0]["in_capsule_reason"].as_str().unwrap();
    assert!(reason.contains("listened here first"), "{reason}");
}

/// Goal: receive buffers are sized for the file's listeners, and their memory is accounted. TCP
/// accepts the same options as RDMA.
#[test]
fn receive_buffers_fit_the_listeners_of_the_file() {
    let declared = |text: &str| {
        let file = Some(("nacre.toml", text));
        let loaded = crate::config::load_text(file, [], &[]).unwrap_or_else(|e| panic!("{e}"));
        loaded.settings
    };
    let listener = |rdma: &str| {
        format!(
            "[[nvmf.listener]]\nname = \"a\"\nrdma = \"{rdma}\"\nin_capsule_data_size = 16384\n"
        )
    };
    let wanted = declared(&listener("prefer"));
    let config = wanted.rdma_transport();
    assert_eq!(config.listener_in_capsule_data_size, 16384);
    assert_eq!(
        config.in_capsule_data_size, 4096,
        "the default of other listeners"
    );
    let without = declared(&listener("off")).rdma_transport();
    assert_eq!(
        without.listener_in_capsule_data_size, 0,
        "RDMA is not wanted"
    );
    assert!(bytes_per_core(&config) > bytes_per_core(&without) + 4096 * 12288);

    let daemon = TestDaemon::with(wanted, None);
    daemon
        .fabric
        .add_device(attributes("sim0"), &[PORT0])
        .unwrap();
    subsystem(&daemon, NQN);
    for trtype in ["rdma", "tcp"] {
        let traddr = if trtype == "rdma" {
            "192.0.2.10"
        } else {
            "127.0.0.1"
        };
        let mut params = on(traddr);
        params["listen_address"]["trtype"] = trtype.into();
        params["listen_address"]["trsvcid"] = if trtype == "rdma" { "4420" } else { "0" }.into();
        params["options"] = json!({ "in_capsule_data_size": 16384 });
        daemon.call("nvmf_subsystem_add_listener", params);
    }
    let all = listeners(&daemon);
    for at in 0..2 {
        assert_eq!(all[at]["in_capsule_data_size"], 16384, "{all}");
        assert_eq!(all[at].get("in_capsule_reason"), None);
    }
    let mut params = on("127.0.0.1");
    params["listen_address"]["trtype"] = "tcp".into();
    params["listen_address"]["trsvcid"] = "0".into();
    params["options"] = json!({ "in_capsule_data_size": 1 << 20 });
    daemon.call("nvmf_subsystem_add_listener", params);
}

/// Goal: a connection shows up in every reply and metric that reports connections.
#[test]
fn a_connection_is_seen_in_answers_and_metrics() {
    let daemon = test_daemon();
    assert_eq!(daemon.call("rdma_get_qpairs", json!(null)), json!([]));
    assert_eq!(daemon.call("rdma_get_mrs", json!(null)), json!([]));
    let none = daemon.call("rdma_get_stats", json!(null));
    assert_eq!(none["rdma_connections"], 0);

    daemon
        .fabric
        .add_device(attributes("sim0"), &[PORT0])
        .unwrap();
    let from = IpAddr::from([192, 0, 2, 20]);
    daemon
        .fabric
        .add_device(attributes("sim1"), &[from])
        .unwrap();
    subsystem(&daemon, NQN);
    daemon.call("nvmf_subsystem_add_listener", on("192.0.2.10"));
    let hosts = RdmaHosts::new(daemon.fabric.provider(), Vec::new()).unwrap();
    let dialer = hosts.dialer(1, 32).unwrap();
    let options = RdmaHostOptions {
        source: Some(from),
        ..RdmaHostOptions::new(0, 32)
    };
    let mut host = dialer.connect((PORT0, 4420).into(), options).unwrap();
    let mut events = Vec::new();
    let established = || {
        let pairs = daemon.call("rdma_get_qpairs", json!(null));
        pairs[0]["state"] == "established"
    };
    let begun = Instant::now();
    let is_ready = |events: &[HostEvent]| events.iter().any(|e| matches!(e, HostEvent::Ready));
    while !established() || !is_ready(&events) {
        assert!(begun.elapsed().as_secs() < 20, "{events:?}");
        host.poll(Nanos::ZERO + begun.elapsed(), &mut events, 16);
        std::thread::sleep(Duration::from_millis(5));
    }
    let pairs = daemon.call("rdma_get_qpairs", json!(null));
    let reactor = daemon.engine.plane().unwrap().reactors[0].name().to_owned();
    for (field, value) in [
        ("device", json!("sim0")),
        ("local", json!("192.0.2.10:4420")),
        ("reactor", json!(reactor)),
        ("queue_depth", json!(32)),
    ] {
        assert_eq!(pairs[0][field], value, "{field} in {pairs}");
    }
    let stats = daemon.call("rdma_get_stats", json!(null));
    assert_eq!(stats["rdma_connections"], 1);
    assert_eq!(stats["cm_events"]["RDMA_CM_EVENT_ESTABLISHED"], 1);
    let nothing = json!({ "count": 0, "total_us": 0, "p50_us": null, "p99_us": null });
    for op in ["send", "read", "write"] {
        assert_eq!(stats["latency"][op], nothing);
    }
    assert_eq!(stats["reactors"][0]["device"], "sim0");
    assert!(stats["reactors"][0]["counters"]["receives_posted"].as_u64() > Some(0));

    let memory = daemon.call("rdma_get_mrs", json!(null));
    assert_eq!(memory[0]["device"], "sim0");
    assert_eq!(memory[0]["access"], "local");
    let arenas = memory[0]["arenas"].as_array().unwrap();
    assert_eq!(memory[0]["regions"], arenas.len());
    let sum: u64 = arenas.iter().map(|a| a["bytes"].as_u64().unwrap()).sum();
    assert_eq!(memory[0]["bytes"], sum);
    assert_eq!(memory[0]["max_mr_size"], 1 << 30);
    let mrs = memory[0]["mrs"].as_array().unwrap();
    for (at, (mr, arena)) in mrs.iter().zip(arenas).enumerate() {
        let described = (&mr["arena"], &mr["offset"], &mr["bytes"]);
        assert_eq!(described, (&json!(at), &json!(0), &arena["bytes"]));
    }
    assert_eq!(mrs.len(), arenas.len());

    let groups = daemon.call("nvmf_get_stats", json!(null));
    let transports = groups["poll_groups"][0]["transports"].as_array().unwrap();
    let rdma = transports.iter().find(|t| t["trtype"] == "RDMA").unwrap();
    assert_eq!(rdma["devices"][0]["name"], "sim0");
    let metrics = daemon.call("metrics_get", json!({ "format": "text" }));
    let metrics = metrics.as_str().unwrap();
    for line in [
        "nacre_rdma_connections{listener=\"192.0.2.10:4420\",device=\"sim0\"} 1",
        "nacre_rdma_operations_total{type=\"recv\",device=\"sim0\"} 0",
        "nacre_copy_bytes_total{by=\"device\"} 0",
        "nacre_rdma_cm_events_total{event=\"RDMA_CM_EVENT_CONNECT_REQUEST\"} 1",
        "nacre_rdma_connect_failures_total{stage=\"establish\",reason=\"timeout\"} 0",
        "nacre_rdma_latency_seconds_bucket{le=\"0.000001\",op=\"read\",device=\"sim0\"} 0",
        "nacre_rdma_latency_seconds_count{op=\"write\",device=\"sim0\"} 0",
        "nacre_cq_poll_batch_bucket{le=\"1.0\",device=\"sim0\"} 0",
        &format!("nacre_cq_entries{{reactor=\"{reactor}\",device=\"sim0\"}} 4096"),
        // 64 shared receives, plus two requests per command and 16 READs of a queue pair, rounded
        // up to a power of two.
        &format!("nacre_cq_entries_reserved{{reactor=\"{reactor}\",device=\"sim0\"}} 192"),
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    // A failure is an event with its details; so is a host that cannot be served.
    let number = pairs[0]["qp_num"].as_u64().unwrap() as u32;
    let status = WcStatus::RemoteOperation;
    daemon.fabric.inject_status(number, Target::Recv, 0, status);
    host.submit(HostCommand {
        sqe: Sqe::for_namespace(io::FLUSH, 1, 1),
        write: None,
        read: None,
    });
    let odd = RdmaHostOptions {
        source: Some(from),
        connection_retries: 0,
        ..RdmaHostOptions::new(u16::MAX, 32)
    };
    let another = hosts.dialer(1, 32).unwrap();
    let mut other = another.connect((PORT0, 4420).into(), odd).unwrap();
    let event = |kind: &str| {
        let reply = daemon.call("events_get", json!({ "categories": ["transport"] }));
        let all = reply["events"].as_array().unwrap().clone();
        all.into_iter().find(|event| event["type"] == kind)
    };
    let begun = Instant::now();
    while event("rdma_queue_failed").is_none() || event("rdma_refused").is_none() {
        assert!(begun.elapsed().as_secs() < 60, "{events:?}");
        host.poll(Nanos::ZERO + begun.elapsed(), &mut events, 16);
        other.poll(Nanos::ZERO + begun.elapsed(), &mut events, 16);
        std::thread::sleep(Duration::from_millis(5));
    }
    let failed = event("rdma_queue_failed").unwrap();
    let facts = &failed["facts"];
    for (field, value) in [
        ("device", json!("sim0")),
        ("qp_num", json!(number)),
        ("status", json!("IBV_WC_REM_OP_ERR")),
        ("operation", json!("RECV")),
        ("vendor_error", json!(0)),
    ] {
        assert_eq!(facts[field], value, "{field} in {failed}");
    }
    let counted = &facts["counters"]["completion_errors"];
    assert_eq!(counted["IBV_WC_REM_OP_ERR"], 1);
    assert_eq!(
        (&failed["ctx"], &failed["severity"]),
        (&json!("192.0.2.20"), &json!("warning"))
    );
    let text = failed["text"].as_str().unwrap();
    assert!(
        text.starts_with("Work completion error: IBV_WC_REM_OP_ERR of a RECV"),
        "{text}"
    );
    let refused = event("rdma_refused").unwrap();
    assert_eq!(refused["facts"]["code"], 3, "{refused}");
    drop((host, other));
}

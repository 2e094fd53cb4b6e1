//! Tests of `nacre top --once`, which needs no terminal: its table and its JSON.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use super::fake::{Fake, cells, nacre};

/// One reactor, one namespace; each look finds it a second older.
fn daemon() -> Fake {
    let looks = AtomicU64::new(0);
    Fake::play(move |method, _| {
        let n = looks.load(Ordering::Relaxed);
        Ok(match method {
            "spdk_get_version" => json!({ "version": "SPDK v26.09-pre", "nacre": "0.1.0" }),
            "framework_get_reactors" => {
                looks.fetch_add(1, Ordering::Relaxed);
                json!({ "tick_rate": 1000, "pid": 7, "reactors": [{
                    "lcore": 1, "busy": (n + 1) * 250, "idle": (n + 1) * 750, "sleep": (n + 1) * 500,
                    "mode": "adaptive", "lw_threads": [{ "name": "reactor_1" }],
                }]})
            }
            "bdev_get_iostat" => json!({ "tick_rate": 1000, "ticks": n * 1000, "bdevs": [{
                "name": "ram0", "num_read_ops": n * 500, "bytes_read": n * 500 * 4096, "read_latency_ticks": n * 500,
            }]}),
            "nvmf_get_subsystems" => json!([{
                "nqn": "nqn.s", "subtype": "NVMe", "namespaces": [{ "nsid": 1, "bdev_name": "ram0" }],
                "listen_addresses": [{ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4420" }],
            }]),
            "nvmf_get_stats" => json!({ "poll_groups": [] }),
            method => return Err(json!({ "code": -32601, "message": method })),
        })
    })
}

#[test]
fn once() {
    let daemon = daemon();
    let printed = daemon.nacre("top --once --interval 100ms").printed();
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(
        lines[0],
        "Nacre 0.1.0 (7): 0 hosts, 0 queues, 500 IOPS, 2.05 MB/s read, 0 B/s written"
    );
    let rows = cells(&printed);
    assert!(
        rows.contains(&vec![
            "reactor_1",
            "1",
            "adaptive",
            "25.0%",
            "25.0%",
            "50.0%",
            "0",
            "-"
        ]),
        "{printed}"
    );
    assert!(
        rows.contains(&vec!["tcp://127.0.0.1:4420", "1", "0", "0", "0"]),
        "{printed}"
    );
    let namespace = [
        "nqn.s", "1", "ram0", "500", "0", "2.05", "MB/s", "0", "B/s", "1.00ms", "-", "-", "0",
    ];
    assert!(rows.contains(&namespace.to_vec()), "{printed}");
    // No host is connected: the command makes no call per subsystem.
    assert!(
        daemon
            .asked()
            .iter()
            .all(|(method, _)| method != "nvmf_subsystem_get_qpairs")
    );

    let document = daemon.nacre("top --json --interval 100ms").json();
    assert_eq!(
        document["namespaces"][0]["read"],
        json!({ "iops": 500.0, "bytes_per_s": 2_048_000.0, "latency_avg_us": 1000.0 })
    );
    assert_eq!(document["namespaces"][0]["latency_p99_us"], Value::Null);
    assert_eq!(
        document["reactors"][0]["share"],
        json!({ "busy": 0.25, "idle": 0.25, "sleep": 0.5 })
    );
}

#[test]
fn refusals() {
    let daemon = daemon();
    let error = daemon.nacre("top").failed(2);
    assert!(
        error.contains("no terminal") && error.contains("--once"),
        "{error}"
    );
    assert_eq!(daemon.nacre("top --once --interval 1ms").code, 2);
    let nowhere = tempfile::tempdir().unwrap();
    let error = nacre("top --once", &nowhere.path().join("no.sock")).failed(3);
    assert!(error.contains("no daemon answers"), "{error}");
}

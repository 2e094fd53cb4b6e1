//! Tests of `nacre volume` and `nacre events`.

use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use super::fake::{Fake, cells};

/// A volume with one replica in sync, and one that has `left` bytes to get.
fn volume(left: u64) -> Value {
    let resync = json!({
        "kind": "partial", "source": "a", "total_bytes": 4 << 20, "left_bytes": left,
        "bytes_per_s": 1 << 20, "left_s": 3,
    });
    let replica = |device: &str, state: &str, why: Value, resync: Value| {
        json!({
            "id": format!("id-{device}"), "slot": 0, "device": device, "state": state, "attached": true,
            "offline": false, "transport": "local", "read_latency_us": 12, "write_latency_us": null,
            "why": why, "resync": resync, "last_resync": null, "reads": 5, "writes": 6, "errors": 0,
        })
    };
    let (state, second) = match left {
        0 => ("healthy", replica("b", "in_sync", Value::Null, Value::Null)),
        _ => (
            "degraded",
            replica("b", "syncing", json!("it was pulled out"), resync),
        ),
    };
    json!({
        "name": "v", "uuid": "u", "bdev": "v", "state": state, "why": null, "block_size": 512,
        "num_blocks": 20480, "epoch": 3, "revision": 12, "region_size": 1 << 20, "num_regions": 10,
        "dirty_regions": 4, "settings": { "min_in_sync": 1, "description": "of the shop" },
        "subsystems": ["nqn.x"],
        "replicas": [replica("a", "in_sync", Value::Null, Value::Null), second],
        "verify": { "repair": false, "running": false, "total_bytes": 8, "compared_bytes": 8,
            "different_blocks": 2, "repaired_blocks": 1, "examples": [7] },
        "queues": 1, "reactor": "reactor_0",
        "counters": { "log_waits": 0, "overlap_waits": 0, "reads_moved": 0, "frozen_answers": 0 },
    })
}

fn daemon() -> Fake {
    let looks = AtomicU32::new(0);
    Fake::play(move |method, params| match method {
        "volume_list" => Ok(json!([volume(2 << 20)])),
        "volume_get" if params["name"] == "u" => {
            let round = looks.fetch_add(1, Ordering::Relaxed);
            Ok(volume(if round < 2 { 1 << 20 } else { 0 }))
        }
        "volume_remove_replica" if params["force"] != "v" => Err(json!({
            "code": -1, "message": "Operation not permitted",
            "data": { "field": "force", "cause": "that would take the last good replica of \"v\" away", "remedy": "do this" },
        })),
        "volume_publish" if params["name"] == "w" => {
            Ok(json!({ "nqn": "nqn.w", "nsid": 1, "uuid": "u", "listen_addresses": [] }))
        }
        "volume_publish" => Ok(json!({ "nqn": "nqn.x", "nsid": 1, "uuid": "u",
            "listen_addresses": [{ "trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "4420" }] })),
        "volume_get_connections" => Ok(
            json!([{ "nqn": "nqn.x", "host": "nqn.h", "host_id": "i", "cntlid": 1,
            "transport": "RDMA", "listen_address": "127.0.0.1:4420", "peer_address": "127.0.0.1:5", "queues": 2,
            "tls": "TLS_AES_128_GCM_SHA256", "psk": "h-tls", "dhchap_key": "h-own", "admitted": true }]),
        ),
        "remote_get_paths" => Ok(json!([
            { "bdev": "b", "trid": { "trtype": "RDMA", "traddr": "192.0.2.7", "trsvcid": "4420" }, "state": "enabled",
              "ana_state": "optimized", "current": true, "tls": "TLS_AES_256_GCM_SHA384", "psk": "b-tls", "dhchap_key": "b-own", "reads": 3, "writes": 4, "resent": 0, "why": null },
            { "bdev": "other", "trid": { "trtype": "TCP", "traddr": "192.0.2.8", "trsvcid": "4420" } },
        ])),
        "events_get" => Ok(
            json!({ "events": [{ "id": 4, "time": "2026-11-22T10:00:00.000Z", "category": "replica",
            "severity": "warning", "type": "replica_out", "ctx": "v/b", "text": "it went", "left_out": 3 }],
            "next": 5, "lost": 0 }),
        ),
        "volume_get_records" => Ok(
            json!({ "file": "/x/volumes.redb", "holder": "h", "volumes": [{
            "name": "v", "epoch": 3, "serving": 3, "revision": 12, "replicas": [
                { "slot": 0, "device": "a", "id": "id-a", "state": { "state": "in_sync" }, "offline": false },
                { "slot": 1, "device": "b", "id": "id-b", "state": { "state": "out", "last_label": {} }, "offline": true, "why": "pulled" },
            ] }] }),
        ),
        method if method.starts_with("volume_") => Ok(volume(2 << 20)),
        _ => Ok(json!(true)),
    })
}

#[test]
fn volumes_are_listed_and_shown() {
    let daemon = daemon();
    assert_eq!(
        cells(&daemon.nacre("volume list").printed()),
        [[
            "v", "degraded", "10.0", "MiB", "1/2", "4", "nqn.x", "of", "the", "shop"
        ]]
    );
    assert_eq!(daemon.nacre("volume ls --json").json()[0]["epoch"], 3);
    let shown = daemon.nacre("volume show v").printed();
    for expected in [
        "epoch       3, revision 12",
        "settings    description of the shop, min_in_sync 1",
        "dirty       4 of 10 regions of 1.0 MiB",
        "b is out: it was pulled out",
        "b gets missed writes: 50 % of 4.0 MiB, 2.0 MiB left, from a, 1.0 MiB/s, 3s to go",
        "verify      ended: 8 B of 8 B compared, 2 blocks differ, 1 repaired; the first: 7",
    ] {
        assert!(shown.contains(expected), "{expected} in {shown}");
    }
    assert_eq!(daemon.nacre("volume show v --json").json()["uuid"], "u");
    let hosts = daemon.nacre("volume connections v").printed();
    assert_eq!(
        cells(&hosts)[0][..9],
        [
            "nqn.h",
            "RDMA",
            "2",
            "127.0.0.1:5",
            "127.0.0.1:4420",
            "TLS_AES_128_GCM_SHA256",
            "h-tls",
            "h-own",
            "yes"
        ]
    );
    let path = hosts.lines().last().unwrap();
    let path: Vec<&str> = path.split_whitespace().collect();
    assert_eq!(path[..5], ["b", "RDMA", "192.0.2.7", "4420", "enabled"]);
    assert_eq!(path[7..10], ["TLS_AES_256_GCM_SHA384", "b-tls", "b-own"]);
    assert!(!hosts.contains("other"), "{hosts}");
    let dump = daemon.nacre("volume store-dump").printed();
    assert!(dump.starts_with("in /x/volumes.redb\n"), "{dump}");
    let rows = cells(&dump);
    assert_eq!(rows[2][..7], ["v", "3", "3", "12", "0", "a", "in_sync"]);
    assert_eq!(rows[3][6..], ["out,", "offline", "id-b", "pulled"]);
    let events = daemon.nacre("volume events").printed();
    assert_eq!(
        events,
        "2026-11-22T10:00:00.000Z  warning  replica    it went (3 more like it)\n"
    );
    let asked = daemon.asked();
    assert_eq!(
        asked.last().unwrap().1,
        json!({ "from": 0, "categories": ["volume", "replica"] })
    );
    daemon
        .nacre("events --category transport,device --from 9")
        .printed();
    assert_eq!(
        daemon.asked()[0].1,
        json!({ "from": 9, "categories": ["transport", "device"] })
    );
}

/// Goal: each command calls its method, and sends only the parameters that were given.
#[test]
fn commands_are_calls() {
    let daemon = daemon();
    for (words, method, params) in [
        (
            "create v a b --size 8MiB --min-in-sync 2 --deadline 2s --resync-limit 10MiB --read-policy round-robin",
            "volume_create",
            json!({ "name": "v", "devices": ["a", "b"], "size_mb": 8, "settings": {
                "min_in_sync": 2, "deadline_ms": 2000, "resync_bytes_per_s": 10 << 20, "read_policy": "round-robin" } }),
        ),
        (
            // The former name of --resync-limit.
            "set v --resync-rate 1MiB",
            "volume_set",
            json!({ "name": "v", "settings": { "resync_bytes_per_s": 1 << 20 } }),
        ),
        (
            "set v --description Shop:Ümlaut",
            "volume_set",
            json!({ "name": "v", "settings": { "description": "Shop:Ümlaut" } }),
        ),
        (
            "delete v --force v",
            "volume_delete",
            json!({ "name": "v", "force": "v" }),
        ),
        (
            "add-replica v c --force",
            "volume_add_replica",
            json!({ "name": "v", "device": "c", "force": true }),
        ),
        (
            "remove-replica v b --force v",
            "volume_remove_replica",
            json!({ "name": "v", "replica": "b", "force": "v" }),
        ),
        (
            "offline v b",
            "volume_offline_replica",
            json!({ "name": "v", "replica": "b" }),
        ),
        (
            "online v b",
            "volume_online_replica",
            json!({ "name": "v", "replica": "b" }),
        ),
        (
            "replace v b c",
            "volume_replace_replica",
            json!({ "name": "v", "replica": "b", "device": "c" }),
        ),
        (
            "move v b c",
            "volume_move_replica",
            json!({ "name": "v", "replica": "b", "device": "c" }),
        ),
        (
            "resync v b --full",
            "volume_resync",
            json!({ "name": "v", "replica": "b", "full": true }),
        ),
        (
            "verify v --repair",
            "volume_verify",
            json!({ "name": "v", "repair": true }),
        ),
        (
            "verify v --stop",
            "volume_verify",
            json!({ "name": "v", "stop": true }),
        ),
        (
            "grow v 16MiB",
            "volume_grow",
            json!({ "name": "v", "size_mb": 16 }),
        ),
        (
            "rename v w",
            "volume_rename",
            json!({ "name": "v", "new_name": "w" }),
        ),
        (
            "set v --transport-policy rdma-only --verify-hours 24",
            "volume_set",
            json!({ "name": "v", "settings": { "transport_policy": "rdma-only", "verify_hours": 24 } }),
        ),
        ("unpublish v", "volume_unpublish", json!({ "name": "v" })),
        (
            "thaw v --force v --replica b",
            "volume_thaw",
            json!({ "name": "v", "force": "v", "replica": "b" }),
        ),
        ("fail-io v", "volume_fail_io", json!({ "name": "v" })),
    ] {
        daemon.nacre(&format!("volume {words}")).printed();
        assert_eq!(daemon.asked(), [(method.to_owned(), params)], "{words}");
    }
    assert_eq!(daemon.nacre("volume create v a").printed(), "v\n");
    // The addresses are those of the answer.
    for words in [
        "volume publish v -a --listen 127.0.0.1:4420",
        "volume publish v -a",
    ] {
        assert_eq!(
            daemon.nacre(words).printed(),
            "nqn.x\nnvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.x\n",
            "{words}"
        );
    }
    let unreachable = daemon.nacre("volume publish w -a");
    assert_eq!((unreachable.code, unreachable.out.as_str()), (0, "nqn.w\n"));
    assert_eq!(
        unreachable.err,
        "no host can connect yet: `nacre listener add nqn.w tcp://ADDRESS`\n"
    );
    daemon.asked();
    for (words, code) in [
        ("volume set v", 2),
        ("volume create v", 2),
        ("volume create v a b c d e f", 2),
        ("volume grow v 1000", 2),
        ("volume remove-replica v b", 4),
        ("volume store-dump /nonexistent", 1),
    ] {
        let refused = daemon.nacre(words);
        assert_eq!(
            (refused.code, refused.out.as_str()),
            (code, ""),
            "{words}: {refused:?}"
        );
    }
}

/// What goes on after the answer is waited for, and its end is the command's.
#[test]
fn long_work_is_waited_for() {
    let daemon = daemon();
    daemon.nacre("volume resync v --wait").printed();
    let asked: Vec<String> = daemon.asked().into_iter().map(|(m, _)| m).collect();
    assert_eq!(
        asked,
        ["volume_resync", "volume_get", "volume_get", "volume_get"]
    );
    let done = daemon.nacre("volume resync v b --wait --json").json();
    assert_eq!(done["state"], "healthy");
    let gone = daemon.nacre("volume add-replica v z --wait");
    assert_eq!((gone.code, gone.out.as_str()), (1, ""), "{gone:?}");
    assert!(
        gone.err.contains("no longer has a replica on \"z\""),
        "{gone:?}"
    );
    // One of two differences was repaired.
    let differs = daemon.nacre("volume verify v --wait");
    assert_eq!(differs.code, 1, "{differs:?}");
    assert!(
        differs.err.contains("1 blocks differ") && differs.out.starts_with("ended: "),
        "{differs:?}"
    );
}

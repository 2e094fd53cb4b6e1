//! Tests that the daemon loads a configuration saved by SPDK.

use std::time::{Duration, Instant};

use nacre_tests::daemon::Place;
use serde_json::{Value, json};

/// Goal: the configuration that SPDK 26.09 saves of a target with one namespace loads unchanged. A
/// refused call would keep the daemon from starting. Method: its calls with all default values,
/// which SPDK saves explicitly.
#[test]
fn a_configuration_saved_by_spdk_loads() {
    let place = Place::new();
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    let groups = [
        "null",
        "ffdhe2048",
        "ffdhe3072",
        "ffdhe4096",
        "ffdhe6144",
        "ffdhe8192",
    ];
    let digests = ["sha256", "sha384", "sha512"];
    let socket = |kind: &str, bytes: u32| {
        json!({ "method": "sock_impl_set_options", "params": {
            "impl_name": kind, "recv_buf_size": bytes, "send_buf_size": bytes, "enable_recv_pipe": true,
            "enable_quickack": false, "enable_placement_id": 0, "enable_zerocopy_send_server": true,
            "enable_zerocopy_send_client": false, "zerocopy_threshold": 0, "tls_version": 0, "enable_ktls": false,
        }})
    };
    let passed = [
        "identify_ctrlr",
        "identify_uuid_list",
        "get_log_page",
        "get_set_features",
        "sanitize",
        "security_send_recv",
        "fw_update",
        "nvme_mi",
        "vendor_specific",
    ];
    let passed: serde_json::Map<String, Value> = passed
        .iter()
        .map(|what| ((*what).to_owned(), json!(false)))
        .collect();
    let nvme = json!({ "action_on_timeout": "none", "timeout_us": 0,
        "timeout_admin_us": 0, "keep_alive_timeout_ms": 10_000, "arbitration_burst": 0,
        "low_priority_weight": 0, "medium_priority_weight": 0, "high_priority_weight": 0,
        "nvme_adminq_poll_period_us": 10_000, "nvme_ioq_poll_period_us": 0, "io_queue_requests": 0,
        "delay_cmd_submit": true, "transport_retry_count": 4, "bdev_retry_count": 3,
        "transport_ack_timeout": 0, "ctrlr_loss_timeout_sec": 0, "reconnect_delay_sec": 0,
        "fast_io_fail_timeout_sec": 0, "disable_auto_failback": false, "generate_uuids": false,
        "transport_tos": 0, "nvme_error_stat": false, "rdma_srq_size": 0, "io_path_stat": false,
        "allow_accel_sequence": false, "rdma_max_cq_size": 0, "rdma_cm_event_timeout_ms": 0,
        "dhchap_digests": digests, "dhchap_dhgroups": groups, "rdma_umr_per_io": false,
        "tcp_connect_timeout_ms": 0, "enable_flush": false, "multipath_opts": { "policy": "active_passive" } });
    let malloc = json!({ "name": "Malloc0", "num_blocks": 2048, "block_size": 512,
        "physical_block_size": 512, "uuid": "33333333-2222-3333-4444-555555555555",
        "optimal_io_boundary": 0, "md_size": 0, "dif_type": 0, "dif_is_head_of_md": false,
        "dif_pi_format": 0, "numa_id": -1 });
    let transport = json!({ "trtype": "TCP", "max_queue_depth": 128,
        "max_io_qpairs_per_ctrlr": 127, "in_capsule_data_size": 4096, "max_io_size": 131_072,
        "max_aq_depth": 128, "iobuf_small_cache_size": u32::MAX, "iobuf_large_cache_size": u32::MAX,
        "dif_insert_or_strip": false, "zcopy": false, "c2h_success": true, "sock_priority": 0,
        "abort_timeout_sec": 1, "ack_timeout": 0, "data_wr_pool_size": 0,
        "disable_command_passthru": false, "kas": 100, "min_kato": 10_000 });
    let subsystem = json!({ "nqn": nqn, "allow_any_host": true,
        "serial_number": "FAR1", "model_number": "SPDK bdev Controller", "max_namespaces": 32,
        "min_cntlid": 1, "max_cntlid": 65_519, "ana_reporting": true, "dmrsl": 2_097_152, "wzsl": 12,
        "passthrough": false, "enable_nssr": false });
    let namespace = json!({ "nqn": nqn, "namespace": { "nsid": 1,
        "bdev_name": "Malloc0", "nguid": "33333333222233334444555555555555",
        "uuid": "33333333-2222-3333-4444-555555555555", "anagrpid": 1, "no_auto_visible": false }});
    let call = |method: &str, params: Value| json!({ "method": method, "params": params });
    let part = |name: &str, calls: Vec<Value>| json!({ "subsystem": name, "config": calls });
    let parts = [
        part(
            "iobuf",
            vec![call(
                "iobuf_set_options",
                json!({ "small_pool_count": 8192, "large_pool_count": 1024,
            "small_bufsize": 8192, "large_bufsize": 135_168, "enable_numa": false }),
            )],
        ),
        part(
            "sock",
            vec![
                call("sock_set_default_impl", json!({ "impl_name": "posix" })),
                socket("ssl", 4096),
                socket("posix", 2_097_152),
            ],
        ),
        part(
            "accel",
            vec![call(
                "accel_set_options",
                json!({ "small_cache_size": 128, "large_cache_size": 16,
            "task_count": 2048, "sequence_count": 2048, "buf_count": 2048 }),
            )],
        ),
        part(
            "bdev",
            vec![
                call(
                    "bdev_set_options",
                    json!({ "bdev_io_pool_size": 65_535, "bdev_io_cache_size": 256,
                "bdev_auto_examine": true, "iobuf_small_cache_size": 128, "iobuf_large_cache_size": 16 }),
                ),
                call(
                    "bdev_raid_set_options",
                    json!({ "process_window_size_kb": 1024, "process_max_bandwidth_mb_sec": 0 }),
                ),
                call("bdev_nvme_set_options", nvme),
                call(
                    "bdev_nvme_set_hotplug",
                    json!({ "period_us": 100_000, "enable": false }),
                ),
                // A batch.
                json!([call("bdev_malloc_create", malloc)]),
                json!({ "method": "bdev_wait_for_examine" }),
            ],
        ),
        part(
            "scheduler",
            vec![call("framework_set_scheduler", json!({ "name": "static" }))],
        ),
        part(
            "nvmf",
            vec![
                call(
                    "nvmf_set_config",
                    json!({ "discovery_filters": [], "admin_cmd_passthru": passed,
                "dhchap_digests": digests, "dhchap_dhgroups": groups, "dup_host_policy": "allow" }),
                ),
                call("nvmf_set_max_subsystems", json!({ "max_subsystems": 1024 })),
                call(
                    "nvmf_set_crdt",
                    json!({ "crdt1": 0, "crdt2": 0, "crdt3": 0 }),
                ),
                call("nvmf_create_transport", transport),
                call("nvmf_create_subsystem", subsystem),
                json!([call("nvmf_subsystem_add_ns", namespace)]),
            ],
        ),
    ];
    let config = json!({ "subsystems": parts });
    let file = place.path("spdk.json");
    std::fs::write(&file, config.to_string()).expect("a file");
    let place = place.with("NACRE_CONFIG", file.display());
    let mut daemon = place.start();
    // The calls run while the daemon already answers others.
    let until = Instant::now() + Duration::from_secs(60);
    let mut shown = loop {
        match daemon.try_call("nvmf_get_subsystems", json!({ "nqn": nqn })) {
            Ok(shown) if shown[0]["namespaces"] != json!([]) => break shown,
            answer => assert!(Instant::now() < until, "{answer:?}\n{}", daemon.log()),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let shown = shown[0].take();
    assert_eq!(
        shown["namespaces"][0]["uuid"],
        "33333333-2222-3333-4444-555555555555"
    );
    daemon.stop();
}

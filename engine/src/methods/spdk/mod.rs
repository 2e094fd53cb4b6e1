//! SPDK methods that Nacre does not offer. A call is refused as an unknown method (-32601); the
//! reference lists them with the reason.

pub mod accel;
pub mod export;
pub mod lvol;
mod lvol_bdev;
mod lvol_copy;
pub mod notify;
pub mod raid;
pub mod scheduler;
pub mod sock;

use crate::rpc::Registry;
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    accel::register(registry);
    lvol::register(registry);
    lvol_bdev::register(registry);
    lvol_copy::register(registry);
    notify::register(registry);
    raid::register(registry);
    scheduler::register(registry);
    sock::register(registry);
}

/// Reason, and names of the methods.
pub fn not_offered() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    NOT_OFFERED.iter().copied()
}

const NOT_OFFERED: &[(&str, &[&str])] = &[
    (
        "A reactor is a thread on a core, and stays there; `taskset` and cgroups say which cores there are.",
        &[
            "framework_disable_cpumask_locks",
            "framework_enable_cpumask_locks",
            "framework_monitor_context_switch",
            "scheduler_set_options",
            "thread_set_cpumask",
        ],
    ),
    (
        "There is no DPDK: `nacre nvme list` shows drives, `nacre hugepages show` memory.",
        &["env_dpdk_get_mem_stats", "framework_get_pci_devices"],
    ),
    (
        "Keys are in files (`keyring_file_add_key`); the kernel's keyring is not read.",
        &["keyring_linux_set_options"],
    ),
    (
        "The processor copies, compares and computes checksums: there is nothing to assign.",
        &[
            "accel_assign_opc",
            "accel_error_inject_error",
            "accel_get_stats",
        ],
    ),
    (
        "There are no trace points: `log_set_flag` makes the log talk, `metrics_get` counts.",
        &[
            "trace_clear",
            "trace_clear_tpoint_mask",
            "trace_disable_tpoint_group",
            "trace_enable_tpoint_group",
            "trace_get_info",
            "trace_get_tpoint_group_mask",
            "trace_set_tpoint_mask",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::not_offered;
    use crate::methods::testing::test_daemon;
    use serde_json::json;

    /// SPDK's methods for an NVMe-oF target and the layers below it.
    const SPDK_METHODS: &str = "
        nvmf_create_transport nvmf_create_subsystem nvmf_delete_subsystem nvmf_get_subsystems
        nvmf_subsystem_add_listener nvmf_subsystem_remove_listener nvmf_subsystem_listener_set_ana_state
        nvmf_subsystem_get_listeners nvmf_subsystem_add_ns nvmf_subsystem_remove_ns
        nvmf_subsystem_set_ns_ana_group nvmf_ns_add_host nvmf_ns_remove_host nvmf_subsystem_add_host
        nvmf_subsystem_remove_host nvmf_subsystem_allow_any_host nvmf_subsystem_set_keys
        nvmf_subsystem_get_controllers nvmf_subsystem_get_qpairs nvmf_get_transports nvmf_get_stats
        nvmf_get_targets nvmf_create_target nvmf_delete_target nvmf_set_max_subsystems nvmf_set_crdt
        nvmf_set_config nvmf_discovery_add_referral nvmf_discovery_remove_referral
        nvmf_discovery_get_referrals nvmf_publish_mdns_prr nvmf_stop_mdns_prr
        bdev_get_bdevs bdev_get_iostat bdev_reset_iostat bdev_set_options bdev_examine
        bdev_wait_for_examine bdev_set_qos_limit bdev_set_qd_sampling_period bdev_enable_histogram
        bdev_get_histogram bdev_get_histogram_borders bdev_malloc_create bdev_malloc_delete
        bdev_null_create bdev_null_delete bdev_null_resize bdev_aio_create bdev_aio_rescan
        bdev_aio_delete bdev_uring_create bdev_uring_rescan bdev_uring_delete bdev_nvme_set_options
        bdev_nvme_attach_controller bdev_nvme_detach_controller bdev_nvme_get_controllers
        bdev_nvme_reset_controller bdev_nvme_enable_controller bdev_nvme_disable_controller
        bdev_nvme_set_hotplug bdev_nvme_start_discovery bdev_nvme_stop_discovery
        bdev_nvme_get_discovery_info bdev_nvme_get_io_paths bdev_nvme_set_preferred_path
        bdev_nvme_set_multipath_policy bdev_nvme_get_path_iostat bdev_nvme_set_keys
        bdev_nvme_get_transport_statistics bdev_nvme_get_controller_health_info bdev_raid_create
        bdev_raid_delete bdev_raid_get_bdevs bdev_raid_add_base_bdev bdev_raid_remove_base_bdev
        bdev_raid_set_options bdev_lvol_create_lvstore bdev_lvol_delete_lvstore bdev_lvol_get_lvstores
        bdev_lvol_grow_lvstore bdev_lvol_rename_lvstore bdev_lvol_create bdev_lvol_snapshot
        bdev_lvol_clone bdev_lvol_clone_bdev bdev_lvol_rename bdev_lvol_resize bdev_lvol_set_read_only
        bdev_lvol_delete bdev_lvol_inflate bdev_lvol_decouple_parent bdev_lvol_set_parent
        bdev_lvol_set_parent_bdev bdev_lvol_get_lvols bdev_lvol_start_shallow_copy bdev_lvol_check_shallow_copy
        bdev_delay_create bdev_delay_update_latency bdev_delay_delete bdev_error_create
        bdev_error_inject_error bdev_error_resume_pending bdev_error_delete bdev_passthru_create
        bdev_passthru_delete bdev_split_create bdev_split_delete
        rpc_get_methods spdk_get_version spdk_kill_instance framework_start_init framework_wait_init
        framework_get_subsystems framework_get_config framework_get_reactors framework_set_scheduler
        framework_get_scheduler framework_get_governor framework_monitor_context_switch
        framework_enable_cpumask_locks framework_disable_cpumask_locks framework_get_pci_devices
        scheduler_set_options thread_get_stats thread_get_pollers thread_get_io_channels
        thread_set_cpumask env_dpdk_get_mem_stats iobuf_set_options iobuf_get_stats
        log_set_level log_set_print_level log_get_level log_get_print_level log_set_flag log_clear_flag
        log_get_flags log_enable_timestamps notify_get_types notify_get_notifications
        sock_impl_get_options sock_impl_set_options sock_get_default_impl sock_set_default_impl
        keyring_file_add_key keyring_file_remove_key keyring_get_keys keyring_linux_set_options
        accel_get_module_info accel_get_opc_assignments accel_assign_opc accel_get_stats
        accel_error_inject_error trace_enable_tpoint_group trace_disable_tpoint_group
        trace_set_tpoint_mask trace_clear_tpoint_mask trace_get_tpoint_group_mask trace_get_info
        trace_clear
    ";

    /// Goal: each of SPDK's methods is either offered or listed as not offered.
    #[test]
    fn every_method_is_offered_or_listed() {
        let registry = crate::methods::all();
        let named = |name: &str| not_offered().any(|(_, names)| names.contains(&name));
        for name in SPDK_METHODS.split_whitespace() {
            let there = registry.find(name).is_some();
            assert!(there != named(name), "{name}: found {there}");
        }
        let known: Vec<&str> = SPDK_METHODS.split_whitespace().collect();
        let all = not_offered().flat_map(|(_, names)| names);
        for name in all {
            assert!(known.contains(name), "{name} is not a method of SPDK");
        }
    }

    /// Goal: refusals have SPDK's codes, as `tests/spdk/compare.py` found them.
    #[test]
    fn refusals_have_spdk_codes() {
        let daemon = test_daemon();
        let disk = |name: &str| json!({ "name": name, "num_blocks": 16384, "block_size": 512 });
        for name in ["m", "n", "below"] {
            daemon.call("bdev_malloc_create", disk(name));
        }
        daemon.call(
            "bdev_passthru_create",
            json!({ "name": "p", "base_bdev_name": "below" }),
        );
        let raid = |level: &str, bases: &[&str]| json!({ "name": "r", "raid_level": level, "base_bdevs": bases });
        let latency = |name: &str| json!({ "delay_bdev_name": name, "latency_type": "avg_read", "latency_us": 1 });
        let nqn = "nqn.2026-01.io.example:a";
        daemon.call("nvmf_create_subsystem", json!({ "nqn": nqn }));
        let address = json!({ "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "1" });
        for (method, params, code) in [
            // Parameters that cannot be decoded: the code depends on the module.
            ("nvmf_create_subsystem", json!({}), -32602),
            ("bdev_get_bdevs", json!({ "name": 7 }), -32603),
            ("bdev_malloc_create", json!({ "zz": 1 }), -32603),
            ("bdev_error_create", json!({}), -32602),
            ("bdev_examine", json!({}), -32602),
            ("bdev_nvme_set_options", json!({ "zz": 1 }), -32603),
            (
                "bdev_nvme_set_options",
                json!({ "delay_cmd_submit": "yes" }),
                -32603,
            ),
            (
                "bdev_nvme_attach_controller",
                json!({ "name": "c", "trtype": "TCP", "traddr": "::1", "multipath": "zz" }),
                -32603,
            ),
            ("bdev_raid_create", raid("raid7", &["m", "n"]), -32700),
            ("bdev_raid_get_bdevs", json!({ "category": "zz" }), -32700),
            ("bdev_raid_add_base_bdev", json!({}), -32603),
            ("log_set_level", json!({ "level": "LOUD" }), -32603),
            // A name in use is refused first, whatever else is wrong.
            (
                "bdev_passthru_create",
                json!({ "name": "p", "base_bdev_name": "below" }),
                -17,
            ),
            (
                "bdev_passthru_create",
                json!({ "name": "q", "base_bdev_name": "below" }),
                -1,
            ),
            (
                "bdev_aio_create",
                json!({ "name": "m", "filename": "/nowhere" }),
                -17,
            ),
            (
                "bdev_aio_create",
                json!({ "name": "a", "filename": "" }),
                -2,
            ),
            // Objects that are missing, or of another kind.
            (
                "bdev_null_resize",
                json!({ "name": "zz", "new_size": 1 }),
                -19,
            ),
            (
                "bdev_null_resize",
                json!({ "name": "m", "new_size": 1 }),
                -22,
            ),
            ("bdev_delay_update_latency", latency("zz"), -32602),
            ("bdev_delay_update_latency", latency("m"), -32602),
            ("bdev_nvme_get_controllers", json!({ "name": "zz" }), -22),
            (
                "bdev_nvme_get_controller_health_info",
                json!({ "name": "zz" }),
                -32603,
            ),
            ("framework_set_scheduler", json!({ "name": "zz" }), -32603),
            ("bdev_raid_create", raid("raid1", &["m"]), -22),
            ("bdev_raid_create", raid("raid1", &["m", ""]), -22),
            (
                "nvmf_subsystem_listener_set_ana_state",
                json!({ "nqn": nqn, "listen_address": address, "ana_state": "optimized" }),
                -32603,
            ),
            (
                "nvmf_subsystem_add_host",
                json!({ "nqn": nqn, "host": "" }),
                -32603,
            ),
            (
                "nvmf_discovery_add_referral",
                json!({ "address": { "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "" } }),
                -32603,
            ),
        ] {
            let refused = daemon.refused(method, params.clone());
            assert_eq!(refused.code, code, "{method} {params}: {refused}");
        }
        // SPDK's other schedulers have more parameters.
        let scheduler = json!({ "name": "static", "load_limit": 20 });
        assert_eq!(daemon.call("framework_set_scheduler", scheduler), true);
    }

    #[test]
    fn methods_not_offered_are_unknown() {
        let daemon = test_daemon();
        for (_, names) in not_offered() {
            let refused = daemon.refused(names[0], json!({ "name": "x" }));
            assert_eq!(
                (refused.code, refused.message.as_str()),
                (-32601, "Method not found")
            );
        }
    }
}

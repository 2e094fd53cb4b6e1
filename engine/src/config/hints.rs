//! Keys in the configurations of other programs (Mayastor, Ferrite, SPDK, FastReg), and the
//! corresponding keys here, for error messages.

use crate::attach::OF_ADDRESS;

/// The hint about the key to use instead of an unknown one. `full`: the key with its tables.
pub(super) fn of(full: &str) -> Option<&'static str> {
    let of_address = full.strip_prefix("remote.");
    if of_address.is_some_and(|key| OF_ADDRESS.contains(&key)) {
        return Some("write it in address: \"rdma://ADDRESS:PORT/NQN?nsid=N\"");
    }
    if full == "remote.multipath_opts" {
        return Some("write policy, selector and min_io as keys of [[remote]]");
    }
    let exact = SECTIONS.iter().find(|(name, _)| *name == full);
    let key = full.rsplit('.').next().unwrap_or(full).replace('-', "_");
    let any = KEYS.iter().find(|(names, _)| names.contains(&key.as_str()));
    exact
        .map(|(_, hint)| *hint)
        .or_else(|| any.map(|(_, hint)| *hint))
}

/// As [`of`], for an unknown variable: NACRE_RDMA_ENABLED.
pub(super) fn of_variable(name: &str) -> Option<&'static str> {
    let words = name.strip_prefix("NACRE_")?.to_lowercase();
    let ends = |key: &&str| {
        let before = words.strip_suffix(*key);
        before.is_some_and(|before| before.is_empty() || before.ends_with('_'))
    };
    KEYS.iter()
        .find(|(names, _)| names.iter().any(&ends))
        .map(|(_, hint)| *hint)
}

/// Hints for whole tables.
const SECTIONS: &[(&str, &str)] = &[
    (
        "cluster.enabled",
        "leave it out: name in [cluster] makes this daemon a node",
    ),
    (
        "cluster.endpoints",
        "use endpoints in [store]: it has the access to etcd",
    ),
    (
        "cluster.etcd",
        "use endpoints in [store]: it has the access to etcd",
    ),
    (
        "cluster.prefix",
        "leave it out: the prefix in etcd is /nacre/ and the name of the cluster",
    ),
    (
        "cluster.lease",
        "leave it out: `nacre cluster init --lease` sets it for all nodes",
    ),
    (
        "cluster.lease_ms",
        "leave it out: `nacre cluster init --lease` sets it for all nodes",
    ),
    (
        "io_engine",
        "leave it out: use [nvmf] and [[nvmf.listener]]",
    ),
    (
        "target",
        "use [nvmf], [[nvmf.listener]] and [[nvmf.subsystem]]",
    ),
    (
        "nvmf.rdma",
        "use rdma = \"off\", \"prefer\" or \"require\" in [nvmf], and [rdma] for the transport",
    ),
    (
        "nvmf.tcp",
        "the TCP transport has its options in [nvmf] and [[nvmf.listener]]",
    ),
    (
        "nvmf.transport",
        "transports are chosen in [[nvmf.listener]]: transports = [\"rdma\", \"tcp\"]",
    ),
    ("remotes", "use [[remote]]"),
    ("peer", "use [[remote]]"),
    ("peers", "use [[remote]]"),
    ("listener", "use [[nvmf.listener]]"),
    ("listeners", "use [[nvmf.listener]]"),
    ("subsystem", "use [[nvmf.subsystem]]"),
    (
        "subsystems",
        "use [[nvmf.subsystem]]; a JSON configuration of SPDK is given to `nacre serve -c` as it is",
    ),
    (
        "volume",
        "volumes are made by command and kept in data.dir: `nacre volume create`",
    ),
    (
        "pool",
        "pools are made by command, and kept on their disk: `nacre pool create`",
    ),
];

/// Hints for keys, in any table.
const KEYS: &[(&[&str], &str)] = &[
    (
        &["rdma_enabled", "rdma_enable", "enable_rdma"],
        "use rdma = \"off\", \"prefer\" or \"require\" in [nvmf] or [[nvmf.listener]]",
    ),
    (
        &[
            "rdma_listen_addr",
            "rdma_listen_port",
            "listen_addr",
            "listen_port",
        ],
        "use listen = [\"rdma://ADDRESS:4420\"] in [nvmf], or address and port of [[nvmf.listener]]",
    ),
    (
        &["rdma_device", "rdma_port", "rdma_gid_index"],
        "use device, port and gid_index in [rdma], or rdma_device, rdma_port and rdma_gid_index in [[nvmf.listener]]",
    ),
    (
        &["rdma_fallback", "tcpfallback", "tcp_fallback"],
        "use tcp_fallback in [[nvmf.listener]], and fallback in [replication]",
    ),
    (
        &[
            "connection_timeout_ms",
            "connect_timeout_ms",
            "cm_event_timeout_ms",
        ],
        "use cm_timeout_ms in [replication], and connect_timeout_ms in [rdma] for hosts",
    ),
    (
        &["inline_threshold", "max_inline_size"],
        "use max_inline_data in [rdma] and in [replication] for data sent inline, and in_capsule_data_size for data in command capsules",
    ),
    (
        &[
            "send_queue_depth",
            "recv_queue_depth",
            "max_srq_depth",
            "num_cqe",
        ],
        "use max_queue_depth in [nvmf] or [[nvmf.listener]], and srq_size and cq_size in [rdma]",
    ),
    (&["max_send_sge", "max_recv_sge"], "use max_sge in [rdma]"),
    (
        &["pin_memory"],
        "leave it out: DMA memory is always locked; hugepages in [memory] chooses its pages",
    ),
    (
        &["huge_pages", "hugepage", "hugepages", "no_huge"],
        "use hugepages = \"auto\", \"1G\", \"2M\" or \"off\" in [memory]",
    ),
    (
        &["recv_buffer_pool_size", "recv_buffer_size"],
        "use srq_size and in_capsule_data_size in [rdma]",
    ),
    (
        &[
            "num_shared_buffers",
            "buf_cache_size",
            "io_unit_size",
            "iobuf_small_cache_size",
            "iobuf_large_cache_size",
        ],
        "leave it out: buffers are taken from size_mb of [memory], and the largest has max_io_size of [nvmf]",
    ),
    (
        &["use_rdma_write", "use_rdma_read"],
        "leave it out: data always moves by RDMA READ and WRITE",
    ),
    (
        &["adaptive_polling", "interrupt_mode", "polling"],
        "use mode = \"poll\", \"adaptive\" or \"interrupt\" in [reactor]",
    ),
    (
        &["gossip_rdma", "gossip"],
        "leave it out: there is no gossip protocol",
    ),
    (
        &["migration_rdma"],
        "leave it out: a resync uses the transport of [replication]",
    ),
    (
        &[
            "cpumask",
            "core_mask",
            "reactor_mask",
            "lcores",
            "cpu_list",
            "cpus",
        ],
        "use cores in [reactor], such as \"0x3\" or \"0,2-5\"",
    ),
    (
        &["mem_size", "memory_mb", "mem_size_mb"],
        "use size_mb in [memory]",
    ),
    (
        &["rpc_socket", "rpc_addr", "socket_path", "rpc_listen"],
        "use socket in [rpc]",
    ),
    (
        &["trtype", "transport_type"],
        "use transports and rdma in [[nvmf.listener]]",
    ),
    (&["traddr"], "use address or iface in [[nvmf.listener]]"),
    (&["trsvcid"], "use port in [[nvmf.listener]]"),
    (&["bdev_name"], "use bdev in [[nvmf.subsystem.namespace]]"),
    (&["filename"], "use path in [[bdev]]"),
    (
        &["num_blocks"],
        "use size in [[bdev]], in bytes or with a unit",
    ),
    (
        &["max_qpairs", "max_controllers"],
        "use max_qpairs in [rdma], and max_connections in [nvmf]",
    ),
    (
        &["dhchap_key", "dhchap_ctrlr_key", "psk"],
        "use [[nvmf.subsystem.host]] for hosts, and [[remote]] for other targets",
    ),
    (
        &["tls", "secure_channel"],
        "use tls = \"allow\" or \"require\" in [[nvmf.listener]]",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_other_programs_have_hints() {
        for (full, expected) in [
            ("cluster.enabled", "makes this daemon a node"),
            ("cluster.etcd", "endpoints in [store]"),
            ("rdma.rdma_enabled", "[[nvmf.listener]]"),
            ("nvmf.listener.rdma-enabled", "[[nvmf.listener]]"),
            ("memory.pin_memory", "always locked"),
            ("replication.use_rdma_write", "leave it out"),
            ("reactor.cpumask", "[reactor]"),
            ("bdev.filename", "path in [[bdev]]"),
            ("remote.traddr", "write it in address"),
            ("remote.multipath_opts", "policy, selector"),
            ("peers", "[[remote]]"),
        ] {
            let hint = of(full).unwrap_or_default();
            assert!(hint.contains(expected), "{full}: {hint}");
        }
        assert_eq!(of("reactor.coers"), None);
        assert!(of_variable("NACRE_RDMA_PIN_MEMORY").is_some_and(|h| h.contains("locked")));
        assert_eq!(of_variable("NACRE_RDMAPIN_MEMORYX"), None);
    }
}

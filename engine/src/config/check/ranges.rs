//! The allowed ranges of numbers. A range that a domain type has comes from there.

use nacre_bdev::BLOCK_SIZES;
use nacre_nvmf::subsystems::{SubsystemConfig, SubsystemOptions, TargetConfig};
use nacre_nvmf::transport::{ListenerOptions, MAX_IN_CAPSULE_DATA, QUEUE_DEPTHS};
use nacre_transport_rdma::{MAX_SRQ_SIZE, MIN_MR_SIZE, POLL_BATCHES, SGL_DESCRIPTORS};
use nacre_transport_rdma_link::qos::{Class, DefaultClass};
use serde_path_to_error::Segment;

use crate::config::replication::Replication;
use crate::values::read::ValueError;

/// Most DMA memory, in MiB.
pub(super) const MOST_MEMORY: u64 = 1 << 24;

/// The allowed range of each number: key, minimum, maximum. Keys within lists of tables have no
/// index.
const RANGES: &[(&str, u64, u64)] = &[
    ("reactor.busy_poll_us", 0, 1_000_000),
    ("memory.size_mb", 0, MOST_MEMORY),
    ("rpc.max_clients", 1, 1024),
    ("rpc.deadline_s", 1, 3600),
    ("rpc.audit.max_size_mb", 1, 1024),
    ("rpc.audit.files", 2, 100),
    ("data.retry_s", 0, 86_400),
    ("store.deadline_ms", 500, 60_000),
    (
        "nvmf.max_subsystems",
        *TargetConfig::SUBSYSTEMS.start() as u64,
        *TargetConfig::SUBSYSTEMS.end() as u64,
    ),
    ("nvmf.max_connections", 1, 1_000_000),
    ("nvmf.max_pending_connections", 1, 65_536),
    (
        "nvmf.max_queue_depth",
        *QUEUE_DEPTHS.start() as u64,
        *QUEUE_DEPTHS.end() as u64,
    ),
    (
        "nvmf.max_io_qpairs_per_ctrlr",
        *TargetConfig::IO_QUEUES.start() as u64,
        *TargetConfig::IO_QUEUES.end() as u64,
    ),
    ("nvmf.in_capsule_data_size", 0, MAX_IN_CAPSULE_DATA as u64),
    (
        "nvmf.max_io_size",
        *nacre_transport_tcp::IO_SIZES.start() as u64,
        *nacre_transport_tcp::IO_SIZES.end() as u64,
    ),
    ("nvmf.discovery_port", 0, 65_535),
    ("nvmf.listener.port", 1, 65_535),
    ("nvmf.listener.rdma_port", 1, 255),
    ("nvmf.listener.rdma_gid_index", 0, 65_535),
    (
        "nvmf.subsystem.namespace.nsid",
        0,
        SubsystemConfig::DEFAULT_MAX_NAMESPACES as u64,
    ),
    ("rdma.port", 1, 255),
    ("rdma.gid_index", 0, 65_535),
    ("rdma.max_qpairs", 1, 1 << 20),
    ("rdma.in_capsule_data_size", 0, MAX_IN_CAPSULE_DATA as u64),
    ("rdma.srq_size", 0, MAX_SRQ_SIZE as u64),
    ("rdma.cq_size", 1, 1 << 22),
    (
        "rdma.max_sge",
        *SGL_DESCRIPTORS.start() as u64,
        *SGL_DESCRIPTORS.end() as u64,
    ),
    ("rdma.max_inline_data", 0, 65_536),
    ("rdma.read_depth", 1, 255),
    ("rdma.max_mr_size", MIN_MR_SIZE, 1 << 63),
    (
        "rdma.poll_batch",
        *POLL_BATCHES.start() as u64,
        *POLL_BATCHES.end() as u64,
    ),
    ("rdma.backlog", 1, 65_535),
    ("rdma.connect_timeout_ms", 1, 600_000),
    ("rdma.tos", 0, 255),
    ("rdma.ack_timeout", 0, 31),
    ("replication.connection_retries", 0, 1000),
    ("replication.retry_delay_ms", 10, 600_000),
    ("replication.cm_timeout_ms", 100, 600_000),
    ("replication.max_inline_data", 0, 65_536),
    ("replication.rdma_reprobe_s", 0, 86_400),
    (
        "replication.keep_alive_ms",
        0,
        *Replication::KEEP_ALIVE_MS.end() as u64,
    ),
    ("replication.fast_fail_ms", 0, 3_600_000),
    (
        "bdev.block_size",
        *BLOCK_SIZES.start() as u64,
        *BLOCK_SIZES.end() as u64,
    ),
    ("alert.webhook.gather_s", 0, 3600),
    ("alert.webhook.retry_for_s", 0, 86_400),
    ("alert.mail.gather_s", 0, 3600),
    ("alert.mail.retry_for_s", 0, 86_400),
];

/// The ranges above, and those of the options of listeners and subsystems, and of the classes of
/// traffic.
pub(in crate::config) fn ranges() -> impl Iterator<Item = (String, u64, u64)> {
    let options = [
        ("listener", ListenerOptions::RANGES),
        ("subsystem", SubsystemOptions::RANGES),
    ];
    let options = options.into_iter().flat_map(|(table, ranges)| {
        let key = move |name: &str| format!("nvmf.{table}.{name}");
        let ranges = ranges.iter();
        ranges.map(move |(name, least, most)| (key(name), *least, *most))
    });
    let classes = [
        ("storage", Class::RANGES),
        ("replication", Class::RANGES),
        ("default", DefaultClass::RANGES),
    ];
    let classes = classes.into_iter().flat_map(|(class, ranges)| {
        ranges.iter().map(move |(name, least, most)| {
            let key = format!("qos.{class}.{name}");
            (key, u64::from(*least), u64::from(*most))
        })
    });
    let own = RANGES.iter();
    own.map(|(key, least, most)| ((*key).to_owned(), *least, *most))
        .chain(options)
        .chain(classes)
}

/// The error, followed by the allowed range if the key is a number.
pub(in crate::config) fn in_range(place: &[Segment], error: &ValueError) -> String {
    let keys = place.iter().filter_map(|segment| match segment {
        Segment::Map { key } => Some(key.as_str()),
        _ => None,
    });
    let path = keys.collect::<Vec<_>>().join(".");
    let range = ranges().find(|(key, ..)| *key == path);
    match (error, range) {
        (ValueError::Wrong { found, expected }, Some((_, least, most)))
            if expected.starts_with("a whole number") =>
        {
            format!("{found} is not a whole number from {least} to {most}")
        }
        _ => error.to_string(),
    }
}

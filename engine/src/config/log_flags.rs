//! Log flags: each enables debug lines of some parts of the program.

use crate::values::suggest;

/// Flags, each with the prefixes of the targets that it enables. Each crate belongs to one.
pub const FLAGS: [(&str, &[&str]); 18] = [
    ("all", &["nacre"]),
    ("app", &["nacre_engine", "nacre_random"]),
    ("bdev", &["nacre_bdev"]),
    (
        "bdev_nvme",
        &["nacre_bdev_nvme", "nacre_engine::services::drives"],
    ),
    (
        "bdev_remote",
        &[
            "nacre_nvmf_remote",
            "nacre_transport_connect",
            "nacre_engine::services::remotes",
        ],
    ),
    ("bdev_uring", &["nacre_bdev_uring"]),
    (
        "cluster",
        &[
            "nacre_cluster_core",
            "nacre_cluster_node",
            "nacre_engine::services::cluster",
        ],
    ),
    ("config", &["nacre_engine::config"]),
    ("hugepages", &["nacre_hugepages"]),
    ("nvmf", &["nacre_nvmf"]),
    // Each command that ends with an error, with its name and status.
    ("nvmf_failed", &["nacre_nvmf::failed"]),
    ("nvmf_loopback", &["nacre_transport_loopback"]),
    ("nvmf_tcp", &["nacre_transport_tcp"]),
    ("rdma", &["nacre_transport_rdma"]),
    ("reactor", &["nacre_reactor"]),
    ("rpc", &["nacre_engine_rpc"]),
    ("store", &["nacre_engine::store", "nacre_engine::journal"]),
    (
        "volume",
        &[
            "nacre_bdev_replica",
            "nacre_cluster_etcd",
            "nacre_engine::services::volumes",
        ],
    ),
];

/// The name of a log flag that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no log flag is called \"{0}\"")]
pub struct UnknownFlag(pub String);

impl UnknownFlag {
    pub fn remedy(&self) -> String {
        let known = || FLAGS.iter().map(|(name, _)| *name);
        match suggest::closest(&self.0, known()) {
            Some(close) => format!("did you mean \"{close}\"?"),
            None => format!("there are: {}", known().collect::<Vec<_>>().join(", ")),
        }
    }
}

/// The names that are no log flags.
pub fn unknown_flags(names: &[String]) -> impl Iterator<Item = (usize, UnknownFlag)> {
    let is_known = |name: &str| FLAGS.iter().any(|(known, _)| *known == name);
    let all = names.iter().enumerate();
    all.filter(move |(_, name)| !is_known(name))
        .map(|(at, name)| (at, UnknownFlag(name.clone())))
}

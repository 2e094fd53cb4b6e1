//! The DMA memory that a daemon allocates. The daemon, the doctor's checks, and all advice on huge
//! pages and locked memory use the same computation.
//!
//! ```text
//!   settings ─▶ data_path ─▶ PlaneConfig ─▶ arenas: one per NUMA node, by Plane::start
//!                                    └────▶ Demand ◀── RdmaConfig: per core, for the first RDMA
//!                                                      listener
//! ```

use std::collections::BTreeSet;

use nacre_hugepages::ClassSpec;
use nacre_nvmf::subsystems::TargetConfig;
use nacre_nvmf::transport::TlsPolicy;
use nacre_reactor::numa_node;
use nacre_transport_rdma::{RdmaConfig, bytes_per_core};
use nacre_transport_tcp::TLS_BUFFER_BYTES;

use crate::config::Personality;
use crate::config::Settings;
use crate::config::listener::Listener;
use crate::plane::{PlaneConfig, PlaneError, arenas, choose_cores};
use crate::values::options;

/// DMA memory per reactor, in bytes, if none is configured.
const DEFAULT_MEMORY: u64 = 64 << 20;
pub(super) const TWO_MIB: u64 = 2 << 20;

options! {
    /// SPDK's buffer pools, with SPDK's defaults.
    IobufOptions,
    /// The parameters of `iobuf_set_options`.
    IobufParams:
    /// Total number of small buffers, 64 to 16777216; divided among the reactors.
    small_pool_count: u64 = 8192;
    /// Total number of large buffers, 8 to 16777216; divided among the reactors.
    large_pool_count: u64 = 1024;
    /// Bytes of a small buffer, 4096 to 16777216.
    small_bufsize: u32 = 8192;
    /// Bytes of a large buffer, 8192 to 16777216.
    large_bufsize: u32 = 132 * 1024;
    /// Accepted: buffers are always on their reactor's NUMA node.
    enable_numa: bool = false;
}

/// The data plane's configuration from the settings, except for the target.
pub fn data_path(
    settings: &Settings,
    iobuf: &IobufOptions,
    personality: Personality,
) -> Result<PlaneConfig, PlaneError> {
    let listeners = listener_selectors(settings);
    let (cores, placement) = choose_cores(cores_text(settings, personality), &listeners)?;
    let reactors = cores.len().max(1) as u64;
    let nodes: Vec<_> = cores.iter().map(|core| numa_node(*core)).collect();
    let memory_of_node = of_nodes(&settings.memory.numa_mb, &nodes)?;
    let max_io_size = settings.nvmf.max_io_size as usize;
    Ok(PlaneConfig {
        cores,
        placement,
        mode: settings.reactor.mode,
        busy_poll_us: settings.reactor.busy_poll_us,
        hugepages: settings.memory.hugepages,
        memory_per_reactor: match settings.memory.size_mb {
            0 => DEFAULT_MEMORY,
            mb => (mb << 20) / reactors,
        },
        memory_of_node,
        max_io_size,
        classes: iobuf_classes(iobuf, max_io_size, reactors),
        rdma: wants_rdma(settings).then(|| settings.rdma_transport()),
        target: TargetConfig::default(),
    })
}

/// Bytes for each reactor on NUMA node 0, 1, …, from the MiB configured for each node (0: none).
/// `reactors`: the node of each reactor. Refuses memory for a node without a reactor.
fn of_nodes(numa_mb: &[u64], reactors: &[Option<u32>]) -> Result<Vec<u64>, PlaneError> {
    let share = |(node, mb): (usize, &u64)| {
        let here = |reactor: &&Option<u32>| reactor.is_some_and(|at| at as usize == node);
        let count = reactors.iter().filter(here).count() as u64;
        match (mb, count) {
            (0, _) => Ok(0),
            (_, 0) => {
                let nodes: BTreeSet<u32> = reactors.iter().flatten().copied().collect();
                let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
                let nodes = if nodes.is_empty() {
                    "none".into()
                } else {
                    nodes.join(", ")
                };
                Err(PlaneError::NoReactor { node, nodes })
            }
            (mb, count) => Ok((mb << 20) / count),
        }
    };
    numa_mb.iter().enumerate().map(share).collect()
}

/// Selectors of the interfaces of the configured listeners: their `iface`, else `ip:ADDRESS`.
fn listener_selectors(settings: &Settings) -> Vec<String> {
    let mut all = Vec::new();
    for listener in settings.nvmf.listeners() {
        if listener.iface.is_empty() {
            all.push(format!("ip:{}", listener.address));
        } else {
            all.extend(listener.iface);
        }
    }
    all
}

/// True if a configured listener uses RDMA.
pub fn wants_rdma(settings: &Settings) -> bool {
    let mut all = settings.nvmf.listeners().into_iter();
    all.any(|listener| listener.wants_rdma())
}

/// The DMA memory that a daemon allocates, in bytes; multiples of 2 MiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    /// Size of each arena of the data path; one per NUMA node.
    pub data_path: Vec<u64>,
    /// RDMA receive and response buffers of each core; empty without RDMA.
    pub rdma: Vec<u64>,
}

impl Demand {
    /// Computes the demand; with `rdma`, that of the RDMA transport too.
    pub fn of(config: &PlaneConfig, rdma: Option<&RdmaConfig>) -> Result<Self, PlaneError> {
        let cores = config.cores.len().max(1);
        let of_core = rdma.map(rdma_per_core);
        Ok(Self {
            data_path: arenas(config)?.into_values().collect(),
            rdma: of_core.map_or(Vec::new(), |bytes| vec![bytes; cores]),
        })
    }

    /// The demand of a daemon with these settings. It includes RDMA if `rdma` is set or a
    /// configured listener uses it.
    pub fn of_settings(settings: &Settings, rdma: bool) -> Result<Self, PlaneError> {
        let transport = settings.rdma_transport();
        let config = data_path(settings, &IobufOptions::default(), Personality::Nacre)?;
        Self::of(
            &config,
            (rdma || wants_rdma(settings)).then_some(&transport),
        )
    }

    /// The sum in bytes, which is locked, and registered with each RDMA device.
    pub fn bytes(&self) -> u64 {
        self.data_path.iter().chain(&self.rdma).sum()
    }

    /// Number of 2 MiB pages for the sum.
    pub fn pages(&self) -> u64 {
        self.bytes() / TWO_MIB
    }
}

/// Upper bound of the buffers of TLS connections, in bytes. They are on the heap, and a connection
/// holds them only while they contain bytes. 0 without a listener that uses TLS.
pub fn tls_bytes(settings: &Settings) -> u64 {
    let nvmf = &settings.nvmf;
    let uses_tls = |listener: &Listener| listener.options.tls() != TlsPolicy::Off;
    if !nvmf.listeners().iter().any(uses_tls) {
        return 0;
    }
    let most = u64::from(nvmf.max_connections) + u64::from(nvmf.max_pending_connections);
    most * TLS_BUFFER_BYTES as u64
}

/// Bytes of the RDMA transport on one core, rounded up to 2 MiB.
pub fn rdma_per_core(config: &RdmaConfig) -> u64 {
    bytes_per_core(config).next_multiple_of(TWO_MIB)
}

/// The setting `reactor.cores`; in place of `auto`, `auto:1` for SPDK's `nvmf_tgt`, which runs on
/// one core.
fn cores_text(settings: &Settings, personality: Personality) -> &str {
    match (settings.reactor.cores.as_str(), personality) {
        ("auto", Personality::NvmfTgt) => "auto:1",
        (text, _) => text,
    }
}

/// The buffer classes that `iobuf_set_options` demands, divided among the reactors. `None` if the
/// options have their defaults.
fn iobuf_classes(
    iobuf: &IobufOptions,
    max_io_size: usize,
    reactors: u64,
) -> Option<Vec<ClassSpec>> {
    if *iobuf == IobufOptions::default() {
        return None;
    }
    let share = |count: u64| count.div_ceil(reactors).max(8) as usize;
    let size = |bytes: u32| (bytes as usize).next_multiple_of(4096);
    let mut classes = vec![
        ClassSpec {
            size: size(iobuf.small_bufsize),
            count: share(iobuf.small_pool_count),
        },
        ClassSpec {
            size: size(iobuf.large_bufsize),
            count: share(iobuf.large_pool_count),
        },
    ];
    if max_io_size > size(iobuf.large_bufsize) {
        classes.push(ClassSpec {
            size: max_io_size,
            count: 4,
        });
    }
    Some(classes)
}

#[cfg(test)]
mod tests {
    use nacre_hugepages::{ArenaError, HugepagePolicy};

    use super::*;
    use crate::methods::testing::TestDaemon;
    use crate::plane::{Plane, arenas as arenas_of};

    /// Goal: the computed demand is what the daemon allocates. Method: compute it, and start a data
    /// plane with the same settings.
    #[test]
    fn the_demand_matches_the_allocation() {
        let mut settings = Settings::default();
        settings.reactor.cores = "auto:2".into();
        settings.memory.hugepages = HugepagePolicy::Off;
        for size_mb in [0, 40] {
            settings.memory.size_mb = size_mb;
            let config =
                data_path(&settings, &IobufOptions::default(), Personality::Nacre).unwrap();
            let demand = Demand::of(&config, None).unwrap();
            let plane = Plane::start(config).unwrap();
            let taken: u64 = plane.arenas.iter().map(|a| a.report().bytes).sum();
            assert_eq!(demand.bytes(), taken);
        }
    }

    /// Goal: the memory of a NUMA node is divided among its reactors, and one without reactors is
    /// an error.
    #[test]
    fn nodes_have_memory_of_their_own() {
        let of_nodes = |mb: &[u64], reactors: &[Option<u32>]| of_nodes(mb, reactors);
        let two = [Some(0), Some(1), Some(1)];
        let bytes = of_nodes(&[0, 100], &two).expect("bytes");
        assert_eq!(bytes, [0, 50 << 20]);
        assert_eq!(of_nodes(&[32], &two).expect("bytes"), [32 << 20]);
        for (mb, reactors, nodes) in [
            (
                &[0, 0, 8][..],
                &two[..],
                "node 2 has no reactor; the nodes of the reactors: 0, 1",
            ),
            (
                &[8],
                &[None],
                "node 0 has no reactor; the nodes of the reactors: none",
            ),
        ] {
            let error = of_nodes(mb, reactors).expect_err("an error").to_string();
            assert!(error.ends_with(nodes), "{error}");
        }
    }

    /// Goal: the amount of a node counts for its reactors. Method: the arenas of the cores here,
    /// with and without it.
    #[test]
    fn the_memory_of_a_node_replaces_its_share() {
        let mut settings = Settings::default();
        settings.reactor.cores = "auto:1".into();
        let arenas = |settings: &Settings| {
            let config = data_path(settings, &IobufOptions::default(), Personality::Nacre);
            arenas_of(&config.expect("a configuration")).expect("arenas")
        };
        let share = arenas(&settings);
        let Some(node) = share.keys().next().copied().flatten() else {
            return assert_eq!(share.len(), 1, "cores without nodes");
        };
        settings.memory.numa_mb = vec![0; node as usize];
        settings.memory.numa_mb.push(256);
        let own = arenas(&settings);
        let grown = own[&Some(node)] - share[&Some(node)];
        assert!((180 << 20..200 << 20).contains(&grown), "{grown}");
    }

    #[test]
    fn tls_needs_memory_for_each_connection() {
        let mut settings = Settings::default();
        assert_eq!(tls_bytes(&settings), 0);
        let mut listener = Listener::default();
        listener.options.tls = Some(TlsPolicy::Allow);
        settings.nvmf.listener.push(listener);
        (
            settings.nvmf.max_connections,
            settings.nvmf.max_pending_connections,
        ) = (90, 10);
        let bytes = tls_bytes(&settings);
        assert!((30 << 20..50 << 20).contains(&bytes), "{bytes}");
    }

    /// Goal: each reactor needs memory, and RDMA needs more.
    #[test]
    fn reactors_and_rdma_add_to_the_demand() {
        let mut settings = Settings::default();
        let mut pages = |cores: &str, rdma: bool| {
            settings.reactor.cores = cores.into();
            let config =
                data_path(&settings, &IobufOptions::default(), Personality::Nacre).unwrap();
            let rdma = rdma.then(|| settings.rdma_transport());
            Demand::of(&config, rdma.as_ref()).unwrap().pages()
        };
        let (one, two) = (pages("auto:1", false), pages("auto:2", false));
        assert!(one > 32, "64 MiB, and what manages it: {one}");
        assert!(two > one);
        let over_rdma = pages("auto:1", true) - one;
        let of_core = bytes_per_core(&Settings::default().rdma_transport());
        assert_eq!(over_rdma, of_core.div_ceil(TWO_MIB));
    }

    /// Goal: an administrator who follows one piece of advice on locked memory meets no other with
    /// a larger figure. Method: the figures of `nacre doctor`, of a listener and `doctor_run` in a
    /// daemon with the same configuration, and of a daemon that cannot start.
    #[test]
    fn all_advice_on_locked_memory_agrees() {
        let mut settings = Settings::default();
        settings.reactor.cores = "auto:2".into();
        settings.memory.hugepages = HugepagePolicy::Off;
        let daemon = TestDaemon::with(settings, None);
        let settings = &daemon.engine.settings;
        for rdma in [false, true] {
            let figure = Demand::of_settings(settings, rdma).unwrap().bytes();

            let transport = settings.rdma_transport();
            let mut config =
                data_path(settings, &IobufOptions::default(), Personality::Nacre).unwrap();
            config.rdma = rdma.then(|| transport.clone());
            let first = arenas(&config).unwrap().into_values().next();
            let first = first.expect("an arena");
            let refusal = ArenaError::Memlock {
                asked: first,
                limit: 0,
                locked: 0,
                beside: Demand::of(&config, config.rdma.as_ref()).unwrap().bytes() - first,
            };
            let advice = format!("`ulimit -l {}`", figure / 1024);
            assert!(refusal.to_string().contains(&advice), "{refusal}, {advice}");
            if rdma {
                let plane = daemon.engine.plane().expect("a data plane");
                let (arenas, cores) = (&plane.arenas, plane.target.cores());
                let of_listener = daemon.engine.rdma.memory_needed(arenas, cores, &transport);
                assert_eq!(of_listener, figure);
            }
        }
    }
}

//! The data plane: reactors, their memory, the bdevs and the NVMe-oF target.
//!
//! ```text
//!   Plane ─┬─ Arena per NUMA node ──▶ buffer pools per reactor (I/O and admin apart)
//!          ├─ Registry of bdevs
//!          ├─ Target ──▶ a QueueGroup per reactor, which polls it
//!          └─ Watchdog
//! ```
//!
//! The plane exists from the daemon's start to its stop. Management uses the [`Target`] and the
//! [`Registry`], which are thread-safe, or sends messages to the reactors.

pub mod demand;
mod numa_cores;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::registry::{Holder, Registry, Usage};
use nacre_hugepages::{
    Arena, ArenaError, ArenaOptions, CarveError, ClassSpec, ClassStats, HugepagePolicy, Pool,
};
use nacre_nvmf::queues::{GroupConfig, QueueGroup};
use nacre_nvmf::subsystems::{Backing, GroupHandle, Target, TargetConfig};
use nacre_nvmf::transport::Pools;
use nacre_reactor::{
    CoreSet, Mode, ReactorConfig, ReactorHandle, SpawnError, Watchdog, numa_node, spawn,
};
use nacre_transport_rdma::RdmaConfig;

use crate::config::Cores;
use crate::doctor::{System, placed_devices};
use crate::plane::demand::{Demand, TWO_MIB};

/// A longer turn of a reactor is reported.
const STALL: Duration = Duration::from_millis(200);

/// Buffers of each reactor for admin and fabrics commands.
const ADMIN_CLASS: ClassSpec = ClassSpec {
    size: 8192,
    count: 128,
};

/// The configuration of a data plane.
#[derive(Debug, Clone)]
pub struct PlaneConfig {
    /// Cores to pin reactors to, one each; empty: one unpinned reactor.
    pub cores: Vec<usize>,
    /// The reason for these cores, if network cards and disks determined them.
    pub placement: Option<String>,
    pub mode: Mode,
    pub busy_poll_us: u64,
    pub hugepages: HugepagePolicy,
    /// DMA memory of each reactor, in bytes.
    pub memory_per_reactor: u64,
    /// DMA memory of each reactor on NUMA node 0, 1, …, in bytes; 0, or beyond the list:
    /// `memory_per_reactor`.
    pub memory_of_node: Vec<u64>,
    /// Largest data transfer of one command, in bytes.
    pub max_io_size: usize,
    /// Buffer classes of a reactor; `None`: computed from the memory and `max_io_size`.
    pub classes: Option<Vec<ClassSpec>>,
    /// The RDMA transport of the configured listeners; memory advice includes its part.
    pub rdma: Option<RdmaConfig>,
    pub target: TargetConfig,
}

/// The reason that the data plane could not start.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    #[error("cores \"{text}\": {why}")]
    Cores { text: String, why: String },
    #[error("memory of reactor {reactor}: {source}")]
    Memory { reactor: String, source: ArenaError },
    #[error(
        "memory of reactor {reactor}: {bytes} bytes do not hold buffers of {max_io_size} bytes; \
         give each reactor {needed_mb} MiB or more ([memory] size_mb for all reactors, numa_mb for \
         those of a NUMA node), or lower [nvmf] max_io_size"
    )]
    TooSmall {
        reactor: String,
        bytes: u64,
        max_io_size: usize,
        needed_mb: u64,
    },
    #[error("numa_mb: NUMA node {node} has no reactor; the nodes of the reactors: {nodes}")]
    NoReactor { node: usize, nodes: String },
    #[error("memory of reactor {reactor}: {source}")]
    Carve { reactor: String, source: CarveError },
    #[error(transparent)]
    Reactor(#[from] SpawnError),
    #[error("reactor {reactor}: {what}")]
    Group { reactor: String, what: String },
}

/// Buffers in use of one reactor, by class.
#[derive(Debug, Clone)]
pub struct PoolUse {
    pub reactor: String,
    pub io: Vec<ClassStats>,
    pub admin: Vec<ClassStats>,
}

/// Bytes copied since the start, by the component that copied them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    pub by_target: u64,
    pub by_devices: u64,
}

/// A running data plane.
pub struct Plane {
    pub reactors: Vec<ReactorHandle>,
    pub bdevs: Registry,
    pub target: Arc<Target>,
    /// All memory of the data path, for devices that must register it.
    pub arenas: Vec<Arena>,
    /// A description of each arena's memory.
    pub memory: Vec<String>,
    _watchdog: Option<Watchdog>,
}

thread_local! {
    /// The buffer pools of the current thread's reactor.
    static POOLS: RefCell<Option<Pools>> = const { RefCell::new(None) };
}

/// The buffers for admin queues of the calling reactor, each of 8 KiB at most. `None` on other
/// threads.
pub fn admin_pool() -> Option<Pool> {
    POOLS.with_borrow(|pools| pools.as_ref().map(|pools| pools.admin.clone()))
}

/// The I/O buffers of the calling reactor. `None` on other threads.
pub fn pool_here() -> Option<Pool> {
    POOLS.with_borrow(|pools| pools.as_ref().map(|p| p.io.clone()))
}

impl Plane {
    pub fn start(config: PlaneConfig) -> Result<Self, PlaneError> {
        let cores: Vec<Option<usize>> = if config.cores.is_empty() {
            vec![None]
        } else {
            config.cores.iter().copied().map(Some).collect()
        };
        if let Some(why) = &config.placement {
            tracing::info!(cores = ?config.cores, "cores of the reactors: {why}");
        }
        let target = Target::new(config.target.clone(), cores.len());
        let mut plane = Self {
            reactors: Vec::new(),
            bdevs: Registry::new(),
            target,
            arenas: Vec::new(),
            memory: Vec::new(),
            _watchdog: None,
        };
        let planned = arenas(&config)?;
        let mut beside = Demand::of(&config, config.rdma.as_ref())?.bytes();
        let mut arenas: BTreeMap<Option<u32>, Arena> = BTreeMap::new();
        for (index, core) in cores.iter().enumerate() {
            let node = core.and_then(numa_node);
            let name = core.map_or_else(|| "reactor".to_string(), |c| format!("reactor_{c}"));
            let classes = plane_classes(&config, node, &name)?;
            let arena = match arenas.entry(node) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(entry) => {
                    let bytes = planned[&node];
                    beside = beside.saturating_sub(bytes);
                    let options = ArenaOptions {
                        hugepages: config.hugepages,
                        numa_node: node,
                        beside,
                        ..ArenaOptions::new(bytes)
                    };
                    let arena = Arena::allocate(options).map_err(|source| PlaneError::Memory {
                        reactor: name.clone(),
                        source,
                    })?;
                    let report = arena.report().to_string();
                    tracing::info!("{report}");
                    plane.memory.push(report);
                    entry.insert(arena)
                }
            };
            let carve = |classes: &[ClassSpec]| {
                arena
                    .carve(Pool::bytes_for(classes))
                    .map_err(|source| PlaneError::Carve {
                        reactor: name.clone(),
                        source,
                    })
            };
            let slices = (carve(&classes)?, carve(&[ADMIN_CLASS])?);
            let handle = plane.start_reactor(&config, index, *core, &name, slices, classes)?;
            plane.reactors.push(handle);
        }
        plane.arenas = arenas.into_values().collect();
        plane._watchdog = Watchdog::start(plane.reactors.clone(), STALL)
            .inspect_err(|error| tracing::warn!(%error, "no watchdog"))
            .ok();
        Ok(plane)
    }

    fn start_reactor(
        &self,
        config: &PlaneConfig,
        index: usize,
        core: Option<usize>,
        name: &str,
        (io, admin): (nacre_hugepages::ArenaSlice, nacre_hugepages::ArenaSlice),
        classes: Vec<ClassSpec>,
    ) -> Result<ReactorHandle, PlaneError> {
        let reactor = ReactorConfig {
            name: name.to_string(),
            core,
            mode: config.mode,
            busy_poll_us: config.busy_poll_us,
            ..ReactorConfig::default()
        };
        let target = Arc::clone(&self.target);
        let (told, outcome) = std::sync::mpsc::channel();
        let handle = spawn(reactor, move |core| {
            let made = || -> Result<(), String> {
                let pools = Pools {
                    io: Pool::on_slice(io, &classes).map_err(|e| e.to_string())?,
                    admin: Pool::on_slice(admin, &[ADMIN_CLASS]).map_err(|e| e.to_string())?,
                };
                POOLS.set(Some(pools.clone()));
                let waker = core.handle().waker();
                let wake = Arc::new(move || waker.wake());
                let group = QueueGroup::new(target, index, pools, wake, GroupConfig::default())
                    .map_err(|e| e.to_string())?;
                core.add_poller(Box::new(group))
                    .map_err(|e| e.to_string())?;
                Ok(())
            };
            // The receiver waits until spawn has returned.
            let _ = told.send(made());
        })?;
        match outcome.recv() {
            Ok(Ok(())) => Ok(handle),
            Ok(Err(what)) => Err(PlaneError::Group {
                reactor: name.to_string(),
                what,
            }),
            Err(_) => Err(PlaneError::Group {
                reactor: name.to_string(),
                what: "it ended".into(),
            }),
        }
    }

    /// Gives a namespace access to a bdev: a shared claim, which lasts as long as the namespace.
    pub fn backing(
        &self,
        bdev: &str,
        holder: String,
    ) -> Result<Backing, nacre_bdev::registry::RegistryError> {
        let (target, name) = (Arc::downgrade(&self.target), bdev.to_owned());
        // While no host is connected, the size may change freely.
        let watch = Arc::new(move || target.upgrade()?.host_of_bdev(&name));
        let holder = Holder::User(holder);
        let claim = self
            .bdevs
            .claim_watched(bdev, holder, Usage::Shared, watch)?;
        let layer = Arc::clone(claim.layer());
        let open = move |pool: &Pool| {
            claim
                .open(pool)
                .map(|queue| Box::new(queue) as Box<dyn nacre_bdev::Queue>)
        };
        Ok(Backing::new(layer, Arc::new(open)))
    }

    /// The copied bytes of all transports and bdevs.
    pub fn copied_bytes(&self) -> Copied {
        let groups = self.target.groups();
        let of = |group: &GroupHandle| group.counts().copied_bytes.load(Ordering::Relaxed);
        Copied {
            by_target: groups.iter().map(of).sum(),
            by_devices: self
                .bdevs
                .list()
                .iter()
                .map(|listed| listed.layer.module().copied_bytes())
                .sum(),
        }
    }

    /// Buffers in use, by reactor.
    pub async fn pools(&self) -> Vec<PoolUse> {
        let mut all = Vec::with_capacity(self.reactors.len());
        for reactor in &self.reactors {
            let name = reactor.name().to_string();
            let stats = reactor.run(|_| {
                POOLS.with_borrow(|p| p.as_ref().map(|p| (p.io.stats(), p.admin.stats())))
            });
            if let Ok(Some((io, admin))) = stats.await {
                all.push(PoolUse {
                    reactor: name,
                    io,
                    admin,
                });
            }
        }
        all
    }

    /// Disconnects all hosts, and waits until no controller is left, at most `patience`. Returns
    /// false after that time.
    pub async fn disconnect_hosts(&self, patience: Duration) -> bool {
        self.target.stop();
        let deadline = tokio::time::Instant::now() + patience;
        while self.target.controller_count() > 0 {
            if tokio::time::Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        true
    }

    /// Stops the reactors, and waits at most `patience` for their ends. Returns false after that
    /// time.
    pub async fn stop(&self, patience: Duration) -> bool {
        for reactor in &self.reactors {
            reactor.stop();
        }
        let reactors = self.reactors.clone();
        let joined = tokio::task::spawn_blocking(move || {
            for reactor in reactors {
                if let Err(error) = reactor.join() {
                    tracing::error!(%error, "a reactor ended badly");
                }
            }
        });
        tokio::time::timeout(patience, joined).await.is_ok()
    }
}

/// Most cores of `auto` and `auto-numa`, which have no number.
const MOST_CORES: usize = 4;

/// The cores that `text` selects. `auto` selects the first four allowed cores or fewer, and
/// `auto:2` the first two. `auto-numa` selects up to four cores near the network cards and disks,
/// and `auto-numa:2` up to two. Other texts are a list or a mask. `listeners`: selectors that name
/// the network cards. The second value, for `auto-numa`, is the reason of the choice. Refuses a
/// core that the process may not use.
pub fn choose_cores(
    text: &str,
    listeners: &[String],
) -> Result<(Vec<usize>, Option<String>), PlaneError> {
    let bad = |why: String| PlaneError::Cores {
        text: text.to_string(),
        why,
    };
    let allowed = CoreSet::allowed().map_err(|e| bad(e.to_string()))?;
    let of_these = |count: usize| {
        let most = allowed.len();
        match count {
            count if count <= most => Ok(count),
            _ => Err(bad(format!("this process may use {most} cores: {allowed}"))),
        }
    };
    let first = |count: usize| Ok((allowed.iter().take(count).collect(), None));
    let set = match Cores::parse(text).map_err(bad)? {
        Cores::Auto => return first(MOST_CORES),
        Cores::Count(count) => return first(of_these(count)?),
        Cores::NearDevices(count) => {
            let most = count.map_or(Ok(MOST_CORES), of_these)?;
            let with_node: Vec<_> = allowed.iter().map(|core| (core, numa_node(core))).collect();
            let (cards, disks) = placed_devices(&System::real(), listeners);
            let chosen = numa_cores::choose(&with_node, &cards, &disks, most);
            return Ok((chosen.cores, Some(chosen.why)));
        }
        Cores::These(set) => set,
    };
    if let Some(missing) = set.iter().find(|c| !allowed.contains(*c)) {
        return Err(bad(format!(
            "core {missing} is not among those of this process: {allowed}"
        )));
    }
    Ok((set.iter().collect(), None))
}

/// Size of the arena of each NUMA node, in bytes. A multiple of 2 MiB for pages of any size, so
/// that all advice has the same figures.
pub fn arenas(config: &PlaneConfig) -> Result<BTreeMap<Option<u32>, u64>, PlaneError> {
    let cores: Vec<Option<usize>> = if config.cores.is_empty() {
        vec![None]
    } else {
        config.cores.iter().copied().map(Some).collect()
    };
    let mut arenas: BTreeMap<_, u64> = BTreeMap::new();
    for core in cores {
        let name = core.map_or_else(|| "reactor".to_string(), |c| format!("reactor_{c}"));
        let node = core.and_then(numa_node);
        let classes = plane_classes(config, node, &name)?;
        let bytes = Pool::bytes_for(&classes) + Pool::bytes_for(&[ADMIN_CLASS]);
        *arenas.entry(node).or_default() += bytes as u64;
    }
    for bytes in arenas.values_mut() {
        *bytes = bytes.next_multiple_of(TWO_MIB);
    }
    Ok(arenas)
}

/// The buffer classes of a reactor: a quarter of the memory for 4 KiB buffers, an eighth for 16
/// KiB, the rest for large ones. If transfers can exceed 128 KiB, half of the rest is for buffers
/// of 128 KiB, which Linux hosts use most.
fn plane_classes(
    config: &PlaneConfig,
    node: Option<u32>,
    reactor: &str,
) -> Result<Vec<ClassSpec>, PlaneError> {
    if let Some(classes) = &config.classes {
        return Ok(classes.clone());
    }
    const COMMON: u64 = 128 << 10;
    let of_node = node.and_then(|node| config.memory_of_node.get(node as usize));
    let bytes = match of_node {
        None | Some(0) => config.memory_per_reactor,
        Some(bytes) => *bytes,
    };
    let max = config.max_io_size.max(64 << 10) as u64;
    let large = bytes / 16 * 10;
    let of_max = if max > COMMON { large / 2 } else { large };
    if of_max < 4 * max {
        return Err(PlaneError::TooSmall {
            reactor: reactor.to_string(),
            bytes,
            max_io_size: max as usize,
            needed_mb: (13 * max).div_ceil(1 << 20),
        });
    }
    let class = |size: u64, bytes: u64| ClassSpec {
        size: size as usize,
        count: (bytes / size) as usize,
    };
    let mut classes = vec![
        class(4096, bytes / 4),
        class(16 << 10, bytes / 8),
        class(max, of_max),
    ];
    if max > COMMON {
        classes.push(class(COMMON, large - of_max));
    }
    Ok(classes)
}

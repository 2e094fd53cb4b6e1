//! The state that the plug, its management thread and its cores share.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_queue::SegQueue;
use nacre_hugepages::{Arena, ArenaOptions, GRAIN, Piece, register_all_in};
use nacre_nvmf::transport::{CoreLoad, ListenerId, QueueKind};
use nacre_transport_rdma_verbs::{
    Access, CmId, DeviceAttributes, DeviceId, Endpoint, MrKey, ProtectionDomain, Provider, Queues,
    VerbsError,
};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

use crate::core_memory::{CoreMemory, Devices};
use crate::incident::Incidents;
use crate::stats::{Stats, StatsSnapshot};

/// A protection domain, and the slot in which buffers have its keys.
#[derive(Clone)]
pub(crate) struct Domain {
    pub domain: Arc<dyn ProtectionDomain>,
    pub key_slot: usize,
    /// What one memory region of it covers.
    pub piece: Piece,
    /// Responses may end the host's registrations (SEND_WITH_INVALIDATE). Cleared when the device,
    /// which announces the operation, fails one.
    pub may_invalidate: Arc<AtomicBool>,
}

/// A memory region of a device, as in the reply of `rdma_get_mrs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionInfo {
    /// The index of the arena among [`crate::RdmaPlug::arenas`], and the offset of the region in
    /// it.
    pub arena: usize,
    pub offset: u64,
    pub bytes: u64,
    pub lkey: u32,
}

/// The memory that a device in use knows.
pub struct DomainInfo {
    pub domain: Arc<dyn ProtectionDomain>,
    /// The longest region of the device: the smaller one of the configured and the device's limit.
    pub max_mr_size: u64,
    pub regions: Vec<RegionInfo>,
}

/// Memory, and the domains that know it.
pub(crate) struct Memory {
    pub access: Access,
    /// No region is to be longer, whatever devices take.
    max_mr_size: u64,
    inner: Mutex<MemoryInner>,
}

#[derive(Default)]
struct MemoryInner {
    arenas: Vec<Arena>,
    domains: HashMap<DeviceId, Domain>,
}

impl MemoryInner {
    fn unregister(&self, arena: &Arena) {
        let slots = self.domains.values().map(|domain| domain.key_slot);
        slots.for_each(|slot| arena.unregister(slot));
    }
}

fn registration(source: nacre_hugepages::RegisterError) -> VerbsError {
    VerbsError::Call {
        call: "ibv_reg_mr",
        source: std::io::Error::other(source),
    }
}

impl Memory {
    pub fn new(access: Access, max_mr_size: u64, arenas: Vec<Arena>) -> Memory {
        Memory {
            access,
            max_mr_size,
            inner: Mutex::new(MemoryInner {
                arenas,
                domains: HashMap::new(),
            }),
        }
    }

    /// Makes an arena known to every device in use, and to those to come.
    pub fn add(&self, arena: &Arena) -> Result<(), VerbsError> {
        let mut inner = self.inner.lock();
        let registered = inner.domains.values().try_for_each(|domain| {
            let (slot, hook) = (domain.key_slot, domain.domain.hook());
            arena.register_in(slot, hook, domain.piece)
        });
        if let Err(error) = registered {
            inner.unregister(arena);
            return Err(registration(error));
        }
        inner.arenas.push(arena.clone());
        Ok(())
    }

    /// Makes every device forget an arena, which no I/O uses any longer.
    pub fn remove(&self, arena: &Arena) {
        let mut inner = self.inner.lock();
        inner.arenas.retain(|known| !known.is_same(arena));
        inner.unregister(arena);
    }

    /// What one registration with a device may cover.
    fn piece(&self, attributes: &DeviceAttributes) -> Result<Piece, VerbsError> {
        let most = self.max_mr_size.min(attributes.max_mr_size);
        // Buffers of the largest transfers lie in one piece, so a shorter piece is useless.
        Piece::at_most(most).ok_or_else(|| VerbsError::Limit {
            what: "the size of a memory region (max_mr_size)",
            asked: GRAIN as u64,
            limit: most,
            device: attributes.name.clone(),
        })
    }

    /// The domain of a device; made, and all memory registered with it, when it is the first use.
    pub fn domain(&self, provider: &dyn Provider, id: DeviceId) -> Result<Domain, VerbsError> {
        let mut inner = self.inner.lock();
        if let Some(domain) = inner.domains.get(&id) {
            return Ok(domain.clone());
        }
        let device = provider.device(id)?;
        let piece = self.piece(device.attributes())?;
        let may_invalidate = Arc::new(AtomicBool::new(device.attributes().send_with_invalidate));
        let domain = device.protection_domain(self.access)?;
        let key_slot =
            register_all_in(&inner.arenas, &domain.hook(), piece).map_err(registration)?;
        let domain = Domain {
            domain,
            key_slot,
            piece,
            may_invalidate,
        };
        inner.domains.insert(id, domain.clone());
        Ok(domain)
    }

    /// Forgets a device without users.
    pub fn forget(&self, id: DeviceId) {
        let mut inner = self.inner.lock();
        if let Some(domain) = inner.domains.remove(&id) {
            inner
                .arenas
                .iter()
                .for_each(|arena| arena.unregister(domain.key_slot));
        }
    }

    pub fn arenas(&self) -> Vec<Arena> {
        self.inner.lock().arenas.clone()
    }

    pub fn domains(&self) -> Vec<Arc<dyn ProtectionDomain>> {
        let inner = self.inner.lock();
        inner
            .domains
            .values()
            .map(|domain| Arc::clone(&domain.domain))
            .collect()
    }

    /// What each device in use knows, in the order of their names.
    pub fn known(&self) -> Vec<DomainInfo> {
        let inner = self.inner.lock();
        let of = |domain: &Domain| {
            let mut regions = Vec::new();
            for (arena, memory) in inner.arenas.iter().enumerate() {
                let mut offset = 0;
                for (piece, key) in memory.registered(domain.key_slot) {
                    regions.push(RegionInfo {
                        arena,
                        offset,
                        bytes: piece.len() as u64,
                        lkey: MrKey::from_bits(key).lkey,
                    });
                    offset += piece.len() as u64;
                }
            }
            DomainInfo {
                domain: Arc::clone(&domain.domain),
                max_mr_size: domain.piece.bytes() as u64,
                regions,
            }
        };
        let mut known: Vec<DomainInfo> = inner.domains.values().map(of).collect();
        let name = |info: &DomainInfo| info.domain.attributes().name.clone();
        known.sort_by_key(name);
        known
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let devices: Vec<DeviceId> = self.inner.lock().domains.keys().copied().collect();
        devices.into_iter().for_each(|device| self.forget(device));
    }
}

/// A connection that a core is to take over.
pub(crate) struct Incoming {
    pub id: CmId,
    pub endpoint: Endpoint,
    pub device: DeviceId,
    pub key_slot: usize,
    pub listener: ListenerId,
    /// Data that an I/O command may carry, in bytes.
    pub in_capsule: u32,
    /// It said so in its request: IOCCSZ says nothing about the commands of admin queues.
    pub kind: QueueKind,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Commands that the host may have outstanding.
    pub depth: u16,
    /// Requests that fit into its send queue: so many completions are reserved, whatever the device
    /// has granted.
    pub sends: u32,
    pub read_depth: u8,
    pub invalidate: bool,
    /// The device's: see [`Domain`].
    pub may_invalidate: Arc<AtomicBool>,
}

/// The completion queue of a device on a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompletionQueueInfo {
    pub core: usize,
    pub device: String,
    pub entries: u32,
    /// Most completions at once, of receives and of the present queue pairs: never more than
    /// `entries`.
    pub reserved: u32,
}

/// A connection, as in the reply of `rdma_get_qpairs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairInfo {
    /// The number that completions and the peer's diagnostics name it by.
    pub number: u32,
    pub device: String,
    pub listener: ListenerId,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub core: usize,
    pub state: QueuePairState,
    /// Commands that the host may have outstanding.
    pub depth: u16,
    /// RDMA READs that may be outstanding.
    pub read_depth: u8,
    /// Responses end the host's registrations (SEND_WITH_INVALIDATE).
    pub invalidate: bool,
    /// Its index in the port's table of GIDs, once the connection is accepted: the host's request
    /// chose it.
    pub gid_index: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    /// Its core gets ready, or the host has not said that it is.
    Connecting,
    Established,
    /// It flushes.
    Ending,
}

/// Why the management side ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Peer,
    DeviceRemoved,
    AddressChanged,
    /// It never came to be.
    Failed(&'static str),
}

pub(crate) enum ToCore {
    Incoming(Box<Incoming>),
    Established(CmId),
    Ended(CmId, Ended),
    /// There is no room for more: those that have not connected their queue have less time for it.
    Crowded,
    /// A device, or these queues of it, are out of use: the core releases its parts of them.
    DeviceGone,
    /// The queues with this [`Queues::id`] failed.
    QueuesFailed(u64),
    /// A queue pair that ends takes no further shared receive, and the receives that it took have
    /// completed.
    LastReceive(CmId),
}

pub(crate) enum ToControl {
    /// Receives are posted: the connection may be accepted.
    Ready(CmId),
    /// It cannot be had, for this reason; its queue pair is destroyed.
    Refused(CmId, String),
    /// Nothing is posted any longer; the queue pair comes back unless it is destroyed already.
    Done(CmId, Option<Endpoint>),
}

/// One core, as the management thread sees it.
pub(crate) struct CoreSlot {
    pub core: usize,
    pub inbox: SegQueue<ToCore>,
    pub load: CoreLoad,
    pub wake: Arc<dyn Fn() + Send + Sync>,
    /// Counters by device name. They stay when a device goes, and continue when it is back.
    stats: Mutex<BTreeMap<String, Arc<Stats>>>,
    /// For each device, the queues of this core and the completions that its connections can
    /// make.
    pub queues: Mutex<HashMap<DeviceId, (Queues, u32)>>,
    pub closed: AtomicBool,
}

impl CoreSlot {
    pub fn new(core: usize, wake: Arc<dyn Fn() + Send + Sync>) -> CoreSlot {
        CoreSlot {
            core,
            inbox: SegQueue::new(),
            load: CoreLoad::default(),
            wake,
            stats: Mutex::default(),
            queues: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub fn send(&self, message: ToCore) {
        self.inbox.push(message);
        (self.wake)();
    }

    /// The counters of a device on this core.
    pub fn stats(&self, device: &str) -> Arc<Stats> {
        let mut all = self.stats.lock();
        Arc::clone(all.entry(device.to_owned()).or_default())
    }

    pub fn all_stats(&self) -> Vec<(String, StatsSnapshot)> {
        let all = self.stats.lock();
        let each = all
            .iter()
            .map(|(name, stats)| (name.clone(), stats.snapshot()));
        each.collect()
    }

    pub fn queues(&self) -> MutexGuard<'_, HashMap<DeviceId, (Queues, u32)>> {
        self.queues.lock()
    }
}

/// Messages to a management thread, and what wakes it.
pub(crate) struct Mailbox<M> {
    messages: Mutex<VecDeque<M>>,
    pub wake: OwnedFd,
}

impl<M> Mailbox<M> {
    pub fn new() -> std::io::Result<Mailbox<M>> {
        Ok(Mailbox {
            messages: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub fn send(&self, message: M) {
        self.messages.lock().push_back(message);
        self.ring();
    }

    pub fn ring(&self) {
        // A counter that is full has rung.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub fn quiet(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    pub fn take(&self) -> Option<M> {
        self.messages.lock().pop_front()
    }
}

pub(crate) struct Shared {
    pub config: crate::RdmaConfig,
    /// That the memory of the cores is made for.
    pub devices: Devices,
    pub provider: Arc<dyn Provider>,
    pub memory: Memory,
    pub mailbox: Mailbox<ToControl>,
    pub cores: Mutex<Vec<Arc<CoreSlot>>>,
    /// Memory of cores that open later: see [`crate::RdmaPlug::prepare`].
    pub prepared: Mutex<Vec<Arena>>,
    /// Called when devices, ports or addresses have changed.
    pub changed: OnceLock<Box<dyn Fn() + Send + Sync>>,
    pub incidents: Incidents,
    pub stopping: AtomicBool,
}

impl Shared {
    pub fn cores(&self) -> MutexGuard<'_, Vec<Arc<CoreSlot>>> {
        self.cores.lock()
    }

    pub fn prepared(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.prepared.lock()
    }

    /// Memory for one core, which every device in use, and those to come, know.
    pub fn allocate_core_memory(&self) -> std::io::Result<Arena> {
        let bytes = CoreMemory::of(&self.config, self.devices).bytes();
        let arena =
            Arena::allocate(ArenaOptions::new(bytes as u64)).map_err(std::io::Error::other)?;
        self.memory.add(&arena).map_err(std::io::Error::other)?;
        Ok(arena)
    }

    pub fn notify_changed(&self) {
        if let Some(changed) = self.changed.get() {
            changed();
        }
    }

    /// The core that carries least, of several the first.
    pub fn least_loaded(&self) -> Option<Arc<CoreSlot>> {
        let cores = self.cores();
        let open = cores
            .iter()
            .filter(|core| !core.closed.load(Ordering::Acquire));
        open.min_by_key(|core| (core.load.rank(), core.core))
            .cloned()
    }
}

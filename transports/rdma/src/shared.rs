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

/// A protection domain, and the slot of `Buf::key` that holds its keys.
#[derive(Clone)]
pub(crate) struct Domain {
    pub domain: Arc<dyn ProtectionDomain>,
    pub key_slot: usize,
    /// The largest size of a memory region of the domain.
    pub piece: Piece,
    /// Responses may invalidate the host's keys (SEND_WITH_INVALIDATE). Cleared if the device
    /// reports the operation as supported and fails one.
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

/// The memory registered with one device.
pub struct DomainInfo {
    pub domain: Arc<dyn ProtectionDomain>,
    /// The longest region in bytes: the largest power of two within the configured limit, the
    /// device's, and 1 GiB.
    pub max_mr_size: u64,
    pub regions: Vec<RegionInfo>,
}

/// The arenas of one plug or of the host side, and the domains that they are registered with.
pub(crate) struct Memory {
    pub access: Access,
    /// Configured upper limit for the size of a region.
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
    pub(crate) fn new(access: Access, max_mr_size: u64, arenas: Vec<Arena>) -> Self {
        Self {
            access,
            max_mr_size,
            inner: Mutex::new(MemoryInner {
                arenas,
                domains: HashMap::new(),
            }),
        }
    }

    /// Registers an arena with every device in use. Devices added later register it too.
    pub(crate) fn add(&self, arena: &Arena) -> Result<(), VerbsError> {
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

    /// Deregisters an arena, which no I/O uses any longer, from every device.
    pub(crate) fn remove(&self, arena: &Arena) {
        let mut inner = self.inner.lock();
        inner.arenas.retain(|known| !known.is_same(arena));
        inner.unregister(arena);
    }

    /// The largest size of one registration with a device. An error if it is below 16 MiB
    /// ([`GRAIN`]).
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

    /// The domain of a device. The first use creates it and registers all memory with it.
    pub(crate) fn domain(
        &self,
        provider: &dyn Provider,
        id: DeviceId,
    ) -> Result<Domain, VerbsError> {
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

    /// Removes a device without users.
    pub(crate) fn forget(&self, id: DeviceId) {
        let mut inner = self.inner.lock();
        if let Some(domain) = inner.domains.remove(&id) {
            inner
                .arenas
                .iter()
                .for_each(|arena| arena.unregister(domain.key_slot));
        }
    }

    pub(crate) fn arenas(&self) -> Vec<Arena> {
        self.inner.lock().arenas.clone()
    }

    pub(crate) fn domains(&self) -> Vec<Arc<dyn ProtectionDomain>> {
        let inner = self.inner.lock();
        inner
            .domains
            .values()
            .map(|domain| Arc::clone(&domain.domain))
            .collect()
    }

    /// Memory known to each device in use, in the order of device names.
    pub(crate) fn known(&self) -> Vec<DomainInfo> {
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

/// A connection that a core takes over.
pub(crate) struct Incoming {
    pub id: CmId,
    pub endpoint: Endpoint,
    pub device: DeviceId,
    pub key_slot: usize,
    pub listener: ListenerId,
    /// Most in-capsule data of an I/O command, in bytes.
    pub in_capsule: u32,
    /// From the connection request. IOCCSZ does not apply to commands of admin queues.
    pub kind: QueueKind,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// Most outstanding commands of the host.
    pub depth: u16,
    /// Size of the send queue as requested. This number of completions is reserved, even if the
    /// device grants more entries.
    pub sends: u32,
    pub read_depth: u8,
    pub invalidate: bool,
    /// The flag of the device: see [`Domain`].
    pub may_invalidate: Arc<AtomicBool>,
}

/// The completion queue of one core on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompletionQueueInfo {
    pub core: usize,
    pub device: String,
    pub entries: u32,
    /// Most completions that receives and the present queue pairs can have pending. At most
    /// `entries`.
    pub reserved: u32,
}

/// A connection, as in the reply of `rdma_get_qpairs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuePairInfo {
    /// The queue pair number (QPN). Different devices can use the same number.
    pub number: u32,
    pub device: String,
    pub listener: ListenerId,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub core: usize,
    pub state: QueuePairState,
    /// Most outstanding commands of the host.
    pub depth: u16,
    /// Most outstanding RDMA READs.
    pub read_depth: u8,
    /// True if responses invalidate the host's registrations (SEND_WITH_INVALIDATE).
    pub invalidate: bool,
    /// Index of the local address in the port's GID table, once the connection is accepted. The
    /// host's request determines it.
    pub gid_index: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    /// The core prepares the connection, or the host has not confirmed it yet.
    Connecting,
    Established,
    /// The queue pair flushes.
    Ending,
}

/// The reason why the management thread ends a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Peer,
    DeviceRemoved,
    AddressChanged,
    /// The connection could not be established, or its queue pair failed: the name of the event.
    Failed(&'static str),
}

pub(crate) enum ToCore {
    Incoming(Box<Incoming>),
    Established(CmId),
    Ended(CmId, Ended),
    /// The limit of connections is reached: connections that have not sent Connect get less time
    /// for it.
    Crowded,
    /// A device, or a core's queues on it, were removed: the core releases its parts of them.
    DeviceGone,
    /// The queues with this [`Queues::id`] failed.
    QueuesFailed(u64),
    /// An ending queue pair takes no further shared receive, and all receives that it took have
    /// completed.
    LastReceive(CmId),
}

pub(crate) enum ToControl {
    /// Receives are posted: the connection may be accepted.
    Ready(CmId),
    /// The core refused the connection for this reason. Its queue pair is destroyed.
    Refused(CmId, String),
    /// The core has released the connection. Returns the queue pair unless it is destroyed already.
    Done(CmId, Option<Endpoint>),
}

/// One core, as seen by the management thread.
pub(crate) struct CoreSlot {
    pub core: usize,
    pub inbox: SegQueue<ToCore>,
    pub load: CoreLoad,
    pub wake: Arc<dyn Fn() + Send + Sync>,
    /// Counters by device name. They survive the removal of a device and continue after its return.
    stats: Mutex<BTreeMap<String, Arc<Stats>>>,
    /// For each device, the queues of this core and the completions that its connections can
    /// make.
    pub queues: Mutex<HashMap<DeviceId, (Queues, u32)>>,
    pub closed: AtomicBool,
}

impl CoreSlot {
    pub(crate) fn new(core: usize, wake: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self {
            core,
            inbox: SegQueue::new(),
            load: CoreLoad::default(),
            wake,
            stats: Mutex::default(),
            queues: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn send(&self, message: ToCore) {
        self.inbox.push(message);
        (self.wake)();
    }

    /// The counters of a device on this core.
    pub(crate) fn stats(&self, device: &str) -> Arc<Stats> {
        let mut all = self.stats.lock();
        Arc::clone(all.entry(device.to_owned()).or_default())
    }

    pub(crate) fn all_stats(&self) -> Vec<(String, StatsSnapshot)> {
        let all = self.stats.lock();
        let each = all
            .iter()
            .map(|(name, stats)| (name.clone(), stats.snapshot()));
        each.collect()
    }

    pub(crate) fn queues(&self) -> MutexGuard<'_, HashMap<DeviceId, (Queues, u32)>> {
        self.queues.lock()
    }
}

/// Messages to a management thread, and the eventfd that wakes it: `ring` signals it, and `quiet`
/// clears the signal.
pub(crate) struct Mailbox<M> {
    messages: Mutex<VecDeque<M>>,
    pub wake: OwnedFd,
}

impl<M> Mailbox<M> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            messages: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(crate) fn send(&self, message: M) {
        self.messages.lock().push_back(message);
        self.ring();
    }

    pub(crate) fn ring(&self) {
        // A write fails only if the counter is full; the descriptor is then readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn quiet(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    pub(crate) fn take(&self) -> Option<M> {
        self.messages.lock().pop_front()
    }
}

pub(crate) struct Shared {
    pub config: crate::RdmaConfig,
    /// The devices for which the cores' memory is sized.
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
    pub(crate) fn cores(&self) -> MutexGuard<'_, Vec<Arc<CoreSlot>>> {
        self.cores.lock()
    }

    pub(crate) fn prepared(&self) -> MutexGuard<'_, Vec<Arena>> {
        self.prepared.lock()
    }

    /// Allocates memory for one core. It is registered with every device in use, and with later
    /// ones.
    pub(crate) fn allocate_core_memory(&self) -> std::io::Result<Arena> {
        let bytes = CoreMemory::of(&self.config, self.devices).bytes();
        let arena =
            Arena::allocate(ArenaOptions::new(bytes as u64)).map_err(std::io::Error::other)?;
        self.memory.add(&arena).map_err(std::io::Error::other)?;
        Ok(arena)
    }

    pub(crate) fn notify_changed(&self) {
        if let Some(changed) = self.changed.get() {
            changed();
        }
    }

    /// The core with the lowest load. With equal loads, the first one.
    pub(crate) fn least_loaded(&self) -> Option<Arc<CoreSlot>> {
        let cores = self.cores();
        let open = cores
            .iter()
            .filter(|core| !core.closed.load(Ordering::Acquire));
        open.min_by_key(|core| (core.load.rank(), core.core))
            .cloned()
    }
}

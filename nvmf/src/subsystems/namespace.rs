//! [`Namespace`]: its identifiers and its bdev; and [`View`]: the namespaces of one controller.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, OpenError, Queue};
use nacre_hugepages::Pool;
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::log::ana::AnaState;
use uuid::Uuid;

use crate::subsystems::ana;
use crate::subsystems::reservation::Reservation;

/// Opens a per-core queue on a bdev.
pub type OpenQueue = dyn Fn(&Pool) -> Result<Box<dyn Queue>, OpenError> + Send + Sync;

/// The bdev of a namespace, and the function that opens a core's queue to it.
#[derive(Clone)]
pub struct Backing {
    pub bdev: Arc<dyn Bdev>,
    open: Arc<OpenQueue>,
}

impl Backing {
    /// A bdev whose per-core queues `open` opens.
    pub fn new(bdev: Arc<dyn Bdev>, open: Arc<OpenQueue>) -> Self {
        Self { bdev, open }
    }

    pub fn open(&self, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        (self.open)(pool)
    }
}

/// Identifiers that hosts use to recognise a namespace on every path and after every restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceIds {
    pub uuid: Uuid,
    pub nguid: [u8; 16],
    /// Zeroes: none.
    pub eui64: [u8; 8],
}

impl NamespaceIds {
    /// Uses the UUID as NGUID as well.
    pub fn from_uuid(uuid: Uuid) -> Self {
        Self {
            uuid,
            nguid: uuid.into_bytes(),
            eui64: [0; 8],
        }
    }
}

/// The last serial number.
static SERIALS: AtomicU64 = AtomicU64::new(0);

/// A namespace of one subsystem, shared by all cores.
pub struct Namespace {
    pub nsid: u32,
    /// Differs from that of every other namespace of the process, including later ones with the
    /// same NSID. Not zero.
    pub(crate) serial: u64,
    pub ids: NamespaceIds,
    ana_group: AtomicU32,
    pub backing: Backing,
    pub reservation: Arc<Reservation>,
    /// Most blocks of a zero-copy read of the bdev; 0: none.
    pub(crate) zero_copy_blocks: u32,
    /// The bdev completes every I/O in `submit`.
    pub(crate) immediate: bool,
    /// The bdev may execute I/O synchronously ([`Queue::run_sync`]).
    pub(crate) is_sync: bool,
    /// Per core: the index of its queue to the bdev in the core's table, plus one; 0: not open.
    /// Only that core writes it.
    slots: Box<[AtomicU32]>,
}

impl Namespace {
    pub(crate) fn new(
        nsid: u32,
        ids: NamespaceIds,
        ana_group: u32,
        backing: Backing,
        reservation: Arc<Reservation>,
        cores: usize,
    ) -> Self {
        let slots = (0..cores).map(|_| AtomicU32::new(0)).collect();
        let limits = backing.bdev.limits();
        Self {
            nsid,
            serial: SERIALS.fetch_add(1, Ordering::Relaxed) + 1,
            ids,
            ana_group: AtomicU32::new(ana_group),
            zero_copy_blocks: limits.zero_copy_blocks,
            immediate: limits.immediate,
            is_sync: limits.is_sync,
            backing,
            reservation,
            slots,
        }
    }

    pub fn ana_group(&self) -> u32 {
        self.ana_group.load(Ordering::Relaxed)
    }

    /// Sets the ANA group. The caller must have the subsystem's lock until it has published the
    /// views.
    pub(crate) fn set_ana_group(&self, group: u32) {
        self.ana_group.store(group, Ordering::Relaxed);
    }

    pub fn geometry(&self) -> Geometry {
        self.backing.bdev.geometry()
    }

    pub fn limits(&self) -> Limits {
        self.backing.bdev.limits()
    }

    pub(crate) fn slot(&self, core: usize) -> Option<usize> {
        (self.slots[core].load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    pub(crate) fn set_slot(&self, core: usize, slot: Option<usize>) {
        self.slots[core].store(slot.map_or(0, |s| s as u32 + 1), Ordering::Relaxed);
    }
}

/// The namespaces of one controller with their ANA states: an immutable snapshot.
#[derive(Default)]
pub struct View {
    /// Indexed by NSID minus one.
    namespaces: Vec<Option<Seen>>,
    /// The ANA state of a namespace does not allow I/O commands.
    blocked: bool,
    /// The status for I/O commands if the ANA state of the listener does not allow them.
    no_access: Option<StatusCode>,
}

struct Seen {
    namespace: Arc<Namespace>,
    access: AnaState,
}

impl View {
    /// `listener`: the ANA state for groups without a state of their own.
    pub(crate) fn new(
        visible: impl Iterator<Item = (Arc<Namespace>, AnaState)>,
        listener: AnaState,
    ) -> Self {
        let mut namespaces = Vec::new();
        let mut blocked = false;
        for (namespace, access) in visible {
            let at = namespace.nsid as usize - 1;
            if namespaces.len() <= at {
                namespaces.resize_with(at + 1, || None);
            }
            blocked |= !access.is_accessible();
            namespaces[at] = Some(Seen { namespace, access });
        }
        Self {
            namespaces,
            blocked,
            no_access: ana::refusal(listener),
        }
    }

    /// The status for a command to a namespace that the controller does not have. If the ANA state
    /// of the listener does not allow commands, the status makes the host use another path. The
    /// namespace may be about to move to another target.
    pub(crate) fn absent(&self) -> StatusCode {
        let unknown = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
        self.no_access.unwrap_or(unknown)
    }

    fn seen(&self, nsid: u32) -> Option<&Seen> {
        self.namespaces
            .get((nsid as usize).wrapping_sub(1))?
            .as_ref()
    }

    pub fn get(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        self.seen(nsid).map(|seen| &seen.namespace)
    }

    /// The ANA state of an active namespace.
    pub fn access(&self, nsid: u32) -> Option<AnaState> {
        self.seen(nsid).map(|seen| seen.access)
    }

    /// The namespace of an I/O command, or the status to refuse it with.
    pub(crate) fn for_command(&self, nsid: u32) -> Result<&Arc<Namespace>, StatusCode> {
        let seen = self.seen(nsid).ok_or_else(|| self.absent())?;
        match ana::refusal(seen.access) {
            None => Ok(&seen.namespace),
            Some(status) => Err(status),
        }
    }

    /// The status for a command to all namespaces, if the ANA state of one does not allow it.
    pub(crate) fn refusal_of_all(&self) -> Option<StatusCode> {
        if !self.blocked {
            return None;
        }
        let all = self.namespaces.iter().flatten();
        all.filter_map(|seen| ana::refusal(seen.access)).next()
    }

    /// True if both views have the same NSIDs with the same ANA states.
    pub(crate) fn same_access(&self, other: &Self) -> bool {
        let accesses = |view: &Self| {
            let all = view.namespaces.iter().flatten();
            all.map(|seen| (seen.namespace.nsid, seen.access))
                .collect::<Vec<_>>()
        };
        accesses(self) == accesses(other) && self.no_access == other.no_access
    }

    /// The namespace with the lowest NSID above `nsid`.
    pub fn after(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        let later = self.namespaces.get(nsid as usize..)?;
        later.iter().flatten().next().map(|seen| &seen.namespace)
    }

    /// The namespaces in the order of their NSIDs.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.namespaces.iter().flatten().map(|seen| &seen.namespace)
    }
}

//! A namespace: the identity that hosts see, and the bdev behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nacre_bdev::{Bdev, Geometry, Limits, OpenError, Queue};
use nacre_hugepages::Pool;
use uuid::Uuid;

/// Opens a per-core queue on a bdev.
pub type OpenQueue = dyn Fn(&Pool) -> Result<Box<dyn Queue>, OpenError> + Send + Sync;

/// The device behind a namespace: what it is, and how a core opens it.
#[derive(Clone)]
pub struct Backing {
    pub bdev: Arc<dyn Bdev>,
    open: Arc<OpenQueue>,
}

impl Backing {
    /// A bdev opened through `open`, for instance through its registry.
    pub fn new(bdev: Arc<dyn Bdev>, open: Arc<OpenQueue>) -> Backing {
        Backing { bdev, open }
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
    /// All zero: none.
    pub eui64: [u8; 8],
}

impl NamespaceIds {
    /// The UUID serves as NGUID too, as Linux hosts expect at least one of the two.
    pub fn from_uuid(uuid: Uuid) -> NamespaceIds {
        NamespaceIds {
            uuid,
            nguid: uuid.into_bytes(),
            eui64: [0; 8],
        }
    }
}

/// A namespace of one subsystem, shared by all cores.
pub struct Namespace {
    pub nsid: u32,
    pub ids: NamespaceIds,
    pub ana_group: u32,
    pub backing: Backing,
    /// Per core: where the core's queue on the bdev stands in the core's table, plus one. Each is
    /// written by its own core only.
    slots: Box<[AtomicU32]>,
}

impl Namespace {
    pub(crate) fn new(
        nsid: u32,
        ids: NamespaceIds,
        ana_group: u32,
        backing: Backing,
        cores: usize,
    ) -> Namespace {
        let slots = (0..cores).map(|_| AtomicU32::new(0)).collect();
        Namespace {
            nsid,
            ids,
            ana_group,
            backing,
            slots,
        }
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

/// The namespaces that one controller sees: an immutable snapshot.
#[derive(Default)]
pub struct View {
    /// Indexed by namespace id less one.
    namespaces: Vec<Option<Arc<Namespace>>>,
}

impl View {
    pub(crate) fn new(visible: impl Iterator<Item = Arc<Namespace>>) -> View {
        let mut namespaces = Vec::new();
        for namespace in visible {
            let at = namespace.nsid as usize - 1;
            if namespaces.len() <= at {
                namespaces.resize(at + 1, None);
            }
            namespaces[at] = Some(namespace);
        }
        View { namespaces }
    }

    pub fn get(&self, nsid: u32) -> Option<&Arc<Namespace>> {
        self.namespaces
            .get((nsid as usize).wrapping_sub(1))?
            .as_ref()
    }

    /// In the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Namespace>> {
        self.namespaces.iter().flatten()
    }
}

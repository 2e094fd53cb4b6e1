//! Claims of registered devices: the user of a device, exclusive or shared use, and the queues that
//! a claim may open.

use std::sync::{Arc, Weak};

use nacre_hugepages::Pool;

use super::Inner;
use crate::device::OpenError;
use crate::layer::{Layer, LayerQueue, ModuleQueue};

/// The user of a device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Holder {
    /// The devices stacked on this device, by name: they are resized and removed with it.
    Bdevs(Vec<String>),
    /// Any other user, as text: `namespace 1 of nqn.…`.
    User(String),
}

impl Holder {
    /// The devices stacked on this device; empty for any other user.
    pub fn bdevs(&self) -> &[String] {
        match self {
            Self::Bdevs(names) => names,
            Self::User(_) => &[],
        }
    }
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bdevs(names) => match names.as_slice() {
                [name] => write!(f, "bdev \"{name}\""),
                [] => f.write_str("a bdev"),
                [first, .., last] => write!(f, "bdevs \"{first}\" to \"{last}\""),
            },
            Self::User(what) => f.write_str(what),
        }
    }
}

/// The kind of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Usage {
    /// Excludes every other user. Required to use the module's own queues.
    Exclusive,
    /// Other users may share the device, each through the layer.
    Shared,
    /// The holder only reads, and relies on the contents: other users may only read, too. A device
    /// that refuses writes may have shared claims beside it.
    ReadOnly,
}

impl Usage {
    /// True when a claim of one kind excludes the other. `is_fixed`: the device refuses writes.
    pub(super) fn excludes(self, other: Self, is_fixed: bool) -> bool {
        match (self, other) {
            (Self::Exclusive, _) | (_, Self::Exclusive) => true,
            (Self::ReadOnly, Self::Shared) | (Self::Shared, Self::ReadOnly) => !is_fixed,
            _ => false,
        }
    }
}

/// Returns the user that relies on the present size of a claimed device, for example a host that
/// has read this size. The registry calls it before a decrease of the size, without its lock.
pub type Watch = dyn Fn() -> Option<String> + Send + Sync;

pub(super) struct ClaimRecord {
    pub id: u64,
    pub holder: Holder,
    pub usage: Usage,
    /// `None`: the holder itself relies on the size.
    pub watch: Option<Arc<Watch>>,
}

/// The right to use a device. Dropping it releases the claim; open queues stay open.
pub struct Claim {
    id: u64,
    layer: Arc<Layer>,
    registry: Weak<Inner>,
}

impl Claim {
    pub(super) fn new(id: u64, layer: Arc<Layer>, registry: Weak<Inner>) -> Self {
        Self {
            id,
            layer,
            registry,
        }
    }

    /// The claimed device.
    pub fn layer(&self) -> &Arc<Layer> {
        &self.layer
    }

    /// Opens a queue for the calling core, through the layer.
    pub fn open(&self, pool: &Pool) -> Result<LayerQueue, OpenError> {
        self.layer.open_queue(pool)
    }

    /// Opens the module's queue without the layer, for a stacked device: its own layer checks and
    /// splits the I/O. Needs an exclusive claim.
    pub fn open_module(&self, pool: &Pool) -> Result<ModuleQueue, OpenError> {
        self.layer.open_module(pool)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(registry) = self.registry.upgrade() {
            registry.release(&self.layer, self.id);
        }
    }
}

//! The control side of the loopback transport: its limits, and its listeners by name.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_nvmf::transport::{
    Address, ListenError, ListenerId, ListenerOptions, Plug, Transport, TransportCaps,
    TransportType,
};
use nacre_nvmf_wire::tcp::ADMIN_IN_CAPSULE_BYTES;
use parking_lot::{Mutex, MutexGuard};

use crate::error::ConnectError;
use crate::host::LoopbackHost;
use crate::transport::{Core, LoopbackTransport};

/// Most listeners of one plug.
const MAX_LISTENERS: usize = 256;

thread_local! {
    /// The cores of this thread, by plug.
    static CORES: RefCell<Vec<(u64, Weak<RefCell<Core>>)>> = const { RefCell::new(Vec::new()) };
}

/// The limits of this transport, some of which the controller announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopbackConfig {
    /// Largest in-capsule data of an I/O command, in bytes.
    pub in_capsule_bytes: u32,
    /// Largest transfer of one command, in bytes.
    pub max_transfer_bytes: u32,
    /// Most connections per core.
    pub max_connections: usize,
}

impl Default for LoopbackConfig {
    fn default() -> Self {
        Self {
            in_capsule_bytes: 4096,
            max_transfer_bytes: 128 << 10,
            max_connections: 10_000,
        }
    }
}

/// The [`Plug`] of the loopback transport: creates listeners, and the transport of each core.
pub struct LoopbackPlug {
    /// Distinguishes this plug's cores from those of another plug on the same thread.
    id: u64,
    config: LoopbackConfig,
    listeners: Arc<Mutex<HashMap<String, ListenerId>>>,
}

impl LoopbackPlug {
    pub fn new(config: LoopbackConfig) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            config,
            listeners: Arc::default(),
        }
    }

    /// Connects a host to the listener `name`. The calling thread must have a transport of this
    /// plug; of several it takes the one with the fewest connections.
    pub fn connect_host(&self, name: &str) -> Result<LoopbackHost, ConnectError> {
        let listener = *self
            .listeners()
            .get(name)
            .ok_or_else(|| ConnectError::NoListener {
                name: name.to_owned(),
            })?;
        let core = CORES.with_borrow(|cores| {
            let mine = cores.iter().filter(|(plug, _)| *plug == self.id);
            mine.filter_map(|(_, core)| core.upgrade())
                .min_by_key(|core| core.borrow().connections())
        });
        let core = core.ok_or(ConnectError::NoCore)?;
        LoopbackHost::connect(core, listener, name)
    }

    fn listeners(&self) -> MutexGuard<'_, HashMap<String, ListenerId>> {
        self.listeners.lock()
    }
}

impl Plug for LoopbackPlug {
    fn kind(&self) -> TransportType {
        TransportType::Loopback
    }

    fn listen(
        &self,
        id: ListenerId,
        address: &Address,
        options: &ListenerOptions,
    ) -> Result<Address, ListenError> {
        options.refuse(self.kind())?;
        let Address::Loopback(name) = address else {
            let kind = TransportType::Loopback;
            return Err(ListenError::WrongKind {
                address: address.to_string(),
                kind,
            });
        };
        let mut listeners = self.listeners();
        if listeners.contains_key(name) || listeners.values().any(|other| *other == id) {
            return Err(ListenError::InUse {
                address: address.to_string(),
            });
        }
        if listeners.len() >= MAX_LISTENERS {
            return Err(ListenError::TooMany {
                limit: MAX_LISTENERS,
            });
        }
        listeners.insert(name.clone(), id);
        Ok(address.clone())
    }

    fn unlisten(&self, id: ListenerId) {
        self.listeners().retain(|_, listener| *listener != id);
    }

    fn open(
        &self,
        _core: usize,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> std::io::Result<Box<dyn Transport>> {
        let caps = TransportCaps {
            kind: TransportType::Loopback,
            in_capsule_bytes: self.config.in_capsule_bytes,
            admin_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES.max(self.config.in_capsule_bytes),
            max_transfer_bytes: self.config.max_transfer_bytes,
            max_sgl_descriptors: 1,
            keyed_sgl: false,
        };
        let core = Rc::new(RefCell::new(Core::new(self.config.max_connections, wake)));
        CORES.with_borrow_mut(|cores| {
            cores.retain(|(_, core)| core.strong_count() > 0);
            cores.push((self.id, Rc::downgrade(&core)));
        });
        Ok(Box::new(LoopbackTransport::new(caps, core)))
    }
}

//! RDMA in the daemon: the verbs provider, which is loaded at first use, and the one RDMA
//! transport.

pub mod describe;
mod incidents;
pub mod soft;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nacre_hugepages::Arena;
use nacre_transport_rdma::{RdmaConfig, RdmaPlug};
use nacre_transport_rdma_verbs::Provider;
use nacre_transport_rdma_verbs::real::{Absence, VerbsProvider};
use tokio::sync::Notify;

use crate::plane::demand::rdma_per_core;
use crate::services::Engine;
use crate::services::nics::Nics;

/// Interval of checks for removed devices, for removals that no event announces.
const LOOK: Duration = Duration::from_secs(5);

/// The verbs provider of this machine. Clones share it.
#[derive(Clone, Default)]
pub struct Verbs(Arc<OnceLock<Arc<dyn Provider>>>);

impl Verbs {
    /// Wraps another provider, for tests.
    #[cfg(test)]
    pub fn of(provider: Arc<dyn Provider>) -> Self {
        Self(Arc::new(OnceLock::from(provider)))
    }

    /// Loads the libraries at first use. Reads files: call it on a thread that may block.
    pub fn open(&self) -> Result<Arc<dyn Provider>, Absence> {
        if let Some(open) = self.0.get() {
            return Ok(Arc::clone(open));
        }
        let provider = VerbsProvider::find()?;
        // Of two concurrent loads the first one is used.
        Ok(Arc::clone(self.0.get_or_init(|| Arc::new(provider))))
    }
}

/// The daemon's RDMA state: verbs, the transport if one was created, and change notifications.
#[derive(Default)]
pub struct Rdma {
    pub verbs: Verbs,
    /// Counters of the network interfaces in use, for metrics.
    pub nics: Arc<Nics>,
    plug: RefCell<Option<Arc<RdmaPlug>>>,
    changed: Arc<Notify>,
    incidents: Arc<Notify>,
    watched: Cell<bool>,
}

impl Rdma {
    #[cfg(test)]
    pub fn with(provider: Arc<dyn Provider>) -> Self {
        Self {
            verbs: Verbs::of(provider),
            ..Self::default()
        }
    }

    /// The transport, once created.
    pub fn plug(&self) -> Option<Arc<RdmaPlug>> {
        self.plug.borrow().clone()
    }

    /// Stores a new transport, and follows its changes and failures.
    pub fn made(engine: &Rc<Engine>, plug: Arc<RdmaPlug>) {
        let of = &engine.rdma;
        let (changed, incidents) = (Arc::clone(&of.changed), Arc::clone(&of.incidents));
        // Notify stores one permit, so a change without a waiter is not lost.
        plug.on_change(move || changed.notify_one());
        plug.on_incident(move || incidents.notify_one());
        of.plug.replace(Some(plug));
        incidents::follow(engine);
        Self::watch_for_removal(engine);
    }

    /// Notified when a failure occurred that was not reported yet.
    fn incidents(&self) -> Arc<Notify> {
        Arc::clone(&self.incidents)
    }

    /// Resolves when devices, ports or addresses have changed since the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Starts a task that checks for removed devices, which closes them. librdmacm keeps a device
    /// open, even one that was opened only for a description. The removal of a software device
    /// waits for all processes that have it open.
    pub fn watch_for_removal(engine: &Rc<Engine>) {
        if engine.rdma.watched.replace(true) {
            return;
        }
        let weak = Rc::downgrade(engine);
        tokio::task::spawn_local(async move {
            while let Some(engine) = weak.upgrade() {
                let verbs = engine.rdma.verbs.clone();
                drop(engine);
                let found = tokio::task::spawn_blocking(move || {
                    let provider = verbs.open().ok()?;
                    provider.devices().ok().map(|devices| devices.len())
                });
                let none = matches!(found.await, Ok(None | Some(0)));
                let Some(engine) = weak.upgrade() else { return };
                if none && engine.rdma.plug().is_none() {
                    engine.rdma.watched.set(false);
                    return;
                }
                drop(engine);
                tokio::time::sleep(LOOK).await;
            }
        });
    }

    /// Bytes of memory that the next RDMA device has to register. They are the memory of the whole
    /// data path and that of the transport on each of `cores`. 0 once a device is in use.
    pub fn memory_needed(&self, arenas: &[Arena], cores: usize, config: &RdmaConfig) -> u64 {
        let sum = |arenas: &[Arena]| arenas.iter().map(|arena| arena.report().bytes).sum::<u64>();
        match self.plug() {
            Some(plug) if !plug.domains().is_empty() => 0,
            Some(plug) => sum(&plug.arenas()),
            None => sum(arenas) + cores as u64 * rdma_per_core(config),
        }
    }

    /// Drops the transport, which ends with the data plane.
    pub fn close(&self) {
        self.plug.replace(None);
        self.incidents.notify_one();
    }
}

//! RDMA as the daemon uses it: the machine's verbs, found when they are first needed, and the one plug.

pub mod describe;

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use nacre_hugepages::Arena;
use nacre_rdma::{RdmaConfig, RdmaPlug};
use nacre_rdma_verbs::Provider;
use nacre_rdma_verbs::real::{Absence, VerbsProvider};
use tokio::sync::Notify;

/// The verbs of this machine. Clones are the same.
#[derive(Clone, Default)]
pub struct Verbs(Arc<OnceLock<Arc<dyn Provider>>>);

impl Verbs {
    /// Verbs of another kind.
    #[cfg(test)]
    pub fn of(provider: Arc<dyn Provider>) -> Verbs {
        Verbs(Arc::new(OnceLock::from(provider)))
    }

    /// Loads the libraries if that was not done yet, which reads files: for a thread that may block.
    pub fn open(&self) -> Result<Arc<dyn Provider>, Absence> {
        if let Some(open) = self.0.get() {
            return Ok(Arc::clone(open));
        }
        let provider = VerbsProvider::find()?;
        // Two that find them at once use the same.
        Ok(Arc::clone(self.0.get_or_init(|| Arc::new(provider))))
    }
}

#[derive(Default)]
pub struct Rdma {
    pub verbs: Verbs,
    plug: RefCell<Option<Arc<RdmaPlug>>>,
    changed: Arc<Notify>,
}

impl Rdma {
    #[cfg(test)]
    pub fn with(provider: Arc<dyn Provider>) -> Rdma {
        Rdma {
            verbs: Verbs::of(provider),
            ..Rdma::default()
        }
    }

    /// The transport, once it was made.
    pub fn plug(&self) -> Option<Arc<RdmaPlug>> {
        self.plug.borrow().clone()
    }

    /// Follows a transport that was made.
    pub fn made(&self, plug: Arc<RdmaPlug>) {
        let changed = Arc::clone(&self.changed);
        // One that is not waited for now is remembered.
        plug.on_change(move || changed.notify_one());
        self.plug.replace(Some(plug));
    }

    /// Resolves when devices, ports or addresses have changed since it last did.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Memory that the next device will have to register, in bytes: all of the data path, and what each of `cores`
    /// takes. 0 once a device has registered it.
    pub fn memory_needed(&self, arenas: &[Arena], cores: usize, config: &RdmaConfig) -> u64 {
        let sum = |arenas: &[Arena]| arenas.iter().map(|arena| arena.report().bytes).sum::<u64>();
        match self.plug() {
            Some(plug) if !plug.domains().is_empty() => 0,
            Some(plug) => sum(&plug.arenas()),
            None => sum(arenas) + cores as u64 * config.bytes_per_core(),
        }
    }

    /// Lets go of the transport, which ends with the data plane.
    pub fn close(&self) {
        self.plug.replace(None);
    }
}

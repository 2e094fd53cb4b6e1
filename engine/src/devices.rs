//! What the management plane keeps about block devices beside the registry: the modules' own
//! handles, for what only they can do, and the histograms that were asked for.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use nacre_bdev::Registry;
use nacre_bdev::delay::Delay;
use nacre_bdev::fault::FaultDevice;
use nacre_bdev::malloc::Malloc;
use nacre_bdev::null::Null;
use nacre_bdev::passthru::Passthru;
use nacre_bdev::registry::Subscription;
use nacre_bdev_uring::UringBdev;
use tokio::sync::{Notify, mpsc};

use crate::methods::bdev::sampling::Samplers;

/// The handle of a module on its own device.
#[derive(Clone)]
pub enum Module {
    Malloc(Arc<Malloc>),
    Null(Arc<Null>),
    File(Arc<UringBdev>),
    Delay(Arc<Delay>),
    Fault(Arc<FaultDevice>),
    Passthru(Arc<Passthru>),
}

/// A device's latency histogram as `bdev_enable_histogram` asked for it.
#[derive(Debug, Clone)]
pub struct HistogramWish {
    pub granularity: u32,
    pub min_ns: u64,
    pub max_ns: u64,
    pub opc: Option<String>,
    /// The counts at that moment, which do not count.
    pub before: Vec<u64>,
}

/// The events of devices, to be handled on the management thread.
pub type BdevEvents = mpsc::UnboundedReceiver<nacre_bdev::Event>;

#[derive(Default)]
pub struct Devices {
    pub modules: RefCell<BTreeMap<String, Module>>,
    pub histograms: RefCell<BTreeMap<String, HistogramWish>>,
    pub samplers: Samplers,
    /// Told whenever a device comes, goes or changes.
    pub changed: Notify,
    subscription: Cell<Option<Subscription>>,
}

impl Devices {
    pub fn module(&self, name: &str) -> Option<Module> {
        self.modules.borrow().get(name).cloned()
    }

    /// Follows the events of `registry` from now on. Their number is bounded by the devices there
    /// can be: each event is of a call that this thread makes, or of a removal it started.
    ///
    /// The names of new devices are also put into `arrived` at once.
    pub fn follow(&self, registry: &Registry, arrived: Arc<Mutex<Vec<String>>>) -> BdevEvents {
        let (told, events) = mpsc::unbounded_channel();
        let subscription = registry.on_event(move |event| {
            if let nacre_bdev::Event::Registered { name } = event {
                let mut arrived = arrived.lock().unwrap_or_else(PoisonError::into_inner);
                arrived.push(name.clone());
            }
            drop(told.send(event.clone()));
        });
        self.subscription.set(Some(subscription));
        events
    }

    /// Lets go of everything, so that devices can be closed.
    pub fn clear(&self) {
        self.subscription.set(None);
        self.modules.borrow_mut().clear();
        self.histograms.borrow_mut().clear();
        self.samplers.clear();
    }
}

//! State of bdevs that the management plane keeps in addition to the registry: requested
//! histograms, and the subscription to device events.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use nacre_bdev::Registry;
use nacre_bdev::registry::Subscription;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use crate::methods::bdev::sampling::Samplers;

/// A latency histogram requested by `bdev_enable_histogram`.
#[derive(Debug, Clone)]
pub struct HistogramRequest {
    pub granularity: u32,
    pub min_ns: u64,
    pub max_ns: u64,
    pub opc: Option<String>,
    /// The counts at the time of the request, which are subtracted.
    pub before: Vec<u64>,
}

/// Device events, handled on the management thread.
pub type BdevEvents = mpsc::UnboundedReceiver<nacre_bdev::Event>;

/// Requested histograms by device name, and the subscription to device events.
#[derive(Default)]
pub struct Devices {
    pub histograms: RefCell<BTreeMap<String, HistogramRequest>>,
    pub samplers: Samplers,
    /// Notified whenever a device is added, removed or changed.
    pub changed: Notify,
    subscription: Cell<Option<Subscription>>,
}

impl Devices {
    /// Subscribes to the events of `registry`. Their number is bounded by the number of devices:
    /// each event results from a call of this thread, or from a removal that it started.
    ///
    /// Names of new devices are also added to `arrived` at once.
    pub fn follow(&self, registry: &Registry, arrived: Arc<Mutex<Vec<String>>>) -> BdevEvents {
        let (told, events) = mpsc::unbounded_channel();
        let subscription = registry.on_event(move |event| {
            if let nacre_bdev::Event::Registered { name } = event {
                let mut arrived = arrived.lock();
                arrived.push(name.clone());
            }
            drop(told.send(event.clone()));
        });
        self.subscription.set(Some(subscription));
        events
    }

    /// Drops everything, so that devices can be closed.
    pub fn clear(&self) {
        self.subscription.set(None);
        self.histograms.borrow_mut().clear();
        self.samplers.clear();
    }
}

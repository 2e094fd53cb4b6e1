//! State of bdevs that the management plane has beside the registry: requested histograms,
//! samplers, pools, backups, and the subscription to events.

mod files;
pub mod known_files;
pub mod sampling;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::registry::Subscription;
use nacre_bdev::{Event, Registry};
use parking_lot::Mutex;
use sampling::Samplers;
use tokio::sync::{Notify, mpsc};

use crate::services::Engine;
use crate::services::backup::Backups;
use crate::services::pools::{self, Pools};
use crate::services::{deferred, subsystems, volumes};

pub use files::watch as watch_files;

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

/// Events of bdevs, for the management thread.
pub type BdevEvents = mpsc::UnboundedReceiver<Event>;

/// Requested histograms by device name, and the subscription to device events.
#[derive(Default)]
pub struct Devices {
    pub histograms: RefCell<BTreeMap<String, HistogramRequest>>,
    pub samplers: Samplers,
    pub pools: Pools,
    pub backups: Backups,
    /// Notified whenever a device is added, removed or changed.
    pub changed: Notify,
    subscription: Cell<Option<Subscription>>,
}

impl Devices {
    /// Subscribes to the events of `registry`. The queue is bounded by the number of bdevs: each
    /// event results from a call on this thread, or from a removal that it started.
    ///
    /// The names of new bdevs are also added to `arrived`, at the time of the event.
    pub fn follow(&self, registry: &Registry, arrived: Arc<Mutex<Vec<String>>>) -> BdevEvents {
        let (told, events) = mpsc::unbounded_channel();
        let subscription = registry.on_event(move |event| {
            if let Event::Registered { name } = event {
                let mut arrived = arrived.lock();
                arrived.push(name.clone());
            }
            drop(told.send(event.clone()));
        });
        self.subscription.set(Some(subscription));
        events
    }

    /// Ends the subscription, the histograms and the samplers.
    pub fn clear(&self) {
        self.subscription.set(None);
        self.histograms.borrow_mut().clear();
        self.samplers.clear();
    }
}

/// Handles bdev events until the data plane ends.
pub async fn follow(engine: Rc<Engine>, mut events: BdevEvents) {
    while let Some(event) = events.recv().await {
        let Ok(plane) = engine.plane() else { return };
        let (Event::Registered { name }
        | Event::Resized { name, .. }
        | Event::Cut { name }
        | Event::Removing { name }
        | Event::Unregistered { name }) = &event;
        volumes::device_changed(&engine, name);
        match event {
            Event::Registered { name } => {
                engine.notes.send("bdev_register", name.clone());
                let engine = Rc::clone(&engine);
                tokio::task::spawn_local(async move {
                    pools::disk_appeared(&engine, &name).await;
                    pools::external::device_appeared(&engine, &name).await;
                    deferred::run_ready(&engine).await
                });
            }
            Event::Resized { name, .. } => {
                plane.target.bdev_resized(&name);
                engine.notes.send("bdev_resize", name.clone());
                // It may be smaller, by force.
                pools::device_cut(&engine, &name);
                let engine = Rc::clone(&engine);
                tokio::task::spawn_local(async move {
                    // It may be large enough now.
                    pools::external::device_appeared(&engine, &name).await;
                });
            }
            Event::Cut { name } => pools::device_cut(&engine, &name),
            // Removes its namespaces, so that every core closes its queue and the removal
            // completes.
            Event::Removing { name } => {
                pools::disk_gone(&engine, &name);
                pools::external::device_gone(&engine, &name);
                subsystems::bdev_gone(&engine, &plane, &name)
            }
            Event::Unregistered { name } => {
                // The name may already belong to another device.
                if plane.bdevs.lookup(&name).is_none() {
                    engine.devices.histograms.borrow_mut().remove(&name);
                }
                engine.notes.send("bdev_unregister", name);
            }
        }
        engine.devices.changed.notify_waiters();
    }
}

//! The local NVMe drives that the daemon has attached, and their namespaces as bdevs.
//!
//! ```text
//!   bdev_nvme_attach_controller ──▶ Bus::open ──▶ Function ──▶ Controller, managed by one reactor
//!     trtype PCIe                  (../bus.rs)                     │ reports Events
//!   watch (hotplug.rs) ── removed, returned, new drives ──▶          ▼
//!                                    follow: devices registered, resized, removed; events reported
//! ```
//!
//! A removed drive keeps its bdevs, whose I/O fails, until it returns or is detached. So the
//! objects on them need not be configured again.

mod health;
mod hotplug;
mod uri;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev::registry::{DeleteTicket, Removal};
use nacre_bdev_nvme::{Controller, DriveOptions, Event, Function, NvmeBdev, Observer, State};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::plane::Plane;
use crate::rpc::RpcError;
use crate::rpc::error::{Errno, causes};
use crate::services::Engine;

pub use crate::services::bus::{Bus, RealBus};
pub use hotplug::{HotPlug, watch};
pub use uri::{DriveUri, DriveUriError};

/// Time limit for an orderly shutdown of a drive; drives may announce seconds (RTD3 Entry Latency).
const PATIENCE: Duration = Duration::from_secs(10);

/// Most events of a controller that wait to be handled; the oldest are dropped. Namespace changes
/// are not queued: [`Drive::sync`] reads the current list.
const EVENTS: usize = 256;

/// An attached drive.
pub struct Drive {
    pub controller: Arc<Controller>,
    pub address: String,
    /// Most bdevs of this drive.
    pub max_devices: usize,
    inbox: Arc<EventInbox>,
    /// Bdevs by namespace.
    devices: RefCell<BTreeMap<u32, Arc<NvmeBdev>>>,
    refused: RefCell<BTreeMap<u32, String>>,
    /// Namespaces whose removed bdevs still have users, and so keep their names.
    leaving: Rc<RefCell<BTreeSet<u32>>>,
}

/// All attached drives by controller name.
pub struct Drives {
    all: RefCell<BTreeMap<String, Rc<Drive>>>,
    /// Addresses of drives that are being initialised, by name.
    coming: RefCell<BTreeMap<String, String>>,
    /// The bus of this machine; tests use another one.
    bus: Arc<dyn Bus>,
    pub hot_plug: Cell<HotPlug>,
    /// Counts the attached drives, to choose the next reactor.
    next: Cell<usize>,
    changed: Arc<Notify>,
    bdevs_appeared: Notify,
}

/// The events of a controller that wait for the management thread.
struct EventInbox {
    events: Mutex<VecDeque<Event>>,
    changed: Arc<Notify>,
}

impl Observer for EventInbox {
    fn event(&self, event: Event) {
        // Namespaces are read, not queued. Queueing them would keep the drive alive, because it
        // owns this observer.
        let is_namespace = matches!(
            event,
            Event::NamespaceAdded(_) | Event::NamespaceRemoved(_) | Event::NamespaceResized(_)
        );
        if is_namespace {
            return self.changed.notify_one();
        }
        let mut events = self.events.lock();
        if events.len() == EVENTS {
            events.pop_front();
        }
        events.push_back(event);
        drop(events);
        self.changed.notify_one();
    }
}

impl EventInbox {
    fn take(&self) -> VecDeque<Event> {
        let mut events = self.events.lock();
        std::mem::take(&mut *events)
    }
}

impl Default for Drives {
    fn default() -> Self {
        Self::on(Arc::new(RealBus::new()))
    }
}

impl Drives {
    pub fn on(bus: Arc<dyn Bus>) -> Self {
        Self {
            all: RefCell::default(),
            coming: RefCell::default(),
            bus,
            hot_plug: Cell::default(),
            next: Cell::default(),
            changed: Arc::default(),
            bdevs_appeared: Notify::default(),
        }
    }

    pub fn bus(&self) -> Arc<dyn Bus> {
        Arc::clone(&self.bus)
    }

    pub fn find(&self, name: &str) -> Option<Rc<Drive>> {
        self.all.borrow().get(name).cloned()
    }

    /// All drives in order of their names.
    pub fn list(&self) -> Vec<(String, Rc<Drive>)> {
        let all = self.all.borrow();
        all.iter()
            .map(|(name, drive)| (name.clone(), Rc::clone(drive)))
            .collect()
    }

    /// The drive at `address`, with its name.
    pub fn at(&self, address: &str) -> Option<(String, Rc<Drive>)> {
        let mut all = self.list().into_iter();
        all.find(|(_, drive)| drive.address == address)
    }

    /// `prefix` followed by the lowest number whose name neither a controller nor a stored record
    /// has.
    pub fn free_name(&self, engine: &Engine, prefix: &str) -> String {
        let is_free = |name: &String| {
            let key = crate::services::nvme::key(name);
            self.find(name).is_none()
                && !self.is_coming(name)
                && engine.remotes.find(name).is_none()
                && engine.journal.find(&key).is_none()
        };
        let mut names = (0..).map(|n: u32| format!("{prefix}{n}"));
        names.find(is_free).expect("names do not end")
    }

    /// Resolves when new bdevs have appeared.
    pub async fn bdevs_appeared(&self) {
        self.bdevs_appeared.notified().await;
    }

    /// True while a drive of this name is being initialised.
    pub fn is_coming(&self, name: &str) -> bool {
        self.coming.borrow().contains_key(name)
    }

    /// Reserves the name and the address of a drive during its initialisation, until the result is
    /// dropped.
    pub fn coming(
        &self,
        engine: &Rc<Engine>,
        name: &str,
        address: &str,
    ) -> Result<PendingDrive, RpcError> {
        let taken = |how: &str, other: &str| {
            let cause = format!("{address} is {how} as \"{other}\"");
            RpcError::errno(Errno::EEXIST, cause).field("traddr")
        };
        if let Some((other, _)) = self.at(address) {
            return Err(taken("attached", &other));
        }
        let mut coming = self.coming.borrow_mut();
        if let Some((other, _)) = coming.iter().find(|(_, at)| *at == address) {
            return Err(taken("being attached", other));
        }
        coming.insert(name.to_owned(), address.to_owned());
        Ok(PendingDrive {
            engine: Rc::clone(engine),
            name: name.to_owned(),
        })
    }

    /// Opens the function at `address` on the bus.
    pub async fn open(
        &self,
        engine: &Engine,
        address: &str,
    ) -> Result<Arc<dyn Function>, RpcError> {
        let bus = self.bus();
        let (arenas, address) = (engine.plane()?.arenas.clone(), address.to_owned());
        let opened = tokio::task::spawn_blocking(move || bus.open(&address, &arenas));
        opened
            .await
            .map_err(|error| RpcError::internal(error.to_string()))?
    }

    /// Initialises the controller. [`Drive::sync`] creates its bdevs.
    pub async fn attach(
        &self,
        engine: &Engine,
        function: Arc<dyn Function>,
        options: DriveOptions,
        max_devices: usize,
    ) -> Result<Rc<Drive>, RpcError> {
        let plane = engine.plane()?;
        let (name, address) = (options.name.clone(), function.address().to_owned());
        let inbox = Arc::new(EventInbox {
            events: Mutex::default(),
            changed: Arc::clone(&self.changed),
        });
        let observer: Arc<dyn Observer> = Arc::clone(&inbox) as Arc<dyn Observer>;
        let home = &plane.reactors[self.home_of(&plane, function.numa_node())];
        let attached = home.run_future(move |core| {
            let core = core.clone();
            async move { Controller::attach(&core, function, options, observer).await }
        });
        let attached = attached
            .await
            .map_err(|e| RpcError::internal(e.to_string()))?;
        let controller = attached.map_err(refusal)?;
        let drive = Rc::new(Drive {
            controller,
            address,
            max_devices,
            inbox,
            devices: RefCell::default(),
            refused: RefCell::default(),
            leaving: Rc::default(),
        });
        self.all.borrow_mut().insert(name, Rc::clone(&drive));
        Ok(drive)
    }

    /// A reactor on the drive's NUMA node if there is one, in rotation.
    fn home_of(&self, plane: &Plane, node: Option<u32>) -> usize {
        let near = |at: &usize| {
            let core = plane.reactors[*at].core();
            node.is_some() && core.and_then(nacre_reactor::numa_node) == node
        };
        let all = 0..plane.reactors.len();
        let mut fitting: Vec<usize> = all.clone().filter(near).collect();
        if fitting.is_empty() {
            fitting = all.collect();
        }
        let turn = self.next.get();
        self.next.set(turn.wrapping_add(1));
        fitting[turn % fitting.len()]
    }

    /// Takes the drive out of the list; the caller shuts it down.
    pub fn take(&self, name: &str) -> Option<Rc<Drive>> {
        self.all.borrow_mut().remove(name)
    }

    /// Shuts down all drives, in parallel.
    pub async fn close(&self) {
        let all = std::mem::take(&mut *self.all.borrow_mut());
        let going = all.values().map(|drive| drive.shut_down());
        futures_util::future::join_all(going).await;
    }
}

/// The reserved name and address of a drive during its initialisation.
pub struct PendingDrive {
    engine: Rc<Engine>,
    name: String,
}

impl Drop for PendingDrive {
    fn drop(&mut self) {
        self.engine.drives.coming.borrow_mut().remove(&self.name);
    }
}

/// Translates a failed initialisation into an RPC error.
pub fn refusal(error: nacre_bdev_nvme::AttachError) -> RpcError {
    let cause = causes(&anyhow::Error::new(error));
    RpcError::errno(Errno::EIO, cause).field("traddr")
}

impl Drive {
    /// The bdevs, in order of their namespaces.
    pub fn devices(&self) -> Vec<Arc<NvmeBdev>> {
        self.devices.borrow().values().cloned().collect()
    }

    /// Namespaces without a bdev, with the reason.
    pub fn refused(&self) -> Vec<(u32, String)> {
        let refused = self.refused.borrow();
        let all = refused.iter().map(|(nsid, why)| (*nsid, why.clone()));
        let unusable = self.controller.info().unusable.into_iter();
        all.chain(unusable.map(|one| (one.nsid, one.reason)))
            .collect()
    }

    /// Shuts the controller down; waits at most [`PATIENCE`].
    pub async fn shut_down(&self) {
        if tokio::time::timeout(PATIENCE, self.controller.detach())
            .await
            .is_err()
        {
            warn!(drive = self.address, "did not shut down in {PATIENCE:?}");
        }
    }

    /// Registers, resizes and removes bdevs to match the controller's namespaces, and reports its
    /// events.
    pub fn sync(&self, engine: &Engine, plane: &Plane, name: &str) {
        for event in self.inbox.take() {
            self.report(engine, name, event);
        }
        let found = self.controller.namespaces();
        let gone: Vec<u32> = {
            let known = self.devices.borrow();
            // A reformatted namespace is a different one, under the same NSID.
            let is_there = |known: &Arc<NvmeBdev>| found.iter().any(|d| Arc::ptr_eq(d, known));
            let gone = known.iter().filter(|(_, device)| !is_there(device));
            gone.map(|(nsid, _)| *nsid).collect()
        };
        for nsid in gone {
            let Some(device) = self.devices.borrow_mut().remove(&nsid) else {
                continue;
            };
            warn!(device = device.name(), "a namespace is gone from its drive");
            // Do not wait: users of the bdev are notified, and it ends when they close it. A
            // successor can only then take its name.
            if let Ok(ticket) = plane.bdevs.remove(device.name(), Removal::Hot) {
                self.leaving.borrow_mut().insert(nsid);
                let leaving = Rc::clone(&self.leaving);
                let changed = Arc::clone(&self.inbox.changed);
                tokio::task::spawn_local(async move {
                    ticket.await;
                    leaving.borrow_mut().remove(&nsid);
                    changed.notify_one();
                });
            }
        }
        let mut came = false;
        for device in found {
            let nsid = device.nsid();
            if self.devices.borrow().contains_key(&nsid) {
                match plane.bdevs.notify_resize(device.name()) {
                    Ok(Some(blocks)) => info!(
                        device = device.name(),
                        blocks, "a namespace has another size"
                    ),
                    Ok(None) => {}
                    Err(error) => warn!(%error, "a namespace has another size"),
                }
                continue;
            }
            if self.leaving.borrow().contains(&nsid) {
                continue;
            }
            let registered = if self.devices.borrow().len() < self.max_devices {
                plane
                    .bdevs
                    .register(Arc::clone(&device) as Arc<dyn Bdev>)
                    .map(drop)
                    .map_err(|error| error.to_string())
            } else {
                Err(format!(
                    "{} devices are all that were asked for",
                    self.max_devices
                ))
            };
            match registered {
                Ok(()) => {
                    info!(
                        controller = name,
                        device = device.name(),
                        "a namespace is a device"
                    );
                    self.refused.borrow_mut().remove(&nsid);
                    self.devices.borrow_mut().insert(nsid, device);
                    came = true;
                }
                Err(why) => {
                    let before = self.refused.borrow_mut().insert(nsid, why.clone());
                    if before.as_ref() != Some(&why) {
                        warn!(device = device.name(), why, "a namespace is not used");
                        engine
                            .notes
                            .send("nvme_refused", format!("{}: {why}", device.name()));
                    }
                }
            }
        }
        if came {
            engine.drives.bdevs_appeared.notify_one();
        }
    }

    /// Hot-removes the bdevs from the registry.
    pub fn remove_devices(&self, plane: &Plane) -> Vec<DeleteTicket> {
        let devices = std::mem::take(&mut *self.devices.borrow_mut());
        let removed = devices
            .values()
            .filter_map(|device| plane.bdevs.remove(device.name(), Removal::Hot).ok());
        removed.collect()
    }

    fn report(&self, engine: &Engine, name: &str, event: Event) {
        let at = |what: String| format!("{name} ({}): {what}", self.address);
        match event {
            Event::State(status) => match &status.state {
                State::Live => engine.notes.send("nvme_live", name),
                // The reset itself is reported, with its reason.
                State::Resetting => {}
                State::Failed { reason } => engine.notes.send("nvme_failed", at(reason.clone())),
                State::Removed => engine.notes.send("nvme_removed", name),
                State::Detached => {}
            },
            other => health::report(engine, name, &other),
        }
    }
}

/// The name of the state, as SPDK has it.
pub fn state_word(state: &State) -> &'static str {
    match state {
        State::Live => "enabled",
        State::Resetting => "resetting",
        State::Failed { .. } | State::Removed => "failed",
        State::Detached => "deleting",
    }
}

/// Handles the events of controllers, as long as the data plane exists.
pub async fn follow(engine: Rc<Engine>) {
    let changed = Arc::clone(&engine.drives.changed);
    loop {
        changed.notified().await;
        let Ok(plane) = engine.plane() else { return };
        for (name, drive) in engine.drives.list() {
            drive.sync(&engine, &plane, &name);
        }
    }
}

//! NVMe drives of this machine that the daemon drives itself, and their namespaces among its devices.
//!
//! ```text
//!   bdev_nvme_attach_controller ──▶ Bus::open ──▶ Function ──▶ Controller, at home on one reactor
//!     trtype PCIe                  (bus.rs)                        │ tells Events
//!   watch (watch.rs) ── pulled, put back, new ones ──▶             ▼
//!                                    follow: devices registered, resized, removed; events told
//! ```
//!
//! A drive that was pulled keeps its devices, which answer that they are gone, until it is put back or detached:
//! what is served from them need not be configured again.

pub mod bus;
mod health;
mod uri;
mod watch;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev::registry::{DeleteTicket, Removal};
use nacre_bdev_nvme::{Controller, Event, Function, NvmeBdev, Observer, Options, State};
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::engine::Engine;
use crate::plane::Plane;
use crate::rpc::RpcError;
use crate::rpc::error::{Errno, causes};

pub use bus::{Bus, Machine};
pub use uri::{DriveUri, DriveUriError};
pub use watch::{HotPlug, watch};

/// How long drives may take to be shut down in order: what they announce (RTD3E) is seconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Events of one controller that nobody has looked at yet. What devices there are is asked for, not counted.
const EVENTS: usize = 256;

/// An attached drive, as the management keeps it.
pub struct Drive {
    pub controller: Arc<Controller>,
    pub address: String,
    /// Devices at most.
    pub max_devices: usize,
    inbox: Arc<Inbox>,
    /// By namespace.
    devices: RefCell<BTreeMap<u32, Arc<NvmeBdev>>>,
    refused: RefCell<BTreeMap<u32, String>>,
    /// Namespaces whose former devices still have users, and their names with them.
    leaving: Rc<RefCell<BTreeSet<u32>>>,
}

pub struct Drives {
    all: RefCell<BTreeMap<String, Rc<Drive>>>,
    /// Those that are being brought up: their addresses, by name.
    coming: RefCell<BTreeMap<String, String>>,
    /// The machine's own; tests have another.
    bus: Arc<dyn Bus>,
    pub hot_plug: Cell<HotPlug>,
    /// The reactor that is home to the next one.
    next: Cell<usize>,
    changed: Arc<Notify>,
    came_back: Notify,
}

/// What a controller told, on its way to the management thread.
struct Inbox {
    events: Mutex<VecDeque<Event>>,
    changed: Arc<Notify>,
}

impl Observer for Inbox {
    fn told(&self, event: Event) {
        // What there is, is asked for. To keep them would be to keep the drive, which has this as its observer.
        let is_namespace = matches!(
            event,
            Event::NamespaceAdded(_) | Event::NamespaceRemoved(_) | Event::NamespaceResized(_)
        );
        if is_namespace {
            return self.changed.notify_one();
        }
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if events.len() == EVENTS {
            events.pop_front();
        }
        events.push_back(event);
        drop(events);
        self.changed.notify_one();
    }
}

impl Inbox {
    fn take(&self) -> VecDeque<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *events)
    }
}

impl Default for Drives {
    fn default() -> Drives {
        Drives::on(Arc::new(Machine::new()))
    }
}

impl Drives {
    pub fn on(bus: Arc<dyn Bus>) -> Drives {
        Drives {
            all: RefCell::default(),
            coming: RefCell::default(),
            bus,
            hot_plug: Cell::default(),
            next: Cell::default(),
            changed: Arc::default(),
            came_back: Notify::default(),
        }
    }

    pub fn bus(&self) -> Arc<dyn Bus> {
        Arc::clone(&self.bus)
    }

    pub fn find(&self, name: &str) -> Option<Rc<Drive>> {
        self.all.borrow().get(name).cloned()
    }

    /// In order of their names.
    pub fn list(&self) -> Vec<(String, Rc<Drive>)> {
        let all = self.all.borrow();
        all.iter()
            .map(|(name, drive)| (name.clone(), Rc::clone(drive)))
            .collect()
    }

    /// That which is driven at `address`.
    pub fn at(&self, address: &str) -> Option<(String, Rc<Drive>)> {
        let mut all = self.list().into_iter();
        all.find(|(_, drive)| drive.address == address)
    }

    /// `prefix` and the first number by which no controller is called, nor one that waits.
    pub fn free_name(&self, on: &Engine, prefix: &str) -> String {
        let is_free = |name: &String| {
            let key = crate::methods::bdev::nvme::key(name);
            self.find(name).is_none()
                && !self.is_coming(name)
                && on.remotes.find(name).is_none()
                && on.journal.find(&key).is_none()
        };
        let mut names = (0..).map(|n: u32| format!("{prefix}{n}"));
        names.find(is_free).expect("names do not end")
    }

    /// Resolves when devices are there that were not before.
    pub async fn came_back(&self) {
        self.came_back.notified().await;
    }

    /// Whether one of this name is being brought up.
    pub fn is_coming(&self, name: &str) -> bool {
        self.coming.borrow().contains_key(name)
    }

    /// Keeps the name and the address for a drive that is brought up, until the answer is dropped.
    pub fn coming(&self, on: &Rc<Engine>, name: &str, address: &str) -> Result<Coming, RpcError> {
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
        Ok(Coming {
            on: Rc::clone(on),
            name: name.to_owned(),
        })
    }

    /// Takes the function at `address` from the bus.
    pub async fn open(&self, on: &Engine, address: &str) -> Result<Arc<dyn Function>, RpcError> {
        let bus = self.bus();
        let (arenas, address) = (on.plane()?.arenas.clone(), address.to_owned());
        let opened = tokio::task::spawn_blocking(move || bus.open(&address, &arenas));
        opened
            .await
            .map_err(|error| RpcError::internal(error.to_string()))?
    }

    /// Brings the controller up. Its devices come with [`Drive::sync`].
    pub async fn attach(
        &self,
        on: &Engine,
        function: Arc<dyn Function>,
        options: Options,
        max_devices: usize,
    ) -> Result<Rc<Drive>, RpcError> {
        let plane = on.plane()?;
        let (name, address) = (options.name.clone(), function.address().to_owned());
        let inbox = Arc::new(Inbox {
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

    /// A reactor on the drive's memory node if there is one, each in turn.
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

    /// Takes it out of the list; what it has is the caller's to end.
    pub fn take(&self, name: &str) -> Option<Rc<Drive>> {
        self.all.borrow_mut().remove(name)
    }

    /// Shuts every drive down in order, all at once.
    pub async fn close(&self) {
        let all = std::mem::take(&mut *self.all.borrow_mut());
        let going = all.values().map(|drive| drive.shut_down());
        futures_util::future::join_all(going).await;
    }
}

/// The name and the address of a drive that is being brought up.
pub struct Coming {
    on: Rc<Engine>,
    name: String,
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.on.drives.coming.borrow_mut().remove(&self.name);
    }
}

/// Why a drive could not be brought up, as calls tell it.
pub fn refusal(error: nacre_bdev_nvme::AttachError) -> RpcError {
    let cause = causes(&anyhow::Error::new(error));
    RpcError::errno(Errno::EIO, cause).field("traddr")
}

impl Drive {
    /// Its devices, in order of their namespaces.
    pub fn devices(&self) -> Vec<Arc<NvmeBdev>> {
        self.devices.borrow().values().cloned().collect()
    }

    /// Namespaces that are not used, and why.
    pub fn refused(&self) -> Vec<(u32, String)> {
        let refused = self.refused.borrow();
        let all = refused.iter().map(|(nsid, why)| (*nsid, why.clone()));
        let unusable = self.controller.info().unusable.into_iter();
        all.chain(unusable.map(|one| (one.nsid, one.reason)))
            .collect()
    }

    /// Tells the controller that it ends, and waits, but not for ever.
    pub async fn shut_down(&self) {
        if tokio::time::timeout(PATIENCE, self.controller.detach())
            .await
            .is_err()
        {
            warn!(drive = self.address, "did not shut down in {PATIENCE:?}");
        }
    }

    /// Makes the registry what the controller has, and tells what happened.
    pub fn sync(&self, on: &Engine, plane: &Plane, name: &str) {
        for event in self.inbox.take() {
            self.tell(on, name, event);
        }
        let found = self.controller.namespaces();
        let gone: Vec<u32> = {
            let known = self.devices.borrow();
            // One that was formatted anew is another one, under the same number.
            let is_there = |known: &Arc<NvmeBdev>| found.iter().any(|d| Arc::ptr_eq(d, known));
            let gone = known.iter().filter(|(_, device)| !is_there(device));
            gone.map(|(nsid, _)| *nsid).collect()
        };
        for nsid in gone {
            let Some(device) = self.devices.borrow_mut().remove(&nsid) else {
                continue;
            };
            warn!(device = device.name(), "a namespace is gone from its drive");
            // Nobody waits for it here: its users are told, and it ends when they let go. One that takes its place has
            // its name then.
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
                        on.notes
                            .send("nvme_refused", format!("{}: {why}", device.name()));
                    }
                }
            }
        }
        if came {
            on.drives.came_back.notify_one();
        }
    }

    /// Removes its devices from the registry, as if they had been pulled out.
    pub fn remove_devices(&self, plane: &Plane) -> Vec<DeleteTicket> {
        let devices = std::mem::take(&mut *self.devices.borrow_mut());
        let removed = devices
            .values()
            .filter_map(|device| plane.bdevs.remove(device.name(), Removal::Hot).ok());
        removed.collect()
    }

    fn tell(&self, on: &Engine, name: &str, event: Event) {
        let at = |what: String| format!("{name} ({}): {what}", self.address);
        match event {
            Event::State(status) => match &status.state {
                State::Live => on.notes.send("nvme_live", name),
                // The reset itself is told, with its reason.
                State::Resetting => {}
                State::Failed { reason } => on.notes.send("nvme_failed", at(reason.clone())),
                State::Removed => on.notes.send("nvme_removed", name),
                State::Detached => {}
            },
            other => health::tell(on, name, &other),
        }
    }
}

/// As SPDK calls it.
pub fn state_word(state: &State) -> &'static str {
    match state {
        State::Live => "enabled",
        State::Resetting => "resetting",
        State::Failed { .. } | State::Removed => "failed",
        State::Detached => "deleting",
    }
}

/// Handles what controllers tell, for as long as the data plane lives.
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

//! One attached controller: its options, its state, and its namespaces as devices of the registry.
//!
//! ```text
//! reactor      ControllerPoller ── Shared::change ──▶ Status, on_change()
//! management   sync ◀─────────────────────────────────────┘  registers, resizes, removes devices
//! any core     RemoteBdev::open ──▶ an I/O queue that lives as long as the link
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev::registry::{DeleteTicket, Registry, Removal};
use nacre_bdev::{Bdev, RegistryError};
use nacre_hugepages::Pool;
use nacre_nvmf::address::Select;
use nacre_nvmf::host::{Connector, LinkState, NamespaceInfo};
use nacre_reactor::{CoreHandle, Nanos};
use parking_lot::Mutex;

use crate::device::RemoteBdev;
use crate::poller::ControllerPoller;
use crate::shared::{Config, Shared};
use crate::status::{State, Status};

/// How long a device stays when a connected controller lacks its namespace: a restarted target may
/// get its namespaces one by one.
const GRACE: Duration = Duration::from_secs(5);
/// When to retry a device whose name is taken: a device that is being removed may still hold the
/// name.
const RETRY: Duration = Duration::from_secs(1);

/// True if `select` includes the namespace.
fn includes(select: Select, namespace: &NamespaceInfo) -> bool {
    match select {
        Select::All => true,
        Select::Nsid(nsid) => namespace.nsid == nsid,
        Select::Uuid(uuid) => namespace.uuid == Some(uuid) || namespace.nguid == *uuid.as_bytes(),
    }
}

/// What [`Attachment::sync`] did.
#[derive(Default)]
pub struct Changes {
    /// Devices that there are now.
    pub added: Vec<String>,
    pub resized: Vec<(String, u64)>,
    /// Devices whose namespaces are gone.
    pub removed: Vec<(String, DeleteTicket)>,
    /// Namespaces that are not, or no longer, used, with the reason: only those that the last call
    /// did not name.
    pub refused: Vec<(String, String)>,
    /// Call again then at the latest.
    pub again: Option<Duration>,
}

impl Changes {
    fn look_again(&mut self, after: Duration) {
        self.again = Some(self.again.map_or(after, |again| again.min(after)));
    }
}

#[derive(Default)]
struct Devices {
    /// By namespace.
    there: BTreeMap<u32, There>,
    /// Namespaces that could not become devices, and why.
    refused: BTreeMap<u32, String>,
}

struct There {
    device: Arc<RemoteBdev>,
    missing_since: Option<Instant>,
}

/// An attached controller.
pub struct Attachment {
    shared: Arc<Shared>,
    devices: Mutex<Devices>,
}

impl Attachment {
    /// Connects only once the poller is polled. Calls `on_change` on the polling thread whenever
    /// [`Attachment::status`] changes; it must be short.
    pub fn new(
        config: Config,
        connector: Arc<dyn Connector>,
        on_change: impl Fn() + Send + Sync + 'static,
    ) -> Attachment {
        let shared = Shared::new(config, connector, Box::new(on_change));
        Attachment {
            shared: Arc::new(shared),
            devices: Mutex::default(),
        }
    }

    /// The controller's poller: for one reactor (`wake` wakes it, `core` is its handle) or a thread
    /// of its own. `pool` is that core's memory.
    pub fn poller(
        &self,
        pool: Pool,
        core: Option<CoreHandle>,
        wake: impl Fn() + Send + Sync + 'static,
        now: Nanos,
    ) -> std::io::Result<ControllerPoller> {
        let wake = Arc::new(wake);
        let theirs = Arc::clone(&wake);
        self.shared.link.set_waker(move || theirs());
        self.shared.set_waker(Box::new(move || wake()));
        ControllerPoller::new(&self.shared, pool, core, now)
    }

    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    pub fn status(&self) -> Status {
        self.shared.status()
    }

    /// The controller's attributes and its namespaces.
    pub fn link(&self) -> LinkState {
        self.shared.link.state()
    }

    /// The devices, in order of their namespaces.
    pub fn devices(&self) -> Vec<Arc<RemoteBdev>> {
        let devices = self.devices.lock();
        devices
            .there
            .values()
            .map(|there| Arc::clone(&there.device))
            .collect()
    }

    /// Namespaces that could not become devices, by the names those would have, and why.
    pub fn refusals(&self) -> Vec<(String, String)> {
        let devices = self.devices.lock();
        let refused = devices.refused.iter();
        refused
            .map(|(nsid, why)| (self.device_name(*nsid), why.clone()))
            .collect()
    }

    /// Ends the association and connects again; one that was given up is started again.
    pub fn reset(&self) {
        self.shared.ask_reset();
    }

    /// Shuts the controller down: [`State::Closed`] when finished. Its devices complete I/O with
    /// Gone.
    pub fn close(&self) {
        self.shared.ask_close();
    }

    /// Brings the devices of `registry` in line with the controller's namespaces. New namespaces
    /// are registered, grown ones are resized. A namespace that is missing for a while is removed
    /// as if it had been pulled out.
    pub fn sync(&self, registry: &Registry, now: Instant) -> Changes {
        let mut changes = Changes::default();
        let live = self.shared.status().state == State::Live;
        if !live || self.shared.link.generation().is_none() {
            // The controller's namespaces are unknown now; known devices stay.
            return changes;
        }
        let link = self.shared.link.state();
        let mut devices = self.devices.lock();
        self.look_at_known(&mut devices, &link, registry, now, &mut changes);
        let found = link.namespaces.values();
        for namespace in found.filter(|n| includes(self.shared.config.select, n)) {
            if devices.there.contains_key(&namespace.nsid) {
                continue;
            }
            let nsid = namespace.nsid;
            match self.add(&devices, namespace, &link, registry) {
                Ok(device) => {
                    changes.added.push(device.name().to_owned());
                    devices.refused.remove(&nsid);
                    let missing_since = None;
                    let there = There {
                        device,
                        missing_since,
                    };
                    devices.there.insert(nsid, there);
                }
                Err((why, passes)) => {
                    if passes {
                        changes.look_again(RETRY);
                    }
                    let before = devices.refused.insert(nsid, why.clone());
                    if before.as_ref() != Some(&why) {
                        changes.refused.push((self.device_name(nsid), why));
                    }
                }
            }
        }
        devices
            .refused
            .retain(|nsid, _| link.namespaces.contains_key(nsid));
        changes
    }

    fn look_at_known(
        &self,
        devices: &mut Devices,
        link: &LinkState,
        registry: &Registry,
        now: Instant,
        changes: &mut Changes,
    ) {
        let mut gone = Vec::new();
        for (nsid, there) in &mut devices.there {
            let device = &there.device;
            let Some(found) = link.namespaces.get(nsid) else {
                let since = *there.missing_since.get_or_insert(now);
                let left = GRACE.saturating_sub(now.saturating_duration_since(since));
                if left.is_zero() {
                    gone.push(*nsid)
                } else {
                    changes.look_again(left)
                }
                continue;
            };
            there.missing_since = None;
            let before = device.refusal();
            match device.take_over(found, link) {
                Some(why) if before.as_ref() != Some(&why) => {
                    changes.refused.push((device.name().to_owned(), why));
                }
                Some(_) => {}
                None => {
                    if let Ok(Some(blocks)) = registry.notify_resize(device.name()) {
                        changes.resized.push((device.name().to_owned(), blocks));
                    }
                }
            }
        }
        for nsid in gone {
            if let Some(there) = devices.there.remove(&nsid)
                && let Ok(ticket) = registry.remove(there.device.name(), Removal::Hot)
            {
                changes
                    .removed
                    .push((there.device.name().to_owned(), ticket));
            }
        }
    }

    /// Makes it a device. Why not, and whether that may pass by itself.
    fn add(
        &self,
        devices: &Devices,
        namespace: &NamespaceInfo,
        link: &LinkState,
        registry: &Registry,
    ) -> Result<Arc<RemoteBdev>, (String, bool)> {
        if !namespace.has_identity() {
            let why =
                "it has no UUID, NGUID or EUI-64: after a reconnect it could not be known again";
            return Err((why.to_owned(), false));
        }
        let most = self.shared.config.max_devices;
        if devices.there.len() >= most {
            return Err((format!("{most} devices are all that were asked for"), false));
        }
        let name = self.device_name(namespace.nsid);
        let device = RemoteBdev::new(Arc::clone(&self.shared), name, namespace.clone(), link);
        let device = Arc::new(device);
        let registered = registry.register(Arc::clone(&device) as Arc<dyn Bdev>);
        registered.map_err(|error| {
            let passes = matches!(
                error,
                RegistryError::Exists { .. } | RegistryError::Removing { .. }
            );
            (error.to_string(), passes)
        })?;
        Ok(device)
    }

    fn device_name(&self, nsid: u32) -> String {
        format!("{}n{nsid}", self.shared.config.name)
    }

    /// Removes every device from `registry`, as if they had been pulled out.
    pub fn remove_devices(&self, registry: &Registry) -> Vec<DeleteTicket> {
        let there = std::mem::take(&mut self.devices.lock().there);
        let removed = there.into_values().map(|there| {
            let removed = registry.remove(there.device.name(), Removal::Hot);
            if let Err(RegistryError::NotFound { .. } | RegistryError::Removing { .. }) = &removed {
                // Another caller was faster.
                return None;
            }
            removed.ok()
        });
        removed.flatten().collect()
    }
}

//! One attached controller of a remote target: its options, its state, and its namespaces, each
//! as a bdev in the registry.
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

/// How long a bdev stays registered after a connected controller lost its namespace. A restarted
/// target may add its namespaces one by one.
const GRACE: Duration = Duration::from_secs(5);
/// Interval of retries to register a bdev whose name is taken. A bdev that is being removed may
/// still hold the name.
const RETRY: Duration = Duration::from_secs(1);

/// True if `select` includes the namespace.
fn includes(select: Select, namespace: &NamespaceInfo) -> bool {
    match select {
        Select::All => true,
        Select::Nsid(nsid) => namespace.nsid == nsid,
        Select::Uuid(uuid) => namespace.uuid == Some(uuid) || namespace.nguid == *uuid.as_bytes(),
    }
}

/// The changes that one [`Attachment::sync`] made. Devices are named by their bdev names.
#[derive(Default)]
pub struct Changes {
    /// New devices.
    pub added: Vec<String>,
    /// Resized devices, with the new size in blocks.
    pub resized: Vec<(String, u64)>,
    /// Removed devices, whose namespaces are gone.
    pub removed: Vec<(String, DeleteTicket)>,
    /// Unused namespaces, by device name, each with its reason. The list omits a reason that an
    /// earlier call has reported.
    pub refused: Vec<(String, String)>,
    /// Call [`Attachment::sync`] again after this time at the latest; `None`: at the next change.
    pub again: Option<Duration>,
}

impl Changes {
    fn look_again(&mut self, after: Duration) {
        self.again = Some(self.again.map_or(after, |again| again.min(after)));
    }
}

#[derive(Default)]
struct Devices {
    /// Registered devices by NSID.
    there: BTreeMap<u32, There>,
    /// Namespaces without a device, by NSID, each with the reason.
    refused: BTreeMap<u32, String>,
}

struct There {
    device: Arc<RemoteBdev>,
    missing_since: Option<Instant>,
}

/// An attached controller: the handle of the management thread.
pub struct Attachment {
    shared: Arc<Shared>,
    devices: Mutex<Devices>,
}

impl Attachment {
    /// Creates the attachment; the poller connects when it is first polled. The polling thread
    /// calls `on_change` whenever [`Attachment::status`] changes; `on_change` must not block.
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

    /// Creates the controller's poller. The poller runs on a reactor (`core` is its handle) or on
    /// a thread of its own (`None`). `wake` wakes that thread, and `pool` is its memory.
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

    /// The registered devices in ascending order of NSID.
    pub fn devices(&self) -> Vec<Arc<RemoteBdev>> {
        let devices = self.devices.lock();
        devices
            .there
            .values()
            .map(|there| Arc::clone(&there.device))
            .collect()
    }

    /// Namespaces without a device: the name that the device would have, and the reason.
    pub fn refusals(&self) -> Vec<(String, String)> {
        let devices = self.devices.lock();
        let refused = devices.refused.iter();
        refused
            .map(|(nsid, why)| (self.device_name(*nsid), why.clone()))
            .collect()
    }

    /// Requests a reset and returns: the poller ends the association and connects again, also
    /// from [`State::Failed`].
    pub fn reset(&self) {
        self.shared.ask_reset();
    }

    /// Requests a shutdown of the controller and returns. The state is [`State::Closed`] at the
    /// end; then the devices complete I/O with status `Gone`.
    pub fn close(&self) {
        self.shared.ask_close();
    }

    /// Synchronises the devices in `registry` with the controller's namespaces, if the controller
    /// is connected. Registers a device for each new namespace and resizes a device whose
    /// namespace has a new size. Removes a device whose namespace is missing for 5 s (`GRACE`),
    /// as a surprise removal does.
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

    /// Registers a device for `namespace`. The error is the reason, and whether a retry may
    /// succeed.
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

    /// Removes every device from `registry`, like a surprise removal.
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

//! An attached subsystem of a remote target: its paths, and its namespaces, each as a bdev in the
//! registry.
//!
//! ```text
//! reactor      ControllerPoller ── Shared::change ──▶ Status, on_change()
//! management   sync ◀─────────────────────────────────────┘  registers, resizes, removes devices
//! any core     RemoteBdev::open ──▶ an I/O queue per path; each reconnects while it is attached
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use nacre_bdev::registry::{DeleteTicket, Registry, Removal};
use nacre_bdev::{Bdev, RegistryError};
use nacre_nvmf::address::Select;
use nacre_nvmf::host::{Connector, NamespaceInfo};
use parking_lot::Mutex;

use crate::device::RemoteBdev;
use crate::namespace::{LivePath, Namespace};
use crate::path::Path;
use crate::paths::MAX_PATHS;
use crate::select::Policy;
use crate::shared::{Config, OnChange, Shared};
use crate::status::{State, Status};

/// Time for which a bdev stays registered after the connected controllers lost its namespace. A
/// restarted target may add its namespaces one by one.
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
    /// Namespaces that are not used, and paths that a device does not use, by device name, each
    /// with the reason. Reasons that an earlier call has reported are omitted.
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
    there: BTreeMap<u32, KnownDevice>,
    /// Namespaces without a device, by NSID, each with the reason.
    refused: BTreeMap<u32, String>,
    /// Reasons that were reported, by device name.
    reported: BTreeMap<String, String>,
    policy: Policy,
    stays: bool,
}

struct KnownDevice {
    device: Arc<RemoteBdev>,
    missing_since: Option<Instant>,
}

/// An attached subsystem: the handle of the management thread.
pub struct Attachment {
    /// The parameters of the first path; its name and selection hold for all paths.
    config: Config,
    paths: Mutex<Vec<Path>>,
    /// Losses of all paths, also of detached ones.
    losses: Arc<AtomicU64>,
    on_change: OnChange,
    devices: Mutex<Devices>,
}

impl Attachment {
    /// Creates the attachment with its first path; the path's poller connects when it is first
    /// polled. The polling threads call `on_change` whenever the [`Path::status`] of a path
    /// changes; `on_change` must not block.
    pub fn new(
        config: Config,
        connector: Arc<dyn Connector>,
        on_change: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        let attachment = Self {
            config: config.clone(),
            paths: Mutex::default(),
            losses: Arc::default(),
            on_change: Arc::new(on_change),
            devices: Mutex::default(),
        };
        attachment.add_path(config, connector);
        attachment
    }

    /// Adds a path. Devices use it once it is connected and has their namespaces. `None`: there are
    /// [`MAX_PATHS`] already.
    pub fn add_path(&self, config: Config, connector: Arc<dyn Connector>) -> Option<Path> {
        let mut paths = self.paths.lock();
        if paths.len() >= MAX_PATHS {
            return None;
        }
        let on_change = Arc::clone(&self.on_change);
        let shared = Shared::new(config, connector, on_change, Arc::clone(&self.losses));
        let path = Path(Arc::new(shared));
        paths.push(path.clone());
        Some(path)
    }

    /// Removes a path: devices send no new I/O on it, and the caller closes it. Returns false if it
    /// is the last path, which stays, or is not attached.
    pub fn remove_path(&self, path: &Path) -> bool {
        let mut paths = self.paths.lock();
        if paths.len() < 2 {
            return false;
        }
        let before = paths.len();
        paths.retain(|one| one != path);
        let removed = paths.len() < before;
        drop(paths);
        for there in self.devices.lock().there.values() {
            there.device.namespace().paths.remove(&path.0);
        }
        removed
    }

    /// All paths, in the order of their attachment.
    pub fn paths(&self) -> Vec<Path> {
        self.paths.lock().clone()
    }

    /// The first path.
    pub fn path(&self) -> Path {
        self.paths.lock()[0].clone()
    }

    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The status of the first path.
    pub fn status(&self) -> Status {
        self.path().status()
    }

    /// True if a path is connected.
    pub fn is_live(&self) -> bool {
        let paths = self.paths.lock();
        paths.iter().any(|path| path.status().state == State::Live)
    }

    /// Sets how devices divide their I/O among the paths. Applies to later devices too.
    pub fn set_policy(&self, policy: Policy) {
        let mut devices = self.devices.lock();
        devices.policy = policy;
        for there in devices.there.values() {
            there.device.set_policy(policy);
        }
    }

    /// Sets whether I/O stays on a working path when an earlier path returns (active-passive only).
    pub fn set_stays(&self, stays: bool) {
        let mut devices = self.devices.lock();
        devices.stays = stays;
        for there in devices.there.values() {
            there.device.namespace().paths.set_stays(stays);
        }
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

    /// The devices that do not use a connected path, by name, each with the reason.
    pub fn refusals_of(&self, path: &Path) -> Vec<(String, String)> {
        let live = LivePath {
            shared: Arc::clone(&path.0),
            link: path.link(),
        };
        let devices = self.devices();
        let refused = devices.iter().filter_map(|device| {
            let why = device.namespace().refusal_of(&live)?;
            Some((device.name().to_owned(), why))
        });
        refused.collect()
    }

    /// Requests a reset of every path and returns; see [`Path::reset`].
    pub fn reset(&self) {
        self.paths.lock().iter().for_each(Path::reset);
    }

    /// Requests a shutdown of every path and returns; see [`Path::close`].
    pub fn close(&self) {
        self.paths.lock().iter().for_each(Path::close);
    }

    /// Synchronises the devices in `registry` with the namespaces of the connected paths. Registers
    /// a device for each new namespace, adds the paths that have it, and resizes a device whose
    /// namespace has a new size. Removes a device whose namespace is missing on all connected paths
    /// for 5 s, as a surprise removal does. Without a connected path it changes nothing.
    pub fn sync(&self, registry: &Registry, now: Instant) -> Changes {
        let mut changes = Changes::default();
        let paths = self.paths();
        let live: Vec<LivePath> = paths
            .iter()
            .filter(|path| path.status().state == State::Live)
            .filter(|path| path.0.link.generation().is_some())
            .map(|path| LivePath {
                shared: Arc::clone(&path.0),
                link: path.link(),
            })
            .collect();
        if live.is_empty() {
            // The namespaces are unknown now; known devices stay.
            return changes;
        }
        let mut devices = self.devices.lock();
        let are_several = paths.len() > 1;
        look_at_known(
            &mut devices,
            &live,
            are_several,
            registry,
            now,
            &mut changes,
        );
        for path in &live {
            let found = path.link.namespaces.values();
            for namespace in found.filter(|n| includes(self.config.select, n)) {
                let nsid = namespace.nsid;
                if devices.there.contains_key(&nsid) {
                    continue;
                }
                match self.add(&devices, namespace, path, registry) {
                    Ok(device) => {
                        device.take_over(&live);
                        changes.added.push(device.name().to_owned());
                        devices.refused.remove(&nsid);
                        let missing_since = None;
                        let there = KnownDevice {
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
        }
        devices.refused.retain(|nsid, _| {
            live.iter()
                .any(|path| path.link.namespaces.contains_key(nsid))
        });
        changes
    }

    /// Registers a device for `namespace`. The error is the reason, and whether a retry may
    /// succeed.
    fn add(
        &self,
        devices: &Devices,
        namespace: &NamespaceInfo,
        path: &LivePath,
        registry: &Registry,
    ) -> Result<Arc<RemoteBdev>, (String, bool)> {
        if !namespace.has_identity() {
            let why =
                "it has no UUID, NGUID or EUI-64: after a reconnect it could not be known again";
            return Err((why.to_owned(), false));
        }
        let most = self.config.max_devices;
        if devices.there.len() >= most {
            return Err((format!("{most} devices are all that were asked for"), false));
        }
        let name = self.device_name(namespace.nsid);
        let losses = Arc::clone(&self.losses);
        let namespace = Namespace::new(name, path, namespace.clone(), losses);
        namespace.paths.set_policy(devices.policy);
        namespace.paths.set_stays(devices.stays);
        let device = Arc::new(RemoteBdev::new(namespace));
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
        format!("{}n{nsid}", self.config.name)
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

fn look_at_known(
    devices: &mut Devices,
    live: &[LivePath],
    are_several: bool,
    registry: &Registry,
    now: Instant,
    changes: &mut Changes,
) {
    let mut gone = Vec::new();
    for (nsid, there) in &mut devices.there {
        let device = &there.device;
        if !live.iter().any(|p| p.link.namespaces.contains_key(nsid)) {
            let since = *there.missing_since.get_or_insert(now);
            let left = GRACE.saturating_sub(now.saturating_duration_since(since));
            if left.is_zero() {
                gone.push(*nsid)
            } else {
                changes.look_again(left)
            }
            continue;
        }
        there.missing_since = None;
        device.take_over(live);
        if let Ok(Some(blocks)) = registry.notify_resize(device.name()) {
            changes.resized.push((device.name().to_owned(), blocks));
        }
        for path in live {
            let (name, why) = report(device, path, are_several);
            match why {
                None => drop(devices.reported.remove(&name)),
                Some(why) if devices.reported.get(&name) == Some(&why) => {}
                Some(why) => {
                    devices.reported.insert(name, why.clone());
                    changes.refused.push((device.name().to_owned(), why));
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

/// The reason why a device does not use a path, with the key under which it is reported.
fn report(device: &RemoteBdev, path: &LivePath, are_several: bool) -> (String, Option<String>) {
    let (traddr, trsvcid) = &path.shared.config.address;
    let name = format!("{} {traddr}:{trsvcid}", device.name());
    let why = device.namespace().refusal_of(path);
    let why = why.map(|why| {
        if are_several {
            format!("the path by {traddr}:{trsvcid}: {why}")
        } else {
            why
        }
    });
    (name, why)
}

//! Replicated volumes of the daemon: their store, the holder id, and the open volumes.
//!
//! ```text
//!   begin   store (volumes.redb beside the state, etcd, or memory), holder id, an entry per record
//!   open    a task per volume: opened on a reactor ▸ its bdev is registered ▸ waiting objects
//!           are replayed; failures are retried, at once when a device appears
//!   frozen  a volume that cannot be opened has a bdev on which I/O waits ([`frozen`])
//!   run     commands to the controls; events of devices and controls ([`events`])
//!   close   hosts disconnected ▸ queues closed ▸ Command::Close, clean labels
//! ```
//!
//! The durable state of a volume is in the volume store. The journal only has the objects that use
//! its bdev.

pub(super) mod etcd;
mod events;
mod frozen;
pub(in crate::services) mod holder;
pub(super) mod in_cluster;
pub(super) mod lifecycle;
pub mod lvols;
mod membership;
pub(super) mod note;
pub mod paths;
pub mod published;
mod replica_devices;
pub mod snapshots;
mod store_report;
pub mod words;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::qos::RateLimits;
use nacre_bdev_replica::handle::{Command, VolumeError, VolumeHandle, VolumeState, VolumeStatus};
use nacre_bdev_replica::model::{TransportPolicy, VolumeRecord};
use nacre_bdev_replica::prepared::Prepared;
use nacre_bdev_replica::store::VolumeStore;
use tokio::sync::{Mutex, Notify};
use uuid::Uuid;

use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::RpcError;
use crate::rpc::error::Errno;

pub use self::etcd::{OfStore, endpoints};
pub use self::events::{check_other_copies, device_changed, poll_queues, recheck_device};
pub use self::frozen::{fail_io, stop_opening, thaw};
pub use self::lifecycle::{
    begin, close_all, create, end, force_in_sync, open_all, wait_until_tried,
};
pub use self::lvols::delete;
pub(in crate::services) use self::membership::{AbsentDevices, Membership};
pub use self::replica_devices::{REMOTE_PRODUCT, is_claimed, is_local};
pub(super) use self::store_report::store_for_doctor;
pub use paths::of_listener;

pub use nacre_bdev_replica::model::RESERVED;

#[derive(Default)]
pub struct Volumes {
    entries: RefCell<BTreeMap<Uuid, VolumeEntry>>,
    store: RefCell<Option<Arc<dyn VolumeStore>>>,
    /// The store in etcd; `None`: the store is a file, or in memory.
    of_store: RefCell<Option<OfStore>>,
    /// `None`: the daemon is not in a cluster.
    membership: RefCell<Option<Rc<dyn Membership>>>,
    holder: Cell<Uuid>,
    observer: RefCell<Option<Arc<events::EventSender>>>,
    /// Serialises creations and deletions.
    changing: Mutex<()>,
    /// Serialises creations and deletions of snapshots.
    snapshots: Mutex<()>,
    /// Notified when a device appears: volumes that could not be opened are tried again.
    again: Notify,
    /// Volumes whose opening was not tried since the start.
    untried: RefCell<BTreeSet<Uuid>>,
    tried: Notify,
    closing: Cell<bool>,
    /// Resync limit of volumes made by `bdev_raid_create`, in bytes per second; 0: no limit.
    pub raid_bytes_per_s: Cell<u64>,
    /// SPDK's lock window of a RAID rebuild in KiB; only returned to callers.
    pub raid_window_kb: Cell<Option<u32>>,
}

struct VolumeEntry {
    /// Record as last read from the store.
    record: VolumeRecord,
    /// Serialises opening, deletion and closing.
    lock: Rc<Mutex<()>>,
    /// Serialises changes of settings, name and publication.
    altering: Rc<Mutex<()>>,
    open: Option<Rc<OpenedVolume>>,
    /// The volume as hosts see it before it is opened. Opening connects it to the control.
    prepared: Option<Prepared>,
    /// Name of the bdev of `prepared`, while it is registered and the volume is not open.
    shown: Option<String>,
    /// `volume_frozen` or `volume_fenced` was reported, and the volume has not served since.
    reported_frozen: bool,
    /// The volume is being deleted.
    going: bool,
    /// Another node of the cluster may serve the volume, so that its frozen state is no failure.
    is_standby: bool,
    /// Number of blocks before another node enlarged the volume. Devices of this machine may still
    /// have that size.
    grown_from: Option<u64>,
    /// I/O limits of the bdev, kept while another bdev replaces it.
    rates: RateLimits,
    /// The error of the last attempt to open the volume.
    refused: Option<VolumeError>,
    attempts: u32,
}

/// A volume with a control and a registered bdev.
pub struct OpenedVolume {
    pub handle: VolumeHandle,
    /// Name of the bdev: the volume's name when it was opened. After a rename the new name is an
    /// alias.
    pub bdev: String,
    /// Name of the reactor that runs the control.
    pub reactor: String,
}

/// Whether a volume of the store is open, and why not.
#[derive(Clone)]
pub enum OpenState {
    Open(Rc<OpenedVolume>),
    /// Not open, with a bdev on which I/O waits.
    Frozen {
        bdev: String,
        prepared: Prepared,
        why: Option<VolumeError>,
    },
    /// Not open and without a bdev; `why` is the last failure.
    Opening {
        why: Option<VolumeError>,
        attempts: u32,
    },
}

/// A volume with its record and its state.
#[derive(Clone)]
pub struct Listed {
    pub record: VolumeRecord,
    pub open_state: OpenState,
    /// Another node of the cluster may serve the volume.
    is_standby: bool,
}

impl Listed {
    pub fn id(&self) -> Uuid {
        self.record.id
    }

    /// The status of the control or of the frozen bdev; `None` without a bdev.
    pub fn status(&self) -> Option<VolumeStatus> {
        match &self.open_state {
            OpenState::Open(opened) => Some(opened.handle.status()),
            OpenState::Frozen { prepared, why, .. } => {
                let mut status = prepared.status(&self.record, why.as_ref());
                if self.is_standby {
                    status.state = VolumeState::Standby;
                    status.why = Some(self.holder());
                }
                Some(status)
            }
            OpenState::Opening { .. } => None,
        }
    }

    /// The name of the volume's state; `standby` or `opening` without a bdev.
    pub fn state(&self) -> &'static str {
        match self.status() {
            Some(status) => words::state_word(status.state),
            None if self.is_standby => words::state_word(VolumeState::Standby),
            None => words::OPENING,
        }
    }

    /// The reason of the state of a volume without a bdev.
    pub fn reason(&self) -> Option<String> {
        match &self.open_state {
            OpenState::Opening { .. } if self.is_standby => Some(self.holder()),
            OpenState::Opening { why, .. } => why.as_ref().map(ToString::to_string),
            OpenState::Open(_) | OpenState::Frozen { .. } => None,
        }
    }

    fn holder(&self) -> String {
        match self.record.holder {
            Some(node) => format!("node {node} serves it"),
            None => "no node serves it".to_owned(),
        }
    }

    pub fn transport_policy(&self) -> TransportPolicy {
        let status = self.status();
        status.map_or(self.record.settings.transport_policy, |s| {
            s.settings.transport_policy
        })
    }

    pub fn name(&self) -> String {
        self.status()
            .map_or_else(|| self.record.name.clone(), |s| s.name)
    }

    /// Name of its bdev, if it is open or frozen.
    pub fn bdev(&self) -> Option<&str> {
        match &self.open_state {
            OpenState::Open(opened) => Some(&opened.bdev),
            OpenState::Frozen { bdev, .. } => Some(bdev),
            OpenState::Opening { .. } => None,
        }
    }
}

impl Volumes {
    /// True while some volumes have not been tried since the start.
    pub fn are_opening(&self) -> bool {
        !self.untried.borrow().is_empty()
    }

    /// All volumes of the store, by name.
    pub fn list(&self) -> Vec<Listed> {
        let entries = self.entries.borrow();
        let mut all: Vec<Listed> = entries.values().map(VolumeEntry::listed).collect();
        all.sort_by_cached_key(Listed::name);
        all
    }

    /// Finds a volume by name, by UUID, or by the name of its bdev.
    pub fn find(&self, name: &str) -> Result<Listed, RpcError> {
        let id = Uuid::parse_str(name).ok();
        let all = self.list();
        let found = all.iter().find(|v| v.name() == name);
        let found = found.or_else(|| all.iter().find(|v| Some(v.id()) == id));
        let found = found.or_else(|| all.iter().find(|v| v.bdev() == Some(name)));
        found.cloned().ok_or_else(|| {
            let none = RpcError::errno(Errno::ENODEV, format!("there is no volume \"{name}\""));
            let names: Vec<String> = all.iter().map(Listed::name).collect();
            let close = crate::values::suggest::closest(name, names.iter().map(String::as_str));
            none.field("name").remedy(match close {
                Some(close) => format!("did you mean \"{close}\"?"),
                None => "volume_list lists them".into(),
            })
        })
    }

    /// An open volume. The error otherwise has the reason.
    pub fn opened(&self, name: &str) -> Result<Rc<OpenedVolume>, RpcError> {
        let listed = self.find(name)?;
        match listed.open_state {
            OpenState::Open(opened) => Ok(opened),
            OpenState::Frozen { why, .. } | OpenState::Opening { why, .. } => {
                let elsewhere = self.not_here(&listed.record);
                Err(elsewhere.unwrap_or_else(|| not_open(name, why.as_ref())))
            }
        }
    }

    /// True if this daemon is a node of a cluster.
    fn is_in_cluster(&self) -> bool {
        self.membership.borrow().is_some()
    }

    fn not_here(&self, record: &VolumeRecord) -> Option<RpcError> {
        let membership = self.membership.borrow();
        membership.as_ref()?.not_here(record)
    }

    /// Refuses a volume that this node does not hold by its record. Open volumes pass, and all
    /// volumes of a daemon that is not in a cluster.
    pub fn must_be_here(&self, listed: &Listed) -> Result<(), RpcError> {
        match &listed.open_state {
            OpenState::Open(_) => Ok(()),
            _ => self.not_here(&listed.record).map_or(Ok(()), Err),
        }
    }

    /// Bdev name and status of a volume that is open or frozen. The error otherwise has the reason.
    pub fn device(&self, name: &str) -> Result<(String, VolumeStatus), RpcError> {
        let listed = self.find(name)?;
        match (listed.bdev(), listed.status(), &listed.open_state) {
            (Some(bdev), Some(status), _) => Ok((bdev.to_owned(), status)),
            (_, _, OpenState::Opening { why, .. }) => Err(not_open(name, why.as_ref())),
            _ => Err(not_open(name, None)),
        }
    }

    /// The name under which the journal refers to a device. For a renamed volume it is the UUID,
    /// because the bdev has another name after the next start. In a cluster it is always the UUID,
    /// because other nodes may rename a volume.
    pub fn lasting_name(&self, device: &str) -> String {
        let entries = self.entries.borrow();
        let ours = entries
            .values()
            .find(|e| e.bdev() == Some(device))
            .map(VolumeEntry::listed);
        let is_in_cluster = self.is_in_cluster();
        match ours.filter(|volume| is_in_cluster || volume.name() != device) {
            Some(volume) => volume.id().to_string(),
            None => device.to_owned(),
        }
    }

    /// Lock for changes of a volume's settings, name or publication. Taken before the present
    /// values are read.
    pub fn altering(&self, id: Uuid) -> Rc<Mutex<()>> {
        let entries = self.entries.borrow();
        let entry = entries.get(&id);
        entry.map(|e| Rc::clone(&e.altering)).unwrap_or_default()
    }

    /// Runs a command on an open volume.
    pub async fn run(&self, name: &str, command: Command) -> Result<Rc<OpenedVolume>, RpcError> {
        let opened = self.opened(name)?;
        opened.handle.run(command).await.or_refuse()?;
        Ok(opened)
    }

    /// The open volume that has the bdev `device` under a replica.
    pub fn with_replica(&self, device: &str) -> Option<Rc<OpenedVolume>> {
        let entries = self.entries.borrow();
        let mut open = entries.values().filter_map(|e| e.open.clone());
        open.find(|o| {
            o.handle
                .status()
                .replicas
                .iter()
                .any(|m| m.device == device)
        })
    }

    /// Makes [`begin`] use this store.
    #[cfg(test)]
    pub fn use_store(&self, store: Arc<dyn VolumeStore>) {
        self.store.replace(Some(store));
    }

    /// The identity with which this daemon opens volumes now; in a cluster, with its lease.
    fn opener(&self) -> nacre_bdev_replica::answers::Holder {
        let membership = self.membership.borrow();
        let of_cluster = membership.as_ref().map(|membership| membership.holder());
        of_cluster.unwrap_or_else(|| self.holder.get().into())
    }

    /// The id of this daemon among the daemons that share the store; in a cluster, of the node.
    pub fn holder(&self) -> Uuid {
        self.holder.get()
    }

    /// The volume store in etcd; `None` if it is elsewhere or not open.
    pub fn of_etcd(&self) -> Option<OfStore> {
        self.of_store.borrow().clone()
    }

    pub fn store(&self) -> Result<Arc<dyn VolumeStore>, RpcError> {
        self.store
            .borrow()
            .clone()
            .ok_or_else(|| RpcError::errno(Errno::EAGAIN, "the volume store is not open"))
    }
}

fn not_open(name: &str, why: Option<&VolumeError>) -> RpcError {
    RpcError::errno(
        Errno::EAGAIN,
        match why {
            Some(why) => format!("volume \"{name}\" is not open: {why}"),
            None => format!("volume \"{name}\" is being opened"),
        },
    )
    .field("name")
    .remedy("it is tried again by itself; volume_get names the reason")
}

impl VolumeEntry {
    fn new(record: VolumeRecord) -> Self {
        Self {
            record,
            lock: Rc::default(),
            altering: Rc::default(),
            open: None,
            prepared: None,
            shown: None,
            reported_frozen: false,
            going: false,
            is_standby: false,
            grown_from: None,
            rates: RateLimits::default(),
            refused: None,
            attempts: 0,
        }
    }

    /// Name of its bdev, if it is open or frozen.
    fn bdev(&self) -> Option<&str> {
        match (&self.open, &self.shown, &self.prepared) {
            (Some(opened), ..) => Some(&opened.bdev),
            (None, Some(bdev), Some(_)) => Some(bdev),
            _ => None,
        }
    }

    fn listed(&self) -> Listed {
        let open_state = match (&self.open, &self.shown, &self.prepared) {
            (Some(opened), ..) => OpenState::Open(Rc::clone(opened)),
            (None, Some(bdev), Some(prepared)) => OpenState::Frozen {
                bdev: bdev.clone(),
                prepared: prepared.clone(),
                why: self.refused.clone(),
            },
            _ => OpenState::Opening {
                why: self.refused.clone(),
                attempts: self.attempts,
            },
        };
        Listed {
            record: self.record.clone(),
            open_state,
            is_standby: self.is_standby,
        }
    }
}

impl Refusal for VolumeError {
    fn refusal(self) -> RpcError {
        use nacre_bdev_replica::store::StoreError;
        let cause = self.to_string();
        let of = |errno| RpcError::errno(errno, cause.clone());
        match self {
            Self::Store(StoreError::Exists { .. }) => of(Errno::EEXIST)
                .field("name")
                .remedy("volume_list lists them"),
            Self::Store(StoreError::NotFound { .. }) => of(Errno::ENODEV).field("name"),
            Self::Store(StoreError::TooMany { .. }) => of(Errno::ENOSPC),
            Self::Store(StoreError::Conflict { .. }) => of(Errno::EBUSY),
            Self::Store(StoreError::Unavailable { .. }) => of(Errno::EAGAIN)
                .remedy("see whether etcd answers, or the disk of the data directory is full or read-only; it is tried again"),
            Self::Store(StoreError::Owned { .. }) => of(Errno::EPERM)
                .remedy("use the volume at the daemon that has taken the store"),
            Self::Store(StoreError::Fenced { .. }) => of(Errno::EPERM)
                .remedy("use the volume at the node that holds it"),
            Self::Store(_) | Self::Io { .. } => of(Errno::EIO),
            Self::Device(_) => of(Errno::ENODEV)
                .field("device")
                .remedy("bdev_get_bdevs lists the devices and their users"),
            // The field stands before the cause.
            Self::Invalid { what, why } => {
                RpcError::errno(Errno::EINVAL, why).field(what)
            }
            Self::InUse { .. } => of(Errno::EPERM)
                .field("device")
                .remedy("look at its data first; force overwrites it"),
            Self::NoReplica { .. } => of(Errno::ENODEV)
                .field("replica")
                .remedy("volume_get lists the replicas by id and by device"),
            Self::LastCopy { .. } => of(Errno::EPERM)
                .field("force")
                .remedy("bring another replica in sync first; force with the volume's name, if it is meant"),
            Self::Newer { .. } => of(Errno::EPERM)
                .remedy("find the machine that has the volume now: its data is newer than here"),
            Self::NothingInSync { .. } => of(Errno::EAGAIN)
                .remedy("bring a device with an in-sync replica back"),
            Self::Short { .. } => of(Errno::ENOMEM)
                .field("device")
                .remedy("ask again a little later; or give the daemon more buffers"),
            Self::Restored { .. } => of(Errno::EAGAIN)
                .field("device")
                .remedy("bring the device back; if its node never returns, restore once more with --without"),
            Self::NotBelieved { .. } => of(Errno::EAGAIN)
                .field("device")
                .remedy("bring back the device that was written last"),
            Self::TooSmall { .. } => of(Errno::EINVAL).field("device"),
            Self::Cut { .. } => of(Errno::EAGAIN)
                .field("device")
                .remedy("enlarge the device, then volume_thaw with `force` and this replica"),
            Self::Fenced { .. } => of(Errno::EPERM)
                .remedy("another holder has the volume: use it there"),
            Self::NoReservations { .. } => of(Errno::ENOTSUP)
                .field("device")
                .remedy("use devices of targets that support reservations"),
            Self::Reserved { .. } => of(Errno::EPERM)
                .field("device")
                .remedy("nvmf_ns_get_reservation at its target, or nvme resv-report, says which host"),
            Self::Closed { .. } => of(Errno::ENODEV),
            Self::Running { .. } => of(Errno::EBUSY),
            Self::NotHeld { .. } | Self::NotEqual { .. } => of(Errno::EAGAIN),
            Self::Busy => of(Errno::EAGAIN).remedy("ask again a little later"),
        }
    }
}

//! Discovery controllers that this daemon follows: the subsystems that each lists, and the
//! controllers that are attached for these.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::rc::Rc;
use std::time::Instant;

use nacre_nvmf::host::ControllerState;
use nacre_nvmf_wire::log::discovery::{DiscoveryError, DiscoveryRecord, adrfam, trtype};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Notify;

use crate::values::address::{canonical_host, canonical_port};

/// An address of a subsystem from a discovery log entry, in SPDK's spelling; addresses and ports
/// are normalised.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, JsonSchema)]
pub struct SubsystemAddress {
    pub trtype: &'static str,
    pub adrfam: &'static str,
    pub traddr: String,
    pub trsvcid: String,
    pub subnqn: String,
}

impl SubsystemAddress {
    /// `None`: the transport is neither TCP nor RDMA.
    pub fn of(record: &DiscoveryRecord) -> Option<Self> {
        let traddr = canonical_host(&record.traddr);
        Some(Self {
            trtype: match record.trtype {
                trtype::TCP => "TCP",
                trtype::RDMA => "RDMA",
                _ => return None,
            },
            adrfam: match record.adrfam {
                // An IPv4-mapped address is an IPv4 address.
                adrfam::IPV6 if traddr.contains(':') => "IPv6",
                _ => "IPv4",
            },
            traddr,
            trsvcid: canonical_port(&record.trsvcid),
            subnqn: record.subnqn.to_string(),
        })
    }
}

/// A listed subsystem, and the name of the controller that is attached for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredPath {
    pub name: String,
    pub place: SubsystemAddress,
    /// Since when the discovery log does not list the path. `None`: it does.
    pub missing_since: Option<Instant>,
}

impl DiscoveredPath {
    /// True if both are the same path of the same controller.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.name, &self.place) == (&other.name, &other.place)
    }
}

/// Paths that were detached by a call. They stay detached until the log's entries for their
/// subsystem change.
#[derive(Debug, Default)]
pub struct DetachedByHand {
    /// The paths of the last log, by subsystem.
    log: BTreeMap<String, BTreeSet<SubsystemAddress>>,
    paths: HashSet<SubsystemAddress>,
}

impl DetachedByHand {
    /// Takes the paths of a new log, and those that were detached since the log before.
    pub fn update(
        &mut self,
        places: &[SubsystemAddress],
        detached: impl IntoIterator<Item = SubsystemAddress>,
    ) {
        let mut log = BTreeMap::<String, BTreeSet<SubsystemAddress>>::new();
        for place in places {
            let paths = log.entry(place.subnqn.clone()).or_default();
            paths.insert(place.clone());
        }
        self.paths.extend(detached);
        self.paths
            .retain(|path| self.log.get(&path.subnqn) == log.get(&path.subnqn));
        self.log = log;
    }

    pub fn has(&self, place: &SubsystemAddress) -> bool {
        self.paths.contains(place)
    }
}

/// A discovery controller that this daemon follows, on the management thread.
pub struct Discovery {
    pub name: String,
    /// Address of the discovery controller.
    pub place: SubsystemAddress,
    /// Names of controllers by subsystem, also of subsystems that are not listed now: a subsystem
    /// that returns gets its former name.
    pub names: RefCell<BTreeMap<String, String>>,
    /// The paths that are attached for it.
    pub listed: RefCell<Vec<DiscoveredPath>>,
    pub referrals: RefCell<Vec<SubsystemAddress>>,
    /// `names` has entries that are not stored yet.
    pub has_unstored_names: Cell<bool>,
    /// Paths that could not be attached or detached, each with the reason.
    pub refused: RefCell<Vec<(SubsystemAddress, String)>>,
    /// Number of attempts, since the last log was read, in which some path was refused.
    pub attempts: Cell<u32>,
    pub detached_by_hand: RefCell<DetachedByHand>,
    /// Number of entries of the last log that could not be parsed, and the first error.
    pub malformed: RefCell<(usize, Option<DiscoveryError>)>,
    /// Number of entries of the last log that were not read, because the log is too long.
    pub unread: Cell<u64>,
    pub state: RefCell<ControllerState>,
    /// The log was read on the present connection.
    pub is_current: Cell<bool>,
    /// Why the last log could not be read.
    pub error: RefCell<Option<String>>,
    /// A log was read and its paths were attached.
    pub is_complete: Cell<bool>,
    pub is_stopping: Cell<bool>,
    pub has_ended: Cell<bool>,
    /// Notified when a field above changes.
    pub changed: Notify,
}

impl Discovery {
    pub fn new(name: String, place: SubsystemAddress, names: BTreeMap<String, String>) -> Self {
        Self {
            name,
            place,
            names: RefCell::new(names),
            listed: RefCell::default(),
            referrals: RefCell::default(),
            has_unstored_names: Cell::new(false),
            refused: RefCell::default(),
            attempts: Cell::new(0),
            detached_by_hand: RefCell::default(),
            malformed: RefCell::default(),
            unread: Cell::new(0),
            state: RefCell::new(ControllerState::Connecting),
            is_current: Cell::new(false),
            error: RefCell::default(),
            is_complete: Cell::new(false),
            is_stopping: Cell::new(false),
            has_ended: Cell::new(false),
            changed: Notify::new(),
        }
    }

    /// Marks the log as read on the present connection. The first log of a connection resets
    /// `missing_since`: a target that restarts lists its subsystems one by one.
    pub fn log_was_read(&self) {
        if !self.is_current.replace(true) {
            let mut listed = self.listed.borrow_mut();
            listed.iter_mut().for_each(|path| path.missing_since = None);
        }
    }

    /// Resolves when the service's task must end.
    pub async fn stopping(&self) {
        while !self.is_stopping.get() {
            self.changed.notified().await;
        }
    }

    /// Makes the task of the service disconnect and end.
    pub fn stop(&self) {
        self.is_stopping.set(true);
        self.changed.notify_waiters();
    }

    /// The state of the connection to the discovery controller, as SPDK names it.
    pub fn state_word(&self) -> &'static str {
        match &*self.state.borrow() {
            ControllerState::Live => "enabled",
            ControllerState::Connecting | ControllerState::Waiting { .. } => "resetting",
            ControllerState::Failed(_) => "failed",
            ControllerState::Closed => "deleting",
        }
    }

    /// The reason that the discovery controller is not connected, or that its log could not be
    /// read.
    pub fn problem(&self) -> Option<String> {
        match &*self.state.borrow() {
            ControllerState::Waiting { error, .. } | ControllerState::Failed(error) => {
                Some(error.to_string())
            }
            _ => self.error.borrow().clone(),
        }
    }
}

/// All discovery services, by name.
#[derive(Default)]
pub struct Discoveries(RefCell<BTreeMap<String, Rc<Discovery>>>);

impl Discoveries {
    pub fn find(&self, name: &str) -> Option<Rc<Discovery>> {
        self.0.borrow().get(name).cloned()
    }

    pub fn list(&self) -> Vec<Rc<Discovery>> {
        self.0.borrow().values().cloned().collect()
    }

    pub fn insert(&self, discovery: Rc<Discovery>) {
        let name = discovery.name.clone();
        self.0.borrow_mut().insert(name, discovery);
    }

    pub fn remove(&self, name: &str) {
        self.0.borrow_mut().remove(name);
    }

    /// The name of the controller for a subsystem that a service lists now, or else listed before.
    pub fn name_of(&self, subnqn: &str) -> Option<String> {
        let all = self.list();
        let listed = all.iter().find_map(|one| {
            let listed = one.listed.borrow();
            let found = listed.iter().find(|listed| listed.place.subnqn == subnqn);
            found.map(|listed| listed.name.clone())
        });
        let stored = || {
            let mut names = all.iter().map(|one| one.names.borrow());
            names.find_map(|names| names.get(subnqn).cloned())
        };
        listed.or_else(stored)
    }

    /// The names of the controllers of all services.
    pub fn names(&self) -> HashSet<String> {
        let all = self.list();
        let names = all.iter().map(|one| one.names.borrow());
        names
            .flat_map(|names| names.values().cloned().collect::<Vec<_>>())
            .collect()
    }

    /// Ends the tasks of all services, waiting until `deadline`. Attached controllers stay.
    pub async fn close(&self, deadline: tokio::time::Instant) {
        let all = std::mem::take(&mut *self.0.borrow_mut());
        all.values().for_each(|one| one.stop());
        for one in all.values() {
            while !one.has_ended.get() && tokio::time::Instant::now() < deadline {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        }
    }
}

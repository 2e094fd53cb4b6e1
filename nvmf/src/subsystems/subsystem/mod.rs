//! [`Subsystem`]: an NVM or discovery subsystem with its namespaces, allowed hosts, listeners and
//! controllers. Management calls change it.

mod allowed;
mod ana;
mod listeners;

pub use allowed::{Rotation, SecretKind};
pub(crate) use ana::AnaLogGroup;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use crate::auth::KeySource;
use crate::subsystems::ana::AnaStates;
use crate::subsystems::association::{Admitted, Association, Phase, Teardown};
use crate::subsystems::cntlid::Home;
use crate::subsystems::core_handle::SubsystemId;
use crate::subsystems::hosts::{HostSums, Hosts};
use crate::subsystems::namespace::{Backing, Namespace, NamespaceIds, View};
use crate::subsystems::reservation::{HostId, Notice, Reservation, Reservations};
use crate::subsystems::subsystem_config::{ControllerModel, SubsystemConfig, SubsystemKind};
use crate::subsystems::withheld::Withheld;
use crate::tls::PskKey;
use crate::transport::{Address, ListenerId, ListenerOptions, TransportType};

/// The parameters of a new namespace.
pub struct NamespaceConfig {
    /// `None`: the lowest free NSID.
    pub nsid: Option<u32>,
    pub bdev_name: String,
    pub backing: Backing,
    pub ids: NamespaceIds,
    pub ana_group: Option<u32>,
    /// Every allowed host has access; otherwise only the hosts added with `add_namespace_host`.
    pub auto_visible: bool,
    pub reservations: Reservations,
}

/// The error of a management call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubsystemError {
    #[error("namespace id {nsid} is taken")]
    NsidTaken { nsid: u32 },
    #[error("namespace id {nsid} is not in 1..={max}")]
    NsidOutOfRange { nsid: u32, max: u32 },
    /// ANAGRPMAX equals the largest NSID.
    #[error("ANA group {group} is not in 1..={max}")]
    AnaGroupOutOfRange { group: u32, max: u32 },
    #[error("subsystem {nqn} has all of its {max} namespaces")]
    NamespacesFull { nqn: String, max: u32 },
    #[error("subsystem {nqn} has no namespace {nsid}")]
    NoNamespace { nqn: String, nsid: u32 },
    #[error("UUID {uuid} is already used by namespace {nsid} of {nqn}")]
    UuidTaken { uuid: Uuid, nqn: String, nsid: u32 },
    #[error("host {host} is already allowed")]
    HostExists { host: String },
    #[error("host {host} is not in the list")]
    NoHost { host: String },
    #[error(
        "namespace {nsid} is visible to every host; create it with no_auto_visible to choose hosts"
    )]
    AutoVisible { nsid: u32 },
    #[error("subsystem {nqn} already listens on {address}")]
    ListenerExists { nqn: String, address: String },
    #[error("subsystem {nqn} does not listen on {address}")]
    NoListener { nqn: String, address: String },
    #[error("{nqn} does not report ANA states to hosts")]
    NoAnaReporting { nqn: String },
    #[error("the discovery subsystem has no namespaces")]
    Discovery,
}

/// The reason for refusing a Connect of an admin queue. The caller converts it to a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    HostNotAllowed,
    /// Temporary: controllers of this host, or the requested one, are still being removed, or the
    /// subsystem is being deleted or added to this listener.
    Busy,
    NoFreeController,
    /// The requested static controller has an association.
    ControllerTaken,
    NotOnThisListener,
    /// The subsystem refuses hosts on this listener, so that they use another transport.
    Withheld(Withheld),
}

#[derive(Clone)]
pub struct NamespaceEntry {
    pub namespace: Arc<Namespace>,
    pub bdev_name: String,
    pub auto_visible: bool,
    pub ana_group: Option<u32>,
    pub hosts: BTreeSet<Nqn>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubsystemListener {
    pub id: ListenerId,
    pub transport: TransportType,
    pub address: Address,
    pub ana: AnaStates,
    /// The listener is not in the discovery log, and refuses hosts as a listener without this
    /// subsystem does: hosts must use another transport. `None`: a normal listener.
    pub withheld: Option<Withheld>,
    /// The requested options. If several subsystems share the address, those of the first one
    /// apply.
    pub options: ListenerOptions,
}

/// The secrets of an allowed host, and those of its rotations.
#[derive(Debug, Default)]
struct Allowed {
    secrets: HostSecrets,
    /// In force beside `secrets` until their rotation ends.
    former: HostSecrets,
    /// Number of the host's controllers when a rotation began.
    controllers: usize,
}

/// The keys of an allowed host.
#[derive(Debug, Clone, Default)]
pub struct HostSecrets {
    /// Keys for DH-HMAC-CHAP, which the host must then use.
    pub keys: Option<Arc<dyn KeySource>>,
    /// PSK for TLS, which the host must then use.
    pub psk: Option<Arc<dyn PskKey>>,
    /// The host must make a PSK for TLS when it authenticates itself (secure channel
    /// concatenation).
    pub concat: bool,
}

#[derive(Default)]
pub(crate) struct State {
    allow_any_host: bool,
    /// The allowed hosts with their keys.
    hosts: BTreeMap<Nqn, Allowed>,
    pub(crate) namespaces: BTreeMap<u32, NamespaceEntry>,
    /// Reservations of namespaces whose bdev was removed, by NSID, with the namespace's UUID. They
    /// apply again when the bdev returns.
    away: BTreeMap<u32, (Uuid, Arc<Reservation>)>,
    pub(crate) listeners: Vec<SubsystemListener>,
    pub(crate) controllers: BTreeMap<u16, Arc<Association>>,
    /// Number of changes of the ANA log so far.
    pub(crate) ana_changes: u64,
    /// By group: the number of the last change that added or removed a namespace.
    pub(crate) ana_members: BTreeMap<u32, u64>,
    last_cntlid: u16,
    deleted: bool,
    /// Number of addresses being opened for this subsystem. A host may connect before the listener
    /// is added.
    opening: u32,
}

/// The last [`SubsystemId`].
static IDS: AtomicU64 = AtomicU64::new(0);

pub struct Subsystem {
    pub(crate) id: SubsystemId,
    pub config: SubsystemConfig,
    pub kind: SubsystemKind,
    cores: usize,
    /// Entries of each controller's Error Information log.
    error_entries: usize,
    state: Mutex<State>,
    pub(crate) host_counts: Arc<Hosts>,
    /// Number of changes that affect a discovery log or an ANA log.
    pub(crate) changes: AtomicU64,
}

impl Subsystem {
    pub(crate) fn new(
        config: SubsystemConfig,
        kind: SubsystemKind,
        cores: usize,
        error_entries: usize,
    ) -> Self {
        let state = State {
            allow_any_host: config.allow_any_host,
            ..State::default()
        };
        Self {
            id: SubsystemId(IDS.fetch_add(1, Ordering::Relaxed)),
            config,
            kind,
            cores,
            error_entries,
            state: Mutex::new(state),
            host_counts: Arc::default(),
            changes: AtomicU64::new(0),
        }
    }

    pub fn nqn(&self) -> &Nqn {
        &self.config.nqn
    }

    /// Statistics of the connected hosts, per host and transport.
    pub fn host_sums(&self) -> Vec<HostSums> {
        self.host_counts.sums()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    // Namespaces.

    pub fn add_namespace(&self, config: NamespaceConfig) -> Result<u32, SubsystemError> {
        if self.kind == SubsystemKind::Discovery {
            return Err(SubsystemError::Discovery);
        }
        let max = self.config.max_namespaces;
        let mut state = self.state();
        let nsid = match config.nsid {
            Some(nsid) if nsid == 0 || nsid > max => {
                return Err(SubsystemError::NsidOutOfRange { nsid, max });
            }
            Some(nsid) if state.namespaces.contains_key(&nsid) => {
                return Err(SubsystemError::NsidTaken { nsid });
            }
            Some(nsid) => nsid,
            None => (1..=max)
                .find(|nsid| !state.namespaces.contains_key(nsid))
                .ok_or_else(|| SubsystemError::NamespacesFull {
                    nqn: self.nqn().to_string(),
                    max,
                })?,
        };
        if let Some(other) = state
            .namespaces
            .values()
            .find(|n| n.namespace.ids.uuid == config.ids.uuid)
        {
            return Err(SubsystemError::UuidTaken {
                uuid: config.ids.uuid,
                nqn: self.nqn().to_string(),
                nsid: other.namespace.nsid,
            });
        }
        let ana_group = config.ana_group.unwrap_or(nsid);
        if ana_group == 0 || ana_group > max {
            return Err(SubsystemError::AnaGroupOutOfRange {
                group: ana_group,
                max,
            });
        }
        let reservation = match state.away.remove(&nsid) {
            Some((uuid, reservation)) if uuid == config.ids.uuid => reservation,
            _ => Arc::new(Reservation::new(config.reservations)),
        };
        let namespace = Arc::new(Namespace::new(
            nsid,
            config.ids,
            ana_group,
            config.backing,
            reservation,
            self.cores,
        ));
        state.namespaces.insert(
            nsid,
            NamespaceEntry {
                namespace,
                bdev_name: config.bdev_name,
                auto_visible: config.auto_visible,
                ana_group: config.ana_group,
                hosts: BTreeSet::new(),
            },
        );
        state.ana_members_changed([ana_group]);
        self.publish_views(&state, &[nsid]);
        Ok(nsid)
    }

    /// Removes a namespace from all controllers. I/O in flight completes; each core closes the bdev
    /// after its last I/O.
    pub fn remove_namespace(&self, nsid: u32) -> Result<(), SubsystemError> {
        let mut state = self.state();
        let removed = state
            .namespaces
            .remove(&nsid)
            .ok_or_else(|| self.no_namespace(nsid))?;
        state.ana_members_changed([removed.namespace.ana_group()]);
        self.publish_views(&state, &[nsid]);
        Ok(())
    }

    /// Drops the reservation of a namespace whose bdev was removed.
    pub fn forget_reservation(&self, nsid: u32) {
        self.state().away.remove(&nsid);
    }

    /// Notifies hosts of namespaces on a bdev that its size changed.
    pub fn bdev_resized(&self, bdev_name: &str) {
        let state = self.state();
        let changed: Vec<u32> = state
            .namespaces
            .values()
            .filter(|n| n.bdev_name == bdev_name)
            .map(|n| n.namespace.nsid)
            .collect();
        if !changed.is_empty() {
            self.publish_views(&state, &changed);
        }
    }

    /// A connected host with access to a namespace on the bdev, as text; `None`: there is none.
    pub fn host_of_bdev(&self, bdev_name: &str) -> Option<String> {
        let state = self.state();
        let on_it = state.namespaces.values();
        let on_it: Vec<u32> = on_it
            .filter(|n| n.bdev_name == bdev_name)
            .map(|n| n.namespace.nsid)
            .collect();
        state.controllers.values().find_map(|association| {
            let view = association.view();
            let nsid = on_it.iter().find(|nsid| view.get(**nsid).is_some())?;
            let here = association.phase() != Phase::Closing;
            let (host, nqn) = (&association.hostnqn, self.nqn());
            here.then(|| format!("host {host} (namespace {nsid} of {nqn})"))
        })
    }

    /// Removes the namespaces on a bdev that is being removed. Returns their NSIDs.
    pub fn bdev_removed(&self, bdev_name: &str) -> Vec<u32> {
        let mut state = self.state();
        let (gone, groups): (Vec<u32>, Vec<u32>) = state
            .namespaces
            .values()
            .filter(|n| n.bdev_name == bdev_name)
            .map(|n| (n.namespace.nsid, n.namespace.ana_group()))
            .unzip();
        for nsid in &gone {
            let namespace = Arc::clone(&state.namespaces[nsid].namespace);
            let kept = (namespace.ids.uuid, Arc::clone(&namespace.reservation));
            state.away.insert(*nsid, kept);
        }
        state.namespaces.retain(|nsid, _| !gone.contains(nsid));
        if !gone.is_empty() {
            state.ana_members_changed(groups);
            self.publish_views(&state, &gone);
        }
        gone
    }

    /// The NSID of the namespace with this UUID.
    pub fn namespace_with(&self, uuid: Uuid) -> Option<u32> {
        let state = self.state();
        let mut all = state.namespaces.values();
        let found = all.find(|entry| entry.namespace.ids.uuid == uuid);
        found.map(|entry| entry.namespace.nsid)
    }

    pub fn namespaces(&self) -> Vec<NamespaceEntry> {
        self.state().namespaces.values().cloned().collect()
    }

    pub fn add_namespace_host(&self, nsid: u32, host: &Nqn) -> Result<(), SubsystemError> {
        self.change_namespace_host(nsid, host, true)
    }

    pub fn remove_namespace_host(&self, nsid: u32, host: &Nqn) -> Result<(), SubsystemError> {
        self.change_namespace_host(nsid, host, false)
    }

    fn change_namespace_host(
        &self,
        nsid: u32,
        host: &Nqn,
        add: bool,
    ) -> Result<(), SubsystemError> {
        let mut state = self.state();
        let entry = state
            .namespaces
            .get_mut(&nsid)
            .ok_or_else(|| self.no_namespace(nsid))?;
        if entry.auto_visible {
            return Err(SubsystemError::AutoVisible { nsid });
        }
        let group = entry.namespace.ana_group();
        match (
            add,
            if add {
                entry.hosts.insert(host.clone())
            } else {
                entry.hosts.remove(host)
            },
        ) {
            (true, false) => {
                return Err(SubsystemError::HostExists {
                    host: host.to_string(),
                });
            }
            (false, false) => {
                return Err(SubsystemError::NoHost {
                    host: host.to_string(),
                });
            }
            _ => {}
        }
        state.ana_members_changed([group]);
        self.publish_views(&state, &[nsid]);
        Ok(())
    }

    pub(crate) fn no_namespace(&self, nsid: u32) -> SubsystemError {
        SubsystemError::NoNamespace {
            nqn: self.nqn().to_string(),
            nsid,
        }
    }

    /// Gives a new view to every controller that had or has access to a namespace in `touched`
    /// (changed NSIDs), and an event for these namespaces.
    pub(crate) fn publish_views(&self, state: &State, touched: &[u32]) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        for association in state.controllers.values() {
            let new = Arc::new(view_for(state, &association.hostnqn, association.listener));
            let old = association.view();
            let seen = |nsid: &&u32| old.get(**nsid).is_some() || new.get(**nsid).is_some();
            let changed: Vec<u32> = touched.iter().filter(seen).copied().collect();
            if changed.is_empty() {
                continue;
            }
            association.set_view(new, &changed);
            // Wake the cores of I/O queues, which close bdevs without access.
            for queue in association.queues() {
                queue.group.wake();
            }
        }
    }

    // Controllers.

    /// Creates the association of a host that connects an admin queue with CNTLID `asked`, which
    /// [`SubsystemConfig::check_cntlid`] has checked.
    pub(crate) fn admit(
        &self,
        asked: u16,
        hostnqn: &Nqn,
        hostid: [u8; 16],
        listener: ListenerId,
        transport: TransportType,
    ) -> Result<Arc<Association>, Refusal> {
        let mut state = self.state();
        if state.deleted {
            return Err(Refusal::Busy);
        }
        let discovery = self.kind == SubsystemKind::Discovery;
        if !discovery {
            let here = state.listeners.iter().find(|l| l.id == listener);
            match here {
                None if state.opening > 0 => return Err(Refusal::Busy),
                None => return Err(Refusal::NotOnThisListener),
                Some(here) => {
                    if let Some(why) = here.withheld {
                        return Err(Refusal::Withheld(why));
                    }
                }
            }
        }
        if !discovery && !state.allow_any_host && !state.hosts.contains_key(hostnqn) {
            return Err(Refusal::HostNotAllowed);
        }
        // A write of the old controller must not take effect after one of the new controller. So
        // wait until the old one has no command in a device.
        let leaving = |a: &&Arc<Association>| a.hostid == hostid && a.phase() == Phase::Closing;
        if !discovery && state.controllers.values().any(|a| leaving(&a)) {
            return Err(Refusal::Busy);
        }
        let cntlid = self.cntlid_for(&state, asked, &Home { hostnqn, hostid })?;
        state.last_cntlid = cntlid;
        let view = Arc::new(view_for(&state, hostnqn, listener));
        let admitted = Admitted {
            cntlid,
            hostid,
            hostnqn: hostnqn.clone(),
            listener,
            transport,
        };
        let (nqn, hosts) = (self.nqn().clone(), Arc::clone(&self.host_counts));
        let association = Association::new(admitted, nqn, hosts, view, self.error_entries);
        let association = Arc::new(association);
        state.controllers.insert(cntlid, Arc::clone(&association));
        Ok(association)
    }

    fn cntlid_for(&self, state: &State, asked: u16, host: &Home) -> Result<u16, Refusal> {
        let controllers = &state.controllers;
        let is_free = |id: u16| !controllers.contains_key(&id);
        let chosen = self
            .config
            .choose_cntlid(asked, state.last_cntlid, host, is_free);
        chosen.ok_or_else(|| {
            let closing = |a: &Arc<Association>| a.phase() == Phase::Closing;
            match (self.config.controller_model, controllers.get(&asked)) {
                (_, Some(one)) if closing(one) => Refusal::Busy,
                (_, Some(_)) => Refusal::ControllerTaken,
                (ControllerModel::Static, None) if controllers.values().any(closing) => {
                    Refusal::Busy
                }
                (_, None) => Refusal::NoFreeController,
            }
        })
    }

    pub fn controller(&self, cntlid: u16) -> Option<Arc<Association>> {
        self.state().controllers.get(&cntlid).cloned()
    }

    pub fn controller_count(&self) -> usize {
        self.state().controllers.len()
    }

    pub fn controllers(&self) -> Vec<Arc<Association>> {
        self.state().controllers.values().cloned().collect()
    }

    /// Removes an association after its last queue, which frees its controller id.
    pub(crate) fn forget(&self, association: &Association) {
        self.state().controllers.remove(&association.cntlid);
    }

    /// Refuses Connects from now on, and ends all associations.
    pub(crate) fn delete(&self, why: Teardown) {
        let mut state = self.state();
        state.deleted = true;
        for association in state.controllers.values() {
            association.tear_down(why);
        }
    }

    /// Ends the associations of all hosts, which may connect again.
    pub fn disconnect_hosts(&self) {
        for association in self.state().controllers.values() {
            association.tear_down(Teardown::Elsewhere);
        }
    }

    /// Sends a reservation notification to the controllers of a host with access to the namespace.
    pub(crate) fn notify_reservation(&self, host: &HostId, nsid: u32, notice: Notice) {
        for association in self.state().controllers.values() {
            if association.hostid == *host && association.view().get(nsid).is_some() {
                association.notify_reservation(nsid, notice);
            }
        }
    }

    /// Notifies every controller of events (bits of [`crate::subsystems::association::pending`]).
    pub(crate) fn notify(&self, events: u32) {
        for association in self.state().controllers.values() {
            association.notify(events);
        }
    }
}

/// The namespaces visible to a host, with their ANA states on a listener.
pub(crate) fn view_for(state: &State, host: &Nqn, listener: ListenerId) -> View {
    let here = state.listeners.iter().find(|l| l.id == listener);
    let access = |group| here.map_or(AnaState::Optimized, |l| l.ana.of(group));
    View::new(
        state
            .namespaces
            .values()
            .filter(|n| visible_to(n, host))
            .map(|n| (Arc::clone(&n.namespace), access(n.namespace.ana_group()))),
        here.map_or(AnaState::Optimized, |l| l.ana.of_others()),
    )
}

pub(crate) fn visible_to(entry: &NamespaceEntry, host: &Nqn) -> bool {
    entry.auto_visible || entry.hosts.contains(host)
}

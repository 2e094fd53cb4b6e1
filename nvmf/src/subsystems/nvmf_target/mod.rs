//! [`Target`]: the subsystems, listeners, transports and queue groups of a process. Management
//! calls change it; RPC methods and the configuration use it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::subsystems::ana::AnaStates;
use crate::subsystems::association::Teardown;
use crate::subsystems::authentication::Authentication;
use crate::subsystems::config::{QueueLimits, TargetConfig};
use crate::subsystems::core_handle::GroupHandle;
use crate::subsystems::discovery::Referral;
use crate::subsystems::places::Places;
use crate::subsystems::stats::Totals;
use crate::subsystems::subsystem::{
    HostSecrets, NamespaceConfig, Subsystem, SubsystemError, SubsystemListener,
};
use crate::subsystems::subsystem_config::{MAX_CNTLID, SubsystemConfig, SubsystemKind};
use crate::subsystems::withheld::Withheld;
use crate::transport::{
    Address, ListenError, ListenerId, ListenerOptions, Plug, TlsPolicy, TransportType,
};

#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error("subsystem {nqn} exists")]
    SubsystemExists { nqn: String },
    #[error("no subsystem {nqn}")]
    NoSubsystem { nqn: String },
    #[error("the target has all of its {max} subsystems")]
    SubsystemsFull { max: usize },
    #[error("{field} is \"{value}\": {expected}")]
    Invalid {
        field: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("there is no {kind} transport; create it first (nvmf_create_transport)")]
    NoTransport { kind: TransportType },
    #[error("there is a {kind} transport already")]
    TransportExists { kind: TransportType },
    #[error("referral {address} exists")]
    ReferralExists { address: String },
    #[error("no referral {address}")]
    NoReferral { address: String },
    #[error("{nqn} is the name of the discovery subsystem")]
    DiscoveryName { nqn: String },
    #[error("{address} is open with tls = {is:?}, and an address has one policy")]
    OtherTls { address: String, is: TlsPolicy },
    #[error("no thread for authentication: {0}")]
    Helper(String),
    #[error(transparent)]
    Subsystem(#[from] SubsystemError),
    #[error(transparent)]
    Listen(#[from] ListenError),
}

struct Listener {
    kind: TransportType,
    /// The bound address with its actual port, never port 0. So two requests for any port give two
    /// listeners.
    bound: Address,
    options: ListenerOptions,
    users: usize,
    /// The totals reported so far, so that counters never decrease.
    reported: Totals,
}

struct Listeners {
    open: BTreeMap<ListenerId, Listener>,
    next: u64,
}

pub struct Target {
    pub config: TargetConfig,
    cores: usize,
    subsystems: RwLock<BTreeMap<Nqn, Arc<Subsystem>>>,
    discovery: Arc<Subsystem>,
    /// The discovery subsystem's unique NQN. Locked after `subsystems`.
    discovery_nqn: Mutex<Option<Nqn>>,
    plugs: RwLock<Vec<Arc<dyn Plug>>>,
    queue_limits: Mutex<BTreeMap<TransportType, QueueLimits>>,
    groups: RwLock<Vec<GroupHandle>>,
    /// Locked, before `listeners`, while addresses are opened or closed, which may take long.
    opening: Mutex<()>,
    listeners: Mutex<Listeners>,
    referrals: Mutex<Vec<Referral>>,
    shared: Shared,
    /// Discovery listeners that were opened automatically beside those of subsystems.
    automatic: Mutex<Vec<(TransportType, Address)>>,
    /// GENCTR of the discovery log, incremented with every change of its contents.
    generation: AtomicU64,
    held: AtomicBool,
    /// See [`Target::expect_subsystems`].
    expected: Arc<AtomicUsize>,
    /// Connects refused because the subsystem is withheld from their transport.
    withheld: AtomicU64,
    pub(crate) places: Arc<Places>,
    pub authentication: Authentication,
}

mod discovery;
mod hosts;
mod listeners;
mod psks;
mod shared;

pub use listeners::ListenerStats;
pub use psks::TargetPsks;

use shared::Shared;

/// The parameters of a new listener.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListenOptions {
    /// The initial ANA states.
    pub ana: AnaStates,
    /// See [`SubsystemListener::withheld`].
    pub withheld: Option<Withheld>,
    /// Options of the address. If several subsystems share it, those of the first one apply.
    pub listener: ListenerOptions,
}

/// Announces subsystems that will be created soon. See [`Target::expect_subsystems`].
#[must_use]
#[derive(Debug)]
pub struct ExpectedSubsystems(Arc<AtomicUsize>);

impl Drop for ExpectedSubsystems {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Target {
    /// Creates a target for `cores` queue groups.
    pub fn new(config: TargetConfig, cores: usize) -> Arc<Self> {
        Self::with_authentication(config, cores, Authentication::default())
    }

    /// Like [`Target::new`], with this [`Authentication`].
    pub fn with_authentication(
        config: TargetConfig,
        cores: usize,
        authentication: Authentication,
    ) -> Arc<Self> {
        let mut discovery = SubsystemConfig::new(Nqn::discovery());
        discovery.allow_any_host = true;
        discovery.model_number = "Nacre discovery controller".to_string();
        let error_entries = usize::from(config.error_log_entries);
        let discovery_nqn = Mutex::new(config.discovery_nqn.clone().filter(|n| !n.is_discovery()));
        let generation = AtomicU64::new(config.discovery_generation);
        let max_connections = config.max_connections;
        Arc::new(Self {
            discovery_nqn,
            config,
            cores,
            subsystems: RwLock::new(BTreeMap::new()),
            discovery: Arc::new(Subsystem::new(
                discovery,
                SubsystemKind::Discovery,
                cores,
                error_entries,
            )),
            plugs: RwLock::new(Vec::new()),
            queue_limits: Mutex::new(BTreeMap::new()),
            groups: RwLock::new(Vec::new()),
            opening: Mutex::new(()),
            listeners: Mutex::new(Listeners {
                open: BTreeMap::new(),
                next: 1,
            }),
            referrals: Mutex::new(Vec::new()),
            shared: Shared::default(),
            automatic: Mutex::new(Vec::new()),
            generation,
            held: AtomicBool::new(false),
            expected: Arc::default(),
            withheld: AtomicU64::new(0),
            places: Places::new(max_connections),
            authentication,
        })
    }

    pub fn cores(&self) -> usize {
        self.cores
    }

    // Transports and groups.

    pub fn add_plug(&self, plug: Arc<dyn Plug>) -> Result<(), TargetError> {
        let mut plugs = self.plugs.write();
        if plugs.iter().any(|p| p.kind() == plug.kind()) {
            return Err(TargetError::TransportExists { kind: plug.kind() });
        }
        plug.hold(self.held.load(Ordering::Acquire));
        plugs.push(plug);
        drop(plugs);
        self.wake_groups();
        Ok(())
    }

    /// Holds back new connections while the daemon restores its state. Otherwise a host could be
    /// refused because a subsystem, permission or namespace is not restored yet, and never
    /// reconnect.
    pub fn hold(&self, held: bool) {
        // With the lock, so that a transport that is being added gets the value as well.
        let plugs = self.plugs.write();
        self.held.store(held, Ordering::Release);
        plugs.iter().for_each(|plug| plug.hold(held));
    }

    /// Until the returned value is dropped, a Connect to an unknown subsystem is refused without
    /// DNR, so that the host tries again. Linux gives up a controller after a refusal with DNR.
    pub fn expect_subsystems(&self) -> ExpectedSubsystems {
        self.expected.fetch_add(1, Ordering::AcqRel);
        ExpectedSubsystems(Arc::clone(&self.expected))
    }

    pub(crate) fn expects_subsystems(&self) -> bool {
        self.expected.load(Ordering::Acquire) > 0
    }

    pub fn plugs(&self) -> Vec<Arc<dyn Plug>> {
        self.plugs.read().clone()
    }

    pub fn plug(&self, kind: TransportType) -> Result<Arc<dyn Plug>, TargetError> {
        let plugs = self.plugs.read();
        plugs
            .iter()
            .find(|p| p.kind() == kind)
            .cloned()
            .ok_or(TargetError::NoTransport { kind })
    }

    /// Sets the queue limits of a transport. Call this before the transport is added, because
    /// controllers announce the limits.
    pub fn set_queue_limits(&self, kind: TransportType, limits: QueueLimits) {
        self.queue_limits.lock().insert(kind, limits);
    }

    /// The limits of a transport's queue pairs.
    pub fn queue_limits(&self, kind: TransportType) -> QueueLimits {
        let own = self.queue_limits.lock();
        own.get(&kind).copied().unwrap_or(self.config.queue_limits)
    }

    /// The registered groups, in the order of registration.
    pub fn groups(&self) -> Vec<GroupHandle> {
        self.groups.read().clone()
    }

    pub(crate) fn add_group(&self, group: GroupHandle) {
        self.groups.write().push(group);
    }

    /// Makes every core run its upkeep in its next turn: connections, and bdev queues with pending
    /// cleanup ([`nacre_bdev::Queue::is_settled`]).
    pub fn wake_groups(&self) {
        for group in self.groups.read().iter() {
            group.wake();
        }
    }

    // Subsystems.

    pub fn create_subsystem(&self, config: SubsystemConfig) -> Result<Arc<Subsystem>, TargetError> {
        check_config(&config)?;
        let mut subsystems = self.subsystems.write();
        let name = &config.nqn;
        if subsystems.contains_key(name) || name.is_discovery() {
            return Err(TargetError::SubsystemExists {
                nqn: name.to_string(),
            });
        }
        if self.unique_discovery_nqn().as_ref() == Some(name) {
            return Err(TargetError::DiscoveryName {
                nqn: name.to_string(),
            });
        }
        if subsystems.len() >= self.config.max_subsystems {
            return Err(TargetError::SubsystemsFull {
                max: self.config.max_subsystems,
            });
        }
        let error_entries = usize::from(self.config.error_log_entries);
        let subsystem = Arc::new(Subsystem::new(
            config,
            SubsystemKind::Nvm,
            self.cores,
            error_entries,
        ));
        subsystems.insert(subsystem.nqn().clone(), Arc::clone(&subsystem));
        Ok(subsystem)
    }

    /// Forgets the subsystem at once; its connections are closed by their cores. The caller may
    /// wait until [`Subsystem::controllers`] of the returned one is empty.
    pub fn delete_subsystem(&self, nqn: &Nqn) -> Result<Arc<Subsystem>, TargetError> {
        let removed = self.subsystems.write().remove(nqn);
        let subsystem = removed.ok_or_else(|| TargetError::NoSubsystem {
            nqn: nqn.to_string(),
        })?;
        subsystem.delete(Teardown::SubsystemDeleted);
        self.authentication.generated.forget(nqn, None);
        for listener in subsystem.listeners() {
            subsystem.remove_listener(listener.id);
            self.release_listener(listener.id);
            self.update_discovery_port(listener.transport, &listener.address);
        }
        self.discovery_changed();
        Ok(subsystem)
    }

    /// Finds a subsystem by its NQN. The discovery subsystem has its well-known NQN and, if
    /// configured, a unique one (Base 2.1, 3.1.3.3).
    pub fn subsystem(&self, nqn: &Nqn) -> Result<Arc<Subsystem>, TargetError> {
        if nqn.is_discovery() {
            return Ok(Arc::clone(&self.discovery));
        }
        let subsystems = self.subsystems.read();
        if let Some(found) = subsystems.get(nqn) {
            return Ok(Arc::clone(found));
        }
        if self.unique_discovery_nqn().as_ref() == Some(nqn) {
            return Ok(Arc::clone(&self.discovery));
        }
        Err(TargetError::NoSubsystem {
            nqn: nqn.to_string(),
        })
    }

    /// The NVM subsystems in the order of their names.
    pub fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        self.subsystems.read().values().cloned().collect()
    }

    pub fn discovery(&self) -> &Arc<Subsystem> {
        &self.discovery
    }

    /// Number of queues with an accepted Connect.
    pub fn connections(&self) -> usize {
        self.places.open()
    }

    /// Number of queues that must be authenticated and are not yet.
    pub fn unauthenticated_queues(&self) -> usize {
        self.places.unproven()
    }

    /// Controllers of all subsystems, the discovery subsystem's included.
    pub fn controller_count(&self) -> usize {
        let subsystems = self.subsystems();
        subsystems
            .iter()
            .chain([&self.discovery])
            .map(|s| s.controller_count())
            .sum()
    }

    /// Adds a namespace and returns its NSID. Refuses a UUID that another namespace of this target
    /// has.
    pub fn add_namespace(&self, nqn: &Nqn, config: NamespaceConfig) -> Result<u32, TargetError> {
        let subsystem = self.subsystem(nqn)?;
        for other in self.subsystems() {
            if let Some(nsid) = other.namespace_with(config.ids.uuid) {
                return Err(TargetError::Subsystem(SubsystemError::UuidTaken {
                    uuid: config.ids.uuid,
                    nqn: other.nqn().to_string(),
                    nsid,
                }));
            }
        }
        Ok(subsystem.add_namespace(config)?)
    }

    /// A connected host with access to a namespace on the bdev, as text. It relies on the announced
    /// size.
    pub fn host_of_bdev(&self, bdev_name: &str) -> Option<String> {
        let subsystems = self.subsystems();
        subsystems.iter().find_map(|s| s.host_of_bdev(bdev_name))
    }

    /// Notifies hosts that a bdev has changed its size.
    pub fn bdev_resized(&self, bdev_name: &str) {
        for subsystem in self.subsystems() {
            subsystem.bdev_resized(bdev_name);
        }
    }

    /// Removes the namespaces on a bdev that is being removed.
    pub fn bdev_removed(&self, bdev_name: &str) {
        for subsystem in self.subsystems() {
            subsystem.bdev_removed(bdev_name);
        }
    }

    // Hosts; the calls go through here because the discovery log lists for each host only the
    // subsystems that it may use.

    pub fn add_host(&self, nqn: &Nqn, host: &Nqn) -> Result<(), TargetError> {
        self.add_host_with(nqn, host, HostSecrets::default())
    }

    pub fn set_allow_any_host(&self, nqn: &Nqn, allow: bool) -> Result<(), TargetError> {
        self.subsystem(nqn)?.set_allow_any_host(allow);
        self.discovery_changed();
        Ok(())
    }

    // Listeners.

    /// Makes a subsystem reachable on an address; the address is opened for the first subsystem
    /// that uses it. Returns the address as bound (port 0 becomes a port).
    pub fn add_listener(
        &self,
        nqn: &Nqn,
        kind: TransportType,
        address: &Address,
    ) -> Result<Address, TargetError> {
        self.add_listener_with(nqn, kind, address, ListenOptions::default())
    }

    /// Adds a listener like [`Target::add_listener`], with options of its own.
    pub fn add_listener_with(
        &self,
        nqn: &Nqn,
        kind: TransportType,
        address: &Address,
        options: ListenOptions,
    ) -> Result<Address, TargetError> {
        let subsystem = self.subsystem(nqn)?;
        if subsystem.kind != SubsystemKind::Nvm {
            return self.open_listener(&subsystem, kind, address, options);
        }
        self.free_discovery_port(kind, address, options.listener.tls());
        let opened = self.open_listener(&subsystem, kind, address, options);
        self.update_discovery_port(kind, opened.as_ref().unwrap_or(address));
        opened
    }

    fn open_listener(
        &self,
        subsystem: &Subsystem,
        kind: TransportType,
        address: &Address,
        options: ListenOptions,
    ) -> Result<Address, TargetError> {
        subsystem.check_ana_states(&options.ana)?;
        let plug = self.plug(kind)?;
        let one_at_a_time = self.opening.lock();
        let opening = subsystem.opening();
        let found = find_listener(&self.listeners(), kind, address);
        let (id, bound) = match found {
            Some(id) => {
                let listeners = self.listeners();
                let (is, asked) = (listeners.open[&id].options.tls(), options.listener.tls());
                if is != asked {
                    return Err(TargetError::OtherTls {
                        address: address.to_string(),
                        is,
                    });
                }
                (id, listeners.open[&id].bound.clone())
            }
            None => {
                let id = ListenerId(self.listeners().next);
                // Not under the lock that cores take for each Connect: over RDMA this may register
                // all memory with a device.
                let bound = plug.listen(id, address, &options.listener)?;
                let listener = Listener {
                    kind,
                    bound: bound.clone(),
                    options: options.listener,
                    users: 0,
                    reported: Totals::default(),
                };
                let mut listeners = self.listeners();
                listeners.next += 1;
                listeners.open.insert(id, listener);
                (id, bound)
            }
        };
        let entry = SubsystemListener {
            id,
            transport: kind,
            address: bound.clone(),
            ana: options.ana,
            withheld: options.withheld,
            options: options.listener,
        };
        if let Err(error) = subsystem.add_listener(entry) {
            // It had this one, so the address stays in use.
            return Err(error.into());
        }
        self.listeners()
            .open
            .get_mut(&id)
            .expect("just found or made")
            .users += 1;
        drop((opening, one_at_a_time));
        self.discovery_changed();
        Ok(bound)
    }

    fn listeners(&self) -> MutexGuard<'_, Listeners> {
        self.listeners.lock()
    }

    fn automatic(&self) -> MutexGuard<'_, Vec<(TransportType, Address)>> {
        self.automatic.lock()
    }

    pub fn remove_listener(
        &self,
        nqn: &Nqn,
        kind: TransportType,
        address: &Address,
    ) -> Result<(), TargetError> {
        let subsystem = self.subsystem(nqn)?;
        let missing = || SubsystemError::NoListener {
            nqn: nqn.to_string(),
            address: address.to_string(),
        };
        let found = find_listener(&self.listeners(), kind, address);
        let id = found.ok_or_else(missing)?;
        if !subsystem.remove_listener(id) {
            return Err(missing().into());
        }
        if subsystem.kind == SubsystemKind::Discovery {
            // A later listener at this address is the administrator's.
            let mut automatic = self.automatic();
            automatic.retain(|(of, at)| (*of, at) != (kind, address));
        }
        self.release_listener(id);
        self.discovery_changed();
        if subsystem.kind == SubsystemKind::Nvm {
            self.update_discovery_port(kind, address);
        }
        Ok(())
    }

    /// Sets the ANA state of a group of namespaces, or of all, on a listener of a subsystem.
    /// Returns false if nothing changed.
    pub fn set_ana_state(
        &self,
        nqn: &Nqn,
        kind: TransportType,
        address: &Address,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<bool, TargetError> {
        let subsystem = self.subsystem(nqn)?;
        let same = |l: &SubsystemListener| l.transport == kind && l.address == *address;
        let listener = subsystem.listeners().into_iter().find(same);
        let listener = listener.ok_or_else(|| SubsystemError::NoListener {
            nqn: nqn.to_string(),
            address: address.to_string(),
        })?;
        Ok(subsystem.set_ana_state(listener.id, group, state)?)
    }

    /// Refuses hosts on a listener of a subsystem, or admits them there again. The listener stays,
    /// because a removed listener refuses hosts with DNR, and they do not reconnect.
    pub fn withhold(
        &self,
        nqn: &Nqn,
        kind: TransportType,
        address: &Address,
        why: Option<Withheld>,
    ) -> Result<(), TargetError> {
        if self.subsystem(nqn)?.withhold(kind, address, why)? {
            self.discovery_changed();
        }
        Ok(())
    }

    /// Connects refused because of [`SubsystemListener::withheld`].
    pub fn withheld_connects(&self) -> u64 {
        self.withheld.load(Ordering::Relaxed)
    }

    pub(crate) fn count_withheld(&self) {
        self.withheld.fetch_add(1, Ordering::Relaxed);
    }

    /// Stops listening and tears down every controller. The caller may wait until
    /// [`Target::controller_count`] is zero.
    pub fn stop(&self) {
        for subsystem in self.subsystems().iter().chain([&self.discovery]) {
            subsystem.delete(Teardown::TargetStopping);
            for listener in subsystem.listeners() {
                subsystem.remove_listener(listener.id);
                self.release_listener(listener.id);
            }
        }
    }
}

fn find_listener(
    listeners: &Listeners,
    kind: TransportType,
    address: &Address,
) -> Option<ListenerId> {
    let matches = |l: &Listener| l.kind == kind && l.bound == *address;
    listeners
        .open
        .iter()
        .find(|(_, l)| matches(l))
        .map(|(id, _)| *id)
}

fn check_config(config: &SubsystemConfig) -> Result<(), TargetError> {
    let text = |field: &'static str, value: &str, max: usize, expected: &'static str| {
        let printable = value.bytes().all(|b| (0x20..0x7f).contains(&b));
        if value.len() <= max && printable {
            return Ok(());
        }
        Err(TargetError::Invalid {
            field,
            value: value.to_string(),
            expected,
        })
    };
    text(
        "serial_number",
        &config.serial_number,
        20,
        "at most 20 printable ASCII characters",
    )?;
    text(
        "model_number",
        &config.model_number,
        40,
        "at most 40 printable ASCII characters",
    )?;
    if config.min_cntlid == 0
        || config.max_cntlid > MAX_CNTLID
        || config.min_cntlid > config.max_cntlid
    {
        let value = format!("{}..={}", config.min_cntlid, config.max_cntlid);
        const { assert!(MAX_CNTLID == 65_519, "the words below name it") };
        let expected = "min_cntlid..=max_cntlid within 1..=65519";
        return Err(TargetError::Invalid {
            field: "min_cntlid",
            value,
            expected,
        });
    }
    if config.max_namespaces == 0 || config.max_namespaces > 65_536 {
        let value = config.max_namespaces.to_string();
        return Err(TargetError::Invalid {
            field: "max_namespaces",
            value,
            expected: "1 to 65536",
        });
    }
    Ok(())
}

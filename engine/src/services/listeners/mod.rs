//! The listeners that the configuration file declares. They follow the machine's interfaces and
//! RDMA devices.
//!
//! ```text
//!   [[nvmf.listener]] ─┐
//!   interfaces, RDMA ──┼─▶ plan ──▶ wanted paths ──▶ reconcile ──▶ nvmf_subsystem_add_listener
//!   devices            │   (pure)                        │         nvmf_subsystem_remove_listener
//!        ▲             │                                 ▼
//!   Watch (rtnetlink) ─┴─ and every 5 s         PathStatus: requested and actual state, and why
//!                                               they differ: RPC, metric, event, log
//! ```
//!
//! Subsystems of the configuration file are served on these listeners, and so are volumes published
//! without addresses, and the volumes and exports of a cluster. Other subsystems listen where calls
//! say. All of this runs on the management thread, except for reading the machine's state, which
//! may block.

mod address_watch;
pub mod plan;
mod report;
mod status;
pub mod system;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_nvmf::address::{IpTransport, adrfam};
use nacre_nvmf::subsystems::Withheld;
use nacre_nvmf::transport::{Address, ListenerOptions, RdmaProviderType, TlsPolicy, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_transport_rdma_link::GidKind;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tracing::{debug, info, warn};

use self::address_watch::Watch;
use self::plan::{ListenerPlan, Path, PathProblem, Unmatched, plan};
use self::report::{changes, concern};
pub use self::status::{Actual, PathStatus};
use self::system::System;
use crate::config::listener::{Listener, RdmaSetting};
use crate::config::{ConfigError, Problem, Settings};
use crate::rpc::RpcError;
use crate::services::Engine;
use crate::services::failover::FailoverTests;
use crate::services::rdma::Verbs;
use crate::services::volumes::paths::admits;
use crate::services::volumes::published::Published;
use crate::values::address::ScopedIp;

/// Interval of checks without a notification: changes of unused RDMA devices are not announced.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The interval while a listener could not be added: an IPv6 address takes a second to become
/// usable.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between warnings that the machine's state cannot be read.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Identity of a path: the listener's name, the transport, the address and the port.
type PathId = (String, IpTransport, ScopedIp, u16);

/// Maximum number of remembered lost paths: an interface may get new addresses every day.
const MAX_LOST_PATHS: usize = 256;

/// Identity of a subsystem's listener: the NQN, the transport, the address and the port.
type ListenerKey = (String, IpTransport, ScopedIp, u16);

#[derive(Debug, Default)]
pub struct Listeners {
    pub failover_tests: FailoverTests,
    declared: RefCell<Vec<Listener>>,
    /// Listeners that were added here, with the parameters of the call.
    served: RefCell<BTreeMap<ListenerKey, Value>>,
    /// Errors of listeners that could not be added.
    refused: RefCell<BTreeMap<ListenerKey, RpcError>>,
    statuses: RefCell<Vec<PathStatus>>,
    unmatched: RefCell<Vec<Unmatched>>,
    /// Paths that were lost with their addresses, and whose loss was reported.
    away: RefCell<BTreeSet<PathId>>,
    /// Warnings about RDMA on these paths that were logged before.
    concerns: Rc<RefCell<BTreeSet<String>>>,
    /// Number of reads of the machine's state.
    checks: Cell<u64>,
    /// Time of the last warning, while the machine's state cannot be read.
    blind: Cell<Option<Instant>>,
    /// A task follows the changes of the machine.
    following: Cell<bool>,
    /// Serialises `reconcile`.
    making: Mutex<()>,
    /// Called after listeners were added or removed.
    after_reconcile: Cell<Option<fn(&Engine)>>,
}

impl Listeners {
    /// Opens the declared listeners. Fails where waiting would be wrong: a selector without a
    /// match, unavailable RDMA that is required, or an unreadable state of the machine.
    pub async fn start(&self, engine: &Rc<Engine>) -> Result<(), ConfigError> {
        let declared = engine.settings.listeners();
        if declared.is_empty() {
            Ok(())
        } else {
            self.declare(engine, declared).await
        }
    }

    /// Calls `work` after each [`Listeners::reconcile`]. A later call of this method replaces
    /// `work`.
    pub(super) fn after_reconcile(&self, work: fn(&Engine)) {
        self.after_reconcile.set(Some(work));
    }

    /// Replaces the declaration. A declaration that a start would refuse is an error and changes
    /// nothing.
    pub async fn declare(
        &self,
        engine: &Rc<Engine>,
        declared: Vec<Listener>,
    ) -> Result<(), ConfigError> {
        let plan = self
            .read_plan(engine, declared.clone())
            .await
            .map_err(unreadable)?;
        check(&plan)?;
        *self.declared.borrow_mut() = declared;
        self.reconcile(engine, plan).await;
        if !self.following.replace(true) {
            tokio::task::spawn_local(follow(Rc::clone(engine)));
        }
        Ok(())
    }

    /// Current state of every path. Includes listeners added or removed by RPC since the last read.
    pub fn statuses(&self, engine: &Engine) -> Vec<PathStatus> {
        let serving = serving(engine);
        let now = |status: PathStatus| {
            let subsystems = serving.get(&status.path.socket()).cloned();
            let actual = match status.actual {
                Actual::Idle if subsystems.is_some() => status.path.listening(engine),
                Actual::Listening if subsystems.is_none() => Actual::Idle,
                actual => actual,
            };
            PathStatus {
                actual,
                subsystems: subsystems.unwrap_or_default(),
                ..status
            }
        };
        self.statuses.borrow().iter().cloned().map(now).collect()
    }

    /// The TLS policy of a declared path.
    pub fn tls_of(&self, path: &Path) -> TlsPolicy {
        let declared = self.declared.borrow();
        let of = declared.iter().find(|one| one.name == path.listener);
        of.map_or(TlsPolicy::Off, |listener| listener.options.tls())
    }

    /// Selectors that match no interface at present.
    pub fn unmatched(&self) -> Vec<Unmatched> {
        self.unmatched.borrow().clone()
    }

    pub fn checks(&self) -> u64 {
        self.checks.get()
    }

    async fn read_plan(
        &self,
        engine: &Rc<Engine>,
        declared: Vec<Listener>,
    ) -> io::Result<ListenerPlan> {
        self.checks.set(self.checks.get() + 1);
        let verbs = engine.rdma.verbs.clone();
        let needed = engine.plane().map_or(0, |plane| {
            let config = engine.settings.rdma_transport();
            let cores = plane.target.cores();
            engine.rdma.memory_needed(&plane.arenas, cores, &config)
        });
        let read = tokio::task::spawn_blocking(move || planned(&declared, verbs, needed));
        read.await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Reads the machine's state and reconciles. If the state cannot be read, listeners stay open:
    /// closing them would disconnect hosts without need.
    async fn follow_once(&self, engine: &Rc<Engine>) {
        let declared = self.declared.borrow().clone();
        match self.read_plan(engine, declared.clone()).await {
            // A new declaration was applied meanwhile.
            Ok(_) if *self.declared.borrow() != declared => {}
            Ok(plan) => {
                if self.blind.take().is_some() {
                    info!("the machine's interfaces can be looked at again");
                }
                for (path, lack) in plan.missing_required() {
                    // A start would refuse this; connected hosts stay connected.
                    debug!("{} {}: required, and {lack}", path.listener, path.ip);
                }
                self.reconcile(engine, plan).await;
            }
            Err(error) => {
                let last = self.blind.get();
                if last.is_none_or(|last| last.elapsed() >= WARN_INTERVAL) {
                    self.blind.set(Some(Instant::now()));
                    warn!(%error, "the machine's interfaces cannot be looked at; listeners stay as they are");
                }
            }
        }
    }

    /// Reconciles at once, for example after a change of the subsystems to serve.
    pub async fn look_again(&self, engine: &Rc<Engine>) {
        if self.declared.borrow().is_empty() {
            return;
        }
        self.follow_once(engine).await;
    }

    /// Adds and removes listeners until they match the plan.
    async fn reconcile(&self, engine: &Rc<Engine>, plan: ListenerPlan) {
        let _one = self.making.lock().await;
        let published = crate::services::volumes::published::published(engine);
        let mut by_rpc = crate::services::declared::subsystems_of_rpc(engine);
        // Volumes served on the listeners of the file.
        for volume in published.iter().filter(|p| p.on_declared) {
            by_rpc.remove(&volume.nqn);
        }
        let mut wanted = self.wanted(engine, &plan, &by_rpc);
        wanted.extend(self.wanted_of_volumes(&plan, &published));
        wanted.extend(self.wanted_of_cluster(engine, &plan));
        let gone: Vec<ListenerKey> = {
            let served = self.served.borrow();
            let stale = served
                .iter()
                .filter(|(key, params)| wanted.get(*key) != Some(*params));
            stale.map(|(key, _)| key.clone()).collect()
        };
        for key in gone {
            let params = self.served.borrow_mut().remove(&key).unwrap_or_default();
            // RPC created this subsystem meanwhile; its listeners no longer follow the file.
            if by_rpc.contains(&key.0) {
                continue;
            }
            // Only `withheld` changed: the listener stays open.
            if let Some(new) = wanted.get(&key)
                && without_withheld(new) == without_withheld(&params)
                && withhold(engine, &key, new).await
            {
                self.served.borrow_mut().insert(key, new.clone());
                continue;
            }
            let params =
                json!({ "nqn": params["nqn"], "listen_address": params["listen_address"] });
            if let Err(error) = engine
                .declared_call("nvmf_subsystem_remove_listener", &params)
                .await
            {
                debug!(%error, ?key, "a listener was gone already");
            }
        }
        self.refused
            .borrow_mut()
            .retain(|key, _| wanted.contains_key(key));
        for (key, params) in wanted {
            if self.served.borrow().contains_key(&key) {
                continue;
            }
            match engine
                .declared_call("nvmf_subsystem_add_listener", &params)
                .await
            {
                Ok(_) => {
                    self.refused.borrow_mut().remove(&key);
                    self.served.borrow_mut().insert(key, params);
                }
                Err(error) => {
                    let news = self.refused.borrow_mut().insert(key.clone(), error.clone());
                    if news.is_none() {
                        let (nqn, transport, ip, port) = &key;
                        warn!(%error, "{nqn} does not listen on {} {ip} port {port}; it is tried again", transport.trtype());
                    }
                }
            }
        }
        if let Some(after_reconcile) = self.after_reconcile.get() {
            after_reconcile(engine);
        }
        self.update_statuses(engine, plan);
    }

    /// The calls of `nvmf_subsystem_add_listener` for subsystems of the configuration file.
    fn wanted(
        &self,
        engine: &Engine,
        plan: &ListenerPlan,
        by_rpc: &BTreeSet<String>,
    ) -> BTreeMap<ListenerKey, Value> {
        let declared = self.declared.borrow();
        let mut wanted = BTreeMap::new();
        for subsystem in &engine.settings.nvmf.subsystem {
            if by_rpc.contains(&subsystem.nqn) {
                continue;
            }
            for path in plan.paths.iter().filter(|p| p.verdict.is_ok()) {
                let named = &subsystem.listeners;
                if !named.is_empty() && !named.contains(&path.listener) {
                    continue;
                }
                let listener = declared.iter().find(|l| l.name == path.listener);
                let reports = subsystem.options.ana_reporting == Some(true);
                let ana = reports.then(|| path.ana.word());
                let params = call(&subsystem.nqn, ana, path, listener);
                wanted.insert(key(&subsystem.nqn, path), params);
            }
        }
        wanted
    }

    /// As [`Listeners::wanted`], for published volumes: every listener, withheld from hosts if the
    /// volume's policy excludes the transport.
    fn wanted_of_volumes(
        &self,
        plan: &ListenerPlan,
        published: &[Published],
    ) -> BTreeMap<ListenerKey, Value> {
        let declared = self.declared.borrow();
        let mut wanted = BTreeMap::new();
        for volume in published.iter().filter(|p| p.on_declared) {
            for path in plan.paths.iter().filter(|p| p.verdict.is_ok()) {
                let listener = declared.iter().find(|l| l.name == path.listener);
                let trtype = path.transport.trtype();
                let ana = volume.ana_state_of(trtype, path.ana).map(AnaState::word);
                let mut params = call(&volume.nqn, ana, path, listener);
                if volume.withheld(trtype).is_some() {
                    withhold_by_policy(&mut params);
                }
                wanted.insert(key(&volume.nqn, path), params);
            }
        }
        wanted
    }

    /// As [`Listeners::wanted`], for the subsystems of a node of a cluster: every listener. The
    /// listeners of volumes start as inaccessible (ANA), until the cluster sets their states.
    fn wanted_of_cluster(
        &self,
        engine: &Engine,
        plan: &ListenerPlan,
    ) -> BTreeMap<ListenerKey, Value> {
        let declared = self.declared.borrow();
        let cluster = &engine.cluster;
        let mut wanted = BTreeMap::new();
        for path in plan.paths.iter().filter(|p| p.verdict.is_ok()) {
            let listener = declared.iter().find(|l| l.name == path.listener);
            if let Some(nqn) = cluster.exports() {
                wanted.insert(key(&nqn, path), call(&nqn, None, path, listener));
            }
            for (nqn, volume) in cluster.shown() {
                let inaccessible = AnaState::Inaccessible.word();
                let mut params = call(&nqn, Some(inaccessible), path, listener);
                let listed = engine.volumes.find(&volume.to_string());
                let policy = listed.map_or_else(|_| Default::default(), |l| l.transport_policy());
                if !admits(policy, path.transport.trtype()) {
                    withhold_by_policy(&mut params);
                }
                wanted.insert(key(&nqn, path), params);
            }
        }
        wanted
    }

    /// Stores the state of every path, and reports changes as events and in the log.
    fn update_statuses(&self, engine: &Engine, plan: ListenerPlan) {
        let (serving, refused) = (serving(engine), self.refused.borrow());
        let stand = |path: Path| {
            let here = |p: &&ListenerKey| (p.1, &p.2, p.3) == (path.transport, &path.ip, path.port);
            let subsystems = serving.get(&path.socket()).cloned().unwrap_or_default();
            let failed = refused.iter().find(|(p, _)| here(p));
            let actual = match (&path.verdict, failed) {
                (Err(lack), _) => Actual::Not(lack.clone()),
                (Ok(_), _) if !subsystems.is_empty() => path.listening(engine),
                (Ok(_), Some((_, error))) => Actual::Not(refusal(error)),
                (Ok(_), None) => Actual::Idle,
            };
            PathStatus {
                path,
                actual,
                subsystems,
            }
        };
        let new: Vec<PathStatus> = plan.paths.into_iter().map(stand).collect();
        let old = self.statuses.replace(new.clone());
        changes(engine, &old, &new, &mut self.away.borrow_mut());
        let by_rdma = |all: &[PathStatus]| -> Vec<IpAddr> {
            let rdma = |s: &&PathStatus| s.path.transport == IpTransport::Rdma && s.is_listening();
            all.iter().filter(rdma).map(|s| s.path.ip.ip).collect()
        };
        let before = by_rdma(&old);
        let mut fresh = by_rdma(&new);
        fresh.retain(|ip| !before.contains(ip));
        if !fresh.is_empty() {
            let marking = crate::doctor::Marking {
                qos: engine.settings.qos.clone(),
                tos: engine.settings.rdma_transport().tos,
            };
            tokio::task::spawn_local(concern(Rc::clone(&self.concerns), fresh, marking));
        }
        let before = self.unmatched.replace(plan.unmatched.clone());
        for unmatched in plan.unmatched.iter().filter(|u| !before.contains(u)) {
            warn!("{unmatched}; it is listened on when it is there");
        }
    }
}

/// Returns the problems that prevent a start.
fn check(plan: &ListenerPlan) -> Result<(), ConfigError> {
    let unmatched = plan.unmatched.iter().map(|unmatched| {
        let listener = match unmatched {
            Unmatched::None { listener, .. } | Unmatched::Several { listener, .. } => listener,
        };
        let text = unmatched.to_string();
        let prefix = format!("listener \"{listener}\": ");
        let cause = text.strip_prefix(&prefix).unwrap_or(&text).to_owned();
        Problem::new(format!("listener \"{listener}\""), "nvmf.listener", cause)
    });
    let missing = plan.missing_required().map(|(path, lack)| {
        let cause = format!(
            "rdma = \"require\", and {} {} cannot be listened on over RDMA: {} ({})",
            path.iface, path.ip, lack.reason, lack.evidence
        );
        let remedy = format!("{}; or use rdma = \"prefer\"", lack.remedy);
        Problem::new(
            format!("listener \"{}\"", path.listener),
            "nvmf.listener",
            cause,
        )
        .remedy(remedy)
    });
    let problems: Vec<Problem> = unmatched.chain(missing).collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(ConfigError { problems })
    }
}

/// The machine's state, and the problems for which `nacre serve` would refuse its listeners.
pub fn check_here(settings: &Settings) -> io::Result<(System, Vec<Problem>)> {
    let system = System::read(Verbs::default(), 0)?;
    let plan = plan(&settings.listeners(), &system);
    // Planning loads libraries.
    system.verify()?;
    let refused = check(&plan).err();
    Ok((system, refused.map_or(Vec::new(), |error| error.problems)))
}

/// Plans the declaration for the machine's present state. May block: reads files.
fn planned(declared: &[Listener], verbs: Verbs, memory_needed: u64) -> io::Result<ListenerPlan> {
    let system = System::read(verbs, memory_needed)?;
    let plan = plan(declared, &system);
    // Planning loads libraries.
    system.verify()?;
    Ok(plan)
}

fn unreadable(error: io::Error) -> ConfigError {
    let cause = format!("the machine's interfaces cannot be looked at: {error}");
    Problem::new("listeners", "nvmf.listener", cause).into()
}

fn key(nqn: &str, path: &Path) -> ListenerKey {
    (nqn.to_owned(), path.transport, path.ip.clone(), path.port)
}

/// The call that adds a listener. `ana` is the ANA state that the listener reports, if any.
fn call(nqn: &str, ana: Option<&str>, path: &Path, listener: Option<&Listener>) -> Value {
    let mut params = json!({
        "nqn": nqn,
        "listen_address": {
            "trtype": path.transport.trtype(),
            "adrfam": adrfam(path.ip.ip),
            "traddr": path.ip.to_string(),
            "trsvcid": path.port.to_string(),
        },
    });
    if let Some(state) = ana.filter(|state| *state != "optimized") {
        params["ana_state"] = state.into();
    }
    if path.withheld {
        params["withheld"] = true.into();
        params["withheld_reason"] = "tcp_fallback".into();
    }
    let chosen = path.verdict.as_ref().ok().and_then(Option::as_ref);
    let fabric = chosen.map(|chosen| match chosen.gid_kind {
        GidKind::InfiniBand => RdmaProviderType::InfiniBand,
        GidKind::RoceV1 => RdmaProviderType::RoceV1,
        GidKind::RoceV2 => RdmaProviderType::RoceV2,
        GidKind::Iwarp => RdmaProviderType::Iwarp,
    });
    let mut options = listener.map_or_else(ListenerOptions::default, Listener::options);
    options.fabric = fabric.map(|found| options.fabric.unwrap_or(found));
    if options != ListenerOptions::default() {
        params["options"] = json!(options);
    }
    params
}

/// Marks a listener as withheld from hosts, because the volume's policy excludes its transport.
fn withhold_by_policy(params: &mut Value) {
    params["withheld"] = true.into();
    params["withheld_reason"] = "transport_policy".into();
}

fn without_withheld(params: &Value) -> Value {
    let mut params = params.clone();
    if let Some(fields) = params.as_object_mut() {
        fields.remove("withheld");
        fields.remove("withheld_reason");
    }
    params
}

/// Applies the withheld fields of `params` to the open listener. Returns false on failure.
async fn withhold(engine: &Engine, key: &ListenerKey, params: &Value) -> bool {
    let (nqn, transport, ip, port) = key;
    let kind = TransportType::from(*transport);
    let why = match (&params["withheld"], params["withheld_reason"].as_str()) {
        (Value::Bool(true), Some("transport_policy")) => Some(Withheld::TransportPolicy),
        (Value::Bool(true), _) => Some(Withheld::TcpFallback),
        _ => None,
    };
    let (Ok(nqn), Ok(address)) = (Nqn::new(nqn), ip.socket(*port)) else {
        return false;
    };
    let address = Address::Ip(address);
    let work = crate::services::subsystems::withhold(engine, &nqn, kind, &address, why);
    match crate::journal::declaring(work).await {
        Ok(()) => true,
        Err(error) => {
            debug!(%error, ?key, "a listener that went cannot be withheld");
            false
        }
    }
}

/// A transport and an address.
type Socket = (IpTransport, SocketAddr);

/// The subsystems on every open address, from the file and from RPC.
fn serving(engine: &Engine) -> BTreeMap<Socket, Vec<String>> {
    let mut serving = BTreeMap::<Socket, Vec<String>>::new();
    let subsystems = engine.plane().map(|plane| plane.target.subsystems());
    for subsystem in subsystems.unwrap_or_default() {
        for listener in subsystem.listeners() {
            let transport = match listener.transport {
                TransportType::Tcp => IpTransport::Tcp,
                TransportType::Rdma => IpTransport::Rdma,
                TransportType::Loopback => continue,
            };
            if let Address::Ip(address) = listener.address {
                let served = serving.entry((transport, address)).or_default();
                served.push(subsystem.nqn().to_string());
            }
        }
    }
    serving
}

impl Path {
    /// The socket address; without its scope if the interface is gone, so that no listener matches.
    pub fn address(&self) -> SocketAddr {
        let scoped = self.ip.socket(self.port);
        scoped.unwrap_or_else(|_| SocketAddr::new(self.ip.ip, self.port))
    }

    fn socket(&self) -> Socket {
        (self.transport, self.address())
    }

    /// Actual state of a path that a subsystem listens on.
    fn listening(&self, engine: &Engine) -> Actual {
        match self.socket() {
            (IpTransport::Rdma, address) => of_rdma(engine, address),
            (IpTransport::Tcp, _) => Actual::Listening,
        }
    }
}

/// Actual state of an added RDMA listener. Not listening if its device was removed or failed.
pub fn of_rdma(engine: &Engine, address: SocketAddr) -> Actual {
    let plug = engine.rdma.plug();
    match plug.and_then(|plug| plug.is_listening(address)) {
        Some(false) => Actual::Not(PathProblem {
            reason: "no_rdma_dev",
            evidence: "its RDMA device was removed or failed".into(),
            remedy: "it is listened on again when the device is back; `nacre rdma link` shows those there are".into(),
        }),
        Some(true) | None => Actual::Listening,
    }
}

/// Reason of a failure to listen on a usable address.
fn refusal(error: &RpcError) -> PathProblem {
    let again = || "it is tried again by itself".to_owned();
    let (evidence, remedy) = match &error.data {
        Some(facts) => (facts.cause.clone(), facts.remedy.clone()),
        None => (error.message.clone(), None),
    };
    PathProblem {
        reason: "refused",
        evidence,
        remedy: remedy.unwrap_or_else(again),
    }
}

/// Reconciles after notifications and at every interval.
async fn follow(engine: Rc<Engine>) {
    let watch = match Watch::open() {
        Ok(watch) => Some(watch),
        Err(error) => {
            warn!(%error, "cannot subscribe to changes of interfaces; polling every {POLL_INTERVAL:?}");
            None
        }
    };
    loop {
        let listeners = &engine.listeners;
        let pause = if listeners.refused.borrow().is_empty() {
            POLL_INTERVAL
        } else {
            RETRY_INTERVAL
        };
        let notified = async {
            tokio::select! {
                changed = async {
                    match &watch {
                        Some(watch) => watch.changed().await,
                        None => std::future::pending().await,
                    }
                } => changed,
                () = engine.rdma.changed() => Ok(()),
            }
        };
        if let Ok(Err(error)) = tokio::time::timeout(pause, notified).await {
            warn!(%error, "the subscription to changes of interfaces ended");
            tokio::time::sleep(pause).await;
        }
        if engine.lifecycle.phase() >= crate::services::lifecycle::Phase::Stopping
            || engine.plane().is_err()
        {
            return;
        }
        listeners.follow_once(&engine).await;
    }
}

/// The name of the requested state in replies.
pub fn wanted(path: &Path) -> &'static str {
    match (path.setting, path.withheld) {
        (_, true) => "withheld",
        (None, _) => "listen",
        (Some(RdmaSetting::Require), _) => "require",
        (Some(RdmaSetting::Prefer | RdmaSetting::Off), _) => "prefer",
    }
}

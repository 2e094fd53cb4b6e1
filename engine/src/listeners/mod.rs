//! The listeners that the configuration file declares, kept true while the machine changes.
//!
//! ```text
//!   [[nvmf.listener]] ─┐
//!   interfaces, RDMA ──┼─▶ plan ──▶ what is wanted ──▶ reconcile ──▶ nvmf_subsystem_add_listener
//!   devices            │   (pure)                          │         nvmf_subsystem_remove_listener
//!        ▲             │                                   ▼
//!   Watch (rtnetlink) ─┴─ and every few seconds        Standing: what is wanted, what is, and why:
//!                                                      RPC, metric, event, log
//! ```
//!
//! Subsystems of the file are served on the file's listeners, and so are volumes that were published
//! without saying where; those configured by RPC listen where RPC says. Everything here runs on the management thread; reading the machine, which may
//! block, does not.

pub mod plan;
mod report;
pub mod system;
mod watch;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_nvmf::subsystems::Withheld;
use nacre_nvmf::transport::{Address, TransportType};
use nacre_nvmf_wire::Nqn;
use nacre_rdma_link::GidKind;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tracing::{debug, info, warn};

use self::plan::{Lack, Path, Plan, Unmatched, plan};
use self::report::{changes, concern};
use self::system::System;
use self::watch::Watch;
use crate::config::listener::{Listener, RdmaWish, Transport};
use crate::config::{ConfigError, Problem, Settings};
use crate::engine::Engine;
use crate::methods::nvmf::AnaWord;
use crate::methods::volume::Published;
use crate::rdma::Verbs;
use crate::rpc::RpcError;
use crate::values::address::ScopedIp;

/// How often the machine is looked at without being told of a change: RDMA devices that nothing uses yet change
/// unheard.
const LOOK: Duration = Duration::from_secs(5);
/// The same while something could not be done: an IPv6 address takes a second to become usable.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How often it is said that the machine cannot be looked at.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// Where a path stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actual {
    Listening,
    /// It could be listened on; no subsystem asks for it.
    Idle,
    Not(Lack),
}

impl Actual {
    /// For answers and metrics.
    pub fn word(&self) -> &'static str {
        match self {
            Actual::Listening => "listening",
            Actual::Idle => "idle",
            Actual::Not(_) => "absent",
        }
    }

    pub fn reason(&self) -> &'static str {
        match self {
            Actual::Listening => "",
            Actual::Idle => "no_subsystem",
            Actual::Not(lack) => lack.reason,
        }
    }
}

/// One path, what was wanted of it and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub path: Path,
    pub actual: Actual,
    /// The subsystems that are served there.
    pub subsystems: Vec<String>,
}

/// A path that listeners may have: the listener's name, the transport, the address and the port.
type Way = (String, Transport, ScopedIp, u16);

/// Ways whose loss is remembered until they are back: an interface may have other addresses every day.
const AWAY: usize = 256;

/// A place where a subsystem is to be served.
type Place = (String, Transport, ScopedIp, u16);

#[derive(Debug, Default)]
pub struct Listeners {
    declared: RefCell<Vec<Listener>>,
    /// What was added for the file, with the parameters of the call.
    served: RefCell<BTreeMap<Place, Value>>,
    /// Why what is wanted could not be added.
    refused: RefCell<BTreeMap<Place, RpcError>>,
    standings: RefCell<Vec<Standing>>,
    unmatched: RefCell<Vec<Unmatched>>,
    /// Ways that went with their addresses, which was told.
    away: RefCell<BTreeSet<Way>>,
    /// What was said against RDMA where it is listened on: each is said once.
    concerns: Rc<RefCell<BTreeSet<String>>>,
    /// Times that the machine was looked at.
    looks: Cell<u64>,
    /// When it was said that the machine cannot be looked at, while it cannot.
    blind: Cell<Option<Instant>>,
    /// A task follows the changes of the machine.
    following: Cell<bool>,
    /// One at a time makes it so.
    making: Mutex<()>,
}

impl Listeners {
    /// Listens on what is there. Fails where waiting would be wrong: a selector that matches nothing,
    /// RDMA that is required and cannot be had, and a machine that cannot be looked at.
    pub async fn start(&self, on: &Rc<Engine>) -> Result<(), ConfigError> {
        let declared = on.settings.listeners();
        if declared.is_empty() {
            Ok(())
        } else {
            self.declare(on, declared).await
        }
    }

    /// Takes a new declaration over; one that a start would refuse changes nothing.
    pub async fn declare(
        &self,
        on: &Rc<Engine>,
        declared: Vec<Listener>,
    ) -> Result<(), ConfigError> {
        let plan = self.look(on, declared.clone()).await.map_err(unseen)?;
        check(&plan)?;
        *self.declared.borrow_mut() = declared;
        self.reconcile(on, plan).await;
        if !self.following.replace(true) {
            tokio::task::spawn_local(follow(Rc::clone(on)));
        }
        Ok(())
    }

    /// Where every path stands now. RPC may have added or removed listeners since the last look.
    pub fn standings(&self, on: &Engine) -> Vec<Standing> {
        let serving = serving(on);
        let now = |standing: Standing| {
            let subsystems = serving.get(&standing.path.place()).cloned();
            let actual = match standing.actual {
                Actual::Idle if subsystems.is_some() => standing.path.listening(on),
                Actual::Listening if subsystems.is_none() => Actual::Idle,
                actual => actual,
            };
            Standing {
                actual,
                subsystems: subsystems.unwrap_or_default(),
                ..standing
            }
        };
        self.standings.borrow().iter().cloned().map(now).collect()
    }

    /// Selectors that match nothing now.
    pub fn unmatched(&self) -> Vec<Unmatched> {
        self.unmatched.borrow().clone()
    }

    pub fn looks(&self) -> u64 {
        self.looks.get()
    }

    async fn look(&self, on: &Rc<Engine>, declared: Vec<Listener>) -> io::Result<Plan> {
        self.looks.set(self.looks.get() + 1);
        let verbs = on.rdma.verbs.clone();
        let needed = on.plane().map_or(0, |plane| {
            let config = on.settings.rdma_transport();
            let cores = plane.target.cores();
            on.rdma.memory_needed(&plane.arenas, cores, &config)
        });
        let read = tokio::task::spawn_blocking(move || planned(&declared, verbs, needed));
        read.await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Looks, and makes it so. What is served stays while the machine cannot be looked at: to withdraw it would
    /// send hosts away from where they are served well.
    async fn follow_once(&self, on: &Rc<Engine>) {
        let declared = self.declared.borrow().clone();
        match self.look(on, declared.clone()).await {
            // Declared anew meanwhile, and carried out.
            Ok(_) if *self.declared.borrow() != declared => {}
            Ok(plan) => {
                if self.blind.take().is_some() {
                    info!("the machine's interfaces can be looked at again");
                }
                for (path, lack) in plan.required_in_vain() {
                    // A start with it would be refused; those who are connected are not sent away for it.
                    debug!("{} {}: required, and {lack}", path.listener, path.ip);
                }
                self.reconcile(on, plan).await;
            }
            Err(error) => {
                let said = self.blind.get();
                if said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
                    self.blind.set(Some(Instant::now()));
                    warn!(%error, "the machine's interfaces cannot be looked at; listeners stay as they are");
                }
            }
        }
    }

    /// Looks at once: what is to be served has changed.
    pub async fn look_again(&self, on: &Rc<Engine>) {
        if self.declared.borrow().is_empty() {
            return;
        }
        self.follow_once(on).await;
    }

    /// Makes what is there what is planned.
    async fn reconcile(&self, on: &Rc<Engine>, plan: Plan) {
        let _one = self.making.lock().await;
        let published = crate::methods::volume::published(on);
        let mut by_rpc = crate::declared::subsystems_of_rpc(on);
        // Volumes that are to be served wherever the file says.
        for volume in published.iter().filter(|p| p.on_declared) {
            by_rpc.remove(&volume.nqn);
        }
        let mut wanted = self.wanted(on, &plan, &by_rpc);
        wanted.extend(self.wanted_of_volumes(&plan, &published));
        let gone: Vec<Place> = {
            let served = self.served.borrow();
            let stale = served
                .iter()
                .filter(|(place, params)| wanted.get(*place) != Some(*params));
            stale.map(|(place, _)| place.clone()).collect()
        };
        for place in gone {
            let params = self.served.borrow_mut().remove(&place).unwrap_or_default();
            // Made anew by RPC meanwhile: where it listens is no business of the file any more.
            if by_rpc.contains(&place.0) {
                continue;
            }
            // Only who is admitted has changed: the listener stays open.
            if let Some(new) = wanted.get(&place)
                && without_withheld(new) == without_withheld(&params)
                && withhold(on, &place, new).await
            {
                self.served.borrow_mut().insert(place, new.clone());
                continue;
            }
            let params =
                json!({ "nqn": params["nqn"], "listen_address": params["listen_address"] });
            if let Err(error) = on
                .declared_call("nvmf_subsystem_remove_listener", &params)
                .await
            {
                debug!(%error, ?place, "a listener was gone already");
            }
        }
        self.refused
            .borrow_mut()
            .retain(|place, _| wanted.contains_key(place));
        for (place, params) in wanted {
            if self.served.borrow().contains_key(&place) {
                continue;
            }
            match on
                .declared_call("nvmf_subsystem_add_listener", &params)
                .await
            {
                Ok(_) => {
                    self.refused.borrow_mut().remove(&place);
                    self.served.borrow_mut().insert(place, params);
                }
                Err(error) => {
                    let news = self
                        .refused
                        .borrow_mut()
                        .insert(place.clone(), error.clone());
                    if news.is_none() {
                        let (nqn, transport, ip, port) = &place;
                        warn!(%error, "{nqn} does not listen on {} {ip} port {port}; it is tried again", transport.trtype());
                    }
                }
            }
        }
        self.tell(on, plan);
    }

    /// The calls that the paths amount to, by place.
    fn wanted(
        &self,
        on: &Engine,
        plan: &Plan,
        by_rpc: &BTreeSet<String>,
    ) -> BTreeMap<Place, Value> {
        let declared = self.declared.borrow();
        let mut wanted = BTreeMap::new();
        for subsystem in &on.settings.nvmf.subsystem {
            if by_rpc.contains(&subsystem.nqn) {
                continue;
            }
            for path in plan.paths.iter().filter(|p| p.verdict.is_ok()) {
                let named = &subsystem.listeners;
                if !named.is_empty() && !named.contains(&path.listener) {
                    continue;
                }
                let listener = declared.iter().find(|l| l.name == path.listener);
                let ana = subsystem.ana_reporting.then(|| path.ana.word().to_owned());
                let params = call(&subsystem.nqn, ana, path, listener);
                wanted.insert(place(&subsystem.nqn, path), params);
            }
        }
        wanted
    }

    /// As [`Listeners::wanted`], for published volumes: on every listener, and withheld from those whose
    /// transport the volume's policy does not admit.
    fn wanted_of_volumes(&self, plan: &Plan, published: &[Published]) -> BTreeMap<Place, Value> {
        let declared = self.declared.borrow();
        let mut wanted = BTreeMap::new();
        for volume in published.iter().filter(|p| p.on_declared) {
            for path in plan.paths.iter().filter(|p| p.verdict.is_ok()) {
                let listener = declared.iter().find(|l| l.name == path.listener);
                let trtype = path.transport.trtype();
                let ana = volume.ana_state_of(trtype, path.ana).map(AnaWord::word);
                let mut params = call(&volume.nqn, ana, path, listener);
                if volume.withheld(trtype).is_some() {
                    params["withheld"] = true.into();
                    params["withheld_reason"] = "transport_policy".into();
                }
                wanted.insert(place(&volume.nqn, path), params);
            }
        }
        wanted
    }

    /// Notes where every path stands, and tells of what changed.
    fn tell(&self, on: &Engine, plan: Plan) {
        let (serving, refused) = (serving(on), self.refused.borrow());
        let stand = |path: Path| {
            let here = |p: &&Place| (p.1, &p.2, p.3) == (path.transport, &path.ip, path.port);
            let subsystems = serving.get(&path.place()).cloned().unwrap_or_default();
            let failed = refused.iter().find(|(p, _)| here(p));
            let actual = match (&path.verdict, failed) {
                (Err(lack), _) => Actual::Not(lack.clone()),
                (Ok(_), _) if !subsystems.is_empty() => path.listening(on),
                (Ok(_), Some((_, error))) => Actual::Not(refusal(error)),
                (Ok(_), None) => Actual::Idle,
            };
            Standing {
                path,
                actual,
                subsystems,
            }
        };
        let new: Vec<Standing> = plan.paths.into_iter().map(stand).collect();
        let old = self.standings.replace(new.clone());
        changes(on, &old, &new, &mut self.away.borrow_mut());
        let by_rdma = |all: &[Standing]| -> Vec<IpAddr> {
            let rdma = |s: &&Standing| {
                s.path.transport == Transport::Rdma && s.actual == Actual::Listening
            };
            all.iter().filter(rdma).map(|s| s.path.ip.ip).collect()
        };
        let before = by_rdma(&old);
        let mut fresh = by_rdma(&new);
        fresh.retain(|ip| !before.contains(ip));
        if !fresh.is_empty() {
            tokio::task::spawn_local(concern(Rc::clone(&self.concerns), fresh));
        }
        let before = self.unmatched.replace(plan.unmatched.clone());
        for unmatched in plan.unmatched.iter().filter(|u| !before.contains(u)) {
            warn!("{unmatched}; it is listened on when it is there");
        }
    }
}

/// What must not be started with.
fn check(plan: &Plan) -> Result<(), ConfigError> {
    let unmatched = plan.unmatched.iter().map(|unmatched| {
        let listener = match unmatched {
            Unmatched::None { listener, .. } | Unmatched::Several { listener, .. } => listener,
        };
        let text = unmatched.to_string();
        let prefix = format!("listener \"{listener}\": ");
        let cause = text.strip_prefix(&prefix).unwrap_or(&text).to_owned();
        Problem::new(format!("listener \"{listener}\""), "nvmf.listener", cause)
    });
    let in_vain = plan.required_in_vain().map(|(path, lack)| {
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
    let problems: Vec<Problem> = unmatched.chain(in_vain).collect();
    if problems.is_empty() {
        Ok(())
    } else {
        Err(ConfigError { problems })
    }
}

/// The machine, and what `nacre serve` would refuse of the listeners there.
pub fn check_here(settings: &Settings) -> io::Result<(System, Vec<Problem>)> {
    let system = System::read(Verbs::default(), 0)?;
    let plan = plan(&settings.listeners(), &system);
    // Libraries are looked for while it is made.
    system.verify()?;
    let refused = check(&plan).err();
    Ok((system, refused.map_or(Vec::new(), |error| error.problems)))
}

/// What the machine as it is now makes of the declaration. Reads files: for a thread that may block.
fn planned(declared: &[Listener], verbs: Verbs, memory_needed: u64) -> io::Result<Plan> {
    let system = System::read(verbs, memory_needed)?;
    let plan = plan(declared, &system);
    // Libraries are looked for while it is made.
    system.verify()?;
    Ok(plan)
}

fn unseen(error: io::Error) -> ConfigError {
    let cause = format!("the machine's interfaces cannot be looked at: {error}");
    Problem::new("listeners", "nvmf.listener", cause).into()
}

fn place(nqn: &str, path: &Path) -> Place {
    (nqn.to_owned(), path.transport, path.ip.clone(), path.port)
}

/// `ana`: the state that the listener reports to hosts, if any.
fn call(nqn: &str, ana: Option<String>, path: &Path, listener: Option<&Listener>) -> Value {
    let family = if path.ip.ip.is_ipv4() { "IPv4" } else { "IPv6" };
    let mut params = json!({
        "nqn": nqn,
        "listen_address": {
            "trtype": path.transport.trtype(),
            "adrfam": family,
            "traddr": path.ip.to_string(),
            "trsvcid": path.port.to_string(),
        },
    });
    if let Some(state) = ana.filter(|state| state != "optimized") {
        params["ana_state"] = state.into();
    }
    if path.withheld {
        params["withheld"] = true.into();
        params["withheld_reason"] = "tcp_fallback".into();
    }
    if let Ok(Some(chosen)) = &path.verdict {
        params["options"]["fabric"] = match chosen.gid_kind {
            GidKind::InfiniBand => "infiniband",
            GidKind::RoceV1 => "roce",
            GidKind::RoceV2 => "roce_v2",
            GidKind::Iwarp => "iwarp",
        }
        .into();
    }
    let Some(listener) = listener else {
        return params;
    };
    let options = [
        (
            "in_capsule_data_size",
            listener.in_capsule_data_size.map(u64::from),
        ),
        ("max_queue_depth", listener.max_queue_depth.map(u64::from)),
        ("tos", listener.tos.map(u64::from)),
    ];
    for (name, value) in options {
        if let Some(value) = value {
            params["options"][name] = value.into();
        }
    }
    params
}

fn without_withheld(params: &Value) -> Value {
    let mut params = params.clone();
    if let Some(fields) = params.as_object_mut() {
        fields.remove("withheld");
        fields.remove("withheld_reason");
    }
    params
}

/// Whether hosts are admitted by a listener as `params` say, from now on.
async fn withhold(on: &Engine, place: &Place, params: &Value) -> bool {
    let (nqn, transport, ip, port) = place;
    let kind = match transport {
        Transport::Tcp => TransportType::Tcp,
        Transport::Rdma => TransportType::Rdma,
    };
    let why = match (&params["withheld"], params["withheld_reason"].as_str()) {
        (Value::Bool(true), Some("transport_policy")) => Some(Withheld::TransportPolicy),
        (Value::Bool(true), _) => Some(Withheld::TcpFallback),
        _ => None,
    };
    let (Ok(nqn), Ok(address)) = (Nqn::new(nqn), ip.socket(*port)) else {
        return false;
    };
    let address = Address::Ip(address);
    let work = crate::methods::nvmf::withhold(on, &nqn, kind, &address, why);
    match crate::journal::declaring(work).await {
        Ok(()) => true,
        Err(error) => {
            debug!(%error, ?place, "a listener that went cannot be withheld");
            false
        }
    }
}

/// A transport and an address.
type Socket = (Transport, SocketAddr);

/// The subsystems on every open address, from the file and from RPC.
fn serving(on: &Engine) -> BTreeMap<Socket, Vec<String>> {
    let mut serving = BTreeMap::<Socket, Vec<String>>::new();
    let subsystems = on.plane().map(|plane| plane.target.subsystems());
    for subsystem in subsystems.unwrap_or_default() {
        for listener in subsystem.listeners() {
            let transport = match listener.transport {
                TransportType::Tcp => Transport::Tcp,
                TransportType::Rdma => Transport::Rdma,
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
    /// Without its interface if that has gone: nothing listens there then.
    pub fn address(&self) -> SocketAddr {
        let scoped = self.ip.socket(self.port);
        scoped.unwrap_or_else(|_| SocketAddr::new(self.ip.ip, self.port))
    }

    fn place(&self) -> Socket {
        (self.transport, self.address())
    }

    /// Where a path stands on which a subsystem listens.
    fn listening(&self, on: &Engine) -> Actual {
        match self.place() {
            (Transport::Rdma, address) => of_rdma(on, address),
            (Transport::Tcp, _) => Actual::Listening,
        }
    }
}

/// Where a listener over RDMA stands that was added: it is there, and its device may not be.
pub fn of_rdma(on: &Engine, address: SocketAddr) -> Actual {
    let plug = on.rdma.plug();
    match plug.and_then(|plug| plug.is_listening(address)) {
        Some(false) => Actual::Not(Lack {
            reason: "no_rdma_dev",
            evidence: "its RDMA device was removed or failed".into(),
            remedy: "it is listened on again when the device is back; `nacre rdma link` shows those there are".into(),
        }),
        Some(true) | None => Actual::Listening,
    }
}

/// Why an address that seemed good was refused.
fn refusal(error: &RpcError) -> Lack {
    let again = || "it is tried again by itself".to_owned();
    let (evidence, remedy) = match &error.data {
        Some(facts) => (facts.cause.clone(), facts.remedy.clone()),
        None => (error.message.clone(), None),
    };
    Lack {
        reason: "refused",
        evidence,
        remedy: remedy.unwrap_or_else(again),
    }
}

/// Looks at the machine when it changed, and now and then.
async fn follow(on: Rc<Engine>) {
    let watch = match Watch::open() {
        Ok(watch) => Some(watch),
        Err(error) => {
            warn!(%error, "cannot subscribe to changes of interfaces; polling every {LOOK:?}");
            None
        }
    };
    loop {
        let listeners = &on.listeners;
        let pause = if listeners.refused.borrow().is_empty() {
            LOOK
        } else {
            LOOK_AGAIN
        };
        let told = async {
            tokio::select! {
                changed = async {
                    match &watch {
                        Some(watch) => watch.changed().await,
                        None => std::future::pending().await,
                    }
                } => changed,
                () = on.rdma.changed() => Ok(()),
            }
        };
        if let Ok(Err(error)) = tokio::time::timeout(pause, told).await {
            warn!(%error, "the subscription to changes of interfaces ended");
            tokio::time::sleep(pause).await;
        }
        if on.phase() >= crate::engine::Phase::Stopping || on.plane().is_err() {
            return;
        }
        listeners.follow_once(&on).await;
    }
}

/// In words, for answers.
pub fn wanted(path: &Path) -> &'static str {
    match (path.wish, path.withheld) {
        (_, true) => "withheld",
        (None, _) => "listen",
        (Some(RdmaWish::Require), _) => "require",
        (Some(RdmaWish::Prefer | RdmaWish::Off), _) => "prefer",
    }
}

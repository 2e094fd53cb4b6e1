//! `bdev_nvme_*_discovery`: attaches the subsystems that a discovery service lists, and follows it.
//!
//! ```text
//!   follow   DiscoveryWatch ── the log changed ──▶ apply: attaches new paths, detaches those gone
//!   (a task of each service)                       (holds the lock of changes)
//! ```
//!
//! A service is one journal record, `nvme/discovery/<name>`, with the names of its controllers. The
//! controllers have no records: they follow from the service. While the service cannot be reached,
//! they stay.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_nvmf::address::adrfam;
use nacre_nvmf::host::{ControllerState, DiscoveryWatch};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, subtype};
use nacre_reactor::Clock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::{CONNECT_TIMEOUT, first_connection, joins, undo_path};
use crate::journal::is_replaying;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::engine::Engine;
use crate::services::nvme::options::Options;
use crate::services::nvme::{self, AttachParams, Multipath, discovery_key};
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};
use crate::services::remotes::{self, RemotePath, RemotePlan};
use crate::store::{Change, Edit};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<StartDiscovery>()
        .add::<StopDiscovery>()
        .add::<GetDiscoveryInfo>();
}

/// The port of a discovery service, unless set.
const PORT: &str = "8009";
/// Interval at which an idle service is polled for events.
const IDLE: Duration = Duration::from_millis(20);
/// The same while a connection is made, or a log read.
const ACTIVE: Duration = Duration::from_millis(1);
/// Pause before a service that refused this host is asked again.
const AGAIN: Duration = Duration::from_secs(5);

struct StartDiscovery;

#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StartDiscoveryParams {
    /// Name of the service. Its controllers are named with a number appended.
    name: String,
    /// `TCP` or `RDMA`.
    trtype: String,
    /// An IP address or a host name.
    traddr: String,
    /// `IPv4` or `IPv6`; default: derived from the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adrfam: Option<String>,
    /// The port; default 8009.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trsvcid: Option<String>,
    /// Default: this host's NQN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hostnqn: Option<String>,
    /// Answer after all listed subsystems are attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wait_for_attach: Option<bool>,
    /// How long to wait for that; the service is stopped then. 0, the default: 20 s with
    /// `wait_for_attach`, else no wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attach_timeout_ms: Option<u64>,
    /// This and the next two are parameters of the controllers; see `bdev_nvme_attach_controller`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ctrlr_loss_timeout_sec: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reconnect_delay_sec: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fast_io_fail_timeout_sec: Option<u64>,
    /// Nacre extension: names of controllers by the NQN of their subsystem. The daemon adds those
    /// that it chooses, so that they stay the same after a restart.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    controllers: BTreeMap<String, String>,
}

impl StartDiscoveryParams {
    /// The parameters of the connection to the service itself.
    fn own(&self) -> AttachParams {
        AttachParams {
            name: self.name.clone(),
            trtype: self.trtype.clone(),
            traddr: self.traddr.clone(),
            adrfam: self.adrfam.clone(),
            trsvcid: self.trsvcid.clone().or_else(|| Some(PORT.to_owned())),
            subnqn: Some(Nqn::discovery().to_string()),
            hostnqn: self.hostnqn.clone(),
            ..AttachParams::default()
        }
    }

    /// The parameters of a listed path.
    fn listed(&self, name: &str, place: &SubsystemAddress) -> AttachParams {
        AttachParams {
            name: name.to_owned(),
            trtype: place.trtype.to_owned(),
            traddr: place.traddr.clone(),
            trsvcid: Some(place.trsvcid.clone()),
            subnqn: Some(place.subnqn.clone()),
            hostnqn: self.hostnqn.clone(),
            multipath: Some(Multipath::Active),
            ctrlr_loss_timeout_sec: self.ctrlr_loss_timeout_sec,
            reconnect_delay_sec: self.reconnect_delay_sec,
            fast_io_fail_timeout_sec: self.fast_io_fail_timeout_sec,
            ..AttachParams::default()
        }
    }

    /// How long the call waits until the listed subsystems are attached; `None`: not at all.
    fn patience(&self) -> Option<Duration> {
        match (self.attach_timeout_ms, self.wait_for_attach) {
            (Some(ms), _) if ms > 0 => Some(Duration::from_millis(ms)),
            (_, Some(true)) => Some(CONNECT_TIMEOUT),
            _ => None,
        }
    }
}

impl Method<Engine> for StartDiscovery {
    const NAME: &'static str = "bdev_nvme_start_discovery";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Attaches the subsystems that a discovery service lists, each over all of its paths, and follows the changes of the list.";
    const CLASS: Class = Class::Admin;
    /// Locks changes itself, and releases the lock while it waits for targets.
    const ORDER: Order = Order::Free;
    type Params = StartDiscoveryParams;
    type Reply = bool;

    async fn apply(params: StartDiscoveryParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let gate = engine.changing().await;
        engine.refuse_overtaken()?;
        let (own, name) = (params.own(), params.name.clone());
        let discoveries = &engine.remotes.discoveries;
        if discoveries.find(&name).is_some() {
            let cause = format!("there is a discovery service \"{name}\" already");
            return Err(RpcError::errno(Errno::EEXIST, cause).field("name"));
        }
        if own.is_drive() {
            let cause = format!("\"{}\" is not a network", params.trtype);
            return Err(RpcError::errno(Errno::EINVAL, cause).field("trtype"));
        }
        let unknown = |error: RpcError| match &error.data {
            Some(facts) if facts.field.as_deref() == Some("trtype") => {
                error.renumbered(Errno::EINVAL)
            }
            _ => error,
        };
        let wanted = own.check(&engine).await.map_err(unknown)?;
        let place = SubsystemAddress {
            trtype: if own.trtype.eq_ignore_ascii_case("rdma") {
                "RDMA"
            } else {
                "TCP"
            },
            adrfam: adrfam(wanted.address.ip()),
            traddr: wanted.host.clone(),
            trsvcid: wanted.address.port().to_string(),
            subnqn: wanted.subnqn.to_string(),
        };
        if let Some(same) = discoveries.list().iter().find(|one| one.place == place) {
            let cause = format!("\"{}\" follows this discovery service already", same.name);
            return Err(RpcError::errno(Errno::EEXIST, cause).field("traddr"));
        }
        let plan = RemotePlan::of(wanted, &engine).await?;
        let watch = begin(&plan)?;
        let discovery = Discovery::new(name.clone(), place, params.controllers.clone());
        let discovery = Rc::new(discovery);
        discoveries.insert(Rc::clone(&discovery));
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let change = Change::put(discovery_key(&name), Self::NAME, record);
        if let Err(refused) = engine.journal.commit(change).await {
            discoveries.remove(&name);
            return Err(refused);
        }
        let patience = params.patience().filter(|_| !is_replaying());
        let service = Service {
            engine: Rc::clone(&engine),
            discovery: Rc::clone(&discovery),
            params,
        };
        tokio::task::spawn_local(follow(service, plan, watch));
        drop(gate);
        match patience {
            None => Ok(true),
            Some(patience) => attached(&engine, &discovery, patience).await,
        }
    }
}

/// Waits until the listed paths are attached. Stops the service if that takes too long, or if one
/// of them could not be attached.
async fn attached(
    engine: &Rc<Engine>,
    discovery: &Rc<Discovery>,
    patience: Duration,
) -> Result<bool, RpcError> {
    let until = Instant::now() + patience;
    while !discovery.is_complete.get() && Instant::now() < until {
        let changed = discovery.changed.notified();
        let _ = tokio::time::timeout(Duration::from_millis(50), changed).await;
    }
    let mut outcome = if discovery.is_complete.get() {
        Ok(true)
    } else {
        let trouble = discovery.trouble();
        let trouble = trouble.map_or(String::new(), |why| format!(": {why}"));
        let cause = format!("no list of subsystems within {patience:?}{trouble}");
        Err(RpcError::errno(Errno::ETIMEDOUT, cause).field("traddr"))
    };
    if let Some((place, why)) = discovery.refused.borrow().first() {
        let cause = format!("{} at {}: {why}", place.subnqn, place.traddr);
        outcome = outcome.and_then(|_| Err(RpcError::errno(Errno::EIO, cause)));
    }
    for path in paths_of(engine, discovery) {
        if outcome.is_err() {
            break;
        }
        outcome = match first_connection(engine, &path, until).await {
            Ok(true) => Ok(true),
            Ok(false) => {
                let cause = format!("{} is not connected yet", path.wanted.address);
                Err(RpcError::errno(Errno::ETIMEDOUT, cause))
            }
            Err(refused) => Err(refused),
        };
    }
    if outcome.is_err() && !discovery.is_stopping.get() {
        stop(engine, discovery).await?;
    }
    outcome
}

/// The attached paths of a service.
fn paths_of(engine: &Engine, discovery: &Discovery) -> Vec<Rc<RemotePath>> {
    let listed = discovery.listed.borrow();
    let path = |one: &DiscoveredPath| find(engine, one).map(|(_, path)| path);
    listed.iter().filter_map(path).collect()
}

fn find(engine: &Engine, listed: &DiscoveredPath) -> Option<(Rc<remotes::Remote>, Rc<RemotePath>)> {
    let remote = engine.remotes.find(&listed.name)?;
    let place = &listed.place;
    let is_it = |path: &Rc<RemotePath>| {
        let wanted = &path.wanted;
        wanted.host == place.traddr
            && wanted.address.port().to_string() == place.trsvcid
            && wanted.subnqn.as_str() == place.subnqn
            && wanted
                .transport
                .to_string()
                .eq_ignore_ascii_case(place.trtype)
    };
    let path = remote.paths().into_iter().find(is_it)?;
    Some((remote, path))
}

/// A discovery service on its task.
#[derive(Clone)]
struct Service {
    engine: Rc<Engine>,
    discovery: Rc<Discovery>,
    params: StartDiscoveryParams,
}

fn begin(plan: &RemotePlan) -> Result<DiscoveryWatch, RpcError> {
    let pool = plan.connector.memory(&DiscoveryWatch::MEMORY);
    let pool = pool.map_err(|error| RpcError::io("memory for a connection", &error))?;
    let (options, dial) = (plan.config.options.clone(), plan.connector.dialer());
    let now = Clock::real().now();
    Ok(DiscoveryWatch::new(options, dial, pool, now))
}

/// Follows a service until it is stopped.
async fn follow(service: Service, plan: RemotePlan, mut watch: DiscoveryWatch) {
    let (clock, discovery) = (Clock::real(), Rc::clone(&service.discovery));
    let (mut latest, mut applying): (Option<Vec<DiscoveryRecord>>, Option<JoinHandle<()>>) =
        (None, None);
    let mut again = None;
    while !discovery.is_stopping.get() {
        match watch.poll(clock.now()) {
            Some(Ok(records)) => {
                discovery.error.replace(None);
                latest = Some(records);
            }
            Some(Err(error)) => {
                warn!(discovery = discovery.name, %error, "the discovery log was not read");
                discovery.error.replace(Some(error.to_string()));
            }
            None => {}
        }
        if *discovery.state.borrow() != *watch.state() {
            discovery.state.replace(watch.state().clone());
        }
        let is_free = applying.as_ref().is_none_or(JoinHandle::is_finished);
        if is_free && let Some(records) = latest.take() {
            applying = Some(tokio::task::spawn_local(apply(service.clone(), records)));
        }
        // A target that restarts refuses hosts until it is set up.
        if matches!(watch.state(), ControllerState::Failed(_)) {
            let at = *again.get_or_insert_with(|| Instant::now() + AGAIN);
            if Instant::now() >= at {
                again = None;
                match begin(&plan) {
                    Ok(new) => watch = new,
                    Err(error) => warn!(%error, "the discovery service is not connected"),
                }
            }
        }
        let nap = if watch.is_active() { ACTIVE } else { IDLE };
        let changed = discovery.changed.notified();
        let _ = tokio::time::timeout(nap, changed).await;
    }
    watch.disconnect(clock.now());
    let deadline = remotes::close_deadline();
    let is_over = |state: &ControllerState| {
        matches!(state, ControllerState::Closed | ControllerState::Failed(_))
    };
    while !is_over(watch.state()) && tokio::time::Instant::now() < deadline {
        watch.poll(clock.now());
        tokio::time::sleep(ACTIVE).await;
    }
    if let Some(applying) = applying {
        let _ = applying.await;
    }
    discovery.has_ended.set(true);
    discovery.changed.notify_waiters();
}

/// Attaches the paths of a log that are new, then detaches those that it lacks: a device whose
/// paths are replaced keeps one.
async fn apply(service: Service, records: Vec<DiscoveryRecord>) {
    let Service {
        engine, discovery, ..
    } = &service;
    let _gate = engine.changing().await;
    if discovery.is_stopping.get() {
        return;
    }
    let of = |is: fn(u8) -> bool| -> Vec<SubsystemAddress> {
        let records = records.iter().filter(|record| is(record.subtype));
        records.filter_map(SubsystemAddress::of).collect()
    };
    let places = of(|kind| kind == subtype::NVM);
    discovery.referrals.replace(of(|kind| {
        kind == subtype::REFERRAL || kind == subtype::CURRENT_DISCOVERY
    }));
    discovery.refused.borrow_mut().clear();
    for place in &places {
        let is_known = |listed: &DiscoveredPath| listed.place == *place;
        if discovery.listed.borrow().iter().any(is_known) {
            continue;
        }
        let name = service.name(place).await;
        match service.attach(&name, place).await {
            Ok(()) => {
                info!(
                    discovery = discovery.name,
                    controller = name,
                    address = place.traddr,
                    subsystem = place.subnqn,
                    "discovered"
                );
                let place = place.clone();
                discovery
                    .listed
                    .borrow_mut()
                    .push(DiscoveredPath { name, place });
            }
            Err(error) => {
                warn!(discovery = discovery.name, address = place.traddr, subsystem = place.subnqn, %error, "not attached");
                let mut refused = discovery.refused.borrow_mut();
                refused.push((place.clone(), error.to_string()));
            }
        }
    }
    let listed = discovery.listed.take();
    let (stay, gone): (Vec<_>, Vec<_>) = listed
        .into_iter()
        .partition(|listed| places.contains(&listed.place));
    discovery.listed.replace(stay);
    for listed in gone {
        info!(
            discovery = discovery.name,
            controller = listed.name,
            address = listed.place.traddr,
            "not listed any more"
        );
        detach(engine, &listed).await;
    }
    discovery.is_complete.set(true);
    discovery.changed.notify_waiters();
}

impl Service {
    /// The name of the controller of a subsystem: its former one, that of the same subsystem of
    /// another service, or a new one, which is stored.
    async fn name(&self, place: &SubsystemAddress) -> String {
        let (engine, discovery) = (&self.engine, &self.discovery);
        let known = discovery.names.borrow().get(&place.subnqn).cloned();
        if let Some(name) = known.or_else(|| engine.remotes.discoveries.name_of(&place.subnqn)) {
            return name;
        }
        let mut names = discovery.names.borrow().clone();
        let is_free = |name: &String| {
            !names.values().any(|taken| taken == name)
                && engine.remotes.find(name).is_none()
                && engine.drives.find(name).is_none()
                && engine.journal.find(&nvme::key(name)).is_none()
        };
        let mut all = (0..).map(|at: u32| format!("{}{at}", discovery.name));
        let name = all.find(is_free).expect("numbers do not end");
        names.insert(place.subnqn.clone(), name.clone());
        discovery.names.replace(names.clone());
        let params = StartDiscoveryParams {
            controllers: names,
            ..self.params.clone()
        };
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        let key = discovery_key(&discovery.name);
        let change = Change::put(key, StartDiscovery::NAME, record);
        if let Err(error) = engine.journal.commit(change).await {
            warn!(%error, controller = name, "its name may change at the next start");
        }
        name
    }

    /// Starts to connect a path; connecting goes on while its target is away.
    async fn attach(&self, name: &str, place: &SubsystemAddress) -> Result<(), RpcError> {
        let (engine, params) = (&self.engine, self.params.listed(name, place));
        let found = engine.remotes.find(name);
        if let Some(remote) = &found {
            if remote.paths().iter().any(|path| params.is_at(path)) {
                return Ok(());
            }
            joins(&params, remote)?;
        }
        let (remote, _) = nvme::begin(engine, params).await?;
        if let Some(options) = Options::of(engine)
            .multipath_opts
            .filter(|_| found.is_none())
        {
            remote.attachment.set_policy(options.policy()?);
        }
        Ok(())
    }
}

/// Detaches a path, and with the last one the devices, unless another service lists it.
async fn detach(engine: &Rc<Engine>, listed: &DiscoveredPath) {
    let services = engine.remotes.discoveries.list();
    if services
        .iter()
        .any(|one| one.listed.borrow().contains(listed))
    {
        return;
    }
    if let Some((remote, path)) = find(engine, listed) {
        undo_path(engine, &listed.name, &remote, &path).await;
    }
}

/// Stops a service and detaches its controllers.
async fn stop(engine: &Rc<Engine>, discovery: &Rc<Discovery>) -> Result<(), RpcError> {
    let key = discovery_key(&discovery.name);
    let gate = engine.changing().await;
    let edits = vec![Edit::Remove(key)];
    engine.journal.commit(Change(edits)).await?;
    discovery.stop();
    drop(gate);
    while !discovery.has_ended.get() {
        let changed = discovery.changed.notified();
        let _ = tokio::time::timeout(Duration::from_millis(50), changed).await;
    }
    let _gate = engine.changing().await;
    for listed in discovery.listed.take() {
        detach(engine, &listed).await;
    }
    engine.remotes.discoveries.remove(&discovery.name);
    Ok(())
}

struct StopDiscovery;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StopDiscoveryParams {
    name: String,
}

impl Method<Engine> for StopDiscovery {
    const NAME: &'static str = "bdev_nvme_stop_discovery";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Stops to follow a discovery service, and detaches the controllers that were attached for it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = StopDiscoveryParams;
    type Reply = bool;

    async fn apply(params: StopDiscoveryParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let name = &params.name;
        let Some(discovery) = engine.remotes.discoveries.find(name) else {
            // A service that could not be restored can be stopped.
            if engine.journal.find(&discovery_key(name)).is_some() {
                let _gate = engine.changing().await;
                let edits = vec![Edit::Remove(discovery_key(name))];
                return engine.journal.commit(Change(edits)).await.map(|()| true);
            }
            let cause = format!("there is no discovery service \"{name}\"");
            return Err(RpcError::errno(Errno::ENOENT, cause)
                .field("name")
                .remedy("bdev_nvme_get_discovery_info lists them"));
        };
        if discovery.is_stopping.get() {
            let cause = format!("\"{name}\" is being stopped");
            return Err(RpcError::errno(Errno::EALREADY, cause).field("name"));
        }
        stop(&engine, &discovery).await.map(|()| true)
    }
}

struct GetDiscoveryInfo;

#[derive(Debug, Serialize, JsonSchema)]
struct DiscoveryInfo {
    name: String,
    trid: Trid,
    /// Discovery services that the log names, this one among them.
    referrals: Vec<Referral>,
    /// Nacre extension, as the next ones: the state of the connection, in the words of
    /// `bdev_nvme_get_controllers`.
    state: &'static str,
    /// Why it is not connected, or why its log could not be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// The paths that are attached for it.
    paths: Vec<AttachedPath>,
    /// The paths that could not be attached.
    refused: Vec<RefusedPath>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Referral {
    trid: Trid,
}

#[derive(Debug, Serialize, JsonSchema)]
struct AttachedPath {
    controller: String,
    trid: Trid,
}

#[derive(Debug, Serialize, JsonSchema)]
struct RefusedPath {
    trid: Trid,
    why: String,
}

#[derive(Debug, Serialize, JsonSchema)]
struct Trid {
    trtype: &'static str,
    adrfam: &'static str,
    traddr: String,
    trsvcid: String,
    subnqn: String,
}

impl From<&SubsystemAddress> for Trid {
    fn from(place: &SubsystemAddress) -> Self {
        Self {
            trtype: place.trtype,
            adrfam: place.adrfam,
            traddr: place.traddr.clone(),
            trsvcid: place.trsvcid.clone(),
            subnqn: place.subnqn.clone(),
        }
    }
}

impl Method<Engine> for GetDiscoveryInfo {
    const NAME: &'static str = "bdev_nvme_get_discovery_info";
    const ABOUT: &'static str =
        "Lists the discovery services that this daemon follows, and the paths attached for each.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<DiscoveryInfo>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<DiscoveryInfo>, RpcError> {
        let info = |one: &Rc<Discovery>| DiscoveryInfo {
            name: one.name.clone(),
            trid: Trid::from(&one.place),
            referrals: {
                let referrals = one.referrals.borrow();
                let referral = |place: &SubsystemAddress| Referral { trid: place.into() };
                referrals.iter().map(referral).collect()
            },
            state: one.state_word(),
            error: one.trouble(),
            paths: {
                let listed = one.listed.borrow();
                let path = |listed: &DiscoveredPath| AttachedPath {
                    controller: listed.name.clone(),
                    trid: Trid::from(&listed.place),
                };
                listed.iter().map(path).collect()
            },
            refused: {
                let refused = one.refused.borrow();
                let path = |(place, why): &(SubsystemAddress, String)| RefusedPath {
                    trid: place.into(),
                    why: why.clone(),
                };
                refused.iter().map(path).collect()
            },
        };
        Ok(engine.remotes.discoveries.list().iter().map(info).collect())
    }
}

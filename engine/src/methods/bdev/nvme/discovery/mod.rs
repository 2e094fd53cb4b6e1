//! `bdev_nvme_*_discovery`: attaches the subsystems that a discovery controller lists, and follows
//! its log.
//!
//! ```text
//!   follow   DiscoveryWatch ── the log changed ──▶ apply: attaches new paths, detaches those gone
//!   (a task of each service)                       (holds the lock of changes)
//! ```
//!
//! A service is one journal record, `nvme/discovery/<name>`, with the names of its controllers. The
//! controllers have no records. They stay attached while the service cannot be reached.

mod following;
mod info;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::select_ok;
use nacre_bdev::Bdev;
use nacre_nvmf::address::adrfam;
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::warn;

use self::following::{Ending, Service, begin, detach, follow, only_listed_here};
use self::info::GetDiscoveryInfo;
use super::{CONNECT_TIMEOUT, first_connection, no_controller};
use crate::attach::ReconnectTimes;
use crate::journal::is_replaying;
use crate::methods::bdev;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::nvme::{AttachParams, Multipath, POLICIES, discovery_key};
use crate::services::remotes::discovery::{DiscoveredPath, Discovery, SubsystemAddress};
use crate::services::remotes::{Remote, RemotePath, RemotePlan};
use crate::store::{Change, Edit};
use crate::values::flattened;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<StartDiscovery>()
        .add::<StopDiscovery>()
        .add::<GetDiscoveryInfo>();
}

/// Default port of a discovery service.
const PORT: &str = "8009";

struct StartDiscovery;

#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
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
    /// Answer after each listed subsystem is attached over one path at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wait_for_attach: Option<bool>,
    /// Time limit of the wait. When it passes, the daemon stops the service. 0, the default: 20 s
    /// with `wait_for_attach`, else no wait. Any other value implies `wait_for_attach`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attach_timeout_ms: Option<u64>,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    times: ReconnectTimes,
    /// Nacre extension, as the next two: name of the pre-shared key with which this host connects
    /// to the service by TLS 1.3. Default: the key of `[replication]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    psk: Option<String>,
    /// Name of the key with which this host authenticates itself to the service. Listed controllers
    /// have the keys of `[replication]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dhchap_key: Option<String>,
    /// Name of the key with which the service must authenticate itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dhchap_ctrlr_key: Option<String>,
    /// Nacre extension: names of controllers by the NQN of their subsystem. The daemon adds those
    /// that it chooses, so that they stay the same after a restart.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    controllers: BTreeMap<String, String>,
}

flattened!(StartDiscoveryParams, times, without nulls);

impl StartDiscoveryParams {
    /// The parameters of the connection to the service itself. SPDK names address, host and keys as
    /// in bdev_nvme_attach_controller, but these are not the same parameters: a service has no PCI
    /// address, another default port, and keys that listed controllers do not use.
    fn own(&self) -> AttachParams {
        AttachParams {
            name: self.name.clone(),
            trtype: self.trtype.clone(),
            traddr: self.traddr.clone(),
            adrfam: self.adrfam.clone(),
            trsvcid: self.trsvcid.clone().or_else(|| Some(PORT.to_owned())),
            subnqn: Some(Nqn::discovery().to_string()),
            hostnqn: self.hostnqn.clone(),
            psk: self.psk.clone(),
            dhchap_key: self.dhchap_key.clone(),
            dhchap_ctrlr_key: self.dhchap_ctrlr_key.clone(),
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
            times: self.times,
            ..AttachParams::default()
        }
    }

    /// Longest time for which the call waits until the listed subsystems are attached. `None`: it
    /// does not wait.
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

/// Waits until the listed subsystems are attached. After the time limit, or if one cannot be
/// attached, stops the service and returns the error.
pub(super) async fn attached(
    engine: &Rc<Engine>,
    discovery: &Rc<Discovery>,
    patience: Duration,
) -> Result<bool, RpcError> {
    let outcome = all_attached(engine, discovery, patience).await;
    if outcome.is_err()
        && !discovery.is_stopping.get()
        && let Err(error) = stop(engine, discovery).await
        && !discovery.is_stopping.get()
    {
        warn!(discovery = discovery.name, %error, "cannot stop the discovery service; it keeps running");
    }
    outcome.map(|()| true)
}

async fn all_attached(
    engine: &Rc<Engine>,
    discovery: &Discovery,
    patience: Duration,
) -> Result<(), RpcError> {
    let until = Instant::now() + patience;
    let is_stopped = || discovery.is_stopping.get();
    while !discovery.is_complete.get() && !is_stopped() && Instant::now() < until {
        let changed = discovery.changed.notified();
        let _ = tokio::time::timeout(Duration::from_millis(50), changed).await;
    }
    if is_stopped() {
        let cause = format!("\"{}\" was stopped meanwhile", discovery.name);
        return Err(RpcError::errno(Errno::ENODEV, cause).field("name"));
    }
    if !discovery.is_complete.get() {
        let problem = discovery.problem();
        let problem = problem.map_or(String::new(), |why| format!(": {why}"));
        let cause = format!("no list of subsystems within {patience:?}{problem}");
        return Err(RpcError::errno(Errno::ETIMEDOUT, cause).field("traddr"));
    }
    let listed = discovery.listed.borrow().clone();
    let has_path = |subnqn: &String| listed.iter().any(|one| one.place.subnqn == *subnqn);
    for (place, why) in discovery.refused.borrow().iter() {
        if !has_path(&place.subnqn) {
            let cause = format!("{} at {}: {why}", place.subnqn, place.traddr);
            return Err(RpcError::errno(Errno::EIO, cause));
        }
    }
    let names: BTreeSet<String> = listed.into_iter().map(|one| one.name).collect();
    for name in names {
        let Some(remote) = engine.remotes.find(&name) else {
            continue;
        };
        connected(engine, &remote, until).await?;
        remote.sync(engine, &*engine.plane()?, &name);
    }
    Ok(())
}

/// Waits until one path of the controller is connected, or all have failed.
async fn connected(engine: &Rc<Engine>, remote: &Remote, until: Instant) -> Result<(), RpcError> {
    let paths = remote.paths();
    let first = |path| async move {
        if first_connection(engine, path, until).await? {
            return Ok(());
        }
        let cause = format!("{} is not connected yet", path.wanted.address);
        Err(RpcError::errno(Errno::ETIMEDOUT, cause))
    };
    let all = paths.iter().map(|path| Box::pin(first(path)));
    select_ok(all).await.map(drop)
}

/// The error for new keys of a controller that a discovery service attached.
pub(super) fn keys_of_discovered(engine: &Engine, name: &str) -> RpcError {
    let all = engine.remotes.discoveries.list();
    let lists = |one: &&Rc<Discovery>| one.listed.borrow().iter().any(|path| path.name == name);
    let Some(discovery) = all.iter().find(lists) else {
        return no_controller(name);
    };
    let discovery = &discovery.name;
    let cause = format!(
        "\"{name}\" is attached by discovery service \"{discovery}\", whose controllers have the keys of [replication]"
    );
    RpcError::errno(Errno::EINVAL, cause).field("name").remedy(
        "set dhchap_key and dhchap_ctrlr_key in [replication], or attach it with bdev_nvme_attach_controller",
    )
}

fn find(engine: &Engine, listed: &DiscoveredPath) -> Option<(Rc<Remote>, Rc<RemotePath>)> {
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

/// Stops a service and detaches its controllers.
async fn stop(engine: &Rc<Engine>, discovery: &Rc<Discovery>) -> Result<(), RpcError> {
    let _gate = engine.changing().await;
    stop_at_gate(engine, discovery).await
}

/// As [`stop`], for a caller that holds the lock of changes.
async fn stop_at_gate(engine: &Rc<Engine>, discovery: &Rc<Discovery>) -> Result<(), RpcError> {
    let name = &discovery.name;
    if discovery.is_stopping.get() {
        let cause = format!("\"{name}\" is being stopped");
        return Err(RpcError::errno(Errno::EALREADY, cause).field("name"));
    }
    let plane = engine.plane()?;
    let ending = only_listed_here(engine, discovery, &discovery.listed.borrow());
    let devices = devices_of(&ending);
    let mut going = Vec::new();
    for device in &devices {
        going.extend(bdev::with_dependents(&plane, device));
    }
    bdev::refuse_last_copies(engine, &going)?;
    let mut edits = vec![Edit::Remove(discovery_key(name))];
    let policies = devices.iter().map(|device| format!("{POLICIES}{device}"));
    edits.extend(policies.map(Edit::Remove));
    edits.extend(bdev::forget(engine, &going));
    // Remove the record first: after a crash in between, the controllers must not return.
    engine.journal.commit(Change(edits)).await?;
    discovery.stop();
    while !discovery.has_ended.get() {
        let changed = discovery.changed.notified();
        let _ = tokio::time::timeout(Duration::from_millis(50), changed).await;
    }
    discovery.listed.take();
    detach(engine, ending).await;
    engine.remotes.discoveries.remove(name);
    Ok(())
}

/// The bdevs of controllers that lose all of their paths.
fn devices_of(ending: &[Ending]) -> Vec<String> {
    let ends = |path: &Rc<RemotePath>| ending.iter().any(|(_, _, one)| Rc::ptr_eq(one, path));
    let mut all = BTreeSet::new();
    for (_, remote, _) in ending {
        if remote.paths().iter().all(ends) {
            let devices = remote.attachment.devices();
            all.extend(devices.iter().map(|device| device.name().to_owned()));
        }
    }
    all.into_iter().collect()
}

struct StopDiscovery;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StopDiscoveryParams {
    /// The discovery service, as bdev_nvme_start_discovery named it.
    name: String,
}

impl Method<Engine> for StopDiscovery {
    const NAME: &'static str = "bdev_nvme_stop_discovery";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Stops following a discovery service and detaches its controllers.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = StopDiscoveryParams;
    type Reply = bool;

    async fn apply(params: StopDiscoveryParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let name = &params.name;
        let services = &engine.remotes.discoveries;
        let here = services.find(name);
        let _gate = engine.changing().await;
        // A call that began before may have started it meanwhile.
        if let Some(discovery) = here.or_else(|| services.find(name)) {
            return stop_at_gate(&engine, &discovery).await.map(|()| true);
        }
        // A service that could not be restored can be stopped.
        if engine.journal.find(&discovery_key(name)).is_some() {
            let edits = vec![Edit::Remove(discovery_key(name))];
            return engine.journal.commit(Change(edits)).await.map(|()| true);
        }
        let cause = format!("there is no discovery service \"{name}\"");
        Err(RpcError::errno(Errno::ENOENT, cause)
            .field("name")
            .remedy("bdev_nvme_get_discovery_info lists them"))
    }
}

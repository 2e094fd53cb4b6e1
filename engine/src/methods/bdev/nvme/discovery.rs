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

mod following;
mod info;

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nacre_nvmf::address::adrfam;
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::following::{Service, begin, detach, follow};
use self::info::GetDiscoveryInfo;
use super::{CONNECT_TIMEOUT, first_connection};
use crate::journal::is_replaying;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::engine::Engine;
use crate::services::nvme::{AttachParams, Multipath, discovery_key};
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

//! `volume_publish`, `volume_unpublish`, `volume_get_connections`: access of hosts to a volume.
//!
//! Publishing runs a few other calls and stores their records in one commit. A volume is served on
//! named addresses, which are stored with it, or on the listeners of the configuration file, which
//! follow changes of the machine. The transport policy withholds listeners of other transports: the
//! discovery log omits them, and hosts are refused there.

mod in_cluster;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev_replica::model::TransportPolicy;
use nacre_nvmf::subsystems::{Association, Subsystem};
use nacre_nvmf::transport::TransportType;
use nacre_nvmf_wire::Nqn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing::warn;
use uuid::Uuid;

use super::{NameParams, call};
use crate::journal::EntryState;
use crate::methods::nvmf;
use crate::refusal::OrRefuse;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::subsystems::{ADD_LISTENER, CREATE_SUBSYSTEM};
use crate::services::volumes::paths::{admits, check_listeners};
use crate::services::volumes::published::{
    AnaByTransport, PUBLISH, Published, published, published_key,
};
use crate::store::Change;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<Publish>()
        .add::<Unpublish>()
        .add::<GetConnections>();
}

/// Default NQN of a volume's subsystem: this prefix and the volume's name.
const NQN_PREFIX: &str = "nqn.2025-01.io.nacre:";

#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListenAddress {
    /// `TCP` or `RDMA`.
    pub trtype: String,
    /// `IPv4` or `IPv6`; default: derived from the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adrfam: Option<String>,
    /// An IP address.
    pub traddr: String,
    /// A port number; default 4420.
    #[serde(default = "usual_port")]
    pub trsvcid: String,
}

fn usual_port() -> String {
    "4420".into()
}

fn reporting() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

pub struct Publish;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PublishParams {
    /// The volume: its name or UUID.
    pub name: String,
    /// NQN of the subsystem; default: `nqn.2025-01.io.nacre:` and the volume's name.
    pub nqn: Option<String>,
    /// NQNs of the hosts that may use it.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// True: every host may connect. Default false: only those in `hosts`.
    #[serde(default)]
    pub allow_any_host: bool,
    /// Addresses to serve it on; default: every listener of the configuration file.
    #[serde(default)]
    pub listeners: Vec<ListenAddress>,
    /// Report ANA states, so that hosts prefer a path; default true.
    #[serde(default = "reporting", skip_serializing_if = "is_true")]
    pub ana_reporting: bool,
    /// ANA states of its listeners. Default: the listener's own state in the configuration file;
    /// for others `optimized` over RDMA and `non_optimized` over TCP.
    /// nvmf_subsystem_listener_set_ana_state changes a single state.
    pub ana: Option<AnaByTransport>,
    /// In a cluster: the nodes that show the volume, by name or id; one of them holds it. Default:
    /// the nodes with its replicas, then others, at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// The subsystem exists and has the volume as a namespace: only mark it as publishing the
    /// volume. Saved configurations use this after the calls that create the subsystem.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopt: bool,
}

impl PublishParams {
    /// The volume for these hosts, and the default of each other parameter.
    pub fn of(name: String, hosts: Vec<String>) -> Self {
        Self {
            name,
            nqn: None,
            hosts,
            allow_any_host: false,
            listeners: Vec::new(),
            ana_reporting: reporting(),
            ana: None,
            nodes: Vec::new(),
            adopt: false,
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct PublishReply {
    pub(super) nqn: String,
    pub(super) nsid: u32,
    pub(super) uuid: String,
    /// Addresses on which it is served now. In a cluster: those of all nodes that show it.
    pub(super) listen_addresses: Vec<Value>,
}

impl Method<Engine> for Publish {
    const NAME: &'static str = PUBLISH;
    const ABOUT: &'static str = "Gives hosts a volume: makes a subsystem with it as its one namespace, always with the same identifiers.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = PublishParams;
    type Reply = PublishReply;

    async fn apply(params: PublishParams, engine: Rc<Engine>) -> Result<PublishReply, RpcError> {
        engine.earlier_changes().await;
        let id = engine.volumes.find(&params.name)?.id();
        if engine.cluster.node().is_some() {
            return in_cluster::publish(&engine, id, &params).await;
        }
        if !params.nodes.is_empty() {
            let cause = "this daemon is in no cluster, and nodes names some";
            return Err(RpcError::errno(Errno::EINVAL, cause)
                .field("nodes")
                .remedy("leave it out"));
        }
        // Serialised per volume: two simultaneous calls would both find it unpublished.
        let altering = engine.volumes.altering(id);
        let _one = altering.lock().await;
        engine.refuse_overtaken()?;
        let name = engine.volumes.find(&id.to_string())?.name();
        let nqn = params.nqn.unwrap_or_else(|| format!("{NQN_PREFIX}{name}"));
        let nqn = Nqn::new(&nqn).map_err(|error| {
            RpcError::invalid_params(error.to_string())
                .field("nqn")
                .remedy("give one")
        })?;
        let key = published_key(id);
        let known = engine.journal.find(&key);
        if known.as_ref().is_some_and(|e| e.state != EntryState::Live) {
            // During a restore the other objects come from their own records.
            engine.listeners.look_again(&engine).await;
            return reply(&engine, &nqn, id);
        }
        if let Some(now) = published(&engine).iter().find(|p| p.volume == id) {
            if params.adopt && now.nqn == nqn.as_str() {
                return reply(&engine, &nqn, id);
            }
            return Err(RpcError::errno(
                Errno::EEXIST,
                format!("volume \"{name}\" is published already, as {}", now.nqn),
            )
            .field("name")
            .remedy("unpublish it first"));
        }
        let (bdev, status) = engine.volumes.device(&id.to_string())?;
        let policy = status.settings.transport_policy;
        if !params.adopt {
            if params.ana.is_some() && !params.ana_reporting {
                return Err(RpcError::errno(
                    Errno::EINVAL,
                    "ana sets states, and ana_reporting = false hides them from hosts",
                )
                .field("ana")
                .remedy("leave out ana, or ana_reporting"));
            }
            let named = params.listeners.iter().map(|l| l.trtype.as_str());
            check_listeners(&engine, named, policy)?;
        }
        let mut record = json!({
            "name": id.to_string(),
            "nqn": nqn.as_str(),
            "hosts": params.hosts,
            "allow_any_host": params.allow_any_host,
            "listeners": params.listeners,
        });
        if let Some(ana) = &params.ana {
            record["ana"] = json!(ana);
        }
        if params.adopt {
            let ana_reporting = check_adoptable(&engine, &nqn, &bdev)?;
            if !ana_reporting {
                record["ana_reporting"] = false.into();
            }
            engine
                .journal
                .commit(Change::put(key, PUBLISH, record))
                .await?;
            engine.listeners.look_again(&engine).await;
            return reply(&engine, &nqn, id);
        }
        if !params.ana_reporting {
            record["ana_reporting"] = false.into();
        }
        let paths = Published {
            volume: id,
            nqn: nqn.to_string(),
            on_declared: params.listeners.is_empty(),
            policy,
            ana: params.ana_reporting.then(|| params.ana.unwrap_or_default()),
        };
        let create = json!({
            "nqn": nqn.as_str(),
            "allow_any_host": params.allow_any_host,
            "ana_reporting": params.ana_reporting,
        });
        let made = Cell::new(false);
        // All in one commit, so that a crash leaves nothing half published.
        let furnished = engine.journal.together(async {
            call(&engine, CREATE_SUBSYSTEM, create).await?;
            made.set(true);
            furnish(&engine, &paths, &bdev, &params.hosts, &params.listeners).await?;
            let published = Change::put(key.clone(), PUBLISH, record);
            engine.journal.commit(published).await
        });
        if let Err(refused) = furnished.await {
            let undo = async {
                if made.get() {
                    let delete = json!({ "nqn": nqn.as_str() });
                    call(&engine, "nvmf_delete_subsystem", delete).await?;
                }
                engine.journal.commit(Change::remove(key)).await
            };
            if let Err(error) = engine.journal.unstored(undo).await {
                warn!(%nqn, %error, "not published, and not undone");
            }
            return Err(refused);
        }
        if params.listeners.is_empty() {
            engine.listeners.look_again(&engine).await;
        }
        let text = format!("volume \"{name}\" is published as {nqn}");
        engine
            .notes
            .report("volume_publish", name, text, json!({ "nqn": nqn.as_str() }));
        reply(&engine, &nqn, id)
    }
}

/// Checks that an adopted subsystem serves the volume. Returns true if it reports ANA states.
fn check_adoptable(engine: &Engine, nqn: &Nqn, bdev: &str) -> Result<bool, RpcError> {
    let subsystem = engine.plane()?.target.subsystem(nqn).or_refuse()?;
    let namespaces = subsystem.namespaces();
    if namespaces.iter().any(|n| n.bdev_name == bdev) {
        Ok(subsystem.config.ana_reporting)
    } else {
        Err(RpcError::errno(
            Errno::ENOENT,
            format!("{nqn} has no namespace on \"{bdev}\""),
        )
        .field("nqn")
        .remedy("without adopt a subsystem is made"))
    }
}

async fn furnish(
    engine: &Rc<Engine>,
    paths: &Published,
    bdev: &str,
    hosts: &[String],
    listeners: &[ListenAddress],
) -> Result<(), RpcError> {
    let nqn = &paths.nqn;
    let namespace = json!({ "nsid": 1, "bdev_name": bdev, "uuid": paths.volume });
    let params = json!({ "nqn": nqn, "namespace": namespace });
    call(engine, "nvmf_subsystem_add_ns", params).await?;
    for host in hosts {
        let params = json!({ "nqn": nqn, "host": host });
        call(engine, "nvmf_subsystem_add_host", params).await?;
    }
    // Listeners last: hosts can connect as soon as one exists.
    for listener in listeners {
        let mut params = json!({ "nqn": nqn, "listen_address": listener });
        if let Some(state) = paths.ana_state(&listener.trtype) {
            params["ana_state"] = json!(state);
        }
        if paths.withheld(&listener.trtype).is_some() {
            params["withheld"] = true.into();
            params["withheld_reason"] = "transport_policy".into();
        }
        call(engine, ADD_LISTENER, params).await?;
    }
    Ok(())
}

fn reply(engine: &Engine, nqn: &Nqn, id: Uuid) -> Result<PublishReply, RpcError> {
    let subsystem = engine.plane()?.target.subsystem(nqn).or_refuse()?;
    let address = |l: &nacre_nvmf::subsystems::SubsystemListener| {
        let reply = nvmf::address_reply(l.transport, &l.address);
        serde_json::to_value(reply).unwrap_or(Value::Null)
    };
    let listeners = subsystem.listeners();
    let open = listeners.iter().filter(|l| l.withheld.is_none());
    Ok(PublishReply {
        nqn: nqn.to_string(),
        nsid: 1,
        uuid: id.to_string(),
        listen_addresses: open.map(address).collect(),
    })
}

pub struct Unpublish;

impl Method<Engine> for Unpublish {
    const NAME: &'static str = "volume_unpublish";
    const ABOUT: &'static str =
        "Takes a volume away from hosts: deletes the subsystem that volume_publish made.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = NameParams;
    type Reply = bool;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let id = engine.volumes.find(&params.name)?.id();
        if engine.cluster.node().is_some() {
            crate::services::cluster::unpublish(&engine, id).await?;
            return Ok(true);
        }
        let altering = engine.volumes.altering(id);
        let _one = altering.lock().await;
        let listed = engine.volumes.find(&id.to_string())?;
        let (key, name) = (published_key(id), listed.name());
        let Some(entry) = engine.journal.find(&key) else {
            return Err(RpcError::errno(
                Errno::ENOENT,
                format!("volume \"{name}\" is not published"),
            )
            .field("name")
            .remedy(
                "a subsystem that was made by its own methods is deleted by nvmf_delete_subsystem",
            ));
        };
        let nqn = entry.record.params["nqn"].as_str().unwrap_or_default();
        let there = Nqn::new(nqn).is_ok_and(|nqn| {
            let plane = engine.plane();
            plane.is_ok_and(|plane| plane.target.subsystem(&nqn).is_ok())
        });
        // One commit: after a crash the volume is published completely, or not at all.
        let gone = Change::remove(key);
        let gone = match Nqn::new(nqn) {
            Ok(nqn) => gone.and(nvmf::without_subsystem(&nqn)),
            Err(_) => gone,
        };
        engine.journal.commit(gone).await?;
        if there {
            let delete = call(&engine, "nvmf_delete_subsystem", json!({ "nqn": nqn }));
            engine.journal.unstored(delete).await?;
        }
        engine.listeners.look_again(&engine).await;
        let text = format!("volume \"{name}\" is not published any more");
        engine
            .notes
            .report("volume_unpublish", name, text, json!({ "nqn": nqn }));
        Ok(true)
    }
}

pub struct GetConnections;

#[derive(Debug, Serialize, JsonSchema)]
pub struct ConnectionReply {
    nqn: String,
    host: String,
    host_id: String,
    cntlid: u16,
    /// `TCP` or `RDMA`.
    transport: String,
    /// Local and remote address of the connection.
    listen_address: String,
    peer_address: String,
    /// I/O queue pairs.
    queues: usize,
    /// The cipher suite of TLS; null: the connection is in clear.
    tls: Option<&'static str>,
    /// The name of the pre-shared key of TLS; null: in clear, or authentication generated it.
    psk: Option<String>,
    /// The name of the key with which the host authenticated itself; null: it did not.
    dhchap_key: Option<String>,
    /// True if the volume's transport_policy admits this transport.
    admitted: bool,
}

impl Method<Engine> for GetConnections {
    const NAME: &'static str = "volume_get_connections";
    const ABOUT: &'static str =
        "Lists the hosts that are connected to a volume, each with the transport that it uses.";
    const CLASS: Class = Class::Read;
    type Params = NameParams;
    type Reply = Vec<ConnectionReply>;

    async fn apply(
        params: NameParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<ConnectionReply>, RpcError> {
        let (bdev, status) = engine.volumes.device(&params.name)?;
        let policy = status.settings.transport_policy;
        let of = |subsystem: &Arc<Subsystem>| {
            let nqn = subsystem.nqn().to_string();
            let controllers = subsystem.controllers();
            let connections = controllers.iter().map(move |c| connection(c, &nqn, policy));
            connections.collect::<Vec<_>>()
        };
        let subsystems = engine.plane()?.target.subsystems();
        let has = |s: &&Arc<Subsystem>| {
            let namespaces = s.namespaces();
            namespaces.iter().any(|n| n.bdev_name == bdev)
        };
        Ok(subsystems.iter().filter(has).flat_map(of).collect())
    }
}

fn connection(of: &Arc<Association>, nqn: &str, policy: TransportPolicy) -> ConnectionReply {
    let queues = of.queues();
    let address = |read: fn(&nacre_nvmf::subsystems::QueueInfo) -> String| {
        queues.first().map(read).unwrap_or_default()
    };
    let transport = match of.transport {
        TransportType::Rdma => "RDMA".to_owned(),
        other => other.to_string(),
    };
    ConnectionReply {
        nqn: nqn.to_owned(),
        host: of.hostnqn.to_string(),
        host_id: Uuid::from_bytes(of.hostid).to_string(),
        cntlid: of.cntlid,
        admitted: admits(policy, &transport),
        transport,
        listen_address: address(|q| q.local.to_string()),
        peer_address: address(|q| q.peer.to_string()),
        queues: queues.iter().filter(|q| q.qid != 0).count(),
        tls: queues
            .first()
            .and_then(|q| Some(q.secure.as_ref()?.suite.name())),
        psk: queues.first().and_then(|q| q.secure.as_ref()?.psk.name()),
        dhchap_key: queues.first().and_then(|q| q.auth.keys()?.names().0),
    }
}

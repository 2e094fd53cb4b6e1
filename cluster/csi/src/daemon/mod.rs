//! The daemon, as this driver needs it: volumes, pools and publications, by JSON-RPC. Each call has
//! a connection of its own.

mod answers;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nacre_engine_rpc::client::{Client, ClientError};
use nacre_engine_rpc::error::{Errno, INVALID_PARAMS, INVALID_STATE};
use serde_json::{Value, json};
use tonic::{Code, Status};
use uuid::Uuid;

use self::answers::{cluster_publication, cluster_room, named, publication, volume};
use crate::capability::{MIB, Parameters};

type Connect = Arc<dyn Fn() -> Result<Client, ClientError> + Send + Sync>;

/// Time for the daemon to answer a probe. Probes of the orchestrator wait little longer.
const READY: Duration = Duration::from_secs(2);
/// Most nodes and hosts in a refusal.
const NAMED: usize = 4;
/// The daemon's names of subsystems begin so, and end with the volume's name.
const NQN_PREFIX: &str = "nqn.2025-01.io.nacre:";

#[derive(Clone)]
pub struct Daemon {
    connect: Connect,
    /// Known after the first answer to this value, or to a clone of it.
    place: Arc<OnceLock<Place>>,
    /// A thread of [`Daemon::is_ready`] waits for the daemon.
    is_looking: Arc<AtomicBool>,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Daemon")
    }
}

/// The mark of a thread of [`Daemon::is_ready`]. It ends with the thread, also after a panic.
struct Looking(Arc<AtomicBool>);

impl Looking {
    /// `None`: another thread has the mark.
    fn start(mark: &Arc<AtomicBool>) -> Option<Self> {
        let is_taken = mark.swap(true, Ordering::AcqRel);
        (!is_taken).then(|| Self(Arc::clone(mark)))
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Where volumes of the daemon are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Cluster {
        id: Uuid,
        lease: Duration,
    },
    /// A daemon in no cluster, with its own id.
    Alone {
        id: Uuid,
    },
}

impl Place {
    pub(crate) fn is_cluster(self) -> bool {
        matches!(self, Self::Cluster { .. })
    }

    /// The volume of this name has always this id.
    pub(crate) fn volume_id(self, name: &str) -> Uuid {
        let (Self::Cluster { id, .. } | Self::Alone { id }) = self;
        Uuid::new_v5(&id, name.as_bytes())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Volume {
    pub id: Uuid,
    pub name: String,
    pub bytes: u64,
    pub replicas: usize,
    pub description: String,
    pub subsystems: Vec<String>,
}

impl Volume {
    /// The subsystem by which the driver publishes a volume of a daemon in no cluster. It has the
    /// daemon's own name for the volume, or is the only one.
    fn subsystem(&self) -> Result<Option<&String>, Status> {
        let own = format!("{NQN_PREFIX}{}", self.name);
        match &self.subsystems[..] {
            [] => Ok(None),
            [only] => Ok(Some(only)),
            several if several.contains(&own) => Ok(several.iter().find(|nqn| **nqn == own)),
            several => Err(Status::failed_precondition(format!(
                "volume {} is in the subsystems {}, and none of them is {own}: delete the others",
                self.name,
                listed(several)
            ))),
        }
    }
}

/// How hosts reach a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Publication {
    pub nqn: String,
    pub hosts: Vec<String>,
    /// Any host may use the volume, by this subsystem or another one.
    pub any_host: bool,
    /// Other subsystems with the volume. Their hosts are not the driver's to remove.
    pub others: Vec<String>,
    /// In a cluster: the nodes that show the volume, without those that have left the cluster.
    pub nodes: Vec<String>,
    /// Addresses at which hosts reach the volume, as URIs.
    pub addresses: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pool {
    pub name: String,
    pub free_bytes: u64,
}

/// A volume to be created.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub id: Uuid,
    pub name: String,
    pub description: String,
    pub mebibytes: u64,
    pub parameters: Parameters,
}

impl Daemon {
    pub fn new(connect: impl Fn() -> Result<Client, ClientError> + Send + Sync + 'static) -> Self {
        Self {
            connect: Arc::new(connect),
            place: Arc::default(),
            is_looking: Arc::default(),
        }
    }

    fn call(&self, method: &str, params: Value) -> Result<Value, ClientError> {
        (self.connect)()?.call_by_name(method, params)
    }

    /// As [`Daemon::call`], with the interface's code for a failure.
    fn ask(&self, method: &str, params: Value) -> Result<Value, Status> {
        self.call(method, params).map_err(|error| status(&error))
    }

    /// The same daemon, whose place is to be found out again.
    pub(crate) fn anew(&self) -> Self {
        Self {
            connect: Arc::clone(&self.connect),
            place: Arc::default(),
            is_looking: Arc::default(),
        }
    }

    /// True once the daemon has answered and, in a cluster, has read its state from etcd. It stays
    /// true while the daemon is away later: a restart of the driver would not help. A daemon that
    /// does not answer within [`READY`] is not ready yet.
    pub fn is_ready(&self) -> bool {
        if self.place.get().is_some() {
            return true;
        }
        let Some(looking) = Looking::start(&self.is_looking) else {
            return false;
        };
        let (sender, receiver) = sync_channel(1);
        let daemon = self.clone();
        let look = move || {
            let is_ready = daemon.place().is_ok();
            drop(looking);
            let _ = sender.send(is_ready);
        };
        let started = std::thread::Builder::new().spawn(look);
        started.is_ok() && receiver.recv_timeout(READY).unwrap_or(false)
    }

    pub(crate) fn place(&self) -> Result<Place, Status> {
        if let Some(place) = self.place.get() {
            return Ok(*place);
        }
        let place = self.find_place()?;
        Ok(*self.place.get_or_init(|| place))
    }

    fn find_place(&self) -> Result<Place, Status> {
        match self.call("cluster_get_status", Value::Null) {
            Ok(found) => {
                let cluster = &found["cluster"];
                let id = cluster["id"].as_str().and_then(|id| id.parse().ok());
                let lease = cluster["lease_ms"].as_u64();
                let (Some(id), Some(lease)) = (id, lease) else {
                    let why = found["problem"].as_str().unwrap_or("the reason is unknown");
                    let text = format!("the daemon cannot read its cluster: {why}");
                    return Err(Status::unavailable(text));
                };
                let lease = Duration::from_millis(lease);
                Ok(Place::Cluster { id, lease })
            }
            Err(error) if refused_with(&error, Errno::ENOTSUP) => {
                let found = self.ask("volume_get_records", Value::Null)?;
                let id = found["holder"].as_str().and_then(|id| id.parse().ok());
                let id = id.ok_or_else(|| strange("volume_get_records", "holder"))?;
                Ok(Place::Alone { id })
            }
            Err(error) => Err(status(&error)),
        }
    }

    /// `None`: there is no such volume. In a cluster etcd confirms that: this daemon may not have
    /// heard of the volume yet.
    pub(crate) fn volume(&self, id: Uuid) -> Result<Option<Volume>, Status> {
        match self.call("volume_get", json!({ "name": id.to_string() })) {
            Ok(found) => {
                let volume = volume(&found).ok_or_else(|| strange("volume_get", "volume"))?;
                // A volume may have the text of another one's id as its name.
                if volume.id == id {
                    return Ok(Some(volume));
                }
            }
            Err(error) if is_absent(&error) => {}
            Err(error) => return Err(status(&error)),
        }
        self.confirm_absent(id).map(|()| None)
    }

    /// Refuses if the cluster has the volume.
    fn confirm_absent(&self, id: Uuid) -> Result<(), Status> {
        let is_there = match self.place()? {
            Place::Alone { .. } => false,
            Place::Cluster { .. } => self.in_cluster(id)?.is_some(),
        };
        if is_there {
            let text = format!(
                "the cluster has volume {id}, and the daemon does not list it: try again later"
            );
            return Err(Status::unavailable(text));
        }
        Ok(())
    }

    /// The volume as etcd has it.
    fn in_cluster(&self, id: Uuid) -> Result<Option<Value>, Status> {
        let mut found = self.ask("cluster_get_volumes", Value::Null)?;
        let all = found.as_array_mut();
        let all = all.ok_or_else(|| strange("cluster_get_volumes", "list"))?;
        let id = id.to_string();
        let at = all.iter().position(|one| one["id"] == id.as_str());
        Ok(at.map(|at| all.swap_remove(at)))
    }

    /// All volumes, by id.
    pub(crate) fn volumes(&self) -> Result<Vec<Volume>, Status> {
        let found = self.ask("volume_list", Value::Null)?;
        let list = found
            .as_array()
            .ok_or_else(|| strange("volume_list", "list"))?;
        let mut volumes: Vec<Volume> = list.iter().filter_map(volume).collect();
        volumes.sort_by_key(|volume| volume.id);
        Ok(volumes)
    }

    pub(crate) fn create(&self, wanted: &Wanted) -> Result<Volume, Status> {
        let parameters = &wanted.parameters;
        let mut params = json!({
            "name": wanted.name,
            "uuid": wanted.id,
            "settings": { "description": wanted.description },
        });
        match self.place()? {
            Place::Alone { .. } => {
                let pools = self.pools_for(parameters)?;
                let replicas = pools.iter().take(parameters.replica_count());
                let replicas =
                    replicas.map(|pool| json!({ "pool": pool.name, "thin": parameters.is_thin }));
                params["replicas"] = replicas.collect();
                params["size_mb"] = wanted.mebibytes.into();
            }
            Place::Cluster { .. } => {
                params["size"] = (wanted.mebibytes * MIB).into();
                params["replica_count"] = parameters.replica_count().into();
                params["thin"] = parameters.is_thin.into();
                for (key, list) in [("spread", &parameters.spread), ("nodes", &parameters.nodes)] {
                    if !list.is_empty() {
                        params[key] = list.clone().into();
                    }
                }
                if let Some(class) = &parameters.class {
                    params["class"] = class.as_str().into();
                }
                if parameters.is_strict {
                    params["strict_spread"] = true.into();
                }
            }
        }
        let made = self.ask("volume_create", params)?;
        volume(&made).ok_or_else(|| strange("volume_create", "volume"))
    }

    /// The pools that the parameters name, else those with the most free space.
    pub(crate) fn pools_for(&self, parameters: &Parameters) -> Result<Vec<Pool>, Status> {
        let found = self.ask("pool_list", Value::Null)?;
        let list = found
            .as_array()
            .ok_or_else(|| strange("pool_list", "list"))?;
        let pool = |pool: &Value| {
            let is_online = pool["state"] == "online";
            is_online.then_some(Pool {
                name: pool["name"].as_str()?.to_owned(),
                // Thick volumes keep a part of the free space.
                free_bytes: (pool["free_bytes"].as_u64()?)
                    .saturating_sub(pool["reserved_bytes"].as_u64().unwrap_or(0)),
            })
        };
        let mut online: Vec<Pool> = list.iter().filter_map(pool).collect();
        if !parameters.pools.is_empty() {
            let named = parameters.pools.iter().map(|name| {
                let found = online.iter().find(|pool| &pool.name == name);
                found.cloned().ok_or_else(|| {
                    let text = format!("parameter pool: no pool \"{name}\" is online here");
                    Status::invalid_argument(text)
                })
            });
            return named.collect();
        }
        let count = parameters.replica_count();
        if online.len() < count {
            let text = format!(
                "{count} replicas need {count} pools, and {} are online: make pools, or lower \
                 the parameter replicas",
                online.len()
            );
            return Err(Status::resource_exhausted(text));
        }
        online.sort_by(|a, b| (b.free_bytes, &a.name).cmp(&(a.free_bytes, &b.name)));
        online.truncate(count);
        Ok(online)
    }

    pub(crate) fn delete(&self, volume: &Volume) -> Result<(), Status> {
        match self.call("volume_delete", json!({ "name": volume.id.to_string() })) {
            Ok(_) => Ok(()),
            Err(error) if is_absent(&error) => self.confirm_absent(volume.id),
            Err(error) => Err(status(&error)),
        }
    }

    pub(crate) fn grow(&self, volume: &Volume, mebibytes: u64) -> Result<Volume, Status> {
        let is_in_cluster = self.place()?.is_cluster();
        if is_in_cluster {
            self.serve_here(volume)?;
        }
        let params = json!({ "name": volume.id.to_string(), "size_mb": mebibytes });
        let grown = self.call("volume_grow", params).map_err(|error| {
            // Another node took the volume meanwhile: the next try moves it again.
            if is_in_cluster && refused_with(&error, Errno::EPERM) {
                Status::aborted(error.to_string())
            } else {
                status(&error)
            }
        })?;
        let grown = answers::volume(&grown).filter(|grown| grown.id == volume.id);
        grown.ok_or_else(|| strange("volume_grow", "volume"))
    }

    /// Moves the volume to this daemon's node, if another one serves it: only the node that serves
    /// a volume grows it. Hosts see no error.
    fn serve_here(&self, volume: &Volume) -> Result<(), Status> {
        let nodes = self.ask("cluster_get_nodes", Value::Null)?;
        let mut nodes = nodes.as_array().into_iter().flatten();
        let here = nodes.find(|node| node["this_node"] == true);
        let held = self.in_cluster(volume.id)?;
        let held = held.filter(|one| one["lease_stands"] == true);
        let holder = held.as_ref().and_then(|one| one["holder"]["id"].as_str());
        let Some((here, holder)) = here.and_then(|node| node["id"].as_str()).zip(holder) else {
            // The daemon's refusal names the missing part.
            return Ok(());
        };
        if here != holder {
            let params = json!({ "volume": volume.id.to_string(), "node": here });
            self.ask("cluster_move_volume", params)?;
        }
        Ok(())
    }

    /// `None`: no host may use the volume.
    pub(crate) fn publication(&self, volume: &Volume) -> Result<Option<Publication>, Status> {
        if let Place::Cluster { .. } = self.place()? {
            let found = self.in_cluster(volume.id)?;
            return Ok(found.as_ref().and_then(cluster_publication));
        }
        let Some(own) = volume.subsystem()? else {
            return Ok(None);
        };
        let mut found = None;
        let (mut any_host, mut others) = (false, Vec::new());
        for nqn in &volume.subsystems {
            match self.call("nvmf_get_subsystems", json!({ "nqn": nqn })) {
                Ok(answer) => {
                    let one = publication(&answer[0]);
                    any_host |= one.as_ref().is_some_and(|one| one.any_host);
                    if nqn == own {
                        found = one;
                    } else {
                        others.push(nqn.clone());
                    }
                }
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(status(&error)),
            }
        }
        Ok(found.map(|found| Publication {
            any_host,
            others,
            ..found
        }))
    }

    /// Why the cluster cannot say that all nodes have heard of a change of the publication. `None`:
    /// the node that serves the volume renews its lease, and so do the others that show it, or
    /// their leases are over.
    pub(crate) fn unheard(&self, id: Uuid) -> Result<Option<String>, Status> {
        let Some(volume) = self.in_cluster(id)? else {
            return Ok(None);
        };
        let holder = &volume["holder"];
        if holder.is_object() && volume["lease_stands"] != true {
            let node = named(holder);
            let text = format!(
                "node {node} has no lease, and serves the volume as long as its replicas confirm it"
            );
            return Ok(Some(text));
        }
        let nodes = self.ask("cluster_get_nodes", Value::Null)?;
        let nodes = nodes.as_array();
        let nodes = nodes.ok_or_else(|| strange("cluster_get_nodes", "list"))?;
        let shown = volume["nodes"].as_array().into_iter().flatten();
        let mut ids = shown.chain([holder]).filter_map(|node| node["id"].as_str());
        let late = |id: &str| {
            let mut nodes = nodes.iter();
            nodes.any(|node| node["id"] == id && node["lease"] == "late")
        };
        let late = ids.find(|id| late(id));
        Ok(late.map(|id| format!("node {id} is silent, and its lease is not over yet")))
    }

    /// Bytes of the largest volume with these parameters. Each replica has the same size, and a
    /// pool (in a cluster: a node) of its own.
    pub(crate) fn room(&self, parameters: &Parameters) -> Result<u64, Status> {
        match self.place()? {
            Place::Alone { .. } => {
                let pools = match self.pools_for(parameters) {
                    Ok(pools) => pools,
                    Err(refused) if refused.code() == Code::ResourceExhausted => Vec::new(),
                    Err(refused) => return Err(refused),
                };
                Ok(pools.iter().map(|pool| pool.free_bytes).min().unwrap_or(0))
            }
            Place::Cluster { .. } => {
                let found = self.ask("cluster_get_pools", Value::Null)?;
                let list = found.as_array();
                let list = list.ok_or_else(|| strange("cluster_get_pools", "list"))?;
                Ok(cluster_room(list, parameters))
            }
        }
    }

    /// The hosts of all volumes.
    pub(crate) fn publications(&self, volumes: &[Volume]) -> Result<Vec<Vec<String>>, Status> {
        let hosts_of = |found: &Value, fits: &dyn Fn(&Value) -> bool| {
            let all = found.as_array().into_iter().flatten();
            let mut fitting = all.filter(|one| fits(one));
            fitting.next().cloned().unwrap_or_default()
        };
        match self.place()? {
            Place::Alone { .. } => {
                let found = self.ask("nvmf_get_subsystems", Value::Null)?;
                let hosts = volumes.iter().map(|volume| {
                    let nqn = volume.subsystem().ok().flatten();
                    let fits = |one: &Value| one["nqn"].as_str() == nqn.map(String::as_str);
                    let one = nqn.map(|_| hosts_of(&found, &fits));
                    one.and_then(|one| publication(&one))
                        .unwrap_or_default()
                        .hosts
                });
                Ok(hosts.collect())
            }
            Place::Cluster { .. } => {
                let found = self.ask("cluster_get_volumes", Value::Null)?;
                let hosts = volumes.iter().map(|volume| {
                    let id = volume.id.to_string();
                    let one = hosts_of(&found, &|one| one["id"] == id.as_str());
                    cluster_publication(&one).unwrap_or_default().hosts
                });
                Ok(hosts.collect())
            }
        }
    }

    /// Lets these hosts, and no others, use the volume.
    pub(crate) fn publish(
        &self,
        volume: &Volume,
        before: Option<&Publication>,
        hosts: &[String],
    ) -> Result<(), Status> {
        let id = volume.id.to_string();
        match (self.place()?, before) {
            (_, None) => {
                self.ask("volume_publish", json!({ "name": id, "hosts": hosts }))?;
            }
            (Place::Cluster { .. }, Some(before)) => {
                let params = json!({ "name": id, "hosts": hosts, "nodes": before.nodes });
                self.ask("volume_publish", params)?;
            }
            (Place::Alone { .. }, Some(before)) => {
                let nqn = &before.nqn;
                for host in hosts.iter().filter(|host| !before.hosts.contains(host)) {
                    let params = json!({ "nqn": nqn, "host": host });
                    self.ask("nvmf_subsystem_add_host", params)?;
                }
                for host in before.hosts.iter().filter(|host| !hosts.contains(host)) {
                    let params = json!({ "nqn": nqn, "host": host });
                    match self.call("nvmf_subsystem_remove_host", params) {
                        Err(error) if !is_absent(&error) => return Err(status(&error)),
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn unpublish(&self, volume: &Volume) -> Result<(), Status> {
        match self.call("volume_unpublish", json!({ "name": volume.id.to_string() })) {
            Err(error) if !is_absent(&error) => Err(status(&error)),
            _ => Ok(()),
        }
    }

    /// True if this daemon has a connection of the host to the volume. Without a host: of any one.
    pub(crate) fn is_connected(&self, id: Uuid, host: Option<&str>) -> Result<bool, Status> {
        match self.call("volume_get_connections", json!({ "name": id.to_string() })) {
            Ok(found) => {
                let all = found.as_array();
                let all = all.ok_or_else(|| strange("volume_get_connections", "list"))?;
                let is_of = |one: &Value| host.is_none_or(|host| one["host"] == host);
                Ok(all.iter().any(is_of))
            }
            // Without a device there are no connections.
            Err(error) if is_absent(&error) || refused_with(&error, Errno::EAGAIN) => Ok(false),
            Err(error) => Err(status(&error)),
        }
    }
}

/// Text with the first few of these hosts.
pub(crate) fn listed(hosts: &[String]) -> String {
    let more = hosts.len().saturating_sub(NAMED);
    let shown = hosts
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    if more == 0 {
        shown
    } else {
        format!("{shown} and {more} more")
    }
}

fn refused_with(error: &ClientError, errno: Errno) -> bool {
    matches!(error, ClientError::Refused { error, .. } if error.code == -(errno as i32))
}

fn is_absent(error: &ClientError) -> bool {
    refused_with(error, Errno::ENODEV) || refused_with(error, Errno::ENOENT)
}

fn strange(method: &str, what: &str) -> Status {
    Status::internal(format!(
        "the daemon's answer to {method} has no {what}: run the driver and the daemon in the same \
         version"
    ))
}

fn status(error: &ClientError) -> Status {
    let text = error.to_string();
    match error {
        ClientError::Unreachable { .. }
        | ClientError::Remote { .. }
        | ClientError::Handshake { .. }
        | ClientError::Broken { .. } => Status::unavailable(text),
        ClientError::Late { .. } => Status::deadline_exceeded(text),
        ClientError::Strange { .. } => Status::internal(text),
        ClientError::Refused { error, .. } => {
            let is = |errno: Errno| error.code == -(errno as i32);
            if is(Errno::ENODEV) || is(Errno::ENOENT) {
                Status::not_found(text)
            } else if is(Errno::EEXIST) {
                Status::already_exists(text)
            } else if is(Errno::ENOSPC) {
                Status::resource_exhausted(text)
            } else if is(Errno::EBUSY) || is(Errno::ENOTSUP) {
                Status::failed_precondition(text)
            } else if is(Errno::EINVAL) || is(Errno::EFBIG) || error.code == INVALID_PARAMS {
                Status::invalid_argument(text)
            } else if is(Errno::EACCES) || is(Errno::EPERM) {
                Status::permission_denied(text)
            } else if is(Errno::ETIMEDOUT) {
                Status::deadline_exceeded(text)
            } else if is(Errno::EAGAIN) || error.code == INVALID_STATE {
                Status::unavailable(text)
            } else {
                Status::internal(text)
            }
        }
    }
}

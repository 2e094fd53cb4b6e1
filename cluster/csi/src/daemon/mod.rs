//! The CSI driver's client of a Nacre daemon: creates, lists, grows, publishes and deletes volumes
//! and snapshots by JSON-RPC, and translates errors to gRPC statuses. Each call opens a connection.

mod answers;
mod calls;
mod in_cluster;
mod snapshots;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nacre_engine::methods::cluster::pools::GetPools;
use nacre_engine::methods::cluster::status::{GetClusterStatus, GetNodes};
use nacre_engine::methods::cluster::unconfirmed::{GetUnconfirmed, GetUnconfirmedParams};
use nacre_engine::methods::cluster::volumes::{GetVolumes, MoveVolume, MoveVolumeParams};
use nacre_engine::methods::nvmf::host::{AddHost, AddHostParams, RemoveHost, RemoveHostParams};
use nacre_engine::methods::nvmf::subsystem::{GetSubsystems, GetSubsystemsParams};
use nacre_engine::methods::pool::ListPools;
use nacre_engine::methods::volume::NameParams;
use nacre_engine::methods::volume::create::{Create, CreateParams, Delete, DeleteParams};
use nacre_engine::methods::volume::list::{GetVolume, List, Records};
use nacre_engine::methods::volume::on_pools::PoolReplica;
use nacre_engine::methods::volume::operate::{Grow, GrowParams};
use nacre_engine::methods::volume::publish::{GetConnections, Publish, PublishParams, Unpublish};
use nacre_engine::services::Engine;
use nacre_engine_rpc::client::{Client, ClientError};
use nacre_engine_rpc::error::{Errno, INVALID_PARAMS, INVALID_STATE};
use nacre_engine_rpc::{Method, NoParams};
use serde::Deserialize;
use tonic::{Code, Status};
use uuid::Uuid;

use self::answers::{cluster_publication, cluster_room, doubt, publication};
use self::calls::{Called, ClusterVolumeAnswer, PoolAnswer};
pub(crate) use self::snapshots::{MadeState, Snapshot, SnapshotKind, VolumeOrigin};
use crate::capability::{MIB, Parameters};

type Connect = Arc<dyn Fn() -> Result<Client, ClientError> + Send + Sync>;

/// Timeout of the daemon's answer to a probe. Kubernetes' own probes wait little longer.
const READY: Duration = Duration::from_secs(2);
/// Most names of nodes or hosts in an error text.
const NAMED: usize = 4;
/// Time that the daemon has to move a volume to its node, in seconds.
const MOVED_S: u64 = 10;
/// The beginning of the NQN that the daemon gives to a volume's subsystem; the volume's name
/// follows.
const NQN_PREFIX: &str = "nqn.2025-01.io.nacre:";

#[derive(Clone)]
pub struct Daemon {
    connect: Connect,
    /// Set by the first answer. Clones share it.
    deployment: Arc<OnceLock<Deployment>>,
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

/// The kind of the daemon's installation: it decides where volumes are created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deployment {
    Cluster {
        id: Uuid,
    },
    /// A daemon in no cluster, with its own id.
    Alone {
        id: Uuid,
    },
}

impl Deployment {
    pub(crate) fn is_cluster(self) -> bool {
        matches!(self, Self::Cluster { .. })
    }

    /// The id of the volume with this name; always the same, so that a repeated creation finds it.
    pub(crate) fn volume_id(self, name: &str) -> Uuid {
        let (Self::Cluster { id } | Self::Alone { id }) = self;
        Uuid::new_v5(&id, name.as_bytes())
    }

    /// The id of the snapshot with this name; always the same.
    pub(crate) fn snapshot_id(self, name: &str) -> Uuid {
        Uuid::new_v5(&self.volume_id("snapshot"), name.as_bytes())
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
    /// `None`: it began empty, or a daemon that did not store it made the volume.
    pub origin: Option<VolumeOrigin>,
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
pub(crate) struct WantedVolume {
    pub id: Uuid,
    pub name: String,
    pub description: String,
    pub mebibytes: u64,
    pub parameters: Parameters,
    /// The volume begins with the contents of this snapshot.
    pub snapshot: Option<Snapshot>,
}

impl Daemon {
    pub fn new(connect: impl Fn() -> Result<Client, ClientError> + Send + Sync + 'static) -> Self {
        Self {
            connect: Arc::new(connect),
            deployment: Arc::default(),
            is_looking: Arc::default(),
        }
    }

    fn call<M: Called>(&self, params: &M::Params) -> Result<M::Answer, ClientError> {
        let answer = (self.connect)()?.call_for_json::<M, Engine>(params)?;
        M::Answer::deserialize(&answer).map_err(|error| ClientError::Strange {
            method: M::NAME.to_owned(),
            text: error.to_string(),
        })
    }

    /// Like [`Daemon::call`], with the error as a gRPC status.
    fn ask<M: Called>(&self, params: &M::Params) -> Result<M::Answer, Status> {
        self.call::<M>(params).map_err(|error| status(&error))
    }

    /// A client of the same daemon that does not know its deployment yet.
    pub(crate) fn anew(&self) -> Self {
        Self {
            connect: Arc::clone(&self.connect),
            deployment: Arc::default(),
            is_looking: Arc::default(),
        }
    }

    /// True once the daemon has answered and, in a cluster, has read its state from etcd. It stays
    /// true while the daemon is away later: a restart of the driver would not help. A daemon that
    /// does not answer within [`READY`] is not ready yet.
    pub fn is_ready(&self) -> bool {
        if self.deployment.get().is_some() {
            return true;
        }
        let Some(looking) = Looking::start(&self.is_looking) else {
            return false;
        };
        let (sender, receiver) = sync_channel(1);
        let daemon = self.clone();
        let look = move || {
            let is_ready = daemon.deployment().is_ok();
            drop(looking);
            let _ = sender.send(is_ready);
        };
        let started = std::thread::Builder::new().spawn(look);
        started.is_ok() && receiver.recv_timeout(READY).unwrap_or(false)
    }

    pub(crate) fn deployment(&self) -> Result<Deployment, Status> {
        if let Some(deployment) = self.deployment.get() {
            return Ok(*deployment);
        }
        let deployment = self.find_deployment()?;
        Ok(*self.deployment.get_or_init(|| deployment))
    }

    fn find_deployment(&self) -> Result<Deployment, Status> {
        match self.call::<GetClusterStatus>(&NoParams {}) {
            Ok(found) => {
                let Some(cluster) = found.cluster else {
                    let why = found.problem;
                    let why = why.as_deref().unwrap_or("the reason is unknown");
                    let text = format!("the daemon cannot read its cluster: {why}");
                    return Err(Status::unavailable(text));
                };
                Ok(Deployment::Cluster { id: cluster.id })
            }
            Err(error) if refused_with(&error, Errno::ENOTSUP) => {
                let id = self.ask::<Records>(&NoParams {})?.holder;
                Ok(Deployment::Alone { id })
            }
            Err(error) => Err(status(&error)),
        }
    }

    /// `None`: there is no such volume. In a cluster etcd confirms that: this daemon may not have
    /// heard of the volume yet.
    pub(crate) fn volume(&self, id: Uuid) -> Result<Option<Volume>, Status> {
        match self.call::<GetVolume>(&by_id(id)) {
            Ok(found) => {
                let volume = Volume::from(found);
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
        let is_there = match self.deployment()? {
            Deployment::Alone { .. } => false,
            Deployment::Cluster { .. } => self.in_cluster(id)?.is_some(),
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
    fn in_cluster(&self, id: Uuid) -> Result<Option<ClusterVolumeAnswer>, Status> {
        let all = self.ask::<GetVolumes>(&NoParams {})?;
        Ok(all.into_iter().find(|volume| volume.id == id))
    }

    /// All volumes, by id.
    pub(crate) fn volumes(&self) -> Result<Vec<Volume>, Status> {
        let found = self.ask::<List>(&NoParams {})?;
        let mut volumes: Vec<Volume> = found.into_iter().map(Volume::from).collect();
        volumes.sort_by_key(|volume| volume.id);
        Ok(volumes)
    }

    pub(crate) fn create(&self, wanted: &WantedVolume) -> Result<Volume, Status> {
        let parameters = &wanted.parameters;
        let mut params = CreateParams {
            name: wanted.name.clone(),
            ..CreateParams::default()
        };
        params.options.uuid = Some(wanted.id);
        params.options.settings.description = Some(wanted.description.clone());
        match self.deployment()? {
            Deployment::Alone { .. } => {
                let mut pools = self.pools_for(parameters)?;
                if let Some(snapshot) = &wanted.snapshot {
                    put_first(&mut pools, snapshot, parameters)?;
                    params.options.snapshot = Some(snapshot.id.to_string());
                }
                let pools = pools.into_iter().take(parameters.replica_count());
                let replicas = pools.map(|pool| PoolReplica {
                    pool: pool.name,
                    size: None,
                    thin: parameters.is_thin,
                });
                params.replicas = replicas.collect();
                params.size_mb = Some(wanted.mebibytes);
            }
            Deployment::Cluster { .. } => {
                params.size = Some(wanted.mebibytes * MIB);
                params.options.replica_count = Some(parameters.replica_count());
                params.options.thin = parameters.is_thin;
                params.options.spread.clone_from(&parameters.spread);
                params.options.nodes.clone_from(&parameters.nodes);
                params.options.class.clone_from(&parameters.class);
                params.options.strict_spread = parameters.is_strict;
                let snapshot = wanted.snapshot.as_ref();
                params.options.snapshot = snapshot.map(|one| one.id.to_string());
            }
        }
        self.ask::<Create>(&params).map(Volume::from)
    }

    /// The online pools that the parameters name, else those with the most free space, one per
    /// replica. `RESOURCE_EXHAUSTED` if there are too few.
    pub(crate) fn pools_for(&self, parameters: &Parameters) -> Result<Vec<Pool>, Status> {
        let found = self.ask::<ListPools>(&NoParams {})?;
        let online = found.into_iter().filter(|pool| pool.state == "online");
        let pool = |pool: PoolAnswer| Pool {
            name: pool.name,
            // Thick volumes keep a part of the free space.
            free_bytes: pool.free_bytes.saturating_sub(pool.reserved_bytes),
        };
        let mut online: Vec<Pool> = online.map(pool).collect();
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
        let params = DeleteParams {
            name: volume.id.to_string(),
            force: None,
        };
        match self.call::<Delete>(&params) {
            Ok(_) => Ok(()),
            Err(error) if is_absent(&error) => self.confirm_absent(volume.id),
            Err(error) => Err(status(&error)),
        }
    }

    pub(crate) fn grow(&self, volume: &Volume, mebibytes: u64) -> Result<Volume, Status> {
        let is_in_cluster = self.deployment()?.is_cluster();
        if is_in_cluster {
            self.serve_here(volume)?;
        }
        let params = GrowParams {
            name: volume.id.to_string(),
            size_mb: Some(mebibytes),
            num_blocks: None,
            size: None,
        };
        let grown = self.call::<Grow>(&params).map_err(|error| {
            // Another node took the volume meanwhile: the next try moves it again.
            if is_in_cluster && refused_with(&error, Errno::EPERM) {
                Status::aborted(error.to_string())
            } else {
                status(&error)
            }
        })?;
        let grown = Volume::from(grown);
        if grown.id != volume.id {
            return Err(Status::internal(format!(
                "the daemon's answer to {} is about volume {}, not {}: run the driver and the \
                 daemon in the same version",
                Grow::NAME,
                grown.id,
                volume.id
            )));
        }
        Ok(grown)
    }

    /// Moves the volume to this daemon's node, if another one serves it: only the node that serves
    /// a volume grows it. Hosts see no error.
    fn serve_here(&self, volume: &Volume) -> Result<(), Status> {
        let nodes = self.ask::<GetNodes>(&NoParams {})?;
        let here = nodes.into_iter().find(|node| node.this_node);
        let held = self.in_cluster(volume.id)?;
        let held = held.filter(|one| one.lease_stands);
        let Some((here, holder)) = here.zip(held.and_then(|one| one.holder)) else {
            // The daemon's refusal names the missing part.
            return Ok(());
        };
        if here.id != holder.id {
            self.ask::<MoveVolume>(&MoveVolumeParams {
                volume: volume.id.to_string(),
                node: here.id,
                wait_s: MOVED_S,
            })?;
        }
        Ok(())
    }

    /// `None`: no host may use the volume.
    pub(crate) fn publication(&self, volume: &Volume) -> Result<Option<Publication>, Status> {
        if let Deployment::Cluster { .. } = self.deployment()? {
            let found = self.in_cluster(volume.id)?;
            return Ok(found.and_then(cluster_publication));
        }
        let Some(own) = volume.subsystem()? else {
            return Ok(None);
        };
        let mut found = None;
        let (mut any_host, mut others) = (false, Vec::new());
        for nqn in &volume.subsystems {
            let params = GetSubsystemsParams {
                nqn: Some(nqn.clone()),
                tgt_name: None,
            };
            match self.call::<GetSubsystems>(&params) {
                Ok(answer) => {
                    let one = answer.into_iter().next().map(publication);
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

    /// Why a host without permission may still use the volume on a node of the cluster. `None`:
    /// each node that serves or could serve it has confirmed that no such host is connected, or is
    /// fenced.
    pub(crate) fn unconfirmed(&self, id: Uuid) -> Result<Option<String>, Status> {
        let params = GetUnconfirmedParams {
            volume: id.to_string(),
        };
        let nodes = self.ask::<GetUnconfirmed>(&params)?;
        let texts: Vec<String> = nodes.iter().map(doubt).collect();
        Ok((!texts.is_empty()).then(|| listed(&texts)))
    }

    /// Bytes of the largest volume with these parameters. Each replica has the same size, and a
    /// pool (in a cluster: a node) of its own.
    pub(crate) fn room(&self, parameters: &Parameters) -> Result<u64, Status> {
        match self.deployment()? {
            Deployment::Alone { .. } => {
                let pools = match self.pools_for(parameters) {
                    Ok(pools) => pools,
                    Err(refused) if refused.code() == Code::ResourceExhausted => Vec::new(),
                    Err(refused) => return Err(refused),
                };
                Ok(pools.iter().map(|pool| pool.free_bytes).min().unwrap_or(0))
            }
            Deployment::Cluster { .. } => {
                let pools = self.ask::<GetPools>(&NoParams {})?;
                Ok(cluster_room(&pools, parameters))
            }
        }
    }

    /// The NQNs of the hosts that may use each volume, in the order of `volumes`.
    pub(crate) fn publications(&self, volumes: &[Volume]) -> Result<Vec<Vec<String>>, Status> {
        match self.deployment()? {
            Deployment::Alone { .. } => {
                let found = self.ask::<GetSubsystems>(&GetSubsystemsParams::default())?;
                let hosts = volumes.iter().map(|volume| {
                    let nqn = volume.subsystem().ok().flatten()?;
                    found.iter().find(|one| one.nqn == *nqn).map(answers::hosts)
                });
                Ok(hosts.map(Option::unwrap_or_default).collect())
            }
            Deployment::Cluster { .. } => {
                let found = self.ask::<GetVolumes>(&NoParams {})?;
                let hosts = volumes.iter().map(|volume| {
                    let one = found.iter().find(|one| one.id == volume.id)?;
                    Some(one.publication.as_ref()?.hosts.clone())
                });
                Ok(hosts.map(Option::unwrap_or_default).collect())
            }
        }
    }

    /// Allows these hosts, and no others, to use the volume. `before` is its present publication.
    pub(crate) fn publish(
        &self,
        volume: &Volume,
        before: Option<&Publication>,
        hosts: &[String],
    ) -> Result<(), Status> {
        let id = volume.id.to_string();
        match (self.deployment()?, before) {
            (_, None) => {
                self.ask::<Publish>(&PublishParams::of(id, hosts.to_vec()))?;
            }
            (Deployment::Cluster { .. }, Some(before)) => {
                let mut params = PublishParams::of(id, hosts.to_vec());
                params.nodes.clone_from(&before.nodes);
                self.ask::<Publish>(&params)?;
            }
            (Deployment::Alone { .. }, Some(before)) => {
                let nqn = &before.nqn;
                for host in hosts.iter().filter(|host| !before.hosts.contains(host)) {
                    self.ask::<AddHost>(&AddHostParams {
                        nqn: nqn.clone(),
                        host: host.clone(),
                        ..AddHostParams::default()
                    })?;
                }
                for host in before.hosts.iter().filter(|host| !hosts.contains(host)) {
                    let params = RemoveHostParams {
                        nqn: nqn.clone(),
                        host: host.clone(),
                        ..RemoveHostParams::default()
                    };
                    match self.call::<RemoveHost>(&params) {
                        Err(error) if !is_absent(&error) => return Err(status(&error)),
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn unpublish(&self, volume: &Volume) -> Result<(), Status> {
        match self.call::<Unpublish>(&by_id(volume.id)) {
            Err(error) if !is_absent(&error) => Err(status(&error)),
            _ => Ok(()),
        }
    }

    /// True if the host, or any host if it is `None`, has a connection for the volume to this
    /// daemon.
    pub(crate) fn is_connected(&self, id: Uuid, host: Option<&str>) -> Result<bool, Status> {
        match self.call::<GetConnections>(&by_id(id)) {
            Ok(all) => {
                let mut all = all.iter();
                Ok(all.any(|one| host.is_none_or(|host| one.host == host)))
            }
            // Without a device there are no connections.
            Err(error) if is_absent(&error) || refused_with(&error, Errno::EAGAIN) => Ok(false),
            Err(error) => Err(status(&error)),
        }
    }
}

/// Puts the pool of the snapshot first: a clone is there. It takes the place of the pool with the
/// least space. Refused if the parameters name other pools.
fn put_first(
    pools: &mut Vec<Pool>,
    snapshot: &Snapshot,
    parameters: &Parameters,
) -> Result<(), Status> {
    let name = &snapshot.pool;
    let at = pools.iter().position(|pool| pool.name == *name);
    let first = match at {
        Some(at) => pools.remove(at),
        None if parameters.pools.is_empty() => {
            pools.pop();
            Pool {
                name: name.clone(),
                free_bytes: 0,
            }
        }
        None => {
            let text = format!("parameter pool: the source is on pool \"{name}\": name it as well");
            return Err(Status::invalid_argument(text));
        }
    };
    pools.insert(0, first);
    Ok(())
}

fn by_id(volume: Uuid) -> NameParams {
    NameParams {
        name: volume.to_string(),
    }
}

/// The first four of these texts, and the number of the others.
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

fn status(error: &ClientError) -> Status {
    let text = error.to_string();
    match error {
        ClientError::Unreachable { .. }
        | ClientError::Remote { .. }
        | ClientError::Handshake { .. }
        | ClientError::Broken { .. } => Status::unavailable(text),
        ClientError::Late { .. } => Status::deadline_exceeded(text),
        ClientError::Strange { .. } => Status::internal(format!(
            "{text}: run the driver and the daemon in the same version"
        )),
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

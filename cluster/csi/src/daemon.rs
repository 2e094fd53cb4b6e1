//! The daemon, as this driver needs it: volumes, pools and publications, by JSON-RPC. Each call has
//! a connection of its own.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nacre_engine_rpc::client::{Client, ClientError};
use nacre_engine_rpc::error::{Errno, INVALID_PARAMS, INVALID_STATE};
use serde_json::{Value, json};
use tonic::Status;
use uuid::Uuid;

type Connect = Arc<dyn Fn() -> Result<Client, ClientError> + Send + Sync>;

/// Most nodes and hosts in a refusal.
const NAMED: usize = 4;

#[derive(Clone)]
pub struct Daemon {
    connect: Connect,
    /// Known after the first answer; it does not change while a daemon lives.
    place: Arc<OnceLock<Place>>,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Daemon")
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

/// How hosts reach a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Publication {
    pub nqn: String,
    pub hosts: Vec<String>,
    pub any_host: bool,
    /// In a cluster: the nodes that show the volume.
    pub nodes: Vec<String>,
    /// Addresses at which hosts reach the volume, as URIs.
    pub portals: Vec<String>,
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
    pub parameters: crate::capability::Parameters,
}

impl Daemon {
    pub fn new(connect: impl Fn() -> Result<Client, ClientError> + Send + Sync + 'static) -> Self {
        Self {
            connect: Arc::new(connect),
            place: Arc::default(),
        }
    }

    fn call(&self, method: &str, params: Value) -> Result<Value, ClientError> {
        (self.connect)()?.call_by_name(method, params)
    }

    /// As [`Daemon::call`], with the interface's code for a failure.
    fn ask(&self, method: &str, params: Value) -> Result<Value, Status> {
        self.call(method, params).map_err(|error| status(&error))
    }

    /// True once the daemon has answered and, in a cluster, has read its state from etcd. It stays
    /// true while the daemon is away later: a restart of the driver would not help.
    pub fn is_ready(&self) -> bool {
        self.place().is_ok()
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

    pub(crate) fn volume(&self, id: Uuid) -> Result<Option<Volume>, Status> {
        match self.call("volume_get", json!({ "name": id.to_string() })) {
            Ok(found) => {
                let volume = volume(&found).ok_or_else(|| strange("volume_get", "volume"))?;
                // A volume may have the text of another one's id as its name.
                Ok(Some(volume).filter(|volume| volume.id == id))
            }
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(status(&error)),
        }
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
                params["size"] = (wanted.mebibytes * crate::capability::MIB).into();
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
    pub(crate) fn pools_for(
        &self,
        parameters: &crate::capability::Parameters,
    ) -> Result<Vec<Pool>, Status> {
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
            Err(error) if is_absent(&error) => Ok(()),
            Err(error) => Err(status(&error)),
        }
    }

    pub(crate) fn grow(&self, volume: &Volume, mebibytes: u64) -> Result<Volume, Status> {
        if let Place::Cluster { .. } = self.place()? {
            self.serve_here(volume)?;
        }
        let params = json!({ "name": volume.name, "size_mb": mebibytes });
        let grown = self.ask("volume_grow", params)?;
        crate::daemon::volume(&grown).ok_or_else(|| strange("volume_grow", "volume"))
    }

    /// Moves the volume to this daemon's node, if another one serves it: only the node that serves
    /// a volume grows it. Hosts see no error.
    fn serve_here(&self, volume: &Volume) -> Result<(), Status> {
        let status = self.ask("cluster_get_status", Value::Null)?;
        let mut nodes = status["nodes"].as_array().into_iter().flatten();
        let here = nodes.find(|node| node["this_node"] == true);
        let volumes = self.ask("cluster_get_volumes", Value::Null)?;
        let id = volume.id.to_string();
        let mut volumes = volumes.as_array().into_iter().flatten();
        let held = volumes.find(|one| one["id"] == id.as_str());
        let held = held.filter(|one| one["lease_stands"] == true);
        let holder = held.and_then(|one| one["holder"]["id"].as_str());
        let Some((here, holder)) = here.and_then(|node| node["id"].as_str()).zip(holder) else {
            // The daemon's refusal names the missing part.
            return Ok(());
        };
        if here != holder {
            let params = json!({ "volume": id, "node": here });
            self.ask("cluster_move_volume", params)?;
        }
        Ok(())
    }

    /// `None`: no host may use the volume.
    pub(crate) fn publication(&self, volume: &Volume) -> Result<Option<Publication>, Status> {
        match self.place()? {
            Place::Alone { .. } => {
                let Some(nqn) = volume.subsystems.first() else {
                    return Ok(None);
                };
                match self.call("nvmf_get_subsystems", json!({ "nqn": nqn })) {
                    Ok(found) => Ok(publication(&found[0])),
                    Err(error) if is_absent(&error) => Ok(None),
                    Err(error) => Err(status(&error)),
                }
            }
            Place::Cluster { .. } => {
                let found = self.ask("cluster_get_volumes", Value::Null)?;
                let id = volume.id.to_string();
                let all = found.as_array().into_iter().flatten();
                let mut of_this = all.filter(|one| one["id"] == id.as_str());
                Ok(of_this.next().and_then(cluster_publication))
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
                    let nqn = volume.subsystems.first();
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

    /// True if this daemon has a connection of the host to the volume.
    pub(crate) fn is_connected(&self, volume: &Volume, host: &str) -> Result<bool, Status> {
        match self.call(
            "volume_get_connections",
            json!({ "name": volume.id.to_string() }),
        ) {
            Ok(found) => {
                let mut all = found.as_array().into_iter().flatten();
                Ok(all.any(|one| one["host"] == host))
            }
            // Without a device there are no connections.
            Err(ClientError::Refused { .. }) => Ok(false),
            Err(error) => Err(status(&error)),
        }
    }
}

fn volume(found: &Value) -> Option<Volume> {
    let block = found["block_size"].as_u64()?;
    let subsystems = found["subsystems"].as_array().into_iter().flatten();
    Some(Volume {
        id: found["uuid"].as_str()?.parse().ok()?,
        name: found["name"].as_str()?.to_owned(),
        bytes: found["num_blocks"].as_u64()?.checked_mul(block)?,
        replicas: found["replicas"].as_array()?.len(),
        description: text(&found["settings"]["description"]),
        subsystems: subsystems.map(text).collect(),
    })
}

fn publication(subsystem: &Value) -> Option<Publication> {
    let hosts = subsystem["hosts"].as_array().into_iter().flatten();
    Some(Publication {
        nqn: subsystem["nqn"].as_str()?.to_owned(),
        hosts: hosts.map(|host| text(&host["nqn"])).collect(),
        any_host: subsystem["allow_any_host"] == true,
        nodes: Vec::new(),
        portals: portals(&subsystem["listen_addresses"]),
    })
}

fn cluster_publication(volume: &Value) -> Option<Publication> {
    let found = &volume["publication"];
    let nodes = volume["nodes"].as_array().into_iter().flatten();
    let hosts = found["hosts"].as_array().into_iter().flatten();
    Some(Publication {
        nqn: found["nqn"].as_str()?.to_owned(),
        hosts: hosts.map(text).collect(),
        any_host: found["any_host"] == true,
        nodes: nodes.map(|node| text(&node["id"])).collect(),
        portals: portals(&found["listen_addresses"]),
    })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn portals(addresses: &Value) -> Vec<String> {
    let all = addresses.as_array().into_iter().flatten();
    all.filter_map(portal).collect()
}

/// `tcp://ADDRESS:PORT` or `rdma://ADDRESS:PORT`; `None`: no host can connect to it.
fn portal(address: &Value) -> Option<String> {
    let transport = address["trtype"].as_str()?.to_lowercase();
    let ip: std::net::IpAddr = address["traddr"].as_str()?.parse().ok()?;
    let port: u16 = address["trsvcid"].as_str()?.parse().ok()?;
    let is_usable = !ip.is_unspecified() && matches!(transport.as_str(), "tcp" | "rdma");
    is_usable.then(|| format!("{transport}://{}", std::net::SocketAddr::new(ip, port)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_become_uris() {
        let portal = |trtype: &str, traddr: &str, trsvcid: &str| {
            portal(&json!({ "trtype": trtype, "traddr": traddr, "trsvcid": trsvcid }))
        };
        let tcp = portal("TCP", "192.0.2.1", "4420");
        assert_eq!(tcp.as_deref(), Some("tcp://192.0.2.1:4420"));
        let six = portal("RDMA", "2001:db8::1", "4420");
        assert_eq!(six.as_deref(), Some("rdma://[2001:db8::1]:4420"));
        for (trtype, traddr, trsvcid) in [
            ("TCP", "0.0.0.0", "4420"),
            ("TCP", "host", "4420"),
            ("TCP", "192.0.2.1", "none"),
            ("FC", "192.0.2.1", "4420"),
        ] {
            assert_eq!(
                portal(trtype, traddr, trsvcid),
                None,
                "{trtype} {traddr} {trsvcid}"
            );
        }
    }
}

//! The cluster, as `nacre doctor` and the metrics see it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::future::join_all;
use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{NodeId, VolumeId};
use nacre_cluster_etcd::{Client, Prefix};
use nacre_cluster_node::events::Counts;
use nacre_cluster_node::{self as node, Portal};
use nacre_nvmf::transport::TlsPolicy;
use tokio::net::TcpStream;
use uuid::Uuid;

use super::discovery::tls_text;
use super::{Cluster, joined};
use crate::config::Settings;
use crate::doctor::cluster as doctor;
use crate::doctor::volume_store::VolumeStoreReport;
use crate::services::volumes::{self, endpoints, holder};

/// Time limit of a connection to another node.
const CONNECTED: Duration = Duration::from_secs(2);

/// Figures of this node.
pub(crate) struct Figures {
    pub lease_left: Duration,
    pub renewals: u64,
    pub counts: Counts,
    /// Volumes that this node holds or takes, and others that it shows to hosts.
    pub held: usize,
    pub standby: usize,
    /// Nodes with a description, and those of them without a lease.
    pub nodes: usize,
    pub away: usize,
    /// The brake was set at the last check: no lost replica is replaced.
    pub is_braked: bool,
}

impl Cluster {
    /// `None`: the daemon is in no cluster, or has left it.
    pub(crate) fn figures(&self) -> Option<Figures> {
        let running = self.running()?;
        let node = running.node.borrow();
        let node = node.as_ref()?;
        let states = node.volumes();
        let is_held =
            |state: &HoldingState| !matches!(state, HoldingState::Standby | HoldingState::Fenced);
        let held = states.iter().filter(|(_, state)| is_held(state)).count();
        let shown = running.shown.borrow();
        let is_standby = |id: &VolumeId| {
            let mut of_this = states.iter().filter(|(of, _)| of == id);
            !of_this.any(|(_, state)| is_held(state))
        };
        let nodes = running.inbox.nodes();
        let away = nodes.keys();
        let away = away.filter(|node| running.inbox.is_node_away(**node));
        Some(Figures {
            lease_left: node.lease_left(),
            renewals: node.renewals(),
            counts: node.events().counts(),
            held,
            standby: shown.keys().filter(|id| is_standby(id)).count(),
            away: away.count(),
            is_braked: running.is_braked.get(),
            nodes: nodes.len(),
        })
    }
}

/// Reads the volume store in etcd and its cluster. Blocks. `None`: the store is not in etcd.
pub fn store_for_doctor(settings: &Settings, dir: Option<&Path>) -> Option<VolumeStoreReport> {
    let mut store = volumes::store_for_doctor(settings, dir)?;
    store.cluster = for_doctor(settings, dir);
    Some(store)
}

/// Queries etcd and connects to the other nodes. Blocks. `None`: the configuration names no
/// cluster.
fn for_doctor(settings: &Settings, dir: Option<&Path>) -> Option<doctor::Cluster> {
    let name = settings.cluster.name.clone()?;
    let unknown = |why: String| doctor::Cluster {
        name: name.clone(),
        joined: None,
        found: Err(why),
        answer: None,
        peers: Vec::new(),
    };
    let found = examine(settings, &name, dir);
    Some(found.unwrap_or_else(|error| unknown(format!("{error:#}"))))
}

fn examine(settings: &Settings, name: &str, dir: Option<&Path>) -> anyhow::Result<doctor::Cluster> {
    let prefix = Prefix::new(name).context("cluster.name is invalid")?;
    let endpoints = endpoints(&settings.store)?;
    let joined: Option<Uuid> = match dir {
        Some(dir) => joined::known(dir, name)?,
        None => None,
    };
    let me = dir.and_then(holder::known).map(NodeId);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let client = std::sync::Arc::new(Client::new(&endpoints)?);
        let members = client.members().await;
        let answered = members.iter().filter(|member| member.status.is_ok());
        let answer = answered.map(|member| member.took).max();
        let found = node::Cluster::read(&client, &prefix).await;
        let found = found.map(|cluster| doctor::Found {
            id: cluster.id.to_string(),
            lease: Duration::from_millis(cluster.lease_ms),
        });
        let operator = node::Operator::new(client, prefix);
        // Without the list, the finding about the cluster has the reason.
        let nodes = operator.described().await.unwrap_or_default();
        let others = nodes.into_iter().filter(|(id, ..)| Some(*id) != me);
        let peers = others.map(async |(_, key, has_lease)| doctor::Peer {
            name: key.description.name.clone(),
            has_lease,
            needs_tls: needs_tls(&key.description),
            portals: join_all(key.description.replica_portals.iter().map(tried)).await,
        });
        Ok(doctor::Cluster {
            name: name.to_owned(),
            joined: joined.map(|id| id.to_string()),
            found: found.map_err(|error| error.to_string()),
            answer,
            peers: join_all(peers).await,
        })
    })
}

/// True if all addresses of a node require TLS. False for descriptions that do not have the policy.
fn needs_tls(description: &node::Description) -> bool {
    let require = Some(tls_text(TlsPolicy::Require));
    let portals = &description.portals;
    !portals.is_empty() && portals.iter().all(|one| one.tls.as_deref() == require)
}

/// Tries to connect to an address. `None`: not tried, because the transport is not TCP.
async fn tried(portal: &Portal) -> (String, Option<Result<Duration, String>>) {
    let Portal {
        trtype,
        traddr,
        trsvcid,
        ..
    } = portal;
    let address = if traddr.contains(':') {
        format!("[{traddr}]:{trsvcid}")
    } else {
        format!("{traddr}:{trsvcid}")
    };
    let shown = format!("{}://{address}", trtype.to_lowercase());
    if !trtype.eq_ignore_ascii_case("tcp") {
        return (shown, None);
    }
    let began = Instant::now();
    let outcome = match tokio::time::timeout(CONNECTED, TcpStream::connect(&address)).await {
        Ok(Ok(_)) => Ok(began.elapsed()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {CONNECTED:?}")),
    };
    (shown, Some(outcome))
}

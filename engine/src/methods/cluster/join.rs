//! Looks for a cluster in etcd, for `nacre cluster join`. No daemon is needed.

use std::time::Duration;

use nacre_cluster_node::{Cluster, Operator};
use uuid::Uuid;

use super::without_daemon::with_etcd;
use crate::config::settings::VolumeStoreSettings;

/// A cluster that exists.
#[derive(Debug)]
pub struct FoundCluster {
    pub id: Uuid,
    pub lease: Duration,
    /// The names of its nodes, sorted.
    pub nodes: Vec<String>,
}

/// Reads the cluster in the etcd of `store`. Blocks, for seconds at most.
pub fn look(store: &VolumeStoreSettings, name: &str) -> anyhow::Result<FoundCluster> {
    with_etcd(store, name, None, async |client, prefix| {
        client.check_version().await?;
        let cluster = Cluster::read(&client, &prefix).await?;
        let names = Operator::new(client, prefix).node_names().await?;
        let mut nodes: Vec<String> = names.into_values().collect();
        nodes.sort();
        Ok(FoundCluster {
            id: cluster.id,
            lease: Duration::from_millis(cluster.lease_ms),
            nodes,
        })
    })
}

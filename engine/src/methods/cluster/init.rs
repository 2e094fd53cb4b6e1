//! Creates a cluster in etcd, for `nacre cluster init`. No daemon is needed.

use std::time::Duration;

use nacre_cluster_etcd::{Client, Prefix};
use nacre_cluster_node::Cluster;
use tokio::runtime::Builder;
use tokio::time::timeout;
use uuid::Uuid;

use super::LIMIT;
use crate::config::settings::VolumeStore;
use crate::services::volumes::endpoints;

/// A cluster that was created.
#[derive(Debug)]
pub struct Created {
    pub id: Uuid,
    pub lease: Duration,
}

/// Creates the cluster in the etcd of `store`. Blocks, for seconds at most.
pub fn init(store: &VolumeStore, name: &str, lease: Duration) -> anyhow::Result<Created> {
    let Some(prefix) = Prefix::new(name) else {
        anyhow::bail!(
            "\"{name}\" is not 1 to {} letters, digits, \".\", \"_\" or \"-\": choose another name",
            Prefix::MAX_NAME
        );
    };
    let cluster = Cluster::new(name, lease)?;
    let endpoints = endpoints(store)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = Client::new(&endpoints)?;
        let limit = endpoints.deadline + LIMIT;
        match timeout(limit, cluster.init(&client, &prefix)).await {
            Ok(made) => Ok(made?),
            Err(_) => anyhow::bail!(
                "etcd has not answered within {} s: check that it has a majority of its members \
                 and is reachable",
                limit.as_secs()
            ),
        }
    })?;
    Ok(Created {
        id: cluster.id,
        lease,
    })
}

//! Creates a cluster in etcd, for `nacre cluster init`. No daemon is needed.

use std::time::Duration;

use nacre_cluster_node::Cluster;
use uuid::Uuid;

use super::without_daemon::with_etcd;
use crate::config::settings::VolumeStoreSettings;

/// A cluster that was created.
#[derive(Debug)]
pub struct Created {
    pub id: Uuid,
    pub lease: Duration,
}

/// Creates the cluster in the etcd of `store`. Blocks, for seconds at most.
pub fn init(store: &VolumeStoreSettings, name: &str, lease: Duration) -> anyhow::Result<Created> {
    let cluster = Cluster::new(name, lease)?;
    with_etcd(store, name, None, async |client, prefix| {
        Ok(cluster.init(&client, &prefix).await?)
    })?;
    Ok(Created {
        id: cluster.id,
        lease,
    })
}

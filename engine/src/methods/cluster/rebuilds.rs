//! Rebuilds the store of a cluster, for `nacre cluster rebuild-store`. The nodes' daemons run with
//! the same etcd; this process needs none.

use std::time::Duration;

pub use nacre_cluster_node::rebuild::{Options, Rebuild, Rebuilt};

use super::without_daemon::with_etcd;
use crate::config::settings::VolumeStoreSettings;

/// Time limit for writing the keys of all volumes, after the wait for the nodes.
const WRITTEN: Duration = Duration::from_secs(3600);

/// Rebuilds the store in the etcd of `store`. `progress` gets the number of nodes that have
/// reported, and the names of the others.
pub fn run(
    store: &VolumeStoreSettings,
    name: &str,
    rebuild: &Rebuild,
    progress: impl FnMut(usize, &[String]),
) -> anyhow::Result<Rebuilt> {
    let limit = rebuild.wait + WRITTEN;
    with_etcd(store, name, Some(limit), async |client, prefix| {
        Ok(rebuild.run(&client, &prefix, name, progress).await?)
    })
}

//! Work on the cluster in etcd without a daemon: for the commands that create, join, save and
//! restore one.

use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_etcd::{Client, Prefix};
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::LIMIT;
use crate::config::settings::VolumeStoreSettings;
use crate::services::volumes::endpoints;

/// Runs `work` with a client of the etcd of `store`, for at most `limit`; `None`: for the time
/// limit of one request plus [`LIMIT`]. Blocks.
pub(super) fn with_etcd<T>(
    store: &VolumeStoreSettings,
    name: &str,
    limit: Option<Duration>,
    work: impl AsyncFnOnce(Arc<Client>, Prefix) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let Some(prefix) = Prefix::new(name) else {
        anyhow::bail!(
            "\"{name}\" is not 1 to {} letters, digits, \".\", \"_\" or \"-\": choose another name",
            Prefix::MAX_NAME
        );
    };
    let endpoints = endpoints(store)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let client = Arc::new(Client::new(&endpoints)?);
        let limit = limit.unwrap_or(endpoints.deadline + LIMIT);
        match timeout(limit, work(client, prefix)).await {
            Ok(done) => done,
            Err(_) => anyhow::bail!(
                "etcd has not answered within {} s: check that it has a majority of its members \
                 and is reachable",
                limit.as_secs()
            ),
        }
    })
}

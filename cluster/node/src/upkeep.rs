//! Upkeep of etcd, by the live node with the lowest id. Two nodes at once do no harm.
//!
//! Each renewal adds a revision: without compaction they fill etcd's quota within days.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Copies, Prefix, Txn};
use tokio::time::{Instant, sleep};
use tracing::debug;

const EVERY: Duration = Duration::from_secs(60);
/// Age up to which revisions stay, for watches that are behind.
const KEEP: Duration = Duration::from_secs(300);
/// Lines of the log of decisions that stay.
const LINES: usize = 2000;
/// Keys that one transaction deletes: etcd allows 128 operations.
const BATCH: usize = 100;

pub(crate) async fn compact(client: Arc<Client>, prefix: Prefix, me: NodeId) {
    let leases = prefix.leases();
    let mut seen: VecDeque<(Instant, i64)> = VecDeque::new();
    loop {
        sleep(EVERY).await;
        let Ok(page) = client.list(&leases).await else {
            continue;
        };
        let now = Instant::now();
        seen.push_back((now, page.revision));
        let mut due = None;
        while seen.front().is_some_and(|(at, _)| *at + KEEP <= now) {
            due = seen.pop_front().map(|(_, revision)| revision);
        }
        let first = page.keys.first().and_then(|kv| prefix.node_of(&kv.key));
        if let Some(revision) = due.filter(|_| first == Some(me))
            && let Err(error) = client.compact(revision).await
        {
            debug!(%error, "the history of etcd is not compacted");
        }
    }
}

/// Deletes the oldest lines of the log.
pub(crate) async fn prune_log(client: &Client, prefix: &Prefix) {
    let Ok(page) = client.list(&prefix.logs()).await else {
        return;
    };
    let surplus = page.keys.len().saturating_sub(LINES);
    for batch in page.keys[..surplus].chunks(BATCH) {
        let txn = batch.iter().fold(Txn::default(), |txn, kv| {
            txn.delete(&String::from_utf8_lossy(&kv.key))
        });
        if client.transact(txn, Copies::Several).await.is_err() {
            return;
        }
    }
}

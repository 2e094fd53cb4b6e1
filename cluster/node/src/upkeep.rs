//! Keeps the data of etcd bounded: compacts its history, and deletes the oldest lines of the log of
//! ended leases. The node with the lowest id that has a lease does it; two nodes at once do no
//! harm.
//!
//! Each renewal adds a revision: without compaction they fill etcd's quota within days. Each end of
//! a lease adds a line to the log.

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
/// Lines of the log of ended leases that stay.
const LINES: usize = 2000;
/// Keys that one transaction deletes: etcd allows 128 operations.
const BATCH: usize = 100;

/// Runs until it is dropped.
pub(crate) async fn run(client: Arc<Client>, prefix: Prefix, me: NodeId) {
    let mut upkeep = Upkeep::new(client, prefix, me);
    loop {
        sleep(EVERY).await;
        upkeep.turn(Instant::now()).await;
    }
}

struct Upkeep {
    client: Arc<Client>,
    prefix: Prefix,
    me: NodeId,
    /// Revisions of etcd, one per turn, up to the age [`KEEP`].
    seen: VecDeque<(Instant, i64)>,
}

impl Upkeep {
    fn new(client: Arc<Client>, prefix: Prefix, me: NodeId) -> Self {
        Self {
            client,
            prefix,
            me,
            seen: VecDeque::new(),
        }
    }

    async fn turn(&mut self, now: Instant) {
        let Ok(page) = self.client.list(&self.prefix.leases()).await else {
            return;
        };
        self.seen.push_back((now, page.revision));
        let mut due = None;
        while self.seen.front().is_some_and(|(at, _)| *at + KEEP <= now) {
            due = self.seen.pop_front().map(|(_, revision)| revision);
        }
        let first = page.keys.first();
        if first.and_then(|kv| self.prefix.node_of(&kv.key)) != Some(self.me) {
            return;
        }
        prune_log(&self.client, &self.prefix).await;
        if let Some(revision) = due
            && let Err(error) = self.client.compact(revision).await
        {
            debug!(%error, "the history of etcd is not compacted");
        }
    }
}

/// Deletes the oldest lines of the log.
async fn prune_log(client: &Client, prefix: &Prefix) {
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

#[cfg(test)]
mod tests {
    use nacre_cluster_core::VolumeId;
    use nacre_cluster_etcd::Error;
    use uuid::Uuid;

    use super::*;
    use crate::testing::on_etcd;

    async fn put(client: &Client, keys: impl Iterator<Item = String>) -> i64 {
        let txn = keys.fold(Txn::default(), |txn, key| txn.put(&key, b"{}".to_vec()));
        let answer = client.transact(txn, Copies::Several).await;
        answer.expect("an answer").revision
    }

    /// Goal: the log and the history of etcd stay bounded, by the work of the first node alone.
    /// Method: turns of two nodes on a real etcd, with a log of too many lines.
    #[test]
    fn the_first_node_prunes_and_compacts() {
        on_etcd(
            "the_first_node_prunes_and_compacts",
            async |client, prefix| {
                let nodes = [1, 2].map(|number| NodeId(Uuid::from_u128(number)));
                let upkeep = |me| Upkeep::new(Arc::clone(&client), prefix.clone(), me);
                let [mut first, mut second] = nodes.map(upkeep);
                let old = put(&client, nodes.iter().map(|node| prefix.lease(*node))).await;
                let line = |at: usize| prefix.log(at as u128, Uuid::nil());
                // More than two batches.
                let count = LINES + 2 * BATCH + 1;
                for from in (0..count).step_by(BATCH) {
                    put(&client, (from..count.min(from + BATCH)).map(line)).await;
                }
                // A neighbour of the log's keys, in their order.
                let neighbour = prefix.operation(VolumeId(Uuid::nil()));
                put(&client, [neighbour.clone()].into_iter()).await;
                let lines = async || client.list(&prefix.logs()).await.expect("a list").keys;

                let began = Instant::now();
                second.turn(began).await;
                second.turn(began + KEEP).await;
                assert_eq!(
                    lines().await.len(),
                    count,
                    "the second node changes nothing"
                );
                first.turn(began).await;
                let kept = lines().await;
                assert_eq!(kept.len(), LINES);
                assert_eq!(
                    kept[0].key,
                    line(count - LINES).into_bytes(),
                    "the oldest are gone"
                );
                assert!(client.get(&neighbour).await.expect("an answer").is_some());
                let leases = prefix.leases();
                let history = client.list_at(&leases, old).await;
                assert_eq!(history.expect("not compacted").keys.len(), 2);
                first.turn(began + KEEP).await;
                let history = client.list_at(&leases, old).await;
                assert!(
                    matches!(history, Err(Error::Compacted { .. })),
                    "{history:?}"
                );
                assert_eq!(client.list(&leases).await.expect("a list").keys.len(), 2);
                assert!(
                    first.seen.len() <= 1,
                    "revisions of compacted history are forgotten"
                );
            },
        );
    }
}

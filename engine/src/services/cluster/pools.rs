//! Reports this node's pools to the cluster, `pool/P`, when they change, with a lower rate for
//! small changes.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_pool::PoolState as Keeper;
use nacre_cluster_core::PoolId;
use nacre_cluster_node::{Error, MAX_POOLS, NodeState, PoolKey, PoolReport, PoolState};
use tokio::time::Instant;
use tracing::{debug, warn};
use uuid::Uuid;

use super::Running;
use crate::services::Engine;
use crate::services::pools::{self, OpenPool};

const LOOK: Duration = Duration::from_secs(1);
/// Least time between two reports of a pool of which only the free space has changed a little.
const SMALL_CHANGE: Duration = Duration::from_secs(60);
/// A change of the free space by more than a 64th of the pool is reported at the next check.
const PART: u64 = 64;
/// Interval at which a report is compared with etcd. This ends promises of lvols that were never
/// made.
const AGAIN: Duration = Duration::from_secs(10);
/// Time limit for a pool's disk to answer.
const ANSWER: Duration = Duration::from_secs(5);

#[derive(Default)]
struct Reporter {
    sent: BTreeMap<PoolId, Sent>,
    /// The pools that etcd had at the start were compared with those of this node.
    is_compared: bool,
    incarnation: u64,
}

struct Sent {
    report: PoolReport,
    sizes: BTreeMap<Uuid, u64>,
    /// The last change, and the last comparison with etcd.
    changed: Instant,
    compared: Instant,
}

/// Reports the pools until the daemon ends.
pub(super) async fn report(engine: Rc<Engine>, running: Rc<Running>) {
    let mut reporter = Reporter::default();
    while !running.is_ending.get() && engine.plane().is_ok() {
        if let Err(error) = reporter.turn(&engine, &running).await {
            debug!(%error, "the pools of this node are not all reported; it is tried again");
        }
        tokio::time::sleep(LOOK).await;
    }
}

impl Reporter {
    async fn turn(&mut self, engine: &Rc<Engine>, running: &Running) -> Result<(), Error> {
        let state = running.node.borrow().as_ref().map(super::Node::state);
        let Some(NodeState::In { incarnation, .. }) = state else {
            return Ok(());
        };
        if self.incarnation != incarnation.0 {
            // Another report may have been refused, and others may have changed the keys.
            self.sent.clear();
            self.is_compared = false;
            self.incarnation = incarnation.0;
        }
        let (me, operator) = (running.me, &running.operator);
        let now = Instant::now();
        let mut known = BTreeMap::new();
        for pool in engine.devices.pools.list().into_iter().take(MAX_POOLS) {
            let id = PoolId(pool.handle.id());
            let sizes = match tokio::time::timeout(ANSWER, sizes(&pool)).await {
                Ok(Some(sizes)) => sizes,
                // The last sizes, so that no promise ends.
                _ => match self.sent.get(&id) {
                    Some(sent) => sent.sizes.clone(),
                    None => continue,
                },
            };
            known.insert(id, (describe(engine, &pool, &sizes), sizes));
        }
        for id in imported(engine) {
            let absent = || {
                let sent = self.sent.get(&id).map(|sent| sent.report.clone());
                let report = PoolReport {
                    state: PoolState::Away,
                    ..sent.unwrap_or_default()
                };
                (report, BTreeMap::new())
            };
            if known.len() < MAX_POOLS {
                known.entry(id).or_insert_with(absent);
            }
        }
        if !self.is_compared || self.sent.keys().any(|id| !known.contains_key(id)) {
            for (id, _) in operator
                .pools()
                .await?
                .into_iter()
                .filter(|(_, p)| p.node() == me)
            {
                if !known.contains_key(&id) {
                    PoolKey::end(operator, me, incarnation, id).await?;
                }
            }
            self.sent.retain(|id, _| known.contains_key(id));
            self.is_compared = true;
        }
        for (id, (report, sizes)) in known {
            let sent = self.sent.get(&id);
            if !sent.is_none_or(|sent| sent.is_due(&report, &sizes, now)) {
                continue;
            }
            let is_first = sent.is_none();
            let is_changed =
                PoolKey::report_to(operator, me, incarnation, id, &report, &sizes).await?;
            if is_first && engine.devices.pools.list().len() > MAX_POOLS {
                warn!("the cluster uses only {MAX_POOLS} pools of this node");
            }
            let changed = match sent {
                Some(sent) if !is_changed => sent.changed,
                _ => now,
            };
            let sent = Sent {
                report,
                sizes,
                changed,
                compared: now,
            };
            self.sent.insert(id, sent);
        }
        Ok(())
    }
}

impl Sent {
    fn is_due(&self, report: &PoolReport, sizes: &BTreeMap<Uuid, u64>, now: Instant) -> bool {
        let without_free = |report: &PoolReport| PoolReport {
            free: 0,
            ..report.clone()
        };
        let is_other = without_free(&self.report) != without_free(report) || self.sizes != *sizes;
        let moved = self.report.free.abs_diff(report.free);
        let is_large = moved > report.total / PART;
        let is_old = moved > 0 && now - self.changed >= SMALL_CHANGE;
        is_other || is_large || is_old || now - self.compared >= AGAIN
    }
}

/// The sizes of the pool's volumes.
async fn sizes(pool: &OpenPool) -> Option<BTreeMap<Uuid, u64>> {
    let names = pool.list_names().await.ok()?;
    let volumes = names.into_iter().filter(|one| !one.is_snapshot);
    Some(volumes.map(|one| (one.id, one.bytes)).collect())
}

fn describe(engine: &Engine, pool: &OpenPool, sizes: &BTreeMap<Uuid, u64>) -> PoolReport {
    let status = pool.handle.status();
    let class = engine
        .settings
        .cluster
        .pool_class
        .get(&status.name)
        .cloned();
    PoolReport {
        name: status.name,
        class,
        total: status.total_bytes,
        free: status.free_bytes,
        reserved: status.reserved_bytes,
        provisioned: sizes
            .values()
            .fold(0, |sum, size| sum.saturating_add(*size)),
        state: match status.state {
            Keeper::Online => PoolState::Online,
            Keeper::Held => PoolState::Held,
            Keeper::Opening | Keeper::Interrupted | Keeper::Closed => PoolState::Away,
        },
    }
}

/// The pools that this daemon imports at its start.
pub(super) fn imported(engine: &Engine) -> Vec<PoolId> {
    let prefix = pools::key(Uuid::nil());
    let prefix = prefix.trim_end_matches(&Uuid::nil().to_string()).to_owned();
    let entries = engine
        .journal
        .select(|entry| entry.record.method == pools::IMPORT);
    let id = |key: &str| Uuid::parse_str(key.strip_prefix(&prefix)?).ok();
    let ids = entries.iter().filter_map(|entry| id(&entry.record.key));
    ids.map(PoolId).collect()
}

//! What each host has done on a subsystem, for as long as it is connected.
//!
//! Queues count for themselves, and their counts go with them. A host has several controllers, one per port, and a sum
//! over the queues that are there would fall when one of them leaves. So the counts of queues that were seen are held
//! on to: they are added to what is gone when the queue is, and forgotten when the host has no queue left. A queue that
//! came and went between two looks is never seen.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use nacre_nvmf::target::{Kind, LATENCY_BUCKETS, QueueStats};

/// Subsystem, host and transport.
pub type Key = (String, String, String);

/// Commands of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sum {
    pub operations: u64,
    pub bytes: u64,
    pub errors: u64,
    pub latency_ns: u64,
    pub latency: [u64; LATENCY_BUCKETS],
}

/// As labels have them, in the order of [`Sums`].
pub const KINDS: [(Kind, &str); 3] = [
    (Kind::Read, "read"),
    (Kind::Write, "write"),
    (Kind::Other, "other"),
];

pub type Sums = [Sum; KINDS.len()];

#[derive(Default)]
pub struct Hosts(RefCell<BTreeMap<Key, Host>>);

#[derive(Default)]
struct Host {
    /// Those that were there at the last look.
    queues: Vec<Arc<QueueStats>>,
    gone: Sums,
}

impl Hosts {
    /// What every host has done that has queues now.
    pub fn sums(&self, now: BTreeMap<Key, Vec<Arc<QueueStats>>>) -> BTreeMap<Key, Sums> {
        let mut hosts = self.0.borrow_mut();
        hosts.retain(|key, _| now.contains_key(key));
        let of = |(key, queues): (Key, Vec<Arc<QueueStats>>)| {
            let host = hosts.entry(key.clone()).or_default();
            (key, host.sums(queues))
        };
        now.into_iter().map(of).collect()
    }
}

impl Host {
    fn sums(&mut self, now: Vec<Arc<QueueStats>>) -> Sums {
        let there: HashSet<*const QueueStats> = now.iter().map(Arc::as_ptr).collect();
        let before = std::mem::replace(&mut self.queues, now);
        for queue in before.iter().filter(|q| !there.contains(&Arc::as_ptr(q))) {
            add(&mut self.gone, queue);
        }
        let mut sums = self.gone.clone();
        self.queues.iter().for_each(|queue| add(&mut sums, queue));
        sums
    }
}

fn add(sums: &mut Sums, queue: &QueueStats) {
    for (sum, (kind, _)) in sums.iter_mut().zip(KINDS) {
        let stats = queue.kind(kind);
        sum.operations += stats.operations.load(Relaxed);
        sum.bytes += stats.bytes.load(Relaxed);
        sum.errors += stats.errors.load(Relaxed);
        sum.latency_ns += stats.latency_ns.load(Relaxed);
        for (total, bucket) in sum.latency.iter_mut().zip(&stats.latency) {
            *total += bucket.load(Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(operations: u64) -> Arc<QueueStats> {
        let stats = QueueStats::default();
        let read = stats.kind(Kind::Read);
        for counter in [&read.operations, &read.latency[3]] {
            counter.store(operations, Relaxed);
        }
        Arc::new(stats)
    }

    fn key(host: &str) -> Key {
        ("subsystem".into(), host.into(), "TCP".into())
    }

    #[test]
    fn counts_stay_while_the_host_does() {
        let hosts = Hosts::default();
        let look = |of: &[(&str, &[&Arc<QueueStats>])]| -> Vec<u64> {
            let queues = |all: &[&Arc<QueueStats>]| all.iter().map(|q| Arc::clone(q)).collect();
            let now = of.iter().map(|(host, all)| (key(host), queues(all)));
            let sums = hosts.sums(now.collect()).into_values();
            sums.map(|[read, ..]| {
                assert_eq!(read.latency[3], read.operations);
                read.operations
            })
            .collect()
        };
        let (one, two, other) = (queue(10), queue(100), queue(1));
        assert_eq!(look(&[("a", &[&one, &two]), ("b", &[&other])]), [110, 1]);
        // What it did after the last look counts, too.
        for counter in [
            &one.kind(Kind::Read).operations,
            &one.kind(Kind::Read).latency[3],
        ] {
            counter.store(15, Relaxed);
        }
        assert_eq!(look(&[("a", &[&two]), ("b", &[&other])]), [115, 1]);
        assert_eq!(look(&[("a", &[&two])]), [115], "once only");
        // A host that left and comes back begins anew.
        assert_eq!(look(&[]), [] as [u64; 0]);
        assert_eq!(look(&[("a", &[&queue(2)])]), [2]);
    }
}

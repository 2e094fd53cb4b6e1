//! Statistics of the connected hosts of a subsystem, per host and transport.
//!
//! A sum over the present queues would decrease when a controller disconnects. So the statistics of
//! a deleted queue are added to its host's, and dropped when the host has no queue over that
//! transport any more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use nacre_nvmf_wire::Nqn;
use parking_lot::Mutex;

use crate::subsystems::stats::{Kind, LATENCY_BUCKETS, QueueStats};
use crate::transport::TransportType;

/// Statistics of one kind of commands; `latency`: counts by `stats::latency_bucket`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KindSum {
    pub operations: u64,
    pub bytes: u64,
    pub errors: u64,
    pub latency_ns: u64,
    pub latency: [u64; LATENCY_BUCKETS],
}

/// Sums by [`Kind`].
pub(super) type Sums = [KindSum; 3];

/// The statistics of a host over one transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSums {
    pub host: Nqn,
    pub transport: TransportType,
    pub sums: Sums,
}

/// The connected hosts, by NQN and transport.
#[derive(Default)]
pub(crate) struct Hosts(Mutex<BTreeMap<(Nqn, TransportType), HostStats>>);

#[derive(Default)]
struct HostStats {
    queues: Vec<Arc<QueueStats>>,
    gone: Sums,
}

impl Hosts {
    pub(crate) fn came(&self, host: &Nqn, transport: TransportType, queue: &Arc<QueueStats>) {
        let mut all = self.0.lock();
        let host = all.entry((host.clone(), transport)).or_default();
        host.queues.push(Arc::clone(queue));
    }

    pub(crate) fn went(&self, host: &Nqn, transport: TransportType, queue: &Arc<QueueStats>) {
        let mut all = self.0.lock();
        let key = (host.clone(), transport);
        let Some(host) = all.get_mut(&key) else {
            return;
        };
        host.queues.retain(|other| !Arc::ptr_eq(other, queue));
        add(&mut host.gone, queue);
        if host.queues.is_empty() {
            all.remove(&key);
        }
    }

    pub(crate) fn sums(&self) -> Vec<HostSums> {
        let all = self.0.lock();
        let of = |((name, transport), host): (&(Nqn, TransportType), &HostStats)| {
            let mut sums = host.gone.clone();
            host.queues.iter().for_each(|queue| add(&mut sums, queue));
            HostSums {
                host: name.clone(),
                transport: *transport,
                sums,
            }
        };
        all.iter().map(of).collect()
    }
}

fn add(sums: &mut Sums, queue: &QueueStats) {
    for (sum, kind) in sums.iter_mut().zip([Kind::Read, Kind::Write, Kind::Other]) {
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

    const TCP: TransportType = TransportType::Tcp;

    fn queue(operations: u64) -> Arc<QueueStats> {
        let stats = QueueStats::default();
        let read = stats.kind(Kind::Read);
        for counter in [&read.operations, &read.latency[3]] {
            counter.store(operations, Relaxed);
        }
        Arc::new(stats)
    }

    fn reads(hosts: &Hosts) -> Vec<(String, u64)> {
        let one = |HostSums { host, sums, .. }: HostSums| {
            let [read, ..] = sums;
            assert_eq!(read.latency[3], read.operations);
            let name = host.to_string();
            (name.rsplit(':').next().unwrap().to_owned(), read.operations)
        };
        hosts.sums().into_iter().map(one).collect()
    }

    /// Checks the counts with and without reads in between.
    #[test]
    fn counts_stay_while_the_host_does() {
        let hosts = Hosts::default();
        let name = |of: &str| Nqn::new(&format!("nqn.2026-01.org.example:{of}")).unwrap();
        let (a, b) = (name("a"), name("b"));
        let told = |all: &[(&str, u64)]| {
            let all = all.iter().map(|(name, count)| ((*name).to_owned(), *count));
            assert_eq!(reads(&hosts), all.collect::<Vec<_>>());
        };
        let (one, two, short, other) = (queue(10), queue(100), queue(1000), queue(1));
        hosts.came(&a, TCP, &one);
        hosts.came(&a, TCP, &two);
        hosts.came(&b, TCP, &other);
        told(&[("a", 110), ("b", 1)]);
        hosts.came(&a, TCP, &short);
        hosts.went(&a, TCP, &short);
        hosts.went(&a, TCP, &one);
        hosts.went(&b, TCP, &other);
        told(&[("a", 1110)]);
        // A host that left and comes back starts again.
        hosts.went(&a, TCP, &two);
        told(&[]);
        hosts.came(&a, TCP, &queue(2));
        told(&[("a", 2)]);
    }
}

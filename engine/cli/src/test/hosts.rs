//! Shows which listeners carry the I/O of connected hosts, from the counters of their queues.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use super::super::address::{self, ListenUrl};
use super::super::reply::items;

/// Completed I/O commands of each queue of a subsystem, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HostIo(BTreeMap<Queue, u64>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Queue {
    host: String,
    listener: String,
    cntlid: u64,
    qid: u64,
}

impl HostIo {
    /// Reads the reply of `nvmf_subsystem_get_qpairs`, without the controllers `own`: the CNTLIDs
    /// of this program.
    pub(super) fn read(qpairs: &Value, own: &BTreeSet<u64>, listeners: &[ListenUrl]) -> Self {
        let queue = |qpair: &Value| {
            let cntlid = qpair["cntlid"].as_u64()?;
            let host = qpair["hostnqn"].as_str()?.to_owned();
            (!own.contains(&cntlid)).then_some(())?;
            let queue = Queue {
                host,
                listener: listener_of(&qpair["listen_address"], listeners),
                cntlid,
                qid: qpair["qid"].as_u64()?,
            };
            Some((queue, qpair["completed_nvme_io"].as_u64().unwrap_or(0)))
        };
        Self(items(qpairs).iter().filter_map(queue).collect())
    }

    /// Hosts with I/O queues at the listener and at none of the others.
    pub(super) fn without_path(&self, listener: &str, others: &[String]) -> Vec<String> {
        let mut at: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for queue in self.0.keys() {
            at.entry(&queue.host).or_default().insert(&queue.listener);
        }
        let lonely = at.iter().filter(|(_, listeners)| {
            listeners.contains(listener) && !others.iter().any(|o| listeners.contains(o.as_str()))
        });
        lonely.map(|(host, _)| (*host).to_owned()).collect()
    }

    /// I/Os since an earlier snapshot: by host, then by listener.
    fn since(&self, earlier: &Self) -> BTreeMap<&str, BTreeMap<&str, u64>> {
        let mut hosts: BTreeMap<&str, BTreeMap<&str, u64>> = BTreeMap::new();
        for (queue, count) in &self.0 {
            let before = earlier.0.get(queue).copied().unwrap_or(0);
            let listeners = hosts.entry(&queue.host).or_default();
            // A smaller count is that of a new queue with the same number.
            *listeners.entry(&queue.listener).or_default() +=
                count.checked_sub(before).unwrap_or(*count);
        }
        hosts
    }
}

/// The listener of a queue: the one at its address, else one at every address of its port.
fn listener_of(address: &Value, listeners: &[ListenUrl]) -> String {
    let name = address::describe(address);
    let Some(url) = ListenUrl::from_value(address) else {
        return name;
    };
    let takes_any = |one: &&ListenUrl| {
        one.transport == url.transport && one.port == url.port && one.ip.ip.is_unspecified()
    };
    match listeners.iter().find(takes_any) {
        Some(any) if !listeners.contains(&url) => any.to_string(),
        _ => name,
    }
}

/// I/Os before the test from which on a host counts as busy.
const BUSY: u64 = 10;

/// The behaviour of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Behaviour {
    /// It had I/O on the listener and moved it to another.
    Moved,
    /// It had I/O on other listeners only.
    NotThere,
    /// It had no I/O meanwhile, and hardly any before.
    Idle,
    /// Its I/O stopped.
    Stopped,
    /// It kept I/O on the inaccessible listener.
    Stayed,
}

/// A connected host during the test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct HostReport {
    pub hostnqn: String,
    pub behaviour: Behaviour,
    /// I/Os on the listener and on others: before, while it was inaccessible, and after.
    pub before: (u64, u64),
    pub withdrawn: (u64, u64),
    pub after: (u64, u64),
    /// True if the I/O is on the listener again.
    pub returned: bool,
}

/// The snapshots of a test: at the begin and the end of each phase, without the time that hosts
/// take to move.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshots {
    pub before: (HostIo, HostIo),
    pub withdrawn: (HostIo, HostIo),
    pub after: (HostIo, HostIo),
}

/// Determines the behaviour of each host from its I/O on the listener and on others.
pub(super) fn host_reports(snapshots: &Snapshots, listener: &str) -> Vec<HostReport> {
    let phases = [&snapshots.before, &snapshots.withdrawn, &snapshots.after];
    let [before, withdrawn, after] = phases.map(|(from, to)| to.since(from));
    let mut hosts: BTreeSet<&str> = before.keys().copied().collect();
    hosts.extend(withdrawn.keys());
    let split = |phase: &BTreeMap<&str, BTreeMap<&str, u64>>, host: &str| {
        let listeners = phase.get(host);
        let sum = |here: bool| {
            listeners.map_or(0, |listeners| {
                let of = listeners
                    .iter()
                    .filter(|(at, _)| (**at == listener) == here);
                of.map(|(_, count)| count).sum()
            })
        };
        (sum(true), sum(false))
    };
    let report = |host: &str| {
        let [before, withdrawn, after] =
            [&before, &withdrawn, &after].map(|phase| split(phase, host));
        let behaviour = match (before, withdrawn) {
            (_, (1.., _)) => Behaviour::Stayed,
            ((1.., _), (0, 1..)) => Behaviour::Moved,
            ((0, _), (0, 1..)) => Behaviour::NotThere,
            ((here, others), (0, 0)) if here + others < BUSY => Behaviour::Idle,
            (_, (0, 0)) => Behaviour::Stopped,
        };
        HostReport {
            hostnqn: host.to_owned(),
            behaviour,
            before,
            withdrawn,
            after,
            returned: after.0 > 0,
        }
    };
    hosts.into_iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn snapshot(queues: &[(&str, u64, &str, u64)]) -> HostIo {
        let qpair = |(host, cntlid, kind, ios): &(&str, u64, &str, u64)| {
            json!({
                "cntlid": cntlid, "qid": 1, "hostnqn": host, "completed_nvme_io": ios,
                "listen_address": { "trtype": kind, "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": "4420" },
            })
        };
        let all: Vec<Value> = queues.iter().map(qpair).collect();
        HostIo::read(&json!(all), &BTreeSet::from([99]), &[])
    }

    /// Goal: every behaviour of a host is distinguished; this program's own queues do not count.
    #[test]
    fn hosts_are_judged() {
        let hosts = ["moved", "stayed", "stopped", "idle", "other"];
        // I/Os of each host on RDMA and on TCP.
        let at = |ios: [(u64, u64); 5]| {
            let mut queues = vec![("own", 99, "RDMA", 1000)];
            for (index, (host, (rdma, tcp))) in hosts.iter().zip(ios).enumerate() {
                queues.push((host, 2 * index as u64, "RDMA", rdma));
                queues.push((host, 2 * index as u64 + 1, "TCP", tcp));
            }
            snapshot(&queues)
        };
        let begin = at([(0, 0), (5, 5), (0, 0), (3, 3), (0, 0)]);
        let used = at([(10, 0), (15, 5), (10, 0), (3, 3), (0, 10)]);
        let gone = at([(10, 20), (16, 5), (10, 0), (3, 3), (0, 20)]);
        let back = at([(30, 20), (20, 5), (20, 0), (3, 3), (0, 30)]);
        let snapshots = Snapshots {
            before: (begin, used.clone()),
            withdrawn: (used, gone.clone()),
            after: (gone, back),
        };
        let reports = host_reports(&snapshots, "rdma://192.0.2.1:4420");
        let found: BTreeMap<&str, (Behaviour, bool)> = reports
            .iter()
            .map(|report| (report.hostnqn.as_str(), (report.behaviour, report.returned)))
            .collect();
        assert_eq!(
            found,
            BTreeMap::from([
                ("moved", (Behaviour::Moved, true)),
                ("stayed", (Behaviour::Stayed, true)),
                ("stopped", (Behaviour::Stopped, true)),
                ("idle", (Behaviour::Idle, false)),
                ("other", (Behaviour::NotThere, false)),
            ])
        );
        let moved = reports.iter().find(|r| r.hostnqn == "moved").unwrap();
        assert_eq!(
            (moved.before, moved.withdrawn, moved.after),
            ((10, 0), (0, 20), (20, 0))
        );
    }

    /// Goal: a host with one path is noticed, and one with another accessible path is not.
    #[test]
    fn hosts_with_one_path() {
        let now = snapshot(&[
            ("one", 1, "RDMA", 0),
            ("both", 2, "RDMA", 0),
            ("both", 3, "TCP", 0),
            ("other", 4, "TCP", 0),
        ]);
        let (rdma, tcp) = ("rdma://192.0.2.1:4420", "tcp://192.0.2.1:4420".to_owned());
        assert_eq!(now.without_path(rdma, &[tcp]), ["one"]);
        assert_eq!(now.without_path(rdma, &[]), ["both", "one"]);
    }

    /// Goal: hosts of a listener on all addresses count for it, unless their address has its own.
    #[test]
    fn listeners_on_all_addresses() {
        let at = |ip: &str, port: &str| json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": ip, "trsvcid": port });
        let listeners = ["0.0.0.0", "192.0.2.1", "0.0.0.0:1"].map(|url| url.parse().unwrap());
        for (ip, port, expected) in [
            ("192.0.2.1", "4420", "tcp://192.0.2.1:4420"),
            ("192.0.2.2", "4420", "tcp://0.0.0.0:4420"),
            ("192.0.2.1", "1", "tcp://0.0.0.0:1"),
            ("192.0.2.1", "2", "tcp://192.0.2.1:2"),
        ] {
            assert_eq!(listener_of(&at(ip, port), &listeners), expected);
        }
    }

    /// Goal: a host that connected again meanwhile is counted from zero.
    #[test]
    fn new_queues_count_from_zero() {
        let earlier = snapshot(&[("h", 1, "TCP", 100)]);
        let later = snapshot(&[("h", 1, "TCP", 7), ("h", 2, "RDMA", 5)]);
        let since = later.since(&earlier);
        let listeners: Vec<u64> = since["h"].values().copied().collect();
        assert_eq!(listeners, [5, 7]);
    }
}

//! The checks of `nacre doctor` of a node of a cluster: etcd is fast enough for the lease, the data
//! directory belongs to the cluster, the clock runs evenly, and the other nodes are reached.

use std::time::Duration;

use super::{Finding, Scope, System};

/// Renewals in the duration of a lease.
const RENEWALS: u32 = 5;
/// Clock sources that count at a fixed rate. Leases allow each clock to be wrong by 2.5 %.
const STEADY: [&str; 9] = [
    "tsc",
    "kvm-clock",
    "hyperv_clocksource_tsc_page",
    "xen",
    "hpet",
    "acpi_pm",
    "arch_sys_counter",
    "timebase",
    "riscv_clocksource",
];

/// The facts about the cluster of this node that the checks use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    pub name: String,
    /// The id of the cluster in the data directory; `None`: this node has not joined yet.
    pub joined: Option<String>,
    /// The cluster in etcd, or the reason why it cannot be read.
    pub found: Result<Found, String>,
    /// The time of the slowest answer of a member of etcd; `None`: none answers.
    pub answer: Option<Duration>,
    pub peers: Vec<Peer>,
}

/// The cluster in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub id: String,
    pub lease: Duration,
}

/// Another node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    /// False: the daemon of the node does not run, so no connection is expected.
    pub has_lease: bool,
    /// The addresses for other nodes, each with the time of a connection over TCP, or the reason
    /// why it failed; `None` for other transports.
    pub portals: Vec<(String, Option<Result<Duration, String>>)>,
    /// True if all its addresses require TLS, which nodes do not use between them.
    pub needs_tls: bool,
}

pub fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    let store = scope.volume_store.as_ref();
    let Some(cluster) = store.and_then(|store| store.cluster.as_ref()) else {
        return;
    };
    findings.push(joined(cluster));
    if let (Ok(found), Some(answer)) = (&cluster.found, cluster.answer) {
        findings.push(latency(answer, found.lease));
    }
    findings.push(clock(system));
    findings.extend(cluster.peers.iter().map(peer));
}

fn joined(cluster: &Cluster) -> Finding {
    const ID: &str = "cluster.joined";
    let name = &cluster.name;
    match (&cluster.found, &cluster.joined) {
        (Err(why), Some(_)) => {
            let remedy = "correct [store] and cluster.name; if etcd has lost its data: nacre \
                          cluster restore, or without a backup nacre cluster rebuild-store";
            Finding::fail(ID, why.clone(), remedy)
        }
        (Err(why), None) => {
            let remedy =
                "correct [store] and cluster.name, or create the cluster: nacre cluster init";
            Finding::fail(ID, why.clone(), remedy)
        }
        (Ok(found), Some(joined)) if *joined != found.id => {
            let evidence = format!(
                "the data directory belongs to cluster {joined}, and etcd has {name} with the id {}",
                found.id
            );
            let remedy = "correct the endpoints, or return the former cluster: nacre cluster \
                          restore, or without a backup nacre cluster rebuild-store";
            Finding::fail(ID, evidence, remedy)
        }
        (Ok(found), joined) => {
            let lease = found.lease;
            let state = match joined {
                Some(_) => "this node has joined it",
                None => "this node has not joined it yet",
            };
            Finding::pass(ID, format!("cluster {name}, lease {lease:?}: {state}"))
        }
    }
}

/// A renewal that takes longer than the time between two of them leaves little of the lease.
fn latency(answer: Duration, lease: Duration) -> Finding {
    const ID: &str = "cluster.latency";
    let between = lease / RENEWALS;
    let evidence = format!(
        "the slowest member of etcd answered within {:.1} ms; the lease is renewed each {} ms",
        answer.as_secs_f64() * 1e3,
        between.as_millis(),
    );
    let remedy = "give etcd disks of its own and a near network, or create the cluster with a \
                  longer --lease: a node without a lease loses its volumes";
    if answer > lease / 2 {
        Finding::fail(ID, evidence, remedy)
    } else if answer > between {
        Finding::warn(ID, evidence, remedy)
    } else {
        Finding::pass(ID, evidence)
    }
}

fn clock(system: &System) -> Finding {
    const ID: &str = "cluster.clock";
    let file = "devices/system/clocksource/clocksource0/current_clocksource";
    let path = system.roots.sys.join(file);
    let Ok(source) = std::fs::read_to_string(&path) else {
        return Finding::skip(ID, format!("{} cannot be read", path.display()));
    };
    let source = source.trim();
    let evidence = format!("the clock source is {source}");
    if STEADY.contains(&source) {
        let evidence = format!("{evidence}; leases do not depend on the time of day");
        Finding::pass(ID, evidence)
    } else {
        let remedy = "leases need clocks whose rates differ by less than 2.5 %: choose another \
                      clock source, or correct the firmware";
        Finding::warn(ID, evidence, remedy)
    }
}

fn peer(peer: &Peer) -> Finding {
    const ID: &str = "cluster.peers";
    let found = of_peer(ID, peer);
    Finding {
        subject: Some(peer.name.clone()),
        ..found
    }
}

fn of_peer(id: &'static str, peer: &Peer) -> Finding {
    if peer.portals.is_empty() {
        let remedy = "give it a listener that other nodes reach: nvmf.listen";
        return Finding::fail(id, "it describes no address", remedy);
    }
    if peer.needs_tls {
        let evidence = "all its addresses require TLS, and nodes connect to each other in clear";
        let remedy = "add an [[nvmf.listener]] without tls on the network of the nodes, or use tls \
                      = \"allow\", in its configuration";
        return Finding::fail(id, evidence, remedy);
    }
    if !peer.has_lease {
        return Finding::skip(id, "it has no lease: its daemon does not run");
    }
    let tried = peer.portals.iter();
    let tried = tried.filter_map(|(address, tried)| Some((address, tried.as_ref()?)));
    let (good, bad): (Vec<_>, Vec<_>) = tried.partition(|(_, tried)| tried.is_ok());
    let remedy = "its replicas are out of reach from here: correct its listeners, the route or the \
                  firewall";
    match (good.first(), bad.first()) {
        (_, Some((address, Err(why)))) => {
            let evidence = format!("{address}: {why}");
            if good.is_empty() {
                Finding::fail(id, evidence, remedy)
            } else {
                Finding::warn(id, evidence, remedy)
            }
        }
        (Some((address, Ok(took))), _) => {
            let took = took.as_secs_f64() * 1e3;
            Finding::pass(id, format!("{address} answers within {took:.1} ms"))
        }
        _ => Finding::skip(id, "it has only RDMA addresses, which are not tried"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    fn found(change: impl FnOnce(&mut Cluster)) -> Vec<(&'static str, Status)> {
        let mut cluster = Cluster {
            name: "lab".to_owned(),
            joined: Some("1".to_owned()),
            found: Ok(Found {
                id: "1".to_owned(),
                lease: Duration::from_secs(2),
            }),
            answer: Some(Duration::from_millis(2)),
            peers: vec![Peer {
                name: "bee".to_owned(),
                has_lease: true,
                portals: vec![(
                    "tcp://192.0.2.2:4420".to_owned(),
                    Some(Ok(Duration::from_millis(1))),
                )],
                needs_tls: false,
            }],
        };
        change(&mut cluster);
        let mut findings = vec![joined(&cluster)];
        if let (Ok(found), Some(answer)) = (&cluster.found, cluster.answer) {
            findings.push(latency(answer, found.lease));
        }
        findings.extend(cluster.peers.iter().map(peer));
        findings.iter().map(|f| (f.id, f.status)).collect()
    }

    /// Goal: each problem of a node has its finding. Method: one problem at a time.
    #[test]
    fn troubles_of_a_node() {
        let good = [
            ("cluster.joined", Status::Pass),
            ("cluster.latency", Status::Pass),
            ("cluster.peers", Status::Pass),
        ];
        assert_eq!(found(|_| {}), good);
        let with = |at: usize, status| {
            let mut all = good;
            all[at].1 = status;
            all.to_vec()
        };
        let slow = |ms| move |of: &mut Cluster| of.answer = Some(Duration::from_millis(ms));
        assert_eq!(found(slow(401)), with(1, Status::Warn));
        assert_eq!(found(slow(1001)), with(1, Status::Fail));
        let other = |of: &mut Cluster| of.joined = Some("2".to_owned());
        assert_eq!(found(other), with(0, Status::Fail));
        assert_eq!(found(|of| of.joined = None), with(0, Status::Pass));
        let lost = |of: &mut Cluster| of.found = Err("absent".to_owned());
        assert_eq!(found(lost), [("cluster.joined", Status::Fail), good[2]]);
        let portals = |of: &mut Cluster, portals: &[Option<Result<Duration, String>>]| {
            let named = |tried: &Option<_>| ("tcp://192.0.2.2:4420".to_owned(), tried.clone());
            of.peers[0].portals = portals.iter().map(named).collect();
        };
        let refused = || Some(Err("refused".to_owned()));
        let good_one = || Some(Ok(Duration::ZERO));
        assert_eq!(found(|of| portals(of, &[])), with(2, Status::Fail));
        assert_eq!(found(|of| portals(of, &[refused()])), with(2, Status::Fail));
        let one_of_two = found(|of| portals(of, &[good_one(), refused()]));
        assert_eq!(one_of_two, with(2, Status::Warn));
        assert_eq!(found(|of| portals(of, &[None])), with(2, Status::Skip));
        let needs_tls = |of: &mut Cluster| of.peers[0].needs_tls = true;
        assert_eq!(found(needs_tls), with(2, Status::Fail));
        let off = |of: &mut Cluster| of.peers[0].has_lease = false;
        assert_eq!(found(off), with(2, Status::Skip));
    }
}

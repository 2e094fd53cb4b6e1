//! Check group `peer`: compares the Ethernet settings of two machines, and tests whether the
//! network between them keeps the DSCP of packets.
//!
//! ```text
//!   nacre doctor --peer 192.0.2.7             nacre doctor --answer 192.0.2.7   (on the peer)
//!   ask ── TCP 18516: hello, counts ─────────▶ answer
//!       ◀─ settings, counts, arrivals ──────── (read-only facts of one interface)
//!       ── UDP 18516: marked probes ─────────▶
//!       ◀─ each echoed with the same mark ────
//!   Answer ─▶ comparison ─▶ findings           pure functions of both ends' settings and counts
//! ```
//!
//! The responder runs only while an operator wants it, on one address, for a limited time. It
//! serves one session, changes nothing, and echoes only datagrams with the session's token from
//! the address that opened the session. So it amplifies nothing and discloses only the network
//! settings and byte counts of the interface that was asked.

mod answer;
mod ask;
mod comparison;
mod wire;

use std::time::Duration;

use nacre_transport_rdma_link::dcb::{PRIORITIES, Priorities};
use nacre_transport_rdma_link::ethtool::PriorityCounters;
use nacre_transport_rdma_verbs::netdev::Statistics;

use super::ethernet::Facts;
use super::{Finding, Scope, System, roce};

pub use answer::{Responder, here};
pub use ask::ask;

pub use super::session::{ANSWER_PORT, Answer, AskError, Burst, Bytes, End, ProbeClass, Question};

impl End {
    /// The end at `netdev`, whose settings are on `physical`: itself, the parent of a VLAN, or the
    /// members of a bond. Different members are the finding `roce.members`; here the first counts.
    fn of(system: &System, netdev: &str, physical: &[Facts]) -> Self {
        let mut end = Self {
            interface: netdev.to_owned(),
            mtu: system.netdev_mtu(netdev),
            is_vlan: roce::is_vlan(system, netdev),
            ..Self::default()
        };
        let Some(facts) = physical.first() else {
            return end;
        };
        end.driver = facts.driver.clone();
        end.no_dcb = facts.no_dcb.clone();
        end.ecn = facts.ecn;
        if let Some(dcb) = &facts.dcb {
            end.pfc = dcb.pfc.map(|pfc| pfc.enabled);
            end.ets = dcb.ets;
            end.trusted = dcb.trusted();
            end.apps = dcb.apps.clone();
        }
        end
    }
}

/// Priorities that grew by `least` bytes or more. `None`: none is counted.
fn grown(side: &[Option<u64>; PRIORITIES], least: u64) -> Option<Priorities> {
    if side.iter().all(Option::is_none) {
        return None;
    }
    let at = (0..8u8).filter(|prio| side[usize::from(*prio)].is_some_and(|bytes| bytes >= least));
    Some(at.collect())
}

/// Reads the byte counts of these interfaces together. An interface without them adds nothing.
pub fn count(interfaces: &[String]) -> Bytes {
    let mut all = Bytes::default();
    for interface in interfaces {
        let statistics = Statistics::open(interface).and_then(|mut of| of.read());
        let counters = PriorityCounters::of(&statistics.unwrap_or_default());
        for at in 0..PRIORITIES {
            for (sum, count) in [
                (&mut all.rx[at], counters.rx[at].bytes),
                (&mut all.tx[at], counters.tx[at].bytes),
            ] {
                if let Some(bytes) = count {
                    *sum = Some(sum.unwrap_or(0) + bytes);
                }
            }
        }
    }
    all
}

/// The classes of a scope: of `[qos]`, or of `[rdma] tos`, and unmarked packets. Classes with the
/// same DSCP are one.
fn classes(scope: &Scope) -> Vec<ProbeClass> {
    let lossless = scope.marking.qos.lossless_priorities();
    let mut all: Vec<ProbeClass> = Vec::new();
    for (name, class) in scope.marking.qos.classes() {
        if let Some(dscp) = class
            .dscp
            .filter(|dscp| all.iter().all(|of| of.dscp != *dscp))
        {
            all.push(ProbeClass {
                name,
                dscp,
                priority: class.prio,
                is_lossless: class.prio.is_some_and(|prio| lossless.contains(prio)),
            });
        }
    }
    let others = [("rdma", scope.storage_tos() >> 2), (UNMARKED, 0)];
    for (name, dscp) in others {
        let is_named = dscp != 0 || name == UNMARKED;
        if is_named && all.iter().all(|of| of.dscp != dscp) {
            all.push(ProbeClass {
                name,
                dscp,
                priority: None,
                is_lossless: false,
            });
        }
    }
    all
}

/// The class of packets without a DSCP.
const UNMARKED: &str = "unmarked";

/// Compares this end with the peer's, if the scope has a peer and a route to it. `net.peer`
/// reports a missing route.
pub fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    let (Some(peer), Some(Ok(at))) = (&scope.peer, scope.peer_at(ANSWER_PORT)) else {
        return;
    };
    let Ok(source) = system.probe.source_for(at) else {
        return;
    };
    let Some(interface) = system.interface_of(source) else {
        return;
    };
    let interfaces = roce::physical(&system.roots, &interface.name);
    let facts = system.probe.ethernet(&interfaces, Duration::ZERO);
    let ours = End::of(system, &interface.name, &facts);
    let question = Question {
        at,
        source,
        interfaces,
        classes: classes(scope),
    };
    let subject = peer.to_string();
    match system.probe.peer(&question) {
        Ok(answer) => {
            let all = comparison::all(&ours, &answer);
            findings.extend(all.into_iter().map(|(class, finding)| {
                finding.of(match class {
                    Some(class) => format!("{subject} {class}"),
                    None => subject.clone(),
                })
            }));
        }
        Err(error) => {
            findings.push(comparison::not_compared(&error, &subject).of(subject.as_str()))
        }
    }
}

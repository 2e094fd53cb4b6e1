//! Check group `peer`: compares the Ethernet settings of two machines, and tests whether the
//! network between them keeps the DSCP of packets.
//!
//! ```text
//!   nacre doctor --peer 192.0.2.7             nacre doctor --answer 192.0.2.7   (on the peer)
//!   ask ── TCP 18516: hello, counts ─────────▶ answer
//!       ◀─ settings, counts, arrivals ──────── (read-only facts of one interface)
//!       ── UDP 18516: marked probes ─────────▶
//!       ◀─ each echoed with the same mark ────
//!   Answer ─▶ judge ─▶ findings                pure functions of both ends' settings and counts
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

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nacre_transport_rdma_link::dcb::{App, Ets, PRIORITIES, Priorities, Selector};
use nacre_transport_rdma_link::ethtool::PriorityCounters;
use nacre_transport_rdma_verbs::netdev::Statistics;
use serde::{Deserialize, Serialize};

use super::ethernet::{Ecn, Facts};
use super::{Finding, Scope, System, roce};

pub use answer::{Responder, here};
pub use ask::ask;

use wire::VERSION;

/// TCP and UDP port of the responder; the next one after `nacre rdma perf`'s.
pub const ANSWER_PORT: u16 = 18516;

/// The settings of one end's interface, as far as they are to be compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub interface: String,
    pub driver: Option<String>,
    pub mtu: Option<u32>,
    /// The interface is a VLAN: packets have a tag with a priority.
    pub is_vlan: bool,
    /// Why the settings below cannot be read.
    pub no_dcb: Option<String>,
    /// Priorities with PFC.
    pub pfc: Option<Priorities>,
    pub ets: Option<Ets>,
    /// Fields that select a packet's priority, in order.
    pub trusted: Vec<Selector>,
    pub apps: Vec<App>,
    pub ecn: Option<Ecn>,
}

impl End {
    /// False for text that no interface of Linux has. It comes from another machine, and is shown
    /// in a terminal and as a part of commands.
    fn is_printable(&self) -> bool {
        let of_name = |c: char| c.is_ascii_alphanumeric() || "._@:-".contains(c);
        let short = |text: &Option<String>| {
            let mut text = text.iter();
            text.all(|text| text.len() <= 256 && !text.contains(char::is_control))
        };
        (1..=15).contains(&self.interface.len())
            && self.interface.chars().all(of_name)
            && short(&self.driver)
            && short(&self.no_dcb)
    }

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

    /// The priority of packets with this DSCP. `None`: unknown, or the VLAN tag decides.
    fn priority_of(&self, dscp: u8) -> Option<u8> {
        if self.trusted.is_empty() {
            return None;
        }
        for selector in &self.trusted {
            match selector {
                Selector::Dscp => {
                    let entries = self.apps.iter().filter(|app| {
                        app.selector == Selector::Dscp && app.value == u16::from(dscp)
                    });
                    // Without an entry the class selector decides (RFC 2474).
                    return Some(entries.map(|app| app.priority).max().unwrap_or(dscp >> 3));
                }
                Selector::Pcp if self.is_vlan => return None,
                _ => {}
            }
        }
        Some(0)
    }

    fn driver(&self) -> &str {
        self.driver.as_deref().unwrap_or("unknown")
    }
}

/// Bytes by priority since the driver was loaded; `None`: the driver does not count them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    pub rx: [Option<u64>; PRIORITIES],
    pub tx: [Option<u64>; PRIORITIES],
}

impl Bytes {
    /// The growth since `before`.
    fn since(&self, before: &Self) -> Self {
        let grown = |now: &[Option<u64>; PRIORITIES], then: &[Option<u64>; PRIORITIES]| {
            std::array::from_fn(|at| Some(now[at]?.saturating_sub(then[at]?)))
        };
        Self {
            rx: grown(&self.rx, &before.rx),
            tx: grown(&self.tx, &before.tx),
        }
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

/// A class of traffic to send probes of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeClass {
    /// `storage`, `replication`, or `unmarked`.
    pub name: &'static str,
    pub dscp: u8,
    /// The priority that `[qos]` asks for.
    pub priority: Option<u8>,
    pub is_lossless: bool,
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

/// The questions of a session: the responder, this end, and the classes of probes.
#[derive(Debug, Clone)]
pub struct Question {
    pub at: SocketAddr,
    pub source: IpAddr,
    /// The physical interfaces of this end.
    pub interfaces: Vec<String>,
    pub classes: Vec<ProbeClass>,
}

/// Everything learned in a session.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    pub theirs: End,
    pub bursts: Vec<Burst>,
}

/// The probes of one class: their number, and by DSCP the number of those that arrived.
#[derive(Debug, Clone)]
pub struct Burst {
    pub class: ProbeClass,
    pub sent: u64,
    /// At the peer.
    pub arrived: BTreeMap<u8, u64>,
    /// The peer's echoes, here.
    pub returned: BTreeMap<u8, u64>,
    /// Growth of the byte counts of both ends during the burst.
    pub ours: Bytes,
    pub theirs: Bytes,
}

/// Why the two ends could not be compared.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("no responder on TCP port {ANSWER_PORT}: {0}")]
    NoResponder(#[source] io::Error),
    #[error("the responder has version {theirs} of the protocol, this program {VERSION}")]
    Version { theirs: u32 },
    /// The peer broke the rules of the protocol.
    #[error("the responder sent a malformed {0}")]
    Malformed(&'static str),
    #[error("the session with the responder ended: {0}")]
    Io(#[from] io::Error),
}

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

//! Checks of the counters of lost packets: those of RDMA ports, and those of the network cards that
//! carry RoCE.
//!
//! A counter that grows while the doctor runs is a present problem. A count since boot is compared
//! with the packets since boot: at most one lost packet in [`ONE_IN`] is harmless.

use std::collections::BTreeMap;
use std::time::Instant;

use nacre_transport_rdma_link::ethtool::PriorityCounters;
use nacre_transport_rdma_link::qos::Qos;
use nacre_transport_rdma_link::{CounterGroup, Symptom, counters};

use super::ethernet::Facts;
use super::{Finding, Scope, System};

/// RoCE sends everything after a lost packet again, so it suffers earlier than TCP.
const ONE_IN: u64 = 100_000;

/// Counters of packets, by IBA and by the drivers.
const PACKETS: [&str; 8] = [
    "port_xmit_packets",
    "port_rcv_packets",
    "sent_pkts",
    "rcvd_pkts",
    "tx_pkts",
    "rx_pkts",
    "tcpInSegs",
    "tcpOutSegs",
];

/// The counters of one port, by name.
pub(super) type Counts = BTreeMap<String, u64>;

/// The counters of all ports at one moment.
pub(super) struct Moment {
    at: Instant,
    ports: BTreeMap<String, Counts>,
}

impl Moment {
    pub(super) fn of(system: &System) -> Self {
        let ports = system.fabric.ports().map(|(device, port)| {
            let all = counters(&system.roots.sys, &device.name, port.num, None);
            let all = all.into_iter().filter(|c| c.group != CounterGroup::Netdev);
            let all = all.map(|counter| (counter.name, counter.value)).collect();
            (format!("{}/{}", device.name, port.num), all)
        });
        Self {
            at: Instant::now(),
            ports: ports.collect(),
        }
    }
}

/// Judges the growth since `before`, which was read when the doctor began.
pub(super) fn checks(
    system: &System,
    scope: &Scope,
    facts: &[Facts],
    before: &Moment,
    findings: &mut Vec<Finding>,
) {
    let now = Moment::of(system);
    let seconds = now.at.duration_since(before.at).as_secs_f64();
    for (port, after) in &now.ports {
        if let Some(before) = before.ports.get(port).filter(|counts| !counts.is_empty()) {
            let finding = port_loss(before, after, seconds, &scope.marking.qos);
            findings.push(finding.of(port));
        }
    }
    for facts in facts {
        findings.extend(card_loss(facts, &scope.marking.qos).map(|f| f.of(&facts.interface)));
    }
}

/// Names with their values, for evidence.
fn in_words(counts: &[(&str, u64)], plus: &str) -> String {
    let all = counts
        .iter()
        .map(|(name, count)| format!("{name} {plus}{count}"));
    all.collect::<Vec<_>>().join(", ")
}

pub(super) fn port_loss(before: &Counts, after: &Counts, seconds: f64, qos: &Qos) -> Finding {
    const ID: &str = "rdma.loss";
    let mut grown: Vec<(Symptom, &str, u64)> = Vec::new();
    let mut counted: Vec<(&str, u64)> = Vec::new();
    for (name, now) in after {
        let Some(sign) = Symptom::of(name) else {
            continue;
        };
        let then = before.get(name).copied().unwrap_or(*now);
        if let Some(more) = now.checked_sub(then).filter(|more| *more > 0) {
            grown.push((sign, name.as_str(), more));
        }
        if *now > 0 {
            counted.push((name.as_str(), *now));
        }
    }
    let during = if seconds < 1.0 {
        "in less than a second".to_owned()
    } else {
        format!("within {seconds:.0} s")
    };
    grown.sort();
    if let Some((sign, ..)) = grown.first().copied() {
        let all = grown.iter().map(|(_, name, more)| (*name, *more));
        let all = in_words(&all.collect::<Vec<_>>(), "+");
        let (says, remedy) = meaning(sign);
        let evidence = format!("{all} {during}: {says}");
        return if sign == Symptom::GivenUp || (sign == Symptom::Loss && qos.lossless) {
            Finding::fail(ID, evidence, remedy)
        } else {
            Finding::warn(ID, evidence, remedy)
        };
    }
    let packets: Vec<u64> = PACKETS
        .iter()
        .filter_map(|name| after.get(*name).copied())
        .collect();
    let packets = packets.into_iter().fold(0u64, u64::saturating_add);
    since_start(ID, &during, &counted, packets)
}

fn meaning(sign: Symptom) -> (&'static str, &'static str) {
    match sign {
        Symptom::GivenUp => (
            "packets were lost until connections ended",
            "see whether the peer is there (`nacre doctor --peer ADDRESS`), and roce.lossless, roce.ecn and the switch ports",
        ),
        Symptom::Loss => (
            "packets are lost on the way and sent again",
            "see roce.lossless, roce.ecn and net.mtu (`nacre doctor --wait 35s`), and the drops of the switch ports",
        ),
        Symptom::NotReady => (
            "senders wait for receive buffers",
            "give the receiver more: srq_size in [rdma], or less depth (max_queue_depth); `nacre rdma size` prints the needs",
        ),
        Symptom::Damage => (
            "the link damages packets",
            "replace the cable or the module, and compare `ethtool -S` with the counters of the switch port",
        ),
    }
}

/// The judgement on counts that do not grow.
fn since_start(id: &'static str, during: &str, counted: &[(&str, u64)], packets: u64) -> Finding {
    if counted.is_empty() {
        return Finding::pass(id, format!("nothing lost {during}, nor before"));
    }
    let words = in_words(counted, "");
    let worst = counted.iter().map(|(_, count)| *count).max().unwrap_or(0);
    if packets == 0 {
        let evidence = format!("nothing lost {during}; {words} before, of an unknown number");
        return Finding::pass(id, evidence);
    }
    let evidence = format!("nothing lost {during}; {words} before, of {packets} packets");
    if worst.saturating_mul(ONE_IN) > packets {
        return Finding::warn(
            id,
            evidence,
            "run it under load to see whether they grow: `nacre doctor --wait 35s`, or `nacre rdma counters --watch 1`",
        );
    }
    Finding::pass(id, evidence)
}

/// Packets that the card dropped; `None` if its driver does not count them.
pub(super) fn card_loss(facts: &Facts, qos: &Qos) -> Option<Finding> {
    const ID: &str = "roce.loss";
    let drops = |counters: &PriorityCounters| -> BTreeMap<String, u64> {
        let is_drop = |name: &str| {
            let drops = ["discard", "dropped", "missed", "out_of_buffer"];
            drops.iter().any(|part| name.contains(part))
        };
        let named = counters.loss.iter().filter(|(name, _)| is_drop(name));
        let mut all: BTreeMap<String, u64> = named.map(|(n, v)| (n.clone(), *v)).collect();
        for (word, side) in [("rx", &counters.rx), ("tx", &counters.tx)] {
            for (priority, count) in side.iter().enumerate() {
                if let Some(discards) = count.discards {
                    all.insert(format!("{word}_prio{priority}_discards"), discards);
                }
            }
        }
        all
    };
    let before = drops(&facts.before.counters);
    if before.is_empty() {
        return None;
    }
    let during = match &facts.after {
        Some(after) => format!("within {:.0} s", after.seconds),
        None => "now (not measured: `--wait 35s`)".to_owned(),
    };
    let last = facts.after.as_ref().unwrap_or(&facts.before);
    let after = drops(&last.counters);
    let grown = after.iter().filter_map(|(name, now)| {
        let then = before.get(name).copied().unwrap_or(*now);
        let more = now.checked_sub(then).filter(|more| *more > 0)?;
        Some((name.as_str(), more))
    });
    let grown: Vec<(&str, u64)> = grown.collect();
    if grown.is_empty() {
        let counted = after.iter().filter(|(_, count)| **count > 0);
        let counted: Vec<(&str, u64)> = counted.map(|(n, c)| (n.as_str(), *c)).collect();
        let both = last.counters.rx.iter().chain(&last.counters.tx);
        let packets = both.filter_map(|count| count.packets);
        let packets = packets.fold(0u64, u64::saturating_add);
        return Some(since_start(ID, &during, &counted, packets));
    }
    let evidence = format!("{} {during}", in_words(&grown, "+"));
    let lossless = qos.lossless_priorities();
    let pauses = lossless.iter().find(|priority| {
        let names = ["rx", "tx"].map(|word| format!("{word}_prio{priority}_discards"));
        grown
            .iter()
            .any(|(name, _)| names.iter().any(|one| one.as_str() == *name))
    });
    Some(match pauses {
        Some(priority) => Finding::fail(
            ID,
            format!("{evidence}: priority {priority} should pause, and loses packets all the same"),
            "see roce.buffer and roce.pfc: the receive buffer is too small, or one end of the link does not pause",
        ),
        None => Finding::warn(
            ID,
            format!("{evidence}: the card has no room for packets"),
            "raise the rings (`ethtool -G`), keep the reactors' cores free, and see roce.lossless",
        ),
    })
}

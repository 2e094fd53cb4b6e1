//! Computes the findings from the settings and counts of both ends. Pure functions. A finding with
//! a class is about the packets of that traffic class.

use std::collections::BTreeMap;

use nacre_transport_rdma_link::dcb::{Priorities, Selector};

use super::{Answer, AskError, Burst, End};
use crate::Finding;

/// Findings, each with its class if it has one.
type Findings = Vec<(Option<&'static str>, Finding)>;

pub(super) fn all(ours: &End, answer: &Answer) -> Findings {
    let theirs = &answer.theirs;
    let mut findings: Findings = vec![
        (None, mtu(ours, theirs)),
        (None, pfc(ours, theirs)),
        (None, trust(ours, theirs)),
        (None, ets(ours, theirs)),
        (None, ecn(ours, theirs)),
    ];
    for burst in &answer.bursts {
        let class = Some(burst.class.name);
        findings.push((class, loss(burst)));
        findings.push((class, dscp(burst)));
        findings.push((class, priority(ours, theirs, burst)));
    }
    findings
}

/// The finding without a session.
pub(super) fn not_compared(error: &AskError, peer: &str) -> Finding {
    const ID: &str = "peer.compare";
    match error {
        AskError::NoResponder(_) => Finding::skip(
            ID,
            format!(
                "{error}; run `nacre doctor --answer {peer} --for 60s` there, and this again within that time"
            ),
        ),
        AskError::Version { .. } => Finding::skip(ID, format!("{error}: install the same version")),
        AskError::Malformed(_) | AskError::Io(_) => Finding::warn(
            ID,
            error.to_string(),
            format!(
                "start `nacre doctor --answer {peer}` there again; is another program on that port?"
            ),
        ),
    }
}

/// The settings of both ends, in words.
fn both(ours: &End, theirs: &End, our_value: &str, their_value: &str) -> String {
    format!(
        "here ({}): {our_value}; there ({}): {their_value}",
        ours.interface, theirs.interface
    )
}

fn mtu(ours: &End, theirs: &End) -> Finding {
    const ID: &str = "peer.mtu";
    let (Some(here), Some(there)) = (ours.mtu, theirs.mtu) else {
        return Finding::skip(ID, "the MTU of an end cannot be read");
    };
    let evidence = both(ours, theirs, &here.to_string(), &there.to_string());
    if here == there {
        return Finding::pass(ID, evidence);
    }
    let (at, name) = if here < there {
        ("here", &ours.interface)
    } else {
        ("there", &theirs.interface)
    };
    Finding::warn(
        ID,
        evidence,
        format!(
            "`ip link set {name} mtu {}` {at}, and at least that on every switch port between",
            here.max(there)
        ),
    )
}

/// Why the DCB settings of an end are unknown.
fn no_dcb(ours: &End, theirs: &End) -> String {
    let (place, end) = match ours.no_dcb {
        Some(_) => ("here", ours),
        None => ("there", theirs),
    };
    let why = end
        .no_dcb
        .as_deref()
        .unwrap_or("the driver does not show it");
    format!(
        "{place} ({}, driver {}): {why}",
        end.interface,
        end.driver()
    )
}

fn pfc(ours: &End, theirs: &End) -> Finding {
    const ID: &str = "peer.pfc";
    let (Some(here), Some(there)) = (ours.pfc, theirs.pfc) else {
        return Finding::skip(ID, no_dcb(ours, theirs));
    };
    let evidence = both(ours, theirs, &here.to_string(), &there.to_string());
    if here == there {
        return Finding::pass(ID, format!("priorities with PFC: {evidence}"));
    }
    Finding::fail(
        ID,
        format!("priorities with PFC: {evidence}"),
        "`nacre rdma qos plan --iface INTERFACE` at each end, with the same [qos]",
    )
}

/// Compares the way from a packet to its priority: trust, and the table of DSCPs.
fn trust(ours: &End, theirs: &End) -> Finding {
    const ID: &str = "peer.trust";
    if ours.trusted.is_empty() || theirs.trusted.is_empty() {
        return Finding::skip(ID, no_dcb(ours, theirs));
    }
    let words = |end: &End| {
        let words: Vec<String> = end.trusted.iter().map(Selector::to_string).collect();
        words.join(", then ")
    };
    // A table that is not trusted has no effect.
    let differing = (0..64u8).find(|dscp| ours.priority_of(*dscp) != theirs.priority_of(*dscp));
    let Some(dscp) = differing else {
        return Finding::pass(ID, both(ours, theirs, &words(ours), &words(theirs)));
    };
    let value = |end: &End| {
        let priority = end.priority_of(dscp);
        let priority = priority.map_or_else(
            || "the VLAN tag's priority".into(),
            |priority| format!("priority {priority}"),
        );
        format!("trusts {}, DSCP {dscp} has {priority}", words(end))
    };
    Finding::fail(
        ID,
        both(ours, theirs, &value(ours), &value(theirs)),
        "`nacre rdma qos plan --iface INTERFACE` at each end, with the same [qos]",
    )
}

fn ets(ours: &End, theirs: &End) -> Finding {
    const ID: &str = "peer.ets";
    let (Some(here), Some(there)) = (ours.ets, theirs.ets) else {
        return Finding::skip(ID, no_dcb(ours, theirs));
    };
    let words = crate::roce::ets_in_words;
    let evidence = both(ours, theirs, &words(&here), &words(&there));
    if words(&here) == words(&there) {
        return Finding::pass(ID, evidence);
    }
    Finding::warn(
        ID,
        evidence,
        "`nacre rdma qos plan --iface INTERFACE` at each end, with the same [qos]",
    )
}

fn ecn(ours: &End, theirs: &End) -> Finding {
    const ID: &str = "peer.ecn";
    let (Some(here), Some(there)) = (ours.ecn, theirs.ecn) else {
        return Finding::skip(
            ID,
            format!(
                "a driver shows no ECN settings (here {}, there {})",
                ours.driver(),
                theirs.driver()
            ),
        );
    };
    let words = |ecn: &crate::roce::Ecn| {
        let on = |side: &[bool; 8]| -> Priorities {
            (0..8u8).filter(|prio| side[usize::from(*prio)]).collect()
        };
        let number =
            |value: Option<u8>| value.map_or_else(|| "unknown".into(), |value| value.to_string());
        format!(
            "notifies on {}, slows down on {}, notifications with DSCP {}",
            on(&ecn.notifies),
            on(&ecn.reacts),
            number(ecn.cnp_dscp)
        )
    };
    let evidence = both(ours, theirs, &words(&here), &words(&there));
    if here == there {
        return Finding::pass(ID, evidence);
    }
    Finding::warn(
        ID,
        evidence,
        "`echo 1 > /sys/class/net/INTERFACE/ecn/roce_np/enable/N` and `…/roce_rp/enable/N`: the same at both ends",
    )
}

fn loss(burst: &Burst) -> Finding {
    const ID: &str = "peer.loss";
    let (sent, arrived, returned) = (burst.sent, burst.arrivals(), burst.returns());
    let evidence = format!(
        "{sent} packets with DSCP {} sent, {arrived} arrived, {returned} returned",
        burst.class.dscp
    );
    if sent == 0 {
        return Finding::skip(ID, format!("{evidence}: no packet could be sent"));
    }
    if arrived == 0 {
        return Finding::fail(
            ID,
            evidence,
            format!(
                "admit UDP {} in the packet filters of both ends; does a switch drop this class?",
                super::ANSWER_PORT
            ),
        );
    }
    if arrived == sent && returned == sent {
        return Finding::pass(ID, evidence);
    }
    let remedy =
        "see the drop counters of the switch ports, and net.drops and roce.buffer at both ends";
    if burst.class.is_lossless {
        let why = "this class must lose none";
        return Finding::fail(ID, format!("{evidence}; {why}"), remedy);
    }
    Finding::warn(ID, evidence, remedy)
}

/// Compares the DSCP sent with the DSCP on arrival, in both directions.
fn dscp(burst: &Burst) -> Finding {
    const ID: &str = "peer.dscp";
    let sent = burst.class.dscp;
    if burst.arrivals() == 0 {
        return Finding::skip(ID, "no packet arrived");
    }
    let rewritten = |by_dscp: &BTreeMap<u8, u64>, to: &str| {
        let mut others = by_dscp.iter().filter(|(dscp, _)| **dscp != sent);
        let (dscp, count) = others.next()?;
        let all: u64 = by_dscp.values().sum();
        Some(format!(
            "sent to {to} with {sent}, arrived with {dscp} ({count} of {all})"
        ))
    };
    let ways = [(&burst.arrived, "the peer"), (&burst.returned, "this end")];
    let rewritten: Vec<String> = ways
        .into_iter()
        .filter_map(|(by_dscp, to)| rewritten(by_dscp, to))
        .collect();
    if rewritten.is_empty() {
        return Finding::pass(
            ID,
            format!("DSCP {sent} arrives unchanged in both directions"),
        );
    }
    Finding::fail(
        ID,
        format!("the network rewrites the DSCP: {}", rewritten.join("; ")),
        "every switch port and router on the way must trust DSCP and keep it; `nacre doctor --report FILE` has examples \
         for switches",
    )
}

/// Compares the priority on which this end counts the burst as sent with the priority on which the
/// peer counts it as received.
fn priority(ours: &End, theirs: &End, burst: &Burst) -> Finding {
    const ID: &str = "peer.priority";
    if burst.arrivals() == 0 {
        return Finding::skip(ID, "no packet arrived");
    }
    let (Some(sent), Some(received)) = (burst.sent_on(), burst.received_on()) else {
        let (place, end) = match burst.sent_on() {
            None => ("here", ours),
            Some(_) => ("there", theirs),
        };
        return Finding::skip(
            ID,
            format!(
                "{place} ({}): driver {} counts no bytes by priority that are known here",
                end.interface,
                end.driver()
            ),
        );
    };
    let evidence = both(
        ours,
        theirs,
        &format!("{} packets sent on priority {sent}", burst.sent),
        &format!("{} received on {received}", burst.arrivals()),
    );
    if sent.is_empty() || received.is_empty() {
        return Finding::skip(
            ID,
            format!("{evidence}: a driver did not count them in time"),
        );
    }
    let common: Priorities = sent
        .iter()
        .filter(|prio| received.contains(*prio))
        .collect();
    let remedy = "compare peer.dscp, peer.trust and the switch ports' maps from DSCP to priority";
    if common.is_empty() {
        return Finding::fail(ID, evidence, remedy);
    }
    match burst.class.priority {
        Some(wanted) if !common.contains(wanted) => Finding::fail(
            ID,
            format!("{evidence}; [qos] asks for {wanted}"),
            "`nacre rdma qos plan --iface INTERFACE` at each end",
        ),
        _ => Finding::pass(ID, evidence),
    }
}

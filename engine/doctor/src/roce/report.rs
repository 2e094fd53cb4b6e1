//! Writes a report for network administrators: required and actual settings, the switch's settings
//! from LLDP, counters, findings, and an example configuration of the switch.
//!
//! The report contains the machine's own name only on request.

use std::fmt::Write;

use nacre_transport_rdma_link::dcb::{Priorities, Selector};
use nacre_transport_rdma_link::qos::Qos;

use super::checks::ets_in_words;
use super::{Facts, Sample, SwitchSettings};
use crate::{Report, Scope, Status, System};

/// Returns the text of the report. `names`: true to include the machine's name.
pub fn text(
    system: &System,
    scope: &Scope,
    report: &Report,
    facts: &[Facts],
    names: bool,
) -> String {
    let mut text = String::from("NETWORK REPORT FOR NVMe OVER RDMA (nacre doctor --report)\n\n");
    if names {
        let file = system.roots.proc.join("sys/kernel/hostname");
        let host = system.text(file).unwrap_or_default();
        line(&mut text, format!("Machine: {host}"));
    }
    line(
        &mut text,
        "This machine moves storage traffic over RoCE v2 (UDP port 4791) and TCP (ports 4420, 8009). \
         RoCE needs a network that rarely loses packets. Card and switch must agree on: the priority, \
         its marking (DSCP or VLAN tag), PFC, shares (ETS), and the MTU.",
    );
    line(&mut text, "");
    wanted(&mut text, &scope.marking.qos);
    for facts in facts {
        interface(&mut text, system, scope, facts);
    }
    if facts.is_empty() {
        line(&mut text, "No interface with RoCE: name one with --qos.\n");
    }
    findings(&mut text, report, facts);
    peer(&mut text, scope, report);
    switches(&mut text, &scope.marking.qos);
    text
}

/// The table of one interface: its actual settings (DCBX, PFC, ETS, trust, applications, pause),
/// and the required priorities of PFC.
pub fn settings_of(qos: &Qos, facts: &Facts) -> String {
    let mut text = format!("{}\n", facts.interface);
    settings(&mut text, qos, facts);
    text
}

fn line(text: &mut String, line: impl AsRef<str>) {
    text.push_str(line.as_ref());
    text.push('\n');
}

/// A row of a table: a name, and its value.
fn row(text: &mut String, name: &str, value: impl AsRef<str>) {
    let _ = writeln!(text, "  {name:<22} {}", value.as_ref());
}

fn wanted(text: &mut String, qos: &Qos) {
    line(text, "ASKED FOR");
    if qos.is_empty() {
        line(text, "  nothing: the configuration has no [qos]\n");
        return;
    }
    let number = |value: Option<u8>| value.map_or_else(|| "-".into(), |value| value.to_string());
    for (name, class) in qos.classes() {
        let value = format!(
            "DSCP {}, priority {}, share {} %",
            number(class.dscp),
            number(class.prio),
            number(class.share)
        );
        row(text, name, value);
    }
    row(
        text,
        "all other traffic",
        format!("priority {}", qos.default_priority()),
    );
    row(
        text,
        "PFC on priorities",
        qos.lossless_priorities().to_string(),
    );
    line(text, "");
}

fn interface(text: &mut String, system: &System, scope: &Scope, facts: &Facts) {
    line(text, format!("INTERFACE {}", facts.interface));
    let addresses = system.addresses_of(&facts.interface);
    let addresses: Vec<String> = addresses
        .map(|of| format!("{}/{}", of.ip, of.prefix))
        .collect();
    let unknown = || "unknown".to_owned();
    row(text, "addresses", addresses.join(", "));
    row(text, "driver", facts.driver.as_deref().unwrap_or("unknown"));
    row(
        text,
        "MTU",
        facts.mtu.map_or_else(unknown, |mtu| mtu.to_string()),
    );
    row(
        text,
        "speed",
        facts
            .speed
            .map_or_else(unknown, |speed| format!("{speed} Mb/s")),
    );
    if let Some(why) = &facts.no_dcb {
        row(text, "DCB", why);
    }
    settings(text, &scope.marking.qos, facts);
    switch(text, facts);
    counters(text, facts);
    line(text, "");
}

fn settings(text: &mut String, qos: &Qos, facts: &Facts) {
    let Some(dcb) = &facts.dcb else {
        return;
    };
    let unknown = || "not shown by the driver".to_owned();
    row(
        text,
        "DCBX",
        dcb.mode.map_or_else(unknown, |mode| mode.to_string()),
    );
    let pfc = dcb.pfc.map_or_else(unknown, |pfc| pfc.enabled.to_string());
    row(
        text,
        "PFC on priorities",
        if qos.is_empty() {
            pfc
        } else {
            format!("{pfc} (asked for: {})", qos.lossless_priorities())
        },
    );
    row(
        text,
        "ETS",
        dcb.ets.as_ref().map_or_else(unknown, ets_in_words),
    );
    let trusted: Vec<String> = dcb.trusted().iter().map(Selector::to_string).collect();
    row(text, "trust", trusted.join(", then "));
    let apps = dcb
        .apps
        .iter()
        .map(|app| format!("{} {} -> {}", app.selector, app.value, app.priority));
    row(text, "applications", apps.collect::<Vec<_>>().join(", "));
    if let Some(pause) = facts.pause {
        let word = |on: bool| if on { "on" } else { "off" };
        let pause = format!("rx {}, tx {}", word(pause.rx), word(pause.tx));
        row(text, "whole-port pause", pause);
    }
}

fn switch(text: &mut String, facts: &Facts) {
    let neighbour = match &facts.neighbour {
        SwitchSettings::Neighbour(neighbour) => neighbour,
        SwitchSettings::NotListened => return row(text, "switch", "not asked (--wait 35s)"),
        SwitchSettings::Unable(why) => return row(text, "switch", why),
        SwitchSettings::Bad(why) => {
            return row(text, "switch", format!("malformed LLDP frame: {why}"));
        }
        SwitchSettings::Silence(wait) => {
            return row(text, "switch", format!("no LLDP in {} s", wait.as_secs()));
        }
    };
    row(text, "switch", neighbour.to_string());
    if let Some(description) = &neighbour.port_description {
        row(text, "switch port", description);
    }
    let pfc = neighbour.pfc.map(|pfc| pfc.enabled.to_string());
    row(
        text,
        "switch PFC",
        pfc.unwrap_or_else(|| "not announced".into()),
    );
    let ets = neighbour.ets.or(neighbour.recommended_ets);
    row(
        text,
        "switch ETS",
        ets.as_ref()
            .map_or_else(|| "not announced".into(), ets_in_words),
    );
    if neighbour.cee {
        row(text, "switch DCBX", "CEE (older) is announced too");
    }
    if let Some(size) = neighbour.max_frame {
        row(text, "switch frame size", size.to_string());
    }
}

fn counters(text: &mut String, facts: &Facts) {
    let before = &facts.before;
    let Some(after) = &facts.after else {
        return;
    };
    let seconds = format!("counters over {:.0} s", after.seconds);
    row(text, &seconds, "");
    let moved = |of: &dyn Fn(&Sample) -> Option<u64>| of(after)?.checked_sub(of(before)?);
    for priority in 0..8u8 {
        let at = usize::from(priority);
        let values = [
            ("rx bytes", moved(&|s| s.counters.rx[at].bytes)),
            ("tx bytes", moved(&|s| s.counters.tx[at].bytes)),
            ("rx pauses", moved(&|s| s.pauses_received(priority))),
            ("tx pauses", moved(&|s| s.pauses_sent(priority))),
            ("discards", moved(&|s| s.counters.rx[at].discards)),
        ];
        let values = values
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name} {}", value.filter(|v| *v > 0)?)));
        let values: Vec<String> = values.collect();
        if !values.is_empty() {
            row(text, &format!("  priority {priority}"), values.join(", "));
        }
    }
    for (name, count) in &after.counters.loss {
        let grown = count.saturating_sub(before.counters.loss.get(name).copied().unwrap_or(0));
        row(text, &format!("  {name}"), format!("{count} (+{grown})"));
    }
}

fn findings(text: &mut String, report: &Report, facts: &[Facts]) {
    line(text, "TO CORRECT");
    let ours = |finding: &&crate::Finding| {
        let of = finding.subject.as_deref();
        let network = finding.id.starts_with("roce.") || finding.id.starts_with("net.");
        network
            && facts
                .iter()
                .any(|facts| of == Some(facts.interface.as_str()))
    };
    let bad = report
        .findings
        .iter()
        .filter(ours)
        .filter(|finding| finding.status >= Status::Warn);
    let mut any = false;
    for finding in bad {
        any = true;
        let subject = finding.subject.as_deref().unwrap_or_default();
        line(
            text,
            format!(
                "  {} {} [{subject}]: {}",
                finding.status, finding.id, finding.evidence
            ),
        );
        if let Some(remedy) = &finding.remedy {
            line(text, format!("      {remedy}"));
        }
    }
    line(text, if any { "" } else { "  nothing was found\n" });
}

/// All findings about the network to the peer. Passed ones too, because they show which hops are
/// right.
fn peer(text: &mut String, scope: &Scope, report: &Report) {
    let Some(peer) = &scope.peer else {
        return;
    };
    line(text, format!("BETWEEN THIS MACHINE AND {peer}"));
    let peer = peer.to_string();
    for finding in &report.findings {
        let subject = finding.subject.as_deref().unwrap_or_default();
        // Findings of a class have its name after the address.
        let Some(class) = subject.strip_prefix(&peer) else {
            continue;
        };
        if !class.is_empty() && !class.starts_with(' ') {
            continue;
        }
        let id = finding.id;
        line(
            text,
            format!("  {} {id}{class}: {}", finding.status, finding.evidence),
        );
        if let Some(remedy) = &finding.remedy {
            line(text, format!("      {remedy}"));
        }
    }
    line(text, "");
}

/// Examples for the switch's side. Queue numbers differ between models.
fn switches(text: &mut String, qos: &Qos) {
    let priorities = qos.lossless_priorities();
    if priorities.is_empty() {
        return;
    }
    line(
        text,
        "SWITCH PORTS (examples; queue and group numbers differ between models, compare with the vendor's guide)",
    );
    line(text, "");
    line(text, "Cisco NX-OS:");
    for (name, class) in qos.classes() {
        let (Some(dscp), Some(prio)) = (class.dscp, class.prio) else {
            continue;
        };
        line(
            text,
            format!("  class-map type qos match-all {name}\n    match dscp {dscp}"),
        );
        line(
            text,
            format!(
                "  policy-map type qos MARK-STORAGE\n    class {name}\n      set qos-group {prio}"
            ),
        );
    }
    for prio in priorities.iter() {
        line(
            text,
            format!(
                "  policy-map type network-qos LOSSLESS\n    class type network-qos c-8q-nq{prio}\n      pause pfc-cos {prio}\n      mtu 9216"
            ),
        );
    }
    line(
        text,
        "  system qos\n    service-policy type network-qos LOSSLESS\n  interface PORT\n    priority-flow-control mode on\n    service-policy type qos input MARK-STORAGE\n    spanning-tree port type edge\n",
    );
    line(text, "Arista EOS:");
    for (_, class) in qos.classes() {
        if let (Some(dscp), Some(prio)) = (class.dscp, class.prio) {
            line(
                text,
                format!("  qos map dscp {dscp} to traffic-class {prio}"),
            );
        }
    }
    line(
        text,
        "  interface PORT\n    qos trust dscp\n    priority-flow-control on",
    );
    for prio in priorities.iter() {
        line(
            text,
            format!("    priority-flow-control priority {prio} no-drop"),
        );
    }
    line(text, "    spanning-tree portfast\n");
    // The mode's own numbers.
    let storage = qos.storage;
    if (storage.dscp, storage.prio) == (Some(26), Some(3)) && priorities == Priorities(1 << 3) {
        line(
            text,
            "NVIDIA Cumulus (its RoCE mode has these numbers):\n  nv set qos roce mode lossless\n  nv config apply\n",
        );
    }
    line(
        text,
        "Every port between two of these machines needs the same: PFC works from link to link.",
    );
}

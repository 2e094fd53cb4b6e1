//! Check group `roce`: settings and counters that show whether the Ethernet network loses RoCE
//! packets under load.
//!
//! ```text
//!   Probe::ethernet ─▶ Facts of each interface ─▶ checks ─▶ findings
//!   (DCB, pause, counters twice, LLDP frames)     pure
//! ```
//!
//! RoCE works on any Ethernet until the first congestion. From then on, PFC (the switch pauses a
//! priority) or ECN (the sender slows down) prevents loss. Both need the NIC and the switch to
//! agree on the priority and on the marking of its packets. A driver without DCB is not an error:
//! the checks skip its interfaces.

mod checks;

pub mod report;

use std::collections::BTreeSet;
use std::time::Duration;

use nacre_transport_rdma_link::{LinkLayer, NodeType, Roots};

use super::{Finding, Scope, System, select};

pub(crate) use checks::ets_in_words;

pub use super::ethernet::{Ecn, Facts, Sample, SwitchSettings};

/// Time within which a switch sends its next LLDP frame: it sends one every 30 seconds.
pub const LLDP_WAIT: Duration = Duration::from_secs(35);

/// Reads the settings, counters and LLDP frames of the interfaces behind every RoCE device in
/// `scope`, and of those that `--qos` names. May block for `scope.wait`, even if all RDMA devices
/// are of other networks: their counters of lost packets are read before and after that time.
pub fn facts(system: &System, scope: &Scope) -> Vec<Facts> {
    let interfaces = interfaces(system, scope);
    if interfaces.is_empty() && system.fabric.devices.is_empty() {
        return Vec::new();
    }
    system.probe.ethernet(&interfaces, scope.wait)
}

/// Appends the findings: first those of each interface alone, then those of bond members
/// together.
pub fn checks(system: &System, scope: &Scope, facts: &[Facts], findings: &mut Vec<Finding>) {
    for facts in facts {
        let of = checks::Examined::of(system, scope, facts);
        let all = checks::all(&of);
        findings.extend(all.into_iter().map(|finding| finding.of(&facts.interface)));
    }
    for netdev in roce_netdevs(system, scope) {
        let members = physical(&system.roots, &netdev);
        if members.len() > 1 {
            let of = facts.iter().filter(|of| members.contains(&of.interface));
            let of: Vec<&Facts> = of.collect();
            findings.push(checks::members(&of).of(&netdev));
        }
    }
}

/// The physical interfaces, which hold the DCB settings: the members of a bond, the parent of a
/// VLAN.
fn interfaces(system: &System, scope: &Scope) -> Vec<String> {
    let mut all = Vec::new();
    for netdev in roce_netdevs(system, scope) {
        for interface in physical(&system.roots, &netdev) {
            if !all.contains(&interface) {
                all.push(interface);
            }
        }
    }
    all
}

/// Interfaces with a RoCE device in scope, and those of `--qos`.
fn roce_netdevs(system: &System, scope: &Scope) -> Vec<String> {
    let selected = select::select_all(system, scope);
    let in_scope = |netdev: &String| {
        scope.listeners.is_empty() || selected.iter().any(|of| of.netdev == *netdev)
    };
    let roce = system.fabric.ports().filter(|(device, port)| {
        device.node_type == NodeType::Ca && port.link_layer == LinkLayer::Ethernet
    });
    let roce = roce.filter_map(|(_, port)| port.netdev.clone());
    let all: BTreeSet<String> = roce
        .filter(in_scope)
        .chain(scope.qos_interfaces.iter().cloned())
        .collect();
    all.into_iter().collect()
}

/// The interfaces below `netdev` that have no further interface below them.
pub fn physical(roots: &Roots, netdev: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![netdev.to_owned()];
    // Bonds over VLANs over bonds end; the kernel allows 8 levels.
    for _ in 0..64 {
        let Some(next) = open.pop() else {
            break;
        };
        let below = linked(roots, &next, "lower_");
        if below.is_empty() {
            found.insert(next);
        }
        open.extend(below);
    }
    found.into_iter().collect()
}

/// The interfaces that `netdev` names as `lower_NAME` or `upper_NAME`.
fn linked(roots: &Roots, netdev: &str, prefix: &str) -> Vec<String> {
    let folder = roots.sys.join("class/net").join(netdev);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            name.strip_prefix(prefix).map(str::to_owned)
        })
        .collect();
    names.sort();
    names
}

pub(crate) fn is_vlan(system: &System, netdev: &str) -> bool {
    let file = system.roots.sys.join("class/net").join(netdev);
    let uevent = system.text(file.join("uevent")).unwrap_or_default();
    uevent.lines().any(|line| line == "DEVTYPE=vlan")
}

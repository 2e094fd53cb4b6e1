//! Checks of port counters, packet drops of interfaces, access to disks, and the NUMA nodes of
//! cards and disks.

use std::path::Path;

use nacre_transport_rdma_link::{CounterGroup, counters};

use super::net::{rdma_netdevs, select_all};
use super::rdma::in_container;
use super::{Finding, Scope, System};

pub fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    port_counters(system, findings);
    drops(system, scope, findings);
    let nodes = Nodes::read(system);
    nic_nodes(system, scope, &nodes, findings);
    disk_nodes(system, &nodes, findings);
    findings.push(io_uring(system));
}

/// File and kernel block device bdevs use io_uring, which most containers forbid.
fn io_uring(system: &System) -> Finding {
    const ID: &str = "disk.io_uring";
    match system.probe.io_uring() {
        Ok(mode) => Finding::pass(ID, format!("io_uring can be used ({mode})")),
        Err(why) => Finding::warn(
            ID,
            format!("devices on files and block devices cannot be made: {why}"),
            if in_container(system) {
                "start the container with `--security-opt seccomp=unconfined`, or with a profile that allows io_uring"
            } else {
                "`sysctl kernel.io_uring_disabled=0`; io_uring needs Linux 5.11 or newer"
            },
        ),
    }
}

/// Drivers provide the counters of errors and retransmissions; without them this machine cannot
/// detect loss.
fn port_counters(system: &System, findings: &mut Vec<Finding>) {
    const ID: &str = "rdma.counters";
    for (device, port) in system.fabric.ports() {
        let all = counters(&system.roots.sys, &device.name, port.num, None);
        let count = |group| all.iter().filter(|counter| counter.group == group).count();
        let (ports, driver) = (count(CounterGroup::Port), count(CounterGroup::Hardware));
        let finding = match ports + driver {
            0 => Finding::skip(
                ID,
                format!(
                    "the driver {} (firmware {}) shows no counters: a newer driver and kernel may",
                    device.driver.as_deref().unwrap_or("unknown"),
                    device.fw.as_deref().unwrap_or("unknown")
                ),
            ),
            _ => Finding::pass(ID, format!("{ports} of the port, {driver} of the driver")),
        };
        findings.push(finding.of(format!("{}/{}", device.name, port.num)));
    }
}

/// The network interfaces used for storage, as far as known.
fn storage_netdevs(system: &System, scope: &Scope) -> Vec<String> {
    let mut names = if scope.listeners.is_empty() {
        rdma_netdevs(&system.fabric)
    } else {
        select_all(system, scope)
            .into_iter()
            .map(|selected| selected.netdev)
            .collect()
    };
    names.sort();
    names.dedup();
    names.retain(|name| name != "lo");
    names
}

/// Drops since the interface came up: a few are harmless, one in ten thousand is not.
pub fn drops(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "net.drops";
    const ONE_IN: u64 = 10_000;
    const COUNTERS: [&str; 7] = [
        "rx_dropped",
        "tx_dropped",
        "rx_missed_errors",
        "rx_fifo_errors",
        "rx_crc_errors",
        "rx_errors",
        "tx_errors",
    ];
    for netdev in storage_netdevs(system, scope) {
        let folder = system
            .roots
            .sys
            .join("class/net")
            .join(&netdev)
            .join("statistics");
        let value = |name: &str| system.text(folder.join(name))?.parse::<u64>().ok();
        let (Some(rx), Some(tx)) = (value("rx_packets"), value("tx_packets")) else {
            findings.push(Finding::skip(ID, "the interface's counters cannot be read").of(netdev));
            continue;
        };
        let lost: Vec<(&str, u64)> = COUNTERS
            .into_iter()
            .filter_map(|name| Some((name, value(name)?)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let packets = rx.saturating_add(tx);
        let worst = lost.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let lost: Vec<String> = lost
            .iter()
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        let finding = match (lost.is_empty(), worst.saturating_mul(ONE_IN) > packets) {
            (true, _) => Finding::pass(ID, format!("nothing lost of {packets} packets")),
            (false, false) => {
                Finding::pass(ID, format!("{} of {packets} packets", lost.join(", ")))
            }
            (false, true) => Finding::warn(
                ID,
                format!("{} of {packets} packets", lost.join(", ")),
                "look whether they grow (`nacre rdma counters --all --watch 1`, `ip -s link`); check cable and switch port, \
                 raise the rings (`ethtool -G`), and use flow control or less load",
            ),
        };
        findings.push(finding.of(netdev));
    }
}

/// NUMA nodes, each with the CPUs that this process may use.
struct Nodes {
    nodes: Vec<(u32, Vec<usize>)>,
    allowed: Vec<usize>,
}

impl Nodes {
    fn read(system: &System) -> Nodes {
        let folder = system.roots.sys.join("devices/system/node");
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut nodes: Vec<(u32, Vec<usize>)> = entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let number = name.strip_prefix("node")?.parse().ok()?;
                let list = system.text(folder.join(&name).join("cpulist"))?;
                Some((number, cpus(&list)))
            })
            .collect();
        nodes.sort();
        let status = system
            .text(system.roots.proc.join("self/status"))
            .unwrap_or_default();
        let allowed = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        Nodes {
            nodes,
            allowed: allowed.map(cpus).unwrap_or_default(),
        }
    }

    /// Text about a device on this node; `Err` if none of the usable CPUs is on the node.
    fn judge(&self, node: u32) -> Result<String, String> {
        let Some((_, of_node)) = self.nodes.iter().find(|(number, _)| *number == node) else {
            return Ok(format!("node {node}"));
        };
        let usable = of_node
            .iter()
            .filter(|cpu| self.allowed.contains(cpu))
            .count();
        match usable {
            0 if !self.allowed.is_empty() => Err(format!(
                "it is on node {node}, and none of the CPUs that this process may use ({}) is",
                self.allowed.len()
            )),
            usable => Ok(format!("node {node}, {usable} usable CPUs there")),
        }
    }
}

/// Parses a CPU list of the kernel, such as `0-3,8`.
fn cpus(list: &str) -> Vec<usize> {
    let mut all = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            continue;
        };
        // Bound the range: no machine has more CPUs.
        all.extend(first..=last.min(first + 8192));
    }
    all
}

fn node_of(system: &System, device: &Path) -> Option<i32> {
    system.text(device.join("numa_node"))?.parse().ok()
}

fn finding(id: &'static str, nodes: &Nodes, node: Option<i32>, remedy: String) -> Finding {
    if nodes.nodes.len() < 2 {
        return Finding::pass(id, "the machine has one NUMA node");
    }
    let Some(node) = node.and_then(|node| u32::try_from(node).ok()) else {
        return Finding::skip(id, "its NUMA node is not known");
    };
    match nodes.judge(node) {
        Ok(evidence) => Finding::pass(id, evidence),
        Err(evidence) => Finding::warn(id, evidence, remedy),
    }
}

fn nic_nodes(system: &System, scope: &Scope, nodes: &Nodes, findings: &mut Vec<Finding>) {
    const ID: &str = "numa.nic";
    for netdev in storage_netdevs(system, scope) {
        let device = system
            .roots
            .sys
            .join("class/net")
            .join(&netdev)
            .join("device");
        let node = node_of(system, &device);
        let remedy = format!(
            "give the reactors cores of the node of {netdev} (`[reactor] cores`), or allow them to this process"
        );
        findings.push(finding(ID, nodes, node, remedy).of(netdev));
    }
}

fn disk_nodes(system: &System, nodes: &Nodes, findings: &mut Vec<Finding>) {
    const ID: &str = "numa.disk";
    let folder = system.roots.sys.join("class/nvme");
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    for name in names {
        // Skip fabrics controllers: their disks are not in this machine.
        let transport = system.text(folder.join(&name).join("transport"));
        if transport.as_deref() != Some("pcie") {
            continue;
        }
        let node = node_of(system, &folder.join(&name).join("device"));
        let remedy =
            format!("give the reactors cores of the node of {name}, or allow them to this process");
        findings.push(finding(ID, nodes, node, remedy).of(name));
    }
}

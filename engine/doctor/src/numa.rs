//! The NUMA nodes of network cards and drives: the checks that the reactors' cores are on the same
//! node, and the selection of cores for `[reactor] cores = "auto-numa"`.

use std::path::{Path, PathBuf};

use super::hardware::storage_netdevs;
use super::{Finding, Scope, System};

pub(crate) fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    let nodes = Nodes::read(system);
    nic_nodes(system, scope, &nodes, findings);
    disk_nodes(system, &nodes, findings);
}

/// A network card or NVMe drive whose NUMA node is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Device name that the kernel gives: `eth2`, `nvme0`.
    pub device: String,
    pub node: u32,
}

/// Returns the network cards of these listeners (all cards, if no listener selects one), and this
/// machine's NVMe drives. Excludes devices without a NUMA node, as in most virtual machines.
pub fn placed_devices(system: &System, listeners: &[String]) -> (Vec<Placed>, Vec<Placed>) {
    let scope = Scope {
        listeners: listeners.to_vec(),
        ..Scope::default()
    };
    let placed = |devices: Vec<(String, PathBuf)>| -> Vec<Placed> {
        let node = |(device, folder): (String, PathBuf)| {
            let node = u32::try_from(node_of(system, &folder)?).ok()?;
            Some(Placed { device, node })
        };
        devices.into_iter().filter_map(node).collect()
    };
    let mut cards = placed(nics(system, &scope));
    if cards.is_empty() {
        let all = system.netdevs().into_iter();
        cards = placed(all.flat_map(|name| cards_of(system, &name)).collect());
        cards.sort_by(|a, b| a.device.cmp(&b.device));
        cards.dedup();
    }
    (cards, placed(disks(system)))
}

/// The cards of the storage network, each with its device's folder.
fn nics(system: &System, scope: &Scope) -> Vec<(String, PathBuf)> {
    let netdevs = storage_netdevs(system, scope).into_iter();
    netdevs.flat_map(|name| cards_of(system, &name)).collect()
}

/// The cards below an interface: bonds, bridges and VLANs are resolved recursively. An interface
/// without lower interfaces is its own card.
fn cards_of(system: &System, netdev: &str) -> Vec<(String, PathBuf)> {
    /// VLAN on bridge on bond on card.
    const DEPTH: usize = 4;
    let class = system.roots.sys.join("class/net");
    let mut cards = Vec::new();
    let mut interfaces = vec![netdev.to_owned()];
    for _ in 0..DEPTH {
        let mut below = Vec::new();
        for name in std::mem::take(&mut interfaces) {
            let folder = class.join(&name);
            let device = folder.join("device");
            if device.exists() {
                cards.push((name, device));
                continue;
            }
            let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
            let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
            below.extend(names.filter_map(|name| Some(name.strip_prefix("lower_")?.to_owned())));
        }
        below.sort();
        interfaces = below;
    }
    if cards.is_empty() {
        cards.push((netdev.to_owned(), class.join(netdev).join("device")));
    }
    cards
}

/// The kernel's NVMe controllers on PCIe, each with its device's folder. Excludes fabrics
/// controllers, whose drives are in other machines.
fn disks(system: &System) -> Vec<(String, PathBuf)> {
    let class = system.roots.sys.join("class/nvme");
    let entries = std::fs::read_dir(&class).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| {
            let transport = system.text(class.join(name).join("transport"));
            transport.as_deref() == Some("pcie")
        })
        .collect();
    names.sort();
    let with_folder = |name: String| {
        let folder = class.join(&name).join("device");
        (name, folder)
    };
    names.into_iter().map(with_folder).collect()
}

/// NUMA nodes, each with the CPUs that this process may use.
struct Nodes {
    nodes: Vec<(u32, Vec<usize>)>,
    allowed: Vec<usize>,
}

impl Nodes {
    fn read(system: &System) -> Self {
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
        Self {
            nodes,
            allowed: allowed.map(cpus).unwrap_or_default(),
        }
    }

    /// Text about a device on this node; `Err` if none of the usable CPUs is on the node.
    fn check_node(&self, node: u32) -> Result<String, String> {
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
    match nodes.check_node(node) {
        Ok(evidence) => Finding::pass(id, evidence),
        Err(evidence) => Finding::warn(id, evidence, remedy),
    }
}

fn nic_nodes(system: &System, scope: &Scope, nodes: &Nodes, findings: &mut Vec<Finding>) {
    for (netdev, device) in nics(system, scope) {
        let remedy = format!(
            "give the reactors cores of the node of {netdev} (`[reactor] cores`; \"auto-numa\" does so), or allow \
             them to this process"
        );
        let node = node_of(system, &device);
        findings.push(finding("numa.nic", nodes, node, remedy).of(netdev));
    }
}

fn disk_nodes(system: &System, nodes: &Nodes, findings: &mut Vec<Finding>) {
    for (name, device) in disks(system) {
        let remedy =
            format!("give the reactors cores of the node of {name}, or allow them to this process");
        let node = node_of(system, &device);
        findings.push(finding("numa.disk", nodes, node, remedy).of(name));
    }
}

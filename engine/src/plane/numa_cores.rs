//! Selects cores on the NUMA nodes of network cards and disks: `[reactor] cores = "auto-numa"`.
//!
//! A reactor on another node than the card or the disk moves all data over the link between the
//! sockets.

use std::collections::BTreeMap;

use crate::doctor::Placed;

/// The chosen cores, ascending, and the reason of the choice as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chosen {
    pub cores: Vec<usize>,
    pub why: String,
}

/// Chooses up to `most` of `cores`, which have their NUMA nodes. Cores on the nodes of network
/// cards come first, because all data pass through the cards. If no card has a node, cores on the
/// nodes of disks come first. Several such nodes give cores in turn. Other nodes supply missing
/// cores.
pub(super) fn choose(
    cores: &[(usize, Option<u32>)],
    cards: &[Placed],
    disks: &[Placed],
    most: usize,
) -> Chosen {
    let devices = if cards.is_empty() { disks } else { cards };
    let mut near: BTreeMap<u32, (Vec<&str>, Vec<usize>)> = BTreeMap::new();
    for placed in devices {
        near.entry(placed.node).or_default().0.push(&placed.device);
    }
    let mut far = Vec::new();
    for (core, node) in cores {
        match node.and_then(|node| near.get_mut(&node)) {
            Some((_, of_node)) => of_node.push(*core),
            None => far.push(*core),
        }
    }
    let mut chosen = Vec::new();
    for round in 0..cores.len() {
        let of_nodes = near.values().filter_map(|(_, of_node)| of_node.get(round));
        chosen.extend(of_nodes.copied());
    }
    let usable_near = chosen.len();
    chosen.extend(far);
    chosen.truncate(most);
    let why = why(&near, chosen.len().saturating_sub(usable_near));
    chosen.sort_unstable();
    Chosen { cores: chosen, why }
}

fn why(near: &BTreeMap<u32, (Vec<&str>, Vec<usize>)>, elsewhere: usize) -> String {
    if near.is_empty() {
        return "no network card or disk names a NUMA node".into();
    }
    let node = |(node, (devices, _)): (&u32, &(Vec<&str>, Vec<usize>))| {
        format!("NUMA node {node} has {}", devices.join(", "))
    };
    let nodes: Vec<String> = near.iter().map(node).collect();
    match elsewhere {
        0 => nodes.join("; "),
        1 => format!(
            "{}; 1 core is of another node, as there are no more",
            nodes.join("; ")
        ),
        count => format!(
            "{}; {count} cores are of other nodes, as there are no more",
            nodes.join("; ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(devices: &[(&str, u32)]) -> Vec<Placed> {
        let one = |(device, node): &(&str, u32)| Placed {
            device: (*device).to_owned(),
            node: *node,
        };
        devices.iter().map(one).collect()
    }

    /// Cores 0 to 7: even ones on node 0, odd ones on node 1.
    fn eight() -> Vec<(usize, Option<u32>)> {
        (0..8).map(|core| (core, Some(core as u32 % 2))).collect()
    }

    /// Goal: cards decide before disks, several nodes share, and other nodes fill the rest.
    #[test]
    fn cores_are_near_the_cards_then_the_disks() {
        let nvme = [("nvme0", 0), ("nvme1", 0)];
        type Devices<'a> = &'a [(&'a str, u32)];
        let cases: &[(Devices, Devices, usize, &[usize])] = &[
            (&[("eth0", 1)], &nvme, 4, &[1, 3, 5, 7]),
            (&[("eth0", 1)], &nvme, 2, &[1, 3]),
            (&[], &nvme, 4, &[0, 2, 4, 6]),
            (&[("eth0", 0), ("eth1", 1)], &[], 4, &[0, 1, 2, 3]),
            (&[("eth0", 0), ("eth1", 1)], &[], 3, &[0, 1, 2]),
            (&[("eth0", 1)], &[], 6, &[0, 1, 2, 3, 5, 7]),
            (&[], &[], 4, &[0, 1, 2, 3]),
            (&[("eth0", 7)], &nvme, 4, &[0, 1, 2, 3]),
        ];
        for (cards, disks, most, expected) in cases {
            let chosen = choose(&eight(), &placed(cards), &placed(disks), *most);
            assert_eq!(chosen.cores, *expected, "{cards:?} {disks:?} {most}");
        }
    }

    /// Goal: the log says what decided, and that cores are far away.
    #[test]
    fn the_reason_names_the_devices() {
        let why = |cards: &[(&str, u32)], most| choose(&eight(), &placed(cards), &[], most).why;
        assert_eq!(
            why(&[("eth0", 1), ("eth1", 1)], 4),
            "NUMA node 1 has eth0, eth1"
        );
        assert_eq!(
            why(&[("eth0", 1)], 5),
            "NUMA node 1 has eth0; 1 core is of another node, as there are no more"
        );
        assert_eq!(
            why(&[("eth0", 1)], 6),
            "NUMA node 1 has eth0; 2 cores are of other nodes, as there are no more"
        );
        assert_eq!(why(&[], 4), "no network card or disk names a NUMA node");
    }

    /// Goal: a machine whose cores name no node still gets reactors.
    #[test]
    fn cores_without_a_node_are_used() {
        let cores = [(0, None), (1, None)];
        let chosen = choose(&cores, &placed(&[("eth0", 0)]), &[], 4);
        assert_eq!(chosen.cores, [0, 1]);
    }
}

//! The 31 partitions: the ways to split nodes and networks into two sides.
//!
//! The six parties are the nodes a, b and c, and the networks etcd, data and hosts. A node has a
//! link to a network if both are on one side. Six parties have 2^5 - 1 = 31 splits into two sides
//! that are not empty. Each cuts another set of the nine links: a split and its mirror image are
//! one.
//!
//! ```text
//!   split     7: a b c | etcd data hosts    cut: all nine
//!   split    27: a b etcd data | c hosts    cut: a-hosts b-hosts c-etcd c-data
//! ```

use std::fmt;

use super::super::demo::{NODES, Network};

/// A link of a node that is cut.
pub(super) type Link = (&'static str, Network);

/// A split, by its number from 1 to [`Split::COUNT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Split(u8);

impl Split {
    pub(super) const COUNT: u8 = 31;

    /// A bit says that the party is on the other side than the network of hosts: a, b, c, etcd,
    /// data.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (1..=Self::COUNT).map(Self)
    }

    pub(super) fn number(self) -> u8 {
        self.0
    }

    fn is_node_across(self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }

    fn is_network_across(self, network: Network) -> bool {
        match network {
            Network::Etcd => self.0 >> 3 & 1 == 1,
            Network::Data => self.0 >> 4 & 1 == 1,
            Network::Hosts => false,
        }
    }

    /// The links between the two sides.
    pub(super) fn cuts(self) -> Vec<Link> {
        let nodes = NODES.iter().enumerate();
        nodes
            .flat_map(|(index, node)| Network::ALL.map(|network| (index, *node, network)))
            .filter(|(index, _, network)| {
                self.is_node_across(*index) != self.is_network_across(*network)
            })
            .map(|(_, node, network)| (node, network))
            .collect()
    }
}

/// The side without the network of hosts, then the other one.
impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |across: bool| {
            let nodes = NODES.iter().enumerate();
            let nodes = nodes.filter(|(index, _)| self.is_node_across(*index) == across);
            let networks = Network::ALL.into_iter();
            let networks = networks.filter(|network| self.is_network_across(*network) == across);
            let names = nodes
                .map(|(_, node)| *node)
                .chain(networks.map(Network::name));
            names.collect::<Vec<_>>().join(" ")
        };
        write!(f, "{} | {}", side(true), side(false))
    }
}

/// Splits from a list such as `1,4,16-20`; an empty one names all.
pub(super) fn parse(list: &str) -> Result<Vec<Split>, String> {
    if list.is_empty() || list == "all" {
        return Ok(Split::all().collect());
    }
    let wrong = |part: &str| {
        let count = Split::COUNT;
        format!("\"{part}\" is no partition: name some of 1 to {count}, as in 1,4,16-20")
    };
    let mut splits = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.parse::<u8>().map_err(|_| wrong(part));
        let (first, last) = (number(first)?, number(last)?);
        if first < 1 || last > Split::COUNT || first > last {
            return Err(wrong(part));
        }
        splits.extend((first..=last).map(Split));
    }
    Ok(splits)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Goal: the splits are all 31. Method: their cuts differ, none is empty, and the two sides of
    /// each hold together: no link within a side is cut, and each link between the sides is.
    #[test]
    fn each_split_cuts_other_links() {
        let cuts: BTreeSet<Vec<Link>> = Split::all().map(Split::cuts).collect();
        assert_eq!(cuts.len(), 31);
        assert!(cuts.iter().all(|links| !links.is_empty()));
        // Two nodes on one side lose the same networks, and otherwise complementary ones.
        for links in &cuts {
            let lost = NODES.map(|node| {
                let of_node = links.iter().filter(|(of, _)| *of == node);
                of_node
                    .map(|(_, network)| *network)
                    .collect::<BTreeSet<_>>()
            });
            for (one, other) in [(0, 1), (0, 2), (1, 2)] {
                let is_mirror = lost[one].is_disjoint(&lost[other])
                    && lost[one].len() + lost[other].len() == Network::ALL.len();
                assert!(lost[one] == lost[other] || is_mirror, "{links:?}");
            }
        }
    }

    /// Goal: names and cuts of the documented splits. Method: the extremes and one between them.
    #[test]
    fn splits_are_named_by_their_sides() {
        let all: Vec<Split> = Split::all().collect();
        assert_eq!(all[0].to_string(), "a | b c etcd data hosts");
        let of_a: Vec<Link> = Network::ALL.map(|network| ("a", network)).into();
        assert_eq!(all[0].cuts(), of_a);
        assert_eq!(all[6].to_string(), "a b c | etcd data hosts");
        assert_eq!(all[6].cuts().len(), 9);
        assert_eq!(all[30].to_string(), "a b c etcd data | hosts");
        let hosts: Vec<Link> = NODES.map(|node| (node, Network::Hosts)).into();
        assert_eq!(all[30].cuts(), hosts);
        assert_eq!(all[7].to_string(), "etcd | a b c data hosts");
        assert_eq!(all[26].to_string(), "a b etcd data | c hosts");
        let cut = [
            ("a", Network::Hosts),
            ("b", Network::Hosts),
            ("c", Network::Etcd),
            ("c", Network::Data),
        ];
        assert_eq!(all[26].cuts(), cut);
    }

    /// Goal: a wrong list is refused before anything starts, with its part.
    #[test]
    fn lists_have_limits() {
        let numbers = |list: &str| {
            let splits = parse(list)?;
            Ok::<_, String>(splits.into_iter().map(Split::number).collect::<Vec<_>>())
        };
        assert_eq!(numbers("3,30-31,1"), Ok(vec![3, 30, 31, 1]));
        assert_eq!(numbers("all").map(|all| all.len()), Ok(31));
        for bad in ["0", "32", "5-4", "a", "1,,2", "1-"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}

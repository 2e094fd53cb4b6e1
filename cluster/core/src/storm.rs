//! Detects that many nodes lost their leases at once, which means within 10 minutes. Many nodes are
//! more than a third of all nodes, or at least two nodes that are more than a third of a zone. Then
//! the cluster replaces no lost replica: a broken switch must not fill the remaining nodes with
//! copies.
//!
//! No wall clock counts: the 10 minutes begin when this process first sees a node without a lease.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::NodeId;
use crate::time::BootTime;

/// Nodes that have been absent for longer do not count.
pub const WINDOW: Duration = Duration::from_secs(600);
/// More than one in so many nodes is a storm.
const PART: usize = 3;
/// The fewest absent nodes of one zone that count.
const ZONE: usize = 2;

/// A node of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenNode<'a> {
    pub node: NodeId,
    pub zone: Option<&'a str>,
    /// It has a lease.
    pub is_live: bool,
    /// An operator drains or evicts it, or released the brake while it was absent.
    pub is_expected: bool,
}

/// The nodes that are absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    /// The zone whose nodes are gone; `None`: nodes of the whole cluster.
    pub zone: Option<String>,
    pub gone: Vec<NodeId>,
    /// All nodes of the zone or cluster.
    pub of: usize,
}

#[derive(Debug, Default)]
pub struct Storm {
    /// The time at which each absent node was missed.
    missed: BTreeMap<NodeId, BootTime>,
}

impl Storm {
    /// Updates the absences; returns the absent nodes if they are too many.
    pub fn update(&mut self, now: BootTime, nodes: &[SeenNode<'_>]) -> Option<Loss> {
        self.missed
            .retain(|node, _| nodes.iter().any(|one| one.node == *node && !one.is_live));
        for one in nodes.iter().filter(|one| !one.is_live) {
            self.missed.entry(one.node).or_insert(now);
        }
        let is_recent = |node: &NodeId| {
            let missed = self.missed.get(node);
            missed.is_some_and(|at| now.since(*at) <= WINDOW)
        };
        let gone = |zone: Option<&str>| {
            let of = nodes
                .iter()
                .filter(|one| zone.is_none() || one.zone == zone);
            let of: Vec<&SeenNode<'_>> = of.collect();
            let gone = of
                .iter()
                .filter(|one| !one.is_expected && is_recent(&one.node));
            let gone: Vec<NodeId> = gone.map(|one| one.node).collect();
            let most = if zone.is_some() { ZONE } else { 1 };
            (gone.len() >= most && gone.len() * PART > of.len()).then(|| Loss {
                zone: zone.map(str::to_owned),
                gone,
                of: of.len(),
            })
        };
        let zones = nodes.iter().filter_map(|one| one.zone);
        gone(None).or_else(|| zones.map(Some).find_map(gone))
    }

    /// The time at which the node was first seen without a lease; `None`: it is live.
    pub fn missed(&self, node: NodeId) -> Option<BootTime> {
        self.missed.get(&node).copied()
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime(seconds * 1_000_000_000)
    }

    fn node(id: u128) -> NodeId {
        NodeId(Uuid::from_u128(id))
    }

    /// Nodes 0.., of which `live` has the live ones; two per zone if there are zones.
    fn nodes(count: u128, live: &[u128], has_zones: bool) -> Vec<SeenNode<'static>> {
        const ZONES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
        let one = |id: u128| SeenNode {
            node: node(id),
            zone: has_zones.then(|| ZONES[(id / 2) as usize % ZONES.len()]),
            is_live: live.contains(&id),
            is_expected: false,
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn more_than_a_third_of_the_nodes() {
        let mut storm = Storm::default();
        assert_eq!(
            storm.update(at(0), &nodes(6, &[0, 1, 2, 3, 4, 5], false)),
            None
        );
        assert_eq!(storm.update(at(1), &nodes(6, &[0, 1, 2, 3], false)), None);
        let loss = storm.update(at(2), &nodes(6, &[0, 1, 2], false));
        let loss = loss.expect("three of six");
        assert_eq!((loss.gone.len(), loss.of), (3, 6));
        assert_eq!(loss.zone, None);
        // One that returns and goes again counts from then on.
        assert_eq!(storm.update(at(3), &nodes(6, &[0, 1, 2, 3], false)), None);
        assert_eq!(storm.missed(node(3)), None);
        assert_eq!(storm.missed(node(4)), Some(at(1)));
    }

    #[test]
    fn nodes_that_went_one_after_the_other_are_no_storm() {
        let mut storm = Storm::default();
        assert_eq!(storm.update(at(0), &nodes(4, &[0, 1, 2], false)), None);
        assert_eq!(storm.update(at(601), &nodes(4, &[0, 1], false)), None);
        assert!(storm.update(at(602), &nodes(4, &[0], false)).is_some());
        assert_eq!(storm.update(at(1300), &nodes(4, &[0], false)), None);
    }

    #[test]
    fn a_zone() {
        let mut storm = Storm::default();
        let live: Vec<u128> = (0..12).filter(|id| *id != 7).collect();
        assert_eq!(
            storm.update(at(0), &nodes(12, &live, true)),
            None,
            "half of d"
        );
        let live: Vec<u128> = (0..12).filter(|id| ![6, 7].contains(id)).collect();
        let loss = storm
            .update(at(1), &nodes(12, &live, true))
            .expect("all of d");
        assert_eq!((loss.zone.as_deref(), loss.of), (Some("d"), 2));
    }

    #[test]
    fn nodes_of_an_operator_do_not_count() {
        let mut storm = Storm::default();
        let mut all = nodes(4, &[0, 1], false);
        all[2].is_expected = true;
        assert_eq!(storm.update(at(0), &all), None);
        all[2].is_expected = false;
        assert!(storm.update(at(0), &all).is_some());
    }
}

//! Balance: the node that holds the most volumes hands one over each minute, while it holds at
//! least 1.5 times the mean. Each node decides for itself, and only one of them holds the most.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use nacre_cluster_core::volume::HoldingState;
use nacre_cluster_core::{BootTime, NodeId, VolumeId};
use tracing::info;

use super::Volumes;
use crate::nodes::Nodes;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(2);
/// Time for which the node holds too many before it hands one over, and between two handovers.
const EVERY: Duration = Duration::from_secs(60);
/// A volume whose handover failed, or that came back, stays for this time.
const STAYS: Duration = Duration::from_secs(3600);

#[derive(Default)]
pub(super) struct Balance {
    next_look: BootTime,
    /// The start of the present wait. `None`: the node does not hold too many.
    since: Option<BootTime>,
    /// The volumes that were to move, and when: at most one per [`EVERY`].
    moved: BTreeMap<VolumeId, BootTime>,
}

impl Volumes {
    /// Begins the handover of a volume, if it is time for one.
    pub(crate) fn balance(&mut self, now: BootTime, nodes: &Nodes) {
        let Some(mut balance) = self.balance.take() else {
            return;
        };
        if now >= balance.next_look {
            balance.next_look = now + LOOK;
            self.look(&mut balance, now, nodes);
        }
        self.balance = Some(balance);
    }

    fn look(&mut self, balance: &mut Balance, now: BootTime, nodes: &Nodes) {
        let held = self.held(nodes);
        if !holds_too_many(self.me, &held) {
            balance.since = None;
            return;
        }
        let since = *balance.since.get_or_insert(now);
        // Volumes that come or go change the numbers.
        let moves = |state| !self.in_state(state).is_empty();
        if now < since + EVERY || moves(HoldingState::Leaving) || moves(HoldingState::Taking) {
            return;
        }
        balance.moved.retain(|_, at| now < *at + STAYS);
        let Some((volume, to)) = self.choice(&balance.moved, &held, nodes) else {
            return;
        };
        balance.since = Some(now);
        balance.moved.insert(volume, now);
        if self.handover(volume, to, now) {
            let (volume, to, held) = (volume.0, to.0, held[&self.me]);
            info!(%volume, %to, held, "a volume moves to a node that serves fewer");
        }
    }

    /// How many volumes each live node holds, of those without a cordon or drain.
    fn held(&self, nodes: &Nodes) -> BTreeMap<NodeId, usize> {
        let open = nodes
            .standing
            .keys()
            .filter(|node| !nodes.is_avoided(**node));
        let mut held: BTreeMap<NodeId, usize> = open.map(|node| (*node, 0)).collect();
        for place in self.places.values() {
            let holder = place.machine.record().and_then(|record| record.holder);
            let holder = holder.filter(|of| nodes.standing.get(&of.node) == Some(&of.incarnation));
            if let Some(count) = holder.and_then(|of| held.get_mut(&of.node)) {
                *count += 1;
            }
        }
        held
    }

    /// The volume to hand over, and its next node: the one that holds the fewest. Only a volume
    /// whose replicas are all in sync moves, and its reads stay as near to a replica as they are.
    fn choice(
        &self,
        moved: &BTreeMap<VolumeId, BootTime>,
        held: &BTreeMap<NodeId, usize>,
        nodes: &Nodes,
    ) -> Option<(VolumeId, NodeId)> {
        let mine = held.get(&self.me)?;
        let holding = self.in_state(HoldingState::Holding).into_iter();
        let choices = holding.filter_map(|id| {
            let record = self.places.get(&id)?.machine.record()?;
            if moved.contains_key(&id) || record.in_sync().count() < record.replicas.len() {
                return None;
            }
            let is_at = |node| record.in_sync().any(|replica| replica.node == node);
            let fits = |node: &NodeId| is_at(*node) || !is_at(self.me);
            let order = self.successors(id, nodes)?.into_iter();
            let fewer = order.filter_map(|node| {
                let count = *held.get(&node)?;
                (count + 2 <= *mine && fits(&node)).then_some((count, node))
            });
            // The first of several with as few.
            fewer
                .min_by_key(|(count, _)| *count)
                .map(|(count, node)| (count, id, node))
        });
        let (_, id, node) = choices.min_by_key(|(count, id, _)| (*count, *id))?;
        Some((id, node))
    }
}

/// True if this node holds the most, and at least 1.5 times the mean. Of several that hold as many,
/// one does.
fn holds_too_many(me: NodeId, held: &BTreeMap<NodeId, usize>) -> bool {
    let all: usize = held.values().sum();
    let most = held
        .iter()
        .max_by_key(|(node, count)| (**count, Reverse(**node)));
    most.is_some_and(|(node, count)| *node == me && 2 * count * held.len() >= 3 * all && all > 0)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn one_node_holds_too_many() {
        for (counts, expected) in [
            (&[3, 1][..], &[0][..]),
            (&[2, 1], &[]),
            (&[4, 4, 0], &[0]),
            (&[4, 4, 1], &[]),
            (&[1, 5, 3], &[1]),
            (&[1, 0, 0], &[0]),
            (&[0, 0], &[]),
            (&[7], &[]),
            (&[], &[]),
        ] {
            let node = |at: usize| NodeId(Uuid::from_u128(at as u128));
            let held = counts.iter().enumerate();
            let held = held.map(|(at, count)| (node(at), *count)).collect();
            let found: Vec<usize> = (0..counts.len())
                .filter(|at| holds_too_many(node(*at), &held))
                .collect();
            assert_eq!(found, expected, "{counts:?}");
        }
    }
}

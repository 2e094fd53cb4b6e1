//! Balances the number of volumes that nodes hold. A node that holds at least 1.5 times the mean
//! hands one volume over each minute, to a node that holds at least two fewer. Each node decides
//! for itself. The node that holds the most acts first; another one acts if it does not. Nodes with
//! a cordon or drain do not count.

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
/// A gap between looks, such as while etcd is away: the wait begins anew.
const GAP: Duration = Duration::from_secs(10);
/// Time for which the node holds too many before it hands one over, and between two handovers; once
/// more for each node that holds more.
const EVERY: Duration = Duration::from_secs(60);
/// Time for which a moved volume stays on its node. A node that did not become the holder of a
/// moved volume gets none for the same time.
const STAYS: Duration = Duration::from_secs(3600);

#[derive(Default)]
pub(super) struct Balance {
    next_look: BootTime,
    /// The start of the present wait. `None`: the node does not hold too many.
    since: Option<BootTime>,
    /// The nodes that hold more, with the numbers of their volumes, at the last look.
    before: Vec<(NodeId, usize)>,
    /// Where volumes were to move, and when.
    moved: BTreeMap<VolumeId, (NodeId, BootTime)>,
}

impl Volumes {
    /// Begins the handover of a volume, if it is time for one.
    pub(crate) fn balance(&mut self, now: BootTime, nodes: &Nodes) {
        let Some(mut balance) = self.balance.take() else {
            return;
        };
        if now >= balance.next_look + GAP {
            balance.since = None;
        }
        if now >= balance.next_look {
            balance.next_look = now + LOOK;
            self.look(&mut balance, now, nodes);
        }
        self.balance = Some(balance);
    }

    /// An operator has moved the volume to this node: it stays.
    pub(crate) fn keep(&mut self, id: VolumeId, now: BootTime) {
        if let Some(balance) = &mut self.balance {
            balance.moved.insert(id, (self.me, now));
        }
    }

    fn look(&mut self, balance: &mut Balance, now: BootTime, nodes: &Nodes) {
        balance.moved.retain(|_, (_, at)| now < *at + STAYS);
        let held = self.held(nodes);
        let Some(before) = holds_too_many(self.me, &held) else {
            balance.since = None;
            return;
        };
        // One of them acts: this node waits again.
        if balance.before != before {
            balance.since = None;
        }
        let since = *balance.since.get_or_insert(now);
        let wait = EVERY * (before.len() as u32 + 1);
        balance.before = before;
        // Volumes that come or go change the numbers.
        let moves = |state| !self.in_state(state).is_empty();
        if now < since + wait || moves(HoldingState::Leaving) || moves(HoldingState::Taking) {
            return;
        }
        let Some((volume, to)) = self.choice(&balance.moved, &held, nodes) else {
            return;
        };
        balance.since = Some(now);
        balance.moved.insert(volume, (to, now));
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
    /// whose replicas are all in sync moves, and its reads stay as near to a replica as they are. A
    /// node that did not become the holder of an earlier one gets none.
    fn choice(
        &self,
        moved: &BTreeMap<VolumeId, (NodeId, BootTime)>,
        held: &BTreeMap<NodeId, usize>,
        nodes: &Nodes,
    ) -> Option<(VolumeId, NodeId)> {
        let mine = held.get(&self.me)?;
        // A volume without a holder was unpublished or deleted since.
        let failed = moved.iter().filter(|(id, (to, _))| {
            let holder = self.holder(**id);
            holder.is_some_and(|holder| holder != *to)
        });
        let failed: Vec<NodeId> = failed.map(|(_, (to, _))| *to).collect();
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
                let takes = count + 2 <= *mine && fits(&node) && !failed.contains(&node);
                takes.then_some((count, node))
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

/// The nodes that act before this one, if it holds at least 1.5 times the mean: those that hold
/// more, and of those that hold as many, the ones with lower ids.
fn holds_too_many(me: NodeId, held: &BTreeMap<NodeId, usize>) -> Option<Vec<(NodeId, usize)>> {
    let all: usize = held.values().sum();
    let mine = *held.get(&me)?;
    if mine == 0 || 2 * mine * held.len() < 3 * all {
        return None;
    }
    let order = |node: &NodeId, count: usize| (Reverse(count), *node);
    let before = held
        .iter()
        .filter(|(node, count)| order(node, **count) < order(&me, mine));
    Some(before.map(|(node, count)| (*node, *count)).collect())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn nodes_that_hold_too_many_have_an_order() {
        for (counts, expected) in [
            (&[3, 1][..], &[0][..]),
            (&[2, 1], &[]),
            (&[4, 4, 0], &[0, 1]),
            (&[4, 4, 1], &[]),
            (&[1, 5, 3], &[1]),
            (&[4, 5, 0, 0], &[1, 0]),
            (&[1, 0, 0], &[0]),
            (&[0, 0], &[]),
            (&[7], &[]),
            (&[], &[]),
        ] {
            let node = |at: usize| NodeId(Uuid::from_u128(at as u128));
            let held = counts.iter().enumerate();
            let held = held.map(|(at, count)| (node(at), *count)).collect();
            let mut found: Vec<(usize, usize)> = (0..counts.len())
                .filter_map(|at| Some((holds_too_many(node(at), &held)?.len(), at)))
                .collect();
            found.sort_unstable();
            let found: Vec<usize> = found.into_iter().map(|(_, at)| at).collect();
            assert_eq!(found, expected, "{counts:?}");
        }
    }
}

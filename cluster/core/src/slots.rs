//! Slots of a published volume: each node that shows the volume to hosts has one. The slot gives
//! the node a range of controller ids (CNTLID) that no other node uses for this volume's subsystem.
//!
//! A host may keep controllers of a removed node for a while, Linux for ten minutes by default. It
//! refuses another controller of the subsystem with the same id ("Duplicate cntlid"), and then has
//! a path less. So the slot that has been free for longest is assigned. With 16 nodes in turn, the
//! slot of the node that was just removed is the only free one, and is assigned at once.

use std::ops::RangeInclusive;

use arrayvec::ArrayVec;

use crate::ids::NodeId;
use crate::mutation::Mutation;

/// Most nodes that show one volume.
pub const MAX_SLOTS: usize = SLOTS as usize;
const SLOTS: u8 = 16;
/// Controller ids of one slot: 16 slots use 1 to 65,504. The specification allows up to FFEFh.
const IDS: u16 = 4094;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slots {
    assigned: ArrayVec<(NodeId, u8), MAX_SLOTS>,
    /// The free slots; the first has been free for longest.
    free: ArrayVec<u8, MAX_SLOTS>,
    /// The slot after the last one assigned, for nodes of earlier versions.
    next: u8,
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            assigned: ArrayVec::new(),
            free: (0..SLOTS).collect(),
            next: 0,
        }
    }
}

impl Slots {
    /// The slots as they were stored. `free`: the free slots, in the order in which they became
    /// free. Earlier versions leave it as it was, and store `next` only, which is taken modulo
    /// [`MAX_SLOTS`]. So free slots that are missing in `free` come last, from `next` on. `None`:
    /// two nodes have one slot, a node has two, or a slot is out of range.
    pub fn of_assigned(
        assigned: impl Iterator<Item = (NodeId, u8)>,
        next: u8,
        free: &[u8],
    ) -> Option<Self> {
        let mut slots = Self {
            assigned: ArrayVec::new(),
            free: ArrayVec::new(),
            next: next % SLOTS,
        };
        for (node, slot) in assigned {
            if slot >= SLOTS || slots.is_assigned(slot) || slots.of(node).is_some() {
                return None;
            }
            slots.assigned.push((node, slot));
        }
        let others = (0..SLOTS).map(|step| (slots.next + step) % SLOTS);
        let all = free.iter().copied().filter(|slot| *slot < SLOTS);
        for slot in all.chain(others) {
            if !slots.is_assigned(slot) && !slots.free.contains(&slot) {
                slots.free.push(slot);
            }
        }
        Some(slots)
    }

    pub fn iter(&self) -> impl Iterator<Item = (NodeId, u8)> {
        self.assigned.iter().copied()
    }

    /// The slot after the last one assigned.
    pub fn next(&self) -> u8 {
        self.next
    }

    /// The free slots; the first has been free for longest.
    pub fn free(&self) -> &[u8] {
        &self.free
    }

    /// The node's slot, assigned now if it has none; `None` if all slots are in use.
    pub fn assign(&mut self, node: NodeId) -> Option<u8> {
        if let Some(slot) = self.of(node) {
            return Some(slot);
        }
        let at = if Mutation::SlotAtOnce.is_active() {
            let lowest = self.free.iter().enumerate().min_by_key(|(_, slot)| **slot);
            lowest.map_or(0, |(at, _)| at)
        } else {
            0
        };
        let slot = self.free.pop_at(at)?;
        self.assigned.push((node, slot));
        self.next = (slot + 1) % SLOTS;
        Some(slot)
    }

    pub fn remove(&mut self, node: NodeId) {
        if let Some(slot) = self.of(node) {
            self.assigned.retain(|(of, _)| *of != node);
            self.free.push(slot);
        }
    }

    fn is_assigned(&self, slot: u8) -> bool {
        self.assigned.iter().any(|(_, used)| *used == slot)
    }

    pub fn of(&self, node: NodeId) -> Option<u8> {
        let found = self.assigned.iter().find(|(of, _)| *of == node);
        found.map(|(_, slot)| *slot)
    }
}

/// The controller ids of a slot below [`MAX_SLOTS`].
pub fn controller_ids(slot: u8) -> RangeInclusive<u16> {
    let first = 1 + IDS * u16::from(slot);
    first..=first + IDS - 1
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn node(number: u128) -> NodeId {
        NodeId(Uuid::from_u128(10 + number))
    }

    #[test]
    fn a_slot_rests_until_all_others_were_assigned() {
        let mut slots = Slots::default();
        assert_eq!(slots.assign(node(0)), Some(0));
        assert_eq!(slots.assign(node(1)), Some(1));
        slots.remove(node(0));
        let later = (2..MAX_SLOTS as u128).map(|n| slots.assign(node(n)));
        assert!(later.eq((2..MAX_SLOTS as u8).map(Some)));
        let stored = Slots::of_assigned(slots.iter(), slots.next(), slots.free());
        assert_eq!(stored, Some(slots.clone()));
        let twice = [(node(7), 3), (node(8), 3)];
        assert_eq!(Slots::of_assigned(twice.into_iter(), 0, &[]), None);
        assert_eq!(
            Slots::of_assigned([(node(7), 16)].into_iter(), 0, &[]),
            None
        );
        assert_eq!(slots.assign(node(99)), Some(0));
        assert_eq!(slots.assign(node(100)), None);
        assert_eq!(controller_ids(0), 1..=4094);
        assert_eq!(*controller_ids(15).end(), 65_504);
    }

    /// Goal: the slot that has been free for longest is assigned, also after all had a turn, and
    /// over changes by nodes of earlier versions. Method: all slots but one are in use, and nodes
    /// leave.
    #[test]
    fn a_slot_is_used_again_late() {
        let mut slots = Slots::default();
        for number in 0..15 {
            slots.assign(node(number));
        }
        for number in [9, 3, 12] {
            slots.remove(node(number));
        }
        let stored = |slots: &Slots, free: &[u8]| {
            let stored = Slots::of_assigned(slots.iter(), slots.next(), free);
            stored.expect("distinct slots")
        };
        let free = [15, 9, 3, 12];
        assert_eq!(stored(&slots, slots.free()).free(), free);
        let mut later = slots.clone();
        let assigned = [20, 21, 22, 23].map(|number| later.assign(node(number)));
        assert_eq!(assigned, free.map(Some));

        // An earlier version has stored none, or has changed the slots and not the list.
        assert_eq!(stored(&slots, &[]).free(), [15, 3, 9, 12]);
        assert_eq!(slots.assign(node(24)), Some(15));
        slots.remove(node(5));
        assert_eq!(stored(&slots, &free).free(), [9, 3, 12, 5]);
        assert_eq!(stored(&slots, &[16, 12, 12, 255]).free(), [12, 3, 5, 9]);
    }
}

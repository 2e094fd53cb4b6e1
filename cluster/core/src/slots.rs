//! Slots of a published volume: each node that shows the volume to hosts has one. The slot gives
//! the node a range of controller ids (CNTLID) that no other node uses for this volume's subsystem.
//!
//! A host may keep controllers of a removed node for a while. Linux refuses another controller of
//! the subsystem with the same id ("Duplicate cntlid"). So slots are assigned round-robin, which
//! makes an early reuse of a slot unlikely.

use std::ops::RangeInclusive;

use arrayvec::ArrayVec;

use crate::ids::NodeId;
use crate::mutation::Mutation;

/// Most nodes that show one volume.
pub const MAX_SLOTS: usize = SLOTS as usize;
const SLOTS: u8 = 16;
/// Controller ids of one slot: 16 slots use 1 to 65,504. The specification allows up to FFEFh.
const IDS: u16 = 4094;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slots {
    assigned: ArrayVec<(NodeId, u8), MAX_SLOTS>,
    /// The slot after the last one assigned.
    next: u8,
}

impl Slots {
    /// The slots as they were stored; `next` is taken modulo [`MAX_SLOTS`]. `None`: two nodes have
    /// one slot, a node has two, or a slot is out of range.
    pub fn of_assigned(assigned: impl Iterator<Item = (NodeId, u8)>, next: u8) -> Option<Self> {
        let mut slots = Self::default();
        for (node, slot) in assigned {
            let is_free = slots.assigned.iter().all(|(_, used)| *used != slot);
            if usize::from(slot) >= MAX_SLOTS || !is_free || slots.of(node).is_some() {
                return None;
            }
            slots.assigned.push((node, slot));
        }
        slots.next = next % SLOTS;
        Some(slots)
    }

    pub fn iter(&self) -> impl Iterator<Item = (NodeId, u8)> {
        self.assigned.iter().copied()
    }

    /// The slot after the last one assigned.
    pub fn next(&self) -> u8 {
        self.next
    }

    /// The node's slot, assigned now if it has none; `None` if all slots are in use.
    pub fn assign(&mut self, node: NodeId) -> Option<u8> {
        if let Some(slot) = self.of(node) {
            return Some(slot);
        }
        let first = if Mutation::SlotAtOnce.is_active() {
            0
        } else {
            self.next
        };
        let slot = (0..SLOTS)
            .map(|step| (first + step) % SLOTS)
            .find(|slot| self.assigned.iter().all(|(_, used)| used != slot))?;
        self.assigned.push((node, slot));
        self.next = (slot + 1) % SLOTS;
        Some(slot)
    }

    pub fn remove(&mut self, node: NodeId) {
        self.assigned.retain(|(of, _)| *of != node);
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

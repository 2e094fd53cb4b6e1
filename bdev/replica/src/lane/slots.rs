//! Sets of the replica slots of a volume.

/// A set of replica slots, one bit each.
pub(super) type Slots = u8;

pub(super) fn bit(slot: usize) -> Slots {
    1 << slot
}

/// The slots in a set, lowest first.
pub(super) fn slots(mut set: Slots) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let slot = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(slot)
    })
}

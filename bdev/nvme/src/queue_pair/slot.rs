//! The state of a command in flight, and the encoding of command identifiers.

use nacre_bdev::Io;
use nacre_hugepages::Buf;

/// In place of a lane number: the lane is closed.
pub(super) const NO_LANE: u32 = u32::MAX;
/// In place of a slot number: no slot.
pub(super) const NO_SLOT: u16 = u16::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    /// The controller has the command, or gets it with the next doorbell.
    Sent,
    /// The command waits to be sent again.
    Again,
}

/// Half of a fused pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// Not fused.
    No,
    /// The compare, which holds the I/O.
    First,
    Second,
}

#[derive(Debug)]
pub(super) struct Slot {
    /// `None`: free, or the second half of a fused pair.
    pub io: Option<Io>,
    /// Bounce buffer that holds the data in place of the I/O's own buffers.
    pub bounce: Option<Buf>,
    pub lane: u32,
    pub cid: u16,
    pub stage: Stage,
    pub half: Half,
    pub partner: u16,
    /// Status of the first completion of a fused pair, until the second one arrives.
    pub answer: Option<u16>,
    /// Number of checks since the command was sent, and the reactions to its lateness.
    pub age: u8,
    pub due: u8,
    pub rung: u8,
    /// Progress of a Copy: blocks done, and blocks in flight.
    pub done: u32,
    pub piece: u32,
    /// Number of retries.
    pub tries: u8,
    /// The command's user requested an abort.
    pub aborting: bool,
}

impl Slot {
    /// Checks after which a command is late: one more than per timeout, because the first check may
    /// follow immediately.
    pub(super) const LATE: u8 = super::TICKS as u8 + 1;
    /// Checks between two reactions to a late command.
    pub(super) const GRACE: u8 = super::TICKS as u8 / 2;

    pub(super) fn new(index: u16) -> Self {
        Self {
            io: None,
            bounce: None,
            lane: NO_LANE,
            cid: index,
            stage: Stage::Free,
            half: Half::No,
            partner: NO_SLOT,
            answer: None,
            age: 0,
            due: Self::LATE,
            rung: 0,
            done: 0,
            piece: 0,
            tries: 0,
            aborting: false,
        }
    }

    #[inline]
    pub(super) fn is_half(&self) -> bool {
        self.half != Half::No
    }

    /// Prepares the slot for a new I/O of `lane`; the caller stores the I/O in the slot.
    #[inline]
    pub(super) fn take_for(&mut self, lane: u32) {
        self.lane = lane;
        self.half = Half::No;
        self.rung = 0;
        self.done = 0;
        self.tries = 0;
        self.aborting = false;
    }
}

/// A command identifier is a slot's number and, above it, the number of uses of the slot. So a
/// completion of an earlier use is recognised.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cids {
    mask: u16,
}

impl Cids {
    /// FFFFh means no command in the error log, so the highest bit stays clear.
    const MAX: u16 = 0x7fff;

    pub(super) fn for_slots(slots: u16) -> Self {
        let mask = slots.next_power_of_two() - 1;
        Self { mask }
    }

    #[inline]
    pub(super) fn index(self, cid: u16) -> u16 {
        // The highest bit, which is clear in valid identifiers, gives an index behind all slots.
        cid & (self.mask | !Self::MAX)
    }

    /// The next identifier of the slot of `cid`.
    #[inline]
    pub(super) fn next(self, cid: u16) -> u16 {
        cid.wrapping_add(self.mask + 1) & Self::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a slot's identifiers name only this slot, and repeat only after all were used.
    #[test]
    fn identifiers() {
        for slots in [1, 3, 31, 255, 256, 1023, 4095] {
            let cids = Cids::for_slots(slots);
            for index in [0, slots / 2, slots - 1] {
                let mut cid = index;
                let mut uses = 0;
                loop {
                    assert_eq!(cids.index(cid), index);
                    assert!(cid <= Cids::MAX);
                    cid = cids.next(cid);
                    uses += 1;
                    if cid == index {
                        break;
                    }
                }
                assert_eq!(uses, 0x8000 / (u32::from(cids.mask) + 1));
                assert!(uses >= 8);
            }
            assert!(cids.index(0xffff) >= slots);
            assert!(cids.index(0x8000) >= slots);
        }
    }
}

//! A slot: the state of one command in flight on an NVMe queue pair; and the encoding of command
//! identifiers (CID). A queue pair has a fixed number of slots.

use nacre_bdev::Io;
use nacre_hugepages::Buf;

/// In place of a lane number: the lane that submitted the I/O is closed. A lane is one bdev queue
/// of the core to a namespace; lanes share the queue pair.
pub(super) const NO_LANE: u32 = u32::MAX;
/// In place of a slot number: no slot.
pub(super) const NO_SLOT: u16 = u16::MAX;

/// The state of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Free,
    /// The command is in the submission queue, or at the controller.
    Sent,
    /// The command waits to be sent again.
    Again,
}

/// The role of a command in a fused operation (Compare and Write).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// Not fused.
    No,
    /// The Compare, whose slot holds the I/O.
    First,
    /// The Write.
    Second,
}

/// A command in flight, or a free slot.
#[derive(Debug)]
pub(super) struct Slot {
    /// `None`: free, or the second half of a fused pair.
    pub io: Option<Io>,
    /// Bounce buffer that holds the data in place of the I/O's own buffers.
    pub bounce: Option<Buf>,
    /// The lane that submitted the I/O, or [`NO_LANE`].
    pub lane: u32,
    /// The command identifier of the present use.
    pub cid: u16,
    pub stage: Stage,
    pub half: Half,
    /// The slot of the other half of a fused pair, or [`NO_SLOT`].
    pub partner: u16,
    /// Status of the first completion of a fused pair, until the second one arrives.
    pub answer: Option<u16>,
    /// Number of checks for late commands since this one was sent.
    pub age: u8,
    /// The `age` at which the next reaction to its lateness is due.
    pub due: u8,
    /// Number of reactions so far.
    pub rung: u8,
    /// Blocks of a Copy that are done. One I/O may need several commands.
    pub done: u32,
    /// Blocks of the Copy command in flight.
    pub piece: u32,
    /// Number of retries.
    pub tries: u8,
    /// The bdev's user requested an abort of the I/O.
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

/// The encoding of command identifiers: the slot's number in the low bits, and the number of uses
/// of the slot above it. So a late completion of an earlier use is recognised.
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

    /// The identifier for the next use of the slot of `cid`.
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

//! What a lane knows of one I/O, and how a member's answer finds it.

use nacre_bdev::{Extents, Flags, Io, Op, Pending, Token};
use nacre_reactor::Nanos;

use crate::model::MAX_MEMBERS;
use crate::shared::Failure;

/// A set of slots.
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

pub(super) const NO_TROUBLE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// With the members, or waiting for a judgement on one of them.
    Flying,
    Parked(Why),
    /// A read that the member in this slot has, and of which nothing else is to be known: only what stands before the
    /// sets is filled in. Whoever looks at requests makes it one like the others first: `Requests::settle`.
    Swift(u8),
    /// Over; only answers of devices are missing that nobody waits for.
    Orphaned,
    /// It is none: a place for one.
    Free,
}

/// What a parked request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// This region's bit in the dirty-region log.
    Log(u64),
    /// Stripes that another lane or the control has: how often they were asked for in vain, and when they are again.
    Stripe { tries: u32, at: Nanos },
    /// An overlapping write of this lane.
    Overlap,
    /// Another view.
    View,
    /// A moment.
    Later(Nanos),
    /// For its region to be made equal, as far as anybody can read it: [`crate::shared::Shared::tried`].
    Equal(u64),
}

/// The first line of the processor's cache has all that a read needs which one member takes and answers: see
/// [`Stage::Swift`].
#[repr(C, align(64))]
pub(super) struct Request {
    /// `None`: it was answered, and only its children or its locks are left.
    pub pending: Option<Pending>,
    pub stage: Stage,
    pub lba: u64,
    /// When it came, or zero if the time was not known.
    pub start: Nanos,
    pub blocks: u32,
    pub generation: u32,
    /// Bytes of the first of its buffers; 0: it has none.
    pub first: u32,
    pub op: Op,
    pub flags: Flags,

    // Sets of slots. A slot that left the view is in none of them but the last two.
    /// Its device has the child.
    pub with: Slots,
    /// The child waits for room in the device's queue, or for a while.
    pub queued: Slots,
    /// Answered without an error.
    pub ok: Slots,
    /// Reported to the control; the ticket is in the trouble. With `with`: it is late. With `ok`: it
    /// was late.
    pub failed: Slots,
    /// Read from in vain.
    pub tried: Slots,
    /// Could not read the blocks.
    pub unread: Slots,
    /// The device has the child, and nobody waits for it.
    pub orphans: Slots,
    /// The child was passed through its member's layer, which does not know what it is.
    pub passed: Slots,

    /// How often the member that it is read from was short of something.
    pub shorts: u8,
    /// By how many upkeeps each child is old.
    pub ages: [u8; MAX_MEMBERS],
    /// Its host has asked to end it.
    pub aborted: bool,
    /// A child of it was given up for that: it can only end aborted.
    pub given_up: bool,
    /// It has its stripes, and is inside its regions.
    pub locked: bool,
    /// It was counted as waiting for the log, for others.
    pub waited_log: bool,
    pub waited_overlap: bool,
    /// Its regions were tried to be made equal, for it.
    pub equalled: bool,
    /// It waits for the members' state to change: the hold time counts.
    pub held: bool,
    pub since: Option<Nanos>,
    /// Its place among the lane's writes in flight.
    pub place: u32,
    pub trouble: u32,
    /// What is not with a device. A write to several members stays here, and each is given a handle on it.
    pub data: Extents,
}

impl Request {
    /// A place for one.
    pub fn free() -> Request {
        Request {
            pending: None,
            stage: Stage::Free,
            lba: 0,
            start: Nanos::ZERO,
            blocks: 0,
            generation: 0,
            first: 0,
            op: Op::Flush,
            flags: Flags::empty(),
            with: 0,
            queued: 0,
            ok: 0,
            failed: 0,
            tried: 0,
            unread: 0,
            orphans: 0,
            passed: 0,
            shorts: 0,
            ages: [0; MAX_MEMBERS],
            aborted: false,
            given_up: false,
            locked: false,
            waited_log: false,
            waited_overlap: false,
            equalled: false,
            held: false,
            since: None,
            place: 0,
            trouble: NO_TROUBLE,
            data: Extents::new(),
        }
    }

    /// Makes it that of `io`. Field by field: what was made elsewhere would have to be copied here.
    #[inline]
    pub fn begin(&mut self, io: Io, generation: u32, start: Nanos) {
        self.begin_swift(&io, 0, generation, start);
        self.stage = Stage::Flying;
        self.data = io.data;
        self.clear();
    }

    /// Makes it that of a read that goes to the member in `slot` at once, with the data of `io`.
    #[inline]
    pub fn begin_swift(&mut self, io: &Io, slot: usize, generation: u32, start: Nanos) {
        self.pending = Some(Pending::new(io.token));
        self.stage = Stage::Swift(slot as u8);
        self.lba = io.lba;
        self.start = start;
        self.blocks = io.blocks;
        self.generation = generation;
        self.first = io.data.first().map_or(0, |buf| buf.len() as u32);
        self.op = io.op;
        self.flags = io.flags;
    }

    /// Makes it one like the others, if it is a swift one. Its data is with the member.
    pub fn settle(&mut self) {
        if let Stage::Swift(slot) = self.stage {
            self.stage = Stage::Flying;
            self.clear();
            self.with = bit(usize::from(slot));
            self.passed = self.with;
        }
    }

    /// Fills in what a request begins with, but for its data.
    #[inline]
    fn clear(&mut self) {
        self.with = 0;
        self.queued = 0;
        self.ok = 0;
        self.failed = 0;
        self.tried = 0;
        self.unread = 0;
        self.orphans = 0;
        self.passed = 0;
        self.shorts = 0;
        self.ages = [0; MAX_MEMBERS];
        self.aborted = false;
        self.given_up = false;
        self.locked = false;
        self.waited_log = false;
        self.waited_overlap = false;
        self.equalled = false;
        self.held = false;
        self.since = None;
        self.place = 0;
        self.trouble = NO_TROUBLE;
    }

    pub fn end(&self) -> u64 {
        self.lba + u64::from(self.blocks)
    }

    pub fn is_read(&self) -> bool {
        self.op == Op::Read
    }

    /// It changes blocks: a flush does not.
    pub fn writes(&self) -> bool {
        self.op.is_write()
    }

    /// Its buffers are here. What has none needs none, but for a read that is lent the device's memory.
    pub fn data_home(&self) -> bool {
        self.op != Op::Write || !self.data.is_empty()
    }

    /// Children that were late: their devices have them, and nobody has to wait.
    pub fn late(&self) -> Slots {
        self.with & self.failed
    }

    /// All children that are still awaited.
    pub fn awaited(&self) -> Slots {
        (self.with | self.queued) & !self.failed
    }
}

/// Which children of a request failed, and what of.
pub(super) struct Trouble {
    pub tickets: [u64; MAX_MEMBERS],
    pub why: [Failure; MAX_MEMBERS],
}

impl Trouble {
    pub fn new() -> Trouble {
        Trouble {
            tickets: [0; MAX_MEMBERS],
            why: [Failure::Open; MAX_MEMBERS],
        }
    }
}

// A child's token: the generation tells an answer to this request from one to its predecessor in the same place.
//
//   0 | generation:31 | 0 | slot:7 | index:24
//
// The bits that are 0 are the layer's, for what is passed through it.

pub(super) const GENERATIONS: u32 = 0x7fff_ffff;

pub(super) fn child_token(index: usize, slot: usize, generation: u32) -> Token {
    u64::from(generation) << 32 | (slot as u64) << 24 | index as u64
}

pub(super) fn split_token(token: Token) -> (usize, usize, u32) {
    (
        (token & 0xff_ffff) as usize,
        (token >> 24) as usize & 0xff,
        (token >> 32) as u32,
    )
}

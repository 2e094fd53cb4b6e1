//! A lane's state of one I/O, and the lookup of a replica's completion.

use nacre_bdev::{Extents, Flags, Io, Op, Pending, Token};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;

use super::children::Children;
use crate::model::MAX_REPLICAS;
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
    /// The request is at the replicas, or waits for a judgement on one of them.
    Flying,
    Parked(Why),
    /// A read that the replica in this slot has. Only the fields before the sets are filled in.
    /// Before code checks requests it makes this one an ordinary request: `Requests::settle`.
    Swift(u8),
    /// Over; only completions are missing that no request waits for.
    Orphaned,
    /// The entry is free: it is no request.
    Free,
}

/// The event that a parked request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The bit of this region in the dirty-region log.
    Log(u64),
    /// Stripes that another lane or the control has: the failed attempts, and the time of the next.
    Stripe { tries: u32, at: Nanos },
    /// An overlapping write of this lane.
    Overlap,
    /// Another view.
    View,
    /// A point in time.
    Later(Nanos),
    /// The repair of its region, as far as it can be read: [`crate::shared::Shared::tried`].
    Equal(u64),
}

/// The first cache line holds everything needed for a read that one replica accepts and completes:
/// see [`Stage::Swift`].
#[repr(C, align(64))]
pub(super) struct Request {
    /// `None`: it was completed, and only its children or its locks are left.
    pub pending: Option<Pending>,
    pub stage: Stage,
    pub lba: u64,
    /// Arrival time, or zero if the time was unknown.
    pub start: Nanos,
    pub blocks: u32,
    pub generation: u32,
    /// Bytes of the first of its buffers; 0: it has none.
    pub first: u32,
    pub op: Op,
    pub flags: Flags,

    pub children: Children,
    /// Its host asked for an abort.
    pub aborted: bool,
    /// A child was given up for the abort: the request can only end aborted.
    pub given_up: bool,
    /// While it holds its stripes, and is inside its regions: its index among the lane's writes in
    /// flight.
    pub locked: Option<u32>,
    /// It was counted as waiting for the log, on behalf of others.
    pub waited_log: bool,
    pub waited_overlap: bool,
    /// A repair of its regions was tried for it.
    pub equalled: bool,
    /// It waits for a change of the replicas' states: the hold time counts.
    pub held: bool,
    pub since: Option<Nanos>,
    pub trouble: u32,
    /// Data that no device has. A write to several replicas stays here, and each gets a handle on
    /// it.
    pub data: Extents,
}

impl Request {
    /// A free place.
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
            children: Children::default(),
            aborted: false,
            given_up: false,
            locked: None,
            waited_log: false,
            waited_overlap: false,
            equalled: false,
            held: false,
            since: None,
            trouble: NO_TROUBLE,
            data: Extents::new(),
        }
    }

    /// Initialises it for `io`. Field by field, because a request built elsewhere would have to be
    /// copied.
    #[inline]
    pub fn begin(&mut self, io: Io, generation: u32, start: Nanos) {
        self.begin_swift(&io, 0, generation, start);
        self.stage = Stage::Flying;
        self.data = io.data;
        self.clear();
    }

    /// Initialises it for a read that goes to the replica in `slot` directly, with the data of
    /// `io`.
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

    /// Makes a swift request an ordinary one. The replica has its data.
    pub fn settle(&mut self) {
        if let Stage::Swift(slot) = self.stage {
            self.stage = Stage::Flying;
            self.clear();
            self.children.with = bit(usize::from(slot));
            self.children.passed = self.children.with;
        }
    }

    /// Sets the initial values of a request, except its data.
    #[inline]
    fn clear(&mut self) {
        self.children = Children::default();
        self.aborted = false;
        self.given_up = false;
        self.locked = None;
        self.waited_log = false;
        self.waited_overlap = false;
        self.equalled = false;
        self.held = false;
        self.since = None;
        self.trouble = NO_TROUBLE;
    }

    pub fn end(&self) -> u64 {
        self.lba + u64::from(self.blocks)
    }

    pub fn is_read(&self) -> bool {
        self.op == Op::Read
    }

    /// True when it changes blocks: a flush does not.
    pub fn writes(&self) -> bool {
        self.op.is_write()
    }

    /// True when its buffers are here. A request without buffers needs none, except a read that is
    /// lent the device's memory.
    pub fn data_home(&self) -> bool {
        self.op != Op::Write || !self.data.is_empty()
    }

    /// True when it waits for a change of the replicas, or may do so.
    pub fn is_held_up(&self) -> bool {
        match self.stage {
            // Also on behalf of others: those may wait for the replicas.
            Stage::Parked(_) => true,
            // No device has any part of it: its children are resubmitted repeatedly, and never
            // accepted.
            Stage::Flying if self.children.awaited() != 0 => self.children.at_work() == 0,
            Stage::Flying => self.held,
            _ => false,
        }
    }

    /// Finds new buffers in place of those that a late replica has; a read that came without
    /// buffers is lent the replica's. `false`: the pool has none now.
    #[cold]
    pub fn find_buffers(&mut self, pool: &Pool, block_size: u32) -> bool {
        let all = self.blocks as usize * block_size as usize;
        let first = self.first as usize;
        for len in [first, all - first] {
            if len == 0 {
                continue;
            }
            let Some(buf) = pool.acquire(len) else {
                self.data.clear();
                return false;
            };
            self.data.push(buf);
        }
        true
    }
}

/// The failed children of a request, and the reasons.
pub(super) struct Trouble {
    pub tickets: [u64; MAX_REPLICAS],
    pub why: [Failure; MAX_REPLICAS],
}

impl Trouble {
    pub fn new() -> Trouble {
        Trouble {
            tickets: [0; MAX_REPLICAS],
            why: [Failure::Open; MAX_REPLICAS],
        }
    }
}

// A child's token: the generation distinguishes a completion for this request from one for its
// predecessor in the same place.
//
//   0 | generation:31 | 0 | slot:7 | index:24
//
// The 0 bits belong to the layer, for I/O that passes through it.

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

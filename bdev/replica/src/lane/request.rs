//! The state of one host I/O (*request*) of a replicated volume on one core, and the token that
//! leads from the completion of its I/O at one replica (*child*) to the request.

use nacre_bdev::{Extents, Flags, Io, Op, Pending, Token};
use nacre_hugepages::Pool;
use nacre_reactor::Nanos;

use super::children::Children;
use super::slots::bit;
use crate::model::MAX_REPLICAS;
use crate::shared::Failure;

pub(super) const NO_FAILURES: u32 = u32::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// The request has children at replicas, or waits for a decision of the control about one.
    InFlight,
    Waiting(Wait),
    /// A read that was passed to the replica in this slot unchanged. Only the fields before
    /// `children` are valid. `Requests::make_ordinary` makes it an ordinary request.
    Direct(u8),
    /// The request has ended, but devices still have children of it.
    Orphaned,
    /// The entry of the request table is free.
    Free,
}

/// The event that a parked request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// This region becomes dirty in the dirty-region log.
    Log(u64),
    /// Another lane or the control unlocks a stripe. `tries`: failed attempts; `at`: time of the
    /// next one.
    Stripe { tries: u32, at: Nanos },
    /// An overlapping write of this lane ends.
    Overlap,
    /// The control publishes a new view: the states of the replicas as lanes see them.
    View,
    /// A time is reached.
    Later(Nanos),
    /// The control has tried the repair with this number ([`crate::shared::Shared::want_equal`]):
    /// a copy of a region's readable blocks from one in-sync replica to the others.
    Equal(u64),
}

/// One request. Its first cache line has all fields that a [`Stage::Direct`] read needs.
#[repr(C, align(64))]
pub(super) struct Request {
    /// The caller's I/O. `None`: it was completed, and the request remains for its children or
    /// locks.
    pub pending: Option<Pending>,
    pub stage: Stage,
    pub lba: u64,
    /// Arrival time, or zero if the time was unknown.
    pub start: Nanos,
    pub blocks: u32,
    /// The part of child tokens that changes with each request in this entry.
    pub generation: u32,
    /// Length of the first buffer in bytes; 0: no buffer.
    pub first: u32,
    pub op: Op,
    pub flags: Flags,

    pub children: Children,
    /// The caller asked for an abort.
    pub aborted: bool,
    /// A child was aborted, so the request can only end as aborted.
    pub given_up: bool,
    /// The index in the lane's list of writes with locks; `None`: the request has no locks.
    pub locked: Option<u32>,
    /// The request was counted in the statistic `log_waits`; `waited_overlap`: in `overlap_waits`.
    pub waited_log: bool,
    pub waited_overlap: bool,
    /// The request has asked for a repair ([`Wait::Equal`]), and asks for no other one.
    pub equalled: bool,
    /// The request waits for a change of the replicas' states, for at most the hold time.
    pub held: bool,
    /// The time at which the request was first found waiting for the replicas.
    pub since: Option<Nanos>,
    /// The index of its [`Failures`]; [`NO_FAILURES`]: none.
    pub failures: u32,
    /// The data, unless a device has it. The data of a write to several replicas stays here, and
    /// each child gets a handle to it.
    pub data: Extents,
}

impl Request {
    /// An unused request.
    pub(super) fn free() -> Self {
        Self {
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
            failures: NO_FAILURES,
            data: Extents::new(),
        }
    }

    /// Initialises the request for `io`, in place to save a copy.
    #[inline]
    pub(super) fn begin(&mut self, io: Io, generation: u32, start: Nanos) {
        self.begin_sync(&io, 0, generation, start);
        self.stage = Stage::InFlight;
        self.data = io.data;
        self.clear();
    }

    /// Initialises the request for a direct read at the replica in `slot`.
    #[inline]
    pub(super) fn begin_sync(&mut self, io: &Io, slot: usize, generation: u32, start: Nanos) {
        self.pending = Some(Pending::new(io.token));
        self.stage = Stage::Direct(slot as u8);
        self.lba = io.lba;
        self.start = start;
        self.blocks = io.blocks;
        self.generation = generation;
        self.first = io.data.first().map_or(0, |buf| buf.len() as u32);
        self.op = io.op;
        self.flags = io.flags;
    }

    /// Makes a direct request an ordinary one, with one child.
    pub(super) fn make_ordinary(&mut self) {
        if let Stage::Direct(slot) = self.stage {
            self.stage = Stage::InFlight;
            self.clear();
            self.children.with = bit(usize::from(slot));
            self.children.passed = self.children.with;
        }
    }

    /// Resets all fields but the data.
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
        self.failures = NO_FAILURES;
    }

    pub(super) fn end(&self) -> u64 {
        self.lba + u64::from(self.blocks)
    }

    pub(super) fn is_read(&self) -> bool {
        self.op == Op::Read
    }

    /// True for operations that change blocks; false for reads and flushes.
    pub(super) fn writes(&self) -> bool {
        self.op.is_write()
    }

    /// True when the request has all the buffers it needs. A zero-copy read has none.
    pub(super) fn data_home(&self) -> bool {
        self.op != Op::Write || !self.data.is_empty()
    }

    /// True when the request waits, or may wait, for a change of the replicas' states.
    pub(super) fn is_held_up(&self) -> bool {
        match self.stage {
            // The request that this one waits for may wait for the replicas.
            Stage::Waiting(_) => true,
            // All children wait for a device to accept them.
            Stage::InFlight if self.children.awaited() != 0 => self.children.at_work() == 0,
            Stage::InFlight => self.held,
            _ => false,
        }
    }

    /// Allocates new buffers in place of those that a late replica has. A zero-copy read needs
    /// none. Returns false if the pool is empty.
    #[cold]
    pub(super) fn find_buffers(&mut self, pool: &Pool, block_size: u32) -> bool {
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

/// The failed children of a request, by slot: the numbers of the reports to the control
/// (*tickets*), and the reasons.
pub(super) struct Failures {
    pub tickets: [u64; MAX_REPLICAS],
    pub why: [Failure; MAX_REPLICAS],
}

impl Failures {
    pub(super) fn new() -> Self {
        Self {
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

//! Removes a disk from the pool: its units move to the other disks while hosts do I/O, then new
//! roots leave the disk out.
//!
//! ```text
//!   RemoveDisk ─▶ Naming ──▶ Moving ───────────────▶ Dropping ──▶ Intent::Left
//!                 two roots  units, metadata pages   two roots
//!                 say so     (resumed at an import)  leave it out
//!                               │ KeepDisk, no space, failure
//!                               └────────▶ Staying: two roots say that it is in ──▶ Intent::Left
//! ```
//!
//! From the first step on, the pool allocates no unit of the disk. A unit counts as used until the
//! record of its move is settled and the reads of that time have ended. Each change takes two
//! roots, as an import may fall back to the root before the newest. The caller erases the disk
//! after [`Intent::Left`], when no import needs it.
//!
//! The caller limits the rate of the moves ([`Pool::allow_moves`]), so that they do not slow hosts.

mod moves;

use std::collections::VecDeque;

use super::checking::Checking;
use super::checkpoint::Checkpoint;
use super::deletion::Deletion;
use super::discards::Discards;
use super::store::Store;
use super::writes::Writes;
use super::{Attempt, Pool};
use crate::disks::DiskState;
use crate::ids::{Lsn, Token, VersionId};
use crate::interface::{Answer, Intent, Refusal};
use crate::map::Entry;
use crate::mutation::Mutation;

use moves::Looks;
pub(super) use moves::{MOVE_TOKENS, Moves};

/// Leaves that one allowance looks at, in search of units to move; fewer while hosts have I/O.
const LEAVES: u64 = 1024;
const BUSY_LEAVES: u64 = 64;
/// Entries that one allowance looks at, for the versions that have the units on the move. A look
/// takes about a tenth of a microsecond.
const LOOKS: u32 = if cfg!(test) { 24 } else { 32 << 10 };
const BUSY_LOOKS: u32 = 8 << 10;
/// Roots after which no page is left that a change of its node has freed.
const ROOTS: u32 = 3;

#[derive(Debug, Default)]
pub(super) struct Leaving {
    pub moves: Moves,
    departure: Option<Departure>,
    /// Moves that may begin.
    allowed: u64,
    looks: Looks,
    /// The pool is about to close: no move begins.
    is_paused: bool,
}

#[derive(Debug)]
struct Departure {
    disk: usize,
    stage: LeavingStage,
    /// The request that the next stage answers.
    token: Option<Token>,
    /// Units in use when this process began to empty the disk.
    total: u64,
    search: Search,
    /// Nodes with pages on the disk count as changed.
    has_left_pages: bool,
    /// Roots that are written to free pages on the disk.
    roots: u32,
    /// The disk stays, for this reason.
    stop: Option<Refusal>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeavingStage {
    Naming,
    Moving,
    Dropping,
    Staying,
}

/// The search for units of the disk.
#[derive(Debug, Default)]
struct Search {
    version: VersionId,
    leaf: u64,
    /// Parts of the last leaf: place and unit.
    found: VecDeque<(u64, u64)>,
    /// The present pass found a unit.
    has_found: bool,
    /// The last record when a whole pass found no unit.
    clean_at: Option<Lsn>,
    /// The last record when the present pass began: a later one may hide a unit from it.
    began_at: Lsn,
    /// No record came during the pass of `clean_at`.
    is_final: bool,
    /// Leaves that may be looked at.
    left: u64,
}

/// The progress of the removal of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeavingStatus {
    pub disk: usize,
    /// Units of the disk in use now.
    pub left: u64,
    /// Units of the disk in use when this process began to empty it.
    pub total: u64,
    /// The removal has ended, and the disk stays, once two roots have recorded that.
    pub is_staying: bool,
}

impl Leaving {
    /// Goes on with the disk that was leaving when the pool was closed.
    pub(super) fn resumed(store: &mut Store) -> Self {
        let departure = store.superblock.disks.leaving().map(|disk| {
            bar(store, disk, true);
            Departure::new(store, disk, LeavingStage::Moving, None)
        });
        Self {
            departure,
            ..Self::default()
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.departure.is_none()
    }

    /// Begins no further move. Returns true when the pool may close.
    pub(super) fn pause(&mut self) -> bool {
        self.is_paused = true;
        self.moves.is_empty()
    }

    pub(super) fn drain(&mut self) -> Option<Token> {
        self.moves.drain();
        self.departure.take()?.token
    }
}

impl Departure {
    fn new(store: &Store, disk: usize, stage: LeavingStage, token: Option<Token>) -> Self {
        Self {
            disk,
            stage,
            token,
            total: store.space.used_of(disk),
            search: Search::default(),
            has_left_pages: false,
            roots: 0,
            stop: None,
        }
    }
}

/// Ends the allocation of units and pages of a disk, or begins it again.
fn bar(store: &mut Store, disk: usize, is_barred: bool) {
    store.space.bar(disk, is_barred);
    let ranges = store.superblock.disks.ranges().iter();
    let ranges = ranges.filter(|range| is_barred && range.disk == disk);
    let units = ranges.map(|range| range.first..range.end()).collect();
    store.zones.bar(units);
}

/// The parts of a pool that a removal works with.
pub(super) struct Removal<'a> {
    store: &'a mut Store,
    writes: &'a Writes,
    checkpoint: &'a mut Checkpoint,
    checking: &'a Checking,
    deletion: &'a Deletion,
    discards: &'a Discards,
    leaving: &'a mut Leaving,
}

impl Pool {
    pub(super) fn removal(&mut self) -> Removal<'_> {
        Removal {
            store: &mut self.store,
            writes: &self.writes,
            checkpoint: &mut self.checkpoint,
            checking: &self.checking,
            deletion: &self.deletion,
            discards: &self.discards,
            leaving: &mut self.leaving,
        }
    }

    /// The progress of a removal; `None`: no disk is being removed.
    pub fn leaving(&self) -> Option<LeavingStatus> {
        let departure = self.leaving.departure.as_ref()?;
        Some(LeavingStatus {
            disk: departure.disk,
            left: self.store.space.used_of(departure.disk),
            total: departure.total,
            is_staying: departure.stop.is_some(),
        })
    }

    /// True when a unit of this entry is being moved: writes to it wait.
    pub fn is_moving(&self, entry: &Entry) -> bool {
        self.leaving.moves.is_on(entry)
    }

    /// Allows this many moves from now on, in place of the allowance before. Call it every 10 ms.
    /// `is_busy`: hosts have I/O in flight, so the search for units takes smaller steps.
    pub fn allow_moves(&mut self, units: u64, is_busy: bool) {
        let Some(departure) = &mut self.leaving.departure else {
            return;
        };
        self.leaving.allowed = units;
        self.leaving.moves.note_allowance();
        let (leaves, looks) = if is_busy {
            (BUSY_LEAVES, BUSY_LOOKS)
        } else {
            (LEAVES, LOOKS)
        };
        departure.search.left = leaves;
        self.leaving.looks.allow(looks);
        self.store.has_news = true;
    }
}

/// Requests.
impl Removal<'_> {
    pub(super) fn attempt_remove_disk(
        &mut self,
        token: Token,
        disk: usize,
    ) -> Result<Attempt, Refusal> {
        let table = &self.store.superblock.disks;
        if !table.present().any(|present| present == disk) {
            return Err(Refusal::OutOfRange);
        }
        if table.present().count() == 1 {
            return Err(Refusal::LastDisk);
        }
        if disk == 0 {
            return Err(Refusal::FirstDisk);
        }
        if let Some(departure) = &self.leaving.departure {
            return match (departure.disk == disk, departure.stage) {
                (false, _) => Err(Refusal::DiskLeaving),
                (true, LeavingStage::Naming | LeavingStage::Staying) => Ok(Attempt::Wait),
                (true, LeavingStage::Moving | LeavingStage::Dropping) => {
                    self.store.answer(token, Ok(Answer::Done));
                    Ok(Attempt::Begun)
                }
            };
        }
        if !self.store.next_root.has_same_table() {
            return Ok(Attempt::Wait);
        }
        let missing = self.missing_units(disk);
        if missing > 0 {
            return Err(Refusal::NoRoom { missing });
        }
        bar(self.store, disk, true);
        let departure = Departure::new(self.store, disk, LeavingStage::Naming, Some(token));
        self.leaving.departure = Some(departure);
        self.store.change_table(disk, DiskState::Leaving);
        Ok(Attempt::Begun)
    }

    /// Units that the other disks lack for the contents of a disk.
    fn missing_units(&self, disk: usize) -> u64 {
        let (free, kept) = self.store.free_units();
        let free = free - self.store.space.free_of(disk);
        (self.units_without_place(disk) + kept).saturating_sub(free)
    }

    /// Units of a disk that need a place elsewhere: not those whose place is taken already.
    fn units_without_place(&self, disk: usize) -> u64 {
        let (space, table) = (&self.store.space, &self.store.superblock.disks);
        let in_limbo = space.limbo().filter(|unit| table.disk_of(*unit) == disk);
        // All moves are from the disk that leaves.
        let moving = self.leaving.moves.new_units();
        space.used_of(disk) - (in_limbo.count() + moving.count()) as u64
    }

    pub(super) fn attempt_keep_disk(
        &mut self,
        token: Token,
        disk: usize,
    ) -> Result<Attempt, Refusal> {
        let departure = self.leaving.departure.as_mut();
        let departure = departure.filter(|departure| departure.disk == disk);
        let departure = departure.ok_or(Refusal::NotLeaving)?;
        match departure.stage {
            LeavingStage::Naming | LeavingStage::Staying => Ok(Attempt::Wait),
            LeavingStage::Dropping => Err(Refusal::TooLate),
            LeavingStage::Moving if departure.token.is_some() => Ok(Attempt::Wait),
            LeavingStage::Moving => {
                departure.token = Some(token);
                departure.stop.get_or_insert(Refusal::Cancelled);
                self.store.has_news = true;
                Ok(Attempt::Begun)
            }
        }
    }
}

/// Progress.
impl Removal<'_> {
    pub(super) fn advance_leaving(&mut self) {
        let departure = self.leaving.departure.as_ref();
        let is_stopping = departure.is_some_and(|departure| departure.stop.is_some());
        let is_ending = is_stopping || self.leaving.is_paused;
        let Leaving { moves, looks, .. } = &mut *self.leaving;
        moves.advance(self.store, looks, is_ending);
        let Some(departure) = &mut self.leaving.departure else {
            return;
        };
        let is_written = self.store.is_table_written();
        match departure.stage {
            LeavingStage::Naming if is_written => {
                departure.stage = LeavingStage::Moving;
                if let Some(token) = departure.token.take() {
                    self.store.answer(token, Ok(Answer::Done));
                }
                self.store.has_news = true;
            }
            LeavingStage::Dropping if is_written => self.end_leaving(Ok(())),
            LeavingStage::Staying if is_written => {
                let reason = departure.stop.unwrap_or(Refusal::Cancelled);
                self.end_leaving(Err(reason));
            }
            LeavingStage::Naming | LeavingStage::Dropping | LeavingStage::Staying => {}
            LeavingStage::Moving => self.advance_moving(),
        }
    }

    fn end_leaving(&mut self, result: Result<(), Refusal>) {
        let Some(departure) = self.leaving.departure.take() else {
            return;
        };
        if let Some(token) = departure.token {
            self.store.answer(token, Ok(Answer::Done));
        }
        let disk = departure.disk;
        self.store.out.push_back(Intent::Left { disk, result });
        self.store.has_news = true;
    }

    fn advance_moving(&mut self) {
        let Some(departure) = &mut self.leaving.departure else {
            return;
        };
        if !self.store.has_root || self.leaving.is_paused || self.store.exporting.is_some() {
            return;
        }
        if let Some(failure) = self.leaving.moves.take_failure() {
            departure.stop.get_or_insert(failure);
        }
        let disk = departure.disk;
        let is_free = self.store.next_root.has_same_table();
        if departure.stop.is_some() {
            if self.leaving.moves.is_empty() && is_free {
                departure.stage = LeavingStage::Staying;
                bar(self.store, disk, false);
                self.store.change_table(disk, DiskState::In);
            }
            return;
        }
        if !std::mem::replace(&mut departure.has_left_pages, true) && self.store.zones.has_barred()
        {
            let zones = &self.store.zones;
            self.store
                .state
                .leave_pages(|page| zones.is_page_barred(page));
            self.checkpoint.rewrite_directory(true);
            self.store.want_root();
        }
        self.begin_moves();
        let Some(departure) = &mut self.leaving.departure else {
            return;
        };
        let is_empty = self.store.space.used_of(disk) == 0
            || (Mutation::DropBeforeEmpty.is_active() && departure.total > 0);
        if is_empty && self.leaving.moves.is_empty() && is_free {
            departure.stage = LeavingStage::Dropping;
            self.store.change_table(disk, DiskState::Gone);
        } else if departure.search.clean_at.is_some() {
            self.free_the_rest();
        }
    }

    /// Frees the units of the disk that no map has: those in limbo by settling, those of metadata
    /// by further roots.
    fn free_the_rest(&mut self) {
        let Some(departure) = &mut self.leaving.departure else {
            return;
        };
        if self.store.space.in_limbo() > 0 {
            self.store.settle.want(self.store.log.next_lsn() - 1);
        }
        if !self.checking.is_idle() {
            // The check holds a root.
            departure.roots = 0;
        }
        let may_write = !self.store.wants_checkpoint && self.checkpoint.is_idle();
        if self.store.zones.has_barred() && may_write && departure.roots < ROOTS {
            departure.roots += 1;
            self.store.want_root();
        }
    }

    /// Begins the moves that are allowed, of the units that the search finds.
    fn begin_moves(&mut self) {
        while self.leaving.allowed > 0
            && !self.leaving.looks.are_used()
            && self.leaving.moves.may_begin(self.store)
        {
            let Some(departure) = &mut self.leaving.departure else {
                return;
            };
            let Some((place, unit)) = departure.search.next(self.store, departure.disk) else {
                return;
            };
            let near = departure.search.version;
            match self.begin_move(near, place, unit) {
                Ok(true) => self.leaving.allowed -= 1,
                Ok(false) => {}
                Err(refusal) => {
                    if let Some(departure) = &mut self.leaving.departure {
                        departure.stop.get_or_insert(refusal);
                        self.store.has_news = true;
                    }
                    return;
                }
            }
        }
    }

    /// Returns false if the unit cannot move now: a later pass of the search finds it again.
    fn begin_move(&mut self, near: VersionId, place: u64, unit: u64) -> Result<bool, Refusal> {
        if self.leaving.moves.is_from(unit)
            || self.writes.reads(unit)
            || !self
                .store
                .may_use(crate::format::superblock::Feature::LeavingDisks)
        {
            return Ok(false);
        }
        if self.store.settle.is_unsettled(unit, u16::MAX) {
            self.store.settle.want(self.store.log.next_lsn() - 1);
            return Ok(false);
        }
        let users = self.store.state.users(near, place, unit);
        self.leaving.looks.take(&users);
        let Some(version) = users.versions.first().copied() else {
            return Ok(false);
        };
        let is_occupied = |user: &VersionId| self.writes.occupies(*user, place..place + 1);
        if users.versions.iter().any(is_occupied) {
            return Ok(false);
        }
        let before = place.checked_sub(1);
        let before = before.and_then(|place| self.store.state.entry(version, place).ok());
        let goal = before.and_then(|before| before.next_unit());
        let (free, kept) = self.store.free_units();
        let to = if free > kept {
            let (state, reserve) = (&self.store.state, self.store.superblock.reserve_units);
            let home = || state.first_unit(version);
            self.store.space.allocate_for(version, goal, reserve, home)
        } else {
            None
        };
        match to {
            Some(to) => {
                let moves = &mut self.leaving.moves;
                moves.begin(self.store, &users, place, [unit, to]);
                Ok(true)
            }
            None if self.is_space_returning() => {
                self.store.settle.want(self.store.log.next_lsn() - 1);
                Ok(false)
            }
            None => {
                let disk = self.store.superblock.disks.disk_of(unit);
                let missing = self.units_without_place(disk) + kept - free.min(kept);
                Err(Refusal::NoRoom { missing })
            }
        }
    }

    /// True when space will come back without a request.
    fn is_space_returning(&self) -> bool {
        let in_limbo = self.store.space.in_limbo() > 0;
        in_limbo || !self.deletion.is_idle() || !self.discards.is_idle()
    }
}

impl Search {
    /// The next place with a unit of the disk. `None`: no leaf may be looked at any more, or the
    /// pass has come to its end.
    fn next(&mut self, store: &Store, disk: usize) -> Option<(u64, u64)> {
        let last = store.log.next_lsn() - 1;
        if self.found.is_empty() && self.is_final && self.clean_at == Some(last) {
            return None;
        }
        loop {
            if let Some(found) = self.found.pop_front() {
                return Some(found);
            }
            if self.left == 0 {
                return None;
            }
            self.left -= 1;
            let state = &store.state;
            let Some((id, _)) = state.versions.range(self.version..).next() else {
                self.clean_at = (!self.has_found).then_some(last);
                self.is_final = self.began_at == last;
                self.began_at = last;
                (self.version, self.leaf, self.has_found) = (VersionId(0), 0, false);
                // The next pass begins with the next allowance.
                self.left = 0;
                return None;
            };
            if *id != self.version {
                (self.version, self.leaf) = (*id, 0);
            }
            let Some(leaf) = state.next_own_leaf(*id, self.leaf) else {
                (self.version, self.leaf) = (VersionId(id.0 + 1), 0);
                continue;
            };
            self.leaf = leaf + 1;
            // The units of an unreadable leaf are lost with it.
            let parts = state.parts_of_leaf(*id, leaf).unwrap_or_default();
            let table = &store.superblock.disks;
            let there = parts
                .iter()
                .filter(|(_, part)| !part.is_external() && table.disk_of(part.unit) == disk);
            let there = there.map(|(place, part)| (*place, part.unit));
            self.found.extend(there);
            self.has_found |= !self.found.is_empty();
        }
    }
}

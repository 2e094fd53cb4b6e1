//! An open pool: requests and completions in, I/O and answers out.
//!
//! ```text
//!   submit(token, request)  ─┐                ┌─▶ Write, Flush, ReadPage, Discard   metadata
//!   written, flushed, …      ├─▶ poll() ──────┼─▶ Data, ReadSource, ReadExternal    data
//!   data_written, source_read│                ├─▶ AwaitGrace
//!   grace_ended             ─┘                └─▶ Answer, Full, Left
//! ```
//!
//! The caller calls [`Pool::poll`] after events until it returns `None`. Data never passes through
//! the pool: the caller writes it where an intent says. For a read, it calls [`Pool::lookup`].
//!
//! | file | owns |
//! |---|---|
//! | `writes` | first writes in flight, and the places that they occupy |
//! | `requests`, `checks` | checks of requests, and their records |
//! | `store` | the state, its log, and I/O of both |
//! | `durable` | settling, and answers that wait for the log |
//! | `checkpoint` | images and roots |
//! | `checking` | checks of all metadata while the pool serves |
//! | `growth` | further disks, and the rest of one that became larger |
//! | `leaving` | a disk that is emptied, and dropped |
//! | `naming` | a new name of the pool |
//! | `features` | the features that the superblocks name |
//! | `parents`, `external` | other parents of volumes, read-only volumes; external devices |
//! | `full` | writes that wait for space |
//! | `room` | pages for the maps of external devices |
//! | `jobs` | requests of many steps |
//! | `follow` | changes of the map, for copies of it |
//! | `deletion` | passes over hidden versions |
//! | `discards` | discards of free space |

mod checking;
mod checkpoint;
mod checks;
mod deletion;
mod discards;
mod durable;
mod external;
mod features;
mod follow;
mod full;
mod jobs;
mod leaving;
mod naming;
mod parents;
mod requests;
mod room;
mod store;
mod writes;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::disks::Location;
use crate::format::Page;
use crate::format::superblock::Superblock;
use crate::grace::Grace;
use crate::ids::{IoId, Token, VersionId};
use crate::image::Image;
use crate::interface::{Answer, Intent, IoFailed, Limits, Refusal, Request};
use crate::log::{Log, LogPosition};
use crate::map::{Entry, PageGarbage};
use crate::settle::Settle;
use crate::space::Space;
use crate::state::State;
use crate::zones::Zones;

use checking::Checking;
use checkpoint::Checkpoint;
use deletion::Deletion;
use discards::Discards;
use durable::Durable;
use full::Full;
use jobs::{Ground, Jobs};
use leaving::Leaving;
use store::{Flushes, NextRoot, Store};
use writes::Writes;

pub use follow::{Follow, is_move, is_own};
pub use leaving::LeavingStatus;
pub(crate) use store::superblock_page;

/// [`Limits::requests`] requests are in the pool: submit this one again after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy;

#[derive(Debug)]
pub struct Pool {
    store: Store,
    writes: Writes,
    durable: Durable,
    checkpoint: Checkpoint,
    checking: Checking,
    deletion: Deletion,
    discards: Discards,
    jobs: Jobs,
    full: Full,
    leaving: Leaving,
    /// Requests that wait for room, a record in flight, or a settled record.
    waiting: VecDeque<(Token, Request)>,
}

/// The state that a new or recovered pool starts from.
pub(crate) struct Start {
    pub superblock: Superblock,
    pub limits: Limits,
    pub state: State,
    pub space: Space,
    pub zones: Zones,
    pub garbage: PageGarbage,
    pub image: Image,
    /// Pages of roots before the one that was loaded.
    pub old_pages: Vec<u64>,
    /// Units that count as used until the first root is durable.
    pub until_root: Vec<u64>,
    pub log: LogPosition,
    /// First log page that a recovery may need.
    pub tail: u64,
    /// Pages to write first: copies to heal, places to wipe.
    pub repairs: Vec<(Location, Arc<Page>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    LogPage(u64),
    Page,
    Superblock,
    SettleFlush,
    CheckpointFlush,
    CheckRead,
    CheckWrite,
    CheckFlush,
    Discard,
    RequestFlush(Token),
    /// The flush before an answer that `durable` has.
    AnswerFlush(Token),
    /// The flush of one disk, for a flush of several.
    PartOfFlush(IoId),
    /// A superblock on a disk that is being added, and the flush of it.
    Label,
    LabelFlush,
    /// The flush of copies on their new disks.
    MoveFlush,
}

/// The outcome of an attempt at a request.
#[derive(Debug)]
enum Attempt {
    /// It is on its way, or answered.
    Begun,
    /// Try again later.
    Wait,
    Refused(Refusal),
}

/// A change of a map that may need pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MapGrowth {
    /// The map gets a leaf with no unit, for a trim of a part of it, or nodes of a new device.
    Split,
    /// A whole leaf goes; the nodes around it may become known one by one.
    Removal,
    /// Nodes that are there change, or units come in.
    Change,
    /// As [`MapGrowth::Change`], for a thick volume whose places do not all have units yet: the
    /// pool keeps units for them.
    Kept,
}

impl From<Refusal> for Attempt {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Pool {
    /// Starts with a checkpoint of its state: until that is on the disk, requests wait.
    pub(crate) fn start(start: Start) -> Self {
        let geometry = start.superblock.geometry;
        let tag = start.superblock.tag();
        let window = start.limits.log_window;
        let log = Log::new(tag, &geometry, start.log, start.tail, window);
        let mut store = Store {
            settle: Settle::new(start.log.next - 1),
            superblock: start.superblock,
            limits: start.limits,
            state: start.state,
            space: start.space,
            zones: start.zones,
            garbage: start.garbage,
            log,
            grace: Grace::default(),
            requests: 0,
            ios: HashMap::new(),
            next_io: 0,
            flushes: Flushes::default(),
            own_answers: VecDeque::new(),
            exporting: None,
            next_root: NextRoot::default(),
            is_exported: false,
            out: VecDeque::new(),
            held: false,
            has_news: true,
            has_root: false,
            wants_checkpoint: true,
            has_changes: true,
            changes: None,
        };
        store.space.note_frees(store.limits.discard_units);
        let leaving = Leaving::resumed(&mut store);
        let mut pool = Self {
            store,
            checkpoint: Checkpoint::first(
                start.image,
                start.old_pages,
                start.until_root,
                start.repairs,
            ),
            writes: Writes::default(),
            checking: Checking::default(),
            durable: Durable::default(),
            deletion: Deletion::default(),
            discards: Discards::default(),
            jobs: Jobs::default(),
            full: Full::default(),
            leaving,
            waiting: VecDeque::new(),
        };
        pool.turn();
        pool
    }

    /// Takes a request. Its answer has the same token. No other request in the pool may have it.
    pub fn submit(&mut self, token: Token, request: Request) -> Result<(), Busy> {
        if self.store.requests >= self.store.limits.requests {
            return Err(Busy);
        }
        self.store.requests += 1;
        self.waiting.push_back((token, request));
        self.store.has_news = true;
        Ok(())
    }

    /// The next intent. `None`: nothing to do until the next event, or until the caller has given
    /// other work a turn ([`Pool::is_searching`]).
    pub fn poll(&mut self) -> Option<Intent> {
        while self.store.out.is_empty() && self.store.has_news {
            self.turn();
            if self.jobs.is_searching() {
                break;
            }
        }
        self.store.out.pop_front()
    }

    /// True when a search in a large map goes on with the next [`Pool::poll`], without an event.
    pub fn is_searching(&self) -> bool {
        self.jobs.is_searching()
    }

    /// The map entry of a place: the units that a read needs. Fails with [`Refusal::Damaged`] if
    /// the entry is unreadable.
    pub fn lookup(&self, version: VersionId, place: u64) -> Result<Entry, Refusal> {
        let known = self.store.state.versions.get(&version);
        let known = known.ok_or(Refusal::UnknownVersion)?;
        if place >= known.units {
            return Err(Refusal::OutOfRange);
        }
        let entry = self.store.state.entry(version, place);
        entry.map_err(|_| Refusal::Damaged)
    }

    /// A page write has ended.
    pub fn written(&mut self, io: IoId, result: Result<(), IoFailed>) {
        self.store.has_news = true;
        match (self.store.ios.remove(&io), result) {
            (Some(Purpose::CheckWrite), result) => self.checking.written(io, result),
            (Some(Purpose::Label), result) => self.store.label_written(result),
            (_, Err(IoFailed)) => self.store.held = true,
            (Some(Purpose::LogPage(sequence)), Ok(())) => self.store.log.written(sequence),
            (Some(_), Ok(())) => self.checkpoint.written(),
            (None, Ok(())) => {}
        }
    }

    /// A flush has ended.
    pub fn flushed(&mut self, io: IoId, result: Result<(), IoFailed>) {
        self.store.has_news = true;
        match (self.store.ios.remove(&io), result) {
            (Some(Purpose::RequestFlush(token)), result) => {
                let answer = result.map(|()| Answer::Done);
                self.store
                    .answer(token, answer.map_err(|IoFailed| Refusal::Medium));
            }
            (Some(Purpose::PartOfFlush(of)), result) => {
                if let Some(outcome) = self.store.part_flushed(of, result) {
                    self.flushed(of, outcome);
                }
            }
            (Some(Purpose::LabelFlush), result) => self.store.label_flushed(result),
            (Some(Purpose::CheckFlush), result) => self.checking.flushed(result),
            (Some(Purpose::MoveFlush), result) => self.leaving.moves.flushed(result),
            (_, Err(IoFailed)) => self.store.held = true,
            (Some(Purpose::AnswerFlush(token)), Ok(())) => self.answer_flushed(token),
            (Some(Purpose::SettleFlush), Ok(())) => self.settle_flushed(),
            (Some(_), Ok(())) => self.checkpoint.flushed(),
            (None, Ok(())) => {}
        }
    }

    /// A grace period has ended.
    pub fn grace_ended(&mut self, epoch: u64) {
        self.store.has_news = true;
        self.store.grace.end(epoch);
        self.durable.grace_ended(epoch);
    }

    /// Begins to settle all records. The caller calls it from a timer.
    pub fn settle(&mut self) {
        self.store.has_news = true;
        self.store.settle.want(self.store.log.next_lsn() - 1);
    }

    /// Begins a checkpoint, if anything changed. The caller calls it from a timer.
    pub fn checkpoint(&mut self) {
        self.store.has_news = true;
        self.store.wants_checkpoint = true;
    }

    /// Searches hidden versions again for units that their children no longer use.
    pub fn reclaim(&mut self) {
        self.store.has_news = true;
        self.deletion.search();
    }

    /// The changes of the map, for a caller that keeps a copy of it.
    pub fn follow(&mut self) -> Follow<'_> {
        Follow(&mut self.store)
    }

    /// True when no request, I/O or background work is in the pool.
    pub fn is_idle(&self) -> bool {
        self.store.out.is_empty()
            && !self.store.has_news
            && self.store.requests == 0
            && self.store.ios.is_empty()
            && self.store.grace.is_idle()
            && self.deletion.is_idle()
            && self.discards.is_idle()
            && self.leaving.is_idle()
    }

    /// True when the log or metadata could not be written: nothing changes any more.
    pub fn is_held(&self) -> bool {
        self.store.held
    }

    pub fn state(&self) -> &State {
        &self.store.state
    }

    pub(crate) fn space(&self) -> &Space {
        &self.store.space
    }

    /// Units that no map refers to and that are not free: in limbo, kept for an import, being
    /// discarded, or of a write in flight.
    pub(crate) fn pending_units(&self) -> impl Iterator<Item = u64> {
        let kept = self.checkpoint.until_root().iter().copied();
        self.store
            .space
            .limbo()
            .chain(kept)
            .chain(self.discards.units())
            .chain(self.writes.new_units())
            .chain(self.leaving.moves.new_units())
    }

    pub(crate) fn zones(&self) -> &Zones {
        &self.store.zones
    }

    pub fn superblock(&self) -> &Superblock {
        &self.store.superblock
    }

    /// The free units, and how many of them are kept for thick volumes and as the reserve.
    pub fn free_units(&self) -> (u64, u64) {
        self.store.free_units()
    }

    /// The units of all disks of the pool. Of a disk that is being removed, those in use count.
    pub fn total_units(&self) -> u64 {
        let (table, space) = (&self.store.superblock.disks, &self.store.space);
        let leaving = table.leaving();
        let units = table.present().map(|disk| match leaving {
            Some(leaving) if leaving == disk => space.used_of(disk),
            _ => table.units_of(disk),
        });
        units.sum()
    }

    /// Free units of one disk.
    pub fn free_units_of(&self, disk: usize) -> u64 {
        self.store.space.free_of(disk)
    }

    /// One round: answers and records that became possible, then log pages, then upkeep.
    fn turn(&mut self) {
        while let Some(io) = self.store.flushes.ended.pop_front() {
            self.flushed(io, Ok(()));
        }
        self.store.has_news = false;
        if self.store.held {
            return self.refuse_all();
        }
        self.writes.publish(&mut self.store);
        self.answer_durable();
        let (settled, ended) = (self.store.settle.settled(), self.store.grace.ended());
        let is_freed = self.store.space.reap(settled, ended);
        // The next root discards the units that are free now.
        self.store.has_changes |= is_freed && self.store.space.notes_frees();
        self.jobs.advance(&mut Ground {
            store: &mut self.store,
            durable: &mut self.durable,
            deletion: &mut self.deletion,
            waiting: &mut self.waiting,
        });
        let is_draining = self.checkpoint.is_draining();
        self.writes.begin_copies(&mut self.store, is_draining);
        self.wake_full();
        self.removal().advance_leaving();
        self.retry_waiting();
        if !self.checkpoint.is_draining() && self.store.exporting.is_none() {
            self.deletion.advance(&mut self.store, &self.writes);
        }
        self.checkpoint
            .rewrite_directory(self.checking.take_lost_list());
        let is_quiet = self.writes.has_no_record();
        self.checkpoint
            .advance(&mut self.store, &mut self.discards, is_quiet);
        self.discards.advance(&mut self.store);
        self.checking.advance(&mut self.store);
        self.store.write_log();
        self.advance_settling();
        if let Some(epoch) = self.store.grace.begin() {
            self.store.out.push_back(Intent::AwaitGrace { epoch });
        }
    }

    fn refuse_all(&mut self) {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let mut tokens: Vec<Token> = waiting.map(|(token, _)| token).collect();
        tokens.extend(self.full.drain());
        tokens.extend(self.writes.drain());
        tokens.extend(self.durable.drain());
        tokens.extend(self.jobs.drain());
        tokens.extend(self.store.exporting.take());
        tokens.extend(self.leaving.drain());
        tokens.extend(self.checking.drain());
        tokens.extend(
            self.store
                .next_root
                .growth
                .take()
                .map(|growth| growth.token()),
        );
        tokens.extend(self.store.next_root.naming.take().map(|(token, _)| token));
        for token in tokens {
            self.store.answer(token, Err(Refusal::Held));
        }
    }

    fn retry_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let Some((token, request)) = self.waiting.pop_front() else {
                return;
            };
            match self.attempt(token, &request) {
                Attempt::Begun => self.full.begun(token),
                Attempt::Wait => self.waiting.push_back((token, request)),
                Attempt::Refused(refusal) => self.refuse(token, request, refusal),
            }
        }
    }
}

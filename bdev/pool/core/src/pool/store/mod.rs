//! The parts of an open pool that all others use: its state, its log, its free space, and the I/O
//! of metadata.

mod growth;
mod table;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use self::growth::Growth;
pub(super) use self::table::TableChange;
use super::Purpose;
use crate::disks::{Location, MAX_DISKS};
use crate::format::Page;
use crate::format::record::Record;
use crate::format::superblock::Superblock;
use crate::geometry::PAGE;
use crate::grace::Grace;
use crate::ids::{IoId, Lsn, Token};
use crate::interface::{Answer, Change, Intent, IoFailed, Limits, Refusal};
use crate::log::Log;
use crate::map::PageGarbage;
use crate::settle::Settle;
use crate::space::Space;
use crate::state::{State, Users};
use crate::zones::Zones;

/// Tokens from here on are the pool's own.
pub(super) const OWN_TOKENS: Token = 1 << 63;

/// Changes of the pool itself that the next root brings.
#[derive(Debug, Default)]
pub(super) struct NextRoot {
    /// The disk's new size, until the pool has it.
    pub growth: Option<Growth>,
    /// The state of a disk that roots are about to have.
    pub table: Option<TableChange>,
    /// The pool's new name, until a root has it.
    pub naming: Option<(Token, String)>,
    /// Features that the pool is about to use.
    pub features: u64,
    /// Features that the last two roots name: a recovery finds no root without them.
    pub named: u64,
    /// Nodes of the root that is being written.
    pub writing: Option<usize>,
    /// Nodes of the last root: the next one frees the pages that they had before.
    pub replaced: usize,
    /// The root after which changes of each class first found no room, in the present shortage.
    pub short_since: [Option<u64>; 4],
}

impl NextRoot {
    pub(super) fn is_empty(&self) -> bool {
        self.has_same_table() && self.naming.is_none()
    }

    /// True when a root that is being written, or the next one, frees pages.
    pub(super) fn returns_pages(&self) -> bool {
        self.writing.is_some() || self.replaced > 0
    }

    /// True when no root is about to change the table of disks.
    pub(super) fn has_same_table(&self) -> bool {
        self.growth.is_none() && self.table.is_none()
    }
}

/// Flushes that the disks do not end themselves.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// Those that ended without I/O.
    pub ended: VecDeque<IoId>,
    /// Those of several disks: the disks that are left, and the outcome of the others.
    parts: HashMap<IoId, (usize, Result<(), IoFailed>)>,
}

#[derive(Debug)]
pub(super) struct Store {
    pub superblock: Superblock,
    pub limits: Limits,
    pub state: State,
    pub space: Space,
    pub zones: Zones,
    pub garbage: PageGarbage,
    pub log: Log,
    pub settle: Settle,
    pub grace: Grace,
    /// Requests in the pool.
    pub requests: usize,
    pub ios: HashMap<IoId, Purpose>,
    pub next_io: IoId,
    pub flushes: Flushes,
    /// Answers to the pool's own requests.
    pub own_answers: VecDeque<(Token, Result<Answer, Refusal>)>,
    /// The request that closes the pool.
    pub exporting: Option<Token>,
    pub next_root: NextRoot,
    /// The pool is closed.
    pub is_exported: bool,
    pub out: VecDeque<Intent>,
    /// The log or metadata could not be written.
    pub held: bool,
    /// A turn may find work.
    pub has_news: bool,
    /// A root of this import is on the disk.
    pub has_root: bool,
    pub wants_checkpoint: bool,
    /// Something changed since the last image.
    pub has_changes: bool,
    /// Changes of the map that the caller has not taken. `None`: the caller keeps no copy.
    pub changes: Option<Vec<Change>>,
}

impl Store {
    /// Free units, and those that thick volumes and the reserve keep.
    pub(super) fn free_units(&self) -> (u64, u64) {
        let kept = self.superblock.reserve_units + self.state.guaranteed();
        (self.space.free(), kept)
    }

    pub(super) fn answer(&mut self, token: Token, result: Result<Answer, Refusal>) {
        if token >= OWN_TOKENS {
            self.has_news = true;
            return self.own_answers.push_back((token, result));
        }
        self.requests -= 1;
        self.out.push_back(Intent::Answer { token, result });
    }

    /// Appends a record. A full page is closed first; the caller has asked [`Store::log_takes`].
    pub(super) fn append(&mut self, record: &Record) -> Lsn {
        if !self.log.fits(record) {
            self.emit_page(false);
        }
        self.has_news = true;
        self.log.append(record)
    }

    /// True when the log takes this record now. If not, a checkpoint makes room.
    pub(super) fn log_takes(&mut self, record: &Record) -> bool {
        if !self.has_root {
            return false;
        }
        if !self.log.has_room() {
            self.wants_checkpoint = true;
            return false;
        }
        self.log.fits(record) || self.log.may_emit()
    }

    /// Changes the state; freed units wait for the record and for readers.
    pub(super) fn apply(&mut self, lsn: Lsn, record: &Record) {
        let mut released = Vec::new();
        self.note_change(record);
        if let Record::Create { version, .. } | Record::Clone { version, .. } = record {
            self.space.forget_home(*version);
        }
        let outcome = self.state.apply(lsn, record, &mut released);
        debug_assert_eq!(outcome, Ok(()), "{record:?} was checked before");
        self.has_changes = true;
        self.release(released, lsn);
    }

    /// Notes what a record is about to change.
    fn note_change(&mut self, record: &Record) {
        let Some(changes) = &mut self.changes else {
            return;
        };
        let geometry = &self.state.geometry;
        match record {
            Record::Map { version, place, .. } => changes.push(Change::Places {
                version: *version,
                first: *place,
                end: *place + 1,
            }),
            Record::Unmap {
                version,
                first,
                granules,
            } => {
                let per_unit = u64::from(geometry.granules_per_unit);
                changes.push(Change::Places {
                    version: *version,
                    first: first / per_unit,
                    end: (first + granules).div_ceil(per_unit),
                });
            }
            Record::Clear { version, leaf } => {
                let per_leaf = u64::from(geometry.units_per_leaf);
                changes.push(Change::Places {
                    version: *version,
                    first: leaf * per_leaf,
                    end: (leaf + 1) * per_leaf,
                });
            }
            Record::Snapshot { cuts } => {
                changes.extend(cuts.iter().map(|cut| Change::Version(cut.volume)))
            }
            // The children get another parent.
            Record::End { version } => {
                let children = self.state.versions.children(*version);
                changes.extend(children.map(Change::Version));
            }
            Record::Restore { version, .. } | Record::Adopt { version, .. } => {
                changes.push(Change::Contents(*version))
            }
            Record::Resize { version, .. }
            | Record::Decouple { version, .. }
            | Record::ReadOnly { version }
            | Record::Detach { version }
            | Record::Hide { version } => changes.push(Change::Version(*version)),
            Record::Create { .. }
            | Record::Clone { .. }
            | Record::Prepare { .. }
            | Record::Pass { .. }
            | Record::Step { .. }
            | Record::Rename { .. }
            | Record::Cancel { .. } => {}
            // The move notes them, as it knows the users. Nothing reads an external device's map.
            Record::Move { .. } | Record::External { .. } => {}
        }
    }

    /// Notes the entries of these versions at a place.
    pub(super) fn note_users(&mut self, place: u64, users: &Users) {
        let Some(changes) = &mut self.changes else {
            return;
        };
        changes.extend(users.versions.iter().map(|version| Change::Places {
            version: *version,
            first: place,
            end: place + 1,
        }));
    }

    pub(super) fn release(&mut self, units: Vec<u64>, lsn: Lsn) {
        if units.is_empty() {
            return;
        }
        let epoch = self.grace.request();
        for unit in units {
            self.space.release(unit, lsn, epoch);
        }
    }

    pub(super) fn write_log(&mut self) {
        let is_marking = self.settle.needs_page();
        if self.log.may_emit() {
            self.emit_page(is_marking);
        }
    }

    pub(super) fn emit_page(&mut self, even_empty: bool) {
        let Some((sequence, page)) = self.log.emit(self.settle.mark(), even_empty) else {
            return;
        };
        self.settle.marked_in(sequence);
        let offset = self.superblock.geometry.log_offset(sequence);
        let at = Location { disk: 0, offset };
        self.write(Purpose::LogPage(sequence), at, Arc::from(page));
    }

    pub(super) fn write(&mut self, purpose: Purpose, at: Location, bytes: Arc<Page>) {
        let io = self.io(purpose);
        self.out.push_back(Intent::Write { io, at, bytes });
    }

    /// Flushes all disks. Disks without a volatile cache need none: the event comes at once.
    pub(super) fn flush(&mut self, purpose: Purpose, skip: bool) {
        let present = self.superblock.disks.present();
        let all = present.fold(0, |set, disk| set | 1 << disk);
        self.flush_disks(purpose, skip, all);
    }

    /// Flushes the disks that the present step of settling needs.
    pub(super) fn flush_to_settle(&mut self, skip: bool) {
        let disks = self.settle.disks_to_flush();
        self.flush_disks(Purpose::SettleFlush, skip, disks);
    }

    /// Flushes one disk.
    pub(super) fn flush_disk(&mut self, purpose: Purpose, disk: usize) {
        self.flush_disks(purpose, false, 1 << disk);
    }

    /// Flushes a set of disks, a bit each.
    pub(super) fn flush_disks(&mut self, purpose: Purpose, skip: bool, disks: u64) {
        let io = self.io(purpose);
        if skip || !self.limits.has_volatile_cache {
            self.flushes.ended.push_back(io);
            self.has_news = true;
            return;
        }
        let wanted: Vec<usize> = (0..MAX_DISKS)
            .filter(|disk| disks >> disk & 1 == 1)
            .collect();
        if let [disk] = wanted[..] {
            return self.out.push_back(Intent::Flush { io, disk });
        }
        self.flushes.parts.insert(io, (wanted.len(), Ok(())));
        for disk in wanted {
            let io = self.io(Purpose::PartOfFlush(io));
            self.out.push_back(Intent::Flush { io, disk });
        }
    }

    /// One disk of a flush is flushed. Returns the flush and its outcome with the last one.
    pub(super) fn part_flushed(
        &mut self,
        of: IoId,
        result: Result<(), IoFailed>,
    ) -> Option<Result<(), IoFailed>> {
        let (left, outcome) = self.flushes.parts.get_mut(&of)?;
        *left -= 1;
        *outcome = outcome.and(result);
        if *left > 0 {
            return None;
        }
        self.flushes.parts.remove(&of).map(|(_, outcome)| outcome)
    }

    pub(super) fn io(&mut self, purpose: Purpose) -> IoId {
        self.next_io += 1;
        self.ios.insert(self.next_io, purpose);
        self.next_io
    }

    /// Writes a superblock to both places of its sequence on each disk. Returns the writes.
    pub(super) fn write_roots(&mut self, superblock: &Superblock) -> usize {
        for disk in superblock.disks.present() {
            let page = superblock_page(&superblock.on(disk));
            let places = superblock.disks.superblocks(disk, &superblock.geometry);
            for place in Superblock::places(superblock.sequence) {
                self.write(Purpose::Superblock, places[place], Arc::clone(&page));
            }
        }
        2 * superblock.disks.present().count()
    }

    /// Frees the pages that no image has any more.
    pub(super) fn free_garbage(&mut self) {
        for page in self.garbage.take() {
            self.zones.free(page, &mut self.space);
        }
    }
}

pub(crate) fn superblock_page(superblock: &Superblock) -> Arc<Page> {
    let mut page = Arc::new([0; PAGE]);
    superblock.encode(Arc::get_mut(&mut page).expect("made just now"));
    page
}

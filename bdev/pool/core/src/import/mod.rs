//! Opens (*imports*) a pool: reads its disks, and makes its state.
//!
//! ```text
//!   Superblocks ─▶ Log ─▶ Flush ─▶ Verify ─▶ Lists ─▶ Directory ─▶ Nodes ─▶ Pool
//!   four places    pages   keeps    data of   index,   versions     of all
//!                  until   all that unsettled page map               maps
//!                  a bad   was read records
//!                  one
//! ```
//!
//! The flush makes durable everything that decides: otherwise a second power failure could undo a
//! record that this import acted on. Nothing is written before it. The pool that comes out begins
//! with a checkpoint; a crash before its root is on the disk leaves everything as it was.
//!
//! An import reads the maps of all versions, so its time grows with their size.

pub mod leftovers;
mod log;
mod nodes;
mod replay;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use uuid::Uuid;

use crate::disks::Location;
use crate::format::chain;
use crate::format::directory::{self, VersionEntry};
use crate::format::superblock::{PoolState, Superblock};
use crate::format::{FormatError, Page, checksum};
use crate::geometry::{PAGE, superblock_offsets};
use crate::ids::{IoId, Lsn, Place};
use crate::interface::{IoFailed, Limits};
use crate::map::{PageGarbage, PagePair};
use crate::mutation::Mutation;
use crate::pool::{Pool, superblock_page};
use crate::zones::Zones;

use log::LogReader;
use nodes::Nodes;
use replay::Verification;

/// Reads in flight.
const WINDOW: usize = 32;

/// An I/O that the import needs. Disks count in the caller's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImportIntent {
    /// Ends with [`Import::read`].
    Read { io: IoId, at: Location, len: usize },
    /// Ends with [`Import::flushed`].
    Flush { io: IoId, disk: usize },
}

/// The reason why a pool cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    #[error("no superblock is readable; the disk has no pool, or lost all four copies")]
    NoSuperblock,
    #[error("disk {disk} has {found} bytes, fewer than the {expected} of the pool")]
    DiskSize {
        disk: Uuid,
        expected: u64,
        found: u64,
    },
    #[error("disk {disk}, number {number} of {of}, is missing")]
    DiskMissing {
        disk: Uuid,
        number: usize,
        of: usize,
    },
    #[error("two devices are disk {disk} of the pool: one is a copy of the other")]
    DiskTwice { disk: Uuid },
    #[error(
        "the pool is open by {holder}; export it there, or force the import if that one is gone"
    )]
    Foreign { holder: Uuid },
    #[error(
        "the pool uses features that this version does not know ({names}); import it with a newer \
         version"
    )]
    Features { names: String },
    #[error("the disk failed a flush")]
    Flush,
    #[error(
        "log page {sequence} or a root after it is lost: later pages prove that they were written"
    )]
    LogDamaged { sequence: u64 },
    #[error("record {lsn} does not fit the state before it")]
    Record { lsn: Lsn },
    #[error("both copies of a page of the {list} are unreadable")]
    ListLost { list: &'static str },
    #[error("{0}")]
    Format(#[from] FormatError),
    #[error("the directory's versions do not fit each other")]
    Directory,
    #[error("unit {unit} is in use at two places")]
    UnitUsedTwice { unit: u64 },
}

/// Counts of the records and pages that an import read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImportReport {
    /// Records of the log that were applied.
    pub replayed: u64,
    /// Records that the import left out. Their data is not on the disk, they depend on such a
    /// record, or the node of the map that they change is lost.
    pub dropped: u64,
    /// Pages of which one copy was unreadable. The first checkpoint writes them again.
    pub healed: u64,
    /// Nodes of maps of which both copies are unreadable: their places answer errors.
    pub lost: u64,
    /// True if the newest root was unreadable, so that the one before it was used.
    pub fell_back: bool,
}

/// The machine or program that opens a pool.
#[derive(Debug, Clone, Copy)]
pub struct Holder {
    pub id: Uuid,
    /// Opens the pool although another holder did not export it.
    pub force: bool,
}

#[derive(Debug)]
enum Phase {
    Superblocks,
    Log(LogReader),
    Flush { left: usize },
    Verify(Verification),
    Lists(Lists),
    Directory(DirectoryReader),
    Nodes(Nodes),
}

/// The index of the directory and the page map, a page at a time.
#[derive(Debug)]
struct Lists {
    next: Place,
    position: u64,
    is_index: bool,
}

#[derive(Debug, Default)]
struct DirectoryReader {
    left: usize,
}

/// The purpose of a read.
#[derive(Debug, Clone, Copy)]
enum ReadFor {
    Superblock {
        at: Location,
    },
    Log {
        pages: u64,
    },
    /// A granule of a record.
    Verify {
        record: usize,
        checksum: u32,
    },
    /// A copy of a page, with the caller's key.
    Page {
        place: Place,
        is_second: bool,
        key: u64,
    },
}

#[derive(Debug)]
pub struct Import {
    /// Bytes of each disk.
    disk_bytes: Vec<u64>,
    /// The caller's number of each disk of the pool.
    order: Vec<usize>,
    limits: Limits,
    holder: Holder,
    phase: Phase,
    next_io: IoId,
    reads: HashMap<IoId, ReadFor>,
    /// Reads to begin, by the pool's number of the disk.
    queue: VecDeque<(ReadFor, Location, usize)>,
    out: VecDeque<ImportIntent>,
    /// Superblocks that were found, with their places in the caller's order of disks.
    superblocks: Vec<(Location, Superblock)>,
    /// Sequence and features of the newest superblock of a newer version.
    newer: Option<(u64, String)>,
    /// The end of the disk before it grew was looked at.
    has_old_end: bool,
    /// Superblocks to try, the best first.
    candidates: VecDeque<Superblock>,
    superblock: Option<Superblock>,
    log: Option<log::ReadLog>,
    verified: Option<replay::Verified>,
    places: Vec<Place>,
    chains: Vec<PagePair>,
    zones: Option<Zones>,
    directory: BTreeMap<u64, (Vec<VersionEntry>, Arc<PagePair>)>,
    garbage: PageGarbage,
    repairs: Vec<(Location, Arc<Page>)>,
    report: ImportReport,
    outcome: Option<Result<Box<Pool>, ImportError>>,
}

impl Import {
    /// Begins an import. `disk_bytes`: the size of each device, in any order; devices that are no
    /// disk of the pool are ignored. `edge_bytes`:
    /// [`edge_bytes`](crate::geometry::Geometry::edge_bytes) of the pool.
    pub fn new(disk_bytes: &[u64], edge_bytes: u64, limits: Limits, holder: Holder) -> Self {
        let mut import = Self {
            disk_bytes: disk_bytes.to_vec(),
            order: (0..disk_bytes.len()).collect(),
            limits,
            holder,
            phase: Phase::Superblocks,
            next_io: 0,
            reads: HashMap::new(),
            queue: VecDeque::new(),
            out: VecDeque::new(),
            superblocks: Vec::new(),
            newer: None,
            has_old_end: false,
            candidates: VecDeque::new(),
            superblock: None,
            log: None,
            verified: None,
            places: Vec::new(),
            chains: Vec::new(),
            zones: None,
            directory: BTreeMap::new(),
            garbage: PageGarbage::default(),
            repairs: Vec::new(),
            report: ImportReport::default(),
            outcome: None,
        };
        for (disk, bytes) in disk_bytes.iter().enumerate() {
            let offsets = superblock_offsets(*bytes, edge_bytes);
            let places = offsets.map(|offset| Location { disk, offset });
            let reads = places.map(|at| (ReadFor::Superblock { at }, at, PAGE));
            import.queue.extend(reads);
        }
        import.pump();
        import
    }

    /// The next I/O. `None`: wait for events, or take the outcome.
    pub fn poll(&mut self) -> Option<ImportIntent> {
        self.out.pop_front()
    }

    /// The caller's number of each disk of the pool, in the pool's order.
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// The pool, or the error, once no I/O is left; `None` before.
    pub fn outcome(&mut self) -> Option<Result<(Pool, ImportReport), ImportError>> {
        let report = self.report.clone();
        let outcome = self.outcome.take()?;
        Some(outcome.map(|pool| (*pool, report)))
    }

    /// A read has ended: the bytes, or that they are unreadable.
    pub fn read(&mut self, io: IoId, result: Result<&[u8], IoFailed>) {
        let Some(read) = self.reads.remove(&io) else {
            return;
        };
        if self.outcome.is_some() {
            return;
        }
        match read {
            ReadFor::Superblock { at } => {
                let page = result.ok().and_then(|bytes| bytes.first_chunk());
                let found = page.and_then(|page| Superblock::decode(page).ok());
                self.superblocks.extend(found.map(|found| (at, found)));
                let newer = page.and_then(Superblock::unknown);
                self.newer = self.newer.take().max(newer);
            }
            ReadFor::Log { pages } => self.log_read(pages, result),
            ReadFor::Verify { record, checksum } => self.verified(record, checksum, result),
            ReadFor::Page {
                place,
                is_second,
                key,
            } => self.copy_read(place, is_second, key, result),
        }
        self.pump();
    }

    pub fn flushed(&mut self, _io: IoId, result: Result<(), IoFailed>) {
        match result {
            Err(IoFailed) => self.fail(ImportError::Flush),
            Ok(()) => {
                if let Phase::Flush { left } = &mut self.phase {
                    *left -= 1;
                    if *left == 0 {
                        self.begin_verification();
                    }
                }
            }
        }
        self.pump();
    }

    /// Issues reads, and goes on to the next phase when there are none left.
    fn pump(&mut self) {
        loop {
            if self.outcome.is_some() {
                self.queue.clear();
                return;
            }
            while self.reads.len() < WINDOW
                && let Some((read, at, len)) = self.queue.pop_front()
            {
                self.next_io += 1;
                let io = self.next_io;
                self.reads.insert(io, read);
                let at = Location {
                    disk: self.order[at.disk],
                    ..at
                };
                self.out.push_back(ImportIntent::Read { io, at, len });
            }
            if !self.reads.is_empty() || matches!(self.phase, Phase::Flush { .. }) {
                return;
            }
            self.next_phase();
            if matches!(self.phase, Phase::Flush { .. }) {
                return;
            }
        }
    }

    /// All reads of the phase have ended.
    fn next_phase(&mut self) {
        match &mut self.phase {
            Phase::Superblocks => self.choose_superblock(),
            Phase::Log(_) => self.next_log_read(),
            Phase::Flush { .. } => {}
            Phase::Verify(_) => self.begin_lists(),
            Phase::Lists(lists) if lists.next.is_none() => self.end_list(),
            Phase::Lists(lists) => {
                let place = lists.next;
                self.fetch(place, 0);
            }
            Phase::Directory(reader) if reader.left == 0 => self.begin_nodes(),
            Phase::Directory(_) => self.fail(ImportError::Directory),
            Phase::Nodes(_) => self.finish(),
        }
    }

    fn fail(&mut self, error: ImportError) {
        // The root before has its own index, directory and page map.
        let may_fall_back = matches!(error, ImportError::ListLost { .. } | ImportError::Format(_));
        let imports = self.superblock.as_ref().map(|block| block.imports);
        let next = self.candidates.pop_front();
        let next = next.filter(|next| may_fall_back && Some(next.imports) == imports);
        match next {
            Some(next) => {
                self.report = ImportReport {
                    fell_back: true,
                    ..ImportReport::default()
                };
                self.repairs.clear();
                self.queue.clear();
                self.begin(next);
            }
            None => self.outcome = Some(Err(error)),
        }
    }

    fn choose_superblock(&mut self) {
        let found = self.superblocks.iter();
        let mut found: Vec<(usize, Superblock)> = found
            .map(|(at, superblock)| (at.disk, superblock.clone()))
            .collect();
        found.sort_by_key(|(_, superblock)| std::cmp::Reverse(superblock.sequence));
        let newest = found.first().map(|(_, best)| best.sequence);
        if let Some((sequence, names)) = &self.newer
            && newest.is_none_or(|newest| newest < *sequence)
        {
            let names = names.clone();
            return self.fail(ImportError::Features { names });
        }
        let of_any = Mutation::RootOfAnyDisk.is_active();
        let mut roots = found
            .iter()
            .filter(|(_, of)| of.is_of_first_disk() || of_any);
        let Some((first, best)) = roots.next() else {
            let error = match found.first() {
                None => ImportError::NoSuperblock,
                Some((_, other)) => match self.copied_disk(other) {
                    Some(disk) => ImportError::DiskTwice { disk },
                    None => missing(other, 0),
                },
            };
            return self.fail(error);
        };
        let (first, best) = (*first, best.clone());
        if let Some(disk) = self.copied_disk(&best) {
            return self.fail(ImportError::DiskTwice { disk });
        }
        let (expected, present) = (best.geometry.disk_bytes, self.disk_bytes[first]);
        if expected > present {
            return self.fail(ImportError::DiskSize {
                disk: best.disk,
                expected,
                found: present,
            });
        }
        if expected < present && !self.has_old_end {
            self.has_old_end = true;
            let [.., third, fourth] = best.geometry.superblock_offsets();
            let ends = [third, fourth].map(|offset| Location {
                disk: first,
                offset,
            });
            let reads = ends.map(|at| (ReadFor::Superblock { at }, at, PAGE));
            self.queue.extend(reads);
            return;
        }
        let (holder, is_open) = (best.holder, best.state == PoolState::Open);
        if is_open && holder != self.holder.id && !self.holder.force {
            return self.fail(ImportError::Foreign { holder });
        }
        let mut roots: Vec<Superblock> = found
            .into_iter()
            .map(|(_, superblock)| superblock)
            .filter(|of| of.pool == best.pool && (of.is_of_first_disk() || of_any))
            .collect();
        roots.dedup_by_key(|superblock| superblock.sequence);
        self.candidates = roots.into();
        if let Some(best) = self.candidates.pop_front() {
            self.begin(best);
        }
    }

    /// A disk of a root that two devices are. Disks that have left do not matter.
    fn copied_disk(&self, root: &Superblock) -> Option<Uuid> {
        let is_in = |of: &Superblock| root.disks.position(of.disk).is_some();
        let ours = self.superblocks.iter();
        let ours = ours.filter(|(_, of)| of.pool == root.pool && is_in(of));
        let ours: Vec<(usize, Uuid)> = ours.map(|(at, of)| (at.disk, of.disk)).collect();
        let is_twice = |(at, id): &&(usize, Uuid)| ours.iter().any(|(b, of)| b != at && of == id);
        ours.iter().find(is_twice).map(|(_, id)| *id)
    }

    /// The caller's number of each disk of a root.
    fn order_of(&self, root: &Superblock) -> Result<Vec<usize>, ImportError> {
        // An older root may have a disk that the newest one leaves out.
        if let Some(disk) = self.copied_disk(root) {
            return Err(ImportError::DiskTwice { disk });
        }
        let disks = root.disks.disks().iter().enumerate();
        let order = disks.map(|(number, disk)| {
            let mut found = self.superblocks.iter();
            let found = found.find(|(_, of)| of.pool == root.pool && of.disk == disk.id);
            let at = found.map(|(at, _)| at.disk);
            let at = at.ok_or_else(|| missing(root, number))?;
            let (expected, found) = (disk.bytes, self.disk_bytes[at]);
            if expected > found {
                return Err(ImportError::DiskSize {
                    disk: disk.id,
                    expected,
                    found,
                });
            }
            Ok(at)
        });
        order.collect()
    }

    fn begin(&mut self, superblock: Superblock) {
        // Reads of another root's pages that still end are not of this one.
        self.reads.clear();
        self.places.clear();
        self.chains.clear();
        self.directory.clear();
        // Pages of a root that is given up are not this root's to free.
        if !Mutation::KeepGarbage.is_active() {
            self.garbage = PageGarbage::default();
        }
        match self.order_of(&superblock) {
            Ok(order) => self.order = order,
            Err(error) => return self.outcome = Some(Err(error)),
        }
        self.zones = Some(Zones::new(&superblock.geometry));
        self.heal_root(&superblock);
        let reader = LogReader::new(&superblock);
        self.superblock = Some(superblock);
        self.phase = Phase::Log(reader);
    }

    /// Both copies of the root are on every disk before a newer root overwrites others: a crash
    /// then may tear that one, and leave a copy that is found only by its size of the disk.
    fn heal_root(&mut self, root: &Superblock) {
        for (number, device) in self.order.iter().enumerate() {
            let root = root.on(number);
            let places = root.disks.superblocks(number, &root.geometry);
            for at in Superblock::places(root.sequence).map(|place| places[place]) {
                let found = Location {
                    disk: *device,
                    ..at
                };
                let mut copies = self.superblocks.iter();
                if copies.any(|(at, copy)| *at == found && *copy == root) {
                    continue;
                }
                self.repairs.push((at, superblock_page(&root)));
                self.report.healed += u64::from(number == 0);
            }
        }
    }

    fn begin_flush(&mut self) {
        let first_only = Mutation::ImportFlushesFirstDisk.is_active();
        let disks = if first_only { 1 } else { self.order.len() };
        self.phase = Phase::Flush { left: disks };
        if !self.limits.has_volatile_cache || Mutation::ImportWithoutFlush.is_active() {
            return self.begin_verification();
        }
        for disk in self.order[..disks].iter().copied() {
            self.next_io += 1;
            let io = self.next_io;
            self.out.push_back(ImportIntent::Flush { io, disk });
        }
    }

    fn root(&self) -> &Superblock {
        self.superblock.as_ref().expect("chosen in the first phase")
    }

    fn begin_lists(&mut self) {
        let phase = std::mem::replace(&mut self.phase, Phase::Superblocks);
        if let Phase::Verify(verification) = phase {
            self.verified = Some(verification.finish());
        }
        self.phase = Phase::Lists(Lists {
            next: self.root().directory,
            position: 0,
            is_index: true,
        });
    }

    fn end_list(&mut self) {
        let Phase::Lists(lists) = &mut self.phase else {
            return;
        };
        if lists.is_index {
            let next = self
                .superblock
                .as_ref()
                .map_or_else(Place::default, |root| root.page_map);
            *lists = Lists {
                next,
                position: 0,
                is_index: false,
            };
            return;
        }
        let places = std::mem::take(&mut self.places);
        self.phase = Phase::Directory(DirectoryReader { left: places.len() });
        for place in places {
            self.fetch(place, 0);
        }
    }

    /// Reads a page; its second copy, if the first is unreadable.
    fn fetch(&mut self, place: Place, key: u64) {
        let read = ReadFor::Page {
            place,
            is_second: false,
            key,
        };
        let at = self.root().disks.page(place.a);
        self.queue.push_back((read, at, PAGE));
    }

    fn copy_read(
        &mut self,
        place: Place,
        is_second: bool,
        key: u64,
        result: Result<&[u8], IoFailed>,
    ) {
        let page: Option<&Page> = result.ok().and_then(|bytes| bytes.first_chunk());
        let trust = Mutation::TrustPages.is_active();
        let page = page.filter(|page| checksum(&page[..]) == place.sum || trust);
        match page {
            None if is_second => self.page_lost(key),
            None => {
                let read = ReadFor::Page {
                    place,
                    is_second: true,
                    key,
                };
                let at = self.root().disks.page(place.b);
                self.queue.push_back((read, at, PAGE));
            }
            Some(page) => {
                if is_second {
                    self.report.healed += 1;
                    let disks = &self.root().disks;
                    let is_hole =
                        disks.is_hole(place.a / u64::from(self.root().geometry.granules_per_unit));
                    let at = disks.page(place.a);
                    if !is_hole {
                        self.repairs.push((at, Arc::new(*page)));
                    }
                }
                self.page_read(place, key, page);
            }
        }
    }

    fn page_lost(&mut self, key: u64) {
        match &mut self.phase {
            Phase::Nodes(nodes) => {
                self.report.lost += 1;
                nodes.lost(key);
            }
            Phase::Lists(lists) => {
                let list = if lists.is_index {
                    "directory's index"
                } else {
                    "page map"
                };
                self.fail(ImportError::ListLost { list });
            }
            _ => self.fail(ImportError::ListLost { list: "directory" }),
        }
    }

    fn page_read(&mut self, place: Place, key: u64, page: &Page) {
        let root = self.root();
        let (geometry, tag) = (root.geometry, root.tag());
        let outcome = match &mut self.phase {
            Phase::Lists(lists) => {
                let position = lists.position;
                lists.position += 1;
                self.chains.push(PagePair::new(place, &self.garbage));
                if lists.is_index {
                    chain::decode_index(page, &geometry, tag, position).map(|(places, next)| {
                        lists.next = next;
                        self.places.extend(places);
                    })
                } else {
                    let zones = self.zones.as_mut().expect("made with the root");
                    chain::decode_page_map(page, &geometry, tag, position).and_then(
                        |(found, next)| {
                            lists.next = next;
                            let is_new = found.into_iter().all(|zone| zones.restore(zone));
                            let error = FormatError {
                                structure: "page map",
                                field: "unit",
                            };
                            is_new.then_some(()).ok_or(error)
                        },
                    )
                }
            }
            Phase::Directory(reader) => {
                reader.left -= 1;
                let pair = Arc::new(PagePair::new(place, &self.garbage));
                directory::decode(page, &geometry, tag).map(|(number, versions)| {
                    self.directory.insert(number, (versions, pair));
                })
            }
            Phase::Nodes(nodes) => {
                if let Err(_unsound) = nodes.loaded(key, page) {
                    self.report.lost += 1;
                }
                for (place, key) in nodes.take_wanted() {
                    self.fetch(place, key);
                }
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            self.fail(error.into());
        }
    }
}

fn missing(root: &Superblock, number: usize) -> ImportError {
    let disks = root.disks.disks();
    ImportError::DiskMissing {
        disk: disks[number].id,
        number: number + 1,
        of: disks.len(),
    }
}

//! A pool on a simulated disk. The test chooses which I/O ends next.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use uuid::Uuid;

use super::content::{self, Value};
use super::disk::{Block, Crash, Disk, WriteId};
use super::external;
pub(crate) use super::importing::{import, import_by};
use crate::create::NewPool;
use crate::format::data_checksum;
use crate::format::record::Identity;
use crate::geometry::{Geometry, PAGE, granules_of};
use crate::ids::{IoId, Token, VersionId};
use crate::import::Holder;
use crate::interface::{Answer, Intent, IoFailed, Limits, Refusal, Request, Write};
use crate::mutation::Mutation;
use crate::pool::{Pool, is_move};
use crate::space::Allocation;

pub(crate) const HOLDER: Holder = Holder {
    id: Uuid::from_u128(79),
    force: false,
};
pub(crate) const EDGE: u64 = 16 * PAGE as u64;

/// A pool of few units: 4 granules per unit, 4 units per leaf, 16 units per volume.
pub(crate) fn geometry(units: u64) -> Geometry {
    let log_pages = 48;
    Geometry {
        disk_bytes: 2 * EDGE + (log_pages + 4 * units) * PAGE as u64,
        edge_bytes: EDGE,
        log_pages,
        granules_per_unit: 4,
        units_per_leaf: 4,
        fan_out: 2,
        levels: 2,
        added_units: 0,
    }
}

thread_local! {
    /// How the pools of a test take units.
    pub(crate) static ALLOCATION: Cell<Allocation> = const { Cell::new(Allocation::LastFreed) };
}

pub(crate) fn limits(is_volatile: bool) -> Limits {
    Limits {
        requests: 32,
        log_window: 4,
        page_window: 4,
        full_writes: 3,
        unsettled: 12,
        changed_nodes: 40,
        discard_units: 1,
        discard_most_units: 4,
        has_volatile_cache: is_volatile,
        allocation: ALLOCATION.get(),
    }
}

pub(crate) fn identity(number: u64) -> Identity {
    Identity {
        id: Uuid::from_u128(u128::from(number) + 1),
        name: format!("v{number}"),
    }
}

#[derive(Debug)]
pub(crate) struct Rig {
    pub pool: Pool,
    pub disk: Disk,
    pub pending: Vec<Pending>,
    pub answers: Vec<(Token, Result<Answer, Refusal>)>,
    /// Values of the writes in the pool, by granule of the unit.
    values: HashMap<Token, HashMap<u32, Value>>,
    /// The volumes of writes, and the disks that each volume's writes went to, a bit each.
    volumes: HashMap<Token, VersionId>,
    touched: HashMap<VersionId, u64>,
    /// The disks that the pool's own copies went to.
    filled: u64,
    /// Granules read for a switch.
    sources: HashMap<Token, HashMap<u32, Block>>,
    /// Granules written since their unit was allocated.
    written: HashSet<(u64, u32)>,
    next_token: Token,
    next_read: u64,
    /// Units that may leave a disk with each turn of [`Rig::pump`].
    pub moves: u64,
    /// Disks that have left, or that stay after all.
    pub left: Vec<(Uuid, Result<(), Refusal>)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pending {
    Write {
        io: IoId,
        write: WriteId,
    },
    Flush {
        io: IoId,
        complete: HashSet<WriteId>,
    },
    Data {
        token: Token,
        writes: Vec<WriteId>,
    },
    Source {
        token: Token,
        unit: u64,
        granules: u16,
    },
    /// A read of an external device. No grace period waits for it.
    External {
        token: Token,
        device: u64,
        place: u64,
        granules: u16,
    },
    Page {
        io: IoId,
        block: usize,
    },
    Discard {
        io: IoId,
        writes: Vec<WriteId>,
    },
    /// The caller's patience with a write that waits for space.
    Full {
        token: Token,
    },
    /// A grace period, and the I/O that it waits for.
    Grace {
        epoch: u64,
        tokens: Vec<Token>,
        reads: Vec<u64>,
    },
    /// A host's read of a granule, with the place that the map had when it began, or the value that
    /// it has without a place on the disk.
    Read {
        id: u64,
        block: Option<usize>,
        value: Value,
        tag: u64,
    },
}

impl Rig {
    pub(crate) fn create(units: u64, reserve: u64, is_volatile: bool) -> Self {
        Self::create_on(units, 0, reserve, is_volatile)
    }

    /// A pool on a disk that has room for more units.
    pub(crate) fn create_on(units: u64, more: u64, reserve: u64, is_volatile: bool) -> Self {
        Self::create_beside(units, more, reserve, is_volatile, &[])
    }

    /// A pool on a disk that has room for more units, beside empty disks.
    pub(crate) fn create_beside(
        units: u64,
        more: u64,
        reserve: u64,
        is_volatile: bool,
        further: &[u64],
    ) -> Self {
        let geometry = geometry(units);
        let new = NewPool {
            pool: Uuid::from_u128(77),
            disk: Uuid::from_u128(78),
            holder: HOLDER.id,
            name: "pool0".to_owned(),
            geometry,
            reserve_units: reserve,
        };
        let pool = new.create(limits(is_volatile)).unwrap();
        let mut bytes = vec![geometry.disk_bytes + more * geometry.unit_bytes()];
        let further = further.iter();
        bytes.extend(further.map(|units| 2 * EDGE + units * geometry.unit_bytes()));
        let mut rig = Self::on(pool, Disk::of_parts(&bytes, is_volatile));
        rig.finish();
        rig
    }

    /// The request that adds the next disk, if there is one.
    pub(crate) fn addition(&self) -> Option<Request> {
        let number = self.pool.superblock().disks.disks().len();
        let is_there = number < self.disk.parts.len();
        is_there.then(|| Request::AddDisk {
            id: Uuid::from_u128(1 << 100 | u128::from(self.disk.history)),
            disk_bytes: self.disk.bytes_of(number),
        })
    }

    fn block_at(&self, unit: u64, granule: u32) -> usize {
        self.disk
            .block(self.pool.superblock().disks.granule(unit, granule))
    }

    pub(crate) fn on(pool: Pool, disk: Disk) -> Self {
        let mut written = HashSet::new();
        for (id, version) in &pool.state().versions {
            let entries =
                (0..version.units).filter_map(|place| pool.state().entry(*id, place).ok());
            for part in entries.flat_map(|entry| entry.units().collect::<Vec<_>>()) {
                written.extend(granules_of(part.granules).map(|granule| (part.unit, granule)));
            }
        }
        Self {
            pool,
            disk,
            pending: Vec::new(),
            answers: Vec::new(),
            values: HashMap::new(),
            volumes: HashMap::new(),
            touched: HashMap::new(),
            filled: 0,
            sources: HashMap::new(),
            written,
            next_token: 0,
            next_read: 0,
            moves: 4,
            left: Vec::new(),
        }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.pool.superblock().geometry
    }

    /// The request that takes the rest of the disk.
    pub(crate) fn growth(&self) -> Request {
        Request::Grow {
            disk: 0,
            disk_bytes: self.disk.bytes_of(0),
        }
    }

    pub(crate) fn submit(&mut self, request: Request) -> Token {
        self.next_token += 1;
        self.pool.submit(self.next_token, request).unwrap();
        self.next_token
    }

    pub(crate) fn write(
        &mut self,
        version: VersionId,
        place: u64,
        values: &[(u32, Value)],
        fua: bool,
    ) -> Token {
        let granules = values
            .iter()
            .fold(0, |set, (granule, _)| set | 1 << granule);
        let write = Write {
            version,
            place,
            granules,
            checksums: values.iter().map(|(_, v)| content::checksum(*v)).collect(),
            fua,
        };
        let token = self.submit(Request::Write(write));
        self.values.insert(token, values.iter().copied().collect());
        self.volumes.insert(token, version);
        token
    }

    /// Turns the pool's intents into I/O in flight.
    pub(crate) fn pump(&mut self) {
        self.pool.allow_moves(self.moves, false);
        loop {
            let intent = match self.pool.poll() {
                Some(intent) => intent,
                None if self.pool.is_searching() => continue,
                None => break,
            };
            let pending = match intent {
                Intent::Write { io, at, bytes } => {
                    let block = self.disk.block(at);
                    let write = self.disk.begin_write(block, bytes, true);
                    Pending::Write { io, write }
                }
                Intent::Flush { io, disk } => Pending::Flush {
                    io,
                    complete: self.disk.completed_on(disk),
                },
                Intent::ReadPage { io, at } => Pending::Page {
                    io,
                    block: self.disk.block(at),
                },
                Intent::Discard { io, at, len } => {
                    let first = self.disk.block(at);
                    let blocks = first..first + len as usize / PAGE;
                    let writes = self.disk.begin_discard(blocks);
                    Pending::Discard { io, writes }
                }
                Intent::Data {
                    token,
                    unit,
                    granules,
                    copy,
                } => self.begin_data(token, unit, granules, copy),
                Intent::ReadSource {
                    token,
                    unit,
                    granules,
                } => Pending::Source {
                    token,
                    unit,
                    granules,
                },
                Intent::ReadExternal {
                    token,
                    version,
                    place,
                    granules,
                } => Pending::External {
                    token,
                    device: external::device_of(&self.pool, version),
                    place,
                    granules,
                },
                Intent::Left { disk, result } => {
                    self.disk_left(disk, result);
                    continue;
                }
                Intent::Full { token } => Pending::Full { token },
                Intent::AwaitGrace { epoch } => self.begin_grace(epoch),
                Intent::Answer { token, result } => {
                    self.values.remove(&token);
                    self.volumes.remove(&token);
                    self.sources.remove(&token);
                    self.answers.push((token, result));
                    continue;
                }
            };
            self.pending.push(pending);
        }
    }

    fn begin_data(&mut self, token: Token, unit: u64, granules: u16, copy: u16) -> Pending {
        let disks = self.pool.superblock().disks.clone();
        let mut writes = Vec::new();
        let disk = 1 << disks.disk_of(unit);
        match self.volumes.get(&token) {
            Some(version) => *self.touched.entry(*version).or_default() |= disk,
            None if is_move(token) => {}
            None => self.filled |= disk,
        }
        if !(0..4).any(|granule| self.is_mapped(unit, granule)) {
            self.written.retain(|(written, _)| *written != unit);
        }
        for granule in granules_of(granules) {
            let block = self.disk.block(disks.granule(unit, granule));
            let data = content::block(self.values[&token][&granule]);
            // A write in place may tear a granule on any disk; the checker expects none. That
            // includes a write after an unmap that a crash undoes.
            let can_tear = !self.is_mapped(unit, granule) && self.written.insert((unit, granule));
            writes.push(self.disk.begin_write(block, data, can_tear));
        }
        for granule in granules_of(copy) {
            let data = Arc::clone(&self.sources[&token][&granule]);
            let block = self.disk.block(disks.granule(unit, granule));
            writes.push(self.disk.begin_write(block, data, true));
        }
        Pending::Data { token, writes }
    }

    /// A disk that has left becomes one of another pool.
    fn disk_left(&mut self, disk: usize, result: Result<(), Refusal>) {
        self.left
            .push((self.pool.superblock().disks.disks()[disk].id, result));
        if result.is_ok() {
            let part = self.disk.parts[disk].clone();
            let is_there = |pending: &Pending| match pending {
                Pending::Read { block, .. } => block.is_some_and(|block| part.contains(&block)),
                Pending::Source { unit, .. } => part.contains(&self.block_at(*unit, 0)),
                _ => false,
            };
            assert!(
                !self.pending.iter().any(is_there),
                "I/O on a disk that left"
            );
            self.disk.give_away(disk);
        }
    }

    fn is_mapped(&self, unit: u64, granule: u32) -> bool {
        let state = self.pool.state();
        state.versions.iter().any(|(id, version)| {
            (0..version.units).any(|place| {
                state.entry(*id, place).is_ok_and(|entry| {
                    let mut parts = entry.parts();
                    parts.any(|part| part.unit == unit && part.granules >> granule & 1 == 1)
                })
            })
        })
    }

    fn begin_grace(&self, epoch: u64) -> Pending {
        let tokens = self.pending.iter().filter_map(|pending| match pending {
            Pending::Data { token, .. } | Pending::Source { token, .. } => Some(*token),
            _ => None,
        });
        let reads = self.pending.iter().filter_map(|pending| match pending {
            Pending::Read { id, .. } => Some(*id),
            _ => None,
        });
        Pending::Grace {
            epoch,
            tokens: tokens.collect(),
            reads: reads.collect(),
        }
    }

    /// Indices of the I/O that can end now.
    pub(crate) fn ready(&self) -> Vec<usize> {
        let is_ready = |pending: &Pending| match pending {
            Pending::Grace { tokens, reads, .. } => !self.pending.iter().any(|other| match other {
                Pending::Data { token, .. } | Pending::Source { token, .. } => {
                    tokens.contains(token)
                }
                Pending::Read { id, .. } => reads.contains(id),
                _ => false,
            }),
            _ => true,
        };
        let pending = self.pending.iter().enumerate();
        let ready = pending.filter(|(_, pending)| is_ready(pending));
        ready.map(|(at, _)| at).collect()
    }

    /// Ends an I/O. Returns the tag and contents of a read.
    pub(crate) fn end(&mut self, at: usize) -> Option<(u64, Option<Value>)> {
        self.end_with(at, false)
    }

    pub(crate) fn end_with(&mut self, at: usize, fails: bool) -> Option<(u64, Option<Value>)> {
        let outcome = if fails { Err(IoFailed) } else { Ok(()) };
        match self.pending.remove(at) {
            Pending::Write { io, write } => {
                self.end_write(write, fails);
                self.pool.written(io, outcome);
            }
            Pending::Flush { io, complete } => {
                if !fails {
                    self.disk.flush(&complete);
                }
                self.pool.flushed(io, outcome);
            }
            Pending::Page { io, block } => {
                let page = self.disk.read(block);
                let page = page.map(|page| &page[..]);
                self.pool.page_read(io, page.ok_or(IoFailed));
            }
            Pending::Discard { io, writes } => {
                writes
                    .into_iter()
                    .for_each(|write| self.end_write(write, fails));
                self.pool.discarded(io, outcome);
            }
            Pending::Data { token, writes } => {
                writes
                    .into_iter()
                    .for_each(|write| self.end_write(write, fails));
                self.pool.data_written(token, outcome);
            }
            Pending::Source {
                token,
                unit,
                granules,
            } => {
                let read = granules_of(granules).map(|granule| {
                    let block = self.block_at(unit, granule);
                    let data = self.disk.read(block).unwrap();
                    (granule, Arc::new(*data))
                });
                let read: HashMap<u32, Block> = read.collect();
                self.end_source(token, granules, read, outcome);
            }
            Pending::External {
                token,
                device,
                place,
                granules,
            } => {
                let value = |granule: u32| external::value(device, place * 4 + u64::from(granule));
                let read = granules_of(granules).map(|at| (at, content::block(value(at))));
                let read: HashMap<u32, Block> = read.collect();
                self.end_source(token, granules, read, outcome);
            }
            Pending::Full { token } => self.pool.give_up(token),
            Pending::Grace { epoch, .. } => self.pool.grace_ended(epoch),
            Pending::Read {
                block, tag, value, ..
            } => {
                let value = match block {
                    None => Some(value),
                    Some(block) => content::read(self.disk.read(block).unwrap()),
                };
                return Some((tag, value));
            }
        }
        self.pump();
        None
    }

    fn end_source(
        &mut self,
        token: Token,
        granules: u16,
        read: HashMap<u32, Block>,
        outcome: Result<(), IoFailed>,
    ) {
        let sums = granules_of(granules).map(|granule| data_checksum(&read[&granule][..]));
        let sums = sums.collect();
        self.sources.entry(token).or_default().extend(read);
        self.pool.source_read(token, outcome.map(|()| sums));
    }

    fn end_write(&mut self, write: WriteId, fails: bool) {
        if fails {
            self.disk.fail(write)
        } else {
            self.disk.complete(write)
        }
    }

    /// A host's flush of a volume, as lanes do it: of the first disk, and of those with its writes
    /// and the pool's copies since the import.
    pub(crate) fn flush_of_host(&mut self, version: VersionId) {
        let of_volume = self.touched.get(&version).copied().unwrap_or(0);
        let filled = if Mutation::FlushWithoutCopies.is_active() {
            0
        } else {
            self.filled
        };
        let disks = 1 | of_volume | filled;
        let flushed = (0..self.disk.parts.len()).filter(|disk| disks >> disk & 1 == 1);
        let complete: HashSet<WriteId> = flushed
            .flat_map(|disk| self.disk.completed_on(disk))
            .collect();
        self.disk.flush(&complete);
    }

    /// Ends all I/O, in order, until the pool has no work.
    pub(crate) fn finish(&mut self) {
        self.pump();
        let mut idle = 0;
        for _ in 0..100_000 {
            let Some(at) = self.ready().into_iter().next() else {
                assert!(self.pending.is_empty(), "stuck: {:?}", self.pending);
                // A search for units may have to begin again.
                idle += 1;
                if idle > 4 || self.pool.leaving().is_none() {
                    return;
                }
                self.pump();
                continue;
            };
            idle = 0;
            self.end(at);
        }
        panic!("the pool does not come to rest");
    }

    /// Ends all I/O that can end, except what `stays`.
    pub(crate) fn finish_but(&mut self, stays: impl Fn(&Pending) -> bool) {
        self.pump();
        let next = |rig: &Self| rig.ready().into_iter().find(|at| !stays(&rig.pending[*at]));
        while let Some(at) = next(self) {
            self.end(at);
        }
    }

    /// Submits a request, and finishes it.
    pub(crate) fn run(&mut self, request: Request) -> Result<Answer, Refusal> {
        let token = self.submit(request);
        self.finish();
        self.take_answer(token)
    }

    #[track_caller]
    pub(crate) fn take_answer(&mut self, token: Token) -> Result<Answer, Refusal> {
        let at = self.answers.iter().position(|(of, _)| *of == token);
        self.answers.remove(at.expect("an answer")).1
    }

    pub(crate) fn created(&mut self, number: u64, units: u64, thick: bool) -> VersionId {
        let request = Request::Create {
            identity: identity(number),
            units,
            thick,
        };
        match self.run(request) {
            Ok(Answer::Created(version)) => version,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn snapshot(&mut self, of: VersionId, number: u64) -> VersionId {
        match self.run(Request::Snapshot(vec![(of, identity(number))])) {
            Ok(Answer::Snapshots(snapshots)) => snapshots[0],
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn wrote(&mut self, version: VersionId, place: u64, values: &[(u32, Value)]) {
        let token = self.write(version, place, values, false);
        self.finish();
        assert_eq!(self.take_answer(token), Ok(Answer::Done));
    }

    /// The block of a granule of a volume, or its value without one: zeroes, or that of an external
    /// device.
    pub(crate) fn block_of(
        &self,
        version: VersionId,
        granule: u64,
    ) -> Result<(Option<usize>, Value), Refusal> {
        let entry = self.pool.lookup(version, granule / 4)?;
        let bit = (granule % 4) as u32;
        let mut parts = entry.parts();
        Ok(match parts.find(|part| part.granules >> bit & 1 == 1) {
            None => (None, 0),
            Some(part) if part.is_external() => {
                let device = external::device_of(&self.pool, version);
                (None, external::value(device, granule))
            }
            Some(part) => (Some(self.block_at(part.unit, bit)), 0),
        })
    }

    /// Reads a granule at once.
    pub(crate) fn read(&self, version: VersionId, granule: u64) -> Result<Option<Value>, Refusal> {
        Ok(match self.block_of(version, granule)? {
            (None, value) => Some(value),
            (Some(block), _) => content::read(self.disk.read(block).unwrap()),
        })
    }

    pub(crate) fn begin_read(&mut self, version: VersionId, granule: u64, tag: u64) {
        let (block, value) = self.block_of(version, granule).unwrap();
        self.next_read += 1;
        let id = self.next_read;
        self.pending.push(Pending::Read {
            id,
            block,
            value,
            tag,
        });
    }

    /// The version with the id of a number.
    pub(crate) fn find(&self, number: u64) -> Option<VersionId> {
        let id = identity(number).id;
        let versions = self.pool.state().versions.iter();
        let mut found = versions.filter(|(_, v)| v.identity.id == id && v.is_visible());
        found.next().map(|(id, _)| *id)
    }

    /// The disk after a crash that keeps these sectors.
    pub(crate) fn crashed(&self, crash: Crash, keep: impl Fn(usize) -> u8) -> Disk {
        self.disk.after(crash, keep)
    }
}

//! A disk with a volatile cache, whose power can fail between any two writes.
//!
//! Blocks have 4 KiB. A write is in flight, then in the cache, and durable after a flush. At a
//! crash any part of the cache may be lost, also single sectors of a block.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;

use nacre_random::mix;

use crate::disks::Location;
use crate::format::data_checksum;
use crate::geometry::PAGE;

pub(super) const SECTOR: usize = 512;
/// A bit per sector of a block.
pub(super) const ALL_SECTORS: u8 = 0xff;

pub(super) type Block = Arc<[u8; PAGE]>;
pub(super) type WriteId = u64;

/// A block, and its checksum: so that comparing disks is cheap.
#[derive(Debug, Clone)]
struct Stored {
    data: Block,
    sum: u32,
}

impl Stored {
    fn new(data: Block) -> Self {
        let sum = data_checksum(&data[..]);
        Self { data, sum }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Disk {
    durable: Vec<Option<Stored>>,
    /// In the order of submission.
    cache: Vec<Cached>,
    next_write: WriteId,
    pub is_volatile: bool,
    /// A checksum of all writes so far, in their order.
    pub history: u64,
    /// Unreadable until they are written.
    pub bad: BTreeSet<usize>,
    /// The blocks of each disk of the pool: a flush concerns one of them.
    pub parts: Vec<Range<usize>>,
}

#[derive(Debug, Clone)]
struct Cached {
    id: WriteId,
    block: usize,
    stored: Stored,
    is_complete: bool,
    /// A crash may leave some of its sectors.
    can_tear: bool,
}

/// The writes that a crash may lose, each with whether it may be torn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Crash {
    /// The daemon dies: writes in flight may be lost.
    Daemon,
    /// The power fails: the cache may be lost too.
    Power,
}

impl Disk {
    /// Several disks, each with a cache of its own.
    pub(crate) fn of_parts(bytes: &[u64], is_volatile: bool) -> Self {
        let mut blocks = 0;
        let parts = bytes.iter().map(|bytes| {
            let start = blocks;
            blocks += *bytes as usize / PAGE;
            start..blocks
        });
        Self {
            parts: parts.collect(),
            durable: vec![None; blocks],
            cache: Vec::new(),
            next_write: 0,
            is_volatile,
            history: 0,
            bad: BTreeSet::new(),
        }
    }

    /// Blocks of the first disk.
    pub(crate) fn blocks(&self) -> usize {
        self.parts[0].len()
    }

    pub(crate) fn bytes_of(&self, part: usize) -> u64 {
        (self.parts[part].len() * PAGE) as u64
    }

    /// The block of a place.
    pub(crate) fn block(&self, at: Location) -> usize {
        let block = self.parts[at.disk].start + at.offset as usize / PAGE;
        assert!(self.parts[at.disk].contains(&block), "{at:?} is outside");
        block
    }

    /// The contents of a block. `None`: it is unreadable.
    pub(crate) fn read(&self, block: usize) -> Option<&[u8; PAGE]> {
        if self.bad.contains(&block) {
            return None;
        }
        let cached = self.cache.iter().rev();
        let mut cached = cached.filter(|write| write.block == block && write.is_complete);
        let stored = cached.next().map(|write| &write.stored);
        let stored = stored.or(self.durable[block].as_ref());
        Some(stored.map_or(&[0; PAGE], |stored| &*stored.data))
    }

    /// A checksum of all contents, and of the writes that a crash may lose.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut sum = 0;
        let mut add = |of: u64| sum = mix(sum ^ of);
        for (block, stored) in self.durable.iter().enumerate() {
            if let Some(stored) = stored {
                add(u64::from(stored.sum) << 32 | block as u64);
            }
        }
        for write in &self.cache {
            add(u64::MAX << 1 | u64::from(write.is_complete));
            add(u64::from(write.stored.sum) << 32 | write.block as u64);
        }
        sum
    }

    pub(crate) fn begin_write(&mut self, block: usize, data: Block, can_tear: bool) -> WriteId {
        self.next_write += 1;
        let stored = Stored::new(data);
        let write = u64::from(stored.sum) << 32 | block as u64;
        self.history = (self.history.rotate_left(7) ^ write).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.cache.push(Cached {
            id: self.next_write,
            block,
            stored,
            is_complete: false,
            can_tear,
        });
        self.next_write
    }

    /// Begins to discard blocks: until they are written, they have any contents.
    pub(crate) fn begin_discard(&mut self, blocks: Range<usize>) -> Vec<WriteId> {
        let garbage: Block = Arc::new([0xdc; PAGE]);
        blocks
            .map(|block| self.begin_write(block, Arc::clone(&garbage), false))
            .collect()
    }

    pub(crate) fn complete(&mut self, id: WriteId) {
        let at = self.cache.iter().position(|write| write.id == id);
        let at = at.expect("a write in flight");
        self.bad.remove(&self.cache[at].block);
        if self.is_volatile {
            // The last to complete is what reads return.
            let mut write = self.cache.remove(at);
            write.is_complete = true;
            self.cache.push(write);
        } else {
            let write = self.cache.remove(at);
            self.durable[write.block] = Some(write.stored);
        }
    }

    /// The write is not done, and never will be.
    pub(crate) fn fail(&mut self, id: WriteId) {
        self.cache.retain(|write| write.id != id);
    }

    /// Makes writes durable that were complete when the flush began.
    pub(crate) fn flush(&mut self, complete: &HashSet<WriteId>) {
        for write in std::mem::take(&mut self.cache) {
            if complete.contains(&write.id) {
                self.durable[write.block] = Some(write.stored)
            } else {
                self.cache.push(write)
            }
        }
    }

    /// Complete writes to one of the disks.
    pub(crate) fn completed_on(&self, part: usize) -> HashSet<WriteId> {
        let part = &self.parts[part];
        let complete = self.cache.iter().filter(|write| write.is_complete);
        let complete = complete.filter(|write| part.contains(&write.block));
        complete.map(|write| write.id).collect()
    }

    /// How many writes a crash can lose.
    pub(crate) fn losable(&self, crash: Crash) -> usize {
        let writes = self.cache.iter();
        writes.filter(|write| write.can_be_lost(crash)).count()
    }

    /// The disk after a crash. `keep`: the sectors that survive of the n-th write that can be lost.
    pub(crate) fn after(&self, crash: Crash, keep: impl Fn(usize) -> u8) -> Self {
        let mut disk = self.clone();
        let mut number = 0;
        let mut cache = Vec::new();
        for mut write in std::mem::take(&mut disk.cache) {
            let sectors = if !write.can_be_lost(crash) {
                ALL_SECTORS
            } else {
                number += 1;
                keep(number - 1)
            };
            let sectors = if write.can_tear || sectors == 0 {
                sectors
            } else {
                ALL_SECTORS
            };
            if sectors == 0 {
                continue;
            }
            let block = write.block;
            let old = cache
                .iter()
                .rev()
                .find(|other: &&Cached| other.block == block);
            let old = old.map(|other| &other.stored);
            let old = old.or(disk.durable[block].as_ref());
            write.stored = mixed(old, &write.stored, sectors);
            write.is_complete = true;
            cache.push(write);
        }
        match crash {
            Crash::Power => cache
                .into_iter()
                .for_each(|write| disk.durable[write.block] = Some(write.stored)),
            Crash::Daemon if !disk.is_volatile => cache
                .into_iter()
                .for_each(|write| disk.durable[write.block] = Some(write.stored)),
            Crash::Daemon => disk.cache = cache,
        }
        disk
    }

    /// Puts bytes on the medium.
    pub(crate) fn corrupt(&mut self, block: usize, change: impl FnOnce(&mut [u8; PAGE])) {
        assert!(self.cache.is_empty(), "the cache would hide it");
        let old = self.durable[block].as_ref();
        let mut data = old.map_or([0; PAGE], |old| *old.data);
        change(&mut data);
        self.durable[block] = Some(Stored::new(Arc::new(data)));
    }

    /// One of the disks has data of another pool everywhere.
    pub(crate) fn give_away(&mut self, part: usize) {
        let part = self.parts[part].clone();
        self.cache.retain(|write| !part.contains(&write.block));
        let foreign = Stored::new(Arc::new([0xee; PAGE]));
        self.durable[part].fill(Some(foreign));
    }

    /// The disk is replaced by a smaller one.
    pub(crate) fn truncate(&mut self, blocks: usize) {
        self.durable.truncate(blocks);
        self.parts = std::iter::once(0..blocks).collect();
    }

    pub(crate) fn is_written(&self, block: usize) -> bool {
        self.durable[block].is_some()
    }
}

impl Cached {
    fn can_be_lost(&self, crash: Crash) -> bool {
        crash == Crash::Power || !self.is_complete
    }
}

fn mixed(old: Option<&Stored>, new: &Stored, sectors: u8) -> Stored {
    if sectors == ALL_SECTORS {
        return new.clone();
    }
    let mut data = old.map_or([0; PAGE], |old| *old.data);
    for sector in (0..PAGE / SECTOR).filter(|sector| sectors >> sector & 1 == 1) {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        data[range.clone()].copy_from_slice(&new.data[range]);
    }
    Stored::new(Arc::new(data))
}

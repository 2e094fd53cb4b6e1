//! Copies of data that the pool makes itself. An inflation reads shared granules and writes them to
//! a unit of the volume. The removal of a disk moves its units to other disks.

use std::collections::HashMap;
use std::sync::Arc;

use nacre_bdev::Status;
use nacre_bdev_pool_core::format::{Page, data_checksum};
use nacre_bdev_pool_core::geometry::{PAGE, granules_of};
use nacre_bdev_pool_core::ids::Token;
use nacre_bdev_pool_core::interface::IoFailed;
use nacre_bdev_pool_core::pool::is_move;

use super::disk::Tag;
use super::lanes::Grace;
use super::{FILL, Keeper, Stage};

#[derive(Default)]
pub(super) struct Fills {
    fills: HashMap<Token, Fill>,
    /// The fill and the granule of an I/O.
    ios: HashMap<Tag, (Token, u32)>,
    next: Tag,
}

#[derive(Default)]
struct Fill {
    pages: HashMap<u32, Arc<Page>>,
    /// Granules of the present read, in order.
    reading: Vec<u32>,
    left: usize,
    failed: bool,
    /// `None`: a read of an external device, which no grace period waits for.
    epoch: Option<u64>,
}

impl Fills {
    fn tag(&mut self, token: Token, granule: u32) -> Tag {
        self.next += 1;
        let tag = FILL | self.next;
        self.ios.insert(tag, (token, granule));
        tag
    }

    /// Returns the I/Os of a read.
    pub(super) fn begin_read(
        &mut self,
        token: Token,
        granules: u16,
        epoch: Option<u64>,
    ) -> Vec<(Tag, u32)> {
        let fill = self.fills.entry(token).or_default();
        fill.reading = granules_of(granules).collect();
        (fill.left, fill.failed, fill.epoch) = (fill.reading.len(), false, epoch);
        let ios = granules_of(granules).map(|granule| (self.tag(token, granule), granule));
        ios.collect()
    }

    /// An I/O of a read has ended. Returns the checksums with the last one.
    fn read_ended(
        &mut self,
        grace: &mut Grace,
        tag: Tag,
        result: Result<Vec<u8>, Status>,
    ) -> Option<(Token, Result<Vec<u32>, IoFailed>)> {
        let (token, granule) = self.ios.remove(&tag)?;
        let fill = self.fills.get_mut(&token)?;
        let page = result.ok().and_then(|bytes| bytes.try_into().ok());
        match page {
            Some(page) => drop(fill.pages.insert(granule, Arc::new(page))),
            None => fill.failed = true,
        }
        fill.left -= 1;
        if fill.left > 0 {
            return None;
        }
        fill.epoch.into_iter().for_each(|epoch| grace.end(epoch));
        if fill.failed {
            self.fills.remove(&token);
            return Some((token, Err(IoFailed)));
        }
        let sums = fill.reading.iter().filter_map(|granule| {
            let page = fill.pages.get(granule)?;
            Some(data_checksum(&page[..]))
        });
        Some((token, Ok(sums.collect())))
    }

    /// Returns the I/Os of a write, with their pages.
    fn begin_write(
        &mut self,
        token: Token,
        granules: u16,
        epoch: u64,
    ) -> Vec<(Tag, u32, Arc<Page>)> {
        let fill = self.fills.entry(token).or_default();
        let count = granules.count_ones() as usize;
        (fill.left, fill.failed, fill.epoch) = (count, false, Some(epoch));
        let pages = granules_of(granules).map(|granule| (granule, fill.pages.get(&granule)));
        let pages: Vec<_> = pages
            .map(|(granule, page)| (granule, page.cloned()))
            .collect();
        let ios = pages.into_iter().filter_map(|(granule, page)| {
            debug_assert!(page.is_some(), "granules are read before they are written");
            Some((self.tag(token, granule), granule, page?))
        });
        ios.collect()
    }

    /// An I/O of a write has ended. Returns the outcome with the last one.
    fn written(
        &mut self,
        grace: &mut Grace,
        tag: Tag,
        status: Status,
    ) -> Option<(Token, Result<(), IoFailed>)> {
        let (token, _) = self.ios.remove(&tag)?;
        let fill = self.fills.get_mut(&token)?;
        fill.failed |= !status.is_ok();
        fill.left -= 1;
        if fill.left > 0 {
            return None;
        }
        fill.epoch.into_iter().for_each(|epoch| grace.end(epoch));
        let outcome = if fill.failed { Err(IoFailed) } else { Ok(()) };
        self.fills.remove(&token);
        Some((token, outcome))
    }
}

impl Keeper {
    pub(super) fn read_fill(&mut self, token: Token, unit: u64, granules: u16, epoch: u64) {
        let Stage::Open(pool) = &self.stage else {
            return;
        };
        let table = &pool.superblock().disks;
        for (tag, granule) in self.fills.begin_read(token, granules, Some(epoch)) {
            self.disks.read(tag, table.granule(unit, granule), PAGE);
        }
    }

    pub(super) fn fill_read(&mut self, tag: Tag, result: Result<Vec<u8>, Status>) {
        let ended = self.fills.read_ended(&mut self.grace, tag, result);
        if let (Some((token, outcome)), Stage::Open(pool)) = (ended, &mut self.stage) {
            pool.source_read(token, outcome);
        }
    }

    pub(super) fn write_fill(&mut self, token: Token, unit: u64, granules: u16, epoch: u64) {
        let Stage::Open(pool) = &self.stage else {
            return;
        };
        let table = &pool.superblock().disks;
        for (tag, granule, page) in self.fills.begin_write(token, granules, epoch) {
            let at = table.granule(unit, granule);
            if !is_move(token) {
                self.shared.note_fill(at.disk);
            }
            self.disks.write(tag, at, page);
        }
    }

    pub(super) fn fill_written(&mut self, tag: Tag, status: Status) {
        let ended = self.fills.written(&mut self.grace, tag, status);
        if let (Some((token, outcome)), Stage::Open(pool)) = (ended, &mut self.stage) {
            pool.data_written(token, outcome);
        }
    }
}

//! Copies of the pool itself: an inflation reads shared granules and writes them to a unit of the
//! volume.

use std::collections::HashMap;
use std::sync::Arc;

use nacre_bdev::Status;
use nacre_bdev_pool_core::format::{Page, data_checksum};
use nacre_bdev_pool_core::geometry::{PAGE, granules_of};
use nacre_bdev_pool_core::ids::Token;
use nacre_bdev_pool_core::interface::IoFailed;
use nacre_bdev_pool_core::pool::is_move;

use super::disk::Tag;
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
    epoch: u64,
}

impl Fills {
    fn tag(&mut self, token: Token, granule: u32) -> Tag {
        self.next += 1;
        let tag = FILL | self.next;
        self.ios.insert(tag, (token, granule));
        tag
    }
}

impl Keeper {
    pub(super) fn read_fill(&mut self, token: Token, unit: u64, granules: u16, epoch: u64) {
        let Stage::Open(pool) = &self.stage else {
            return;
        };
        let table = pool.superblock().disks.clone();
        let fill = self.fills.fills.entry(token).or_default();
        fill.reading = granules_of(granules).collect();
        (fill.left, fill.failed, fill.epoch) = (fill.reading.len(), false, epoch);
        for granule in granules_of(granules) {
            let tag = self.fills.tag(token, granule);
            self.disks.read(tag, table.granule(unit, granule), PAGE);
        }
    }

    pub(super) fn fill_read(&mut self, tag: Tag, result: Result<Vec<u8>, Status>) {
        let Some((token, granule)) = self.fills.ios.remove(&tag) else {
            return;
        };
        let Some(fill) = self.fills.fills.get_mut(&token) else {
            return;
        };
        let page = result.ok().and_then(|bytes| bytes.try_into().ok());
        match page {
            Some(page) => drop(fill.pages.insert(granule, Arc::new(page))),
            None => fill.failed = true,
        }
        fill.left -= 1;
        if fill.left > 0 {
            return;
        }
        let sums = fill.reading.iter().filter_map(|granule| {
            let page = fill.pages.get(granule)?;
            Some(data_checksum(&page[..]))
        });
        let outcome = if fill.failed {
            Err(IoFailed)
        } else {
            Ok(sums.collect())
        };
        self.grace.ordered[(fill.epoch % 3) as usize] -= 1;
        if fill.failed {
            self.fills.fills.remove(&token);
        }
        if let Stage::Open(pool) = &mut self.stage {
            pool.source_read(token, outcome);
        }
    }

    pub(super) fn write_fill(&mut self, token: Token, unit: u64, granules: u16, epoch: u64) {
        let Stage::Open(pool) = &self.stage else {
            return;
        };
        let table = pool.superblock().disks.clone();
        let fill = self.fills.fills.entry(token).or_default();
        (fill.left, fill.failed, fill.epoch) = (granules.count_ones() as usize, false, epoch);
        for granule in granules_of(granules) {
            let fill = self.fills.fills.get(&token);
            let page = fill.and_then(|fill| fill.pages.get(&granule)).cloned();
            let Some(page) = page else {
                debug_assert!(false, "granules are read before they are written");
                continue;
            };
            let tag = self.fills.tag(token, granule);
            let at = table.granule(unit, granule);
            if !is_move(token) {
                self.shared.note_fill(at.disk);
            }
            self.disks.write(tag, at, page);
        }
    }

    pub(super) fn fill_written(&mut self, tag: Tag, status: Status) {
        let Some((token, _)) = self.fills.ios.remove(&tag) else {
            return;
        };
        let Some(fill) = self.fills.fills.get_mut(&token) else {
            return;
        };
        fill.failed |= !status.is_ok();
        fill.left -= 1;
        if fill.left > 0 {
            return;
        }
        let outcome = if fill.failed { Err(IoFailed) } else { Ok(()) };
        self.grace.ordered[(fill.epoch % 3) as usize] -= 1;
        self.fills.fills.remove(&token);
        if let Stage::Open(pool) = &mut self.stage {
            pool.data_written(token, outcome);
        }
    }
}

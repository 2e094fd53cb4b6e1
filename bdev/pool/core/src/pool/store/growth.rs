//! Adds space to a pool: a further disk (`Request::AddDisk`), or the rest of a disk that became
//! larger (`Request::Grow`).
//!
//! ```text
//!   AddDisk ──▶ superblocks on the new disk ──▶ flush ─┐
//!   Grow ──────────────────────────────────────────────┴▶ root with the new sizes ──▶ second root
//!                                                           ──▶ the new units are free ──▶ answer
//! ```
//!
//! A *root* is the superblock of a checkpoint; it has the table of the pool's disks and their
//! sizes. The newest root on the first disk decides whether a disk is in the pool. A new disk has
//! durable superblocks before a root names it. So after a crash the pool either lacks the disk, or
//! has it with all its metadata. A superblock on a disk that no root names is ignored; adding the
//! disk again overwrites it.
//!
//! The new units (64 KiB each) are free only after two roots with the new sizes. A recovery may
//! fall back to the root before the newest, and that root must have every unit that the log names.
//! Each root overwrites two of the four superblocks of every disk. So the same two roots move the
//! superblocks at the end of a grown disk to its new end; afterwards the old end holds data.

use std::sync::Arc;

use uuid::Uuid;

use super::super::{Attempt, Purpose};
use super::{Store, superblock_page};
use crate::disks::DiskTable;
use crate::geometry::Geometry;
use crate::ids::Token;
use crate::interface::{Answer, IoFailed, Refusal};
use crate::mutation::Mutation;

/// A change of the pool's sizes that two roots make durable.
#[derive(Debug)]
pub(in crate::pool) struct Growth {
    /// The request, answered at the end.
    token: Token,
    pub(in crate::pool) geometry: Geometry,
    pub(in crate::pool) disks: DiskTable,
    labels: Labels,
    /// Number of durable roots with the new sizes.
    roots: u32,
}

/// Progress of the superblocks of a disk that is being added: `left` writes are in flight, then the
/// flush. `Durable` from the start for a disk that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Labels {
    Writing { left: usize, failed: bool },
    Flushing,
    Durable,
}

impl Growth {
    pub(in crate::pool) fn token(self) -> Token {
        self.token
    }

    /// True when the next root may have the new sizes, because a new disk has its superblocks.
    pub(in crate::pool) fn is_labelled(&self) -> bool {
        self.labels == Labels::Durable
    }
}

impl Store {
    /// Begins `Request::Grow`: the pool takes the rest of a disk that now has `disk_bytes` bytes.
    /// Answers immediately if the disk gains no whole unit.
    ///
    /// `Attempt::Wait`: another change of the table of disks is not durable yet.
    /// `Refusal::OutOfRange`: the disk is not in the pool, is leaving it, or cannot have this size
    /// (smaller than before, or too large).
    pub(in crate::pool) fn attempt_grow(
        &mut self,
        token: Token,
        disk: usize,
        disk_bytes: u64,
    ) -> Result<Attempt, Refusal> {
        let mut geometry = self.superblock.geometry;
        let mut disks = self.superblock.disks.clone();
        let grown = disks.grow(&mut geometry, disk, disk_bytes);
        grown.map_err(|_| Refusal::OutOfRange)?;
        if !self.next_root.has_same_table() {
            return Ok(Attempt::Wait);
        }
        if disks.units() == self.superblock.disks.units() {
            self.answer(token, Ok(Answer::Done));
            return Ok(Attempt::Begun);
        }
        self.next_root.growth = Some(Growth {
            token,
            geometry,
            disks,
            labels: Labels::Durable,
            roots: 0,
        });
        self.want_root();
        Ok(Attempt::Begun)
    }

    /// Begins `Request::AddDisk`: writes superblocks on the new disk, which gets the next number.
    ///
    /// `Attempt::Wait`: another change of the table of disks is not durable yet, or no root has
    /// been written since the import. `Refusal::DiskUnfit`: the size is too small or too large, or
    /// the pool has a disk with this id. A pool with as many disks as it can hold gives the same
    /// refusal.
    pub(in crate::pool) fn attempt_add_disk(
        &mut self,
        token: Token,
        id: Uuid,
        disk_bytes: u64,
    ) -> Result<Attempt, Refusal> {
        let mut geometry = self.superblock.geometry;
        let mut disks = self.superblock.disks.clone();
        let added = disks.add(&mut geometry, id, disk_bytes);
        added.map_err(|_| Refusal::DiskUnfit)?;
        if !self.next_root.has_same_table() || !self.has_root {
            return Ok(Attempt::Wait);
        }
        let number = disks.disks().len() - 1;
        let mut label = self.superblock.clone();
        label.required |= disks.features();
        (label.geometry, label.disks) = (geometry, disks.clone());
        let page = superblock_page(&label.on(number));
        let places = disks.superblocks(number, &geometry);
        let is_hasty = Mutation::RootBeforeLabels.is_active();
        let labels = if is_hasty {
            Labels::Durable
        } else {
            Labels::Writing {
                left: places.len(),
                failed: false,
            }
        };
        self.next_root.growth = Some(Growth {
            token,
            geometry,
            disks,
            labels,
            roots: 0,
        });
        if is_hasty {
            self.want_root();
        } else {
            for place in places {
                self.write(Purpose::Label, place, Arc::clone(&page));
            }
        }
        Ok(Attempt::Begun)
    }

    /// Handles the end of one write of a superblock on the new disk. The last one begins a flush of
    /// the disk, or fails the growth if a write failed.
    pub(in crate::pool) fn label_written(&mut self, result: Result<(), IoFailed>) {
        let Some(growth) = &mut self.next_root.growth else {
            return;
        };
        let number = growth.disks.disks().len() - 1;
        if let Labels::Writing { left, failed } = &mut growth.labels {
            *left -= 1;
            *failed |= result.is_err();
            match (*left, *failed) {
                (0, true) => self.fail_growth(),
                (0, false) => {
                    growth.labels = Labels::Flushing;
                    self.flush_disk(Purpose::LabelFlush, number);
                }
                _ => {}
            }
        }
    }

    /// Handles the end of the flush of the new disk: requests the first root with the disk, or
    /// fails the growth.
    pub(in crate::pool) fn label_flushed(&mut self, result: Result<(), IoFailed>) {
        if result.is_err() {
            return self.fail_growth();
        }
        if let Some(growth) = &mut self.next_root.growth {
            growth.labels = Labels::Durable;
            self.want_root();
        }
    }

    /// Ends the growth with `Refusal::Medium`: the new disk failed before a root named it, so the
    /// pool is unchanged.
    fn fail_growth(&mut self) {
        if let Some(growth) = self.next_root.growth.take() {
            self.answer(growth.token, Err(Refusal::Medium));
        }
    }
}

impl Store {
    /// Requests a checkpoint, and so a new root, even if nothing has changed.
    pub(in crate::pool) fn want_root(&mut self) {
        self.wants_checkpoint = true;
        self.has_changes = true;
        self.has_news = true;
    }

    /// Handles a durable root. After the second root with the new sizes, the new units are free,
    /// and the request is answered. Before that, requests another root, unless the new disk still
    /// waits for its superblocks.
    pub(in crate::pool) fn advance_growth(&mut self) {
        self.state.geometry = self.superblock.geometry;
        let Some(mut growth) = self.next_root.growth.take() else {
            return;
        };
        if growth.disks == self.superblock.disks {
            growth.roots += 1;
        }
        let is_known = growth.roots >= 2 || Mutation::GrowAfterOneRoot.is_active();
        if !is_known || growth.roots == 0 {
            let is_labelled = growth.is_labelled();
            self.next_root.growth = Some(growth);
            if is_labelled {
                self.want_root();
            }
            return;
        }
        self.space.grow(&growth.disks);
        self.answer(growth.token, Ok(Answer::Done));
    }
}

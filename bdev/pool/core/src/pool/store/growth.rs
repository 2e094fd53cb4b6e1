//! Growth: a further disk, or the rest of a disk that became larger.
//!
//! ```text
//!   AddDisk ──▶ superblocks on the new disk ──▶ flush ─┐
//!   Grow ──────────────────────────────────────────────┴▶ root with the new sizes ──▶ another
//!                                                           ──▶ the new units are free ──▶ answer
//! ```
//!
//! The root on the first disk decides whether a disk is in the pool. So the new disk is known by
//! its superblocks before a root names it: a crash leaves it out, or in with all that it needs.
//! Superblocks of a disk that no root names mean nothing; adding the disk again overwrites them.
//!
//! Two roots, because a recovery may fall back to the root before the newest: it must know the
//! units that the log is about. The superblocks at the end of a grown disk move to the new end with
//! the same two roots; then the old end holds data.

use std::sync::Arc;

use uuid::Uuid;

use super::super::{Attempt, Purpose};
use super::{Store, superblock_page};
use crate::disks::DiskTable;
use crate::geometry::Geometry;
use crate::ids::Token;
use crate::interface::{Answer, IoFailed, Refusal};
use crate::mutation::Mutation;

#[derive(Debug)]
pub(in crate::pool) struct Growth {
    token: Token,
    pub(in crate::pool) geometry: Geometry,
    pub(in crate::pool) disks: DiskTable,
    labels: Labels,
    /// Roots with the new sizes that are durable.
    roots: u32,
}

/// The superblocks of a disk that is being added.
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

    /// True when a root may have the new sizes.
    pub(in crate::pool) fn is_labelled(&self) -> bool {
        self.labels == Labels::Durable
    }
}

impl Store {
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

    /// A superblock is on the new disk, or could not be written.
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

    pub(in crate::pool) fn label_flushed(&mut self, result: Result<(), IoFailed>) {
        if result.is_err() {
            return self.fail_growth();
        }
        if let Some(growth) = &mut self.next_root.growth {
            growth.labels = Labels::Durable;
            self.want_root();
        }
    }

    /// The new disk failed before a root named it: the pool is as it was.
    fn fail_growth(&mut self) {
        if let Some(growth) = self.next_root.growth.take() {
            self.answer(growth.token, Err(Refusal::Medium));
        }
    }
}

impl Store {
    /// Begins a checkpoint even if nothing changed.
    pub(in crate::pool) fn want_root(&mut self) {
        self.wants_checkpoint = true;
        self.has_changes = true;
        self.has_news = true;
    }

    /// A root is durable: takes the new units when two roots know them.
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

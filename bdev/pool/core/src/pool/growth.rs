//! Growth: taking the rest of a disk that became larger.
//!
//! ```text
//!   Grow ──▶ root with the new size ──▶ another ──▶ units beyond the old size are free ──▶ answer
//! ```
//!
//! Two roots, because a recovery may fall back to the root before the newest: it must know the
//! units that the log is about. The superblocks at the end of the disk move to the new end with the
//! same two roots; then the old end holds data.

use super::Attempt;
use super::store::Store;
use crate::geometry::Geometry;
use crate::ids::Token;
use crate::interface::{Answer, Refusal};
use crate::mutation::Mutation;

#[derive(Debug)]
pub(super) struct Growth {
    token: Token,
    pub(super) geometry: Geometry,
    /// Roots with the new size that are durable.
    roots: u32,
}

impl Growth {
    pub(super) fn token(self) -> Token {
        self.token
    }
}

impl Store {
    pub(super) fn attempt_grow(
        &mut self,
        token: Token,
        disk_bytes: u64,
    ) -> Result<Attempt, Refusal> {
        let old = self.superblock.geometry;
        let geometry = Geometry { disk_bytes, ..old };
        geometry.check().map_err(|_| Refusal::OutOfRange)?;
        if disk_bytes < old.disk_bytes {
            return Err(Refusal::OutOfRange);
        }
        if self.next_root.growth.is_some() {
            return Ok(Attempt::Wait);
        }
        if geometry.units() == old.units() {
            self.answer(token, Ok(Answer::Done));
            return Ok(Attempt::Begun);
        }
        self.next_root.growth = Some(Growth {
            token,
            geometry,
            roots: 0,
        });
        self.want_root();
        Ok(Attempt::Begun)
    }
}

impl Store {
    /// Begins a checkpoint even if nothing changed.
    pub(super) fn want_root(&mut self) {
        self.wants_checkpoint = true;
        self.has_changes = true;
        self.has_news = true;
    }

    /// A root is durable: takes the new units when two roots know them.
    pub(super) fn advance_growth(&mut self) {
        self.state.geometry = self.superblock.geometry;
        let Some(mut growth) = self.next_root.growth.take() else {
            return;
        };
        if growth.geometry == self.superblock.geometry {
            growth.roots += 1;
        }
        let is_known = growth.roots >= 2 || Mutation::GrowAfterOneRoot.is_active();
        if !is_known || growth.roots == 0 {
            self.next_root.growth = Some(growth);
            return self.want_root();
        }
        self.space.grow(growth.geometry.units());
        self.answer(growth.token, Ok(Answer::Done));
    }
}

//! The part of a lane that follows changes of the pool's disks. It opens queues on disks that join
//! the pool. It closes queues on disks that leave the pool or did not join after all.

use std::sync::Arc;

use nacre_bdev::{Bdev, Claim, OpenError, Queue};
use nacre_reactor::Interest;

use super::{Base, Lane};
use crate::port::ToKeeper;

impl Lane {
    /// Adopts the present list of disks, at the keeper's request with the number `round`. Opens
    /// queues on new disks; stops at the first that fails, and answers with its error. Drops the
    /// queue on a disk whose addition failed. Queues on disks that have left close when they are
    /// idle, because a flush may be in flight; the answer waits for them.
    pub(super) fn open_disks(&mut self, round: u64) {
        let claims = self.shared.claims.load_full();
        // A disk that did not join may have another in its place already.
        let both = self.bases.iter().zip(claims.iter());
        let same = both.take_while(|(base, claim)| match (base, claim) {
            (Some(base), Some(claim)) => Arc::ptr_eq(&base.claim, claim),
            (_, None) => true,
            (None, Some(_)) => false,
        });
        let same = same.count();
        self.bases.truncate(same);
        let mut outcome = Ok(());
        for claim in claims.iter().skip(self.bases.len()) {
            let opened = claim.as_ref().map(|claim| self.open_disk(claim));
            match opened.transpose() {
                Ok(base) => self.bases.push(base),
                Err(error) => {
                    outcome = Err(error.to_string());
                    break;
                }
            }
        }
        self.closing = Some((round, outcome));
        self.close_disks();
    }

    /// Opens a queue on a disk or an external device, and adds its wake descriptor, if any, to
    /// those that wake the lane.
    pub(super) fn open_disk(&self, claim: &Arc<Claim>) -> Result<Base, OpenError> {
        let base = Base::open(claim, &self.memory)?;
        let watched = match base.queue.wake_fd() {
            Some(fd) => self.sleepers.add(fd, 0, Interest::READ),
            None => Ok(()),
        };
        watched.map(|()| base).map_err(|source| OpenError {
            bdev: claim.layer().name().to_owned(),
            what: "watch completions".to_owned(),
            source,
        })
    }

    /// Closes idle queues on disks that have left. When none is open any more, answers the keeper's
    /// last request ([`ToKeeper::Disks`]). Does nothing without such a request.
    pub(super) fn close_disks(&mut self) {
        if self.closing.is_none() {
            return;
        }
        let claims = self.shared.claims.load();
        let mut is_open = false;
        for (base, claim) in self.bases.iter_mut().zip(claims.iter()) {
            if claim.is_some() {
                continue;
            }
            base.take_if(|base| base.waiting.is_empty() && base.queue.inflight() == 0);
            is_open |= base.is_some();
        }
        drop(claims);
        if !is_open && let Some((round, outcome)) = self.closing.take() {
            self.outbox.push(ToKeeper::Disks { round, outcome });
        }
    }
}

//! Clears the bits of idle regions in the dirty-region log, while all replicas are in sync.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::{Bdev, Flags};

use super::log::LogWriter;
use super::state::Live;
use crate::format::REGIONS_PER_PAGE;

/// Time between two passes. A region is cleared by the second pass that finds it idle.
const PASS: Duration = Duration::from_secs(3);

impl LogWriter {
    pub(super) async fn clean_log(self: Rc<Self>) {
        loop {
            self.context.signals.clean.notified().await;
            while self.context.shared.regions.dirty_count() > 0 {
                self.context.core.after(PASS).await;
                self.clean_idle().await;
            }
        }
    }

    /// Returns every replica of the volume, if all are attached and complete.
    pub(super) fn whole(&self) -> Option<Vec<(usize, Rc<Live>)>> {
        let state = self.context.state.borrow();
        let whole: Vec<_> = state
            .in_sync()
            .filter(|(slot, _)| self.context.shared.missing[*slot].is_empty())
            .map(|(slot, live)| (slot, Rc::clone(live)))
            .collect();
        let calm = state.serving && state.fenced.is_none();
        (calm && whole.len() == state.record.replicas.len()).then_some(whole)
    }

    async fn clean_idle(&self) {
        // Regions count as touched until this pass checks them. So when an absent replica returns,
        // regions that were idle meanwhile are not all cleared at once.
        let regions = self.context.state.borrow().record.regions();
        let idle: Vec<u64> = (0..regions)
            .filter(|region| self.context.shared.regions.age(*region))
            .collect();
        if idle.is_empty() {
            return;
        }
        let Some(replicas) = self.whole() else {
            return;
        };
        if !self.media.flush_all(&replicas).await {
            return;
        }
        let _log = self.turn.lock().await;
        // The replicas must be those that were flushed, and must not have lost data since.
        let same = self.whole().is_some_and(|now| {
            let pairs = now.iter().zip(&replicas);
            now.len() == replicas.len() && pairs.into_iter().all(|(a, b)| Rc::ptr_eq(&a.1, &b.1))
        });
        let kept = |(_, live): &(usize, Rc<Live>)| live.device.layer.losses() == live.losses;
        if !same || !replicas.iter().all(kept) {
            return;
        }
        let mut pages: Vec<u64> = Vec::new();
        for region in idle {
            if self.context.shared.regions.clear(region) {
                pages.push(region / REGIONS_PER_PAGE);
            }
        }
        pages.dedup();
        let failed = self
            .write_pages(&replicas, &pages, Flags::empty(), |_| false)
            .await;
        // A replica without space keeps regions in its log that need not be there.
        let failed = failed.into_iter().filter(|(.., why)| !why.is_no_space());
        for (slot, incarnation, why) in failed {
            self.context.suspect(slot, incarnation, why);
        }
    }

    pub(super) async fn clear_log(&self, replicas: &[(usize, Rc<Live>)]) {
        let _log = self.turn.lock().await;
        let regions = self.context.state.borrow().record.regions();
        let mut pages = Vec::new();
        for region in (0..regions).filter(|r| self.context.shared.regions.is_dirty(*r)) {
            self.context.shared.regions.age(region);
            if self.context.shared.regions.clear(region) {
                pages.push(region / REGIONS_PER_PAGE);
            }
        }
        pages.dedup();
        let failed = self
            .write_pages(replicas, &pages, Flags::FUA, |_| false)
            .await;
        for (slot, _, why) in failed {
            // Its label will not be clean either, so it is reconciled at the next opening.
            tracing::warn!(slot, why = super::reasons::describe(why), "its log stays");
        }
    }
}

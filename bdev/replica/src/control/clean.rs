//! Clears regions of the log that have been idle, when every member has everything.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::{Bdev, Flags};

use super::Control;
use super::state::Live;
use crate::format::REGIONS_PER_PAGE;

/// Between passes. A region is cleared by the second pass that finds it idle.
const PASS: Duration = Duration::from_secs(3);

impl Control {
    pub(super) async fn clean_log(self: Rc<Control>) {
        loop {
            self.bells.clean.notified().await;
            while self.shared.regions.dirty_count() > 0 {
                self.core.after(PASS).await;
                self.clean_idle().await;
            }
        }
    }

    /// Every member of the volume, if all are there and have everything.
    pub(super) fn whole(&self) -> Option<Vec<(usize, Rc<Live>)>> {
        let state = self.state.borrow();
        let whole: Vec<_> = state
            .in_sync()
            .filter(|(slot, _)| self.shared.needs[*slot].is_empty())
            .map(|(slot, live)| (slot, Rc::clone(live)))
            .collect();
        let calm = state.serving && state.fenced.is_none();
        (calm && whole.len() == state.record.members.len()).then_some(whole)
    }

    async fn clean_idle(&self) {
        // Regions count as touched until this pass checks them. So the absence of a replica does
        // not cause all regions that were idle meanwhile to be cleared at once on its return.
        let regions = self.state.borrow().record.regions();
        let idle: Vec<u64> = (0..regions)
            .filter(|region| self.shared.regions.age(*region))
            .collect();
        if idle.is_empty() {
            return;
        }
        let Some(members) = self.whole() else {
            return;
        };
        if !self.flush_all(&members).await {
            return;
        }
        let _log = self.log.lock().await;
        // The replicas must be those that were flushed, and must not have lost their data since.
        let same = self.whole().is_some_and(|now| {
            let pairs = now.iter().zip(&members);
            now.len() == members.len() && pairs.into_iter().all(|(a, b)| Rc::ptr_eq(&a.1, &b.1))
        });
        let kept = |(_, live): &(usize, Rc<Live>)| live.device.layer.losses() == live.losses;
        if !same || !members.iter().all(kept) {
            return;
        }
        let mut pages: Vec<u64> = Vec::new();
        for region in idle {
            if self.shared.regions.clear(region) {
                pages.push(region / REGIONS_PER_PAGE);
            }
        }
        pages.dedup();
        let failed = self
            .write_pages(&members, &pages, Flags::empty(), |_| false)
            .await;
        for (slot, incarnation, why) in failed {
            self.suspect(slot, incarnation, why);
        }
    }

    /// Flushes replicas; reports failed ones to the judge.
    pub(super) async fn flush_all(&self, members: &[(usize, Rc<Live>)]) -> bool {
        let flushes = members.iter().map(|(slot, live)| async move {
            let outcome = self.flush(&live.disk).await;
            if let Err(why) = outcome {
                self.suspect(*slot, live.incarnation, why);
            }
            outcome.is_ok()
        });
        join_all(flushes).await.into_iter().all(|ok| ok)
    }
}

//! Writes the dirty-region log: before the first write to a clean region, its bit is set on the
//! media of the replicas.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::Flags;
use tokio::sync::Mutex as AsyncMutex;

use super::context::Context;
use super::disk::Disk;
use super::failures::FailureHandler;
use super::label_poll::LabelPoll;
use super::media::Media;
use super::state::Live;
use crate::format::{BLOCK, REGIONS_PER_PAGE, decode_page, encode_page, page_offset, pages_for};
use crate::mutation::Mutation;
use crate::shared::Failure;

/// Delay before a failed write of pages is retried.
const AGAIN: Duration = Duration::from_millis(20);

pub(super) struct LogWriter {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
    pub failures: Rc<FailureHandler>,
    pub label_poll: Rc<LabelPoll>,
    /// Lock for writing pages, so that an older page never overwrites a newer one.
    pub turn: AsyncMutex<()>,
}

impl LogWriter {
    /// Makes the regions dirty that lanes wait for.
    pub(super) async fn keep_log(self: Rc<Self>) {
        loop {
            self.context.signals.log.notified().await;
            loop {
                let wanted = std::mem::take(&mut self.context.state.borrow_mut().wanted);
                if wanted.is_empty() {
                    break;
                }
                while !self.context.is_fenced() && !self.make_dirty(&wanted).await {
                    self.context.core.after(AGAIN).await;
                }
            }
        }
    }

    /// Writes the regions into the log of every present replica, then lets lanes write into them.
    /// Returns false if an in-sync replica does not have them.
    pub(super) async fn make_dirty(&self, wanted: &[u64]) -> bool {
        let lock = self.turn.lock().await;
        let mut pages: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for region in wanted {
            pages
                .entry(region / REGIONS_PER_PAGE)
                .or_default()
                .push(*region);
        }
        let present = self.context.state.borrow().present();
        self.label_poll.look_before_writing(&present).await;
        if self.context.is_fenced() {
            return false;
        }
        let numbers: Vec<u64> = pages.keys().copied().collect();
        let also = |region: u64| {
            let page = pages.get(&(region / REGIONS_PER_PAGE));
            page.is_some_and(|regions| regions.contains(&region))
        };
        let failed = if !Mutation::SkipLog.is_active() {
            self.write_pages(&present, &numbers, Flags::FUA, also).await
        } else {
            Vec::new()
        };
        if !failed.is_empty() {
            // Written again once the in-sync replicas are decided.
            drop(lock);
            if self.are_all_short(&failed) {
                return false;
            }
            for (slot, incarnation, why) in failed {
                self.failures.decide(slot, incarnation, why).await;
            }
            return false;
        }
        // Every replica that is in sync now must have it: a replica may have been promoted
        // meanwhile.
        let has_it = |slot: usize, live: &Rc<Live>| {
            let wrote = |(s, l): &(usize, Rc<Live>)| *s == slot && Rc::ptr_eq(l, live);
            present.iter().any(wrote)
        };
        let all = {
            let state = self.context.state.borrow();
            let mut in_sync = state.in_sync().peekable();
            in_sync.peek().is_some() && in_sync.all(|(slot, live)| has_it(slot, live))
        };
        if all {
            for region in wanted {
                self.context.shared.regions.set_dirty(*region);
            }
            self.context.shared.ring_all();
            self.context.signals.clean.notify_one();
            self.context.signals.fence.notify_one();
        }
        all
    }

    /// True when no in-sync replica has space for a page of the log: none is at fault.
    fn are_all_short(&self, failed: &[(usize, u64, Failure)]) -> bool {
        let state = self.context.state.borrow();
        let is_short = |slot: usize| {
            let mut failed = failed.iter();
            failed.any(|(of, _, why)| *of == slot && why.is_no_space())
        };
        state.in_sync().all(|(slot, _)| is_short(slot))
    }

    /// Writes the present pages of the log, with the additional regions in `also`. Call this under
    /// `turn`. Returns the failed replicas.
    pub(super) async fn write_pages(
        &self,
        to: &[(usize, Rc<Live>)],
        pages: &[u64],
        flags: Flags,
        also: impl Fn(u64) -> bool,
    ) -> Vec<(usize, u64, Failure)> {
        let mut failed: Vec<(usize, u64, Failure)> = Vec::new();
        for page in pages {
            let mut bytes = [0; BLOCK];
            self.encode(*page, &also, &mut bytes);
            let writes = to.iter().map(|(slot, live)| {
                let bytes = &bytes;
                async move {
                    let written =
                        self.media
                            .write_block(&live.disk, page_offset(*page), flags, bytes);
                    (*slot, live.incarnation, written.await)
                }
            });
            for (slot, incarnation, outcome) in join_all(writes).await {
                if let Err(why) = outcome {
                    failed.push((slot, incarnation, why));
                }
            }
        }
        failed
    }

    pub(super) fn encode(&self, page: u64, also: impl Fn(u64) -> bool, bytes: &mut [u8; BLOCK]) {
        let state = self.context.state.borrow();
        let dirty = |region| self.context.shared.regions.is_dirty(region) || also(region);
        // Includes regions that a growing volume does not have yet.
        let (id, epoch, regions) = (
            self.context.id,
            state.record.epoch,
            self.context.shared.regions.len(),
        );
        encode_page(id, page, epoch, regions, dirty, bytes);
    }

    /// Writes the whole log to one replica that is about to join.
    pub(super) async fn write_log_to(&self, slot: usize, live: &Rc<Live>) -> Result<(), Failure> {
        let pages: Vec<u64> =
            (0..pages_for(self.context.state.borrow().record.regions())).collect();
        let to = [(slot, Rc::clone(live))];
        let failed = self.write_pages(&to, &pages, Flags::FUA, |_| false).await;
        match failed.first() {
            Some((_, _, why)) => Err(*why),
            None => Ok(()),
        }
    }

    /// Reads the regions in a replica's log.
    pub(super) async fn read_log(&self, disk: &Disk) -> Result<Vec<u64>, Failure> {
        let regions = self.context.state.borrow().record.regions();
        let mut dirty = Vec::new();
        for number in 0..pages_for(regions) {
            let bytes = self.media.read_block(disk, page_offset(number)).await?;
            let page = decode_page(&bytes, self.context.id, number);
            let first = number * REGIONS_PER_PAGE;
            let last = regions.min(first + REGIONS_PER_PAGE);
            dirty.extend((first..last).filter(|region| page.is_dirty(*region)));
        }
        Ok(dirty)
    }
}

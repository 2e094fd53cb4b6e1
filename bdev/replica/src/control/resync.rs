//! Resyncs replicas: copies the regions that a replica lacks, one at a time, and promotes it to in
//! sync when it lacks none. A replaced replica is then removed.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::Bdev;
use nacre_reactor::Nanos;

use super::chunk::Copier;
use super::context::Context;
use super::log::LogWriter;
use super::media::Media;
use super::membership::Membership;
use super::state::Live;
use super::truncation::Cut;
use crate::handle::{LastResync, ResyncKind, VolumeEventKind};
use crate::model::ReplicaState;
use crate::shared::{Failure, NO_REGION};

/// Chunks copied concurrently while hosts have no I/O.
const AT_ONCE: usize = 4;
/// Longest interval between two updates of a filling replica's watermark in the store.
const KEEP: Duration = Duration::from_secs(10);
/// Delay before a failed copy or flush is retried.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest pause between two chunks while hosts have I/O.
const YIELD: Duration = Duration::from_millis(20);

pub(super) struct Resyncer {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
    pub replicas: Rc<Membership>,
    pub log: Rc<LogWriter>,
    pub copier: Rc<Copier>,
    pub began: Nanos,
    /// The value of [`Shared::abandoned`](crate::shared::Shared::abandoned) when abandoned writes
    /// last got time to finish; `None`: not since the volume was opened.
    pub waited_for: Cell<Option<u64>>,
}

/// Result of copying a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copied {
    Done,
    /// A replica failed; check which ones are present.
    Failed,
    /// No replica has the region.
    NoSource,
}

impl Resyncer {
    pub(super) async fn copy_regions(self: Rc<Self>) {
        loop {
            self.context.signals.resync.notified().await;
            let mut at = 0;
            loop {
                self.promote_all().await;
                self.copy_urgent().await;
                self.finish_replacement().await;
                let Some(region) = self.next_needed(at).or_else(|| self.next_needed(0)) else {
                    break;
                };
                match self.copy_region(region).await {
                    Copied::Done => at = region + 1,
                    Copied::Failed => {
                        // The failed replica is detached by now, or stays with a bad region:
                        // continue with the other regions.
                        at = region + 1;
                        self.wait_before_retry().await;
                    }
                    Copied::NoSource => self.wait_before_retry().await,
                }
                self.keep_watermarks().await;
            }
        }
    }

    /// Copies the regions that hosts wait for. Each region is tried once per request: afterwards
    /// the replicas are equal there, or the region is unreadable on all of them.
    async fn copy_urgent(&self) {
        loop {
            let Some(region) = self.context.state.borrow().urgent.front().copied() else {
                return;
            };
            let lacked =
                |(slot, _): &(usize, Rc<Live>)| self.context.shared.missing[*slot].contains(region);
            let lacked = self.context.state.borrow().present().iter().any(lacked);
            if lacked && self.copy_region(region).await == Copied::NoSource {
                // A source exists now.
                self.copy_region(region).await;
            }
            self.context.state.borrow_mut().urgent.pop_front();
            self.context.shared.one_tried();
        }
    }

    /// Waits before a failed copy is retried, unless a host needs a region.
    async fn wait_before_retry(&self) {
        self.copier.unless_urgent(AGAIN).await;
    }

    fn next_needed(&self, from: u64) -> Option<u64> {
        let state = self.context.state.borrow();
        let slots = state.present();
        let joined = slots.iter().filter(|(_, live)| live.joined.get());
        joined
            .filter_map(|(slot, _)| self.context.shared.missing[*slot].next(from))
            .min()
    }

    /// A replica that has the region, and the replicas that lack it.
    #[allow(clippy::type_complexity)]
    fn parties(&self, region: u64) -> (Option<(usize, Rc<Live>)>, Vec<(usize, Rc<Live>)>) {
        let state = self.context.state.borrow();
        let misses = |slot: usize| self.context.shared.missing[slot].contains(region);
        let source = state.in_sync().find(|(slot, _)| !misses(*slot));
        let source = source.map(|(slot, live)| (slot, Rc::clone(live)));
        let there = state.present().into_iter();
        let targets = there.filter(|(slot, live)| misses(*slot) && live.joined.get());
        (source, targets.collect())
    }

    /// Waits while devices may execute writes without a waiting caller: those of the previous
    /// holder, and those of closed lanes. Such a write, if executed at the source after the copy,
    /// would be missing at the target.
    async fn await_late_writes(&self) {
        loop {
            let abandoned = self.context.shared.abandoned();
            let delay =
                Duration::from_millis(self.context.state.borrow().record.settings.settle_ms);
            match self.waited_for.get() {
                Some(waited_for) if waited_for == abandoned => return,
                Some(_) => {
                    self.context.core.after(delay).await;
                    self.waited_for.set(Some(abandoned));
                }
                None => {
                    let since = self.context.core.now().since(self.began);
                    self.context.core.after(delay.saturating_sub(since)).await;
                    self.waited_for.set(Some(0));
                }
            }
        }
    }

    async fn copy_region(&self, region: u64) -> Copied {
        self.await_late_writes().await;
        let (source, targets) = self.parties(region);
        let Some((from, source)) = source else {
            self.without_source(region).await;
            return Copied::NoSource;
        };
        self.note_source(from, &targets);
        // From now on every write in this region goes to the targets too. An earlier write that
        // skipped them has completed when the chunk that contains it is locked.
        self.context.shared.set_copying(region);
        let unequal = self.context.shared.unequal();
        let mut copied = self.copy_chunks(region, (from, &source), &targets).await;
        if copied == Copied::Done && !self.keep_copied(&targets).await {
            copied = Copied::Failed;
        }
        if copied == Copied::Done {
            let same = |slot: usize, live: &Rc<Live>| {
                let now = self.context.state.borrow().live[slot].clone();
                now.is_some_and(|now| Rc::ptr_eq(&now, live))
            };
            let done = targets.iter().filter(|(slot, live)| same(*slot, live));
            let done: Vec<usize> = done.map(|(slot, _)| *slot).collect();
            done.iter()
                .for_each(|s| self.context.shared.missing[*s].remove(region));
            // A write that failed meanwhile may have changed copied blocks. Check after the
            // removal: a lane increments the counter before it adds regions, so its later additions
            // stay.
            if self.context.shared.unequal() != unequal {
                done.iter()
                    .for_each(|s| self.context.shared.missing[*s].insert(region));
            }
        }
        self.context.shared.set_copying(NO_REGION);
        self.context.shared.ring_all();
        self.context.refresh_status();
        copied
    }

    /// Handles a region that every in-sync replica lacks: a lane left it to be copied from a
    /// replica that had left the volume. Until the store has removed that replica, it may be the
    /// source.
    async fn without_source(&self, region: u64) {
        let _one = self.replicas.turn.lock().await;
        if self.parties(region).0.is_none() && self.replicas.believe_first().is_some() {
            // If no other replica lacks the region, no copy follows that would refresh the status.
            self.context.refresh_status();
        }
    }

    /// Flushes the copied data of an in-sync replica before the copy counts: hosts may have flushed
    /// this data when only the source had it. Replicas that are not in sync are flushed once, at
    /// their promotion.
    async fn keep_copied(&self, targets: &[(usize, Rc<Live>)]) -> bool {
        let in_sync =
            |(slot, _): &&(usize, Rc<Live>)| self.context.state.borrow().is_in_sync(*slot);
        let reconciled: Vec<_> = targets.iter().filter(in_sync).cloned().collect();
        self.media.flush_all(&reconciled).await
    }

    async fn copy_chunks(
        &self,
        region: u64,
        (from, source): (usize, &Rc<Live>),
        targets: &[(usize, Rc<Live>)],
    ) -> Copied {
        let (start, end, step) = {
            let state = self.context.state.borrow();
            let blocks = state.record.region_blocks();
            let start = region * blocks;
            let end = (start + blocks).min(state.record.blocks);
            drop(state);
            (start, end, self.copier.chunk_blocks())
        };
        let lives: Vec<&Rc<Live>> = targets.iter().map(|(_, live)| live).collect();
        let mut at = start;
        while at < end {
            let busy = self.is_busy();
            let wave = if busy { 1 } else { AT_ONCE };
            let (began, first) = (self.context.core.now(), at);
            let mut ranges = Vec::with_capacity(wave);
            while ranges.len() < wave && at < end {
                let blocks = step.min(end - at);
                ranges.push((at, blocks));
                at += blocks;
            }
            // Wait for the rate limit before locking stripes, so that no host waits for a copy that
            // has not begun.
            self.copier
                .throttle((at - first) * targets.len() as u64)
                .await;
            let chunks = self.copier.acquire_chunks(&ranges).await;
            let copies = chunks
                .iter()
                .map(|chunk| self.copier.copy(chunk, source, &lives));
            let outcomes = join_all(copies).await;
            drop(chunks);
            let mut fine = true;
            for outcome in outcomes {
                fine &= self.report_failures(outcome, (from, source), targets);
            }
            if !fine {
                return Copied::Failed;
            }
            let now = self.context.core.now();
            let bytes = self.copier.bytes_of(0, at - first).1;
            for (_, live) in targets {
                if let Some(resync) = &mut *live.resync.borrow_mut() {
                    resync.copied(bytes, now);
                }
            }
            self.context.refresh_status();
            if busy {
                self.context.core.after(now.since(began).min(YIELD)).await;
            }
        }
        Copied::Done
    }

    /// Reports failed replicas to the failure handler. Returns true if none failed.
    fn report_failures(
        &self,
        outcome: Result<Vec<(usize, Failure)>, Failure>,
        (from, source): (usize, &Rc<Live>),
        targets: &[(usize, Rc<Live>)],
    ) -> bool {
        match outcome {
            Ok(failed) => {
                for (at, why) in &failed {
                    let (slot, live) = &targets[*at];
                    if why.is_no_space() && self.context.state.borrow().is_in_sync(*slot) {
                        // It lacks the region until it has space again: reads go elsewhere.
                        continue;
                    }
                    self.context.suspect(*slot, live.incarnation, *why);
                }
                failed.is_empty()
            }
            // A shortage is not a failure of the replica.
            Err(Failure::Shortage) => false,
            Err(why) => {
                self.context.suspect_read(from, source.incarnation, why);
                false
            }
        }
    }

    /// True while hosts have I/O in flight.
    fn is_busy(&self) -> bool {
        (0..crate::model::MAX_REPLICAS).any(|slot| self.context.shared.outstanding(slot) > 0)
    }

    fn note_source(&self, from: usize, targets: &[(usize, Rc<Live>)]) {
        let id = self.context.replica_id(from);
        let mut changed = None;
        for (_, live) in targets {
            if let Some(resync) = &mut *live.resync.borrow_mut() {
                let before = resync.source.replace(id);
                changed = changed.or_else(|| before.filter(|before| *before != id));
            }
        }
        if let Some(from) = changed {
            self.context
                .emit(VolumeEventKind::SourceChanged { from, to: id });
        }
    }

    async fn promote_all(&self) {
        let ready: Vec<(usize, Rc<Live>)> = {
            let state = self.context.state.borrow();
            let there = state.present().into_iter();
            there
                .filter(|(slot, live)| {
                    live.joined.get() && self.context.shared.missing[*slot].is_empty()
                })
                .filter(|(_, live)| live.resync.borrow().is_some())
                .collect()
        };
        for (slot, live) in ready {
            self.promote(slot, &live).await;
        }
    }

    /// Marks a replica without missing regions as in sync.
    async fn promote(&self, slot: usize, live: &Rc<Live>) {
        let facts = live
            .resync
            .borrow()
            .as_ref()
            .map(|r| (r.kind, r.copied, r.began));
        let Some((kind, bytes, began)) = facts else {
            return;
        };
        if kind != ResyncKind::Reconcile {
            // From now on lanes write to this replica whatever regions it lacks, and flush it, too.
            // The flush below makes earlier flushed data durable there. Otherwise a flush could be
            // acknowledged between it and the promotion without including this replica.
            if !live.flushed.replace(true) {
                self.context.publish();
            }
            if !self.media.flush_all(&[(slot, Rc::clone(live))]).await {
                return self.context.core.after(AGAIN).await;
            }
            let _one = self.replicas.turn.lock().await;
            let here = |state: &super::state::State| {
                state.live[slot]
                    .as_ref()
                    .is_some_and(|now| Rc::ptr_eq(now, live))
            };
            let ready = {
                let state = self.context.state.borrow();
                here(&state)
                    && state.serving
                    && state.in_sync().next().is_some()
                    && self.context.shared.missing[slot].is_empty()
            };
            if !ready {
                return;
            }
            let logged = {
                let _log = self.log.turn.lock().await;
                self.log.write_log_to(slot, live).await
            };
            if let Err(why) = logged {
                return self.context.suspect(slot, live.incarnation, why);
            }
            let record = self.context.state.borrow().record.clone();
            let layer = &live.device.layer;
            if layer.losses() != live.losses || Cut::of(&record, layer).is_some() {
                return self.context.suspect(slot, live.incarnation, Failure::Loss);
            }
            let done = self.replicas.commit(|record| {
                if let Some(replica) = record.replica_mut(slot) {
                    replica.state = ReplicaState::InSync;
                    replica.why = None;
                }
            });
            if done.await.is_err() {
                return;
            }
        }
        *live.resync.borrow_mut() = None;
        self.context.state.borrow_mut().retries[slot].succeeded();
        let seconds = self.context.core.now().since(began).as_secs_f64();
        self.context.state.borrow_mut().last_resync[slot] = Some(LastResync {
            kind,
            bytes,
            seconds,
        });
        self.context.publish();
        self.context.signals.clean.notify_one();
        self.context.emit(VolumeEventKind::ResyncEnded {
            replica: self.context.replica_id(slot),
            device: live.disk.name.clone(),
            kind,
            bytes,
        });
    }

    /// Stores how far replicas have been filled, so that a restart continues there.
    async fn keep_watermarks(&self) {
        let now = self.context.core.now();
        let regions = self.context.state.borrow().record.regions();
        let filling: Vec<(usize, Rc<Live>)> = {
            let state = self.context.state.borrow();
            let syncing = state.syncing();
            syncing
                .map(|(slot, live)| (slot, Rc::clone(live)))
                .collect()
        };
        for (slot, live) in filling {
            let Some((kept, kept_at)) = stored_watermark(&live) else {
                continue;
            };
            let mark = self.context.shared.missing[slot].next(0).unwrap_or(regions);
            let far = mark > kept && (mark - kept) * 100 >= regions;
            let long = mark > kept && now.since(kept_at) >= KEEP;
            // Skip a copy that ends soon.
            if !(far && now.since(kept_at) >= KEEP / 10 || long) {
                continue;
            }
            if !self.media.flush_all(&[(slot, Rc::clone(&live))]).await {
                continue;
            }
            let _one = self.replicas.turn.lock().await;
            let same = self.context.state.borrow().live[slot].clone();
            // After a cache loss the flush does not make the lost data durable.
            if !same.is_some_and(|now| Rc::ptr_eq(&now, &live)) || !live.is_whole() {
                continue;
            }
            let last_label = live.stamp.get();
            let stored = self.replicas.commit(|record| {
                if let Some(replica) = record.replica_mut(slot) {
                    replica.state = ReplicaState::Filling {
                        watermark: mark,
                        last_label,
                    };
                }
            });
            if stored.await.is_ok()
                && let Some(resync) = &mut *live.resync.borrow_mut()
            {
                resync.kept = mark;
                resync.kept_at = self.context.core.now();
            }
        }
    }

    /// Removes a replaced replica once its replacement lacks nothing. The condition is read from
    /// the record repeatedly, not once after the promotion: the holder may have died since, or the
    /// new replica may have lacked a region then.
    pub(super) async fn finish_replacement(&self) {
        if self.replicas.replaced().is_none() {
            return;
        }
        let _one = self.replicas.turn.lock().await;
        // The previous task may have changed the record.
        let Some(old) = self.replicas.replaced() else {
            return;
        };
        if self.replicas.remove_slot(old).await.is_ok() {
            // Another replica may be replaced, and the remaining ones may lack nothing by now.
            self.context.signals.resync.notify_one();
        }
    }
}

/// The stored watermark of a full copy, and when it was stored.
fn stored_watermark(live: &Live) -> Option<(u64, Nanos)> {
    let resync = live.resync.borrow();
    let resync = resync.as_ref()?;
    (resync.kind == ResyncKind::Full).then_some((resync.kept, resync.kept_at))
}

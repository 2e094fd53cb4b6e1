//! Compares the replicas in the background, and repairs differences on request.

use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_hugepages::Buf;

use super::chunk::Copier;
use super::context::Context;
use super::media::SHORTAGE_OVER;
use super::state::Live;
use crate::handle::{VerifyStatus, VolumeError, VolumeEventKind};
use crate::shared::{Failure, Repair};

/// Number of differing blocks that are kept as examples.
const EXAMPLES: usize = 16;
/// Interval of checks whether a verification is due.
const LOOK: Duration = Duration::from_secs(60);

pub(super) struct Verify {
    pub context: Rc<Context>,
    pub copier: Rc<Copier>,
}

/// The result of comparing a chunk.
#[derive(Default)]
struct Compared {
    different: Vec<u64>,
    repaired: u64,
}

impl Verify {
    /// Runs one verification in the background.
    pub(super) fn begin_verify(self: &Rc<Self>, repair: bool) -> Result<(), VolumeError> {
        let mut state = self.context.state.borrow_mut();
        if state.verify.as_ref().is_some_and(|v| v.running) {
            return Err(VolumeError::Running {
                what: "a verification",
            });
        }
        let total = state.record.blocks * u64::from(state.record.block_size);
        state.stop_verify = false;
        state.verify = Some(VerifyStatus {
            repair,
            running: true,
            total_bytes: total,
            compared_bytes: 0,
            different_blocks: 0,
            repaired_blocks: 0,
            examples: Vec::new(),
        });
        drop(state);
        self.context.emit(VolumeEventKind::VerifyStarted { repair });
        self.context.refresh_status();
        self.context.spawn(Rc::clone(self).verify(repair));
        Ok(())
    }

    async fn verify(self: Rc<Self>, repair: bool) {
        let step = self.copier.chunk_blocks();
        let mut at = 0;
        loop {
            let blocks = self.context.state.borrow().record.blocks;
            if at >= blocks || self.context.state.borrow().stop_verify {
                break;
            }
            let count = step.min(blocks - at);
            let Some(compared) = self.compare(at, count, repair).await else {
                self.context.core.after(SHORTAGE_OVER).await;
                continue;
            };
            let bytes = self.copier.bytes_of(0, count).1;
            if let Some(verify) = &mut self.context.state.borrow_mut().verify {
                verify.compared_bytes += bytes;
                verify.different_blocks += compared.different.len() as u64;
                verify.repaired_blocks += compared.repaired;
                let room = EXAMPLES - verify.examples.len();
                verify.examples.extend(compared.different.iter().take(room));
            }
            self.context.refresh_status();
            at += count;
        }
        let ended = {
            let mut state = self.context.state.borrow_mut();
            let verify = state.verify.as_mut();
            verify.map(|verify| {
                verify.running = false;
                VolumeEventKind::VerifyEnded {
                    compared_bytes: verify.compared_bytes,
                    different_blocks: verify.different_blocks,
                    repaired_blocks: verify.repaired_blocks,
                }
            })
        };
        self.context.refresh_status();
        if let Some(ended) = ended {
            self.context.emit(ended);
        }
    }

    /// Compares one range on all in-sync replicas that have it, while no write is in flight there.
    /// Returns `None` if buffers are short.
    async fn compare(&self, lba: u64, blocks: u64, repair: bool) -> Option<Compared> {
        self.copier.throttle(blocks).await;
        let chunk = self.copier.acquire_chunk(lba, blocks).await;
        let replicas: Vec<(usize, Rc<Live>)> = {
            let state = self.context.state.borrow();
            let regions = self.context.shared.regions_of(lba, blocks);
            let whole =
                |slot: usize| !self.context.shared.missing[slot].contains_any(regions.clone());
            let in_sync = state.in_sync().filter(|(slot, _)| whole(*slot));
            in_sync
                .map(|(slot, live)| (slot, Rc::clone(live)))
                .collect()
        };
        let reads = replicas
            .iter()
            .map(|(_, live)| self.copier.read_chunk(&chunk, live));
        let mut data: Vec<(usize, Buf)> = Vec::new();
        for (at, outcome) in join_all(reads).await.into_iter().enumerate() {
            match outcome {
                Ok(buf) => data.push((at, buf)),
                Err(Failure::Shortage) => return None,
                Err(why) => {
                    let (slot, incarnation) = (replicas[at].0, replicas[at].1.incarnation);
                    if why.is_unreadable() {
                        // As for a host's read: other replicas may be able to read the block.
                        self.context.shared.want_repair(Repair {
                            slot,
                            incarnation,
                            lba,
                            blocks: blocks as u32,
                        });
                    }
                    self.context.suspect_read(slot, incarnation, why);
                }
            }
        }
        let block = self.context.state.borrow().record.block_size as usize;
        let mut compared = Compared::default();
        let Some(right) = most_common(&data) else {
            return Some(compared);
        };
        let right = data[right].1.clone();
        for (at, buf) in &data {
            let wrong = differing(&right, buf, block);
            if wrong.is_empty() {
                continue;
            }
            let fresh = wrong.iter().map(|index| lba + index);
            compared.different.extend(fresh);
            if !repair {
                continue;
            }
            let (slot, live) = &replicas[*at];
            match self.copier.write_chunk(&chunk, live, &right).await {
                Ok(()) => compared.repaired += wrong.len() as u64,
                Err(why) if why.is_no_space() => {}
                Err(why) => self.context.suspect(*slot, live.incarnation, why),
            }
        }
        compared.different.sort_unstable();
        compared.different.dedup();
        Some(compared)
    }

    /// Starts verifications at the volume's configured interval.
    pub(super) async fn verify_in_time(self: Rc<Self>) {
        let mut last = self.context.core.now();
        loop {
            let hours = self.context.state.borrow().record.settings.verify_hours;
            if hours == 0 {
                self.context.signals.verify.notified().await;
                last = self.context.core.now();
                continue;
            }
            let _ = self
                .context
                .core
                .timeout(LOOK, self.context.signals.verify.notified())
                .await;
            let due = Duration::from_secs(u64::from(hours) * 3600);
            if self.context.core.now().since(last) >= due {
                last = self.context.core.now();
                // A verification that an operator started counts as well.
                let _ = self.begin_verify(false);
            }
        }
    }
}

/// The index of the most frequent contents; with several, the first.
fn most_common(data: &[(usize, Buf)]) -> Option<usize> {
    let votes = |one: &Buf| {
        data.iter()
            .filter(|(_, other)| other[..] == one[..])
            .count()
    };
    let counted = data
        .iter()
        .enumerate()
        .map(|(at, (_, buf))| (votes(buf), at));
    let best = counted.max_by_key(|(votes, at)| (*votes, std::cmp::Reverse(*at)))?;
    Some(best.1)
}

/// The blocks in which two buffers differ.
fn differing(a: &Buf, b: &Buf, block: usize) -> Vec<u64> {
    if a[..] == b[..] {
        return Vec::new();
    }
    let pairs = a.chunks(block).zip(b.chunks(block)).enumerate();
    pairs
        .filter(|(_, (a, b))| a != b)
        .map(|(index, _)| index as u64)
        .collect()
}

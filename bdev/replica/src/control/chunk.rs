//! Locks ranges of the volume against writes of the lanes, and copies a locked range between
//! replicas. Resync, repair and verification use it.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::join_all;
use nacre_bdev::{Bdev, Flags, Op, Status, Support};
use nacre_hugepages::Buf;
use nacre_reactor::Nanos;
use tokio::sync::Mutex as AsyncMutex;

use super::MOMENT;
use super::context::Context;
use super::media::Media;
use super::state::Live;
use crate::model::RESERVED;
use crate::mutation::Mutation;
use crate::shared::{Failure, Shared};
use crate::stripes::{Acquired, CONTROL};

/// Most bytes copied or compared at a time.
pub(super) const CHUNK: u64 = 512 << 10;

/// Copies ranges between replicas, at the permitted rate.
pub(super) struct Copier {
    pub context: Rc<Context>,
    pub media: Rc<Media>,
    /// Lock for acquiring chunks, one at a time.
    pub turn: AsyncMutex<()>,
    /// Earliest time for copying the next bytes.
    pub copy_at: Cell<Nanos>,
}

/// A locked range: lanes do not write to it while this value exists.
pub(super) struct Chunk<'a> {
    shared: &'a Shared,
    pub lba: u64,
    /// Number of acquired blocks; in the end the whole range.
    pub blocks: u64,
    wanted: u64,
}

impl Drop for Chunk<'_> {
    fn drop(&mut self) {
        let stripes = &self.shared.stripes;
        for (lba, blocks) in stripes.pieces(self.lba, self.blocks) {
            stripes.release(lba, blocks);
        }
        if self.blocks < self.wanted {
            // The wait was cancelled: lanes no longer wait for the rest.
            stripes.forget(self.lba + self.blocks, self.wanted - self.blocks);
        }
        self.shared.ring_all();
    }
}

impl Copier {
    /// Waits until no lane writes in a range. Keeps acquired stripes while it waits for the next.
    /// That ends, because lanes never wait while they hold a stripe, and only one task acquires at
    /// a time.
    pub(super) async fn acquire_chunk(&self, lba: u64, blocks: u64) -> Chunk<'_> {
        let _one = self.turn.lock().await;
        self.acquire_under(lba, blocks).await
    }

    /// Locks several ranges. A caller that needs more than one must request all of them here: if it
    /// had one while it waits for the next, two tasks could block each other.
    pub(super) async fn acquire_chunks(&self, ranges: &[(u64, u64)]) -> Vec<Chunk<'_>> {
        let _one = self.turn.lock().await;
        let mut chunks = Vec::with_capacity(ranges.len());
        for (lba, blocks) in ranges {
            chunks.push(self.acquire_under(*lba, *blocks).await);
        }
        chunks
    }

    /// Acquires the stripes of one range. The caller holds `turn`.
    async fn acquire_under(&self, lba: u64, blocks: u64) -> Chunk<'_> {
        let mut chunk = Chunk {
            shared: &self.context.shared,
            lba,
            blocks: 0,
            wanted: blocks,
        };
        for (lba, blocks) in self.context.shared.stripes.pieces(lba, blocks) {
            while self.context.shared.stripes.acquire(CONTROL, lba, blocks) == Acquired::No {
                self.context.core.after(MOMENT).await;
            }
            chunk.blocks += blocks;
        }
        chunk
    }

    /// Blocks of a chunk: as many as fit into a buffer of this core.
    pub(super) fn chunk_blocks(&self) -> u64 {
        let most = CHUNK.min(self.media.pool.max_len() as u64);
        let block = u64::from(self.context.state.borrow().record.block_size);
        (most / block).max(1)
    }

    /// Converts a range to byte positions on a replica's device.
    pub(super) fn bytes_of(&self, lba: u64, blocks: u64) -> (u64, u64) {
        let block = u64::from(self.context.state.borrow().record.block_size);
        (RESERVED + lba * block, blocks * block)
    }

    pub(super) async fn read_chunk(
        &self,
        chunk: &Chunk<'_>,
        source: &Live,
    ) -> Result<Buf, Failure> {
        self.read_range((chunk.lba, chunk.blocks), source).await
    }

    /// Reads a range of a chunk.
    pub(super) async fn read_range(
        &self,
        (lba, blocks): (u64, u64),
        source: &Live,
    ) -> Result<Buf, Failure> {
        let (offset, len) = self.bytes_of(lba, blocks);
        let buf = self.media.buffer(len as usize).await?;
        let read = self.media.io(
            &source.disk,
            Op::Read,
            Flags::empty(),
            offset,
            len,
            Some(buf),
        );
        let buf = read.await?.ok_or(Failure::Status(Status::DeviceError))?;
        if source.device.layer.losses() == source.losses {
            Ok(buf)
        } else {
            Err(Failure::Loss)
        }
    }

    /// Writes data that was read from another replica. Chunks of zeroes take no space. A replica
    /// without space gets only the blocks that it has differently.
    pub(super) async fn write_chunk(
        &self,
        chunk: &Chunk<'_>,
        target: &Live,
        data: &Buf,
    ) -> Result<(), Failure> {
        let range = (chunk.lba, chunk.blocks);
        match self.write_range(range, target, data).await {
            Err(Failure::Status(Status::NoSpace)) => {}
            written => return written,
        }
        let found = self.read_range(range, target).await?;
        let block = self.context.state.borrow().record.block_size as usize;
        for run in differing_runs(data, &found, block) {
            let data = data.slice(run.start * block, run.len() * block);
            let range = (chunk.lba + run.start as u64, run.len() as u64);
            self.write_range(range, target, &data).await?;
        }
        Ok(())
    }

    async fn write_range(
        &self,
        (lba, blocks): (u64, u64),
        target: &Live,
        data: &Buf,
    ) -> Result<(), Failure> {
        let (offset, len) = self.bytes_of(lba, blocks);
        let zeroes = data.iter().all(|byte| *byte == 0);
        let layer = &target.device.layer;
        let written = if zeroes && layer.supports(Op::WriteZeroes) != Support::No {
            let op = Op::WriteZeroes;
            self.media
                .io(&target.disk, op, Flags::DEALLOCATE, offset, len, None)
                .await
        } else {
            let data = Some(data.clone());
            self.media
                .io(&target.disk, Op::Write, Flags::empty(), offset, len, data)
                .await
        };
        written.map(drop)
    }

    /// Copies a chunk from one replica to others. Returns the failed targets, by their index in
    /// `targets`; an error is that of the source.
    pub(super) async fn copy(
        &self,
        chunk: &Chunk<'_>,
        source: &Rc<Live>,
        targets: &[&Rc<Live>],
    ) -> Result<Vec<(usize, Failure)>, Failure> {
        if let ([target, ..], true) = (targets, Mutation::ResyncBackwards.is_active()) {
            let data = self.read_chunk(chunk, target).await?;
            self.write_chunk(chunk, source, &data).await?;
            return Ok(Vec::new());
        }
        let data = match self.read_chunk(chunk, source).await {
            Err(why) if why.is_unreadable() => self.salvage(chunk, source, why).await?,
            read => read?,
        };
        let writes = targets
            .iter()
            .map(|live| self.write_chunk(chunk, live, &data));
        let outcomes = join_all(writes).await.into_iter().enumerate();
        Ok(outcomes
            .filter_map(|(at, outcome)| Some((at, outcome.err()?)))
            .collect())
    }

    pub(super) async fn unless_urgent(&self, time: Duration) {
        if self.context.state.borrow().urgent.is_empty() {
            let _ = self
                .context
                .core
                .timeout(time, self.context.signals.urgent.notified())
                .await;
        }
    }

    /// Delays the copy of `blocks` blocks according to the rate limit.
    pub(super) async fn throttle(&self, blocks: u64) {
        let (rate, bytes) = {
            let state = self.context.state.borrow();
            let settings = &state.record.settings;
            let bytes = blocks * u64::from(state.record.block_size);
            (settings.resync_bytes_per_s, bytes)
        };
        if rate == 0 {
            return;
        }
        let now = self.context.core.now();
        let start = self.copy_at.get().max(now);
        let cost =
            Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64);
        self.copy_at.set(start + cost);
        while start > self.context.core.now() && self.context.state.borrow().urgent.is_empty() {
            self.unless_urgent(start.since(self.context.core.now()))
                .await;
        }
    }
}

/// The ranges of blocks in which two buffers differ. A range of `wanted` has only zeroes, or no
/// block of zeroes.
fn differing_runs(wanted: &[u8], found: &[u8], block: usize) -> Vec<Range<usize>> {
    let is_zero = |at: usize| wanted[at * block..][..block].iter().all(|byte| *byte == 0);
    let mut runs: Vec<Range<usize>> = Vec::new();
    let pairs = wanted.chunks(block).zip(found.chunks(block)).enumerate();
    for (at, _) in pairs.filter(|(_, (wanted, found))| wanted != found) {
        match runs.last_mut() {
            Some(last) if last.end == at && is_zero(last.start) == is_zero(at) => last.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::differing_runs;

    #[test]
    fn runs_end_at_equal_blocks_and_at_zeroes() {
        let wanted = [1, 1, 2, 2, 0, 0, 0, 0, 3, 3];
        let found = [1, 1, 9, 2, 9, 9, 0, 9, 9, 9];
        assert_eq!(differing_runs(&wanted, &found, 2), [1..2, 2..4, 4..5]);
        assert_eq!(differing_runs(&wanted, &wanted, 2), []);
    }
}

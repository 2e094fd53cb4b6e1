//! Copies data between a bdev and memory: a poller on a reactor, with at most [`DEPTH`] I/Os in
//! flight.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Claim, Done, Extents, Io, LayerQueue, Op, Queue, Status};
use nacre_hugepages::Pool as BufferPool;
use nacre_reactor::{CoreHandle, Idle, Nanos, Poller, ReactorHandle, Work};
use tokio::sync::oneshot;

use crate::plane::pool_here;

/// Most I/Os in flight.
const DEPTH: usize = 4;
/// Most bytes of one I/O: copying it must not hold up a reactor.
const PART: usize = 128 << 10;
/// Delay before the next attempt when no buffer is free or the bdev is busy.
const PAUSE: Duration = Duration::from_millis(1);

/// A claimed device, usable from any thread.
#[derive(Clone)]
pub struct ClaimedDevice {
    claim: Arc<Claim>,
    reactor: ReactorHandle,
}

/// A byte range of a bdev, and the offset `at` of its data in memory.
#[derive(Debug, Clone, Copy)]
pub struct Range {
    pub offset: u64,
    pub at: usize,
    pub bytes: usize,
}

impl ClaimedDevice {
    pub fn new(claim: Claim, reactor: ReactorHandle) -> Self {
        let claim = Arc::new(claim);
        Self { claim, reactor }
    }

    /// Reads ranges into `data`.
    pub async fn read(&self, ranges: Vec<Range>, data: Vec<u8>) -> Result<Vec<u8>, Status> {
        self.run(Op::Read, ranges, data).await
    }

    pub async fn write(&self, offset: u64, data: Vec<u8>) -> Result<(), Status> {
        let bytes = data.len();
        let range = Range {
            offset,
            at: 0,
            bytes,
        };
        self.run(Op::Write, vec![range], data).await.map(drop)
    }

    pub async fn flush(&self) -> Result<(), Status> {
        let all = Range {
            offset: 0,
            at: 0,
            bytes: 0,
        };
        let flushed = self.run(Op::Flush, vec![all], Vec::new()).await;
        flushed.map(drop)
    }

    async fn run(&self, op: Op, ranges: Vec<Range>, data: Vec<u8>) -> Result<Vec<u8>, Status> {
        let claim = Arc::clone(&self.claim);
        let moved = self.reactor.run_future(move |core| async move {
            let memory = pool_here().ok_or(Status::DeviceError)?;
            let opened = claim.open(&memory);
            let queue = opened.map_err(|_| Status::DeviceError)?;
            let block = u64::from(claim.layer().geometry().block_size);
            // The caller has the claim: it ends no later than the job.
            drop(claim);
            let part = PART.min(memory.max_len());
            let parts = ranges.iter().flat_map(|range| split(*range, part));
            let (sender, ended) = oneshot::channel();
            let mover = Mover {
                core: core.clone(),
                queue,
                memory,
                block,
                op,
                parts: parts.collect(),
                flying: [None; DEPTH],
                data,
                retry: Nanos::ZERO,
                done: Done::with_capacity(DEPTH),
                failed: None,
                ended: Some(sender),
            };
            let added = core.add_poller(Box::new(mover));
            added.map_err(|_| Status::DeviceError)?;
            ended.await.unwrap_or(Err(Status::Gone))
        });
        moved.await.unwrap_or(Err(Status::Gone))
    }
}

fn split(range: Range, part: usize) -> impl Iterator<Item = Range> {
    // A flush has no bytes.
    let count = range.bytes.div_ceil(part).max(1);
    (0..count).map(move |number| {
        let from = number * part;
        Range {
            offset: range.offset + from as u64,
            at: range.at + from,
            bytes: part.min(range.bytes - from),
        }
    })
}

struct Mover {
    core: CoreHandle,
    queue: LayerQueue,
    memory: BufferPool,
    /// Block size in bytes.
    block: u64,
    op: Op,
    parts: VecDeque<Range>,
    /// The ranges in flight, by token.
    flying: [Option<Range>; DEPTH],
    data: Vec<u8>,
    retry: Nanos,
    done: Done,
    failed: Option<Status>,
    ended: Option<oneshot::Sender<Result<Vec<u8>, Status>>>,
}

impl Mover {
    /// Submits parts up to the limit of I/Os in flight. Returns the number of new I/Os.
    fn submit(&mut self, now: Nanos) -> u32 {
        let mut count = 0;
        while now >= self.retry
            && let Some(slot) = self.flying.iter().position(Option::is_none)
            && let Some(part) = self.parts.pop_front()
        {
            if !self.submit_one(slot, part) {
                self.parts.push_front(part);
                self.retry = now + PAUSE;
                break;
            }
            self.flying[slot] = Some(part);
            count += 1;
        }
        count
    }

    fn submit_one(&mut self, slot: usize, part: Range) -> bool {
        let blocks = (part.bytes as u64 / self.block) as u32;
        let mut io = Io::new(slot as u64, self.op, part.offset / self.block, blocks);
        if part.bytes > 0 {
            let Some(mut buf) = self.memory.acquire(part.bytes) else {
                return false;
            };
            if self.op == Op::Write {
                let Some(bytes) = buf.bytes_mut() else {
                    return false;
                };
                bytes.copy_from_slice(&self.data[part.at..part.at + part.bytes]);
            }
            io = io.with(buf);
        }
        self.queue.submit(io).is_ok()
    }

    fn completed(&mut self, now: Nanos, slot: usize, status: Status, data: &Extents) {
        let Some(part) = self.flying.get_mut(slot).and_then(Option::take) else {
            return;
        };
        match status {
            Status::Ok if self.op == Op::Read => {
                let mut into = &mut self.data[part.at..part.at + part.bytes];
                for extent in data {
                    let (first, rest) = into.split_at_mut(extent.len().min(into.len()));
                    first.copy_from_slice(&extent[..first.len()]);
                    into = rest;
                }
            }
            Status::Ok => {}
            Status::Retry => {
                self.parts.push_front(part);
                self.retry = now + PAUSE;
            }
            failed => {
                self.failed = Some(failed);
                self.parts.clear();
            }
        }
    }

    /// Sends the result when all I/O has ended.
    fn end(&mut self) {
        if !self.parts.is_empty() || self.flying.iter().any(Option::is_some) {
            return;
        }
        if let Some(ended) = self.ended.take() {
            let result = match self.failed {
                Some(status) => Err(status),
                None => Ok(std::mem::take(&mut self.data)),
            };
            // The caller may no longer wait.
            let _ = ended.send(result);
            if let Some(poller) = self.core.current_poller() {
                self.core.remove_poller(poller);
            }
        }
    }
}

impl Poller for Mover {
    fn name(&self) -> &str {
        "backup"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        if self.ended.as_ref().is_some_and(oneshot::Sender::is_closed) {
            self.parts.clear();
        }
        let mut count = self.submit(now);
        let mut done = std::mem::replace(&mut self.done, Done::with_capacity(0));
        count += self.queue.poll(now, &mut done) as u32;
        for completion in done.drain() {
            let slot = completion.token as usize;
            self.completed(now, slot, completion.status, &completion.data);
        }
        self.done = done;
        count += self.submit(now);
        self.end();
        match count {
            0 => Work::None,
            count => Work::Did(count),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let idle = self.queue.arm(now);
        let has_room = self.flying.iter().any(Option::is_none);
        if self.parts.is_empty() || !has_room || self.ended.is_none() {
            idle
        } else if now < self.retry {
            idle.and(Idle::Until(self.retry))
        } else {
            Idle::Busy
        }
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let fds = self.queue.wake_fd().into_iter();
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }
}

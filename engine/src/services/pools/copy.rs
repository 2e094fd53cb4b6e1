//! Copies the units that a snapshot does not share with its parent to a bdev.
//!
//! ```text
//!   keeper      lists the places of these units, part by part
//!   a reactor   reads a part of a unit ▸ writes it at the same offset ▸ the next
//! ```

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nacre_bdev::{Bdev, Claim, Done, Extents, Io, LayerQueue, Op, Queue, Status};
use nacre_bdev_pool::{Command, Outcome};
use nacre_hugepages::Pool as BufferPool;
use nacre_reactor::{CoreHandle, Idle, Nanos, Poller, ReactorHandle, Work};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::OpenPool;
use crate::plane::pool_here;

/// Delay before the next attempt when no buffer is free.
const PAUSE: Duration = Duration::from_millis(1);

/// Progress of a copy.
#[derive(Debug, Default)]
pub(super) struct CopiedUnits {
    copied: AtomicU64,
}

impl CopiedUnits {
    /// Number of units copied so far.
    pub(super) fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }
}

/// The claimed bdevs of a copy.
#[derive(Clone)]
pub(super) struct CopyDevices {
    pub(super) from: Arc<Claim>,
    pub(super) to: Arc<Claim>,
}

/// The places of a snapshot's own units from a place on, and the place at which to continue.
pub(super) async fn places(
    pool: &OpenPool,
    lvol: Uuid,
    from: u64,
) -> Result<(Vec<u64>, Option<u64>), Status> {
    match pool.handle.run(Command::Own { lvol, from }).await {
        Ok(Outcome::Places { places, next }) => Ok((places, next)),
        _ => Err(Status::DeviceError),
    }
}

/// Copies all units of a snapshot that its parent does not have.
pub(super) async fn run(
    pool: &Rc<OpenPool>,
    lvol: Uuid,
    devices: CopyDevices,
    reactor: ReactorHandle,
    progress: Arc<CopiedUnits>,
) -> Result<(), Status> {
    let unit = pool.handle.status().unit_bytes;
    let mut from = Some(0);
    while let Some(place) = from {
        let (places, next) = places(pool, lvol, place).await?;
        from = next;
        let (devices, progress) = (devices.clone(), Arc::clone(&progress));
        let copied = reactor.run_future(move |core| async move {
            let Some(memory) = pool_here() else {
                return Err(Status::DeviceError);
            };
            copy_places(&core, memory, &devices, places, unit, progress).await
        });
        copied.await.unwrap_or(Err(Status::DeviceError))?;
    }
    Ok(())
}

async fn copy_places(
    core: &CoreHandle,
    memory: BufferPool,
    devices: &CopyDevices,
    places: Vec<u64>,
    unit: u64,
    progress: Arc<CopiedUnits>,
) -> Result<(), Status> {
    let open = |claim: &Claim| claim.open(&memory).map_err(|_| Status::DeviceError);
    let (sender, ended) = oneshot::channel();
    let block = |claim: &Claim| u64::from(claim.layer().geometry().block_size);
    let copier = Copier {
        core: core.clone(),
        from: open(&devices.from)?,
        to: open(&devices.to)?,
        blocks: (block(&devices.from), block(&devices.to)),
        part: unit.min(memory.max_len() as u64),
        unit,
        memory,
        places: places.into(),
        offset: 0,
        step: Step::Next,
        retry: Nanos::ZERO,
        done: Done::with_capacity(4),
        progress,
        ended: Some(sender),
    };
    let added = core.add_poller(Box::new(copier));
    added.map_err(|_| Status::DeviceError)?;
    ended.await.unwrap_or(Err(Status::Gone))
}

/// The next step of a copier.
enum Step {
    Next,
    Reading,
    Write(Extents),
    Writing,
}

struct Copier {
    core: CoreHandle,
    from: LayerQueue,
    to: LayerQueue,
    /// Block sizes of the source and the target, in bytes.
    blocks: (u64, u64),
    unit: u64,
    /// Most bytes of one I/O.
    part: u64,
    memory: BufferPool,
    places: VecDeque<u64>,
    /// Offset in bytes of the next I/O within the first place.
    offset: u64,
    step: Step,
    retry: Nanos,
    done: Done,
    progress: Arc<CopiedUnits>,
    ended: Option<oneshot::Sender<Result<(), Status>>>,
}

impl Copier {
    fn io(&self, op: Op, block: u64, place: u64) -> Io {
        let bytes = self.part.min(self.unit - self.offset);
        let first = place * self.unit + self.offset;
        Io::new(0, op, first / block, (bytes / block) as u32)
    }

    /// Submits the next I/O. Returns true if it did.
    fn begin(&mut self, now: Nanos) -> bool {
        let Some(place) = self.places.front().copied() else {
            self.end(Ok(()));
            return false;
        };
        if now < self.retry {
            return false;
        }
        match std::mem::replace(&mut self.step, Step::Next) {
            Step::Next => {
                let bytes = self.part.min(self.unit - self.offset);
                let io = self.io(Op::Read, self.blocks.0, place);
                let Some(buf) = self.memory.acquire(bytes as usize) else {
                    self.retry = now + PAUSE;
                    return false;
                };
                if self.from.submit(io.with(buf)).is_err() {
                    self.retry = now + PAUSE;
                    return false;
                }
                self.step = Step::Reading;
            }
            Step::Write(data) => {
                let mut io = self.io(Op::Write, self.blocks.1, place);
                io.data = data;
                if let Err((_, io)) = self.to.submit(io) {
                    self.step = Step::Write(io.data);
                    self.retry = now + PAUSE;
                    return false;
                }
                self.step = Step::Writing;
            }
            busy => {
                self.step = busy;
                return false;
            }
        }
        true
    }

    fn completed(&mut self, now: Nanos, status: Status, data: Extents) {
        let was_read = matches!(self.step, Step::Reading);
        match status {
            Status::Ok if was_read => self.step = Step::Write(data),
            Status::Ok => {
                self.step = Step::Next;
                self.offset += self.part;
                if self.offset >= self.unit {
                    self.offset = 0;
                    self.places.pop_front();
                    self.progress.copied.fetch_add(1, Ordering::Relaxed);
                }
            }
            Status::Retry => {
                self.retry = now + PAUSE;
                self.step = if was_read {
                    Step::Next
                } else {
                    Step::Write(data)
                };
            }
            failed => self.end(Err(failed)),
        }
    }

    /// Sends the result. Called when no I/O is in flight.
    fn end(&mut self, result: Result<(), Status>) {
        self.places.clear();
        if let Some(ended) = self.ended.take() {
            // The caller may no longer wait.
            let _ = ended.send(result);
            if let Some(poller) = self.core.current_poller() {
                self.core.remove_poller(poller);
            }
        }
    }
}

impl Poller for Copier {
    fn name(&self) -> &str {
        "copy"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        let mut count = u32::from(self.begin(now));
        let mut done = std::mem::replace(&mut self.done, Done::with_capacity(0));
        count += (self.from.poll(now, &mut done) + self.to.poll(now, &mut done)) as u32;
        for completion in done.drain() {
            self.completed(now, completion.status, completion.data);
        }
        self.done = done;
        count += u32::from(self.begin(now));
        match count {
            0 => Work::None,
            count => Work::Did(count),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let idle = self.from.arm(now).and(self.to.arm(now));
        match self.step {
            Step::Next | Step::Write(_) if now < self.retry => idle.and(Idle::Until(self.retry)),
            Step::Next | Step::Write(_) => Idle::Busy,
            Step::Reading | Step::Writing => idle,
        }
    }

    fn disarm(&mut self) {
        self.from.disarm();
        self.to.disarm();
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let fds = [self.from.wake_fd(), self.to.wake_fd()];
        let fds = fds.into_iter().flatten();
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }
}

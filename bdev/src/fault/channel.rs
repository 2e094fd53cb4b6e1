//! The fault module's queue: applies the injected faults to each I/O, before the base device gets
//! it or after the base device completes it.
//!
//! ```text
//!            ┌ Fail ────────────────────────────────────────────┐
//!   submit ──┼ Hang ──> hung ──resume──┐                        v
//!            ├ Busy ──> handed back, or deferred to the next turn   done
//!            └ else ────────────────> base ──> corrupt ──> held ──^
//! ```

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_hugepages::{Buf, Pool};
use nacre_reactor::{Idle, Nanos};
use slab::Slab;

use super::FaultDevice;
use super::rules::{Action, Copy};
use crate::due_queue::DueQueue;
use crate::io::{Completion, Extents, Io, Op, Status, Token};
use crate::layer::ModuleQueue;
use crate::pending::Pending;
use crate::queue::{Busy, Done, Queue};

/// Interval at which a sleeping core checks for the end of a hang: no event would wake it.
const LOOK_EVERY: Duration = Duration::from_millis(20);

pub(super) struct Channel {
    base: ModuleQueue,
    device: Arc<FaultDevice>,
    rules: Copy,
    pool: Pool,
    depth: usize,
    /// All accepted I/O.
    requests: Slab<Request>,
    /// I/Os in flight at the base.
    below: u64,
    hung: Vec<usize>,
    deferred: VecDeque<usize>,
    /// I/Os that the base has completed and that are not due yet.
    held: DueQueue,
    from_base: Done,
    resumes: u64,
}

struct Request {
    pending: Pending,
    op: Op,
    action: Option<Action>,
    place: Place,
}

enum Place {
    /// The base has the I/O. `original`: the index of the corrupted buffer, and the buffer that its
    /// copy replaces.
    Base {
        original: Option<(usize, Buf)>,
    },
    Hung(Io),
    Deferred(Io),
    /// The base has completed the I/O, which waits in `held`.
    Answered(Status, Extents),
}

impl Channel {
    pub(super) fn new(device: Arc<FaultDevice>, base: ModuleQueue, pool: Pool) -> Self {
        let depth = device.base.limits().queue_depth as usize;
        Self {
            base,
            rules: Copy::default(),
            pool,
            depth,
            requests: Slab::with_capacity(depth.min(64)),
            below: 0,
            hung: Vec::new(),
            deferred: VecDeque::new(),
            held: DueQueue::with_capacity(depth.min(64)),
            from_base: Done::with_capacity(64),
            resumes: device.resumes.load(Ordering::Relaxed),
            device,
        }
    }

    /// Submits a request to the base. Hands it back if the base is full, or if no buffer is free
    /// for a corrupted copy.
    #[allow(clippy::result_large_err)]
    fn forward(&mut self, index: usize, mut io: Io) -> Result<(), Io> {
        let mut original = None;
        if let (Op::Write, Some(Action::Corrupt { offset, value })) =
            (io.op, self.requests[index].action)
        {
            let Some(swapped) = corrupt_copy(&mut io.data, offset, value, &self.pool) else {
                return Err(io);
            };
            original = Some(swapped);
        }
        let token = std::mem::replace(&mut io.token, index as Token);
        match self.base.submit(io) {
            Ok(()) => {
                self.requests[index].place = Place::Base { original };
                self.below += 1;
                Ok(())
            }
            Err((Busy, mut io)) => {
                io.token = token;
                restore(&mut io.data, original);
                Err(io)
            }
        }
    }

    fn defer(&mut self, index: usize, io: Io) {
        self.requests[index].place = Place::Deferred(io);
        self.deferred.push_back(index);
    }

    /// Collects completions of the base, and applies faults to them.
    fn collect(&mut self, now: Nanos) {
        while self.base.poll(now, &mut self.from_base) > 0 {
            for ended in self.from_base.drain() {
                let Some(request) = self.requests.get_mut(ended.token as usize) else {
                    continue;
                };
                self.below -= 1;
                let Completion {
                    status, mut data, ..
                } = ended;
                let place =
                    std::mem::replace(&mut request.place, Place::Answered(status, Extents::new()));
                if let Place::Base { original } = place {
                    restore(&mut data, original);
                }
                let mut due = Nanos::ZERO;
                match request.action {
                    Some(Action::Corrupt { offset, value })
                        if request.op == Op::Read && status.is_ok() =>
                    {
                        corrupt(&mut data, offset, value);
                    }
                    Some(Action::Delay { latency_us }) => {
                        due = now + Duration::from_micros(latency_us)
                    }
                    _ => {}
                }
                request.place = Place::Answered(status, data);
                self.held.push(due, ended.token as usize);
            }
        }
    }

    /// Continues or ends hanging I/O, where permitted.
    fn look_after_hung(&mut self) {
        let resumes = self.device.resumes.load(Ordering::Relaxed);
        let resumed = std::mem::replace(&mut self.resumes, resumes) != resumes;
        let gone = self.device.base.is_gone();
        if self.hung.is_empty() || !(resumed || gone) {
            return;
        }
        for index in std::mem::take(&mut self.hung) {
            let place = std::mem::replace(
                &mut self.requests[index].place,
                Place::Base { original: None },
            );
            let Place::Hung(io) = place else { continue };
            if gone {
                self.answer(index, Status::Gone, io.data);
            } else if let Err(io) = self.forward(index, io) {
                self.defer(index, io);
            }
        }
    }

    fn retry_deferred(&mut self) {
        for _ in 0..self.deferred.len() {
            let Some(index) = self.deferred.pop_front() else {
                break;
            };
            let place = std::mem::replace(
                &mut self.requests[index].place,
                Place::Base { original: None },
            );
            let Place::Deferred(io) = place else { continue };
            // I/O that found the queue full is submitted again, as its submitter would do.
            if self.requests[index].action == Some(Action::Busy) {
                self.requests[index].action = self.rules.strike(&io, self.below);
            }
            match self.requests[index].action {
                Some(Action::Busy) => self.defer(index, io),
                Some(Action::Fail(status)) => self.answer(index, status, io.data),
                Some(Action::FailMedium) => {
                    self.answer(index, Status::medium_error(io.op), io.data)
                }
                Some(Action::Hang) => self.hang(index, io),
                _ => {
                    if let Err(io) = self.forward(index, io) {
                        self.defer(index, io);
                    }
                }
            }
        }
    }

    fn hang(&mut self, index: usize, io: Io) {
        self.requests[index].place = Place::Hung(io);
        self.hung.push(index);
    }

    fn answer(&mut self, index: usize, status: Status, data: Extents) {
        self.requests[index].place = Place::Answered(status, data);
        self.held.push(Nanos::ZERO, index);
    }

    fn release(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        while done.has_room()
            && let Some(index) = self.held.pop_due(now)
        {
            let request = self.requests.remove(index);
            let (status, data) = match request.place {
                Place::Answered(status, data) => (status, data),
                // Only completed I/O is held.
                _ => (Status::DeviceError, Extents::new()),
            };
            done.push(request.pending.complete(status, data));
        }
        done.len() - before
    }
}

impl Queue for Channel {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.requests.len() >= self.depth {
            return Err((Busy, io));
        }
        self.device.rules.refresh(&mut self.rules);
        let action = self.rules.strike(&io, self.below);
        if action == Some(Action::Busy) && self.below > 0 {
            return Err((Busy, io));
        }
        let (op, token) = (io.op, io.token);
        // The slot is filled before it is read.
        let place = Place::Base { original: None };
        let request = Request {
            pending: Pending::new(token),
            op,
            action,
            place,
        };
        let index = self.requests.insert(request);
        match action {
            Some(Action::Fail(status)) => self.answer(index, status, io.data),
            Some(Action::FailMedium) => self.answer(index, Status::medium_error(op), io.data),
            Some(Action::Hang) => self.hang(index, io),
            // Without I/O in flight at the base, the submitter would get no event to retry: the I/O
            // waits here.
            Some(Action::Busy) => self.defer(index, io),
            Some(Action::Corrupt { .. } | Action::Delay { .. }) => {
                // The fault has struck and must not be lost by handing the I/O back.
                if let Err(io) = self.forward(index, io) {
                    self.defer(index, io);
                }
            }
            None => {
                if let Err(io) = self.forward(index, io) {
                    self.requests.remove(index).pending.abandon();
                    return Err((Busy, io));
                }
            }
        }
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        self.device.rules.refresh(&mut self.rules);
        self.look_after_hung();
        self.retry_deferred();
        self.collect(now);
        self.release(now, done)
    }

    fn abort(&mut self, token: Token) -> bool {
        let mut requests = self.requests.iter_mut();
        let Some((index, request)) = requests.find(|(_, r)| r.pending.token() == token) else {
            return false;
        };
        let place = std::mem::replace(&mut request.place, Place::Base { original: None });
        match place {
            Place::Base { original } => {
                request.place = Place::Base { original };
                return self.base.abort(index as Token);
            }
            Place::Hung(io) | Place::Deferred(io) => {
                self.hung.retain(|hung| *hung != index);
                self.deferred.retain(|deferred| *deferred != index);
                self.answer(index, Status::Aborted, io.data);
            }
            Place::Answered(_, data) => {
                self.held.remove(index);
                self.answer(index, Status::Aborted, data);
            }
        }
        true
    }

    fn inflight(&self) -> usize {
        self.requests.len()
    }

    fn is_settled(&self) -> bool {
        self.inflight() == 0 && self.base.is_settled()
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let hung = if self.hung.is_empty() {
            Idle::Quiet
        } else {
            Idle::Until(now + LOOK_EVERY)
        };
        let deferred = if self.deferred.is_empty() {
            Idle::Quiet
        } else {
            Idle::Busy
        };
        let own = self.held.arm(now).and(hung).and(deferred);
        own.and(self.base.arm(now))
    }

    fn disarm(&mut self) {
        self.base.disarm();
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        self.base.wake_fd()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        for request in self.requests.drain() {
            request.pending.abandon();
        }
    }
}

/// The extent that contains the byte at `offset`, and the position in it.
fn locate(data: &Extents, offset: u64) -> Option<(usize, usize)> {
    let mut left = usize::try_from(offset).ok()?;
    for (index, buf) in data.iter().enumerate() {
        if left < buf.len() {
            return Some((index, left));
        }
        left -= buf.len();
    }
    None
}

/// Replaces a buffer by a corrupted copy; the submitter gets its buffer back unchanged. Returns
/// `None` when the pool has no free buffer.
fn corrupt_copy(data: &mut Extents, offset: u64, value: u8, pool: &Pool) -> Option<(usize, Buf)> {
    let (index, at) = locate(data, offset)?;
    let mut copy = pool.acquire(data[index].len())?;
    let bytes = copy.bytes_mut()?;
    bytes.copy_from_slice(&data[index]);
    bytes[at] ^= value;
    Some((index, std::mem::replace(&mut data[index], copy)))
}

fn restore(data: &mut Extents, original: Option<(usize, Buf)>) {
    if let Some((index, original)) = original
        && let Some(place) = data.get_mut(index)
    {
        *place = original;
    }
}

fn corrupt(data: &mut Extents, offset: u64, value: u8) {
    if let Some((index, at)) = locate(data, offset)
        && let Some(bytes) = data[index].bytes_mut()
    {
        bytes[at] ^= value;
    }
}

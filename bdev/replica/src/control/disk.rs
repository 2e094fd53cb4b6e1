//! The control's queue to one replica's device, whose I/Os are futures.
//!
//! One poller of the control's reactor polls all its disks. An I/O whose caller no longer waits
//! (its deadline passed) keeps its slot until the device completes it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use nacre_bdev::reservation::{ReservationReport, ReservationRequest, Reserve};
use nacre_bdev::{Bdev, Busy, Done, Extents, Io, Layer, OpenError, Queue, Status, Token};
use nacre_hugepages::Pool;
use nacre_reactor::{EventSet, Idle, Interest, Nanos, Poller, Work};
use slab::Slab;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Most completions that one poll of a disk collects.
const DEPTH: usize = 64;

pub(crate) struct Disk {
    /// The name by which it was claimed.
    pub device: String,
    pub name: String,
    pub block_size: u32,
    queue: RefCell<Box<dyn Queue>>,
    calls: RefCell<Slab<DiskCall>>,
    /// I/Os that the device has not accepted yet, in order.
    waiting: RefCell<VecDeque<Io>>,
    forgotten: Cell<bool>,
    /// I/Os that the device completed.
    completed: Cell<u64>,
    is_silent: Cell<bool>,
}

/// The queue of a closed disk.
struct Closed;

impl Queue for Closed {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        Err((Busy, io))
    }

    fn poll(&mut self, _now: Nanos, _done: &mut Done) -> usize {
        0
    }

    fn abort(&mut self, _token: Token) -> bool {
        false
    }

    fn inflight(&self) -> usize {
        0
    }
}

#[derive(Default)]
struct DiskCall {
    outcome: Option<(Status, Extents)>,
    waker: Option<Waker>,
    /// The caller no longer waits.
    abandoned: bool,
    /// The caller gets `Gone`, whatever the device does.
    given_up: bool,
}

impl Disk {
    fn open(device: &str, layer: &Arc<Layer>, pool: &Pool) -> Result<Self, OpenError> {
        let queue = layer.open_queue(pool)?;
        Ok(Self {
            device: device.to_owned(),
            name: layer.name().to_owned(),
            block_size: layer.geometry().block_size,
            queue: RefCell::new(Box::new(queue)),
            calls: RefCell::default(),
            waiting: RefCell::default(),
            forgotten: Cell::new(false),
            completed: Cell::new(0),
            is_silent: Cell::new(false),
        })
    }

    /// I/Os that have not completed, or whose result was not read.
    pub(super) fn under_way(&self) -> usize {
        self.calls.borrow().len()
    }

    pub(super) fn completed(&self) -> u64 {
        self.completed.get()
    }

    /// True if the device has completed nothing for longer than it may.
    pub(super) fn is_silent(&self) -> bool {
        self.is_silent.get()
    }

    pub(super) fn set_silent(&self, is_silent: bool) {
        self.is_silent.set(is_silent);
    }

    /// Executes one I/O. The disk assigns its token.
    pub(super) fn run(&self, mut io: Io) -> Running<'_> {
        let gone = self.forgotten.get();
        let outcome = gone.then(|| (Status::Gone, Extents::new()));
        let call = DiskCall {
            outcome,
            ..DiskCall::default()
        };
        let key = self.calls.borrow_mut().insert(call);
        if gone {
            return Running { disk: self, key };
        }
        io.token = key as u64;
        self.waiting.borrow_mut().push_back(io);
        self.submit();
        Running { disk: self, key }
    }

    /// Executes a request about the device's reservations.
    pub(super) async fn reserve(
        &self,
        ask: ReservationRequest,
    ) -> Result<ReservationReport, Status> {
        let (answer, answered) = oneshot::channel();
        let answer = Box::new(move |outcome| {
            // The caller may no longer wait.
            let _ = answer.send(outcome);
        });
        let outcome = if self.forgotten.get() {
            return Err(Status::Gone);
        } else {
            self.queue.borrow_mut().reserve(Reserve { ask, answer })
        };
        match outcome {
            Ok(()) => answered.await.unwrap_or(Err(Status::Gone)),
            Err(_) => Err(Status::Retry),
        }
    }

    /// Ends all I/Os in flight for their callers. They keep their slots until the device completes
    /// them.
    pub(super) fn give_up(&self) {
        for (key, call) in self.calls.borrow_mut().iter_mut() {
            if call.abandoned || call.outcome.is_some() {
                continue;
            }
            call.given_up = true;
            if let Some(waker) = call.waker.take() {
                waker.wake();
            }
            tracing::debug!(
                device = self.name,
                key,
                "an I/O of a dead device is given up"
            );
        }
    }

    fn submit(&self) {
        let mut waiting = self.waiting.borrow_mut();
        let mut queue = self.queue.borrow_mut();
        while let Some(io) = waiting.pop_front() {
            if let Err((_, io)) = queue.submit(io) {
                waiting.push_front(io);
                return;
            }
        }
    }

    fn poll(&self, now: Nanos, done: &mut Done) -> usize {
        self.submit();
        let count = self.queue.borrow_mut().poll(now, done);
        self.completed.set(self.completed.get() + count as u64);
        let mut calls = self.calls.borrow_mut();
        for ended in done.drain() {
            let key = ended.token as usize;
            let Some(call) = calls.get_mut(key) else {
                continue;
            };
            if call.abandoned {
                calls.remove(key);
                continue;
            }
            call.outcome = Some((ended.status, ended.data));
            if let Some(waker) = call.waker.take() {
                waker.wake();
            }
        }
        count
    }

    fn arm(&self, now: Nanos) -> Idle {
        // I/O that waits for queue space is submitted after a completion, which wakes the core.
        self.queue.borrow_mut().arm(now)
    }
}

/// An I/O in flight.
pub(crate) struct Running<'a> {
    disk: &'a Disk,
    key: usize,
}

impl Future for Running<'_> {
    type Output = (Status, Extents);

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut calls = self.disk.calls.borrow_mut();
        let call = &mut calls[self.key];
        match call.outcome.take() {
            Some(outcome) => {
                call.outcome = Some((outcome.0, Extents::new()));
                Poll::Ready(outcome)
            }
            None if call.given_up => Poll::Ready((Status::Gone, Extents::new())),
            None => {
                call.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut calls = self.disk.calls.borrow_mut();
        if calls[self.key].outcome.is_some() {
            calls.remove(self.key);
            return;
        }
        calls[self.key].abandoned = true;
        drop(calls);
        let token = self.key as u64;
        let waits = |io: &Io| io.token == token;
        let mut waiting = self.disk.waiting.borrow_mut();
        if let Some(at) = waiting.iter().position(waits) {
            waiting.remove(at);
            self.disk.calls.borrow_mut().remove(self.key);
        } else {
            self.disk.queue.borrow_mut().abort(token);
        }
    }
}

/// All disks of one control.
pub(crate) struct Disks {
    list: RefCell<Vec<Rc<Disk>>>,
    sleepers: EventSet,
}

impl Disks {
    pub(super) fn new() -> std::io::Result<Rc<Self>> {
        Ok(Rc::new(Self {
            list: RefCell::default(),
            sleepers: EventSet::new()?,
        }))
    }

    pub(super) fn open(
        &self,
        device: &str,
        layer: &Arc<Layer>,
        pool: &Pool,
    ) -> Result<Rc<Disk>, OpenError> {
        let disk = Rc::new(Disk::open(device, layer, pool)?);
        if let Some(fd) = disk.queue.borrow().wake_fd() {
            let added = self.sleepers.add(fd, 0, Interest::READ);
            added.map_err(|source| OpenError {
                bdev: disk.name.clone(),
                what: "watch its completions".into(),
                source,
            })?;
        }
        self.list.borrow_mut().push(Rc::clone(&disk));
        Ok(disk)
    }

    /// Stops using the disk for new I/O. Its queue is closed once nothing is in flight.
    pub(super) fn forget(&self, disk: &Disk) {
        disk.forgotten.set(true);
    }

    /// I/Os in flight on forgotten queues of a device, whose callers no longer wait.
    pub(super) fn left_under_way(&self, name: &str) -> usize {
        let list = self.list.borrow();
        let former = list.iter().filter(|d| d.forgotten.get() && d.name == name);
        former.map(|disk| disk.under_way()).sum()
    }

    /// Closes forgotten queues without I/O in flight.
    fn tidy(&self) {
        let idle = |disk: &Disk| disk.forgotten.get() && disk.calls.borrow().is_empty();
        self.list.borrow_mut().retain(|disk| {
            if !idle(disk) {
                return true;
            }
            // Remaining handles of the disk do not keep the device open.
            let queue = disk.queue.replace(Box::new(Closed));
            if let Some(fd) = queue.wake_fd()
                && let Err(error) = self.sleepers.delete(fd)
            {
                tracing::debug!(%error, device = disk.name, "its descriptor was gone already");
            }
            false
        });
    }

    /// Stops all polling.
    pub(super) fn close(&self) {
        self.list.borrow_mut().clear();
    }

    pub(super) fn poller(self: &Rc<Self>) -> Box<dyn Poller> {
        Box::new(DiskPoller {
            disks: Rc::clone(self),
            done: Done::with_capacity(DEPTH),
        })
    }
}

struct DiskPoller {
    disks: Rc<Disks>,
    done: Done,
}

impl Poller for DiskPoller {
    fn name(&self) -> &str {
        "volume control"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        let mut count = 0;
        let disks = &self.disks;
        for disk in disks.list.borrow().iter() {
            count += disk.poll(now, &mut self.done);
        }
        disks.tidy();
        match count {
            0 => Work::None,
            count => Work::Did(count as u32),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let list = self.disks.list.borrow();
        list.iter()
            .fold(Idle::Quiet, |idle, disk| idle.and(disk.arm(now)))
    }

    fn disarm(&mut self) {
        for disk in self.disks.list.borrow().iter() {
            disk.queue.borrow_mut().disarm();
        }
    }

    fn wake_fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        Ok(vec![self.disks.sleepers.wake_fd()?])
    }
}

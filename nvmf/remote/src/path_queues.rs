//! One core's queues to a namespace, one per path, as one queue.
//!
//! ```text
//!   submit ──▶ choose a usable queue ──▶ IoQueue            no usable queue: waiting
//!   poll   ──▶ each queue; a queue that cannot send returns its I/O ──▶ waiting ──▶ another one
//! ```
//!
//! - Each I/O is in one place: in one queue, in `waiting`, or in `ended`.
//! - With one path, every call goes straight to its queue.
//! - I/O in `waiting` fails only if no queue can become usable, or if none was usable for
//!   [`nacre_nvmf::host::HostOptions::fast_io_fail`].
//! - Nothing is allocated except when the list of paths changes.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use nacre_bdev::reservation::Reserve;
use nacre_bdev::{Busy, Completion, Done, Io, OpenError, Queue, Status, Token};
use nacre_hugepages::Pool;
use nacre_nvmf::host::{IoQueue, Returned, Standing};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_reactor::{EventSet, Idle, Nanos};

use crate::namespace::Namespace;
use crate::open::open_queue;
use crate::paths::{Counters, DevicePath, MAX_PATHS};
use crate::qids::Qid;
use crate::select::{Choice, Chooser, Class, Policy, View};

/// Interval at which the counters of the queues are published.
const PUBLISH: Duration = Duration::from_millis(100);
/// Interval of attempts to open a queue that could not be opened.
const RETRY: Duration = Duration::from_secs(1);
/// Interval at which a sleeping core polls while I/O waits for a path.
const LOOK: Duration = Duration::from_millis(1);

struct OpenPathQueue {
    // Dropped in this order: the queue is closed before its identifier is free.
    queue: IoQueue,
    _qid: Qid,
    path: Arc<DevicePath>,
    counters: Arc<Counters>,
}

impl OpenPathQueue {
    #[inline]
    fn view(&self) -> View {
        let is_usable = self.queue.standing() == Standing::Usable && self.path.is_open();
        let class = match self.queue.access() {
            AnaState::Optimized => Class::Optimized,
            _ => Class::NonOptimized,
        };
        View {
            class: is_usable.then_some(class),
            is_preferred: self.path.is_preferred(),
            is_full: !self.queue.has_room(),
            inflight: self.queue.inflight(),
        }
    }

    fn is_usable(&self) -> bool {
        self.view().class.is_some()
    }

    /// Publishes the queue's counters.
    fn publish(&self, is_current: bool) {
        let (stats, device) = (self.queue.stats(), self.queue.device());
        self.counters.publish(&stats, device, is_current);
    }

    /// True if waiting for this queue is useless.
    fn is_hopeless(&self) -> bool {
        self.queue.standing() == Standing::GaveUp || !self.path.is_open()
    }
}

pub(crate) struct PathQueues {
    namespace: Arc<Namespace>,
    pool: Pool,
    /// The version of the list of paths that `queues` follow.
    version: u64,
    queues: Vec<OpenPathQueue>,
    /// False: there is exactly one queue, and it has all I/O.
    are_several: bool,
    /// The list has one path.
    is_only_path: bool,
    chooser: Chooser,
    waiting: VecDeque<Returned>,
    ended: VecDeque<Completion>,
    no_path_since: Option<Nanos>,
    fast_io_fail: Option<Duration>,
    /// Most I/Os in flight.
    depth: usize,
    publish_at: Nanos,
    /// When to try again to open a queue; `None`: every path has one.
    retry_at: Option<Nanos>,
    /// The connections of all queues.
    watch: EventSet,
}

impl PathQueues {
    /// Opens a queue on every path where that is possible; fails if there is none.
    pub(crate) fn open(namespace: Arc<Namespace>, pool: &Pool) -> Result<Self, OpenError> {
        let watch = EventSet::new().map_err(|error| namespace.cannot_open(error))?;
        let mut queues = Self {
            depth: namespace.promise.limits.queue_depth as usize,
            namespace,
            pool: pool.clone(),
            version: 0,
            queues: Vec::with_capacity(MAX_PATHS),
            are_several: false,
            is_only_path: false,
            chooser: Chooser::default(),
            waiting: VecDeque::new(),
            ended: VecDeque::new(),
            no_path_since: None,
            fast_io_fail: None,
            publish_at: Nanos::ZERO,
            retry_at: None,
            watch,
        };
        match queues.adopt(Nanos::ZERO) {
            Some(error) if queues.queues.is_empty() => Err(error),
            _ => Ok(queues),
        }
    }

    /// Takes the list of paths over. Returns the first error of opening a queue.
    fn adopt(&mut self, now: Nanos) -> Option<OpenError> {
        let paths = &self.namespace.paths;
        self.version = paths.version();
        self.chooser.policy = paths.policy();
        self.chooser.stays = paths.stays();
        let list = paths.list();
        self.is_only_path = list.len() == 1;
        let mut first_error = None;
        for path in &list {
            if self
                .queues
                .iter()
                .any(|path_queue| Arc::ptr_eq(&path_queue.path, path))
            {
                continue;
            }
            match self.open_path(path) {
                Ok(path_queue) => self.queues.push(path_queue),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        self.retry_at = first_error.is_some().then(|| now + RETRY);
        self.fast_io_fail = fast_io_fail(&self.queues);
        self.update_mode();
        first_error
    }

    fn open_path(&self, path: &Arc<DevicePath>) -> Result<OpenPathQueue, OpenError> {
        let (queue, qid) = open_queue(&self.namespace, &path.shared, &self.pool, &self.watch)?;
        Ok(OpenPathQueue {
            queue,
            _qid: qid,
            path: Arc::clone(path),
            counters: path.count(),
        })
    }

    /// Enters or leaves the mode for several paths.
    fn update_mode(&mut self) {
        let is_simple = match &self.queues[..] {
            [only] => self.is_only_path && !only.path.is_leaving(),
            _ => false,
        };
        if is_simple {
            let only = &mut self.queues[0].queue;
            only.set_fails_over(false);
            while only.has_room()
                && let Some(io) = self.waiting.pop_front()
            {
                only.accept(io);
            }
        }
        self.are_several = !is_simple || !self.waiting.is_empty() || !self.ended.is_empty();
        if self.are_several {
            self.waiting.reserve(self.depth);
            self.ended.reserve(self.depth);
            if !is_simple {
                for path_queue in &mut self.queues {
                    path_queue.queue.set_fails_over(true);
                }
            }
        }
    }

    #[inline]
    fn choose(&mut self) -> Choice {
        let views: ArrayVec<View, { 2 * MAX_PATHS }> = self
            .queues
            .iter()
            .take(2 * MAX_PATHS)
            .map(OpenPathQueue::view)
            .collect();
        self.chooser.choose(&views)
    }

    #[allow(clippy::result_large_err)]
    fn submit_to_one(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.inflight() >= self.depth {
            return Err((Busy, io));
        }
        match self.choose() {
            Choice::Path(at) => self.queues[at].queue.submit(io),
            Choice::Full => Err((Busy, io)),
            Choice::NoPath => {
                let Some(path_queue) = self.queues.first_mut() else {
                    self.ended.push_back(io.complete(Status::Gone));
                    return Ok(());
                };
                self.waiting.extend(path_queue.queue.hold(io)?);
                Ok(())
            }
        }
    }

    fn poll_all(&mut self, now: Nanos, done: &mut Done) {
        for path_queue in &mut self.queues {
            path_queue.queue.poll(now, done);
        }
        for path_queue in &mut self.queues {
            if !path_queue.is_usable() {
                while let Some(io) = path_queue.queue.take_back() {
                    self.waiting.push_back(io);
                }
            }
        }
        self.send_waiting(now);
        while done.has_room()
            && let Some(completion) = self.ended.pop_front()
        {
            done.push(completion);
        }
        self.close_left();
        if self.is_only_path && self.queues.len() == 1 {
            self.update_mode();
        }
    }

    /// Gives waiting I/O to queues, or fails it.
    fn send_waiting(&mut self, now: Nanos) {
        while !self.waiting.is_empty() {
            match self.choose() {
                Choice::Path(at) => {
                    if let Some(io) = self.waiting.pop_front() {
                        self.queues[at].queue.accept(io);
                    }
                }
                Choice::Full => return self.no_path_since = None,
                Choice::NoPath => {
                    let since = *self.no_path_since.get_or_insert(now);
                    let limit = self.fast_io_fail;
                    let over = limit.is_some_and(|limit| now.since(since) >= limit);
                    if over || self.queues.iter().all(OpenPathQueue::is_hopeless) {
                        let failed = self.waiting.drain(..).map(|io| io.end(Status::Gone));
                        self.ended.extend(failed);
                    }
                    return;
                }
            }
        }
        if self.no_path_since.is_some() && self.queues.iter().any(OpenPathQueue::is_usable) {
            self.no_path_since = None;
        }
    }

    /// Closes the queues of detached paths once they have no I/O.
    fn close_left(&mut self) {
        let mut at = 0;
        while at < self.queues.len() {
            let path_queue = &self.queues[at];
            if !path_queue.path.is_leaving() || path_queue.queue.inflight() > 0 {
                at += 1;
                continue;
            }
            path_queue.publish(false);
            self.queues.remove(at);
            self.chooser.removed(at);
            self.fast_io_fail = fast_io_fail(&self.queues);
        }
    }

    #[cold]
    fn publish(&mut self, now: Nanos) {
        self.publish_at = now + PUBLISH;
        let active = matches!(self.chooser.policy, Policy::ActiveActive(_));
        let chosen = if self.are_several {
            self.chooser.current()
        } else {
            0
        };
        for (at, path_queue) in self.queues.iter().enumerate() {
            let is_current = path_queue.is_usable() && (at == chosen || active);
            path_queue.publish(is_current);
        }
        if self.retry_at.is_some_and(|at| now >= at) {
            self.adopt(now);
        }
    }
}

/// The longest time that I/O may wait for one of the queues; `None`: without limit.
fn fast_io_fail(queues: &[OpenPathQueue]) -> Option<Duration> {
    let mut limits = queues
        .iter()
        .map(|path_queue| path_queue.path.shared.config.options.fast_io_fail);
    limits.try_fold(Duration::ZERO, |longest, limit| Some(longest.max(limit?)))
}

impl Queue for PathQueues {
    #[inline]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.are_several {
            self.submit_to_one(io)
        } else {
            self.queues[0].queue.submit(io)
        }
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        if self.namespace.paths.version() != self.version {
            self.adopt(now);
        }
        let before = done.len();
        if self.are_several {
            self.poll_all(now, done);
        } else {
            self.queues[0].queue.poll(now, done);
        }
        if now >= self.publish_at {
            self.publish(now);
        }
        done.len() - before
    }

    fn abort(&mut self, token: Token) -> bool {
        if let Some(at) = self.waiting.iter().position(|io| io.token() == token)
            && let Some(io) = self.waiting.remove(at)
        {
            self.ended.push_back(io.end(Status::Aborted));
            return true;
        }
        self.queues
            .iter_mut()
            .any(|path_queue| path_queue.queue.abort(token))
    }

    #[inline]
    fn inflight(&self) -> usize {
        let sent: usize = self
            .queues
            .iter()
            .map(|path_queue| path_queue.queue.inflight())
            .sum();
        sent + self.waiting.len() + self.ended.len()
    }

    fn is_settled(&self) -> bool {
        self.waiting.is_empty()
            && self.ended.is_empty()
            && self.namespace.paths.version() == self.version
            && self
                .queues
                .iter()
                .all(|path_queue| path_queue.queue.is_settled())
    }

    /// Reservations belong to the host, on whichever path they arrive.
    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        let usable = self.queues.iter().position(OpenPathQueue::is_usable);
        match self.queues.get_mut(usable.unwrap_or(0)) {
            Some(path_queue) => path_queue.queue.reserve(request),
            None => Err(request),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        if !self.ended.is_empty() || self.namespace.paths.version() != self.version {
            return Idle::Busy;
        }
        let queues = self
            .queues
            .iter_mut()
            .map(|path_queue| path_queue.queue.arm(now));
        let idle = queues.fold(Idle::Quiet, Idle::and);
        if self.waiting.is_empty() {
            idle
        } else {
            idle.and(Idle::Until(now + LOOK))
        }
    }

    fn disarm(&mut self) {
        for path_queue in &mut self.queues {
            path_queue.queue.disarm();
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watch.as_fd())
    }
}

//! One I/O queue of a controller, as a [`nacre_bdev::Queue`] for a remote namespace. Remote bdevs
//! and `nacre perf` use one per core.
//!
//! ```text
//! Down ─▶ Dialling ─▶ Connecting ─▶ (Authenticating) ─▶ Live ─▶ Draining
//!  ▲                                                     │         │ no I/O in flight
//!  └─────────────────────────────────────────────────────┴─────────┘
//!     connection lost, command too slow, new association
//!
//! Draining: the association moves to another transport.
//! ```
//!
//! I/O in flight on a lost connection is sent again on the next one, in the order of submission.
//! I/O ends with [`Status::Gone`] if the controller has failed, if the namespace does not exist or
//! has another identity, or after [`HostOptions::fast_io_fail`] without a connection or without
//! access (ANA).

mod attempts;
mod connecting;
mod connection_wake;
mod failover;
mod reserve;
mod sleep;
mod waiting;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::reservation::Reserve;
use nacre_bdev::{Busy, Completion, Done, Io, Queue, Status, Token};
use nacre_hugepages::Pool;
use nacre_nvmf_wire::StatusCode;
use nacre_reactor::{EventSet, Idle, Nanos};
use slab::Slab;

use self::attempts::{Attempts, Failure, RECONNECT_DELAY};
use self::connection_wake::Watch;
use self::waiting::Waits;

use self::failover::PathState;
pub use self::failover::{Returned, Standing};
use super::link::Link;
use super::namespace::NamespaceInfo;
use super::options::{Dial, HostOptions, WantedQueue};
use super::pending::{Pending, own_data};
use super::queue::{CommandQueue, Finished};
use super::stats::IoStats;
use crate::transport::Closed;

/// How long I/O waits for a namespace that a live controller does not have. A target that restarts
/// may add its namespaces one by one.
const NAMESPACE_GRACE: Duration = Duration::from_secs(5);
/// Consecutive failed attempts after which the queue reports the association's transport as
/// unusable, if there is another transport.
const UNREACHABLE: u32 = 4;
/// Most retries of an I/O after a transient transport error.
const MAX_RESENDS: u8 = 3;
/// Interval at which outstanding commands are checked against [`HostOptions::io_timeout`].
const TIMEOUT_CHECK: Duration = Duration::from_millis(250);

/// The token of reservation commands. Tokens from here on are not I/O.
const RESERVE: u64 = u64::MAX - 1;
/// The token of the Connect command.
const CONNECT: u64 = u64::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueuePhase {
    Down {
        retry_at: Nanos,
    },
    Dialling {
        since: Nanos,
    },
    Connecting {
        since: Nanos,
    },
    Authenticating {
        since: Nanos,
    },
    Live,
    /// Live, but sends no new commands: the association moves.
    Draining,
}

/// One I/O queue on one core, connected to one namespace.
pub struct IoQueue {
    options: HostOptions,
    link: Arc<Link>,
    dial: Box<dyn Dial>,
    pool: Pool,
    qid: u16,
    nsid: u32,
    /// The namespace at the queue's first connection. I/O is never sent to another namespace that
    /// has got the same NSID.
    namespace: Option<NamespaceInfo>,
    waits: Waits,
    path: PathState,
    queue: Option<Box<CommandQueue>>,
    phase: QueuePhase,
    generation: u64,
    /// The generation of an association that this queue must not use again, because the target
    /// still has commands of this queue.
    spent: Option<u64>,
    attempts: Attempts,
    depth: usize,
    pending: Slab<Pending>,
    /// I/O that waits for the connection or for a free entry, in order of submission.
    unsent: VecDeque<usize>,
    reserving: Option<Box<reserve::HostReservation>>,
    completed: VecDeque<Completion>,
    next_order: u64,
    now: Nanos,
    check_at: Nanos,
    stats: IoStats,
    watch: Watch,
}

impl IoQueue {
    /// Creates queue `qid` (from 1) for namespace `nsid` of the controller behind `link`. `pool`:
    /// the buffers of the core that polls it, used for Connect and for I/O with several buffers.
    pub fn new(
        options: HostOptions,
        link: Arc<Link>,
        dial: Box<dyn Dial>,
        pool: Pool,
        (qid, nsid): (u16, u32),
        now: Nanos,
    ) -> std::io::Result<Self> {
        assert!(qid > 0, "queue 0 is the admin queue");
        let depth = usize::from(options.queue_entries.max(2)) - 1;
        Ok(Self {
            options,
            link,
            dial,
            pool,
            qid,
            nsid,
            namespace: None,
            waits: Waits::default(),
            path: PathState::default(),
            queue: None,
            phase: QueuePhase::Down { retry_at: now },
            generation: 0,
            spent: None,
            attempts: Attempts::default(),
            depth,
            pending: Slab::with_capacity(depth),
            unsent: VecDeque::with_capacity(depth),
            reserving: None,
            completed: VecDeque::with_capacity(depth),
            next_order: 0,
            now,
            check_at: now,
            stats: IoStats::default(),
            watch: Watch::new()?,
        })
    }

    /// Makes the queue add its connections to `set`, which [`Queue::wake_fd`] then returns. For
    /// owners of several queues, because Linux limits the nesting of epoll sets to five. Call this
    /// before the first connection.
    pub fn watched_by(mut self, set: &EventSet) -> std::io::Result<Self> {
        self.watch.join(set.share()?);
        Ok(self)
    }

    /// Makes the queue accept only this namespace, from its first connection on.
    pub fn expecting(mut self, namespace: NamespaceInfo) -> Self {
        self.namespace = Some(namespace);
        self
    }

    pub fn is_live(&self) -> bool {
        self.phase == QueuePhase::Live
    }

    pub fn qid(&self) -> u16 {
        self.qid
    }

    pub fn stats(&self) -> IoStats {
        let mut stats = self.stats;
        stats.activity.submitted += stats.activity.completions;
        if let Some(queue) = &self.queue {
            stats.activity.submitted += queue.outstanding() as u64;
            stats.activity.work_requests += queue.work_requests();
        }
        stats
    }

    /// The RDMA device of its connection; `None`: it has none, or is not connected.
    pub fn device(&self) -> Option<&str> {
        self.queue.as_ref()?.device()
    }

    /// Sends submitted I/O now, without receiving completions. For a caller that polls many queues
    /// before it polls this one again.
    #[inline]
    pub fn flush(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.flush();
        }
    }

    // The connection.

    #[inline]
    fn drive(&mut self, now: Nanos) {
        if self.phase == QueuePhase::Live
            && self.link.is_current(self.generation)
            && self.link.version() == self.path.version
            && self.waits.no_access_until.is_none()
            && now < self.check_at
        {
            return;
        }
        self.drive_slowly(self.link.generation(), now);
    }

    fn drive_slowly(&mut self, generation: Option<u64>, now: Nanos) {
        if self.link.has_failed() {
            self.disconnect(now);
            return self.fail_all();
        }
        if self.queue.is_some() && generation != Some(self.generation) {
            self.disconnect(now);
            // The association ended: connect to the next one without delay.
            self.attempts.in_a_row = 0;
            self.phase = QueuePhase::Down { retry_at: now };
        }
        match (self.link.is_moving(), self.phase) {
            (true, _) => return self.drain(now),
            // The association does not move after all.
            (false, QueuePhase::Draining) => {
                (self.phase, self.waits.away_since) = (QueuePhase::Live, None);
            }
            (false, _) => {}
        }
        let limit = self.options.connect_timeout;
        match self.phase {
            QueuePhase::Down { retry_at } if now >= retry_at => {
                if let Some(generation) = generation.filter(|_| generation != self.spent) {
                    self.start(generation, now);
                }
            }
            QueuePhase::Dialling { since } => {
                if self.queue.as_ref().is_some_and(|queue| queue.is_ready()) {
                    self.send_connect(now);
                } else if now.since(since) > limit {
                    self.disconnect(now);
                    self.not_connected("it takes too long to connect".into(), false);
                }
            }
            QueuePhase::Connecting { since } if now.since(since) > limit => {
                self.disconnect(now);
                self.not_connected("the answer to Connect takes too long".into(), false);
            }
            QueuePhase::Authenticating { since } if now.since(since) > limit => {
                self.disconnect(now);
                self.not_connected("authentication takes too long".into(), false);
            }
            QueuePhase::Authenticating { .. } => self.authenticate(now),
            QueuePhase::Live if self.link.version() != self.path.version => {
                self.namespaces_changed(now)
            }
            QueuePhase::Live if now >= self.check_at => self.check_time(now),
            _ => {}
        }
        self.check_away(now);
    }

    /// Closes the connection as soon as no I/O is in flight, for a move. New I/O waits.
    fn drain(&mut self, now: Nanos) {
        if self.phase == QueuePhase::Live {
            self.phase = QueuePhase::Draining;
        }
        let Some(queue) = &self.queue else { return };
        if self.phase == QueuePhase::Draining {
            if queue.outstanding() > 0 {
                return if now >= self.check_at {
                    self.check_time(now)
                };
            }
            self.stats.moves += 1;
        }
        self.phase = QueuePhase::Down { retry_at: now };
        self.disconnect(now);
        self.attempts.in_a_row = 0;
        self.phase = QueuePhase::Down { retry_at: now };
    }

    fn check_time(&mut self, now: Nanos) {
        self.check_at = now + TIMEOUT_CHECK;
        let (limit, qid) = (self.options.io_timeout, self.qid);
        let oldest = self.queue.as_ref().and_then(|queue| queue.oldest());
        if oldest.is_some_and(|since| now.since(since) > limit) {
            tracing::warn!(
                qid,
                ?limit,
                "a command took too long: resetting the controller"
            );
            self.disconnect(now);
        }
    }

    fn start(&mut self, generation: u64, now: Nanos) {
        let link = self.link.state();
        let Some(namespace) = link.namespaces.get(&self.nsid) else {
            return self.without_namespace(now);
        };
        let known = self.namespace.get_or_insert_with(|| namespace.clone());
        if let Some(why) = known.difference(namespace) {
            if self.attempts.in_a_row == 0 {
                let nsid = self.nsid;
                tracing::error!(nsid, why, "the namespace is not used any more");
            }
            self.fail_all();
            return self.retry_later(now);
        }
        known.blocks = namespace.blocks;
        self.waits.missing_since = None;
        self.path.access = link.access(namespace);
        self.generation = generation;
        let entries = link.queue_entries.min(self.options.queue_entries);
        let wanted = WantedQueue {
            qid: self.qid,
            entries,
            cntlid: link.cntlid,
            transport: link.transport,
        };
        match self.dial.dial_wanted(&wanted) {
            Ok(transport) => {
                let mut queue = Box::new(CommandQueue::new(transport, entries));
                queue
                    .transport()
                    .set_in_capsule_bytes(link.in_capsule_bytes);
                self.watch.start(queue.transport());
                self.queue = Some(queue);
                self.link.enter();
                self.phase = QueuePhase::Dialling { since: now };
            }
            Err(error) => {
                tracing::warn!(qid = self.qid, %error, "cannot connect an I/O queue");
                self.retry_later(now);
                self.not_connected(error.to_string(), false);
            }
        }
    }

    fn without_namespace(&mut self, now: Nanos) {
        let since = *self.waits.missing_since.get_or_insert(now);
        if now.since(since) >= NAMESPACE_GRACE {
            self.fail_all();
        }
        let retry_at = now + RECONNECT_DELAY;
        self.phase = QueuePhase::Down { retry_at };
    }

    fn retry_later(&mut self, now: Nanos) {
        let retry_at = now + self.attempts.next_delay();
        self.phase = QueuePhase::Down { retry_at };
    }

    fn not_connected(&mut self, why: String, refused: bool) {
        self.give_up_transport(&why);
        self.attempts.last = Some(Failure { why, refused });
    }

    /// The reason of the latest failed attempt to connect; `None` after a success.
    pub fn failure(&self) -> Option<&str> {
        self.attempts.last.as_ref().map(|last| last.why.as_str())
    }

    /// The target's reason for refusing this queue; `None` while another transport can be tried.
    pub fn refusal(&self) -> Option<&str> {
        let paths = self.options.paths.as_ref();
        let falls_back = paths.is_some_and(|paths| {
            paths.fallback.is_some() && self.link.state().transport == Some(paths.preferred)
        });
        let refused = self.attempts.last.as_ref().filter(|last| last.refused);
        refused
            .filter(|_| !falls_back)
            .map(|last| last.why.as_str())
    }

    /// Reports that this queue cannot connect although its controller is live, so that the
    /// controller changes to the other transport, if there is one.
    fn give_up_transport(&mut self, why: &str) {
        let paths = self.options.paths.as_ref();
        let Some(paths) = paths.filter(|paths| paths.fallback.is_some()) else {
            return;
        };
        let here = self.link.generation() == Some(self.generation);
        if here
            && self.attempts.in_a_row >= UNREACHABLE
            && self.link.state().transport == Some(paths.preferred)
        {
            self.attempts.in_a_row = 0;
            self.link.set_unreachable(why.to_owned());
        }
    }

    /// Drops the connection. I/O in flight waits for the next one.
    fn disconnect(&mut self, now: Nanos) {
        let Some(mut queue) = self.queue.take() else {
            return;
        };
        let activity = &mut self.stats.activity;
        activity.submitted += queue.outstanding() as u64;
        activity.work_requests += queue.work_requests();
        self.watch.stop(queue.transport());
        queue.transport().close();
        while let Some(command) = queue.transport().reclaim() {
            let token = queue.token_of(command.sqe.cid());
            if let Some(pending) = token.and_then(|t| self.pending.get_mut(t as usize))
                && let Some(buf) = command.read
            {
                pending.returned(buf);
            }
        }
        let mut stuck = self.reserving.as_ref().is_some_and(|r| r.is_sent());
        for token in queue.tokens().filter(|token| *token < RESERVE) {
            let index = token as usize;
            if self.pending[index].is_sent() {
                self.pending[index].lost();
                self.unsent.push_back(index);
                self.stats.resent += 1;
                stuck = true;
            }
        }
        drop(queue);
        self.link.leave();
        self.sort_unsent();
        self.end_reserve(true);
        if matches!(self.phase, QueuePhase::Live | QueuePhase::Draining) {
            self.stats.losses += 1;
            // The controller counts the end of the association itself.
            if self.link.generation() == Some(self.generation) {
                self.link.count_loss();
            }
        }
        // The target must not execute the old commands after the repeated ones. Only the end of the
        // whole association makes it drop them.
        if stuck && self.link.generation() == Some(self.generation) {
            self.spent = Some(self.generation);
            self.link.request_reset();
        }
        self.retry_later(now);
    }

    /// Sorts the unsent commands by order of submission.
    fn sort_unsent(&mut self) {
        let pending = &self.pending;
        let unsent = self.unsent.make_contiguous();
        unsent.sort_unstable_by_key(|index| pending[*index].order);
    }

    /// Fails all I/O that was not sent, or leaves it to the other paths.
    fn fail_all(&mut self) {
        self.path.gave_up = true;
        while !self.path.fails_over
            && let Some(index) = self.unsent.pop_front()
        {
            self.complete(index, Status::Gone);
        }
        self.end_reserve(false);
    }

    // I/O.

    #[inline]
    fn send_unsent(&mut self, now: Nanos) {
        while self.phase == QueuePhase::Live
            && self.waits.no_access_until.is_none()
            && let Some(&index) = self.unsent.front()
        {
            let Some(queue) = &mut self.queue else { return };
            let pending = &mut self.pending[index];
            if queue.room() < pending.commands() {
                return;
            }
            self.unsent.pop_front();
            match pending.refusal() {
                Some(status) => self.complete(index, status),
                None => pending.send(queue, index as u64, self.nsid, now),
            }
        }
    }

    /// Handles the completion of a command.
    #[inline]
    fn finished(&mut self, one: Finished, done: &mut Done) {
        let index = one.token as usize;
        let Some(status) = self.pending[index].finished(one) else {
            return;
        };
        let pending = &mut self.pending[index];
        if status.code() == StatusCode::TRANSIENT_TRANSPORT_ERROR && pending.resends < MAX_RESENDS {
            pending.resends += 1;
            pending.lost();
            self.stats.resent += 1;
            self.unsent.push_back(index);
            return;
        }
        if self.goes_back(index, status) || self.waits_for_access(index, status) {
            return;
        }
        let pending = &mut self.pending[index];
        self.stats.copied_bytes += pending.copied();
        pending.count(status, &mut self.stats);
        let completion = pending.complete(status);
        self.pending.remove(index);
        if self.completed.is_empty() && done.has_room() {
            done.push(completion);
        } else {
            self.completed.push_back(completion);
        }
    }

    /// Completes an I/O that has no command at the target.
    fn complete(&mut self, index: usize, status: Status) {
        let completion = self.pending[index].end(status);
        self.pending.remove(index);
        self.completed.push_back(completion);
    }
}

impl Queue for IoQueue {
    #[inline]
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        // Count completions that were not polled yet, which bounds their list.
        if self.pending.len() + self.completed.len() >= self.depth {
            return Err((Busy, io));
        }
        let own = match own_data(&io, &self.pool) {
            Ok(own) => own,
            Err(Status::Retry) => return Err((Busy, io)),
            Err(status) => {
                self.completed.push_back(io.complete(status));
                return Ok(());
            }
        };
        let place = self.pending.vacant_entry();
        let index = place.key();
        let pending = place.insert(Pending::new(io, own, self.next_order));
        self.next_order += 1;
        match &mut self.queue {
            Some(queue)
                if self.phase == QueuePhase::Live
                    && self.waits.no_access_until.is_none()
                    && self.unsent.is_empty()
                    && queue.room() >= pending.commands() =>
            {
                pending.send(queue, index as u64, self.nsid, self.now);
            }
            _ => {
                self.stats.activity.queued += 1;
                self.unsent.push_back(index);
            }
        }
        Ok(())
    }

    #[inline]
    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let before = done.len();
        self.now = now;
        self.stats.activity.polls += 1;
        self.drive(now);
        while done.has_room()
            && let Some(completion) = self.completed.pop_front()
        {
            done.push(completion);
        }
        if !self.unsent.is_empty() {
            self.send_unsent(now);
        }
        if self.reserving.is_some() {
            self.send_reserve(now);
        }
        if let Some(mut queue) = self.queue.take() {
            // At most one: Connect, or a reservation command after it.
            let mut own = None;
            let completions = queue.poll(now, |one| {
                if one.token >= RESERVE {
                    own = Some(one)
                } else {
                    self.finished(one, done)
                }
            });
            if completions > 0 {
                self.stats.activity.busy_polls += 1;
                self.stats.activity.completions += completions as u64;
            }
            let closed = queue.closed().cloned();
            self.queue = Some(queue);
            match own {
                Some(one) if one.token == CONNECT => self.connected(&one.cqe, now),
                Some(one) => self.reserved(one),
                None => {}
            }
            if let Some(why) = closed {
                if why != Closed::Local {
                    tracing::warn!(qid = self.qid, %why, "an I/O queue was lost");
                }
                let connecting = matches!(
                    self.phase,
                    QueuePhase::Dialling { .. }
                        | QueuePhase::Connecting { .. }
                        | QueuePhase::Authenticating { .. }
                );
                self.disconnect(now);
                if connecting {
                    let refused = matches!(why, Closed::Refused(_));
                    self.not_connected(why.to_string(), refused);
                }
            }
        }
        done.len() - before
    }

    /// Aborts an I/O that was not sent yet. An I/O at the target completes normally, or fails when
    /// its time limit ends the connection.
    fn abort(&mut self, token: Token) -> bool {
        let Some((index, pending)) = self.pending.iter().find(|(_, p)| p.token() == token) else {
            return false;
        };
        if pending.is_sent() {
            return false;
        }
        self.unsent.retain(|i| *i != index);
        self.complete(index, Status::Aborted);
        true
    }

    fn inflight(&self) -> usize {
        self.pending.len() + self.completed.len()
    }

    /// False also for a queue without I/O that must close its connection for a move, or connect
    /// again: the controller waits for this.
    fn is_settled(&self) -> bool {
        let follows = match self.phase {
            QueuePhase::Live => self.link.is_current(self.generation),
            QueuePhase::Down { .. } => self.link.is_moving() || self.link.generation().is_none(),
            QueuePhase::Dialling { .. }
            | QueuePhase::Connecting { .. }
            | QueuePhase::Authenticating { .. }
            | QueuePhase::Draining => false,
        };
        follows && self.inflight() == 0
    }

    fn reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        self.take_reserve(request)
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        if !self.completed.is_empty() {
            return Idle::Busy;
        }
        if self
            .reserving
            .as_ref()
            .is_some_and(|r| r.may_be_sent(self.phase == QueuePhase::Live))
        {
            return Idle::Busy;
        }
        let idle = self.arm_connection(now);
        match self.away_at() {
            Some(at) => idle.and(Idle::Until(at)),
            None => idle,
        }
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watch.fd())
    }
}

/// Releases the buffers that the transport still has.
impl Drop for IoQueue {
    fn drop(&mut self) {
        if let Some(mut queue) = self.queue.take() {
            self.watch.stop(queue.transport());
            self.link.leave();
        }
    }
}

//! A group: all queue pairs of one core, driven turn by turn.
//!
//! ```text
//!              Transport::poll                     Queue::submit
//!   capsule ──────────────────▶ decode ─▶ buffer ─▶ fetch ─▶ device
//!                                                              │ Queue::poll
//!   response ◀────────────────────── respond ◀─────────────────┘
//!              Transport::flush
//! ```
//!
//! Every command ends in one place, [`QueuePair::conclude`]. A command that has to wait is in a
//! list with a bound (for a buffer: the group's list; for room in a device: the device's list) and
//! is retried each turn. A host sees that as latency, never as an error.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_bdev::{Completion, Done};
use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use nacre_reactor::{EventSet, Idle, Nanos, Poller, Repeats, Work};

use crate::queues::decode::{self, Plan, Transfer};
use crate::queues::device::{self, Devices};
use crate::queues::queue_pair::{QueuePair, Stage};
use crate::queues::request::{NoRoom, Step};
use crate::queues::reservation::Reserving;
use crate::queues::waiting::{current, make_room, waits_for_buffer};
use crate::subsystems::association::Phase;
use crate::subsystems::core_handle::GroupHandle;
use crate::subsystems::core_handle::ReqIndex;
use crate::subsystems::core_handle::ReqRef;
use crate::subsystems::namespace::Namespace;
use crate::subsystems::target::Target;
use crate::transport::{CloseWhy, ConnId, Event, Events, Pools, Transport, TransportType};

/// The log repeats why a host is refused no sooner.
const SAID_AGAIN: Duration = Duration::from_secs(60);

/// A transport's I/O half on this core.
pub(super) struct Port {
    pub kind: TransportType,
    pub io: Box<dyn Transport>,
    /// Queue pair by connection index.
    pub queues: Vec<Option<(ConnId, u32)>>,
}

/// Sizes of a group's fixed lists.
#[derive(Debug, Clone, Copy)]
pub struct GroupConfig {
    /// Most queue pairs on this core.
    pub max_queues: usize,
    /// Most events and completions taken per turn and source.
    pub batch: usize,
}

impl Default for GroupConfig {
    fn default() -> GroupConfig {
        GroupConfig {
            max_queues: 16_384,
            batch: 512,
        }
    }
}

/// The queue pairs of one core.
pub struct Group {
    pub(crate) target: Arc<Target>,
    pub(crate) handle: GroupHandle,
    pub(crate) pools: Pools,
    /// Largest in-capsule data of a queue that takes it into a buffer of the core, so far.
    pub(super) in_capsule_bytes: usize,
    pub(super) wake: Arc<dyn Fn() + Send + Sync>,
    pub(super) config: GroupConfig,
    pub(super) ports: Vec<Port>,
    pub(crate) queues: Vec<Option<Box<QueuePair>>>,
    pub(super) free_queues: Vec<u32>,
    pub(super) next_generation: u32,
    pub(crate) devices: Devices,
    /// A view changed or a queue pair went: some device may be unused now.
    pub(super) devices_stale: bool,
    /// I/O commands that wait for a buffer, oldest first.
    pub(crate) starved: VecDeque<ReqRef>,
    /// Admin and fabrics commands that do. They do not stand behind I/O.
    pub(crate) starved_admin: VecDeque<ReqRef>,
    /// Reservation commands that wait for something.
    pub(crate) reserving: Reserving,
    events: Events,
    done: Done,
    /// Refused Connects by host and reason, for the log.
    pub(super) refusals: Repeats<(String, String)>,
    pub(super) upkeep_at: Nanos,
    pub(super) sleepers: EventSet,
}

impl Group {
    /// The group of `core` (counted from 0, below [`Target::cores`]); `wake` wakes its reactor.
    pub fn new(
        target: Arc<Target>,
        core: usize,
        pools: Pools,
        wake: Arc<dyn Fn() + Send + Sync>,
        config: GroupConfig,
    ) -> std::io::Result<Group> {
        assert!(
            core < target.cores(),
            "core {core} of a target for {}",
            target.cores()
        );
        let handle = GroupHandle::new(core, Arc::clone(&wake));
        target.add_group(handle.clone());
        // Plugs that were there before.
        handle.attend();
        Ok(Group {
            target,
            handle,
            pools,
            in_capsule_bytes: 0,
            wake,
            config,
            ports: Vec::new(),
            queues: Vec::new(),
            free_queues: Vec::new(),
            next_generation: 0,
            devices: Devices::new(core),
            devices_stale: false,
            starved: VecDeque::new(),
            starved_admin: VecDeque::new(),
            reserving: Reserving::default(),
            events: Events::with_capacity(config.batch),
            done: Done::with_capacity(config.batch),
            refusals: Repeats::new(SAID_AGAIN),
            upkeep_at: Nanos::ZERO,
            sleepers: EventSet::new()?,
        })
    }

    /// One turn.
    pub fn turn(&mut self, now: Nanos) -> u32 {
        let mut did = 0;
        if self.handle.has_messages() {
            did += self.take_messages(now);
        }
        for port in 0..self.ports.len() {
            did += self.poll_port(port, now);
        }
        did += self.poll_devices(now);
        if !self.reserving.is_idle() {
            did += self.reservation_turn(now);
        }
        if !self.starved_admin.is_empty() {
            did += self.feed(now, |group| &mut group.starved_admin);
        }
        if !self.starved.is_empty() {
            did += self.feed(now, |group| &mut group.starved);
        }
        if now >= self.upkeep_at {
            self.upkeep(now);
        }
        for port in &mut self.ports {
            port.io.flush(now);
        }
        did
    }

    fn poll_port(&mut self, port: usize, now: Nanos) -> u32 {
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        self.ports[port].io.poll(now, &self.pools, &mut events);
        let count = events.len() as u32;
        for event in events.drain() {
            self.handle_event(port, event, now);
        }
        self.events = events;
        count
    }

    #[inline]
    fn handle_event(&mut self, port: usize, event: Event, now: Nanos) {
        match event {
            Event::Capsule { conn, sqe, data } => {
                if let Some(q) = self.queue_of(port, conn) {
                    self.capsule(q, sqe, data, now);
                }
            }
            Event::Fetched { conn, tag, data } => {
                if let Some(q) = self.live_queue_of(port, conn) {
                    self.queue(q).requests[tag.index].data = Some(data);
                    self.fetch_ended(q, tag.index);
                    self.execute(q, tag.index, now);
                    self.fetch_next(q, now);
                }
            }
            Event::FetchDamaged { conn, tag } => {
                if let Some(q) = self.live_queue_of(port, conn) {
                    self.fetch_ended(q, tag.index);
                    self.finish(q, tag.index, StatusCode::TRANSIENT_TRANSPORT_ERROR, now);
                    self.fetch_next(q, now);
                }
            }
            Event::FetchRefused { conn, tag, status } => {
                if let Some(q) = self.live_queue_of(port, conn) {
                    self.fetch_ended(q, tag.index);
                    self.finish(q, tag.index, status, now);
                    self.fetch_next(q, now);
                }
            }
            Event::CapsuleDamaged { conn, sqe } => {
                if let Some(q) = self.live_queue_of(port, conn) {
                    self.fused_half_refused(q, &sqe, now);
                    self.refuse(q, sqe, StatusCode::TRANSIENT_TRANSPORT_ERROR);
                }
            }
            Event::Opened {
                conn,
                listener,
                local,
                peer,
            } => {
                self.open_queue(port, conn, (listener, local, peer), now);
            }
            Event::Closed { conn, why } => {
                if let Some(q) = self.queue_of(port, conn) {
                    self.connection_closed(q, &why, now);
                }
            }
        }
    }

    /// A command arrived.
    fn capsule(&mut self, q: u32, sqe: Sqe, data: Option<Buf>, now: Nanos) {
        let qp = self.queue(q);
        if qp.stage == Stage::Ending {
            return;
        }
        let data = match self.at_once(q, &sqe, data, now) {
            Ok(()) => return,
            Err(data) => data,
        };
        let qp = self.queue(q);
        let mut taken = qp.requests.begin(sqe, now);
        if taken == Err(NoRoom::DuplicateId) && qp.forget_event_request(&sqe) {
            taken = qp.requests.begin(sqe, now);
        }
        let index = match taken {
            Ok(index) => index,
            Err(NoRoom::DuplicateId) => {
                self.fused_half_refused(q, &sqe, now);
                return self.refuse(q, sqe, StatusCode::COMMAND_ID_CONFLICT);
            }
            Err(NoRoom::QueueOverrun) => {
                tracing::warn!(peer = %qp.peer, qid = qp.qid, entries = qp.entries, "host overran its submission queue");
                return self.close_queue(q, CloseWhy::Now, now);
            }
        };
        qp.requests[index].data = data;
        if qp.stage == Stage::Fresh {
            return self.first_command(q, index, now);
        }
        if let Some(association) = &qp.association {
            association.touch();
        }
        if qp.is_admin() {
            return self.admin_command(q, index, now);
        }
        self.io_command(q, index, now);
    }

    fn io_command(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        let qp = self.queue(q);
        let stale = qp.refresh_view();
        let sqe = qp.requests[index].sqe;
        if stale {
            self.view_changed(q);
        }
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        if sqe.is_fabrics() {
            return self.fabrics_command(q, index, now);
        }
        match qp
            .association
            .as_ref()
            .map_or(Phase::Closing, |a| a.phase())
        {
            Phase::Ready => {}
            // The connection is about to be closed: the host will send it again on the next one.
            Phase::Closing => {
                qp.requests[index].data = None;
                return qp.requests[index].step = Step::Held;
            }
            Phase::Connected => {
                return self.finish(q, index, StatusCode::COMMAND_SEQUENCE_ERROR, now);
            }
        }
        let plan = match decode::decode(&sqe, &qp.view, &qp.limits) {
            Ok(plan) => plan,
            Err(status) => {
                if !self.pair_fused(q, index, false, now) {
                    return;
                }
                return self.finish(q, index, status, now);
            }
        };
        let namespace = qp.view.get(sqe.nsid()).map_or(0, |n| n.serial);
        let request = &mut qp.requests[index];
        (request.plan, request.namespace) = (plan, namespace);
        let unfused = sqe.fuse() == Fuse::Normal && qp.fused.is_none();
        if unfused && self.starved.is_empty() && qp.has_all(index) {
            return self.run_io(q, index, now);
        }
        if !unfused && !self.pair_fused(q, index, true, now) {
            return;
        }
        self.gather(q, index, now);
    }

    /// A queue sees other namespaces than before.
    #[cold]
    pub(super) fn view_changed(&mut self, q: u32) {
        self.devices_stale = true;
        let qp = self.queue(q);
        if qp.is_admin() || qp.stage != Stage::Live {
            return;
        }
        let in_place = qp.view.iter().all(|namespace| namespace.immediate);
        if std::mem::replace(&mut qp.in_place, in_place) != in_place {
            qp.was_in_place |= !in_place;
            let (port, conn) = (qp.transport, qp.conn);
            self.port(port).set_in_place(conn, in_place);
        }
    }

    /// Gets the command its buffer and the host's data, which it needs before it can run. Commands
    /// that wait for a buffer get theirs in the order of arrival; a command that has its data does
    /// not wait with them.
    pub(crate) fn gather(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        self.gather_or_wait(q, index, true, now);
    }

    /// `fresh`: it has not waited yet, so others that have come first.
    fn gather_or_wait(&mut self, q: u32, index: ReqIndex, fresh: bool, now: Nanos) {
        let qp = self.queue_ref(q);
        let is_io = !qp.is_admin() && qp.stage != Stage::Fresh;
        let must_queue = is_io && !self.starved.is_empty() && qp.requests[index].data.is_none();
        if must_queue || !self.try_gather(q, index, fresh, now) {
            self.queue(q).requests[index].step = Step::Buffer;
            let waiting = self.name_of(q, index);
            let queues = &self.queues;
            let list = if is_io {
                &mut self.starved
            } else {
                &mut self.starved_admin
            };
            make_room(list, |known| waits_for_buffer(queues, known));
            list.push_back(waiting);
        }
    }

    /// `false`: there is no buffer for it now.
    fn try_gather(&mut self, q: u32, index: ReqIndex, fresh: bool, now: Nanos) -> bool {
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        let request = &qp.requests[index];
        let (bytes, from_host) = match request.plan.transfer(&request.sqe) {
            Transfer::None => {
                self.execute(q, index, now);
                return true;
            }
            Transfer::FromHost(bytes) => (bytes, true),
            Transfer::ToHost(bytes) => (bytes, false),
        };
        if from_host && let Some(data) = &request.data {
            if qp.was_in_place && !qp.in_place && !self.pools.io.owns(data) {
                let Some(copy) = copy_of(data, &self.pools.io) else {
                    return false;
                };
                let counts = self.handle.counts();
                counts
                    .copied_bytes
                    .fetch_add(copy.len() as u64, Ordering::Relaxed);
                qp.requests[index].data = Some(copy);
            }
            self.execute(q, index, now);
            return true;
        }
        if from_host && matches!(request.sqe.sgl(), Ok(Sgl::InCapsule { .. })) {
            self.finish(q, index, StatusCode::SGL_OFFSET_INVALID.with_dnr(), now);
            return true;
        }
        if !from_host && qp.lends(index) {
            self.execute(q, index, now);
            return true;
        }
        let others_first = fresh && !qp.unfetched.is_empty();
        if from_host && (others_first || !qp.may_fetch(bytes as usize)) {
            qp.requests[index].step = Step::Buffer;
            qp.unfetched.push_back(index);
            return true;
        }
        let buf = match request.plan {
            Plan::Admin { .. } => self.pools.for_admin(bytes as usize),
            _ if from_host => self.buffer_to_fetch(bytes as usize),
            _ => self.pools.io.acquire(bytes as usize),
        };
        let Some(buf) = buf else {
            return false;
        };
        let qp = self.queues[q as usize].as_mut().expect("queue pair");
        if from_host {
            qp.requests[index].step = Step::Fetching;
            qp.fetching += bytes as usize;
            let (tag, sqe) = (qp.tag(index), qp.requests[index].sqe);
            self.ports[qp.transport].io.fetch(qp.conn, tag, &sqe, buf);
        } else {
            qp.requests[index].data = Some(buf);
            self.execute(q, index, now);
        }
        true
    }

    /// R2T data can queue behind in-capsule data on the same connection. Keep one buffer free for
    /// the latter, or both deadlock.
    fn buffer_to_fetch(&self, bytes: usize) -> Option<Buf> {
        let buf = self.pools.io.acquire_beside(bytes, self.in_capsule_bytes);
        // All others are with devices, and come back.
        let alone = || {
            let mut queues = self.queues.iter().flatten();
            !queues.any(|qp| qp.fetching > 0 && qp.stage != Stage::Ending)
        };
        match buf {
            None if alone() => self.pools.io.acquire(bytes),
            buf => buf,
        }
    }

    /// The transport has fetched the data of a command, or has not and will not.
    fn fetch_ended(&mut self, q: u32, index: ReqIndex) {
        let qp = self.queue(q);
        qp.fetching -= qp.bytes_from_host(index);
    }

    /// Has the transport fetch for commands that waited until it has fetched for others.
    fn fetch_next(&mut self, q: u32, now: Nanos) {
        while let Some(qp) = self.queues[q as usize].as_mut()
            && qp.stage == Stage::Live
            && let Some(&index) = qp.unfetched.front()
        {
            // Otherwise it has ended meanwhile.
            let waits = qp.requests[index].step == Step::Buffer;
            if waits && !qp.may_fetch(qp.bytes_from_host(index)) {
                return;
            }
            qp.unfetched.pop_front();
            if waits {
                self.gather_or_wait(q, index, false, now);
            }
        }
    }

    /// The command has its buffer and its data: runs it.
    pub(crate) fn execute(&mut self, q: u32, index: ReqIndex, now: Nanos) {
        let qp = self.queue(q);
        if qp.stage == Stage::Fresh {
            return self.run_connect(q, index, now);
        }
        if qp.is_admin() {
            return self.run_admin(q, index, now);
        }
        if qp.requests[index].abort {
            return self.finish(q, index, StatusCode::ABORT_REQUESTED, now);
        }
        let failed = qp.requests[index].status;
        if !failed.is_success() {
            return self.finish(q, index, failed, now);
        }
        qp.requests[index].step = Step::Executing;
        if let Plan::Reservation(ask) = qp.requests[index].plan {
            return self.run_reservation(q, index, ask, now);
        }
        if qp.requests[index].sqe.fuse() != Fuse::Normal {
            return self.run_fused(q, index, now);
        }
        self.run_io(q, index, now);
    }

    /// Requests of a list that waited for a buffer, in order, while there are buffers.
    fn feed(&mut self, now: Nanos, list: fn(&mut Group) -> &mut VecDeque<ReqRef>) -> u32 {
        let mut fed = 0;
        while let Some(&first) = list(self).front() {
            let waits = waits_for_buffer(&self.queues, &first);
            if waits && !self.try_gather(first.queue, first.request, false, now) {
                break;
            }
            list(self).pop_front();
            fed += u32::from(waits);
        }
        fed
    }

    fn poll_devices(&mut self, now: Nanos) -> u32 {
        let mut did = 0;
        for at in 0..self.devices.busy() {
            let slot = self.devices.busy_at(at);
            let mut done = std::mem::replace(&mut self.done, Done::with_capacity(0));
            self.devices.poll(slot, now, &mut done);
            did += done.len() as u32;
            for completion in done.drain() {
                self.device_completed(completion, now);
            }
            self.done = done;
            did += self.resubmit(slot, now);
        }
        self.devices.settle(did > 0);
        did
    }

    // Lookups.

    pub(crate) fn queue(&mut self, q: u32) -> &mut QueuePair {
        self.queues[q as usize].as_mut().expect("queue pair")
    }

    pub(crate) fn queue_ref(&self, q: u32) -> &QueuePair {
        self.queues[q as usize].as_ref().expect("queue pair")
    }

    pub(crate) fn port(&mut self, port: usize) -> &mut dyn Transport {
        self.ports[port].io.as_mut()
    }

    pub(crate) fn port_kind(&self, port: usize) -> TransportType {
        self.ports[port].kind
    }

    fn queue_of(&self, port: usize, conn: ConnId) -> Option<u32> {
        match self.ports[port].queues.get(conn.index as usize) {
            Some(Some((known, q))) if *known == conn => Some(*q),
            _ => None,
        }
    }

    fn live_queue_of(&self, port: usize, conn: ConnId) -> Option<u32> {
        self.queue_of(port, conn)
            .filter(|q| self.queue_ref(*q).stage != Stage::Ending)
    }

    pub(crate) fn is_current(&self, what: ReqRef) -> bool {
        current(&self.queues, &what).is_some()
    }

    pub(crate) fn name_of(&self, q: u32, index: ReqIndex) -> ReqRef {
        let qp = self.queue_ref(q);
        ReqRef {
            queue: q,
            generation: qp.generation,
            request: index,
            begun: qp.requests[index].begun(),
        }
    }

    fn device_completed(&mut self, completion: Completion, now: Nanos) {
        let (q, index, child) = device::split_token(completion.token);
        self.child_done(q, index, child, completion, now);
    }

    /// This core's queue on a namespace's bdev.
    pub(crate) fn open_device(&mut self, namespace: &Arc<Namespace>, now: Nanos) -> Option<usize> {
        self.devices
            .slot_of(namespace, &self.pools.io, &self.sleepers, now)
    }

    /// Bdev queues that this core holds open.
    pub fn devices_open(&self) -> usize {
        self.devices.open()
    }

    /// Queue pairs on this core.
    pub fn queue_pairs(&self) -> usize {
        self.queues.len() - self.free_queues.len()
    }
}

/// Data of a command in a buffer that its device may keep for as long as it likes.
#[cold]
fn copy_of(data: &Buf, pool: &Pool) -> Option<Buf> {
    let mut copy = pool.acquire(data.len())?;
    copy.bytes_mut()?.copy_from_slice(data);
    Some(copy)
}

impl Poller for Group {
    fn name(&self) -> &str {
        "nvmf"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        match self.turn(now) {
            0 => Work::None,
            did => Work::Did(did),
        }
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        let starved = !self.starved.is_empty() || !self.starved_admin.is_empty();
        if self.handle.has_messages() || starved {
            return Idle::Busy;
        }
        let mut idle = self.devices.arm(now);
        for port in &mut self.ports {
            idle = idle.and(port.io.arm(now));
        }
        // The last queue pair may leave devices behind, which the upkeep closes.
        if self.queue_pairs() > 0 || self.devices.open() > 0 {
            idle = idle.and(Idle::Until(self.upkeep_at));
        }
        idle
    }

    fn disarm(&mut self) {
        self.devices.disarm();
        for port in &mut self.ports {
            port.io.disarm();
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.sleepers.as_raw_fd()]
    }
}

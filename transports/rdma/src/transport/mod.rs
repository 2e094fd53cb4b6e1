//! The target side of the RDMA transport on one core. It polls completions and passes commands to
//! the target. It posts the RDMA READs, WRITEs and responses of all connections of the core.

mod ending;
mod incoming;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::transport::{
    CloseWhy, Closed, ConnId, Event, Events, Pools, QueueParams, ReqTag, Response, Transport,
    TransportCaps,
};
use nacre_nvmf_wire::{Sgl, Sqe};
use nacre_reactor::{EventSet, Idle, Nanos};
use nacre_transport_rdma_verbs::{Batch, CmId, Completion, DeviceId, Queues, Receiver, WcOpcode};
use zerocopy::FromBytes;

use crate::conn::Conn;
use crate::core_memory::CoreMemory;
use crate::sgl;
use crate::shared::{CoreSlot, Shared, ToControl, ToCore};
use crate::stats::{Stats, Timed, add};

/// Number of free receive slots that justify a doorbell before the turn ends.
const REFILL: usize = 32;

/// The connections of one device by queue pair number. Numbers of different devices can be equal.
type ByNumber = HashMap<u32, u32, BuildHasherDefault<NumberHasher>>;

/// A hasher: one multiplication spreads queue pair numbers well enough.
#[derive(Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((*byte).into());
        }
    }

    #[inline]
    fn write_u32(&mut self, number: u32) {
        self.0 = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

struct Device {
    id: DeviceId,
    queues: Queues,
    receiver: Option<Receiver>,
    by_number: ByNumber,
    conns: usize,
    /// The completion queue failed, and its connections were closed.
    dead: bool,
    /// The device reports when an ending queue pair has taken its last shared receive; not all
    /// devices do.
    reports_last_receive: bool,
    /// See [`crate::shared::Domain`].
    may_invalidate: Arc<AtomicBool>,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    conn: Option<Box<Conn>>,
}

/// All RDMA connections of one core, as a [`Transport`] of the target.
pub struct RdmaTransport {
    shared: Arc<Shared>,
    core: Arc<CoreSlot>,
    caps: TransportCaps,
    // Fields drop in order: connections before the receivers that their queue pairs use.
    slots: Vec<Slot>,
    free: Vec<u32>,
    count: usize,
    by_id: HashMap<CmId, u32>,
    devices: Vec<Option<Device>>,
    /// Counters by device index. They survive a removal of the device.
    stats: Vec<Arc<Stats>>,
    batch: Batch,
    /// Connections with requests to post.
    dirty: Vec<u32>,
    /// Connections with events to report, or an end to complete.
    attention: Vec<u32>,
    looked_at: Vec<u32>,
    next_deadline: Nanos,
    /// A host was refused for lack of space: until this time, unconnected queues have a shorter
    /// deadline.
    crowded_until: Nanos,
    now: Nanos,
    wakes: EventSet,
    headers: Pool,
    messages: Pool,
    data: Option<Pool>,
    /// The number of receives that may be posted at the same time.
    receives: usize,
    /// Connections whose own receives wait for buffers, which commands of other connections hold.
    starved: VecDeque<u32>,
}

impl RdmaTransport {
    pub(crate) fn new(shared: Arc<Shared>, core: Arc<CoreSlot>) -> std::io::Result<Self> {
        let config = &shared.config;
        let CoreMemory {
            messages,
            headers,
            data,
            receives,
        } = CoreMemory::of(config, shared.devices);
        let prepared = shared.prepared().pop();
        let arena = prepared.map_or_else(|| shared.allocate_core_memory(), Ok)?;
        let carve =
            |class: &[ClassSpec]| Pool::on_arena(&arena, class).map_err(std::io::Error::other);
        Ok(Self {
            caps: config.caps(config.in_capsule_data_size),
            slots: Vec::new(),
            free: Vec::new(),
            count: 0,
            by_id: HashMap::new(),
            devices: Vec::new(),
            stats: Vec::new(),
            batch: Batch::new(config.poll_batch as usize),
            dirty: Vec::new(),
            attention: Vec::new(),
            looked_at: Vec::new(),
            next_deadline: Nanos::MAX,
            crowded_until: Nanos::ZERO,
            now: Nanos::ZERO,
            wakes: EventSet::new()?,
            headers: carve(&headers)?,
            messages: carve(&messages)?,
            data: data.as_ref().map(|data| carve(data)).transpose()?,
            receives,
            starved: VecDeque::new(),
            shared,
            core,
        })
    }

    fn conn(&mut self, id: ConnId) -> Option<&mut Conn> {
        find(&mut self.slots, id)
    }

    fn notice(&mut self, index: u32) {
        if let Some(conn) = self.slots[index as usize].conn.as_deref_mut()
            && !conn.attention
        {
            conn.attention = true;
            self.attention.push(index);
        }
    }

    fn mark_dirty(&mut self, index: u32) {
        if let Some(conn) = self.slots[index as usize].conn.as_deref_mut()
            && !conn.dirty
        {
            conn.dirty = true;
            self.dirty.push(index);
        }
    }

    /// Handles one completion. Reports at most one event.
    fn completed(&mut self, at: usize, done: Completion, events: &mut Events) {
        if done.is_recv() {
            return self.received(at, done, events);
        }
        let wc = *done.wc();
        let Some(index) = done.lane() else { return };
        let slot = &mut self.slots[index as usize];
        let Some(conn) = slot
            .conn
            .as_deref_mut()
            .filter(|conn| conn.device == at && conn.lane.number() == wc.qp)
        else {
            return;
        };
        if !wc.status.is_success() {
            let what = conn.lane.operation(&done);
            conn.lane.sent(&done);
            return self.failed(index, &wc, what);
        }
        let timing = conn.lane.timing(&done);
        let read = conn.lane.sent(&done);
        if let Some(timing) = timing {
            let took = self.now.0.saturating_sub(timing.posted);
            let (what, speaks_for_writes) = match wc.opcode {
                WcOpcode::Read => (Timed::Read, false),
                WcOpcode::Write => (Timed::Write, false),
                _ => (Timed::Send, timing.wrote),
            };
            self.stats[at].timed(what, took);
            if speaks_for_writes {
                self.stats[at].timed(Timed::Write, took);
            }
        }
        if wc.opcode == WcOpcode::Read
            && let Some(part) = read
            && conn.closing.is_none()
            && let Some((tag, data)) = conn.read_done(part)
        {
            let generation = slot.generation;
            let conn = ConnId { index, generation };
            events.push(Event::Fetched { conn, tag, data });
        }
        self.mark_dirty(index);
        if let Some(conn) = self.slots[index as usize].conn.as_deref()
            && (conn.draining || conn.closing.is_some())
        {
            self.notice(index);
        }
    }

    fn received(&mut self, at: usize, done: Completion, events: &mut Events) {
        let wc = *done.wc();
        let device = self.devices[at].as_ref();
        let index = device.and_then(|device| device.by_number.get(&wc.qp).copied());
        let slot = index.and_then(|index| self.slots.get_mut(index as usize));
        let (generation, mut conn) = match slot {
            Some(slot) => (slot.generation, slot.conn.as_deref_mut()),
            None => (0, None),
        };
        let mut capsule = None;
        let limits = conn.as_deref().map_or((0, 0), |conn| {
            (conn.limits.in_capsule, conn.limits.max_descriptors)
        });
        let message = match (done.lane(), &mut conn, &mut self.devices[at]) {
            (Some(_), Some(conn), _) => conn.lane.received(&done).map(|m| take(m, &wc, limits)),
            (None, _, Some(device)) => {
                let message = device.receiver.as_mut().and_then(|r| r.received(&done));
                message.map(|m| take(m, &wc, limits))
            }
            _ => None,
        };
        let (Some(index), Some(conn)) = (index, conn) else {
            return;
        };
        if !wc.status.is_success() {
            return self.failed(index, &wc, WcOpcode::Recv);
        }
        if let Some(message) = message {
            capsule = message;
        }
        add(&self.stats[at].recv_ops, 1);
        add(&self.stats[at].recv_bytes, wc.byte_len.into());
        if conn.closing.is_some() {
            return self.notice(index);
        }
        let Some(Capsule { sqe, data, list }) = capsule else {
            let why = format!("capsule of {} bytes; a command has 64", wc.byte_len);
            return self.end(index, Closed::Protocol(why));
        };
        if let Some(list) = list
            && !conn.keep_list(sqe.cid(), list)
        {
            let why = "more commands than the queue has entries".into();
            return self.end(index, Closed::Protocol(why));
        }
        if conn.opened {
            let conn = ConnId { index, generation };
            events.push(Event::Capsule { conn, sqe, data });
        } else {
            // The first completion can arrive before the event that the connection is established.
            conn.live = true;
            conn.early.push_back((sqe, data));
            self.notice(index);
        }
        self.mark_dirty(index);
    }
}

/// Returns the connection if it is open and not closing.
fn find(slots: &mut [Slot], id: ConnId) -> Option<&mut Conn> {
    let slot = slots.get_mut(id.index as usize)?;
    let found = slot.generation == id.generation;
    slot.conn
        .as_deref_mut()
        .filter(|conn| found && conn.closing.is_none())
}

/// A received command.
struct Capsule {
    sqe: Sqe,
    data: Option<Buf>,
    list: Option<Result<Buf, nacre_nvmf_wire::StatusCode>>,
}

/// Takes the parts of a command out of its receive buffer; the rest is returned. Data beyond the
/// connection's in-capsule size counts as absent, even if the buffer has space for it.
#[inline]
fn take(
    mut message: nacre_transport_rdma_verbs::Received<'_>,
    wc: &nacre_transport_rdma_verbs::WorkCompletion,
    (in_capsule, descriptors): (u32, u8),
) -> Option<Capsule> {
    if !wc.status.is_success() {
        return None;
    }
    let there = wc.byte_len.checked_sub(Sqe::SIZE as u32)?.min(in_capsule);
    let sqe = Sqe::read_from_bytes(message.header()).ok()?;
    let (mut data, mut list) = (None, None);
    match sqe.sgl() {
        Ok(Sgl::InCapsule { offset, length }) if there > 0 => {
            data = sgl::in_capsule(message.take_data(), there, offset, length);
        }
        Ok(Sgl::InCapsuleDescriptors { offset, length }) => {
            let data = message.take_data();
            list = Some(sgl::list(data, there, offset, length, descriptors));
        }
        _ => {}
    }
    Some(Capsule { sqe, data, list })
}

impl Transport for RdmaTransport {
    fn caps(&self) -> &TransportCaps {
        &self.caps
    }

    fn caps_of(&self, conn: ConnId) -> &TransportCaps {
        let slot = self.slots.get(conn.index as usize);
        let open = slot
            .filter(|slot| slot.generation == conn.generation)
            .and_then(|slot| slot.conn.as_deref());
        open.and_then(|open| open.limits.caps.as_deref())
            .unwrap_or(&self.caps)
    }

    fn poll(&mut self, now: Nanos, _pools: &Pools, events: &mut Events) -> usize {
        self.now = now;
        let before = events.len();
        if !self.core.inbox.is_empty() {
            self.take_messages();
        }
        if self.next_deadline <= now {
            self.handle_timeouts();
        }
        for at in 0..self.devices.len() {
            let room = events.room();
            let Some(device) = self.devices[at].as_ref().filter(|device| !device.dead) else {
                continue;
            };
            if room == 0 {
                break;
            }
            match device.queues.poll(&mut self.batch, room) {
                Ok(count) => {
                    self.stats[at].batch(count);
                    add(&self.stats[at].completions, count as u64);
                    while let Some(done) = self.batch.next() {
                        self.completed(at, done, events);
                    }
                }
                Err(error) => self.device_failed(at, &error.to_string()),
            }
            if let Some(device) = &mut self.devices[at]
                && let Some(receiver) = &mut device.receiver
                && receiver.idle() >= REFILL
            {
                refill(receiver, self.data.as_ref(), &self.stats[at]);
            }
        }
        if !self.attention.is_empty() {
            self.advance_endings(events);
        }
        events.len() - before
    }

    fn fetch(&mut self, conn: ConnId, tag: ReqTag, sqe: &Sqe, into: Buf) {
        let Some(open) = self.conn(conn) else { return };
        if let Err(status) = open.fetch(tag, sqe, into) {
            open.refused.push_back((tag, status));
            let at = open.device;
            add(&self.stats[at].sgl_refused, 1);
            return self.notice(conn.index);
        }
        self.mark_dirty(conn.index);
    }

    #[inline]
    fn respond(&mut self, conn: ConnId, response: Response) {
        let Some(open) = find(&mut self.slots, conn) else {
            return;
        };
        let stats = &self.stats[open.device];
        open.respond(response, stats);
        self.mark_dirty(conn.index);
    }

    fn established(&mut self, conn: ConnId, _params: QueueParams) {
        if let Some(open) = self.conn(conn) {
            open.established = true;
        }
    }

    fn close(&mut self, conn: ConnId, why: CloseWhy) {
        let deadline = self.now + self.shared.config.drain_timeout;
        let Some(open) = self.conn(conn) else { return };
        match why {
            CloseWhy::Now => self.end(conn.index, Closed::Local),
            CloseWhy::Drained => {
                open.draining = true;
                // At this deadline the connection closes even if it has not drained.
                open.deadline = deadline;
                self.next_deadline = self.next_deadline.min(deadline);
                self.mark_dirty(conn.index);
                self.notice(conn.index);
            }
        }
    }

    fn flush(&mut self, now: Nanos) {
        self.now = now;
        while let Some(index) = self.dirty.pop() {
            let Some(conn) = self.slots[index as usize].conn.as_deref_mut() else {
                continue;
            };
            conn.dirty = false;
            if conn.closing.is_some() {
                continue;
            }
            let posted = conn.flush(now, &self.stats[conn.device]);
            let own = conn.lane.post_recv(self.data.as_ref());
            if conn.lane.idle_receives() > 0 && !conn.starved {
                conn.starved = true;
                self.starved.push_back(index);
            }
            let (refused, draining) = (!conn.refused.is_empty(), conn.draining);
            if let Ok(receives @ 1..) = own {
                let counted = &self.stats[conn.device].receives_posted;
                add(counted, receives as u64);
            }
            if let Err(error) = posted.and_then(|_| own.map(|_| ())) {
                self.end(index, Closed::Broken(error.to_string()));
            } else if refused || draining {
                self.notice(index);
            }
        }
        if !self.starved.is_empty() {
            self.feed();
        }
        for (device, stats) in self.devices.iter_mut().zip(&self.stats) {
            let Some(device) = device.as_mut().filter(|device| !device.dead) else {
                continue;
            };
            let mut waiting = 0;
            if let Some(receiver) = &mut device.receiver
                && receiver.idle() > 0
            {
                refill(receiver, self.data.as_ref(), stats);
                waiting = receiver.idle() as u64;
            }
            stats.receives_waiting.store(waiting, Ordering::Relaxed);
        }
        self.starved
            .iter()
            .filter_map(|&index| self.slots[index as usize].conn.as_deref())
            .for_each(|conn| {
                let waiting = &self.stats[conn.device].receives_waiting;
                add(waiting, conn.lane.idle_receives() as u64);
            });
        for stats in &self.stats {
            if stats.receives_waiting.load(Ordering::Relaxed) > 0 {
                add(&stats.receives_waited, 1);
            }
        }
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        if !self.attention.is_empty() || !self.dirty.is_empty() || !self.core.inbox.is_empty() {
            return Idle::Busy;
        }
        for device in self.devices.iter().flatten().filter(|device| !device.dead) {
            if device.queues.cq().arm().is_err() {
                return Idle::Busy;
            }
        }
        match self.next_deadline {
            Nanos::MAX => Idle::Quiet,
            deadline => Idle::Until(deadline),
        }
    }

    fn disarm(&mut self) {
        self.devices
            .iter()
            .flatten()
            .for_each(|device| device.queues.cq().disarm());
    }

    fn wake_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.wakes.as_fd()]
    }

    fn connections(&self) -> usize {
        self.count
    }
}

fn refill(receiver: &mut Receiver, data: Option<&Pool>, stats: &Stats) {
    match receiver.post(data) {
        Ok(posted) => add(&stats.receives_posted, posted as u64),
        // The device reports the reason next, in a completion or an event.
        Err(error) => tracing::error!(%error, "receives could not be posted"),
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        self.core.closed.store(true, Ordering::Release);
        self.shared
            .cores()
            .retain(|core| !Arc::ptr_eq(core, &self.core));
        for slot in &mut self.slots {
            if let Some(conn) = slot.conn.take() {
                self.shared
                    .mailbox
                    .send(ToControl::Done(conn.names.id, None));
            }
        }
        while let Some(message) = self.core.inbox.pop() {
            if let ToCore::Incoming(incoming) = message {
                self.shared.mailbox.send(ToControl::Done(incoming.id, None));
            }
        }
    }
}

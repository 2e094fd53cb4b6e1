//! A *lane*: one core's queue to a volume or snapshot. It reads the volume's block map (`map`), and
//! asks the *keeper*, the poller that owns the pool's metadata, for all that changes the map.
//!
//! ```text
//!   Io ─▶ Job ─┬─ read, write in place ─▶ child I/Os on the base ─────────────┐
//!              ├─ place not loaded      ─▶ Load    ─▶ keeper ─ Loaded ─▶ read │
//!              ├─ first write           ─▶ Write   ─▶ keeper ─ Data ─▶ child ─┤─▶ Completion
//!              │                                     keeper ─ Answer ─────────┤
//!              └─ unmap                 ─▶ Unmap   ─▶ keeper ─ Answer ────────┘
//! ```
//!
//! A *job* is an I/O of the submitter, a *child* one on a disk or an external device, and a *place*
//! 64 KiB of the volume. A job ends when all of its children and requests to the keeper have ended.
//! The keeper gives freed space to other data only when no child may still use it. A child whose
//! disk address is from the map counts in the pool's *epoch*; the keeper waits for older epochs.

mod disks;
mod external;
mod late;
mod parts;
mod reads;
mod writes;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nacre_bdev::{
    Bdev, Busy, Claim, Completion, Done, Extents, Io, LayerQueue, Op, OpenError, Pending, Queue,
    Status, Token,
};
use nacre_bdev_pool_core::disks::{DiskTable, Location};
use nacre_bdev_pool_core::geometry::Geometry;
use nacre_bdev_pool_core::interface::Refusal;
use nacre_hugepages::{Buf, Pool};
use nacre_reactor::{EventSet, Idle, Interest, Nanos};
use slab::Slab;

use crate::BLOCK;
use crate::map::LvolMap;
use crate::port::{KeeperMessage, LanePort, MapId, RequestId, Shared, ToKeeper, ToLane};

use external::{EXTERNAL_DISK, Externals};
use late::{ExternalRead, interrupted, status_of};
use parts::Part;

/// How long a lane that is dropped waits for its I/O in flight.
const LAST_WAIT: Duration = Duration::from_millis(250);

pub(crate) struct Lane {
    shared: Arc<Shared>,
    port: Arc<LanePort>,
    map: Arc<LvolMap>,
    geometry: Geometry,
    /// The places of units.
    table: Arc<DiskTable>,
    /// Queues on the disks, in the pool's order. `None`: the disk has left.
    bases: Vec<Option<Base>>,
    externals: Externals,
    /// A disk of the pool could lose writes when the queue was opened: hosts know of FLUSH, also
    /// when that disk has left.
    has_flush: bool,
    /// A change of the pool's disks: its number and the answer to the keeper, which is sent when
    /// the queues on disks that left are idle.
    closing: Option<(u64, Result<(), String>)>,
    memory: Pool,
    depth: usize,
    jobs: Slab<Job>,
    children: Slab<Child>,
    requests: Slab<Request>,
    /// Requests whose source reads wait for buffers.
    starved: Vec<(RequestId, u64, u16)>,
    ended: VecDeque<Completion>,
    outbox: Vec<ToKeeper>,
    inbox: Vec<ToLane>,
    from_base: Done,
    sleepers: EventSet,
}

/// A queue on one disk.
struct Base {
    queue: LayerQueue,
    block: u64,
    /// The disk may lose writes before a flush.
    is_volatile: bool,
    /// Distinguishes the queues on external devices.
    number: u32,
    /// I/Os that the queue has not accepted yet.
    waiting: VecDeque<Io>,
    /// Children that the device did not answer in time, and has not answered since.
    overdue: Vec<usize>,
    /// The last field: the device is free when its queue is gone.
    claim: Arc<Claim>,
}

impl Base {
    fn open(claim: &Arc<Claim>, memory: &Pool) -> Result<Self, OpenError> {
        let layer = claim.layer();
        Ok(Self {
            queue: claim.open(memory)?,
            block: u64::from(layer.geometry().block_size),
            is_volatile: layer.limits().volatile_cache,
            number: 0,
            waiting: VecDeque::new(),
            overdue: Vec::new(),
            claim: Arc::clone(claim),
        })
    }

    fn submit_waiting(&mut self) {
        while let Some(io) = self.waiting.pop_front() {
            if let Err((Busy, io)) = self.queue.submit(io) {
                self.waiting.push_front(io);
                return;
            }
        }
    }
}

/// One I/O of the submitter.
struct Job {
    pending: Pending,
    op: Op,
    data: Extents,
    /// The buffers of a read of several runs.
    parts: Vec<Part>,
    /// Bytes of the first buffer.
    first_len: usize,
    /// Children and requests that have not ended.
    left: usize,
    status: Status,
}

/// One I/O on a disk or an external device.
struct Child {
    owner: Owner,
    /// `None`: the keeper ordered the I/O, and counts it.
    epoch: Option<u64>,
    /// For a read of an external device that is not overdue.
    external: Option<ExternalRead>,
}

#[derive(Clone, Copy)]
enum Owner {
    /// The whole read: its buffers are the job's.
    Read {
        job: usize,
    },
    /// The read of one part.
    Part {
        job: usize,
        part: usize,
    },
    Write {
        job: usize,
    },
    Data {
        request: RequestId,
    },
    Source {
        request: RequestId,
        granule: u32,
    },
    /// The read of an external device was overdue: its outcome has no user.
    Overdue,
}

/// A request to the keeper.
struct Request {
    job: usize,
    /// The place, and its range of granules.
    place: u64,
    first: u32,
    granules: u32,
    /// Offset of its data in the job's buffers.
    offset: usize,
    /// The part of the job that waits for a leaf.
    part: usize,
    /// Children in flight.
    left: usize,
    /// The first error of its children.
    status: Status,
    /// Granules that were read for it.
    sources: Vec<(u32, Option<Buf>)>,
}

/// The volume or snapshot of a lane.
pub(crate) struct LaneSpec<'a> {
    pub device: &'a str,
    pub shared: Arc<Shared>,
    pub map: Arc<LvolMap>,
    /// Most I/Os of the lane.
    pub depth: usize,
}

impl Request {
    fn new(job: usize, place: u64, first: u32, granules: u32, offset: usize) -> Self {
        Self {
            job,
            place,
            first,
            granules,
            offset,
            part: 0,
            left: 0,
            status: Status::Ok,
            sources: Vec::new(),
        }
    }
}

impl Lane {
    pub(crate) fn open(spec: LaneSpec, memory: &Pool) -> Result<Self, OpenError> {
        let LaneSpec {
            device,
            shared,
            map,
            depth,
        } = spec;
        let failed = |what: &str, source| OpenError {
            bdev: device.to_owned(),
            what: what.to_owned(),
            source,
        };
        let (Some(geometry), Some(table)) =
            (shared.geometry.get().copied(), shared.table.load_full())
        else {
            let why = std::io::ErrorKind::NotConnected.into();
            return Err(failed("open a queue of a pool that is not open", why));
        };
        let sleepers = EventSet::new().map_err(|error| failed("create an epoll", error))?;
        let port = shared
            .add_lane()
            .map_err(|error| failed("create an eventfd", error))?;
        // The keeper asks a lane that has a port to open queues on disks that join later.
        let bases = (|| {
            let claims = shared.claims.load_full();
            let bases = claims.iter().map(|claim| {
                let claim = claim.as_ref();
                claim.map(|claim| Base::open(claim, memory)).transpose()
            });
            let bases = bases.collect::<Result<Vec<Option<Base>>, OpenError>>()?;
            let base_fds = bases
                .iter()
                .flatten()
                .filter_map(|base| base.queue.wake_fd());
            for fd in base_fds.chain([port.inbox.as_fd()]) {
                let added = sleepers.add(fd, 0, Interest::READ);
                added.map_err(|error| failed("watch completions", error))?;
            }
            Ok(bases)
        })();
        let bases = bases.inspect_err(|_| {
            shared.remove_lane(&port);
            // An addition may have begun to wait for this lane.
            let closed = KeeperMessage::Lane(port.id, ToKeeper::Closed);
            shared.inbox.send([closed]);
        })?;
        Ok(Self {
            map,
            memory: memory.clone(),
            shared,
            port,
            geometry,
            table,
            has_flush: bases.iter().flatten().any(|base| base.is_volatile),
            bases,
            externals: Externals::default(),
            closing: None,
            depth,
            jobs: Slab::with_capacity(depth.min(64)),
            children: Slab::with_capacity(64),
            requests: Slab::with_capacity(64),
            starved: Vec::new(),
            ended: VecDeque::new(),
            outbox: Vec::new(),
            inbox: Vec::new(),
            from_base: Done::with_capacity(64),
            sleepers,
        })
    }

    fn map_id(&self) -> MapId {
        MapId {
            version: self.map.version,
            serial: self.map.serial,
        }
    }

    fn blocks(&self) -> u64 {
        self.map.units() * u64::from(self.geometry.granules_per_unit)
    }

    /// The status of an I/O that must not begin.
    fn refusal(&self, io: &Io) -> Option<Status> {
        if self.map.is_gone() {
            let is_interrupted = self.shared.losses.has_lost();
            return Some(if is_interrupted {
                interrupted(io.op)
            } else {
                Status::Gone
            });
        }
        let end = io.lba.checked_add(u64::from(io.blocks));
        match io.op {
            Op::Flush if self.bases.iter().flatten().any(|base| base.is_volatile) => None,
            Op::Flush if self.has_flush => Some(Status::Ok),
            Op::Read | Op::Write | Op::Unmap | Op::WriteZeroes => {
                if end.is_none_or(|end| end > self.blocks()) {
                    Some(Status::OutOfRange)
                } else if self.map.is_read_only() && io.op.is_write() {
                    Some(Status::WriteProtected)
                } else if io.blocks == 0 {
                    Some(Status::Ok)
                } else {
                    None
                }
            }
            _ => Some(Status::Unsupported),
        }
    }

    fn begin(&mut self, io: Io) {
        let refusal = self.refusal(&io);
        let job = self.jobs.insert(Job {
            pending: Pending::new(io.token),
            op: io.op,
            first_len: io.data.first().map_or(0, Buf::len),
            data: io.data,
            parts: Vec::new(),
            left: 1,
            status: refusal.unwrap_or(Status::Ok),
        });
        if refusal.is_none() {
            match io.op {
                Op::Read => self.begin_read(job, io.lba, io.blocks),
                Op::Write => self.begin_write(job, io.lba, io.blocks),
                Op::Flush => {
                    let disks = self.shared.flush_set(&self.map);
                    for disk in 0..self.bases.len() {
                        let base = self.bases[disk].as_ref();
                        if disks >> disk & 1 == 1 && base.is_some_and(|base| base.is_volatile) {
                            let flush = Io::new(0, Op::Flush, 0, 0);
                            self.child(disk, flush, Owner::Write { job }, None);
                        }
                    }
                }
                _ => self.begin_unmap(job, io.lba, u64::from(io.blocks)),
            }
        }
        self.step_ended(job, Status::Ok);
    }

    /// Begins an I/O on a disk.
    fn child(&mut self, disk: usize, mut io: Io, owner: Owner, epoch: Option<u64>) {
        if let Some(epoch) = epoch {
            self.port.counts.join(epoch);
        }
        match owner {
            Owner::Read { job } | Owner::Part { job, .. } | Owner::Write { job } => {
                self.jobs[job].left += 1
            }
            Owner::Data { request } | Owner::Source { request, .. } => {
                self.requests[request as usize].left += 1
            }
            Owner::Overdue => {}
        }
        if io.op == Op::Write {
            self.map.note_disk(disk);
        }
        let external = match disk {
            EXTERNAL_DISK => self.externals.begin(),
            _ => None,
        };
        let child = Child {
            owner,
            epoch,
            external,
        };
        io.token = self.children.insert(child) as Token;
        match self.base_mut(disk) {
            Some(base) => base.waiting.push_back(io),
            // The map names no disk that has left.
            None => self.from_base.push(io.complete(Status::Gone)),
        }
    }

    /// The place of a granule on its disk.
    fn locate(&mut self, unit: u64, granule: u32) -> Location {
        if unit >= self.table.units()
            && let Some(table) = self.shared.table.load_full()
        {
            self.table = table;
        }
        self.table.granule(unit, granule)
    }

    /// An I/O on blocks of a disk.
    fn base_io(&self, op: Op, at: Location, data: Extents) -> Io {
        let base = self.base(at.disk);
        // The map names no disk that has left.
        let no_base = u64::from(BLOCK);
        let block = base.map_or(no_base, |base| base.block);
        let bytes: usize = data.iter().map(Buf::len).sum();
        let mut io = Io::new(0, op, at.offset / block, (bytes as u64 / block) as u32);
        io.data = data;
        io
    }

    /// One child or request of a job has ended.
    fn step_ended(&mut self, job: usize, status: Status) {
        let of = &mut self.jobs[job];
        if of.status.is_ok() {
            of.status = status;
        }
        of.left -= 1;
        if of.left > 0 {
            return;
        }
        let mut of = self.jobs.remove(job);
        if of.status.is_ok() && self.shared.losses.has_lost() {
            self.shared.inbox.ring();
            of.status = interrupted(of.op);
        }
        if !of.parts.is_empty() {
            let joined = parts::join(std::mem::take(&mut of.parts), of.first_len, &self.memory);
            match joined {
                Some(data) => of.data = data,
                None if of.status.is_ok() => of.status = Status::Retry,
                None => {}
            }
        }
        self.ended
            .push_back(of.pending.complete(of.status, of.data));
    }

    fn child_ended(&mut self, ended: Completion) {
        let Some(child) = self.children.try_remove(ended.token as usize) else {
            return;
        };
        if let Some(epoch) = child.epoch {
            self.port.counts.leave(epoch);
        }
        self.externals.reads -= usize::from(child.external.is_some());
        let status = child.status_for_host(ended.status);
        self.owned_ended(child.owner, status, ended.data);
    }

    fn owned_ended(&mut self, owner: Owner, status: Status, data: Extents) {
        match owner {
            Owner::Read { job } => {
                self.jobs[job].data = data;
                self.step_ended(job, status);
            }
            Owner::Part { job, part } => {
                self.jobs[job].parts[part].data = data;
                self.step_ended(job, status);
            }
            Owner::Write { job } => self.step_ended(job, status),
            Owner::Data { request } => self.data_ended(request, status),
            Owner::Source { request, granule } => self.source_ended(request, granule, status, data),
            Owner::Overdue => {}
        }
    }

    fn request(&mut self, request: Request) -> RequestId {
        self.jobs[request.job].left += 1;
        self.requests.insert(request) as RequestId
    }

    fn take_message(&mut self, message: ToLane) {
        match message {
            ToLane::Loaded { request } => {
                let Some(done) = self.requests.try_remove(request as usize) else {
                    return;
                };
                let first = done.place * u64::from(self.geometry.granules_per_unit);
                let lba = first + u64::from(done.first);
                self.read_place_again(done.job, done.part, lba, done.granules);
                self.step_ended(done.job, Status::Ok);
            }
            ToLane::Disks { round } => self.open_disks(round),
            ToLane::External => self.close_externals(),
            ToLane::Data {
                request,
                unit,
                copy,
            } => self.write_data(request, unit, copy),
            ToLane::ReadSource {
                request,
                unit,
                granules,
            } => self.read_source(request, unit, granules),
            ToLane::Answer { request, result } => {
                let Some(done) = self.requests.try_remove(request as usize) else {
                    return;
                };
                let status = match result {
                    Ok(()) => Status::Ok,
                    Err(Refusal::Medium) if !done.status.is_ok() => done.status,
                    Err(refusal) => status_of(refusal, self.jobs[done.job].op),
                };
                self.step_ended(done.job, status);
            }
        }
    }

    fn send(&mut self) {
        if self.outbox.is_empty() {
            return;
        }
        let lane = self.port.id;
        let messages = self.outbox.drain(..);
        let messages = messages.map(|message| KeeperMessage::Lane(lane, message));
        let sent = self.shared.inbox.send(messages);
        self.outbox.clear();
        if !sent {
            self.keeper_is_gone();
        }
    }

    /// Ends all requests: the pool is closed.
    fn keeper_is_gone(&mut self) {
        let idle: Vec<usize> = self
            .requests
            .iter()
            .filter(|(_, request)| request.left == 0)
            .map(|(key, _)| key)
            .collect();
        for key in idle {
            let request = self.requests.remove(key);
            self.step_ended(request.job, Status::Gone);
        }
    }

    /// Completions of the disks, until there are none.
    fn collect(&mut self, now: Nanos) {
        loop {
            let mut count = 0;
            let mut from_base = std::mem::replace(&mut self.from_base, Done::with_capacity(0));
            for disk in 0..self.bases.len() {
                let Some(base) = &mut self.bases[disk] else {
                    continue;
                };
                base.submit_waiting();
                count += base.queue.poll(now, &mut from_base);
                for ended in from_base.drain() {
                    self.child_ended(ended);
                }
            }
            count += self.collect_external(now, &mut from_base);
            self.from_base = from_base;
            if count == 0 {
                return;
            }
        }
    }
}

impl Queue for Lane {
    fn submit(&mut self, io: Io) -> Result<(), (Busy, Io)> {
        if self.jobs.len() + self.ended.len() >= self.depth {
            return Err((Busy, io));
        }
        self.begin(io);
        Ok(())
    }

    fn poll(&mut self, now: Nanos, done: &mut Done) -> usize {
        let mut inbox = std::mem::take(&mut self.inbox);
        self.port.inbox.take(&mut inbox);
        for message in inbox.drain(..) {
            self.take_message(message);
        }
        self.inbox = inbox;
        for (request, unit, granules) in std::mem::take(&mut self.starved) {
            self.read_source(request, unit, granules);
        }
        self.collect(now);
        self.end_overdue(now);
        self.close_disks();
        self.close_externals();
        self.send();
        let mut count = 0;
        while done.has_room()
            && let Some(ended) = self.ended.pop_front()
        {
            done.push(ended);
            count += 1;
        }
        count
    }

    /// An I/O that has begun is not aborted: its record may be in the log.
    fn abort(&mut self, _token: Token) -> bool {
        false
    }

    fn inflight(&self) -> usize {
        self.jobs.len() + self.ended.len()
    }

    fn is_settled(&self) -> bool {
        let is_quiet = self.inflight() == 0 && !self.port.inbox.has_any();
        is_quiet && self.queues().all(|base| base.queue.is_settled())
    }

    fn arm(&mut self, now: Nanos) -> Idle {
        self.port.inbox.arm();
        let stuck = self
            .queues()
            .any(|base| !base.waiting.is_empty() && base.queue.inflight() == 0);
        let has_news = self.port.inbox.has_any();
        if has_news || !self.ended.is_empty() || !self.outbox.is_empty() || stuck {
            return Idle::Busy;
        }
        let idles = self.queues_mut().map(|base| base.queue.arm(now));
        let idle = idles.fold(Idle::Quiet, Idle::and);
        let idle = idle.and(self.externals.due());
        if self.starved.is_empty() {
            idle
        } else {
            idle.and(Idle::Until(now + Duration::from_micros(200)))
        }
    }

    fn disarm(&mut self) {
        self.port.inbox.disarm();
        self.queues_mut().for_each(|base| base.queue.disarm());
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.sleepers.as_fd())
    }
}

impl Drop for Lane {
    /// Waits for I/O in flight, at most `LAST_WAIT`: a write could reach the disk after its space
    /// was given to other data. If I/O does not end, its space stays in use until the next import.
    fn drop(&mut self) {
        self.queues_mut().for_each(|base| base.waiting.clear());
        let inflight = |bases: &[Option<Base>]| {
            let mut bases = bases.iter().flatten();
            bases.any(|base| base.queue.inflight() > 0)
        };
        let began = Instant::now();
        let mut done = Done::with_capacity(64);
        // Overdue reads of external devices concern no place of the pool.
        let is_busy = |lane: &Self| {
            let mut queues = lane.queues();
            queues.any(|base| base.queue.inflight() > base.overdue.len())
        };
        while is_busy(self) && began.elapsed() < LAST_WAIT {
            for base in self.queues_mut() {
                let now = Nanos(began.elapsed().as_nanos() as u64);
                base.queue.poll(now, &mut done);
            }
            if done.is_empty() {
                std::thread::yield_now();
            }
            done.drain().for_each(drop);
        }
        for (_, job) in std::mem::take(&mut self.jobs) {
            job.pending.abandon();
        }
        if inflight(&self.bases) {
            self.port.is_dead.store(true, Ordering::Release);
            tracing::error!(
                lvol = %self.map.version.0,
                "a queue was closed with I/O that does not end: its space stays in use until the \
                 pool is imported again"
            );
            return;
        }
        // The keeper asks a listed lane for queues on a new disk, so the list comes first.
        self.shared.remove_lane(&self.port);
        let messages = self.outbox.drain(..).chain([ToKeeper::Closed]);
        let messages = messages.map(|message| KeeperMessage::Lane(self.port.id, message));
        self.shared.inbox.send(messages);
    }
}

//! Several paths to one namespace, each a controller with one I/O queue, and the I/O in flight on
//! them.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Done, Io, Op, Queue, Status};
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::host::{Connector, ControllerState, IoQueue, NamespaceInfo};
use nacre_nvmf_wire::log::ana::AnaState;
use nacre_reactor::{Clock, Nanos};
use nacre_transport_connect::Session;

use super::choice::access_name;
use crate::error::PerfError;
use crate::job::JobError;
use crate::remote::choose;
use crate::report::PathReport;
use crate::worker::WorkerError;

/// Pause of a thread without work.
const NAP: Duration = Duration::from_micros(50);

/// The number and size of the I/Os on a path.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Most I/Os in flight.
    pub depth: u16,
    /// Bytes of each I/O.
    pub io_bytes: u32,
}

impl Shape {
    fn classes(self) -> [ClassSpec; 2] {
        [
            ClassSpec {
                size: 1024,
                count: 2,
            },
            ClassSpec {
                size: (self.io_bytes as usize).next_multiple_of(4096),
                count: usize::from(self.depth),
            },
        ]
    }

    /// Bytes of memory that a path needs, without its session.
    pub fn memory(self) -> usize {
        Pool::bytes_for(&self.classes()) + (64 << 10)
    }
}

/// The reason why paths cannot be used together.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(transparent)]
    Path(#[from] PerfError),
    #[error("{name} is another namespace than {first}: {field} differs")]
    Differs {
        name: String,
        first: String,
        field: &'static str,
    },
}

impl From<JobError> for MountError {
    fn from(error: JobError) -> Self {
        Self::Path(error.into())
    }
}

/// One path to the namespace: a connected controller with one I/O queue.
pub struct Path {
    name: String,
    session: Session,
    queue: IoQueue,
    pool: Pool,
    info: NamespaceInfo,
    max_io: u32,
    shape: Shape,
    /// The link's version when `access` was read.
    version: Option<(u64, u64)>,
    access: Option<AnaState>,
}

impl Path {
    /// Connects an I/O queue of the controller `session`, for namespace `nsid` or the only one.
    /// Waits up to `connect_timeout` of the session's options. `name` is for reports.
    pub fn open(
        name: String,
        mut session: Session,
        connector: &Arc<dyn Connector>,
        nsid: Option<u32>,
        shape: Shape,
    ) -> Result<Self, MountError> {
        let link = Arc::clone(session.controller().link());
        let options = session.controller().options().clone();
        let info = choose(&link, nsid)?;
        let max_io = link.state().max_transfer_bytes;
        let pool = connector
            .memory(&shape.classes())
            .map_err(PerfError::Memory)?;
        let clock = Clock::real();
        let limit = options.connect_timeout;
        let mut queue = IoQueue::new(
            options,
            link,
            connector.dialer(),
            pool.clone(),
            (1, info.nsid),
            clock.now(),
        )
        .map_err(PerfError::Queue)?;
        let begin = clock.now();
        let mut done = Done::with_capacity(4);
        while !queue.is_live() {
            let now = clock.now();
            session.poll();
            queue.poll(now, &mut done);
            if let Some(why) = queue.refusal() {
                let (qid, why) = (1, why.to_owned());
                return Err(PerfError::Worker(WorkerError::Refused { qid, why }).into());
            }
            if now.since(begin) > limit {
                let (qid, why) = (1, queue.failure().map(str::to_owned));
                return Err(PerfError::Worker(WorkerError::Connect { qid, limit, why }).into());
            }
            std::thread::sleep(NAP);
        }
        Ok(Self {
            name,
            session,
            queue,
            pool,
            info,
            max_io,
            shape,
            version: None,
            access: None,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The ANA state of the namespace on this path; `None`: not connected.
    pub fn access(&mut self) -> Option<AnaState> {
        let link = self.session.controller().link();
        let Some(generation) = link.generation() else {
            self.version = None;
            return None;
        };
        let version = Some((generation, link.version()));
        if self.version != version {
            (self.version, self.access) = (version, Some(link.state().access(&self.info)));
        }
        self.access
    }

    /// True if the ANA state of the namespace is optimized or non-optimized on this path.
    pub fn is_accessible(&mut self) -> bool {
        let access = self.access();
        matches!(access, Some(AnaState::Optimized | AnaState::NonOptimized))
    }

    pub fn cntlid(&self) -> u16 {
        self.session.controller().link().state().cntlid
    }

    /// Fallbacks from RDMA to TCP; `None` if the path has no choice of transports.
    pub fn fallbacks(&self) -> Option<PathReport> {
        let paths = self.session.controller().paths()?;
        Some(PathReport::new(paths, self.queue.stats().moves))
    }

    /// Number of times that the connection of the I/O queue was lost.
    pub fn losses(&self) -> u64 {
        self.queue.stats().losses
    }

    /// The error of the controller, or of the I/O queue's latest failed attempt to connect. `None`
    /// if both are connected, or if no attempt has failed.
    pub fn failure(&self) -> Option<String> {
        match self.session.controller().state() {
            ControllerState::Waiting { error, .. } | ControllerState::Failed(error) => {
                Some(error.to_string())
            }
            _ => self.queue.failure().map(str::to_owned),
        }
    }
}

#[derive(Clone, Copy)]
struct MountSlot {
    path: usize,
    op: Op,
    unit: u64,
    since: Nanos,
}

/// A completed I/O.
pub(super) struct Ended {
    pub path: usize,
    pub op: Op,
    pub unit: u64,
    pub since: Nanos,
    pub status: Status,
    pub took: Duration,
    pub data: Option<Buf>,
}

/// The paths, and the tested block range of the namespace in units of one I/O.
pub struct Mount {
    paths: Vec<Path>,
    first: u64,
    units: u64,
    unit_blocks: u32,
    slots: Vec<MountSlot>,
    free: Vec<u16>,
    done: Done,
    clock: Clock,
}

impl Mount {
    /// Uses `range` bytes from byte `offset` on, rounded down to whole I/Os; without `range`, all
    /// bytes from there on, at most `most`. Fails if the paths differ in the UUID, NGUID or block
    /// size of the namespace. Also fails if the I/O size or the range does not fit.
    ///
    /// # Panics
    /// Without paths.
    pub fn new(
        paths: Vec<Path>,
        (offset, range, most): (u64, Option<u64>, u64),
    ) -> Result<Self, MountError> {
        let Path {
            name, info, shape, ..
        } = paths.first().expect("at least one path");
        for other in &paths[1..] {
            let differs = |field| MountError::Differs {
                name: other.name.clone(),
                first: name.clone(),
                field,
            };
            let same = [
                ("the UUID", info.uuid == other.info.uuid),
                ("the NGUID", info.nguid == other.info.nguid),
                ("the block size", info.block_size == other.info.block_size),
            ];
            if let Some((field, _)) = same.iter().find(|(_, same)| !same) {
                return Err(differs(*field));
            }
        }
        let blocks = paths.iter().map(|path| path.info.blocks).min();
        let bytes = blocks.unwrap_or(0) * u64::from(info.block_size);
        let unit = shape.io_bytes;
        let max_io = paths.iter().map(|path| path.max_io).min().unwrap_or(0);
        if unit > max_io {
            let (asked, limit) = (unit, max_io);
            return Err(JobError::TooLarge { asked, limit }.into());
        }
        let range = range.unwrap_or_else(|| bytes.saturating_sub(offset).min(most));
        let range = range - range % u64::from(unit);
        for bytes in [offset, u64::from(unit)] {
            let block_size = info.block_size;
            if bytes % u64::from(block_size) != 0 {
                return Err(JobError::NotBlocks { bytes, block_size }.into());
            }
        }
        let end = offset.saturating_add(range);
        if end > bytes || range == 0 {
            return Err(JobError::Outside { offset, end, bytes }.into());
        }
        let count = paths.len() * usize::from(shape.depth);
        let idle = MountSlot {
            path: 0,
            op: Op::Read,
            unit: 0,
            since: Nanos::ZERO,
        };
        Ok(Self {
            first: offset / u64::from(info.block_size),
            units: range / u64::from(unit),
            unit_blocks: unit / info.block_size,
            slots: vec![idle; count],
            free: (0..count as u16).collect(),
            done: Done::with_capacity(count.max(64)),
            clock: Clock::real(),
            paths,
        })
    }

    pub fn paths(&mut self) -> &mut [Path] {
        &mut self.paths
    }

    pub fn names(&self) -> Vec<String> {
        self.paths.iter().map(|path| path.name.clone()).collect()
    }

    /// The name of the ANA state of each path, as [`access_name`] has it.
    pub fn access_names(&mut self) -> Vec<&'static str> {
        let name = |path: &mut Path| access_name(path.access());
        self.paths.iter_mut().map(name).collect()
    }

    /// `((NSID, block size in bytes), (first block, number of units, blocks per unit))`.
    pub fn geometry(&self) -> ((u32, u32), (u64, u64, u32)) {
        let info = &self.paths[0].info;
        (
            (info.nsid, info.block_size),
            (self.first, self.units, self.unit_blocks),
        )
    }

    /// True if the namespace is write protected on any path.
    pub fn is_read_only(&self) -> bool {
        self.paths.iter().any(|path| path.info.read_only)
    }

    /// Number of units in the range.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Size of a unit, which is that of an I/O.
    pub fn unit_bytes(&self) -> u64 {
        u64::from(self.paths[0].shape.io_bytes)
    }

    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    pub fn inflight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The units of the writes in flight that began at `since` or later.
    pub(super) fn writes_in_flight(&self, since: Nanos) -> impl Iterator<Item = u64> {
        let slots = self.slots.iter().enumerate();
        let used = slots.filter(|(at, _)| !self.free.contains(&(*at as u16)));
        used.filter(move |(_, slot)| slot.op == Op::Write && slot.since >= since)
            .map(|(_, slot)| slot.unit)
    }

    /// Starts an I/O of one unit. Returns false if the path has no free buffer or queue entry.
    pub(super) fn start(
        &mut self,
        path: usize,
        op: Op,
        unit: u64,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let Some(&slot) = self.free.last() else {
            return false;
        };
        let one = &mut self.paths[path];
        let Some(mut buf) = one.pool.acquire(one.shape.io_bytes as usize) else {
            return false;
        };
        let data = buf.bytes_mut().expect("just acquired");
        match op {
            Op::Write => fill(data),
            // Data of an earlier I/O must not pass for read data.
            _ => data.fill(0x5a),
        }
        let lba = self.first + unit * u64::from(self.unit_blocks);
        let io = Io::new(u64::from(slot), op, lba, self.unit_blocks).with(buf);
        if one.queue.submit(io).is_err() {
            return false;
        }
        self.free.pop();
        self.slots[usize::from(slot)] = MountSlot {
            path,
            op,
            unit,
            since: self.clock.now(),
        };
        true
    }

    /// Polls every path, and appends the completed I/Os to `ended`.
    pub(super) fn poll(&mut self, ended: &mut Vec<Ended>) {
        for path in &mut self.paths {
            path.session.poll();
            path.queue.flush();
            path.queue.poll(self.clock.now(), &mut self.done);
            let now = self.clock.now();
            for mut completion in self.done.drain() {
                let slot = self.slots[completion.token as usize];
                self.free.push(completion.token as u16);
                ended.push(Ended {
                    path: slot.path,
                    op: slot.op,
                    unit: slot.unit,
                    since: slot.since,
                    status: completion.status,
                    took: now.since(slot.since),
                    data: completion.data.pop(),
                });
            }
        }
    }

    pub(super) fn idle_pause(&self) {
        std::thread::sleep(NAP);
    }

    pub fn disconnect(self) {
        for path in self.paths {
            drop(path.queue);
            path.session.disconnect();
        }
    }
}

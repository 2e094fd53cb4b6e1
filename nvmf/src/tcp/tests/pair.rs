//! The harness of the tests: a host and a controller on two byte pipes, in one thread, in virtual
//! time.

use std::collections::{BTreeMap, VecDeque};
use std::io::Read;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::status::StatusCode;
use nacre_random::Random;
use nacre_reactor::Nanos;

use crate::tcp::controller::{TargetConn, TargetEvent, TargetPoll, TcpTargetConfig};
use crate::tcp::{HostConfig, HostConn, HostPoll, RecvSlices, RxBuffers, Slices};
use crate::transport::{Closed, HostCommand, HostEvent, Pools, QueueParams, ReqTag, Response};

/// Bytes that differ by `seed` and by place.
pub(super) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|at| (at.wrapping_mul(31) ^ (at >> 8) ^ seed.wrapping_mul(0x9e37_79b9)) as u8)
        .collect()
}

pub(super) fn pool(small: usize, large: usize) -> Pool {
    Pool::heap(&[
        ClassSpec {
            size: 8192,
            count: small,
        },
        ClassSpec {
            size: 1 << 20,
            count: large,
        },
    ])
}

pub(super) fn pools(small: usize, large: usize) -> Pools {
    Pools {
        io: pool(small, large),
        admin: pool(16, 0),
    }
}

pub(super) fn filled(pool: &Pool, seed: u32, len: usize) -> Buf {
    let mut buf = pool.acquire(len).expect("the test's pool is large enough");
    buf.bytes_mut()
        .unwrap()
        .copy_from_slice(&pattern(seed, len));
    buf
}

/// Puts as much of `pipe` as fits (and `limit` allows) into `slices`.
pub(super) fn scatter(
    pipe: &mut VecDeque<u8>,
    slices: &mut [std::io::IoSliceMut<'_>],
    limit: usize,
) -> usize {
    let mut n = 0;
    for slice in slices {
        let take = slice.len().min(limit - n);
        let got = pipe
            .read(&mut slice[..take])
            .expect("a byte pipe does not fail");
        // Its bytes may lie in two pieces.
        let more = pipe
            .read(&mut slice[got..take])
            .expect("a byte pipe does not fail");
        n += got + more;
    }
    n
}

pub(super) fn gather(slices: &Slices<'_>, limit: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for slice in slices {
        bytes.extend_from_slice(&slice[..slice.len().min(limit - bytes.len())]);
    }
    bytes
}

/// A controller that keeps written data and reads patterns: the write's data seed is its LBA.
pub(super) struct App {
    pub free: Vec<u16>,
    pub written: BTreeMap<u16, Vec<u8>>,
    pub log: Vec<String>,
    pub closed: Option<Closed>,
    pub answer: bool,
    pub now: Nanos,
    commands: BTreeMap<u16, Sqe>,
}

impl App {
    pub(super) fn new() -> Self {
        Self {
            free: (0..256).rev().collect(),
            written: BTreeMap::new(),
            log: Vec::new(),
            closed: None,
            answer: true,
            now: Nanos::ZERO,
            commands: BTreeMap::new(),
        }
    }

    pub(super) fn handle(&mut self, event: TargetEvent, conn: &mut TargetConn, pools: &Pools) {
        match event {
            TargetEvent::Capsule { sqe, data } => {
                self.log.push(format!("capsule {}", sqe.cid()));
                if !self.answer {
                    return;
                }
                let index = self.free.pop().expect("the queue limits the commands");
                let tag = ReqTag {
                    cid: sqe.cid(),
                    index,
                };
                let length = sqe.sgl().map_or(0, Sgl::length);
                self.commands.insert(index, sqe);
                match (sqe.opcode, data) {
                    (io::WRITE, Some(data)) => self.store(tag, &data, conn),
                    (io::WRITE, None) if matches!(sqe.sgl(), Ok(Sgl::Transport { .. })) => {
                        match pools.io.acquire(length as usize) {
                            Some(into) if length > 0 => conn.fetch(tag, into, self.now),
                            _ => self.end(
                                tag,
                                StatusCode::DATA_SGL_LENGTH_INVALID,
                                Extents::new(),
                                conn,
                            ),
                        }
                    }
                    (io::READ, None) if length as usize > pools.io.max_len() => {
                        self.end(
                            tag,
                            StatusCode::DATA_SGL_LENGTH_INVALID,
                            Extents::new(),
                            conn,
                        );
                    }
                    (io::READ, None) => {
                        let seed = sqe.cdw10.get();
                        let mut data = Extents::new();
                        if length > 0 {
                            let buf = filled(&pools.io, seed, length as usize);
                            // Sometimes two pieces, as memory of a device may be.
                            if seed % 3 == 0 && length > 512 {
                                data.push(buf.slice(0, 512));
                                data.push(buf.slice(512, length as usize - 512));
                            } else {
                                data.push(buf);
                            }
                        }
                        self.end(tag, StatusCode::SUCCESS, data, conn);
                    }
                    _ => self.end(tag, StatusCode::SGL_OFFSET_INVALID, Extents::new(), conn),
                }
            }
            TargetEvent::CapsuleDamaged { sqe } => {
                self.log.push(format!("damaged capsule {}", sqe.cid()));
                let index = self.free.pop().unwrap();
                let tag = ReqTag {
                    cid: sqe.cid(),
                    index,
                };
                self.end(
                    tag,
                    StatusCode::TRANSIENT_TRANSPORT_ERROR,
                    Extents::new(),
                    conn,
                );
            }
            TargetEvent::Fetched { tag, data } => self.store(tag, &data, conn),
            TargetEvent::FetchDamaged { tag } => {
                self.log.push(format!("damaged fetch {}", tag.cid));
                self.end(
                    tag,
                    StatusCode::TRANSIENT_TRANSPORT_ERROR,
                    Extents::new(),
                    conn,
                );
            }
            TargetEvent::Closed(why) => {
                assert!(self.closed.is_none(), "closed twice");
                self.closed = Some(why);
            }
        }
    }

    fn store(&mut self, tag: ReqTag, data: &[u8], conn: &mut TargetConn) {
        self.written.insert(tag.cid, data.to_vec());
        self.end(tag, StatusCode::SUCCESS, Extents::new(), conn);
    }

    fn end(&mut self, tag: ReqTag, status: StatusCode, data: Extents, conn: &mut TargetConn) {
        self.free.push(tag.index);
        conn.respond(Response {
            tag,
            cqe: Cqe::new(tag.cid, status),
            data,
            sgl: Sqe::zeroed().sgl_descriptor(),
            zero_copy: None,
        });
    }
}

/// How one command ended, as the host saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Outcome {
    pub status: StatusCode,
    pub transferred: u32,
    pub read: Option<Vec<u8>>,
}

pub(super) struct Pair {
    pub target: TargetConn,
    pub host: HostConn,
    pub app: App,
    pub pools: Pools,
    /// The host's own memory.
    pub memory: Pool,
    pub to_target: VecDeque<u8>,
    pub to_host: VecDeque<u8>,
    pub now: Nanos,
    pub ready: bool,
    pub outcomes: BTreeMap<u16, Outcome>,
    pub host_closed: Option<Closed>,
    /// Everything that went each way.
    pub sent_to_host: Vec<u8>,
    pub sent_to_target: Vec<u8>,
    /// Largest read or write of a byte pipe; 0: by chance.
    pub chunk: usize,
    pub random: Random,
    target_buffers: RxBuffers,
    host_buffers: RxBuffers,
}

impl Pair {
    pub(super) fn new(target: TcpTargetConfig, host: HostConfig) -> Self {
        Self::with_buffers(target, host, 160, 8)
    }

    pub(super) fn with_buffers(
        target: TcpTargetConfig,
        host: HostConfig,
        small: usize,
        large: usize,
    ) -> Self {
        let now = Nanos(1_000_000_000);
        Self {
            target: TargetConn::new(Rc::new(target), now),
            host: HostConn::new(host, now),
            app: App::new(),
            pools: pools(small, large),
            memory: pool(small, large),
            to_target: VecDeque::new(),
            to_host: VecDeque::new(),
            now,
            ready: false,
            outcomes: BTreeMap::new(),
            host_closed: None,
            sent_to_host: Vec::new(),
            sent_to_target: Vec::new(),
            chunk: usize::MAX,
            random: Random::new(1),
            target_buffers: RxBuffers::new(4, 16 << 10),
            host_buffers: RxBuffers::new(4, 16 << 10),
        }
    }

    /// A pair whose handshake and Connect are done.
    pub(super) fn connected(
        target: TcpTargetConfig,
        host: HostConfig,
        params: QueueParams,
    ) -> Self {
        let mut pair = Self::new(target, host);
        pair.run();
        assert!(
            pair.ready,
            "handshake failed: {:?} {:?}",
            pair.app.closed, pair.host_closed
        );
        if params.qid != 0 {
            pair.host
                .set_in_capsule_bytes(TcpTargetConfig::default().in_capsule_bytes);
        }
        pair.target.established(params);
        pair
    }

    fn limit(&mut self) -> usize {
        match self.chunk {
            0 => 1 + self.random.index(300),
            n => n,
        }
    }

    /// Moves bytes and events until no side makes progress.
    pub(super) fn run(&mut self) {
        for _ in 0..2_000_000 {
            if !self.step() {
                return;
            }
        }
        panic!("the pair never comes to rest");
    }

    pub(super) fn step(&mut self) -> bool {
        let moved = self.step_target() | self.step_host();
        self.now = self.now + Duration::from_micros(10);
        moved
    }

    fn step_target(&mut self) -> bool {
        let limit = self.limit();
        let mut moved = false;
        if self.target.wants_read() && !self.to_target.is_empty() {
            let mut slices = RecvSlices::new();
            let ready = self
                .target
                .recv_slices(&mut self.target_buffers, &mut slices);
            let n = scatter(&mut self.to_target, &mut slices, limit);
            drop(slices);
            if ready {
                self.target.received(n, self.now);
                moved = true;
            }
        }
        while let TargetPoll::Event(event) = self.target.poll(&self.pools, self.now) {
            self.app.now = self.now;
            self.app.handle(event, &mut self.target, &self.pools);
            moved = true;
        }
        self.target
            .end_receive(&mut self.target_buffers, false, self.now);
        if self.target.wants_write() {
            let mut slices = Slices::new();
            self.target.send_slices(&mut slices);
            let bytes = gather(&slices, limit);
            drop(slices);
            self.target.sent(bytes.len(), self.now);
            self.to_host.extend(&bytes);
            self.sent_to_host.extend_from_slice(&bytes);
            moved = true;
        }
        moved
    }

    fn step_host(&mut self) -> bool {
        let limit = self.limit();
        let mut moved = false;
        if self.host.wants_write() {
            let mut slices = Slices::new();
            self.host.send_slices(&mut slices);
            let bytes = gather(&slices, limit);
            drop(slices);
            self.host.sent(bytes.len());
            self.to_target.extend(&bytes);
            self.sent_to_target.extend_from_slice(&bytes);
            moved = true;
        }
        if self.host.wants_read() && !self.to_host.is_empty() {
            let mut slices = RecvSlices::new();
            let ready = self.host.recv_slices(&mut self.host_buffers, &mut slices);
            let n = scatter(&mut self.to_host, &mut slices, limit);
            drop(slices);
            if ready {
                self.host.received(n);
                moved = true;
            }
        }
        while let HostPoll::Event(event) = self.host.poll(self.now) {
            moved = true;
            match event {
                HostEvent::Ready => self.ready = true,
                HostEvent::Completion {
                    cqe,
                    read,
                    transferred,
                } => {
                    let read = read.map(|buf| buf[..transferred as usize].to_vec());
                    let outcome = Outcome {
                        status: cqe.status(),
                        transferred,
                        read,
                    };
                    assert!(
                        self.outcomes.insert(cqe.cid(), outcome).is_none(),
                        "completed twice"
                    );
                }
                HostEvent::Closed(why) => {
                    assert!(self.host_closed.is_none(), "closed twice");
                    self.host_closed = Some(why);
                }
            }
        }
        self.host
            .end_receive(&mut self.host_buffers, false, self.now);
        moved
    }

    pub(super) fn read(&mut self, cid: u16, seed: u32, len: usize) {
        let mut sqe = Sqe::for_namespace(io::READ, cid, 1);
        sqe.cdw10 = seed.into();
        let read = (len > 0).then(|| self.memory.acquire(len).unwrap());
        self.host.submit(HostCommand {
            sqe,
            write: None,
            read,
        });
    }

    pub(super) fn write(&mut self, cid: u16, seed: u32, len: usize) {
        let mut sqe = Sqe::for_namespace(io::WRITE, cid, 1);
        sqe.cdw10 = seed.into();
        let write = Some(filled(&self.memory, seed, len));
        self.host.submit(HostCommand {
            sqe,
            write,
            read: None,
        });
    }

    /// Every buffer is back where it belongs.
    pub(super) fn assert_no_leak(&self) {
        for pool in [&self.pools.io, &self.pools.admin, &self.memory] {
            for class in pool.stats() {
                assert_eq!(
                    class.free, class.count,
                    "buffers of {} bytes are missing",
                    class.size
                );
            }
        }
    }
}

pub(super) fn io_queue(flow_control_off: bool) -> QueueParams {
    QueueParams {
        qid: 1,
        entries: 128,
        flow_control_off,
    }
}

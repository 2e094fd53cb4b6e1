//! The bodies of the fuzz targets `tcp_target` and `tcp_host`, here so that ordinary tests can
//! replay their corpora and run them on noise.
//!
//! The first byte of an input seeds the sizes of the receives, the rest is the byte stream. For
//! every input the machine must not panic, must end when the peer closes, and must release every
//! buffer.

use std::rc::Rc;

use nacre_bdev::Extents;
use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::status::StatusCode;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Nanos;

use super::{
    HostConfig, HostConn, HostPoll, RecvSlices, RxBuffers, Slices, TargetConn, TargetEvent,
    TargetPoll, TcpTargetConfig,
};
use crate::transport::{HostCommand, HostEvent, Pools, QueueParams, ReqTag, Response};

const NOW: Nanos = Nanos(0);
const ENTRIES: u16 = 16;

/// Feeds a controller.
pub fn target(input: &[u8]) {
    let Some((&seed, mut stream)) = input.split_first() else {
        return;
    };
    let pools = Pools {
        io: pool(),
        admin: pool(),
    };
    let mut conn = TargetConn::new(Rc::new(TcpTargetConfig::default()), NOW);
    let mut buffers = RxBuffers::new(2, 16 << 10);
    let mut app = App {
        pools: &pools,
        free: (0..64).collect(),
        sizes: [0; 64],
        closed: 0,
    };
    let mut cut = Cut(seed);
    let mut established = false;
    // Each round either takes bytes or ends: more rounds than bytes mean a machine that never
    // rests.
    for round in 0.. {
        assert!(round <= 2 * input.len() + 64, "the machine never rests");
        if conn.wants_read() && !stream.is_empty() {
            let mut slices = RecvSlices::new();
            assert!(
                conn.recv_slices(&mut buffers, &mut slices),
                "two buffers serve one connection"
            );
            let n = cut.fill(&mut stream, &mut slices);
            drop(slices);
            conn.received(n, NOW);
        }
        app.take_events(&mut conn);
        conn.end_receive(&mut buffers, false, NOW);
        if !established && conn.pdus().0 > 0 {
            established = true;
            conn.established(QueueParams {
                qid: 1,
                entries: ENTRIES,
                flow_control_off: seed & 1 != 0,
            });
            conn.set_in_place(seed & 2 != 0);
        }
        let mut slices = Slices::new();
        conn.send_slices(&mut slices);
        let n = slices.iter().map(|slice| slice.len()).sum();
        drop(slices);
        conn.sent(n, NOW);
        if stream.is_empty() && !conn.has_news() {
            break;
        }
    }
    conn.peer_closed(None);
    app.take_events(&mut conn);
    conn.end_receive(&mut buffers, false, NOW);
    assert!(conn.is_finished() && app.closed == 1);
    assert_all_back(&pools.io);
    assert_all_back(&pools.admin);
}

/// Feeds a host that has two reads and two writes outstanding, and again when they end.
pub fn host(input: &[u8]) {
    let Some((&seed, mut stream)) = input.split_first() else {
        return;
    };
    let memory = pool();
    let digests = Digests {
        header: seed & 0x40 != 0,
        data: seed & 0x80 != 0,
    };
    let mut conn = HostConn::new(
        HostConfig {
            entries: 8,
            digests,
            ..HostConfig::default()
        },
        NOW,
    );
    let mut buffers = RxBuffers::new(2, 64 << 10);
    let mut cut = Cut(seed);
    let mut closed = 0;
    for round in 0.. {
        assert!(round <= 2 * input.len() + 64, "the machine never rests");
        if conn.wants_read() && !stream.is_empty() {
            let mut slices = RecvSlices::new();
            assert!(
                conn.recv_slices(&mut buffers, &mut slices),
                "two buffers serve one connection"
            );
            let n = cut.fill(&mut stream, &mut slices);
            drop(slices);
            conn.received(n);
        }
        while let HostPoll::Event(event) = conn.poll(NOW) {
            match event {
                HostEvent::Ready => (1..=4).for_each(|cid| submit(&mut conn, &memory, cid)),
                HostEvent::Completion {
                    cqe,
                    read,
                    transferred,
                } => {
                    assert!(transferred as usize <= read.as_ref().map_or(0, |read| read.len()));
                    drop(read);
                    submit(&mut conn, &memory, cqe.cid());
                }
                HostEvent::Closed(_) => closed += 1,
            }
        }
        conn.end_receive(&mut buffers, false, NOW);
        let mut slices = Slices::new();
        conn.send_slices(&mut slices);
        let n = slices.iter().map(|slice| slice.len()).sum();
        drop(slices);
        conn.sent(n);
        if stream.is_empty() && !conn.has_news() {
            break;
        }
    }
    conn.peer_closed(None);
    while let HostPoll::Event(event) = conn.poll(NOW) {
        closed += usize::from(matches!(event, HostEvent::Closed(_)));
    }
    assert!(conn.is_finished() && closed == 1);
    drop(conn);
    assert_all_back(&memory);
}

fn submit(conn: &mut HostConn, memory: &Pool, cid: u16) {
    let len = [4096, 4096, 40_000, 9000][usize::from(cid) % 4];
    let opcode = if cid.is_multiple_of(2) {
        io::WRITE
    } else {
        io::READ
    };
    let sqe = Sqe::for_namespace(opcode, cid, 1);
    let buf = memory.acquire(len);
    let (write, read) = if opcode == io::WRITE {
        (buf, None)
    } else {
        (None, buf)
    };
    conn.submit(HostCommand { sqe, write, read });
}

fn pool() -> Pool {
    Pool::heap(&[
        ClassSpec {
            size: 8192,
            count: 20,
        },
        ClassSpec {
            size: 64 << 10,
            count: 8,
        },
    ])
}

fn assert_all_back(pool: &Pool) {
    for class in pool.stats() {
        assert_eq!(
            class.free, class.count,
            "a buffer of {} bytes is missing",
            class.size
        );
    }
}

/// A controller's answers: reads give bytes, writes are fetched, everything else fails.
struct App<'a> {
    pools: &'a Pools,
    free: Vec<u16>,
    sizes: [usize; 64],
    closed: usize,
}

impl App<'_> {
    fn take_events(&mut self, conn: &mut TargetConn) {
        while let TargetPoll::Event(event) = conn.poll(self.pools, NOW) {
            assert_eq!(self.closed, 0, "an event after the last");
            match event {
                TargetEvent::Capsule { sqe, data } => self.command(&sqe, data.is_some(), conn),
                TargetEvent::CapsuleDamaged { sqe } => {
                    let tag = self.tag(sqe.cid());
                    self.end(
                        tag,
                        StatusCode::TRANSIENT_TRANSPORT_ERROR,
                        Extents::new(),
                        conn,
                    );
                }
                TargetEvent::Fetched { tag, data } => {
                    assert_eq!(
                        data.len(),
                        self.sizes[usize::from(tag.index)],
                        "another fetch's data"
                    );
                    self.end(tag, StatusCode::SUCCESS, Extents::new(), conn);
                }
                TargetEvent::FetchDamaged { tag } => {
                    self.end(
                        tag,
                        StatusCode::TRANSIENT_TRANSPORT_ERROR,
                        Extents::new(),
                        conn,
                    );
                }
                TargetEvent::Closed(_) => self.closed += 1,
            }
        }
    }

    fn command(&mut self, sqe: &Sqe, has_data: bool, conn: &mut TargetConn) {
        let tag = self.tag(sqe.cid());
        let length = sqe.sgl().map_or(0, Sgl::length) as usize;
        let buf = if length > 0 {
            self.pools.io.acquire(length)
        } else {
            None
        };
        match (sqe.opcode, buf) {
            (io::WRITE, _) if has_data => self.end(tag, StatusCode::SUCCESS, Extents::new(), conn),
            (io::WRITE, Some(into)) => {
                self.sizes[usize::from(tag.index)] = length;
                conn.fetch(tag, into, NOW);
            }
            (io::READ, Some(buf)) => {
                self.end(tag, StatusCode::SUCCESS, [buf].into_iter().collect(), conn)
            }
            _ => self.end(
                tag,
                StatusCode::DATA_SGL_LENGTH_INVALID,
                Extents::new(),
                conn,
            ),
        }
    }

    fn tag(&mut self, cid: u16) -> ReqTag {
        let index = self.free.pop().expect("the machine limits the commands");
        ReqTag { cid, index }
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

/// Cuts the stream, repeatably.
struct Cut(u8);

impl Cut {
    fn fill(&mut self, stream: &mut &[u8], slices: &mut RecvSlices<'_>) -> usize {
        self.0 = self.0.wrapping_mul(109).wrapping_add(57);
        let limit = match self.0 % 4 {
            0 => 1 + usize::from(self.0),
            1 => 4120,
            _ => usize::MAX,
        };
        let mut n = 0;
        for slice in slices {
            let take = slice.len().min(stream.len()).min(limit - n);
            slice[..take].copy_from_slice(&stream[..take]);
            *stream = &stream[take..];
            n += take;
        }
        n
    }
}

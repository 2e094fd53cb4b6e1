//! Tests of commands that Nacre's own host never sends: several SGL descriptors, keys to
//! invalidate, invalid pointers.

use std::net::SocketAddr;
use std::time::Duration;

use nacre_bdev::Extents;
use nacre_hugepages::{Arena, ArenaOptions, Buf, ClassSpec, Pool, register_all};
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{Closed, ConnId, Event, Events, Pools, ReqTag, Response};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::rdma::Request;
use nacre_nvmf_wire::{Cqe, Sgl, SglDescriptor, Sqe, StatusCode};
use nacre_transport_rdma_verbs::sim::Target;
use nacre_transport_rdma_verbs::{
    Access, Batch, CmEventKind, CmOptions, ConnParams, ConnectionManager, Lane, LaneConfig, MrKey,
    QpCaps, Queues, RecvConfig, WcStatus,
};
use zerocopy::{FromBytes, IntoBytes};

use super::rig::{HOST, Options, TestRig};

const CLASSES: [ClassSpec; 1] = [ClassSpec {
    size: 8192,
    count: 64,
}];

/// A host that sends arbitrary capsules.
struct RawHost {
    lane: Lane,
    batch: Batch,
    memory: Pool,
    rkey: u32,
    cm: Box<dyn ConnectionManager>,
    _arena: Arena,
}

impl RawHost {
    /// Connects to queue `qid`.
    fn connect(rig: &TestRig, qid: u16) -> Self {
        let provider = rig.fabric.provider();
        let arena = Arena::allocate(ArenaOptions::new(Pool::bytes_for(&CLASSES) as u64)).unwrap();
        let device = provider.device(rig.host_device).unwrap();
        let domain = device.protection_domain(Access::Remote).unwrap();
        let key_slot = register_all(std::slice::from_ref(&arena), &domain.hook()).unwrap();
        let memory = Pool::on_arena(&arena, &CLASSES).unwrap();
        let queues = Queues::new(&domain, 64, None).unwrap();
        let mut cm = provider.connection_manager().unwrap();
        let at = SocketAddr::new(rig.address.ip(), rig.address.port());
        let wait = Duration::from_secs(1);
        let id = cm
            .resolve_address(Some(HOST), at, wait, CmOptions::default())
            .unwrap();
        cm.next_event().unwrap();
        cm.resolve_route(id, wait).unwrap();
        cm.next_event().unwrap();
        let caps = QpCaps {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let endpoint = queues.create_qp(&mut *cm, id, caps).unwrap();
        let config = LaneConfig {
            index: 0,
            key_slot,
            messages: memory.acquire(16 * 64).unwrap(),
            message_bytes: 64,
            recv: Some(RecvConfig {
                headers: memory.acquire(16 * 16).unwrap(),
                header_bytes: 16,
                entries: 16,
                data_bytes: 0,
            }),
        };
        let mut lane = Lane::new(endpoint, config).unwrap();
        lane.post_recv(None).unwrap();
        let mut params = ConnParams {
            responder_resources: 16,
            rnr_retry_count: 7,
            ..ConnParams::default()
        };
        let request = Request::new(qid, 16, 1).to_data();
        params
            .private_data
            .extend(request.as_bytes().iter().copied());
        cm.connect(id, &params).unwrap();
        let rkey = MrKey::from_bits(memory.acquire(1).unwrap().key(key_slot).unwrap()).rkey;
        Self {
            lane,
            batch: Batch::new(16),
            memory,
            rkey,
            cm,
            _arena: arena,
        }
    }
}

pub(super) struct World {
    host: RawHost,
    pub rig: TestRig,
    pools: Pools,
    events: Events,
    pub conn: Option<ConnId>,
    pub closed: Vec<Closed>,
    pub written: Vec<u8>,
    /// The data pointer of the command in flight.
    pointer: SglDescriptor,
}

impl World {
    fn new() -> Self {
        Self::with(Options::default(), 1)
    }

    /// Connects a host to queue `qid`.
    pub(super) fn with(options: Options, qid: u16) -> Self {
        let mut rig = TestRig::new(options);
        let pools = Pools {
            io: rig.pool(&CLASSES),
            admin: rig.pool(&CLASSES),
        };
        let host = RawHost::connect(&rig, qid);
        let mut world = Self {
            host,
            rig,
            pools,
            events: Events::with_capacity(16),
            conn: None,
            closed: Vec::new(),
            written: Vec::new(),
            pointer: Sqe::zeroed().sgl_descriptor(),
        };
        world.until_connected();
        world
    }

    fn until_connected(&mut self) {
        (0..6).for_each(|_| self.turn());
        let event = self.host.cm.next_event().unwrap().map(|event| event.kind);
        assert!(
            matches!(event, Some(CmEventKind::Established { .. })),
            "{event:?}"
        );
    }

    /// Connects the same host again.
    fn connect_again(&mut self, qid: u16) {
        (0..10).for_each(|_| self.turn());
        self.host = RawHost::connect(&self.rig, qid);
        self.until_connected();
    }

    fn turn(&mut self) {
        let now = self.rig.now();
        self.rig.transport.poll(now, &self.pools, &mut self.events);
        let events: Vec<Event> = self.events.drain().collect();
        for event in events {
            let (conn, sqe_or_tag, data, status) = match event {
                Event::Opened { conn, .. } => {
                    self.conn = Some(conn);
                    continue;
                }
                Event::Capsule {
                    conn,
                    sqe,
                    data: None,
                } if matches!(sqe.sgl(), Ok(Sgl::InCapsule { .. })) => {
                    let status = StatusCode::SGL_OFFSET_INVALID.with_dnr();
                    (conn, Ok(sqe), None, status)
                }
                Event::Capsule { conn, sqe, data } if fetches(sqe.opcode) && data.is_none() => {
                    let tag = ReqTag {
                        cid: sqe.cid(),
                        index: 0,
                    };
                    let into = self.pools.io.acquire(8192).unwrap();
                    self.rig.transport.fetch(conn, tag, &sqe, into);
                    continue;
                }
                Event::Capsule { conn, sqe, data } => (conn, Ok(sqe), data, StatusCode::SUCCESS),
                Event::Fetched { conn, tag, data } => {
                    (conn, Err(tag), Some(data), StatusCode::SUCCESS)
                }
                Event::FetchRefused { conn, tag, status } => (conn, Err(tag), None, status),
                Event::Closed { why, .. } => {
                    self.closed.push(why);
                    continue;
                }
                _ => continue,
            };
            let mut extents = Extents::new();
            let (cid, sgl) = match sqe_or_tag {
                Ok(sqe) => {
                    if sqe.opcode == io::READ {
                        let mut buf = self.pools.io.acquire(8192).unwrap();
                        fill(&mut buf);
                        extents.push(buf);
                    }
                    (sqe.cid(), sqe.sgl_descriptor())
                }
                Err(tag) => (tag.cid, self.pointer),
            };
            if let Some(data) = data {
                self.written = data.to_vec();
            }
            let response = Response {
                tag: ReqTag { cid, index: 0 },
                cqe: Cqe::new(cid, status),
                data: extents,
                sgl,
                zero_copy: None,
            };
            self.rig.transport.respond(conn, response);
        }
        self.rig.transport.flush(now);
    }

    /// Submits a read of 8 KiB into `places` memory ranges.
    fn read_scattered(&mut self, places: usize, expected: StatusCode) {
        let mut whole = self.host.memory.acquire(8192).unwrap();
        fill(&mut whole);
        let data = whole.to_vec();
        whole.bytes_mut().unwrap().fill(0);
        let each = 8192 / places;
        let place = |at: usize| {
            let end = if at + 1 == places {
                8192
            } else {
                (at + 1) * each
            };
            keyed(&whole.slice(at * each, end - at * each), self.host.rkey).0
        };
        let descriptors: Vec<u8> = (0..places).flat_map(place).collect();
        let sqe = list(io::READ, 0, descriptors.len() as u32);
        assert_eq!(self.call(sqe, &descriptors).0, expected, "{places} places");
        assert_eq!(whole[..] == data[..], expected.is_success());
    }

    fn send(&mut self, sqe: Sqe, capsule: &[u8]) {
        let mut data = self.host.memory.acquire(8192).unwrap();
        data.bytes_mut().unwrap()[..capsule.len()].copy_from_slice(capsule);
        data.truncate(capsule.len());
        let data = (!capsule.is_empty()).then_some(data);
        self.pointer = sqe.sgl_descriptor();
        self.host
            .lane
            .send_with(sqe.as_bytes(), None, data)
            .unwrap();
        self.host.lane.signal_last();
        self.host.lane.post().unwrap();
    }

    /// Sends a command in a capsule with additional data; returns its status, and the invalidated
    /// key.
    pub(super) fn call(&mut self, sqe: Sqe, capsule: &[u8]) -> (StatusCode, Option<u32>) {
        self.send(sqe, capsule);
        for _ in 0..10 {
            self.turn();
            let queues = self.host.lane.queues().clone();
            queues.poll(&mut self.host.batch, 16).unwrap();
            let mut answer = None;
            while let Some(done) = self.host.batch.next() {
                if let Some(message) = self.host.lane.received(&done) {
                    let cqe = Cqe::read_from_bytes(message.header()).unwrap();
                    answer = Some((cqe.status(), done.wc().invalidated));
                } else {
                    self.host.lane.sent(&done);
                }
            }
            self.host.lane.post_recv(None).unwrap();
            if let Some(answer) = answer {
                return answer;
            }
        }
        panic!("no answer; closed: {:?}", self.closed);
    }
}

fn fill(buf: &mut Buf) {
    let bytes = buf.bytes_mut().unwrap();
    bytes
        .iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = (at / 100) as u8);
}

/// Commands whose 8 KiB of data the target fetches.
fn fetches(opcode: u8) -> bool {
    matches!(opcode, io::WRITE | io::COMPARE | io::DATASET_MANAGEMENT)
}

fn keyed(buf: &Buf, key: u32) -> SglDescriptor {
    SglDescriptor::from(Sgl::Keyed {
        address: buf.as_ptr().addr() as u64,
        length: buf.len() as u32,
        key,
        invalidate: false,
    })
}

pub(super) fn list(opcode: u8, offset: u64, length: u32) -> Sqe {
    Sqe::for_namespace(opcode, 9, 1).with_sgl(Sgl::InCapsuleDescriptors { offset, length })
}

/// Data in three pieces, in both directions, with any division.
#[test]
fn several_descriptors() {
    let mut world = World::new();
    let mut whole = world.host.memory.acquire(8192).unwrap();
    fill(&mut whole);
    let expected = whole.to_vec();
    let pieces = |buf: &Buf, key| {
        let parts = [
            buf.slice(0, 100),
            buf.slice(100, 5000),
            buf.slice(5100, 3092),
        ];
        parts
            .iter()
            .flat_map(|part| keyed(part, key).0)
            .collect::<Vec<u8>>()
    };
    let descriptors = pieces(&whole, world.host.rkey);
    let answer = world.call(list(io::WRITE, 0, 48), &descriptors);
    assert_eq!(answer, (StatusCode::SUCCESS, None));
    assert!(world.written == expected);
    whole.bytes_mut().unwrap().fill(0);
    let descriptors = pieces(&whole, world.host.rkey);
    assert_eq!(
        world.call(list(io::READ, 0, 48), &descriptors).0,
        StatusCode::SUCCESS
    );
    assert!(whole[..] == expected[..]);
    // The lengths of the pieces do not add up to the data length.
    let less = &descriptors[..32];
    let wrong = StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr();
    assert_eq!(world.call(list(io::WRITE, 0, 32), less).0, wrong);
    assert_eq!(world.call(list(io::READ, 0, 32), less).0, wrong);
    assert!(world.closed.is_empty());
}

/// Goal: descriptors larger than a list are accepted; descriptors of block data must match its
/// length. Method: the target fetches 8 KiB, which ends inside a descriptor, or before one.
#[test]
fn a_list_may_be_shorter_than_its_descriptors() {
    let mut world = World::new();
    let mut whole = world.host.memory.acquire(8192).unwrap();
    fill(&mut whole);
    let more = world.host.memory.acquire(5000).unwrap();
    let key = world.host.rkey;
    let across = (
        [keyed(&more, key).0, keyed(&whole, key).0],
        [&more[..], &whole[..3192]],
    );
    let before = (
        [keyed(&whole, key).0, keyed(&more, key).0],
        [&whole[..], &[]],
    );
    for (descriptors, sent) in [across, before] {
        let (descriptors, sent) = (descriptors.concat(), sent.concat());
        for opcode in [io::DATASET_MANAGEMENT, io::WRITE, io::COMPARE] {
            let expected = match opcode {
                io::DATASET_MANAGEMENT => StatusCode::SUCCESS,
                _ => StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr(),
            };
            world.written.clear();
            let answer = world.call(list(opcode, 0, 32), &descriptors);
            assert_eq!(answer.0, expected, "{opcode:#x}");
            assert_eq!(world.written == sent, expected.is_success(), "{opcode:#x}");
        }
    }
    assert!(world.closed.is_empty());
}

/// Goal: a response that needs most of the send queue is sent, whatever the queue holds. Method: a
/// shallow queue, and any number of earlier responses, which hold no buffers and request no
/// completions.
#[test]
fn a_large_response_behind_small_ones() {
    let options = Options::with(|options| options.device.max_qp_wr = 32);
    for before in 0..40 {
        let mut world = World::with(options.clone(), 1);
        for _ in 0..before {
            let flush = Sqe::for_namespace(io::FLUSH, 9, 1);
            assert_eq!(world.call(flush, &[]).0, StatusCode::SUCCESS);
        }
        world.read_scattered(16, StatusCode::SUCCESS);
        world.read_scattered(16, StatusCode::SUCCESS);
    }
}

/// Goal: completions are reserved for every request that a queue pair can have posted, even if the
/// device granted more than requested. Method: the send queue is full when the queue pair ends; no
/// other queue pair ends.
#[test]
fn granted_more() {
    let mut world = World::with(
        Options::with(|options| {
            (options.config.srq_size, options.config.cq_size) = (0, 1);
            options.config.read_depth = 1;
        }),
        1,
    );
    let place = world.host.memory.acquire(512).unwrap();
    let descriptors = keyed(&place, world.host.rkey).0.repeat(16);
    let number = world.rig.plug.queue_pairs()[0].number;
    world.rig.fabric.pause(number, true);
    for _ in 0..15 {
        world.send(list(io::READ, 0, 256), &descriptors);
    }
    (0..4).for_each(|_| world.turn());
    assert!(world.rig.plug.total().responses_waited > 0);
    world.rig.fabric.flush(number);
    (0..20).for_each(|_| world.turn());
    match &world.closed[..] {
        [Closed::Broken(why)] => assert!(why.contains("FLUSH"), "{why}"),
        other => panic!("{other:?}"),
    }
}

/// Goal: a response that needs more than the whole send queue fails, and no later response waits
/// for it.
#[test]
fn scattered_too_widely() {
    let mut world = World::with(
        Options::with(|options| {
            options.device.max_qp_wr = 32;
            options.config.max_sge = 32;
        }),
        1,
    );
    world.read_scattered(32, StatusCode::INTERNAL_ERROR);
    world.read_scattered(30, StatusCode::SUCCESS);
    assert!(world.closed.is_empty());
}

/// An invalid descriptor fails its command, and no other.
#[test]
fn invalid_descriptors_fail_only_their_command() {
    let mut world = World::new();
    let buf = world.host.memory.acquire(8192).unwrap();
    let good = keyed(&buf, world.host.rkey).0;
    let offset = StatusCode::SGL_OFFSET_INVALID.with_dnr();
    for (at, length) in [(16, 16), (u64::MAX, 16), (4096, 16), (0, 32)] {
        assert_eq!(
            world.call(list(io::WRITE, at, length), &good).0,
            offset,
            "{at} {length}"
        );
        assert_eq!(
            world.call(list(io::READ, at, length), &good).0,
            offset,
            "{at} {length}"
        );
    }
    let many = StatusCode::INVALID_NUMBER_OF_SGL_DESCRIPTORS.with_dnr();
    assert_eq!(
        world.call(list(io::WRITE, 0, 17 * 16), &good.repeat(17)).0,
        many
    );
    let kind = StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr();
    let transport = Sgl::Transport { length: 8192 };
    for opcode in [io::WRITE, io::READ] {
        let sqe = Sqe::for_namespace(opcode, 9, 1).with_sgl(transport);
        assert_eq!(world.call(sqe, &[]).0, kind);
    }
    let nested = SglDescriptor::from(transport).0;
    assert_eq!(world.call(list(io::WRITE, 0, 16), &nested).0, kind);
    assert!(world.closed.is_empty());
    let sqe = Sqe::for_namespace(io::WRITE, 9, 1);
    let sqe = sqe.with_sgl(SglDescriptor(good).parse().unwrap());
    assert_eq!(world.call(sqe, &[]), (StatusCode::SUCCESS, None));
}

/// A response invalidates the key that its command names; an invalid key closes the connection.
#[test]
fn invalid_remote_keys() {
    let mut world = World::new();
    // Memory with its own key: without the other memory this host could not listen.
    let arena = Arena::allocate(ArenaOptions::new(Pool::bytes_for(&CLASSES) as u64)).unwrap();
    let domain = world.host.lane.queues().domain();
    let slot = register_all(std::slice::from_ref(&arena), &domain.hook()).unwrap();
    let whole = Pool::on_arena(&arena, &CLASSES)
        .unwrap()
        .acquire(8192)
        .unwrap();
    let key = MrKey::from_bits(whole.key(slot).unwrap()).rkey;
    let sgl = |invalidate| Sgl::Keyed {
        address: whole.as_ptr().addr() as u64,
        length: 8192,
        key,
        invalidate,
    };
    let sqe = Sqe::for_namespace(io::WRITE, 9, 1);
    let answer = world.call(sqe.with_sgl(sgl(true)), &[]);
    assert_eq!(answer, (StatusCode::SUCCESS, Some(key)));
    // The key is invalid now: the target's READ fails and closes this connection, without losing
    // buffers.
    let sqe = Sqe::for_namespace(io::WRITE, 10, 1).with_sgl(sgl(false));
    world.host.lane.send(sqe.as_bytes(), None);
    world.host.lane.post().unwrap();
    (0..10).for_each(|_| world.turn());
    assert!(
        matches!(&world.closed[..], [Closed::Broken(why)] if why.contains("IBV_WC_REM_ACCESS_ERR")),
        "{:?}",
        world.closed
    );
    for class in world.pools.io.stats() {
        assert_eq!(class.free, class.count);
    }
}

/// A device announces SEND_WITH_INVALIDATE and fails it: one connection is lost. Later connections
/// do not use it, and the host gets its response.
#[test]
fn a_device_that_cannot_invalidate() {
    let mut world = World::new();
    let buf = world.host.memory.acquire(8192).unwrap();
    let sqe = |buf: &Buf, key| {
        let sgl = Sgl::Keyed {
            address: buf.as_ptr().addr() as u64,
            length: 8192,
            key,
            invalidate: true,
        };
        Sqe::for_namespace(io::READ, 9, 1).with_sgl(sgl)
    };
    let pairs = world.rig.plug.queue_pairs();
    assert!(pairs[0].invalidate);
    let status = WcStatus::LocalQpOperation;
    world
        .rig
        .fabric
        .inject_status(pairs[0].number, Target::Send, 0, status);
    world
        .host
        .lane
        .send(sqe(&buf, world.host.rkey).as_bytes(), None);
    world.host.lane.post().unwrap();
    (0..10).for_each(|_| world.turn());
    assert!(
        matches!(&world.closed[..], [Closed::Broken(why)] if why.contains("IBV_WC_LOC_QP_OP_ERR")),
        "{:?}",
        world.closed
    );
    drop(buf);
    world.connect_again(1);
    assert!(!world.rig.plug.queue_pairs().last().unwrap().invalidate);
    let buf = world.host.memory.acquire(8192).unwrap();
    let answer = world.call(sqe(&buf, world.host.rkey), &[]);
    assert_eq!(answer, (StatusCode::SUCCESS, None));
    // The same error without SEND_WITH_INVALIDATE does not change the device's use of it.
    let mut world = World::new();
    let number = world.rig.plug.queue_pairs()[0].number;
    world
        .rig
        .fabric
        .inject_status(number, Target::Send, 0, status);
    let buf = world.host.memory.acquire(8192).unwrap();
    let plain = Sqe::for_namespace(io::READ, 9, 1).with_sgl(Sgl::Keyed {
        address: buf.as_ptr().addr() as u64,
        length: 8192,
        key: world.host.rkey,
        invalidate: false,
    });
    world.host.lane.send(plain.as_bytes(), None);
    world.host.lane.post().unwrap();
    (0..10).for_each(|_| world.turn());
    assert_eq!(world.closed.len(), 1);
    world.connect_again(1);
    assert!(world.rig.plug.queue_pairs().last().unwrap().invalidate);
}

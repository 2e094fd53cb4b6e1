//! Tests of the simulated devices, through the send and receive rings.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool, register_all};

use super::{ConnectFault, Fabric, Target, attributes};
use crate::*;

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
const CAPS: QpCaps = QpCaps {
    max_send_wr: 16,
    max_recv_wr: 0,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline: 64,
};

/// One end: a device, its memory and a connection manager.
struct End {
    cm: Box<dyn ConnectionManager>,
    device: Arc<dyn Device>,
    queues: Queues,
    pool: Pool,
    _arena: Arena,
    slot: usize,
    receiver: Receiver,
    batch: Batch,
}

impl End {
    fn new(fabric: &Fabric, at: IpAddr, access: Access) -> Self {
        Self::on(fabric, attributes("sim0"), at, access)
    }

    fn on(fabric: &Fabric, device: DeviceAttributes, at: IpAddr, access: Access) -> Self {
        let id = fabric.add_device(device, &[at]).unwrap();
        let provider = fabric.provider();
        let device = provider.device(id).unwrap();
        let domain = device.protection_domain(access).unwrap();
        let arena = Arena::allocate(ArenaOptions::new(4 << 20)).unwrap();
        let slot = register_all(std::slice::from_ref(&arena), &domain.hook()).unwrap();
        let classes = [
            ClassSpec {
                size: 4096,
                count: 64,
            },
            ClassSpec {
                size: 65536,
                count: 8,
            },
        ];
        let pool = Pool::on_arena(&arena, &classes).unwrap();
        let queues = Queues::new(&domain, 64, Some((8, 2))).unwrap();
        let config = RecvConfig {
            headers: pool.acquire(8 * 64).unwrap(),
            header_bytes: 64,
            entries: 8,
            data_bytes: 4096,
        };
        let receiver = Receiver::new(&queues, slot, config).unwrap().unwrap();
        Self {
            cm: provider.connection_manager().unwrap(),
            device,
            queues,
            pool,
            _arena: arena,
            slot,
            receiver,
            batch: Batch::new(32),
        }
    }

    fn event(&mut self) -> CmEvent {
        self.cm.next_event().unwrap().expect("an event")
    }

    fn lane(&mut self, id: CmId) -> Lane {
        let endpoint = self.queues.create_qp(&mut *self.cm, id, CAPS).unwrap();
        let config = LaneConfig {
            index: 5,
            key_slot: self.slot,
            messages: self.pool.acquire(16 * 64).unwrap(),
            message_bytes: 64,
            recv: None,
        };
        Lane::new(endpoint, config).unwrap()
    }

    fn statuses(&mut self, lane: &mut Lane) -> Vec<(WcOpcode, WcStatus)> {
        self.queues.poll(&mut self.batch, 32).unwrap();
        let mut seen = Vec::new();
        while let Some(done) = self.batch.next() {
            let (operation, said) = (lane.operation(&done), done.wc().opcode);
            // A failed completion does not carry its operation.
            let failed = !done.wc().status.is_success();
            assert!(said == operation || failed && matches!(said, WcOpcode::Other(_)));
            if done.is_recv() {
                self.receiver.received(&done).unwrap();
            } else {
                lane.sent(&done);
            }
            seen.push((operation, done.wc().status));
        }
        seen
    }
}

fn pair(fabric: &Fabric) -> (End, Lane, CmId, End, Lane, CmId) {
    let a = End::new(fabric, A, Access::Remote);
    connected(a, End::new(fabric, B, Access::Local))
}

fn connected(mut a: End, mut b: End) -> (End, Lane, CmId, End, Lane, CmId) {
    let at = SocketAddr::new(B, 4420);
    b.cm.listen(at, 8, CmOptions::default()).unwrap();
    let second = Duration::from_secs(1);
    let id =
        a.cm.resolve_address(Some(A), at, second, CmOptions::default())
            .unwrap();
    assert!(matches!(
        a.event().kind,
        CmEventKind::AddressResolved { .. }
    ));
    a.cm.resolve_route(id, second).unwrap();
    assert_eq!(a.event().kind, CmEventKind::RouteResolved);
    let a_lane = a.lane(id);
    let mut params = ConnParams {
        responder_resources: 4,
        initiator_depth: 4,
        retry_count: 7,
        rnr_retry_count: 7,
        ..ConnParams::default()
    };
    params.private_data.extend([1, 2, 3]);
    a.cm.connect(id, &params).unwrap();
    let event = b.event();
    let CmEventKind::ConnectRequest {
        params: request_params,
        ..
    } = &event.kind
    else {
        panic!("{event:?}");
    };
    assert_eq!(request_params.private_data[..4], [1, 2, 3, 0]);
    let b_lane = b.lane(event.id);
    b.cm.accept(event.id, &params).unwrap();
    assert!(matches!(a.event().kind, CmEventKind::Established { .. }));
    assert!(matches!(b.event().kind, CmEventKind::Established { .. }));
    (a, a_lane, id, b, b_lane, event.id)
}

/// A completion frees only requests of its own queues, even where another device's queue pair has
/// the same number and its lane the same index.
#[test]
fn numbers_are_those_of_a_device() {
    let fabric = Fabric::new();
    let a = End::new(&fabric, A, Access::Remote);
    let b = End::new(&fabric, B, Access::Local);
    fabric.number_from(a.device.id(), 9);
    fabric.number_from(b.device.id(), 9);
    let (mut a, mut lane, _, mut b, mut b_lane, _) = connected(a, b);
    assert_eq!((lane.number(), b_lane.number()), (9, 9));
    // What either posts first has the same place in its ring.
    b.receiver.post(Some(&b.pool)).unwrap();
    a.receiver.post(Some(&a.pool)).unwrap();
    for lane in [&mut lane, &mut b_lane] {
        lane.send(b"hello", None);
        lane.signal_last();
        lane.post().unwrap();
    }
    a.queues.poll(&mut a.batch, 32).unwrap();
    let mut taken = 0;
    while let Some(done) = a.batch.next() {
        assert!(b_lane.sent(&done).is_none() && b_lane.sends() == 1);
        assert!(b.receiver.received(&done).is_none());
        assert!(b_lane.timing(&done).is_none());
        if done.is_recv() {
            drop(a.receiver.received(&done).expect("its own"))
        } else {
            drop(lane.sent(&done))
        }
        taken += 1;
    }
    assert_eq!((taken, lane.sends()), (2, 0));
}

/// Messages wait for receivers, and arrive in order with their data behind the header.
#[test]
fn messages() {
    let fabric = Fabric::new();
    let (mut a, mut lane, _, mut b, mut b_lane, _) = pair(&fabric);
    let mut data = a.pool.acquire(100).unwrap();
    data.bytes_mut().unwrap().fill(9);
    lane.send_with(&[7; 64], None, Some(data)).unwrap();
    lane.signal_last();
    lane.post().unwrap();
    assert_eq!(a.statuses(&mut lane), [], "the receiver is not ready");
    let pool = b.pool.clone();
    assert_eq!(b.receiver.post(Some(&pool)).unwrap(), 8);
    b.queues.poll(&mut b.batch, 32).unwrap();
    let done = b.batch.next().unwrap();
    assert_eq!((done.lane(), done.wc().byte_len), (None, 164));
    let mut received = b.receiver.received(&done).unwrap();
    assert_eq!(received.header(), [7; 64]);
    assert_eq!(received.take_data().unwrap()[..100], [9; 100]);
    drop(received);
    assert!(b.receiver.received(&done).is_none(), "once");
    assert_eq!(a.statuses(&mut lane), [(WcOpcode::Send, WcStatus::Success)]);
    assert!(lane.is_idle() && b_lane.is_idle());
    assert!(b_lane.received(&done).is_none());
}

/// One-sided operations move bytes where the key and the bounds allow it, and only there.
#[test]
fn one_sided() {
    let fabric = Fabric::new();
    let (a, a_lane, _, mut b, mut lane, _) = pair(&fabric);
    let mut theirs = a.pool.acquire(4096).unwrap();
    theirs.bytes_mut().unwrap().fill(3);
    let key = MrKey::from_bits(theirs.key(a.slot).unwrap());
    let address = theirs.as_ptr().addr() as u64;
    lane.read(address, key.rkey, b.pool.acquire(4096).unwrap())
        .unwrap();
    lane.post().unwrap();
    b.queues.poll(&mut b.batch, 32).unwrap();
    let done = b.batch.next().unwrap();
    let mut read = lane.sent(&done).expect("the data of the read");
    assert_eq!(read[..], [3; 4096]);
    read.bytes_mut().unwrap().fill(4);
    lane.write(address, key.rkey, read).unwrap();
    lane.signal_last();
    lane.post().unwrap();
    assert_eq!(
        b.statuses(&mut lane),
        [(WcOpcode::Write, WcStatus::Success)]
    );
    assert_eq!(theirs[..], [4; 4096]);
    // Beyond the region: both ends are in error, and later requests flush in order.
    lane.write(u64::MAX - 100, key.rkey, b.pool.acquire(4096).unwrap())
        .unwrap();
    lane.send(&[0; 16], None);
    lane.post().unwrap();
    let seen = b.statuses(&mut lane);
    assert_eq!(
        seen,
        [
            (WcOpcode::Write, WcStatus::RemoteAccess),
            (WcOpcode::Send, WcStatus::WorkRequestFlushed)
        ]
    );
    assert!(lane.is_idle());
    assert_eq!(
        a.device.next_async_event().unwrap(),
        Some(AsyncEvent::QpAccessError {
            qp: a_lane.number()
        })
    );
    // The target's own keys give no access to peers.
    drop(a_lane);
    let ours = b.pool.acquire(512).unwrap();
    let key = MrKey::from_bits(ours.key(b.slot).unwrap());
    let (mut a, mut lane, ..) = {
        let fabric = Fabric::new();
        let (a, lane, _, b, b_lane, _) = pair(&fabric);
        (a, lane, b, b_lane)
    };
    lane.write(
        ours.as_ptr().addr() as u64,
        key.rkey,
        a.pool.acquire(512).unwrap(),
    )
    .unwrap();
    lane.post().unwrap();
    assert_ne!(a.statuses(&mut lane)[0].1, WcStatus::Success);
}

/// Goal: on soft-iWARP no buffer is reused while the device still reads it. Each request with data
/// has a completion of its own.
#[test]
fn data_stays_until_a_completion_of_its_own() {
    let fabric = Fabric::new();
    let early = DeviceAttributes {
        wire: Wire::Iwarp,
        ..attributes("siw0")
    };
    let a = End::new(&fabric, A, Access::Remote);
    let b = End::on(&fabric, early, B, Access::Local);
    let (a, _a_lane, _, mut b, mut b_lane, _) = connected(a, b);
    let there = a.pool.acquire(4096).unwrap();
    let rkey = MrKey::from_bits(there.key(a.slot).unwrap()).rkey;
    for _ in 0..2 {
        let data = b.pool.acquire(4096).unwrap();
        b_lane
            .write(there.as_ptr().addr() as u64, rkey, data)
            .unwrap();
    }
    b_lane.send(&[0; 16], None);
    b_lane.signal_last();
    b_lane.post().unwrap();
    let expected = [WcOpcode::Write, WcOpcode::Write].map(|op| (op, WcStatus::Success));
    assert_eq!(b.statuses(&mut b_lane)[..2], expected);
}

/// Signaled requests know when they were posted, once each. Other requests, markers and requests
/// posted without a time do not.
#[test]
fn times() {
    let fabric = Fabric::new();
    let (mut a, mut lane, _, mut b, b_lane, _) = pair(&fabric);
    let pool = b.pool.clone();
    b.receiver.post(Some(&pool)).unwrap();
    let timings = |a: &mut End, lane: &mut Lane| {
        a.queues.poll(&mut a.batch, 32).unwrap();
        let mut seen = Vec::new();
        while let Some(done) = a.batch.next() {
            seen.push(
                lane.timing(&done)
                    .map(|timing| (timing.posted, timing.wrote)),
            );
            assert_eq!(lane.timing(&done), None, "once");
            lane.sent(&done);
        }
        seen
    };
    let nothing = |a: &End| a.pool.acquire(512).unwrap().slice(0, 0);
    lane.send(&[1; 16], None);
    lane.signal_last();
    lane.write(0, 0, nothing(&a)).unwrap();
    lane.send(&[2; 16], None);
    lane.post_at(70).unwrap();
    assert_eq!(timings(&mut a, &mut lane), [Some((70, false))]);
    // The WRITE of the earlier doorbell is not this one's.
    lane.send(&[3; 16], None);
    lane.signal_last();
    lane.write(0, 0, nothing(&a)).unwrap();
    lane.send(&[4; 16], None);
    lane.signal_last();
    lane.post_at(90).unwrap();
    lane.send(&[5; 16], None);
    lane.signal_last();
    lane.post().unwrap();
    lane.mark();
    lane.send(&[6; 16], None);
    lane.mark();
    lane.post_at(99).unwrap();
    let seen = timings(&mut a, &mut lane);
    assert_eq!(seen, [Some((90, false)), Some((90, true)), None, None]);
    // Times that are never read do not mix with later ones, nor do times of requests that the
    // device did not take.
    lane.send(&[7; 16], None);
    lane.signal_last();
    lane.post_at(100).unwrap();
    a.statuses(&mut lane);
    b.statuses(&mut lane);
    b.receiver.post(Some(&pool)).unwrap();
    lane.send(&[8; 16], None);
    lane.signal_last();
    lane.post_at(200).unwrap();
    assert_eq!(timings(&mut a, &mut lane), [Some((200, false))]);
    drop(b_lane);
}

/// More READs than were negotiated are refused; too many completions kill the queue.
#[test]
fn limits() {
    let fabric = Fabric::new();
    let (a, a_lane, _, mut b, mut lane, _) = pair(&fabric);
    let theirs = a.pool.acquire(4096).unwrap();
    let key = MrKey::from_bits(theirs.key(a.slot).unwrap());
    for _ in 0..5 {
        let into = b.pool.acquire(512).unwrap();
        lane.read(theirs.as_ptr().addr() as u64, key.rkey, into)
            .unwrap();
    }
    lane.post().unwrap();
    let seen = b.statuses(&mut lane);
    assert_eq!(seen[4].1, WcStatus::RemoteInvalidRequest);
    assert!(seen[..4].iter().all(|(_, status)| status.is_success()));
    drop((lane, a_lane));
    let fabric = Fabric::new();
    let (mut a, mut lane, _, b, b_lane, _) = pair(&fabric);
    a.queues.cq().resize(2).unwrap();
    fabric.pause(lane.number(), true);
    for _ in 0..4 {
        lane.write(0, 0, a.pool.acquire(512).unwrap().slice(0, 0))
            .unwrap();
        lane.signal_last();
    }
    lane.post().unwrap();
    fabric.pause(lane.number(), false);
    assert!(a.queues.poll(&mut a.batch, 32).is_err());
    assert_eq!(
        a.device.next_async_event().unwrap(),
        Some(AsyncEvent::CqError {
            cq: a.queues.cq().number()
        })
    );
    drop((lane, b_lane, b));
}

/// Injected statuses hit the request they are for; the rest flushes; every buffer comes back.
#[test]
fn injected() {
    for &status in &WcStatus::ALL[1..] {
        let fabric = Fabric::new();
        let (mut a, mut lane, _, mut b, b_lane, _) = pair(&fabric);
        let pool = b.pool.clone();
        b.receiver.post(Some(&pool)).unwrap();
        let free = a.pool.stats()[0].free;
        fabric.inject_status(lane.number(), Target::Send, 1, status);
        for _ in 0..3 {
            lane.send_with(&[1; 64], None, Some(a.pool.acquire(512).unwrap()))
                .unwrap();
            lane.signal_last();
        }
        lane.post().unwrap();
        let seen: Vec<WcStatus> = a.statuses(&mut lane).into_iter().map(|(_, s)| s).collect();
        assert_eq!(
            seen,
            [WcStatus::Success, status, WcStatus::WorkRequestFlushed]
        );
        assert!(lane.is_idle());
        assert_eq!(a.pool.stats()[0].free, free);
        drop(b_lane);
    }
}

/// A receiver that is dropped while queue pairs exist never frees its memory.
#[test]
fn memory_outlives_its_owner() {
    let fabric = Fabric::new();
    let (_a, lane, _, mut b, b_lane, _) = pair(&fabric);
    let pool = b.pool.clone();
    b.receiver.post(Some(&pool)).unwrap();
    let missing = |pool: &Pool| pool.stats()[0].count - pool.stats()[0].free;
    let before = missing(&pool);
    drop(b.receiver);
    assert_eq!(missing(&pool), before, "a device may still write there");
    drop((lane, b_lane));
}

/// Ends are reported, connection faults come as events, a destroyed id is silent.
#[test]
fn connections() {
    let fabric = Fabric::new();
    let (mut a, mut lane, id, mut b, b_lane, b_id) = pair(&fabric);
    a.cm.disconnect(id).unwrap();
    for (end, id) in [(&mut a, id), (&mut b, b_id)] {
        assert_eq!(
            end.event(),
            CmEvent {
                id,
                kind: CmEventKind::Disconnected
            }
        );
        assert_eq!(end.event().kind, CmEventKind::TimewaitExit);
    }
    lane.send(&[0; 8], None);
    lane.post().unwrap();
    assert_eq!(a.statuses(&mut lane)[0].1, WcStatus::WorkRequestFlushed);
    drop((lane, b_lane));
    a.cm.destroy(id);
    b.cm.destroy(b_id);
    assert!(a.cm.next_event().unwrap().is_none());
    let (at, second) = (SocketAddr::new(B, 4421), Duration::from_secs(1));
    let mut attempt = |fault| {
        fabric.fault_connects(B, fault);
        let id =
            a.cm.resolve_address(None, at, second, CmOptions::default())
                .unwrap();
        for _ in 0..3 {
            match a.cm.next_event().unwrap().map(|event| event.kind) {
                Some(CmEventKind::AddressResolved { .. }) => {
                    a.cm.resolve_route(id, second).unwrap()
                }
                Some(CmEventKind::RouteResolved) => {
                    a.cm.connect(id, &ConnParams::default()).unwrap()
                }
                other => {
                    a.cm.destroy(id);
                    return other;
                }
            }
        }
        unreachable!("connect has an outcome");
    };
    assert!(matches!(
        attempt(Some(ConnectFault::AddressError)),
        Some(CmEventKind::AddressError { .. })
    ));
    assert!(matches!(
        attempt(Some(ConnectFault::RouteError)),
        Some(CmEventKind::RouteError { .. })
    ));
    assert!(matches!(
        attempt(Some(ConnectFault::Unreachable)),
        Some(CmEventKind::Unreachable { .. })
    ));
    assert!(matches!(
        attempt(Some(ConnectFault::ConnectError)),
        Some(CmEventKind::ConnectError { .. })
    ));
    assert_eq!(attempt(Some(ConnectFault::Silent)), None);
    assert!(matches!(
        attempt(None),
        Some(CmEventKind::Rejected { status: 8, .. })
    ));
}

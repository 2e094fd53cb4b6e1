//! The conformance suite that every transport must pass.
//!
//! A plug's test makes a [`Rig`] (its listener, one core's I/O half, a way to connect a host) and
//! calls [`run`]. Each case acts as the target above the transport and as its hosts.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, ClassSpec, HugepagePolicy, Pool, Shared};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::status::StatusCode;
use nacre_reactor::Nanos;

use super::*;

/// The parts of a plug that a case needs.
pub trait Rig {
    fn transport(&mut self) -> &mut dyn Transport;
    /// Begins to connect a host.
    fn connect(&mut self) -> Box<dyn HostTransport>;
    fn now(&self) -> Nanos;
    /// The listener that hosts connect to.
    fn listener(&self) -> ListenerId;
    /// A pool for buffers of the target's core or of a host that the transport can use.
    fn pool(&mut self, classes: &[ClassSpec]) -> Pool {
        Pool::heap(classes)
    }
    /// True if in-capsule data is received into buffers that the transport has reserved, so that it
    /// arrives although the pools are empty.
    fn receives_ahead(&self) -> bool {
        false
    }
}

type Case<R> = fn(&mut Fixture<R>);

/// Runs every case on a rig of its own.
pub fn run<R: Rig>(make: impl Fn() -> R) {
    let cases: [(&str, Case<R>); 10] = [
        ("opened comes first, closed last", opened_first_closed_last),
        ("data arrives as it was sent", data_arrives),
        ("several hosts keep apart", several_hosts),
        ("a full queue, again and again", full_queue),
        ("success without a response", success_flag),
        ("a failed read brings its status", failed_read),
        ("drained delivers, then closes", close_drained),
        ("now closes now", close_now),
        ("back-pressure without buffers", back_pressure),
        ("a small event list loses nothing", small_event_list),
    ];
    for (name, case) in cases {
        eprintln!("conformance: {name}");
        case(&mut Fixture::new(make()));
    }
}

const ENTRIES: u16 = 64;

const CLASSES: [ClassSpec; 2] = [
    ClassSpec {
        size: 8192,
        count: 96,
    },
    ClassSpec {
        size: 128 << 10,
        count: 36,
    },
];

/// Bytes that depend on `seed` and position.
fn pattern(seed: u32, len: usize) -> Vec<u8> {
    let word = |at: u32| (at ^ seed.wrapping_mul(0x9e37_79b9)).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(4) as u32).flat_map(word).collect();
    bytes.truncate(len);
    bytes
}

/// One host of a fixture.
struct Host {
    transport: Box<dyn HostTransport>,
    memory: Pool,
    ready: bool,
    closed: Option<Closed>,
    completions: HashMap<u16, (Cqe, Option<Vec<u8>>, u32)>,
    order: Vec<u16>,
}

/// A target that stores writes and reads patterns, and its hosts, in one thread.
struct Fixture<R: Rig> {
    rig: R,
    pools: Pools,
    events: Events,
    hosts: Vec<Host>,
    /// Connections in the order in which they were opened; `true` while open.
    conns: Vec<(ConnId, bool)>,
    closed: Vec<Closed>,
    commands: HashMap<(ConnId, u16), Sqe>,
    written: HashMap<(ConnId, u16), Vec<u8>>,
    params: QueueParams,
    /// False: commands are stored without an answer.
    answer: bool,
    kept: Vec<(ConnId, Sqe, Option<Buf>)>,
}

impl<R: Rig> Fixture<R> {
    fn new(mut rig: R) -> Self {
        Self {
            pools: Pools {
                io: rig.pool(&CLASSES),
                admin: rig.pool(&CLASSES),
            },
            rig,
            events: Events::with_capacity(128),
            hosts: Vec::new(),
            conns: Vec::new(),
            closed: Vec::new(),
            commands: HashMap::new(),
            written: HashMap::new(),
            params: QueueParams {
                qid: 1,
                entries: ENTRIES,
                flow_control_off: false,
            },
            answer: true,
            kept: Vec::new(),
        }
    }

    fn turn(&mut self) {
        let now = self.rig.now();
        self.rig
            .transport()
            .poll(now, &self.pools, &mut self.events);
        let mut events = std::mem::replace(&mut self.events, Events::with_capacity(0));
        for event in events.drain() {
            self.handle(event);
        }
        self.events = events;
        self.rig.transport().flush(now);
        for host in &mut self.hosts {
            let mut events = Vec::new();
            host.transport.poll(now, &mut events, 64);
            for event in events {
                assert!(host.closed.is_none(), "an event after Closed");
                match event {
                    HostEvent::Ready => {
                        assert!(!host.ready, "ready twice");
                        host.ready = true;
                    }
                    HostEvent::Completion {
                        cqe,
                        read,
                        transferred,
                    } => {
                        let read = read.map(|buf| buf.to_vec());
                        let cid = cqe.cid();
                        host.order.push(cid);
                        assert!(
                            host.completions
                                .insert(cid, (cqe, read, transferred))
                                .is_none(),
                            "completed twice"
                        );
                    }
                    HostEvent::Closed(why) => host.closed = Some(why),
                }
            }
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < deadline, "never happens: {what}");
            self.turn();
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Opened { conn, listener, .. } => {
                assert_eq!(listener, self.rig.listener());
                assert!(
                    self.conns.iter().all(|(other, _)| *other != conn),
                    "a connection id used twice"
                );
                self.conns.push((conn, true));
                let params = self.params;
                self.rig.transport().established(conn, params);
            }
            Event::Closed { conn, why } => {
                self.open(conn).1 = false;
                self.closed.push(why);
            }
            Event::Capsule { conn, sqe, data } => {
                assert!(self.open(conn).1, "a capsule after Closed");
                if self.answer {
                    self.execute(conn, sqe, data)
                } else {
                    self.kept.push((conn, sqe, data))
                }
            }
            Event::Fetched { conn, tag, data } => {
                assert!(self.open(conn).1, "data after Closed");
                let sqe = self.commands[&(conn, tag.cid)];
                self.execute(conn, sqe, Some(data));
            }
            Event::CapsuleDamaged { .. }
            | Event::FetchDamaged { .. }
            | Event::FetchRefused { .. } => {
                panic!("nothing damages data here")
            }
        }
    }

    fn open(&mut self, conn: ConnId) -> &mut (ConnId, bool) {
        let found = self.conns.iter_mut().find(|(id, _)| *id == conn);
        found.expect("an event of a connection that was never opened")
    }

    fn execute(&mut self, conn: ConnId, sqe: Sqe, data: Option<Buf>) {
        let cid = sqe.cid();
        // One index per identifier: identifiers are below the queue's size here.
        let tag = ReqTag { cid, index: cid };
        let length = sqe.sgl().map_or(0, Sgl::length) as usize;
        let mut response = Response {
            tag,
            cqe: Cqe::success(cid),
            data: Extents::new(),
            sgl: sqe.sgl_descriptor(),
            zero_copy: None,
        };
        match sqe.opcode {
            io::WRITE if data.is_none() && length > 0 => {
                self.commands.insert((conn, cid), sqe);
                let into = self
                    .pools
                    .io
                    .acquire(length)
                    .expect("the fixture has buffers enough");
                return self.rig.transport().fetch(conn, tag, &sqe, into);
            }
            io::WRITE => {
                self.written.insert(
                    (conn, cid),
                    data.map(|data| data.to_vec()).unwrap_or_default(),
                );
            }
            // Every other response carries a view of the device's memory.
            io::READ
                if sqe.cdw10.get() % 2 == 1
                    && length > 0
                    && self.rig.transport().takes_zero_copy(conn) =>
            {
                let disk = Shared::allocate(length as u64, HugepagePolicy::Off);
                let disk = Arc::new(disk.expect("a few pages"));
                disk.write(0, &pattern(sqe.cdw10.get(), length));
                response.zero_copy = Some(disk.on_core().view(0, length));
            }
            io::READ => {
                let mut buf = self
                    .pools
                    .io
                    .acquire(length)
                    .expect("the fixture has buffers enough");
                let bytes = buf.bytes_mut().expect("just acquired");
                bytes.copy_from_slice(&pattern(sqe.cdw10.get(), length));
                response.data.push(buf);
            }
            // Compare: fails, with a status of a device.
            _ => response.cqe = Cqe::new(cid, StatusCode::new(2, 0x85)),
        }
        self.rig.transport().respond(conn, response);
    }

    /// A host that is connected and ready, and its connection.
    fn connect(&mut self) -> (usize, ConnId) {
        let opened = self.conns.len();
        let transport = self.rig.connect();
        let memory = self.rig.pool(&CLASSES);
        let host = self.hosts.len();
        self.hosts.push(Host {
            transport,
            memory,
            ready: false,
            closed: None,
            completions: HashMap::new(),
            order: Vec::new(),
        });
        self.until("connecting", |fixture| {
            fixture.hosts[host].ready && fixture.conns.len() > opened
        });
        let in_capsule = self.rig.transport().caps().in_capsule_bytes;
        self.hosts[host].transport.set_in_capsule_bytes(in_capsule);
        (host, self.conns[opened].0)
    }

    fn submit(&mut self, host: usize, opcode: u8, cid: u16, seed: u32, len: usize) {
        let host = &mut self.hosts[host];
        let mut sqe = Sqe::for_namespace(opcode, cid, 1);
        sqe.cdw10 = seed.into();
        let mut buf = host
            .memory
            .acquire(len)
            .expect("the host has buffers enough");
        let (mut write, mut read) = (None, None);
        if opcode == io::READ {
            read = Some(buf);
        } else {
            buf.bytes_mut()
                .expect("just acquired")
                .copy_from_slice(&pattern(seed, len));
            write = Some(buf);
        }
        host.transport.submit(HostCommand { sqe, write, read });
    }

    fn finish(&mut self, host: usize, count: usize) {
        self.until("completions", |fixture| {
            fixture.hosts[host].completions.len() >= count
        });
    }

    /// Commands that will not complete come back with their buffers, once, and only from a
    /// connection that has ended.
    fn reclaim(&mut self, host: usize) -> Vec<(u16, bool, bool)> {
        let transport = &mut self.hosts[host].transport;
        let commands = std::iter::from_fn(|| transport.reclaim());
        let mut cids: Vec<_> = commands
            .map(|c| (c.sqe.cid(), c.write.is_some(), c.read.is_some()))
            .collect();
        cids.sort_unstable();
        cids
    }

    /// A wire may drop a buffer only after the peer has its contents.
    fn assert_all_buffers_back(&mut self) {
        let missing = |fixture: &Self| {
            let of_hosts = fixture.hosts.iter().map(|host| &host.memory);
            let pools = [&fixture.pools.io, &fixture.pools.admin]
                .into_iter()
                .chain(of_hosts);
            let classes = pools.flat_map(|pool| pool.stats());
            classes.map(|class| class.count - class.free).sum::<usize>()
        };
        self.until("all buffers back", |fixture| missing(fixture) == 0);
    }
}

fn opened_first_closed_last<R: Rig>(fixture: &mut Fixture<R>) {
    assert_eq!(fixture.rig.transport().connections(), 0);
    let (host, conn) = fixture.connect();
    assert_eq!(fixture.rig.transport().connections(), 1);
    fixture.submit(host, io::WRITE, 1, 1, 512);
    fixture.finish(host, 1);
    fixture.hosts[host].transport.close();
    fixture.until("closed", |fixture| fixture.closed.len() == 1);
    assert_eq!(fixture.closed[0], Closed::Peer);
    fixture.until("forgotten", |fixture| {
        fixture.rig.transport().connections() == 0
    });
    assert_eq!(fixture.hosts[host].closed, Some(Closed::Local));
    // What names it now is ignored.
    let response = Response {
        tag: ReqTag { cid: 1, index: 1 },
        cqe: Cqe::success(1),
        data: Extents::new(),
        sgl: Sqe::zeroed().sgl_descriptor(),
        zero_copy: None,
    };
    fixture.rig.transport().respond(conn, response);
    fixture.rig.transport().close(conn, CloseWhy::Now);
    for _ in 0..10 {
        fixture.turn();
    }
    assert_eq!(fixture.closed.len(), 1);
    // A new one does not answer to the old name.
    let (_, next) = fixture.connect();
    assert_ne!(next, conn);
    fixture.rig.transport().close(conn, CloseWhy::Now);
    for _ in 0..10 {
        fixture.turn();
    }
    assert!(fixture.open(next).1);
}

fn data_arrives<R: Rig>(fixture: &mut Fixture<R>) {
    let (host, conn) = fixture.connect();
    let sizes = [1, 512, 4095, 4096, 4097, 8192, 65_536, 128 << 10];
    for (cid, len) in (0u16..).zip(sizes) {
        fixture.submit(host, io::WRITE, cid, cid.into(), len);
        fixture.submit(host, io::READ, cid + 32, u32::from(cid) + 99, len);
        fixture.finish(host, usize::from(cid + 1) * 2);
    }
    for (cid, len) in (0u16..).zip(sizes) {
        assert!(
            fixture.written[&(conn, cid)] == pattern(cid.into(), len),
            "write of {len} bytes"
        );
        let (cqe, read, transferred) = &fixture.hosts[host].completions[&(cid + 32)];
        assert!(cqe.status().is_success());
        assert_eq!(*transferred as usize, len);
        assert!(
            read.as_deref() == Some(&pattern(u32::from(cid) + 99, len)[..]),
            "read of {len} bytes"
        );
    }
    fixture.assert_all_buffers_back();
}

fn several_hosts<R: Rig>(fixture: &mut Fixture<R>) {
    let pairs: Vec<_> = (0..8).map(|_| fixture.connect()).collect();
    assert_eq!(fixture.rig.transport().connections(), 8);
    for (host, _) in &pairs {
        for cid in 0..4u16 {
            fixture.submit(
                *host,
                io::WRITE,
                cid,
                *host as u32 * 100 + u32::from(cid),
                9000,
            );
        }
    }
    for (host, conn) in &pairs {
        fixture.finish(*host, 4);
        for cid in 0..4u16 {
            assert!(
                fixture.written[&(*conn, cid)]
                    == pattern(*host as u32 * 100 + u32::from(cid), 9000)
            );
        }
    }
    // One that leaves does not disturb the others.
    fixture.hosts[pairs[3].0].transport.close();
    fixture.until("one closed", |fixture| fixture.closed.len() == 1);
    fixture.submit(pairs[4].0, io::READ, 9, 5, 4096);
    fixture.finish(pairs[4].0, 5);
    assert!(fixture.conns.iter().filter(|(_, open)| *open).count() == 7);
}

fn full_queue<R: Rig>(fixture: &mut Fixture<R>) {
    let (host, conn) = fixture.connect();
    for round in 0..10u32 {
        for cid in 0..ENTRIES {
            let opcode = if cid % 2 == 0 { io::READ } else { io::WRITE };
            fixture.submit(host, opcode, cid, round * 100 + u32::from(cid), 4096);
        }
        fixture.finish(host, usize::from(ENTRIES));
        for cid in 0..ENTRIES {
            let expected = pattern(round * 100 + u32::from(cid), 4096);
            match fixture.hosts[host].completions.remove(&cid) {
                Some((_, Some(read), _)) => assert!(read == expected),
                Some((_, None, _)) => assert!(fixture.written[&(conn, cid)] == expected),
                None => panic!("command {cid} did not complete"),
            }
        }
    }
    fixture.assert_all_buffers_back();
}

fn success_flag<R: Rig>(fixture: &mut Fixture<R>) {
    fixture.params.flow_control_off = true;
    let (host, _) = fixture.connect();
    fixture.submit(host, io::READ, 5, 77, 4096);
    fixture.submit(host, io::WRITE, 6, 78, 4096);
    fixture.finish(host, 2);
    let (cqe, read, transferred) = &fixture.hosts[host].completions[&5];
    assert!(cqe.status().is_success() && *transferred == 4096);
    assert!(read.as_deref() == Some(&pattern(77, 4096)[..]));
}

fn failed_read<R: Rig>(fixture: &mut Fixture<R>) {
    let (host, _) = fixture.connect();
    fixture.submit(host, io::COMPARE, 5, 77, 4096);
    fixture.finish(host, 1);
    let (cqe, ..) = &fixture.hosts[host].completions[&5];
    assert_eq!(cqe.status(), StatusCode::new(2, 0x85));
}

fn close_drained<R: Rig>(fixture: &mut Fixture<R>) {
    let (host, conn) = fixture.connect();
    fixture.answer = false;
    for cid in 0..3 {
        fixture.submit(host, io::READ, cid, cid.into(), 100_000);
    }
    fixture.until("commands there", |fixture| fixture.kept.len() == 3);
    for (conn, sqe, data) in std::mem::take(&mut fixture.kept) {
        fixture.execute(conn, sqe, data);
    }
    fixture.rig.transport().close(conn, CloseWhy::Drained);
    fixture.finish(host, 3);
    assert_eq!(fixture.hosts[host].order, [0, 1, 2]);
    fixture.until("the host learns of it", |fixture| {
        fixture.hosts[host].closed.is_some()
    });
    fixture.until("closed", |fixture| fixture.closed.len() == 1);
    assert_eq!(fixture.closed[0], Closed::Local);
    assert_eq!(fixture.hosts[host].closed, Some(Closed::Peer));
    fixture.until("forgotten", |fixture| {
        fixture.rig.transport().connections() == 0
    });
    for host in &mut fixture.hosts {
        host.completions.clear();
    }
    fixture.assert_all_buffers_back();
}

fn close_now<R: Rig>(fixture: &mut Fixture<R>) {
    let (host, conn) = fixture.connect();
    fixture.answer = false;
    fixture.submit(host, io::WRITE, 1, 1, 50_000);
    fixture.submit(host, io::READ, 2, 2, 4096);
    fixture.until("the commands are there", |fixture| fixture.kept.len() == 2);
    let (_, sqe, _) = fixture.kept.remove(0);
    let into = fixture.pools.io.acquire(50_000).expect("buffers enough");
    fixture
        .rig
        .transport()
        .fetch(conn, ReqTag { cid: 1, index: 1 }, &sqe, into);
    assert_eq!(fixture.reclaim(host), [], "the connection has not ended");
    fixture.rig.transport().close(conn, CloseWhy::Now);
    fixture.until("closed", |fixture| fixture.closed.len() == 1);
    assert_eq!(fixture.closed[0], Closed::Local);
    fixture.until("the host learns of it", |fixture| {
        fixture.hosts[host].closed.is_some()
    });
    assert!(fixture.hosts[host].completions.is_empty());
    // A caller that does not know yet.
    fixture.submit(host, io::READ, 3, 3, 4096);
    let reclaimed = fixture.reclaim(host);
    let cids: Vec<u16> = reclaimed.iter().map(|(cid, ..)| *cid).collect();
    assert_eq!(cids, [1, 2, 3]);
    assert!(reclaimed[1].2 && reclaimed[2].2, "the buffers of the reads");
    assert_eq!(fixture.reclaim(host), []);
    fixture.until("forgotten", |fixture| {
        fixture.rig.transport().connections() == 0
    });
    fixture.assert_all_buffers_back();
}

fn back_pressure<R: Rig>(fixture: &mut Fixture<R>) {
    let (host, conn) = fixture.connect();
    let (other, other_conn) = fixture.connect();
    let mut hoard: Vec<Buf> = std::iter::from_fn(|| fixture.pools.io.acquire(512)).collect();
    for cid in 0..8 {
        fixture.submit(host, io::WRITE, cid, cid.into(), 4096);
    }
    for _ in 0..200 {
        fixture.turn();
    }
    let ahead = fixture.rig.receives_ahead();
    assert!((ahead || fixture.written.is_empty()) && fixture.closed.is_empty());
    // A few buffers are enough to go on, one after the other, for both.
    hoard.truncate(2);
    fixture.submit(other, io::WRITE, 1, 1, 4096);
    fixture.finish(host, 8);
    fixture.finish(other, 1);
    for cid in 0..8 {
        assert!(fixture.written[&(conn, cid)] == pattern(cid.into(), 4096));
    }
    assert!(fixture.written[&(other_conn, 1)] == pattern(1, 4096));
    drop(hoard);
    fixture.assert_all_buffers_back();
}

fn small_event_list<R: Rig>(fixture: &mut Fixture<R>) {
    fixture.events = Events::with_capacity(1);
    let pairs: Vec<_> = (0..3).map(|_| fixture.connect()).collect();
    for (host, _) in &pairs {
        for cid in 0..16u16 {
            fixture.submit(*host, io::WRITE, cid, u32::from(cid) + *host as u32, 2048);
        }
    }
    for (host, conn) in &pairs {
        fixture.finish(*host, 16);
        for cid in 0..16u16 {
            assert!(fixture.written[&(*conn, cid)] == pattern(u32::from(cid) + *host as u32, 2048));
        }
    }
}

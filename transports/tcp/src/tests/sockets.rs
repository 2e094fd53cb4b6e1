//! Tests of conditions that only real sockets have: resets, full buffers, refused and very many
//! connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nacre_bdev::Extents;
use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{
    Address, Closed, ConnId, Event, Events, HostCommand, HostEvent, HostTransport, ListenError,
    ListenerId, ListenerOptions, Plug, Pools, QueueParams, ReqTag, Response,
};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::{CapsuleCmd, DataAlignment, Digests, IcReq};
use nacre_random_ports::local_port;
use nacre_reactor::{Clock, Idle, Interest, Nanos};
use zerocopy::IntoBytes;

use super::conformance::TcpRig;
use crate::{TcpConfig, TcpHost, TcpHostOptions, TcpPlug, connect_host};

/// A target that answers reads with zeroes and takes writes.
pub(super) struct Server {
    pub rig: TcpRig,
    pools: Pools,
    events: Events,
    pub opened: usize,
    /// Every connection counts as connected at once; otherwise it stays pending.
    pub accepts_connect: bool,
    /// Of every queue.
    pub entries: u16,
    /// In the order in which they were opened, ended or not.
    pub conns: Vec<ConnId>,
    pub closed: Vec<Closed>,
}

impl Server {
    pub(super) fn new(config: TcpConfig) -> Self {
        Self::of(TcpRig::new(
            config,
            TcpHostOptions::default(),
            "127.0.0.1:0",
        ))
    }

    pub(super) fn of(rig: TcpRig) -> Self {
        let pool = Pool::heap(&[
            ClassSpec {
                size: 8192,
                count: 512,
            },
            ClassSpec {
                size: 128 << 10,
                count: 64,
            },
        ]);
        Self {
            rig,
            pools: Pools {
                io: pool.clone(),
                admin: pool,
            },
            events: Events::with_capacity(256),
            opened: 0,
            accepts_connect: true,
            entries: 128,
            conns: Vec::new(),
            closed: Vec::new(),
        }
    }

    pub(super) fn turn(&mut self) {
        self.turn_at(self.rig.now());
    }

    pub(super) fn turn_at(&mut self, now: Nanos) {
        self.rig.transport.poll(now, &self.pools, &mut self.events);
        for event in self.events.drain() {
            match event {
                Event::Opened { conn, .. } => {
                    self.opened += 1;
                    self.conns.push(conn);
                    let params = QueueParams {
                        qid: 1,
                        entries: self.entries,
                        flow_control_off: true,
                    };
                    if self.accepts_connect {
                        self.rig.transport.established(conn, params);
                    }
                }
                Event::Closed { why, .. } => self.closed.push(why),
                Event::Capsule { conn, sqe, data } => {
                    let tag = ReqTag {
                        cid: sqe.cid(),
                        index: sqe.cid(),
                    };
                    let length = sqe.sgl().map_or(0, Sgl::length) as usize;
                    let mut response = Response {
                        tag,
                        cqe: Cqe::success(tag.cid),
                        data: Extents::new(),
                        sgl: Sqe::zeroed().sgl_descriptor(),
                        zero_copy: None,
                    };
                    if sqe.opcode == io::WRITE && data.is_none() {
                        self.rig.transport.fetch(
                            conn,
                            tag,
                            &sqe,
                            self.pools.io.acquire(length).unwrap(),
                        );
                        continue;
                    }
                    if sqe.opcode == io::READ {
                        response.data.push(self.pools.io.acquire(length).unwrap());
                    }
                    self.rig.transport.respond(conn, response);
                }
                Event::Fetched { conn, tag, .. } => {
                    let response = Response {
                        tag,
                        cqe: Cqe::success(tag.cid),
                        data: Extents::new(),
                        sgl: Sqe::zeroed().sgl_descriptor(),
                        zero_copy: None,
                    };
                    self.rig.transport.respond(conn, response);
                }
                Event::CapsuleDamaged { .. }
                | Event::FetchDamaged { .. }
                | Event::FetchRefused { .. } => unreachable!(),
            }
        }
        self.rig.transport.flush(now);
    }

    #[track_caller]
    pub(super) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < deadline, "never happens: {what}");
            self.turn();
        }
    }

    /// A socket of no host in particular.
    pub(super) fn raw(&self) -> TcpStream {
        TcpStream::connect(self.rig.address).unwrap()
    }

    fn assert_buffers_back(&self) {
        for class in self.pools.io.stats() {
            assert_eq!(class.free, class.count);
        }
    }
}

pub(super) fn ready(host: &mut TcpHost, clock: &Clock) -> bool {
    let mut events = Vec::new();
    host.poll(clock.now(), &mut events, 8);
    events.iter().any(|event| matches!(event, HostEvent::Ready))
}

pub(super) fn ic_req() -> IcReq {
    IcReq::new(DataAlignment::DWORD, Digests::NONE, 1)
}

/// While the plug is held, hosts are neither served nor turned away; then they are served.
#[test]
fn held_connections_wait() {
    let mut server = Server::new(TcpConfig::default());
    server.rig.plug.hold(true);
    let mut raw = server.raw();
    raw.write_all(ic_req().as_bytes()).unwrap();
    // Nor on a listener that comes later.
    let any = Address::Ip("127.0.0.1:0".parse().unwrap());
    let Ok(Address::Ip(late)) =
        server
            .rig
            .plug
            .listen(ListenerId(8), &any, &ListenerOptions::default())
    else {
        panic!("a free port")
    };
    let other = TcpStream::connect(late).unwrap();
    let until = Instant::now() + Duration::from_millis(50);
    while Instant::now() < until {
        server.turn();
    }
    assert_eq!((server.opened, server.rig.plug.counts().accepted), (0, 0));
    server.rig.plug.hold(false);
    server.until("both are taken over", |s| s.opened == 2);
    let mut answer = [0; 128];
    server.turn();
    raw.read_exact(&mut answer).unwrap();
    assert_eq!(answer[0], 1, "ICResp");
    drop((raw, other));
    server.until("both are gone", |s| s.closed.len() == 2);
    let counts = server.rig.plug.counts();
    assert_eq!(counts.accepted, 2);
    assert_eq!(counts.closed.iter().map(|(_, n)| n).sum::<u64>(), 2);
    assert!(counts.bytes_received >= 128 && counts.bytes_sent >= 128);
}

/// 300 connections at once, each with commands under way, and all of them gone again.
#[test]
fn three_hundred_connections() {
    let mut server = Server::new(TcpConfig::default());
    let clock = Clock::real();
    let pool = Pool::heap(&[ClassSpec {
        size: 4096,
        count: 1200,
    }]);
    let connect = |_| connect_host(server.rig.address, TcpHostOptions::default()).unwrap();
    let mut hosts: Vec<(TcpHost, usize)> = (0..300).map(connect).map(|host| (host, 0)).collect();
    let mut events = Vec::new();
    server.until("all commands", |server| {
        for (host, done) in &mut hosts {
            host.poll(clock.now(), &mut events, 16);
            for event in events.drain(..) {
                match event {
                    HostEvent::Ready => {
                        for cid in 0..4 {
                            let sqe = Sqe::for_namespace(io::READ, cid, 1);
                            host.submit(HostCommand {
                                sqe,
                                write: None,
                                read: pool.acquire(4096),
                            });
                        }
                    }
                    HostEvent::Completion {
                        cqe, transferred, ..
                    } => {
                        assert!(cqe.status().is_success());
                        assert_eq!(transferred, 4096);
                        *done += 1;
                    }
                    HostEvent::Closed(why) => panic!("{why:?}"),
                }
            }
        }
        server.opened == 300 && hosts.iter().all(|(_, done)| *done == 4)
    });
    assert_eq!(server.rig.transport.connections(), 300);
    assert_eq!(server.rig.plug.connections(), 300);
    drop(hosts);
    server.until("all closed", |server| server.closed.len() == 300);
    assert!(
        server.closed.iter().all(|why| *why == Closed::Peer),
        "{:?}",
        server.closed
    );
    assert_eq!(server.rig.plug.connections(), 0);
    let stats = server.rig.plug.stats()[0].1;
    assert_eq!(
        (stats.accepted, stats.closed_by_peer, stats.pdus_received),
        (300, 300, 300 * 5)
    );
    server.assert_buffers_back();
}

/// Hosts that disconnect in the middle of an exchange, in every way, cost other hosts nothing.
#[test]
fn vanishing_hosts() {
    let mut server = Server::new(TcpConfig::default());
    let sqe = Sqe::for_namespace(io::WRITE, 1, 1).with_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    let capsule = CapsuleCmd::new(sqe, 4096, Digests::NONE, DataAlignment::DWORD);
    let mut whole = ic_req().as_bytes().to_vec();
    whole.extend_from_slice(capsule.as_bytes());
    for (count, cut) in [0, 1, 127, 128, 130, 199, 200, 201, 2000]
        .into_iter()
        .enumerate()
    {
        let mut raw = server.raw();
        let mut stream = whole.clone();
        stream.resize(cut.max(whole.len()), 7);
        raw.write_all(&stream[..cut]).unwrap();
        server.until("opened", |server| server.opened == count + 1);
        for _ in 0..20 {
            server.turn();
        }
        drop(raw);
        server.until("closed", |server| server.closed.len() == count + 1);
        let why = server.closed.last().unwrap();
        let between = cut == 0;
        match why {
            Closed::Peer => assert!(between || cut == 128, "{cut}: {why:?}"),
            Closed::Broken(_) => assert!(!between, "{cut}: {why:?}"),
            other => panic!("{cut}: {other:?}"),
        }
    }
    server.assert_buffers_back();
}

/// Sockets that are opened and never used are closed in time, and so is one that stops half-way.
#[test]
fn half_open_connections() {
    let config = TcpConfig {
        icreq_timeout: Duration::from_millis(100),
        stall_timeout: Duration::from_millis(100),
        ..TcpConfig::default()
    };
    let mut server = Server::new(config);
    let mut silent = server.raw();
    let mut half = server.raw();
    half.write_all(ic_req().as_bytes()).unwrap();
    half.write_all(&[4, 0, 72]).unwrap();
    let mut good = connect_host(server.rig.address, TcpHostOptions::default()).unwrap();
    let clock = Clock::real();
    server.until("the good one", |_| ready(&mut good, &clock));
    server.until("the others end", |server| server.closed.len() == 2);
    assert!(server.closed.iter().all(|why| *why == Closed::TimedOut));
    let mut bytes = Vec::new();
    assert_eq!(silent.read_to_end(&mut bytes).unwrap(), 0);
    assert_eq!(server.rig.transport.connections(), 1);
    // The remaining connection has no deadline: a sleeping core is not woken for it.
    let now = clock.now();
    for _ in 0..5 {
        server.turn();
    }
    while matches!(server.rig.transport.arm(now), Idle::Until(_)) {
        server.turn();
        assert!(clock.now() < now + Duration::from_secs(30));
    }
    assert_eq!(server.rig.transport.arm(now), Idle::Quiet);
}

/// A host that breaks the rules reads why before the connection ends.
#[test]
fn termination_request_arrives() {
    let mut server = Server::new(TcpConfig::default());
    let mut raw = server.raw();
    raw.write_all(ic_req().as_bytes()).unwrap();
    // Much more than the controller reads, so that closing at once would reset the connection.
    raw.write_all(&[0xee; 50_000]).unwrap();
    server.until("refused", |server| server.closed.len() == 1);
    assert!(
        matches!(&server.closed[0], Closed::Protocol(text) if text.contains("PDU-Type")),
        "{:?}",
        server.closed
    );
    let mut bytes = Vec::new();
    raw.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    server.until("read", |_| raw.read_to_end(&mut bytes).is_ok());
    assert_eq!(bytes.len(), 128 + 24 + 128);
    assert_eq!(bytes[128..140], [3, 0, 24, 0, 152, 0, 0, 0, 1, 0, 0, 0]);
    drop(raw);
    server.until("forgotten", |server| {
        server.rig.transport.connections() == 0
    });
    assert_eq!(server.rig.plug.stats()[0].1.closed_protocol, 1);
}

/// Beyond the limit connections are closed and counted; when one goes, another may come.
#[test]
fn connection_limit() {
    let mut server = Server::new(TcpConfig {
        max_connections: 2,
        ..TcpConfig::default()
    });
    let first = server.raw();
    let _second = server.raw();
    server.until("two", |server| server.opened == 2);
    let mut third = server.raw();
    let mut bytes = [0; 1];
    assert!(matches!(third.read(&mut bytes), Ok(0) | Err(_)));
    assert_eq!(server.rig.plug.rejected(), (1, 0));
    let counts = server.rig.plug.listener_counts(server.rig.listener());
    assert_eq!(counts.map(|counts| counts.refused), Some(1));
    drop(first);
    server.until("one gone", |server| server.closed.len() == 1);
    let _fourth = server.raw();
    server.until("the fourth", |server| server.opened == 3);
}

/// Pending connections are bounded too, but none is refused: the next waits until another has
/// connected or gone.
#[test]
fn pending_connections_wait_their_turn() {
    let mut server = Server::new(TcpConfig {
        max_pending_connections: 2,
        ..TcpConfig::default()
    });
    server.accepts_connect = false;
    let first = server.raw();
    let _second = server.raw();
    server.until("two", |server| server.opened == 2);
    let _third = server.raw();
    for _ in 0..20 {
        server.turn();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(server.opened, 2, "the third waits");
    drop(first);
    server.until("the third", |server| server.opened == 3);
    assert_eq!(server.rig.plug.rejected(), (0, 0));
}

/// Goal: hosts that connect and send nothing keep no other host out for long. Method: as many of
/// them as may pend, each with a minute of time, and one more behind them.
#[test]
fn idle_pending_connections_make_room() {
    let mut server = Server::new(TcpConfig {
        max_pending_connections: 2,
        icreq_timeout: Duration::from_secs(60),
        ..TcpConfig::default()
    });
    server.accepts_connect = false;
    let _idle = [server.raw(), server.raw()];
    server.until("two", |server| server.opened == 2);
    let begin = Instant::now();
    let _third = server.raw();
    server.until("the third", |server| server.opened == 3);
    let waited = begin.elapsed();
    assert!(waited < Duration::from_secs(50), "{waited:?}");
    assert!(
        waited > Duration::from_millis(500),
        "not before its grace is over: {waited:?}"
    );
    server.until("one closed", |server| server.closed.len() == 1);
    assert!(
        matches!(server.closed[0], Closed::Local),
        "{:?}",
        server.closed
    );
}

/// Each refusal to listen says what to do about it.
#[test]
fn listening() {
    let plug = TcpPlug::new(TcpConfig {
        max_listeners: 3,
        ..TcpConfig::default()
    })
    .unwrap();
    let listen = |id, address: &str| {
        let address: SocketAddr = address.parse().unwrap();
        plug.listen(
            ListenerId(id),
            &Address::Ip(address),
            &ListenerOptions::default(),
        )
    };
    let Ok(Address::Ip(first)) = listen(1, "127.0.0.1:0") else {
        panic!()
    };
    assert_ne!(first.port(), 0);
    assert!(matches!(
        listen(2, &first.to_string()),
        Err(ListenError::InUse { .. })
    ));
    assert!(matches!(
        listen(1, "127.0.0.1:0"),
        Err(ListenError::InUse { .. })
    ));

    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = listen(2, &other.local_addr().unwrap().to_string())
        .unwrap_err()
        .to_string();
    assert!(error.contains("ss -ltnp"), "{error}");
    let error = listen(2, "192.0.2.77:0").unwrap_err().to_string();
    assert!(
        error.contains("no interface has the address 192.0.2.77"),
        "{error}"
    );
    let name = Address::Loopback("x".into());
    assert!(matches!(
        plug.listen(ListenerId(2), &name, &ListenerOptions::default()),
        Err(ListenError::WrongKind { .. })
    ));

    // `::` leaves an IPv4 port to others.
    let Ok(Address::Ip(six)) = listen(2, "[::]:0") else {
        panic!("IPv6 is there in every kernel we test on")
    };
    listen(3, &format!("0.0.0.0:{}", six.port())).unwrap();
    assert!(matches!(
        listen(4, "127.0.0.1:0"),
        Err(ListenError::TooMany { limit: 3 })
    ));

    // A port that is given back can be taken again at once.
    plug.unlisten(ListenerId(1));
    assert!(TcpStream::connect(first).is_err());
    listen(4, &first.to_string()).unwrap();
}

/// A host learns why it could not connect.
#[test]
fn connecting_fails() {
    let clock = Clock::real();
    let end = |mut host: TcpHost| {
        let mut events = Vec::new();
        let deadline = Instant::now() + Duration::from_secs(10);
        while events.is_empty() {
            assert!(Instant::now() < deadline);
            host.poll(clock.now(), &mut events, 8);
        }
        match events.remove(0) {
            HostEvent::Closed(why) => why,
            other => panic!("{other:?}"),
        }
    };
    let free = SocketAddr::from(([127, 0, 0, 1], local_port()));
    let why = end(connect_host(free, TcpHostOptions::default()).unwrap());
    assert!(
        matches!(&why, Closed::Broken(text) if text.contains("refused")),
        "{why:?}"
    );

    // Accepts, and says nothing.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let machine = HostConfig {
        handshake_timeout: Duration::from_millis(50),
        ..HostConfig::default()
    };
    let options = TcpHostOptions {
        machine,
        ..TcpHostOptions::default()
    };
    assert_eq!(
        end(connect_host(mute.local_addr().unwrap(), options).unwrap()),
        Closed::TimedOut
    );

    let options = TcpHostOptions {
        interface: Some("no-such-if0".into()),
        ..TcpHostOptions::default()
    };
    assert!(connect_host(free, options).is_err());
    let options = TcpHostOptions {
        source: Some("127.0.0.9".parse().unwrap()),
        ..TcpHostOptions::default()
    };
    let host = connect_host(mute.local_addr().unwrap(), options).unwrap();
    assert_eq!(host.local_address().unwrap().ip().to_string(), "127.0.0.9");
}

/// Options that cannot be are named.
#[test]
fn bad_options() {
    let bad = |config: TcpConfig, name: &str| {
        let error = TcpPlug::new(config).err().expect("refused").to_string();
        assert!(error.contains(name), "{error}");
    };
    bad(
        TcpConfig {
            max_h2c_data_size: 4098,
            ..TcpConfig::default()
        },
        "max_h2c_data_size",
    );
    bad(
        TcpConfig {
            max_h2c_data_size: 2048,
            ..TcpConfig::default()
        },
        "max_h2c_data_size",
    );
    bad(
        TcpConfig {
            max_io_size: 5000,
            ..TcpConfig::default()
        },
        "max_io_size",
    );
    bad(
        TcpConfig {
            in_capsule_data_size: 100,
            ..TcpConfig::default()
        },
        "in_capsule_data_size",
    );
    bad(
        TcpConfig {
            max_connections: 0,
            ..TcpConfig::default()
        },
        "max_connections",
    );
    bad(
        TcpConfig {
            max_pending_connections: 0,
            ..TcpConfig::default()
        },
        "max_pending_connections",
    );
}

/// A listener with a size of its own: smaller or larger than the transport's, but at most a
/// command's largest transfer.
#[test]
fn in_capsule_data_of_one_listener() {
    let server = Server::new(TcpConfig::default());
    let plug = &server.rig.plug;
    let listen = |id, bytes| {
        let own = ListenerOptions {
            in_capsule_data_size: Some(bytes),
            ..ListenerOptions::default()
        };
        let any = Address::Ip(([127, 0, 0, 1], 0).into());
        plug.listen(ListenerId(id), &any, &own)
    };
    let most = TcpConfig::default().max_io_size;
    for (id, bytes) in [(101, 0), (102, 512), (103, 16384), (104, most)] {
        listen(id, bytes).unwrap();
        assert_eq!(plug.in_capsule_data_size(ListenerId(id)), Some(bytes));
    }
    for bytes in [100, most + 16] {
        let refused = listen(105, bytes).unwrap_err();
        assert!(matches!(
            refused,
            ListenError::Option {
                option: "in_capsule_data_size",
                ..
            }
        ));
    }
    assert_eq!(plug.in_capsule_data_size(ListenerId(105)), None);
}

/// An idle core may sleep: whatever comes makes its descriptor readable.
#[test]
fn sleeps_and_wakes() {
    let mut server = Server::new(TcpConfig::default());
    let mut raw = server.raw();
    raw.write_all(ic_req().as_bytes()).unwrap();
    server.until("connected", |server| server.opened == 1);
    server.until("ICResp", |_| raw.peek(&mut [0; 1]).is_ok());
    for _ in 0..3 {
        server.turn();
    }
    let fd = server.rig.transport.wake_fds()[0].try_clone_to_owned();
    let fd = fd.expect("a duplicate");
    let readable = || {
        let events =
            std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap();
        assert!(events.contains("tfd:"), "not an epoll: {events}");
        // An epoll in an epoll is readable when it has something.
        let outer = nacre_reactor::EventSet::new().unwrap();
        outer.add(&fd, 1, Interest::READ).unwrap();
        let mut list = nacre_reactor::Events::with_capacity(1);
        outer.wait(&mut list, Duration::from_millis(200)).unwrap() == 1
    };
    assert_ne!(server.rig.transport.arm(Clock::real().now()), Idle::Busy);
    assert!(!readable());
    raw.write_all(&[4, 0]).unwrap();
    assert!(readable());
}

//! Measures the cost of the NVMe/TCP transport alone: a target that answers from a fixed buffer,
//! and a host. It has no controller and no device.
//!
//!     cargo run --release -p nacre-transport-tcp --example echo -- \
//!         [pair|turns|bare] [read|write] [bytes] [depth] [connections] [seconds]
//!
//! `pair`: each on a core of its own, in requests per second. `turns`: both in one thread, in
//! nanoseconds of processor time per request, which a busy machine hardly changes. `bare`: the same
//! with only the system calls; the difference to `turns` is the cost of the protocol. DIGESTS=1
//! turns both digests on.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::{
    Address, Event, Events, HostCommand, HostEvent, HostTransport, ListenerId, ListenerOptions,
    Plug, Pools, QueueParams, ReqTag, Response, Transport,
};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::{Clock, Nanos};
use nacre_transport_tcp::{TcpConfig, TcpHost, TcpHostOptions, TcpPlug, connect_host};

#[derive(Clone, Copy)]
struct Load {
    write: bool,
    size: usize,
    depth: usize,
    connections: usize,
    time: Duration,
    digests: Digests,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mode = args.next().unwrap_or_else(|| "pair".into());
    let write = args.next().is_some_and(|rw| rw == "write");
    let mut number = |default: u64| {
        args.next()
            .map_or(default, |arg| arg.parse().expect("a number"))
    };
    let load = Load {
        write,
        size: number(4096) as usize,
        depth: number(128) as usize,
        connections: number(1) as usize,
        time: Duration::from_secs(number(2)),
        digests: if std::env::var_os("DIGESTS").is_some() {
            Digests::BOTH
        } else {
            Digests::NONE
        },
    };
    match &mode[..] {
        "pair" => {
            let rate = pair(load);
            println!(
                "{rate:.0} requests/s, {:.2} GB/s",
                rate * load.size as f64 / 1e9
            );
        }
        "turns" => println!("{:.0} ns per request", turns(load)),
        "bare" => println!("{:.0} ns per request", bare(load)),
        other => panic!("{other} is none of pair, turns, bare"),
    }
}

fn listen() -> (TcpPlug, SocketAddr) {
    let plug = TcpPlug::new(TcpConfig::default()).expect("a plug");
    let any = Address::Ip("127.0.0.1:0".parse().expect("an address"));
    let Ok(Address::Ip(address)) = plug.listen(ListenerId(1), &any, &ListenerOptions::default())
    else {
        panic!("cannot listen")
    };
    (plug, address)
}

fn pair(load: Load) -> f64 {
    let (plug, address) = listen();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let (opened, is_open) = std::sync::mpsc::channel();
    let clock = Clock::real();
    let target = std::thread::spawn(move || {
        pin(0);
        let mut target = Target::new(&plug, load);
        opened.send(()).expect("the other end waits");
        while !stopped.load(Ordering::Relaxed) {
            target.turn(clock.now());
        }
        println!("{:?}", plug.stats()[0].1);
    });
    pin(1);
    is_open.recv().expect("the target opens");
    let mut host = Hosts::new(address, load);
    let clock = Clock::real();
    run_for(Duration::from_millis(300), || host.turn(clock.now()));
    let (before, start) = (host.count, Instant::now());
    run_for(load.time, || host.turn(clock.now()));
    let rate = (host.count - before) as f64 / start.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    target.join().expect("the target");
    rate
}

fn turns(load: Load) -> f64 {
    let (plug, address) = listen();
    pin(1);
    let mut target = Target::new(&plug, load);
    let mut host = Hosts::new(address, load);
    let clock = Clock::real();
    let mut turn = |host: &mut Hosts| {
        host.turn(clock.now());
        target.turn(clock.now());
    };
    run_for(Duration::from_millis(300), || turn(&mut host));
    let (before, start) = (host.count, cpu_ns());
    run_for(load.time, || turn(&mut host));
    (cpu_ns() - start) as f64 / (host.count - before) as f64
}

/// The same bytes in the same batches through one pair of sockets, and nothing else.
fn bare(load: Load) -> f64 {
    pin(1);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let mut host =
        TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let (mut target, _) = listener.accept().expect("a connection");
    for socket in [&host, &target] {
        socket.set_nodelay(true).expect("a socket");
        socket.set_nonblocking(true).expect("a socket");
    }
    let (up, down) = if load.write {
        (72 + load.size, 24)
    } else {
        (72, 24 + load.size)
    };
    let bytes = vec![0u8; 1 << 20];
    let mut into = vec![0u8; 256 << 10];
    let move_all = |from: &mut TcpStream, to: &mut TcpStream, mut left: usize, into: &mut [u8]| {
        let mut to_send = left;
        while left > 0 {
            if to_send > 0 {
                to_send -= from.write(&bytes[..to_send.min(bytes.len())]).unwrap_or(0);
            }
            left -= to.read(into).unwrap_or(0);
        }
    };
    let (start, mut count) = (cpu_ns(), 0);
    run_for(load.time, || {
        move_all(&mut host, &mut target, up * load.depth, &mut into);
        move_all(&mut target, &mut host, down * load.depth, &mut into);
        count += load.depth;
    });
    (cpu_ns() - start) as f64 / count as f64
}

fn run_for(time: Duration, mut turn: impl FnMut()) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        (0..16).for_each(|_| turn());
    }
}

fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).expect("two cores");
}

struct Target {
    transport: Box<dyn Transport>,
    pools: Pools,
    events: Events,
    fixed: Buf,
    depth: usize,
}

impl Target {
    fn new(plug: &TcpPlug, load: Load) -> Self {
        let size = load.size.next_multiple_of(4096);
        let pool = Pool::heap(&[
            ClassSpec {
                size: 4096,
                count: 4096,
            },
            ClassSpec { size, count: 256 },
        ]);
        Self {
            transport: plug.open(0, Arc::new(|| ())).expect("a transport"),
            fixed: pool.acquire(load.size).expect("a buffer"),
            pools: Pools {
                io: pool.clone(),
                admin: pool,
            },
            events: Events::with_capacity(512),
            depth: load.depth,
        }
    }

    fn turn(&mut self, now: Nanos) {
        let transport = &mut self.transport;
        transport.poll(now, &self.pools, &mut self.events);
        for event in self.events.drain() {
            match event {
                Event::Opened { conn, .. } => {
                    let entries = self.depth as u16 + 1;
                    transport.established(
                        conn,
                        QueueParams {
                            qid: 1,
                            entries,
                            flow_control_off: true,
                        },
                    );
                }
                Event::Capsule { conn, sqe, data } => {
                    let length = sqe.sgl().map_or(0, Sgl::length) as usize;
                    let tag = ReqTag {
                        cid: sqe.cid(),
                        index: sqe.cid(),
                    };
                    let mut response = Response {
                        tag,
                        cqe: Cqe::success(tag.cid),
                        data: Extents::new(),
                        sgl: Sqe::zeroed().sgl_descriptor(),
                        zero_copy: None,
                    };
                    if sqe.opcode == io::READ {
                        response.data.push(self.fixed.slice(0, length));
                    } else if data.is_none() {
                        let into = self.pools.io.acquire(length).expect("a buffer");
                        transport.fetch(conn, tag, &sqe, into);
                        continue;
                    }
                    transport.respond(conn, response);
                }
                Event::Fetched { conn, tag, .. } => {
                    let response = Response {
                        tag,
                        cqe: Cqe::success(tag.cid),
                        data: Extents::new(),
                        sgl: Sqe::zeroed().sgl_descriptor(),
                        zero_copy: None,
                    };
                    transport.respond(conn, response);
                }
                Event::Closed { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        transport.flush(now);
    }
}

struct Hosts {
    hosts: Vec<(TcpHost, Vec<Buf>)>,
    events: Vec<HostEvent>,
    write: bool,
    count: u64,
}

impl Hosts {
    fn new(address: SocketAddr, load: Load) -> Self {
        let size = load.size.next_multiple_of(512);
        let pool = Pool::heap(&[ClassSpec {
            size,
            count: load.depth * load.connections,
        }]);
        let machine = HostConfig {
            entries: load.depth + 1,
            digests: load.digests,
            ..HostConfig::default()
        };
        let options = TcpHostOptions {
            machine,
            ..TcpHostOptions::default()
        };
        let one = |_| {
            let buffers = (0..load.depth)
                .map(|_| pool.acquire(load.size).expect("a buffer"))
                .collect();
            (
                connect_host(address, options.clone()).expect("a socket"),
                buffers,
            )
        };
        let hosts = (0..load.connections).map(one).collect();
        Self {
            hosts,
            events: Vec::with_capacity(1024),
            write: load.write,
            count: 0,
        }
    }

    fn turn(&mut self, now: Nanos) {
        let write = self.write;
        let command = |cid: u16, buf: Buf| {
            let sqe = Sqe::for_namespace(if write { io::WRITE } else { io::READ }, cid, 1);
            let (write, read) = if write {
                (Some(buf), None)
            } else {
                (None, Some(buf))
            };
            HostCommand { sqe, write, read }
        };
        for (host, buffers) in &mut self.hosts {
            host.poll(now, &mut self.events, 512);
            for event in self.events.drain(..) {
                match event {
                    HostEvent::Ready => {
                        host.set_in_capsule_bytes(4096);
                        // A read needs the only handle on its buffer, a write may share it.
                        let first = if write {
                            buffers.clone()
                        } else {
                            std::mem::take(buffers)
                        };
                        for (cid, buf) in (0..).zip(first) {
                            host.submit(command(cid, buf));
                        }
                    }
                    HostEvent::Completion { cqe, read, .. } => {
                        assert!(cqe.status().is_success());
                        self.count += 1;
                        let buf = read.unwrap_or_else(|| buffers[usize::from(cqe.cid())].clone());
                        host.submit(command(cqe.cid(), buf));
                    }
                    HostEvent::Closed(why) => panic!("closed: {why:?}"),
                }
            }
            // Not only when it is this one's turn again.
            host.flush();
        }
    }
}

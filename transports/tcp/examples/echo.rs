//! What the transport itself costs: a target that answers from a fixed buffer, and a host, each on a
//! core of its own. No controller, no device.
//!
//!     cargo run --release -p nacre-transport-tcp --example echo -- [read|write] [bytes] [depth] [connections] [seconds]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_bdev::Extents;
use nacre_hugepages::{Buf, ClassSpec, Pool};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::{
    Address, Event, Events, HostCommand, HostEvent, HostTransport, ListenerId, Plug, Pools,
    QueueParams, ReqTag, Response, Transport,
};
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::Clock;
use nacre_transport_tcp::{HostOptions, TcpConfig, TcpHost, TcpPlug, connect_host};

fn main() {
    let mut args = std::env::args().skip(1);
    let rw = args.next().unwrap_or_else(|| "read".into());
    let mut number = |default: u64| {
        args.next()
            .map_or(default, |arg| arg.parse().expect("a number"))
    };
    let (size, depth) = (number(4096) as usize, number(128) as usize);
    let (connections, seconds) = (number(1) as usize, number(2));
    let digests = if std::env::var_os("DIGESTS").is_some() {
        Digests::BOTH
    } else {
        Digests::NONE
    };

    let plug = TcpPlug::new(TcpConfig::default()).expect("a plug");
    let any = Address::Ip("127.0.0.1:0".parse().expect("an address"));
    let Ok(Address::Ip(address)) = plug.listen(ListenerId(1), &any) else {
        panic!("cannot listen")
    };
    let stop = Arc::new(AtomicBool::new(false));
    let target = {
        let stop = Arc::clone(&stop);
        let plug = Arc::new(plug);
        std::thread::spawn(move || {
            pin(0);
            let mut transport = plug.open(0, Arc::new(|| ())).expect("a transport");
            serve(&mut *transport, depth, size, &stop);
            println!("{:?}", plug.stats()[0].1);
        })
    };
    std::thread::sleep(Duration::from_millis(50));
    let host = std::thread::spawn(move || {
        pin(1);
        drive(
            address,
            rw == "write",
            (size, depth, connections),
            Duration::from_secs(seconds),
            digests,
        )
    });
    let rate = host.join().expect("the host");
    stop.store(true, Ordering::Relaxed);
    target.join().expect("the target");
    println!("{rate:.0} requests/s, {:.2} GB/s", rate * size as f64 / 1e9);
}

fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set).expect("two cores");
}

fn serve(transport: &mut dyn Transport, depth: usize, size: usize, stop: &AtomicBool) {
    let pool = Pool::heap(&[
        ClassSpec {
            size: 4096,
            count: 4096,
        },
        ClassSpec {
            size: size.next_multiple_of(4096),
            count: 256,
        },
    ]);
    let pools = Pools {
        io: pool.clone(),
        admin: pool.clone(),
    };
    let fixed: Buf = pool.acquire(size).expect("a buffer");
    let mut events = Events::with_capacity(512);
    let clock = Clock::real();
    while !stop.load(Ordering::Relaxed) {
        let now = clock.now();
        transport.poll(now, &pools, &mut events);
        for event in events.drain() {
            match event {
                Event::Opened { conn, .. } => {
                    let entries = depth as u16 + 1;
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
                        cqe: Cqe::success(sqe.cid()),
                        data: Extents::new(),
                    };
                    if sqe.opcode == io::READ {
                        response.data.push(fixed.slice(0, length));
                    } else if data.is_none() {
                        let into = pool.acquire(length).expect("a buffer");
                        transport.fetch(conn, tag, &sqe, into);
                        continue;
                    }
                    transport.respond(conn, response);
                }
                Event::Fetched { conn, tag, .. } => {
                    transport.respond(
                        conn,
                        Response {
                            tag,
                            cqe: Cqe::success(tag.cid),
                            data: Extents::new(),
                        },
                    );
                }
                Event::Closed { why, .. } => eprintln!("closed: {why:?}"),
                other => panic!("{other:?}"),
            }
        }
        transport.flush(now);
    }
}

fn drive(
    address: SocketAddr,
    write: bool,
    (size, depth, connections): (usize, usize, usize),
    time: Duration,
    digests: Digests,
) -> f64 {
    let clock = Clock::real();
    let pool = Pool::heap(&[ClassSpec {
        size: size.next_multiple_of(512),
        count: depth * connections,
    }]);
    let machine = HostConfig {
        entries: depth + 1,
        digests,
        ..HostConfig::default()
    };
    let options = HostOptions {
        machine,
        ..HostOptions::default()
    };
    let connect = |_| connect_host(address, options.clone()).expect("a socket");
    let mut hosts: Vec<TcpHost> = (0..connections).map(connect).collect();
    let mut spare: Vec<Vec<Buf>> = (0..connections)
        .map(|_| {
            (0..depth)
                .map(|_| pool.acquire(size).expect("a buffer"))
                .collect()
        })
        .collect();
    let command = |cid: u16, buf: Buf| {
        let sqe = Sqe::for_namespace(if write { io::WRITE } else { io::READ }, cid, 1);
        let (write, read) = if write {
            (Some(buf), None)
        } else {
            (None, Some(buf))
        };
        HostCommand { sqe, write, read }
    };
    let mut events = Vec::with_capacity(1024);
    let (mut count, mut start) = (0u64, None);
    let warm_up = Instant::now() + Duration::from_millis(300);
    loop {
        let now = clock.now();
        for (host, spare) in hosts.iter_mut().zip(&mut spare) {
            host.poll(now, &mut events, 512);
            for event in events.drain(..) {
                match event {
                    HostEvent::Ready => {
                        host.set_in_capsule_bytes(4096);
                        // A read needs the only handle on its buffer, a write may share it.
                        let first = if write {
                            spare.clone()
                        } else {
                            std::mem::take(spare)
                        };
                        for (cid, buf) in (0..).zip(first) {
                            host.submit(command(cid, buf));
                        }
                    }
                    HostEvent::Completion { cqe, read, .. } => {
                        assert!(cqe.status().is_success());
                        count += 1;
                        let buf = match read {
                            Some(buf) => buf,
                            None => spare[usize::from(cqe.cid())].clone(),
                        };
                        host.submit(command(cqe.cid(), buf));
                    }
                    HostEvent::Closed(why) => panic!("closed: {why:?}"),
                }
            }
        }
        let elapsed = Instant::now();
        match start {
            None if elapsed > warm_up => start = Some((elapsed, count)),
            Some((from, before)) if elapsed - from > time => {
                return (count - before) as f64 / (elapsed - from).as_secs_f64();
            }
            _ => {}
        }
    }
}

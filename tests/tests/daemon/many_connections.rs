//! Tests with many connections at the same time, and with many successive connections.

use std::net::SocketAddr;

use nacre_bdev::Status;
use nacre_nvmf::host::IoQueue;
use nacre_tests::daemon::{Daemon, Place};
use nacre_tests::host::{Host, options, pattern};

const NQN: &str = "nqn.2025-01.io.nacre:many";

fn serve(place: &Place) -> (Daemon, SocketAddr, u32) {
    let mut daemon = place.start();
    daemon.create_ram("ram", 4096, 8 << 20);
    daemon.create_subsystem(NQN);
    let nsid = daemon.add_namespace(NQN, "ram");
    let address = daemon.listen(NQN, "127.0.0.1:0");
    (daemon, address, nsid)
}

/// Hosts with `queues` I/O queues each, all connecting at once.
pub(crate) fn hosts(count: usize, address: SocketAddr, nsid: u32, queues: u16) -> Vec<Host> {
    let make = |n: usize| {
        let mut options = options(NQN);
        options.hostid = [n as u8 + 1; 16];
        options.io_queues = queues;
        options.queue_entries = 9;
        Host::new(address, options, 1)
    };
    let mut hosts: Vec<Host> = (0..count).map(make).collect();
    turn_until(&mut hosts, "live", |h| h.controller.is_live());
    for host in &mut hosts {
        (0..queues).for_each(|_| host.open_queue(nsid));
    }
    turn_until(&mut hosts, "queues live", |h| {
        h.queues.iter().all(IoQueue::is_live)
    });
    hosts
}

fn turn_until(hosts: &mut [Host], what: &str, done: impl Fn(&Host) -> bool) {
    for at in 0..hosts.len() {
        while !done(&hosts[at]) {
            for host in hosts.iter_mut() {
                host.turn();
            }
            hosts[at].turn_or_nap();
            let state = hosts[at].controller.state();
            assert!(
                !hosts[at].controller.link().has_failed(),
                "{what}: {state:?}"
            );
        }
    }
}

fn until_gone(daemon: &mut Daemon) {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while daemon.controllers(NQN) > 0 {
        assert!(std::time::Instant::now() < until, "controllers stay");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Goal: a hundred idle connections do not disturb busy ones. Method: 40 hosts with three
/// connections each; four of them write and read, the others are idle; all stay connected.
#[test]
fn a_hundred_idle_connections_beside_busy_ones() {
    let place = Place::new();
    let (mut daemon, address, nsid) = serve(&place);
    let mut hosts = hosts(40, address, nsid, 2);
    assert_eq!(daemon.controllers(NQN), 40);
    for round in 0..40 {
        for at in [0, 13, 26, 39] {
            let seed = (round * 100 + at) as u64;
            let data = pattern(4096, seed);
            let host = &mut hosts[at];
            assert_eq!(host.write(0, seed % 2048, 1, &data), Status::Ok);
            assert!(
                host.read(1, seed % 2048, 1, 4096) == data,
                "damaged: {seed}"
            );
        }
    }
    for host in &mut hosts {
        host.turn();
        assert!(host.controller.is_live());
        assert!(host.queues.iter().all(|q| q.stats().losses == 0));
    }
    // The last hosts are served as well as the first.
    for host in &mut hosts {
        assert_eq!(host.write(1, 5, 1, &pattern(4096, 5)), Status::Ok);
    }
    daemon.stop();
}

/// Goal: closed connections leave nothing behind: no descriptor, buffer, controller or memory.
/// Method: rounds of hosts that connect, do I/O and leave, every other one without a disconnect and
/// with I/O in flight. The daemon's resources are the same after each round.
#[test]
fn closed_connections_leave_nothing_behind() {
    const ROUNDS: u32 = 6;
    let place = Place::new();
    let (mut daemon, address, nsid) = serve(&place);
    let descriptors = daemon.descriptors();
    let mut resident = 0;
    for round in 0..ROUNDS {
        let mut hosts = hosts(20, address, nsid, 1);
        for host in &mut hosts {
            assert_eq!(host.write(0, 1, 1, &pattern(4096, 1)), Status::Ok);
        }
        for (at, mut host) in hosts.into_iter().enumerate() {
            if at % 2 == 0 {
                host.disconnect();
                continue;
            }
            for lba in 0..8 {
                let buf = host.buf(4096).unwrap();
                let io = |token| nacre_bdev::Io::new(token, nacre_bdev::Op::Read, lba, 1).with(buf);
                host.submit(0, io).unwrap();
            }
            drop(host);
        }
        until_gone(&mut daemon);
        daemon.assert_comes_down_to(descriptors);
        // The allocator reaches its steady state in the first rounds.
        if round == 2 {
            resident = daemon.resident();
        }
    }
    let grown = daemon.resident().saturating_sub(resident);
    assert!(
        grown < 2 << 20,
        "{grown} bytes more after {} rounds",
        ROUNDS - 3
    );
    daemon.stop();
}

/// Goal: an idle daemon uses almost no CPU time, with or without connections. Method: the CPU time
/// of all its threads over two seconds, with 64 idle connections. The best of several intervals
/// counts, because other load disturbs some.
#[test]
fn an_idle_daemon_uses_no_processor() {
    use std::time::{Duration, Instant};
    let place = Place::new();
    let (daemon, address, nsid) = serve(&place);
    let hosts = hosts(16, address, nsid, 3);
    let mut share = f64::INFINITY;
    for _ in 0..10 {
        let (before, begun) = (daemon.processor_time(), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        let used = daemon.processor_time() - before;
        share = share.min(used.as_secs_f64() / begun.elapsed().as_secs_f64());
        if share < 0.01 {
            break;
        }
    }
    println!("{:.3} % of a core with 64 idle connections", share * 100.0);
    assert!(share < 0.01, "{:.2} % of a core", share * 100.0);
    drop(hosts);
    daemon.stop();
}

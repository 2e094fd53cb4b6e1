//! Tests that count system calls: commands are batched, and idle sockets are not polled.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::transport::{HostCommand, HostEvent, HostTransport};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::Sqe;
use nacre_reactor::{Clock, EventSet, Events, Idle, Interest};

use super::sockets::{Server, ready};
use crate::{HostStats, StatsSnapshot, TcpConfig, TcpHost, TcpHostOptions, connect_host};

const DEPTH: u16 = 4;
/// Of the data of one read with its header.
const ANSWER: u64 = 24 + 4096;

struct Pair {
    server: Server,
    hosts: Vec<TcpHost>,
    memory: Pool,
    clock: Clock,
}

impl Pair {
    fn connected(hosts: usize) -> Self {
        let mut server = Server::new(TcpConfig::default());
        let clock = Clock::real();
        let options = TcpHostOptions {
            machine: HostConfig {
                entries: usize::from(DEPTH) + 1,
                ..HostConfig::default()
            },
            ..TcpHostOptions::default()
        };
        let connect = |_| {
            let mut host = connect_host(server.rig.address, options.clone()).unwrap();
            server.until("connected", |_| ready(&mut host, &clock));
            host
        };
        let hosts = (0..hosts).map(connect).collect();
        Self {
            server,
            hosts,
            memory: Pool::heap(&[ClassSpec {
                size: 4096,
                count: 64,
            }]),
            clock,
        }
    }

    fn submit(&mut self, host: usize) {
        for cid in 0..DEPTH {
            let command = HostCommand {
                sqe: Sqe::for_namespace(io::READ, cid, 1),
                write: None,
                read: self.memory.acquire(4096),
            };
            self.hosts[host].submit(command);
        }
    }

    fn poll(&mut self, host: usize) -> usize {
        let mut events = Vec::new();
        let host = &mut self.hosts[host];
        host.poll(self.clock.now(), &mut events, 64);
        for event in &events {
            assert!(
                matches!(event, HostEvent::Completion { cqe, .. } if cqe.status().is_success())
            );
        }
        events.len()
    }

    /// Makes the target answer everything sent to it, and waits until the responses can be
    /// received.
    fn answered(&mut self, host: usize) {
        let socket = &self.hosts[host].socket;
        let wanted = u64::from(DEPTH) * ANSWER;
        self.server.until("answers", |_| {
            rustix::io::ioctl_fionread(socket).unwrap() == wanted
        });
    }

    fn host_calls(&self, host: usize, since: HostStats) -> (u64, u64, u64) {
        let now = self.hosts[host].stats();
        (
            now.sends - since.sends,
            now.receives - since.receives,
            now.receives_empty - since.receives_empty,
        )
    }

    fn target(&self) -> StatsSnapshot {
        self.server.rig.plug.stats()[0].1
    }
}

/// Commands leave in one send, when they are flushed, and one receive gets their responses, whether
/// or not an earlier poll found none.
#[test]
fn one_send_and_one_receive_for_all_answers() {
    let mut pair = Pair::connected(1);
    for (round, looked) in [false, false, true, true].into_iter().enumerate() {
        let before = pair.hosts[0].stats();
        pair.submit(0);
        pair.hosts[0].flush();
        assert_eq!(pair.host_calls(0, before), (1, 0, 0), "round {round}");
        if looked {
            assert_eq!(pair.poll(0), 0);
            assert_eq!(pair.host_calls(0, before), (1, 1, 1), "round {round}");
        }
        pair.answered(0);
        let before = pair.hosts[0].stats();
        assert_eq!(pair.poll(0), usize::from(DEPTH));
        assert_eq!(pair.host_calls(0, before), (0, 1, 0), "round {round}");
    }
}

/// A poll that sends everything does not look for the responses at once. The next poll does, and so
/// does a poll with older commands in flight.
#[test]
fn a_poll_that_sends_does_not_receive_at_once() {
    let mut pair = Pair::connected(1);
    let before = pair.hosts[0].stats();
    pair.submit(0);
    pair.poll(0);
    assert_eq!(pair.host_calls(0, before), (1, 0, 0));
    pair.poll(0);
    assert_eq!(pair.host_calls(0, before), (1, 1, 1));
    pair.hosts[0].submit(HostCommand {
        sqe: Sqe::for_namespace(io::FLUSH, DEPTH, 1),
        write: None,
        read: None,
    });
    pair.poll(0);
    assert_eq!(pair.host_calls(0, before), (2, 2, 2));
}

/// Each of many connections costs the target one receive and one send for commands that came
/// together, and idle connections cost nothing.
#[test]
fn idle_connections_cost_no_receive() {
    let mut pair = Pair::connected(8);
    // Each was active a moment ago.
    for round in 0..3 {
        let before = pair.target();
        for host in 0..8 {
            pair.submit(host);
            pair.hosts[host].flush();
        }
        for host in 0..8 {
            pair.answered(host);
            assert_eq!(pair.poll(host), usize::from(DEPTH));
        }
        for _ in 0..50 {
            pair.server.turn();
        }
        let now = pair.target();
        assert_eq!(
            now.receives_empty - before.receives_empty,
            0,
            "round {round}"
        );
        assert_eq!(now.receives - before.receives, 8, "round {round}");
        assert_eq!(now.sends - before.sends, 8, "round {round}");
    }
}

/// Among few connections an idle one does not cause an epoll call in every turn, and is served
/// nevertheless, though no time passes.
#[test]
fn an_idle_connection_among_few() {
    let mut pair = Pair::connected(2);
    let now = pair.clock.now();
    // Only the first is active, until the second is no longer received from.
    for _ in 0..5000 {
        pair.server.turn_at(now);
    }
    pair.submit(0);
    pair.hosts[0].flush();
    pair.answered(0);
    pair.poll(0);
    let before = pair.target();
    for _ in 0..170 {
        pair.server.turn_at(now);
    }
    let after = pair.target();
    assert_eq!(after.looks - before.looks, 10);
    assert_eq!(after.receives_empty - before.receives_empty, 170);

    pair.submit(1);
    pair.hosts[1].flush();
    let deadline = Instant::now() + Duration::from_secs(30);
    while pair.poll(1) == 0 {
        assert!(Instant::now() < deadline, "the idle one is never served");
        pair.server.turn_at(now);
    }
}

/// A host that sleeps after it has sent wakes for the response, whether that comes before or after
/// its first sleep.
#[test]
fn a_sleeping_host_is_woken() {
    let mut pair = Pair::connected(1);
    let readable = |fd: &OwnedFd, patience| {
        // An epoll in an epoll is readable when it has something.
        let outer = EventSet::new().unwrap();
        outer.add(fd, 1, Interest::READ).unwrap();
        let mut list = Events::with_capacity(1);
        outer.wait(&mut list, patience).unwrap() == 1
    };
    for answered_first in [true, false, true] {
        pair.submit(0);
        assert_eq!(pair.poll(0), 0);
        if answered_first {
            pair.answered(0);
        }
        let now = pair.clock.now();
        assert_ne!(pair.hosts[0].arm(now), Idle::Busy);
        let fd = pair.hosts[0].wake_fd().unwrap().try_clone_to_owned();
        let fd = &fd.expect("a duplicate");
        if !answered_first {
            assert!(!readable(fd, Duration::ZERO));
            pair.answered(0);
        }
        assert!(readable(fd, Duration::from_secs(30)));
        assert_eq!(pair.poll(0), usize::from(DEPTH));
    }
}

/// Goal: a connection adds no set to those of its owners, of which Linux allows five. Method: five
/// sets in each other; the connection wakes the outermost, and no longer after it left.
#[test]
fn a_host_uses_the_set_of_its_owner() {
    let mut pair = Pair::connected(1);
    let sets: Vec<EventSet> = (0..5).map(|_| EventSet::new().unwrap()).collect();
    for (inner, outer) in sets.iter().zip(&sets[1..]) {
        outer.add(inner, 0, Interest::READ).unwrap();
    }
    let is_woken = |patience| {
        let mut list = Events::with_capacity(1);
        sets[4].wait(&mut list, patience).unwrap() == 1
    };
    pair.hosts[0].watch_in(&sets[0]).unwrap();
    pair.submit(0);
    assert_eq!(pair.poll(0), 0);
    let now = pair.clock.now();
    assert_ne!(pair.hosts[0].arm(now), Idle::Busy);
    assert!(!is_woken(Duration::ZERO));
    pair.answered(0);
    assert!(is_woken(Duration::from_secs(30)));
    pair.hosts[0].leave(&sets[0]);
    assert!(!is_woken(Duration::ZERO));
}

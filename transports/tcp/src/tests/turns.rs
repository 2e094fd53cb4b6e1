//! Tests of fairness: the order in which a core serves its connections, and the bound of a turn.
//! Also the time limit of a host that ignores an R2T.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use nacre_hugepages::{ClassSpec, Pool};
use nacre_nvmf::transport::conformance::Rig;
use nacre_nvmf::transport::{CloseWhy, Closed, HostCommand, HostTransport};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::{
    CapsuleCmd, DataAlignment, DataPdu, Digests, FatalErrorStatus, IcResp, R2t, Side, TermPdu,
};
use nacre_reactor::{Clock, Nanos};
use zerocopy::{FromBytes, IntoBytes};

use super::sockets::{Server, ic_req, ready};
use crate::{TcpConfig, TcpHostOptions, connect_host};

/// A host that has its ICResp.
fn initialized(server: &mut Server) -> TcpStream {
    let mut raw = server.raw();
    raw.write_all(ic_req().as_bytes()).unwrap();
    server.until("ICResp", |_| is_answered(&raw));
    raw.read_exact(&mut [0; 128]).unwrap();
    raw
}

fn is_answered(raw: &TcpStream) -> bool {
    raw.set_nonblocking(true).unwrap();
    let there = raw.peek(&mut [0; 1]).is_ok();
    raw.set_nonblocking(false).unwrap();
    there
}

/// Hosts with more commands in flight than one turn has room for take turns with a host that has
/// one command, with direct receives and with epoll.
#[test]
fn deep_queues_leave_room_for_others() {
    const EACH: u16 = 700;
    for busy in [3, 6] {
        let mut server = Server::new(TcpConfig::default());
        server.entries = 4096;
        let mut hosts: Vec<TcpStream> = (0..=busy).map(|_| initialized(&mut server)).collect();
        let flush = |cid| {
            let sqe = Sqe::for_namespace(io::FLUSH, cid, 1);
            let capsule = CapsuleCmd::new(sqe, 0, Digests::NONE, DataAlignment::DWORD);
            capsule.as_bytes().to_vec()
        };
        let flood: Vec<u8> = (0..EACH).flat_map(flush).collect();
        for host in &mut hosts[..busy] {
            host.write_all(&flood).unwrap();
        }
        hosts[busy].write_all(&flush(0)).unwrap();
        let mut turns = 0;
        while !is_answered(&hosts[busy]) {
            server.turn();
            turns += 1;
            assert!(turns <= busy + 3, "{busy} others come first");
        }
        // The other hosts were served too.
        for host in &mut hosts[..busy] {
            let mut answers = vec![0; 24 * usize::from(EACH)];
            for _ in 0..50 {
                server.turn();
            }
            host.read_exact(&mut answers).unwrap();
        }
    }
}

/// Goal: the data of one large command per turn, so that its response and the next R2T leave before
/// the data of the others is received. Method: the data of two commands waits in the socket, and
/// each turn brings one response.
#[test]
fn large_data_is_answered_command_by_command() {
    // On a busy machine the data may arrive so late that both commands end in one turn.
    const ATTEMPTS: usize = 5;
    let counts: Vec<Vec<usize>> = (0..ATTEMPTS).map(|_| responses_to_large_data()).collect();
    let one_by_one = counts.iter().any(|counts| counts.contains(&1));
    assert!(one_by_one, "one after the other: {counts:?}");
}

/// The number of responses after each turn, from the data of two commands on.
fn responses_to_large_data() -> Vec<usize> {
    const BYTES: u32 = 128 << 10;
    let config = TcpConfig {
        receive_buffer: Some(1 << 20),
        ..TcpConfig::default()
    };
    let mut server = Server::new(config);
    let mut raw = initialized(&mut server);
    for cid in 0..2 {
        let mut sqe = Sqe::for_namespace(io::WRITE, cid, 1);
        sqe.set_sgl(Sgl::Transport { length: BYTES });
        let capsule = CapsuleCmd::new(sqe, 0, Digests::NONE, DataAlignment::DWORD);
        raw.write_all(capsule.as_bytes()).unwrap();
    }
    let mut requests = [[0; size_of::<R2t>()]; 2];
    server.until("both R2Ts", |_| is_answered(&raw));
    server.turn();
    for request in &mut requests {
        raw.read_exact(request).unwrap();
    }
    let data = vec![7; BYTES as usize];
    for (cid, request) in requests.iter().enumerate() {
        let request = R2t::ref_from_bytes(request).unwrap();
        let (ttag, none) = (request.ttag.get(), DataAlignment::DWORD);
        let header = DataPdu::h2c(cid as u16, ttag, 0, BYTES, true, Digests::NONE, none);
        raw.write_all(header.as_bytes()).unwrap();
        raw.write_all(&data).unwrap();
    }
    let answered = || {
        let mut answers = [0; 48];
        raw.set_nonblocking(true).unwrap();
        let count = raw.peek(&mut answers).unwrap_or(0);
        raw.set_nonblocking(false).unwrap();
        count / 24
    };
    let mut counts = Vec::new();
    server.until("both responses", |_| {
        counts.push(answered());
        counts.last() == Some(&2)
    });
    counts
}

/// More connections end in one turn than there is room for: the others do in the next ones.
#[test]
fn many_ends_at_once() {
    const HOSTS: usize = 300;
    let mut server = Server::new(TcpConfig::default());
    let hosts: Vec<TcpStream> = (0..HOSTS).map(|_| initialized(&mut server)).collect();
    assert_eq!(server.rig.transport.connections(), HOSTS);
    for conn in std::mem::take(&mut server.conns) {
        server.rig.transport.close(conn, CloseWhy::Now);
    }
    for _ in 0..10 {
        server.turn();
    }
    assert_eq!(server.closed.len(), HOSTS);
    assert!(server.closed.iter().all(|why| *why == Closed::Local));
    assert_eq!(server.rig.transport.connections(), 0);
    assert_eq!(server.rig.plug.connections(), 0);
    drop(hosts);
}

/// Data that a controller has not received when the connection ends is not sent. The write may have
/// been retried over another connection, and completed.
#[test]
fn nothing_is_sent_after_the_end() {
    const BYTES: u32 = 128 << 10;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = TcpHostOptions {
        send_buffer: Some(256 << 10),
        ..TcpHostOptions::default()
    };
    let (address, clock) = (listener.local_addr().unwrap(), Clock::real());
    let mut host = connect_host(address, options).unwrap();
    let (mut controller, _) = listener.accept().unwrap();
    let response = IcResp::new(DataAlignment::DWORD, Digests::NONE, 4096);
    controller.write_all(response.as_bytes()).unwrap();
    while !ready(&mut host, &clock) {}
    host.set_in_capsule_bytes(BYTES);
    let memory = Pool::heap(&[ClassSpec {
        size: BYTES as usize,
        count: 128,
    }]);
    for cid in 0..128 {
        host.submit(HostCommand {
            sqe: Sqe::for_namespace(io::WRITE, cid, 1),
            write: memory.acquire(BYTES as usize),
            read: None,
        });
    }
    let mut events = Vec::new();
    for _ in 0..10 {
        host.poll(clock.now(), &mut events, 8);
    }
    assert!(events.is_empty());
    host.close();
    drop(host);
    let mut taken = Vec::new();
    let end = controller.read_to_end(&mut taken).map_err(|e| e.kind());
    assert_eq!(
        end,
        Err(ErrorKind::ConnectionReset),
        "{} bytes",
        taken.len()
    );
    assert_eq!(memory.stats()[0].free, 128);
}

/// A host that finds us at fault and says so waits for the end of the connection, which comes.
#[test]
fn a_termination_request_is_the_end() {
    let mut server = Server::new(TcpConfig::default());
    let mut raw = initialized(&mut server);
    let request = TermPdu::new(Side::Host, FatalErrorStatus::InvalidHeaderField, 2, &[]);
    raw.write_all(request.bytes()).unwrap();
    server.until("ended", |server| !server.closed.is_empty());
    for _ in 0..3 {
        server.turn();
    }
    raw.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    assert_eq!(raw.read(&mut [0; 1]).map_err(|e| e.kind()), Ok(0));
}

/// Goal: a host that ignores an R2T is closed after one `stall_timeout`, and not sooner. Method:
/// the time after the R2T is virtual.
#[test]
fn an_ignored_r2t_ends_the_connection() {
    const STALL: Duration = Duration::from_secs(30);
    let mut server = Server::new(TcpConfig {
        stall_timeout: STALL,
        ..TcpConfig::default()
    });
    let mut raw = server.raw();
    raw.set_read_timeout(Some(Duration::from_millis(1)))
        .unwrap();
    raw.write_all(ic_req().as_bytes()).unwrap();
    let before = server.rig.now();
    raw.write_all(&write_command()).unwrap();
    let mut answers = Vec::new();
    server.until("ICResp and R2T", |_| {
        let _ = (&raw).take(R2T_END as u64).read_to_end(&mut answers);
        answers.len() == R2T_END
    });
    server.assert_stalls(before, STALL);
}

/// The end of the R2T in the bytes that a target sends: behind its ICResp.
pub(super) const R2T_END: usize = 128 + 24;

/// A write whose data the target requests.
pub(super) fn write_command() -> Vec<u8> {
    let mut sqe = Sqe::for_namespace(io::WRITE, 0, 1);
    sqe.set_sgl(Sgl::Transport { length: 4096 });
    let capsule = CapsuleCmd::new(sqe, 0, Digests::NONE, DataAlignment::DWORD);
    capsule.as_bytes().to_vec()
}

impl Server {
    /// The only connection has its R2T, which left after `before`, and is closed in time.
    pub(super) fn assert_stalls(&mut self, before: Nanos, stall: Duration) {
        let after = self.rig.now();
        self.turn_at(before + stall - Duration::from_millis(1));
        assert_eq!(self.closed, []);
        for _ in 0..2 {
            self.turn_at(after + stall);
        }
        assert_eq!(self.closed, [Closed::TimedOut]);
    }
}

//! The responder of a comparison of two machines: serves one session over TCP, and echoes its UDP
//! probes.

use std::collections::BTreeMap;
use std::io::{self, BufReader};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::netdev::receive_with_tos;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use super::wire::{self, Arrived, ProbePacket, Reply, Request, Timed};
use super::{Bytes, End, System, roce};
use crate::session::VERSION;

/// Limit for a session; one takes a few seconds.
const SESSION: Duration = Duration::from_secs(60);
/// Limit for the first message: a silent connection must not keep others out.
const HELLO: Duration = Duration::from_secs(3);
/// Limit for each later message. Between two there is at most one burst.
const IDLE: Duration = Duration::from_secs(10);
/// Requests for counts that a session may send; each class needs a few.
const COUNTS_MAX: u32 = 256;
/// Limit for sending an answer.
const SENDING: Duration = Duration::from_secs(5);
/// Probes that a session may send.
const PROBES_MAX: u64 = 1 << 16;

/// The responder, which listens for the requesting end.
#[derive(Debug)]
pub struct Responder {
    listener: TcpListener,
}

impl Responder {
    pub fn bind(at: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves one complete session, and returns the address of the requesting end. `None`: no
    /// session was complete before `until`. Connections that break the protocol are closed.
    ///
    /// `facts` returns the settings of the interface with an address, and its physical interfaces;
    /// `count` reads the byte counts of those. Pass [`here`] and [`super::count`].
    pub fn serve(
        &self,
        until: Instant,
        facts: &dyn Fn(IpAddr) -> (End, Vec<String>),
        count: &dyn Fn(&[String]) -> Bytes,
    ) -> io::Result<Option<SocketAddr>> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    let until = until.min(Instant::now() + SESSION);
                    if session(&stream, peer, until, facts, count).is_ok() {
                        return Ok(Some(peer));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let left = left.try_into().map_err(|_| rustix::io::Errno::INVAL)?;
                    let ready = poll(
                        &mut [PollFd::new(&self.listener, PollFlags::IN)],
                        Some(&left),
                    );
                    match ready {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                // The connection ended before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn session(
    stream: &TcpStream,
    peer: SocketAddr,
    until: Instant,
    facts: &dyn Fn(IpAddr) -> (End, Vec<String>),
    count: &dyn Fn(&[String]) -> Bytes,
) -> io::Result<()> {
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    stream.set_write_timeout(Some(SENDING))?;
    let mut hello = BufReader::new(Timed {
        stream,
        until: until.min(Instant::now() + HELLO),
    });
    let Request::Hello { version, port } = wire::read(&mut hello)? else {
        return Err(broken());
    };
    let local = stream.local_addr()?;
    let mut prober = peer;
    prober.set_port(port);
    let socket = wire::probe_socket(local, prober)?;
    let mut token = [0; 8];
    getrandom::fill(&mut token).map_err(|_| io::ErrorKind::Unsupported)?;
    let token = u64::from_ne_bytes(token);
    let (end, interfaces) = facts(local.ip());
    let reply = Reply::Hello {
        version: VERSION,
        token,
        end: Box::new(end),
    };
    // Also to an end of another version, so that it can say so.
    wire::write(&mut &*stream, &reply)?;
    if version != VERSION {
        return Err(broken());
    }
    let stop = AtomicBool::new(false);
    let arrived = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        scope.spawn(|| echo_probes(&socket, token, &stop, &arrived));
        let mut requests = BufReader::new(Timed { stream, until });
        let mut counted = 0;
        let outcome = loop {
            // A silent end must not keep others out.
            requests.get_mut().until = until.min(Instant::now() + IDLE);
            match wire::read(&mut requests) {
                Ok(Request::Counts) if counted < COUNTS_MAX => {
                    counted += 1;
                    let reply = Reply::Counts {
                        arrived: arrivals(&arrived),
                        bytes: Box::new(count(&interfaces)),
                    };
                    if let Err(error) = wire::write(&mut &*stream, &reply) {
                        break Err(error);
                    }
                }
                Ok(Request::Bye) => break Ok(()),
                Ok(Request::Counts | Request::Hello { .. }) => break Err(broken()),
                Err(error) => break Err(error),
            }
        };
        stop.store(true, Ordering::Relaxed);
        outcome
    })
}

fn arrivals(arrived: &Mutex<BTreeMap<(u8, u8), u64>>) -> Vec<Arrived> {
    let arrived = arrived.lock();
    let all = arrived.iter().map(|((sent, arrived), count)| Arrived {
        sent: *sent,
        arrived: *arrived,
        count: *count,
    });
    all.collect()
}

/// Counts probes by the DSCP sent and arrived, and sends each back with the mark that it was sent
/// with. Other datagrams are ignored.
fn echo_probes(
    socket: &UdpSocket,
    token: u64,
    stop: &AtomicBool,
    arrived: &Mutex<BTreeMap<(u8, u8), u64>>,
) {
    let mut buffer = [0; wire::PROBE + 1];
    let mut marked = None;
    let mut echoed = 0;
    while !stop.load(Ordering::Relaxed) && echoed < PROBES_MAX {
        // Timeouts, and ICMP errors about an earlier echo.
        let Ok((length, Some(tos))) = receive_with_tos(socket.as_fd(), &mut buffer) else {
            continue;
        };
        let probe = ProbePacket::parse(&buffer[..length]);
        let Some(probe) = probe.filter(|of| of.token == token && of.echo.is_none()) else {
            continue;
        };
        echoed += 1;
        let dscp = tos >> 2;
        let mark = (probe.sent, probe.priority);
        if marked != Some(mark) && wire::mark(socket, mark.0, mark.1).is_ok() {
            marked = Some(mark);
        }
        *arrived.lock().entry((probe.sent, dscp)).or_default() += 1;
        let echo = ProbePacket {
            echo: Some(dscp),
            ..probe
        };
        // A lost echo is counted at the other end.
        let _ = socket.send(&echo.to_bytes());
    }
}

/// The settings of this machine's interface with this address, and its physical interfaces.
pub fn here(ip: IpAddr) -> (End, Vec<String>) {
    let system = System::real();
    let Some(interface) = system.interface_of(ip) else {
        return (End::default(), Vec::new());
    };
    let interfaces = roce::physical(&system.roots, &interface.name);
    let facts = system.probe.ethernet(&interfaces, Duration::ZERO);
    (End::of(&system, &interface.name, &facts), interfaces)
}

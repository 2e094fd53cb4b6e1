//! The upper limit for NVMe/TCP over loopback: two pinned threads that only move the bytes of
//! commands through bare sockets.
//!
//! ```text
//!          client (host)                          server (target)
//! read     72-byte command capsule      ──▶
//!                                       ◀──       24-byte C2HData header + data (SUCCESS flag)
//! write    72-byte capsule + data       ──▶
//!                                       ◀──       24-byte response capsule
//! ```
//!
//! No parsing, buffer management or checks: each side counts bytes. It answers all whole messages
//! of one `recv` with one `send`, or with a few of 512 KiB, the best batching that sockets allow.
//! No protocol over the same sockets can be faster, so the distance to this limit is Nacre's own
//! cost. Both wait modes are measured (spinning on the socket, sleeping in the kernel); the faster
//! one is the limit.

use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, sockopt};
use serde::Serialize;

use crate::pin;

/// Bytes of a command capsule: common header and submission queue entry (NVMe/TCP 3.6.2.6).
const COMMAND: usize = 72;
/// Bytes of a response capsule, and of the header of a C2HData PDU.
const ANSWER: usize = 24;
/// Most bytes per `recv` or `send`: large enough to amortise the call, small enough for the L2
/// cache.
const BATCH: usize = 512 * 1024;
/// Unmeasured start: the congestion window opens and the socket buffers grow.
const WARM_UP: Duration = Duration::from_millis(300);
/// Congestion control without timers, which every kernel offers to unprivileged processes.
const UNPACED: &str = "reno";
/// Ready sockets taken from the kernel in one call.
const READY: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    Read,
    Write,
}

/// How a side waits for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// Poll the socket without sleeping.
    Spin,
    /// Sleep in the kernel until bytes arrive.
    Block,
}

/// The parameters of a measurement, which are options of the program.
#[derive(Debug, Clone, Serialize, clap::Args)]
#[command(about = None, long_about = None)]
pub struct Workload {
    #[arg(long, value_enum, default_value_t = Direction::Read)]
    pub rw: Direction,
    /// Bytes of data per request.
    #[arg(long, default_value_t = 4096)]
    pub size: usize,
    /// Requests in flight per connection.
    #[arg(long, default_value_t = 128)]
    pub depth: usize,
    #[arg(long, default_value_t = 1)]
    pub connections: usize,
    /// Duration of the measurement with each wait mode.
    #[arg(long, default_value_t = 2.0)]
    pub seconds: f64,
    #[arg(long, default_value_t = 0)]
    pub server_core: usize,
    #[arg(long, default_value_t = 1)]
    pub client_core: usize,
    /// Use congestion control without pacing timers, whatever the system default is.
    #[arg(long)]
    pub unpaced: bool,
}

/// The result of a measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Rate {
    pub wait: Wait,
    pub requests_per_second: f64,
}

/// Runs the workload once in the given wait mode, after 300 ms of warm-up. Returns the completed
/// requests per second. Fails if the depth, size or number of connections is 0, or if both sides
/// have the same core.
pub fn measure(workload: &Workload, wait: Wait) -> Result<Rate> {
    ensure!(workload.depth > 0, "a depth of 0 requests nothing");
    ensure!(
        workload.connections > 0,
        "without a connection nothing moves"
    );
    ensure!(
        workload.size > 0,
        "a request without data has no limit of interest"
    );
    ensure!(
        workload.server_core != workload.client_core,
        "the two sides need a core each"
    );
    let (clients, servers) = connect(workload.connections, workload.unpaced)?;
    let (host, target) = match workload.rw {
        Direction::Read => (
            Shape::new(ANSWER + workload.size, COMMAND),
            Shape::new(COMMAND, ANSWER + workload.size),
        ),
        Direction::Write => (
            Shape::new(ANSWER, COMMAND + workload.size),
            Shape::new(COMMAND + workload.size, ANSWER),
        ),
    };
    let ended = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    // The server counts nothing and ends when its sockets close.
    let (uncounted, unstopped) = (AtomicU64::new(0), AtomicBool::new(false));

    thread::scope(|scope| {
        let server = scope.spawn(|| {
            pin(workload.server_core)?;
            exchange(servers, target, 0, wait, &uncounted, &unstopped)
        });
        let client = scope.spawn(|| {
            pin(workload.client_core)?;
            exchange(clients, host, workload.depth, wait, &ended, &stop)
        });
        thread::sleep(WARM_UP);
        let (start, before) = (Instant::now(), ended.load(Ordering::Relaxed));
        thread::sleep(Duration::from_secs_f64(workload.seconds));
        let (took, after) = (start.elapsed(), ended.load(Ordering::Relaxed));
        stop.store(true, Ordering::Relaxed);
        for (name, side) in [("client", client), ("server", server)] {
            match side.join() {
                Ok(ended) => ended.with_context(|| format!("the {name}"))?,
                Err(_) => bail!("the {name} panicked"),
            }
        }
        Ok(Rate {
            wait,
            requests_per_second: (after - before) as f64 / took.as_secs_f64(),
        })
    })
}

/// Connected pairs over loopback with TCP_NODELAY: (client ends, server ends).
fn connect(connections: usize, unpaced: bool) -> Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening on loopback")?;
    let address = listener.local_addr()?;
    let mut clients = Vec::with_capacity(connections);
    let mut servers = Vec::with_capacity(connections);
    for _ in 0..connections {
        let client = TcpStream::connect(address).context("connecting over loopback")?;
        let (server, _) = listener.accept().context("accepting over loopback")?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        for end in [&client, &server] {
            if unpaced {
                sockopt::set_tcp_congestion(end, UNPACED)
                    .context("choosing a congestion control")?;
            }
        }
        clients.push(client);
        servers.push(server);
    }
    Ok((clients, servers))
}

/// Bytes per message in each direction, from one side's view.
#[derive(Debug, Clone, Copy)]
struct Shape {
    incoming: usize,
    outgoing: usize,
}

impl Shape {
    fn new(incoming: usize, outgoing: usize) -> Self {
        Self { incoming, outgoing }
    }
}

/// One connection of one side: received bytes of the current message, and bytes not yet sent.
#[derive(Debug, Default)]
struct Link {
    received: usize,
    unsent: usize,
}

impl Link {
    /// Adds `bytes` received bytes. Returns the number of messages that they completed; each gets
    /// one answer.
    fn take(&mut self, bytes: usize, shape: Shape) -> usize {
        self.received += bytes;
        let messages = self.received / shape.incoming;
        self.received -= messages * shape.incoming;
        self.unsent += messages * shape.outgoing;
        messages
    }
}

/// Sends `ahead` messages on every socket, then one per received message, until stopped or the peer
/// closes.
fn exchange(
    sockets: Vec<TcpStream>,
    shape: Shape,
    ahead: usize,
    wait: Wait,
    ended: &AtomicU64,
    stop: &AtomicBool,
) -> Result<()> {
    let mut side = Side {
        links: sockets
            .iter()
            .map(|_| Link {
                received: 0,
                unsent: ahead * shape.outgoing,
            })
            .collect(),
        sockets,
        shape,
        incoming: vec![0; BATCH],
        outgoing: vec![0x5a; BATCH],
        total: 0,
    };
    match (side.sockets.len(), wait) {
        (1, Wait::Block) => side.run_one_blocking(ended, stop),
        (1, Wait::Spin) => side.run_one_spinning(ended, stop),
        (_, wait) => side.run_many(wait, ended, stop),
    }
}

struct Side {
    sockets: Vec<TcpStream>,
    links: Vec<Link>,
    shape: Shape,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    total: u64,
}

/// Result of one turn on a socket.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    Moved,
    Nothing,
    PeerLeft,
}

impl Side {
    /// Exchanges messages over one connection with blocking calls. This cannot deadlock at the
    /// depths in use. One direction carries only small messages (24 or 72 bytes), and all that can
    /// be in flight (`depth`) fit into a socket buffer. So at least one side always reaches its
    /// `recv`.
    fn run_one_blocking(&mut self, ended: &AtomicU64, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            while self.links[0].unsent > 0 {
                if self.send(0, SendFlags::NOSIGNAL)? == Turn::PeerLeft {
                    return Ok(());
                }
            }
            if self.receive(0, RecvFlags::empty(), ended)? == Turn::PeerLeft {
                return Ok(());
            }
        }
        Ok(())
    }

    fn run_one_spinning(&mut self, ended: &AtomicU64, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) {
            if self.turn(0, ended)? == Turn::PeerLeft {
                return Ok(());
            }
        }
        Ok(())
    }

    fn run_many(&mut self, wait: Wait, ended: &AtomicU64, stop: &AtomicBool) -> Result<()> {
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (index, socket) in self.sockets.iter().enumerate() {
            epoll::add(
                &ready,
                socket,
                epoll::EventData::new_u64(index as u64),
                epoll::EventFlags::IN,
            )?;
        }
        let timeout = match wait {
            Wait::Spin => rustix::fs::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            // The timeout exists only to notice a stop; traffic ends the wait long before.
            Wait::Block => rustix::fs::Timespec {
                tv_sec: 0,
                tv_nsec: 50_000_000,
            },
        };
        for index in 0..self.sockets.len() {
            self.send(index, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        }
        let mut events = Vec::with_capacity(READY);
        let mut here = self.sockets.len();
        while here > 0 && !stop.load(Ordering::Relaxed) {
            events.clear();
            match epoll::wait(
                &ready,
                rustix::buffer::spare_capacity(&mut events),
                Some(&timeout),
            ) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("waiting for sockets"),
            }
            for event in &events {
                let index = event.data.u64() as usize;
                if self.turn(index, ended)? == Turn::PeerLeft {
                    epoll::delete(&ready, &self.sockets[index])?;
                    self.links[index].unsent = 0;
                    here -= 1;
                }
            }
            // Data that did not fit into a socket buffer: rare, and sent once the peer has read.
            for index in 0..self.sockets.len() {
                if self.links[index].unsent > 0 {
                    self.send(index, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
                }
            }
        }
        Ok(())
    }

    /// Receives the available bytes and answers them, without waiting.
    fn turn(&mut self, index: usize, ended: &AtomicU64) -> Result<Turn> {
        let turn = self.receive(index, RecvFlags::DONTWAIT, ended)?;
        if turn != Turn::PeerLeft && self.links[index].unsent > 0 {
            return self.send(index, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
        Ok(turn)
    }

    fn receive(&mut self, index: usize, flags: RecvFlags, ended: &AtomicU64) -> Result<Turn> {
        match rustix::net::recv(&self.sockets[index], self.incoming.as_mut_slice(), flags) {
            Ok((0, _)) | Err(Errno::CONNRESET) => Ok(Turn::PeerLeft),
            Ok((bytes, _)) => {
                self.total += self.links[index].take(bytes, self.shape) as u64;
                ended.store(self.total, Ordering::Relaxed);
                Ok(Turn::Moved)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Turn::Nothing),
            Err(error) => Err(error).context("receiving"),
        }
    }

    fn send(&mut self, index: usize, flags: SendFlags) -> Result<Turn> {
        let bytes = self.links[index].unsent.min(BATCH);
        match rustix::net::send(&self.sockets[index], &self.outgoing[..bytes], flags) {
            Ok(sent) => {
                self.links[index].unsent -= sent;
                Ok(Turn::Moved)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(Turn::Nothing),
            Err(Errno::CONNRESET | Errno::PIPE) => Ok(Turn::PeerLeft),
            Err(error) => Err(error).context("sending"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_messages_are_counted() {
        let shape = Shape::new(100, 30);
        let mut link = Link::default();
        assert_eq!(link.take(99, shape), 0);
        assert_eq!(link.take(1, shape), 1);
        assert_eq!(link.take(250, shape), 2);
        assert_eq!((link.received, link.unsent), (50, 90));
    }

    /// Goal: every mode moves requests and ends. Method: both directions, both wait modes, one
    /// connection and several.
    #[test]
    fn every_mode_moves_requests() {
        let cores = rustix::thread::sched_getaffinity(None).expect("our own affinity");
        let usable: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|&core| cores.is_set(core))
            .collect();
        let [server_core, client_core, ..] = usable[..] else {
            use std::io::Write;
            let why = "SKIPPED: limit::every_mode_moves_requests: it takes two cores\n";
            std::io::stderr()
                .write_all(why.as_bytes())
                .expect("writing to stderr");
            return;
        };
        for rw in [Direction::Read, Direction::Write] {
            for wait in [Wait::Spin, Wait::Block] {
                for (connections, depth) in [(1, 1), (1, 200), (5, 3)] {
                    let moves = |seconds| {
                        let workload = Workload {
                            rw,
                            size: 8192,
                            depth,
                            connections,
                            seconds,
                            server_core,
                            client_core,
                            unpaced: connections > 1,
                        };
                        let rate = measure(&workload, wait).expect("a run over loopback");
                        rate.requests_per_second > 0.0
                    };
                    // On a busy machine another process may occupy one of the two cores for a
                    // while.
                    let moved = [0.05, 0.5, 5.0].into_iter().any(moves);
                    assert!(moved, "{rw:?}, {connections} x {depth}, {wait:?}");
                }
            }
        }
    }
}

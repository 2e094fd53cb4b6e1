//! The host side of NVMe/TCP: [`TcpHost`] runs the connection machine of one queue pair on a
//! socket, over TLS if it has a PSK.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nacre_nvmf::tcp::{HostConfig, HostConn, Polled, RecvSlices, RxBuffers, Slices};
use nacre_nvmf::transport::{Closed, HostCommand, HostEvent, HostTransport};
use nacre_reactor::{EventSet, Idle, Interest, Nanos};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, sockopt};

use crate::host_handshake::{HostHandshake, HostTls};
use crate::sealed::Sealed;
use crate::socket::{self, Marking, Tuning};

/// Options of one connection of the host side.
#[derive(Debug, Clone)]
pub struct TcpHostOptions {
    /// Digests, alignment, queue size, handshake timeout.
    pub machine: HostConfig,
    /// Time limit of the TCP connection attempt, and then of the TLS handshake.
    pub connect_timeout: Duration,
    /// The address to connect from; `None`: the kernel's choice.
    pub source: Option<IpAddr>,
    /// The interface to connect through (needs CAP_NET_RAW on kernels before 5.7).
    pub interface: Option<String>,
    pub marking: Marking,
    /// SO_SNDBUF and SO_RCVBUF in bytes; `None`: the kernel adjusts the sizes.
    pub send_buffer: Option<usize>,
    pub receive_buffer: Option<usize>,
    /// Time for the controller to acknowledge sent data (TCP_USER_TIMEOUT).
    pub ack_timeout: Duration,
    /// Bytes of each of the two receive buffers, at least 1024.
    pub rx_buffer_size: usize,
    /// The PSK of TLS; `None`: no TLS.
    pub tls: Option<HostTls>,
}

impl Default for TcpHostOptions {
    fn default() -> Self {
        Self {
            machine: HostConfig::default(),
            connect_timeout: Duration::from_secs(5),
            source: None,
            interface: None,
            marking: Marking::default(),
            send_buffer: None,
            receive_buffer: None,
            ack_timeout: Duration::from_secs(30),
            rx_buffer_size: 256 << 10,
            tls: None,
        }
    }
}

/// Starts to connect to a controller. The first event is the result: [`HostEvent::Ready`] or
/// [`HostEvent::Closed`]. An error of this function is local: too many open files, or a source or
/// interface that this machine does not have.
pub fn connect_host(address: SocketAddr, options: TcpHostOptions) -> std::io::Result<TcpHost> {
    let socket = socket::stream_socket(&address)?;
    let tuning = Tuning {
        marking: options.marking,
        send_buffer: options.send_buffer,
        receive_buffer: options.receive_buffer,
        ack_timeout: options.ack_timeout,
    };
    socket::tune(&socket, &address, &tuning)?;
    // When the connection ends for any reason, drop unacknowledged data instead of sending it. A
    // late write could undo a write that was retried and completed on another connection.
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO))?;
    if let Some(interface) = &options.interface {
        socket2::SockRef::from(&socket).bind_device(Some(interface.as_bytes()))?;
    }
    if let Some(source) = options.source {
        let mut from = SocketAddr::new(source, 0);
        // A link-local source address must be on the target's link.
        if let (SocketAddr::V6(from), SocketAddr::V6(target)) = (&mut from, &address)
            && socket::is_link_local(source)
        {
            from.set_scope_id(target.scope_id());
        }
        rustix::net::bind(&socket, &from)?;
    }
    let state = match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => State::Connecting { since: None },
        Err(errno) => State::Failed(refused(address, errno)),
    };
    let epoll = EventSet::new()?;
    Ok(TcpHost {
        address,
        buffers: RxBuffers::new(2, options.rx_buffer_size),
        options,
        socket,
        epoll,
        watched: None,
        state,
        sealed: None,
        in_capsule_bytes: None,
        output: Output::default(),
        more: false,
    })
}

fn refused(address: SocketAddr, errno: Errno) -> Closed {
    Closed::Broken(format!(
        "cannot connect to {address}: {}",
        socket::describe(errno)
    ))
}

enum State {
    /// The kernel connects. `since`: the time of the first poll.
    Connecting {
        since: Option<Nanos>,
    },
    /// The TLS handshake is running.
    Handshaking {
        handshake: HostHandshake,
        since: Nanos,
    },
    Open(Box<HostConn>),
    /// Failed before the machine started; the next poll reports it.
    Failed(Closed),
    /// Closed and reported. The machine has the commands in flight until the caller reclaims them.
    Gone(Option<Box<HostConn>>),
}

/// Counters of the system calls of one queue pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostStats {
    pub receives: u64,
    /// Receives that found no data (EAGAIN).
    pub receives_empty: u64,
    pub sends: u64,
}

/// One queue pair of the host side: a TCP connection to a controller. Dropping it closes the
/// connection and discards data that the controller has not acknowledged.
pub struct TcpHost {
    address: SocketAddr,
    options: TcpHostOptions,
    pub(crate) socket: OwnedFd,
    /// The epoll set whose descriptor wakes a sleeping core.
    epoll: EventSet,
    /// `Some`: the socket is in the epoll set; true: also watched for writing. It is added at the
    /// first sleep, because a watched socket costs the kernel time for each packet.
    watched: Option<bool>,
    buffers: RxBuffers,
    state: State,
    /// The TLS records between machine and socket; `None`: no TLS.
    sealed: Option<Box<Sealed>>,
    in_capsule_bytes: Option<u32>,
    output: Output,
    /// The last poll left received data unprocessed, because a list or buffer was full.
    more: bool,
}

/// The result of earlier sends on the socket.
#[derive(Default)]
struct Output {
    /// The socket's send buffer was full at the last attempt.
    blocked: bool,
    stats: HostStats,
}

impl TcpHost {
    pub fn stats(&self) -> HostStats {
        self.output.stats
    }

    /// The controller's address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The local address and port. Before the connection exists they can be unspecified (zeros).
    pub fn local_address(&self) -> Option<SocketAddr> {
        rustix::net::getsockname(&self.socket).ok()?.try_into().ok()
    }

    fn connecting(&mut self, since: Nanos, now: Nanos) {
        let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let writable = matches!(rustix::event::poll(&mut fds, Some(&at_once)), Ok(1));
        self.state = if writable {
            match sockopt::socket_error(&self.socket) {
                Ok(Ok(())) => match self.options.tls.clone() {
                    None => self.open(now),
                    Some(tls) => self.begin_handshake(tls, now),
                },
                Ok(Err(errno)) | Err(errno) => State::Failed(refused(self.address, errno)),
            }
        } else if now >= since + self.options.connect_timeout {
            let limit = self.options.connect_timeout;
            State::Failed(Closed::Broken(format!(
                "cannot connect to {}: no answer within {limit:?}",
                self.address
            )))
        } else {
            State::Connecting { since: Some(since) }
        };
    }
}

impl TcpHost {
    fn open(&self, now: Nanos) -> State {
        let mut conn = Box::new(HostConn::new(self.options.machine.clone(), now));
        if let Some(bytes) = self.in_capsule_bytes {
            conn.set_in_capsule_bytes(bytes);
        }
        State::Open(conn)
    }

    fn begin_handshake(&self, tls: HostTls, since: Nanos) -> State {
        let begun = HostHandshake::begin(tls, self.address.to_string());
        let begun = begun.map_err(|error| error.to_string());
        let watched = begun.and_then(|handshake| {
            // Readable after a job, which wakes a sleeping core.
            self.epoll
                .add(handshake.descriptor(), 0, Interest::READ)
                .map_err(|error| error.to_string())?;
            Ok(handshake)
        });
        match watched {
            Ok(handshake) => State::Handshaking { handshake, since },
            Err(why) => State::Failed(Closed::Broken(format!("TLS handshake: {why}"))),
        }
    }

    fn handshaking(&mut self, now: Nanos) {
        let State::Handshaking { handshake, since } = &mut self.state else {
            return;
        };
        let is_late = now >= *since + self.options.connect_timeout;
        let ended = loop {
            if let Some(mut turn) = handshake.take() {
                let output = std::mem::take(&mut turn.output);
                let sent = output.is_empty()
                    || socket::send(self.socket.as_fd(), &[IoSlice::new(&output)])
                        == Ok(output.len());
                match turn.result {
                    Err(failure) => break Err(Closed::Refused(failure.to_string())),
                    // A flight is smaller than any socket's buffer.
                    Ok(_) if !sent => {
                        break Err(Closed::Broken("the TLS handshake cannot be sent".into()));
                    }
                    Ok(Some(outcome)) => break Ok(outcome),
                    Ok(None) => {}
                }
            }
            if handshake.is_busy() {
                if is_late {
                    break Err(Closed::TimedOut);
                }
                return;
            }
            let mut bytes = vec![0; 4096];
            match rustix::net::recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => {
                    let why = "the controller closed the connection during the TLS handshake";
                    break Err(Closed::Broken(why.into()));
                }
                Ok((_, count)) => {
                    bytes.truncate(count);
                    if let Err(full) = handshake.received(bytes) {
                        break Err(Closed::Broken(format!("TLS handshake: {full}")));
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) if !is_late => return,
                Err(Errno::AGAIN | Errno::INTR) => break Err(Closed::TimedOut),
                Err(errno) => break Err(Closed::Broken(socket::describe(errno))),
            }
        };
        // Its helper thread may hold the descriptor for a moment longer.
        let _ = self.epoll.delete(handshake.descriptor());
        self.state = match ended {
            Ok(outcome) => {
                self.sealed = Some(Box::new(Sealed::new(outcome, false)));
                self.open(now)
            }
            Err(why) => State::Failed(why),
        };
    }
}

/// Sends queued data until the socket's send buffer is full.
fn send(
    conn: &mut HostConn,
    sealed: &mut Option<Box<Sealed>>,
    socket: &OwnedFd,
    output: &mut Output,
) {
    let Output { blocked, stats } = output;
    *blocked = false;
    if let Some(sealed) = sealed {
        let outcome = sealed.send(socket.as_fd(), conn, false);
        stats.sends += outcome.sends;
        *blocked = outcome.result.is_err();
        if let Err(errno) = outcome.result
            && !matches!(errno, Errno::AGAIN | Errno::PIPE | Errno::CONNRESET)
        {
            conn.peer_closed(Some(&socket::describe(errno)));
        }
        if !*blocked && conn.takes_shutdown() {
            sealed.close(socket.as_fd());
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
        }
        return;
    }
    while conn.wants_write() && !*blocked {
        let mut slices = Slices::new();
        conn.send_slices(&mut slices);
        let result = socket::send(socket.as_fd(), &slices);
        let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
        drop(slices);
        stats.sends += 1;
        match result {
            Ok(n) => {
                conn.sent(n);
                *blocked = n < wanted;
            }
            Err(Errno::AGAIN) => *blocked = true,
            Err(Errno::INTR) => {}
            Err(errno) => {
                // Do not report the error yet: the controller's last message may have the reason.
                if !matches!(errno, Errno::PIPE | Errno::CONNRESET) {
                    conn.peer_closed(Some(&socket::describe(errno)));
                }
                *blocked = true;
            }
        }
    }
    if conn.takes_shutdown() {
        let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
    }
}

fn wants_write(sealed: &Option<Box<Sealed>>) -> bool {
    sealed.as_deref().is_some_and(Sealed::wants_write)
}

impl HostTransport for TcpHost {
    #[inline]
    fn submit(&mut self, command: HostCommand) {
        if let State::Open(conn) | State::Gone(Some(conn)) = &mut self.state {
            conn.submit(command);
        }
    }

    #[inline]
    fn flush(&mut self) {
        if let State::Open(conn) = &mut self.state
            && (conn.wants_write() || wants_write(&self.sealed))
        {
            send(conn, &mut self.sealed, &self.socket, &mut self.output);
        }
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<HostEvent>, limit: usize) {
        if let State::Connecting { since } = self.state {
            self.connecting(since.unwrap_or(now), now);
        }
        if let State::Handshaking { .. } = self.state {
            self.handshaking(now);
        }
        let conn = match &mut self.state {
            State::Open(conn) => conn,
            State::Failed(_) if limit > 0 => {
                if let State::Failed(why) = std::mem::replace(&mut self.state, State::Gone(None)) {
                    events.push(HostEvent::Closed(why));
                }
                return;
            }
            _ => return,
        };
        let mut looks = true;
        if conn.wants_write() || wants_write(&self.sealed) {
            send(conn, &mut self.sealed, &self.socket, &mut self.output);
            looks = self.output.blocked || self.more || conn.may_find();
        }
        let mut received = false;
        let end = events.len() + limit;
        let more = loop {
            let more = drain(conn, now, events, end);
            // Skip the receive if no response is outstanding.
            if more || !looks || !conn.wants_read() || (received && !conn.expects()) {
                break more;
            }
            let mut slices = RecvSlices::new();
            if !conn.recv_slices(&mut self.buffers, &mut slices) {
                break true;
            }
            let room: usize = slices.iter().map(|slice| slice.len()).sum();
            let result = match &mut self.sealed {
                None => socket::receive(self.socket.as_fd(), &mut slices),
                Some(sealed) => sealed.receive(self.socket.as_fd(), &mut slices),
            };
            drop(slices);
            self.output.stats.receives += 1;
            match result {
                Ok(0) => conn.peer_closed(None),
                Ok(n) => {
                    received = true;
                    conn.received(n);
                    if n < room {
                        // The socket is empty: parse this, and receive again in the next poll.
                        break drain(conn, now, events, end);
                    }
                }
                Err(Errno::AGAIN) => {
                    self.output.stats.receives_empty += 1;
                    conn.found_nothing();
                    break false;
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    let failure = self.sealed.as_ref().and_then(|sealed| sealed.failure());
                    conn.peer_closed(Some(&failure.unwrap_or_else(|| socket::describe(errno))));
                }
            }
        };
        // TLS records that were received and not decrypted.
        self.more = more || self.sealed.as_deref().is_some_and(Sealed::has_input);
        conn.end_receive(&mut self.buffers, more, now);
        conn.handle_timeout(now);
        if (conn.wants_write() || wants_write(&self.sealed)) && !self.output.blocked {
            send(conn, &mut self.sealed, &self.socket, &mut self.output);
        }
        if conn.is_finished() {
            let _ = self.epoll.delete(&self.socket);
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
            if let State::Open(conn) = std::mem::replace(&mut self.state, State::Gone(None)) {
                self.state = State::Gone(Some(conn));
            }
        }
    }

    fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.in_capsule_bytes = Some(bytes);
        if let State::Open(conn) = &mut self.state {
            conn.set_in_capsule_bytes(bytes);
        }
    }

    fn reclaim(&mut self) -> Option<HostCommand> {
        match &mut self.state {
            State::Open(conn) | State::Gone(Some(conn)) => conn.reclaim(),
            _ => None,
        }
    }

    fn close(&mut self) {
        match &mut self.state {
            State::Open(conn) => conn.close(),
            State::Connecting { .. } | State::Handshaking { .. } => {
                self.state = State::Failed(Closed::Local);
            }
            State::Failed(_) | State::Gone(_) => {}
        }
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        let (watch_write, idle) = match &self.state {
            State::Connecting { since } => {
                let idle = since.map_or(Idle::Busy, |since| {
                    Idle::Until(since + self.options.connect_timeout)
                });
                (true, idle)
            }
            State::Handshaking { since, .. } => {
                (false, Idle::Until(*since + self.options.connect_timeout))
            }
            State::Open(conn) if self.more || conn.has_news() => return Idle::Busy,
            State::Open(conn)
                if (conn.wants_write() || wants_write(&self.sealed)) && !self.output.blocked =>
            {
                return Idle::Busy;
            }
            State::Open(conn) => (
                conn.wants_write() || wants_write(&self.sealed),
                conn.deadline().map_or(Idle::Quiet, Idle::Until),
            ),
            State::Failed(_) => return Idle::Busy,
            State::Gone(_) => return Idle::Quiet,
        };
        if self.watched != Some(watch_write) {
            let interest = if watch_write {
                Interest::READ | Interest::WRITE
            } else {
                Interest::READ
            };
            let changed = match self.watched {
                None => self.epoll.add(&self.socket, 0, interest),
                Some(_) => self.epoll.modify(&self.socket, 0, interest),
            };
            if changed.is_err() {
                return Idle::Busy;
            }
            self.watched = Some(watch_write);
        }
        idle
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn watch_in(&mut self, set: &EventSet) -> std::io::Result<()> {
        debug_assert!(self.watched.is_none(), "not polled yet");
        self.epoll = set.share()?;
        Ok(())
    }

    fn leave(&mut self, set: &EventSet) {
        let _ = set.delete(&self.socket);
        if let State::Handshaking { handshake, .. } = &self.state {
            let _ = set.delete(handshake.descriptor());
        }
    }
}

/// Shuts down the stream, so that a controller that has received all data sees a normal end.
/// Closing the socket then sends a reset for unacknowledged data.
impl Drop for TcpHost {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }
}

/// Parses received bytes. Returns true if some remain because `events` is full.
fn drain(conn: &mut HostConn, now: Nanos, events: &mut Vec<HostEvent>, end: usize) -> bool {
    loop {
        if events.len() >= end {
            return true;
        }
        match conn.poll_into(now, &mut |event| events.push(event)) {
            Polled::Event => {}
            Polled::Starved => return false,
            Polled::Waiting => return true,
        }
    }
}

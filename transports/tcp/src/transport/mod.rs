//! The target side of the TCP transport on one core: polls the sockets of all its connections, and
//! passes bytes between them and the NVMe/TCP connection state machines of `nacre-nvmf`.
//!
//! A turn receives from these sockets, in order: those with input left from the turn before; the
//! recently active (*hot*) ones, if there are few sockets; and those that epoll reports. A receive
//! without data costs less than epoll and then a receive. Epoll is level-triggered. With many
//! sockets it is called in every turn, otherwise after at most [`EPOLL_EVERY`] turns without it
//! and, while some sockets are not hot, after [`EPOLL_WITHIN`]. Epoll's descriptor wakes a sleeping
//! core.
//!
//! A full event list ends a turn early. The rest of the list of pending connections then goes ahead
//! of served ones with more input. The next turn adds the connections that epoll reports to that
//! list, so a few busy connections do not starve the others.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nacre_hugepages::Buf;
use nacre_nvmf::tcp::{
    Polled, RecvSlices, RxBuffers, Slices, TargetConn, TargetEvent, TcpTargetConfig,
};
use nacre_nvmf::tls::SecureChannel;
use nacre_nvmf::transport::{
    Address, CloseWhy, Closed, ConnId, Event, Events, ListenerId, Pools, QueueKind, QueueParams,
    ReqTag, Response, Transport, TransportCaps,
};
use nacre_nvmf_wire::Sqe;
use nacre_reactor::{EventSet, Events as Ready, Idle, Interest, Nanos};
use nacre_transport_tls::SessionCounts;
use rustix::io::Errno;

use crate::accept::{CoreSlot, Pending, Shared};
use crate::sealed::{Sealed, TargetOutput};
use crate::socket;
use crate::stats::{Stats, add};

mod connections;

/// Most sockets for which the core receives without epoll. With more sockets, one call of epoll per
/// turn costs less.
const HOT: usize = 4;
/// Turns without data after which a socket is no longer hot.
const HOT_TURNS: u32 = 4096;
/// Most turns without epoll between two calls of it, with at most [`HOT`] sockets.
const EPOLL_EVERY: u32 = 16;
/// Most time between two calls of epoll while some socket is not hot. Its next command waits at
/// most this time, or one turn if turns take longer.
const EPOLL_WITHIN: Duration = Duration::from_micros(20);
/// Most events of one connection each time it is served, so that one busy host does not starve the
/// others.
const EVENTS_PER_TURN: usize = 256;
/// Most receives of one connection each time it is served.
const RECEIVES_PER_TURN: usize = 4;

struct Conn {
    machine: TargetConn,
    socket: OwnedFd,
    /// The TLS records between machine and socket; `None`: the connection does not use TLS.
    sealed: Option<Box<Sealed>>,
    listener: ListenerId,
    /// Capabilities of the listener, if it has options of its own.
    caps: Option<Box<TransportCaps>>,
    local: SocketAddr,
    peer: SocketAddr,
    /// [`Event::Opened`] was reported.
    opened: bool,
    /// Kind of the queue, once its Connect was accepted.
    established: Option<QueueKind>,
    /// The accepting thread's entry for this connection, until the Connect is accepted.
    unconnected: Option<Arc<Pending>>,
    /// True while the connection is on the list of those with data to send.
    dirty: bool,
    /// True while the connection is on the list to serve in the next turn, whatever epoll reports.
    pending: bool,
    /// The socket's send buffer is full: epoll watches for room.
    blocked: bool,
    /// Turns since data came, if it is on the list of hot sockets.
    hot: Option<u32>,
    /// PDUs received and sent that the statistics have.
    counted: (u64, u64),
    /// KeyUpdates, and keys used past their limit, that the statistics have.
    counted_keys: SessionCounts,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    conn: Option<Box<Conn>>,
}

/// All TCP connections of one core, as a [`Transport`] of the target.
pub struct TcpTransport {
    shared: Arc<Shared>,
    core: Arc<CoreSlot>,
    caps: TransportCaps,
    machine: Rc<TcpTargetConfig>,
    epoll: EventSet,
    ready: Ready,
    slots: Vec<Slot>,
    free: Vec<u32>,
    count: usize,
    buffers: RxBuffers,
    /// Connections with data to send.
    dirty: Vec<u32>,
    /// Connections to serve in the next turn.
    pending: Vec<u32>,
    looked_at: Vec<u32>,
    /// Recently active connections.
    hot: Vec<u32>,
    /// There was no room for more events: connections with input may not have been served.
    overlooked: bool,
    turns_to_epoll: u32,
    epoll_at: Nanos,
    /// No deadline of any connection is earlier.
    next_deadline: Nanos,
    now: Nanos,
}

impl TcpTransport {
    pub(crate) fn new(shared: Arc<Shared>, core: Arc<CoreSlot>) -> std::io::Result<Self> {
        let config = &shared.config;
        Ok(Self {
            caps: config.caps(),
            machine: Rc::new(config.machine()),
            epoll: EventSet::new()?,
            ready: Ready::with_capacity(256),
            slots: Vec::new(),
            free: Vec::new(),
            count: 0,
            buffers: RxBuffers::new(config.rx_buffers, config.rx_buffer_size),
            dirty: Vec::new(),
            pending: Vec::new(),
            looked_at: Vec::new(),
            hot: Vec::with_capacity(HOT),
            overlooked: false,
            turns_to_epoll: 0,
            epoll_at: Nanos::ZERO,
            next_deadline: Nanos::MAX,
            now: Nanos::ZERO,
            shared,
            core,
        })
    }

    fn conn(&mut self, id: ConnId) -> Option<&mut Conn> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.conn.as_deref_mut()
    }

    /// Serves one connection: parses input left before, receives, and parses. Returns false if
    /// there was no room for all events.
    fn serve(&mut self, index: u32, pools: &Pools, events: &mut Events) -> bool {
        let now = self.now;
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return true;
        };
        let generation = slot.generation;
        let Some(conn) = slot.conn.as_deref_mut() else {
            return true;
        };
        let id = ConnId { index, generation };
        if !conn.opened {
            if !events.has_room() {
                return false;
            }
            conn.opened = true;
            let (local, peer) = (Address::Ip(conn.local), Address::Ip(conn.peer));
            events.push(Event::Opened {
                conn: id,
                listener: conn.listener,
                local,
                peer,
            });
        }
        let stats = &self.core.stats;
        let mut budget = EVENTS_PER_TURN;
        // After the data of a large command, its response and the next R2T leave at once: the host
        // fills the socket meanwhile.
        let mut receives = if conn.machine.fetches_large() {
            1
        } else {
            RECEIVES_PER_TURN
        };
        // Whether the machine has more for us that epoll knows nothing of.
        let more = loop {
            let more = loop {
                if !events.has_room() || budget == 0 {
                    break true;
                }
                let core = &self.core;
                let mut sink = |event| events.push(translate(id, event, core));
                match conn.machine.poll_into(pools, now, &mut sink) {
                    Polled::Event => budget -= 1,
                    Polled::Starved => break false,
                    Polled::Waiting => {
                        add(&stats.waits, 1);
                        break true;
                    }
                }
            };
            if more || receives == 0 || !conn.machine.wants_read() {
                break more;
            }
            receives -= 1;
            let mut slices = RecvSlices::new();
            if !conn.machine.recv_slices(&mut self.buffers, &mut slices) {
                break true;
            }
            let room: usize = slices.iter().map(|slice| slice.len()).sum();
            let result = match &mut conn.sealed {
                None => socket::receive(conn.socket.as_fd(), &mut slices),
                Some(sealed) => sealed.receive(conn.socket.as_fd(), &mut slices),
            };
            drop(slices);
            add(&stats.receives, 1);
            match result {
                Ok(0) => conn.machine.peer_closed(None),
                Ok(n) => {
                    add(&stats.bytes_received, n as u64);
                    conn.machine.received(n, now);
                    conn.hot = conn.hot.map(|_| 0);
                    if conn.hot.is_none() && self.hot.len() < HOT {
                        conn.hot = Some(0);
                        self.hot.push(index);
                    }
                    if n < room {
                        // The socket is empty: save the receive that would say so.
                        receives = 0;
                    }
                }
                Err(Errno::AGAIN) => {
                    add(&stats.receives_empty, 1);
                    break false;
                }
                Err(Errno::INTR) => {}
                Err(errno) => {
                    let failure = conn.sealed.as_ref().and_then(|sealed| sealed.failure());
                    let why = failure.unwrap_or_else(|| socket::describe(errno));
                    conn.machine.peer_closed(Some(&why));
                }
            }
        };
        conn.machine.end_receive(&mut self.buffers, more, now);
        if let Some(sealed) = &mut conn.sealed
            && !more
            && conn.machine.awaits_data()
        {
            sealed.acknowledge(conn.socket.as_fd());
        }
        // Epoll knows nothing of records that were received and not opened.
        let (more, answers) = match conn.sealed.as_deref() {
            None => (more, false),
            Some(sealed) => (
                more || (sealed.has_input() && conn.machine.wants_read()),
                sealed.wants_write(),
            ),
        };
        if let Some(deadline) = conn.machine.deadline() {
            self.next_deadline = self.next_deadline.min(deadline);
        }
        if more && !conn.pending {
            conn.pending = true;
            self.pending.push(index);
        }
        let wants_write = conn.machine.wants_write() || conn.machine.has_shutdown();
        if (wants_write || answers) && !conn.dirty {
            conn.dirty = true;
            self.dirty.push(index);
        }
        if conn.machine.is_finished() {
            self.remove(index);
        }
        events.has_room()
    }

    /// Sends the queued data of one connection.
    fn send(&mut self, index: u32) {
        let Some(conn) = self.slots[index as usize].conn.as_deref_mut() else {
            return;
        };
        conn.dirty = false;
        let stats = &self.core.stats;
        let in_clear = conn.sealed.is_none();
        if !in_clear {
            seal(&self.epoll, conn, index, stats, self.now);
        }
        while in_clear && conn.machine.wants_write() && !conn.blocked {
            let mut slices = Slices::new();
            conn.machine.send_slices(&mut slices);
            let result = socket::send(conn.socket.as_fd(), &slices);
            let wanted: usize = slices.iter().map(|slice| slice.len()).sum();
            drop(slices);
            add(&stats.sends, 1);
            match result {
                Ok(n) => {
                    add(&stats.bytes_sent, n as u64);
                    conn.machine.sent(n, self.now);
                    if n < wanted {
                        add(&stats.sends_partial, 1);
                        block(&self.epoll, conn, index);
                    }
                }
                Err(Errno::AGAIN) => block(&self.epoll, conn, index),
                Err(Errno::INTR) => {}
                Err(errno) => {
                    // Commands that the host sent before it went are useless without a way to
                    // respond.
                    conn.machine.peer_closed(Some(&socket::describe(errno)));
                    break;
                }
            }
        }
        if conn.machine.has_shutdown() && has_left(conn) && conn.machine.takes_shutdown() {
            if let Some(sealed) = &mut conn.sealed {
                sealed.close(conn.socket.as_fd());
            }
            let _ = rustix::net::shutdown(&conn.socket, rustix::net::Shutdown::Write);
        }
        if let Some(deadline) = conn.machine.deadline() {
            self.next_deadline = self.next_deadline.min(deadline);
        }
        count_pdus(conn, &self.core);
        if (conn.machine.has_news() || conn.machine.is_finished()) && !conn.pending {
            conn.pending = true;
            self.pending.push(index);
        }
    }

    fn mark_dirty(&mut self, id: ConnId) {
        let Some(conn) = self.conn(id) else { return };
        if !conn.dirty {
            conn.dirty = true;
            self.dirty.push(id.index);
        }
    }
}

/// True if no encrypted bytes wait to be sent. They are sent before the end of the stream.
fn has_left(conn: &Conn) -> bool {
    conn.sealed
        .as_deref()
        .is_none_or(|sealed| !sealed.wants_write())
}

/// Encrypts and sends the queued data of one TLS connection.
fn seal(epoll: &EventSet, conn: &mut Conn, index: u32, stats: &Stats, now: Nanos) {
    let Some(sealed) = conn.sealed.as_deref_mut() else {
        return;
    };
    let mut output = TargetOutput {
        machine: &mut conn.machine,
        now,
    };
    let outcome = sealed.send(conn.socket.as_fd(), &mut output, conn.blocked);
    add(&stats.sends, outcome.sends);
    add(&stats.bytes_sent, outcome.bytes);
    match outcome.result {
        Ok(()) => {}
        Err(Errno::AGAIN) => {
            if !conn.blocked {
                add(&stats.sends_partial, 1);
                block(epoll, conn, index);
            }
        }
        Err(errno) => conn.machine.peer_closed(Some(&socket::describe(errno))),
    }
}

fn block(epoll: &EventSet, conn: &mut Conn, index: u32) {
    conn.blocked = true;
    if let Err(error) = epoll.modify(
        &conn.socket,
        u64::from(index),
        Interest::READ | Interest::WRITE,
    ) {
        conn.machine.peer_closed(Some(&error.to_string()));
    }
}

fn count_pdus(conn: &mut Conn, core: &CoreSlot) {
    let (received, sent) = conn.machine.pdus();
    add(&core.stats.pdus_received, received - conn.counted.0);
    add(&core.stats.pdus_sent, sent - conn.counted.1);
    conn.counted = (received, sent);
    if let Some(sealed) = &conn.sealed {
        let (now, last) = (sealed.counts(), conn.counted_keys);
        if now != last {
            let stats = &core.stats;
            let sent = now.key_updates_sent - last.key_updates_sent;
            add(&stats.key_updates_sent, sent);
            let received = now.key_updates_received - last.key_updates_received;
            add(&stats.key_updates_received, received);
            let past = now.keys_past_limit - last.keys_past_limit;
            add(&stats.keys_past_limit, past);
            conn.counted_keys = now;
        }
    }
}

#[inline]
fn translate(conn: ConnId, event: TargetEvent, core: &CoreSlot) -> Event {
    match event {
        TargetEvent::Capsule { sqe, data } => Event::Capsule { conn, sqe, data },
        TargetEvent::CapsuleDamaged { sqe } => Event::CapsuleDamaged { conn, sqe },
        TargetEvent::Fetched { tag, data } => Event::Fetched { conn, tag, data },
        TargetEvent::FetchDamaged { tag } => Event::FetchDamaged { conn, tag },
        TargetEvent::Closed(why) => {
            let counter = match &why {
                Closed::Peer => &core.stats.closed_by_peer,
                Closed::Broken(_) | Closed::Refused(_) => &core.stats.closed_broken,
                Closed::Protocol(_) => &core.stats.closed_protocol,
                Closed::TimedOut => &core.stats.closed_timeout,
                Closed::Local => &core.stats.closed_local,
            };
            add(counter, 1);
            Event::Closed { conn, why }
        }
    }
}

impl Transport for TcpTransport {
    fn caps(&self) -> &TransportCaps {
        &self.caps
    }

    fn caps_of(&self, conn: ConnId) -> &TransportCaps {
        let slot = self.slots.get(conn.index as usize);
        let own = slot.filter(|slot| slot.generation == conn.generation);
        own.and_then(|slot| slot.conn.as_ref()?.caps.as_deref())
            .unwrap_or(&self.caps)
    }

    fn secure_channel(&self, conn: ConnId) -> Option<Arc<SecureChannel>> {
        let slot = self.slots.get(conn.index as usize)?;
        let open = slot.conn.as_deref();
        let own = open.filter(|_| slot.generation == conn.generation)?;
        Some(Arc::clone(own.sealed.as_ref()?.channel()))
    }

    fn poll(&mut self, now: Nanos, pools: &Pools, events: &mut Events) -> usize {
        self.now = now;
        let before = events.len();
        if !self.core.inbox.is_empty() {
            self.take_new(events);
        }
        if self.next_deadline <= now {
            self.handle_timeouts();
        }
        if std::mem::take(&mut self.overlooked) {
            self.line_up();
        }
        if !self.pending.is_empty() {
            self.serve_pending(pools, events);
        }
        let few = self.count <= HOT;
        let mut at = 0;
        while few && at < self.hot.len() && events.has_room() {
            let index = self.hot[at];
            if let Some(conn) = self.slots[index as usize].conn.as_deref_mut()
                && let Some(turns) = &mut conn.hot
            {
                *turns += 1;
                if *turns > HOT_TURNS {
                    conn.hot = None;
                    self.hot.swap_remove(at);
                    continue;
                }
                self.serve(index, pools, events);
            }
            // Serving may have removed it from the list.
            if self.hot.get(at) == Some(&index) {
                at += 1;
            }
        }
        // Epoll is what finds those that are not hot.
        let all_hot = few && self.count <= self.hot.len();
        self.turns_to_epoll = match self.turns_to_epoll.checked_sub(1) {
            Some(turns) if all_hot || (few && now < self.epoll_at) => turns,
            _ => {
                self.ask_epoll(pools, events);
                self.epoll_at = now + EPOLL_WITHIN;
                EPOLL_EVERY
            }
        };
        self.overlooked = !events.has_room();
        events.len() - before
    }

    fn fetch(&mut self, conn: ConnId, tag: ReqTag, _sqe: &Sqe, into: Buf) {
        let now = self.now;
        if let Some(open) = self.conn(conn) {
            open.machine.fetch(tag, into, now);
            self.mark_dirty(conn);
        }
    }

    fn fetch_window(&self) -> usize {
        self.shared.config.fetch_window
    }

    #[inline]
    fn respond(&mut self, conn: ConnId, response: Response) {
        let Some(open) = self.conn(conn) else { return };
        open.machine.respond(response);
        if !open.dirty {
            open.dirty = true;
            self.dirty.push(conn.index);
        }
    }

    fn established(&mut self, conn: ConnId, params: QueueParams) {
        let Some(open) = self.conn(conn) else { return };
        open.machine.established(params);
        let kind = QueueKind::of(params.qid);
        if open.established.replace(kind).is_none() {
            open.unconnected = None;
            self.core.load.remove(QueueKind::Io);
            self.core.load.add(kind);
            self.shared.pending.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn takes_zero_copy(&self, conn: ConnId) -> bool {
        let slot = self.slots.get(conn.index as usize);
        slot.filter(|slot| slot.generation == conn.generation)
            .and_then(|slot| slot.conn.as_deref())
            .is_some_and(|open| open.machine.takes_zero_copy())
    }

    fn set_in_place(&mut self, conn: ConnId, in_place: bool) {
        if let Some(open) = self.conn(conn) {
            open.machine.set_in_place(in_place);
        }
    }

    fn close(&mut self, conn: ConnId, why: CloseWhy) {
        let now = self.now;
        let Some(open) = self.conn(conn) else { return };
        open.machine.close(why, now);
        if !open.pending {
            open.pending = true;
            self.pending.push(conn.index);
        }
        // Sends the rest, shuts the socket down, and takes note of the new deadline.
        self.mark_dirty(conn);
    }

    fn flush(&mut self, now: Nanos) {
        self.now = now;
        while let Some(index) = self.dirty.pop() {
            self.send(index);
        }
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        // The look before the sleep, and the first after it, are at everything.
        self.turns_to_epoll = 0;
        if !self.pending.is_empty() || !self.dirty.is_empty() || !self.core.inbox.is_empty() {
            return Idle::Busy;
        }
        match self.next_deadline {
            Nanos::MAX => Idle::Quiet,
            deadline => Idle::Until(deadline),
        }
    }

    fn disarm(&mut self) {
        self.turns_to_epoll = 0;
    }

    fn wake_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.epoll.as_fd()]
    }

    fn connections(&self) -> usize {
        self.count
    }
}

impl TcpTransport {
    /// Serves the connections of the list `pending`. If there is no room for more events, the rest
    /// stays in the list, unserved connections first.
    fn serve_pending(&mut self, pools: &Pools, events: &mut Events) {
        std::mem::swap(&mut self.pending, &mut self.looked_at);
        for at in 0..self.looked_at.len() {
            let index = self.looked_at[at];
            if let Some(conn) = self.slots[index as usize].conn.as_deref_mut() {
                conn.pending = false;
                if !self.serve(index, pools, events) {
                    // Served connections that have more input go behind unserved ones, which are
                    // marked as pending already.
                    let served = self.pending.len();
                    for &rest in &self.looked_at[at..] {
                        if let Some(conn) = self.slots[rest as usize].conn.as_deref_mut()
                            && (rest != index || !conn.pending)
                        {
                            conn.pending = true;
                            self.pending.push(rest);
                        }
                    }
                    self.pending.rotate_left(served);
                    break;
                }
            }
        }
        self.looked_at.clear();
    }

    fn ask_epoll(&mut self, pools: &Pools, events: &mut Events) {
        if !events.has_room() || !self.wait() {
            return;
        }
        for at in 0..self.ready.len() {
            if let Some(index) = self.ready_at(at)
                && !self.serve(index, pools, events)
            {
                // The rest is still ready when there is room again.
                return;
            }
        }
    }

    /// Adds the connections that epoll reports to `pending`.
    #[cold]
    fn line_up(&mut self) {
        if !self.wait() {
            return;
        }
        for at in 0..self.ready.len() {
            if let Some(index) = self.ready_at(at)
                && let Some(conn) = self.slots[index as usize].conn.as_deref_mut()
                && !conn.pending
            {
                conn.pending = true;
                self.pending.push(index);
            }
        }
    }

    /// Calls epoll, without waiting. Returns false if there is no connection, or it failed.
    fn wait(&mut self) -> bool {
        if self.count == 0 {
            return false;
        }
        add(&self.core.stats.looks, 1);
        let asked = self.epoll.wait(&mut self.ready, Duration::ZERO);
        if let Err(error) = &asked {
            tracing::error!(%error, "epoll failed");
        }
        asked.is_ok()
    }

    /// The connection of epoll's event number `at`, if it has input. If its full socket has room
    /// again, the next flush sends its queued data.
    #[inline]
    fn ready_at(&mut self, at: usize) -> Option<u32> {
        let event = self.ready.at(at);
        let index = event.token as u32;
        let conn = self.slots[index as usize].conn.as_deref_mut()?;
        if conn.blocked && (event.writable || event.failed) {
            conn.blocked = false;
            let _ = self.epoll.modify(&conn.socket, event.token, Interest::READ);
            if !conn.dirty {
                conn.dirty = true;
                self.dirty.push(index);
            }
        }
        (event.readable || event.peer_closed || event.failed).then_some(index)
    }
}

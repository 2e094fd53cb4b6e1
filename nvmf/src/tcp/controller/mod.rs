//! The controller's side of one NVMe/TCP connection, as a state machine without a socket. The TCP
//! transport drives it.
//!
//! ```text
//!           ICReq / ICResp         Drained, or a violation      queue sent
//! Handshake ───────────────▶ Running ─────────────────▶ Closing ─────────▶ Lingering ──▶ Finished
//!     └─────────────────────────┴───────────────── Now, peer gone, deadline ────────────────▲
//! ```
//!
//! A violation closes a connection in `Handshake` too, and Now, the peer's close and the deadline
//! finish one that is closing or lingering.
//!
//! `Lingering`: everything is sent, the sending side is shut down, and further bytes of the host
//! are dropped until it closes too. An immediate close would let the kernel answer those bytes with
//! a reset, and the reset could overtake the last response or the termination request.

mod pdus;

use std::rc::Rc;
use std::time::Duration;

use nacre_hugepages::Buf;
use nacre_nvmf_wire::sqe::Sqe;
use nacre_nvmf_wire::tcp::{
    ADMIN_IN_CAPSULE_BYTES, CapsuleResp, DataAlignment, DataPdu, Digests, PduFlags, R2t, Rules,
};
use nacre_reactor::Nanos;

use super::closing::{ConnectionPhase, Lifecycle, Partial};
use super::frame::{self, Reader};
use super::rx::{RecvSlices, Rx, RxBuffers};
use super::tx::{Slices, Tx};
use crate::transport::{CloseWhy, Closed, Pools, QueueParams, ReqTag, Response};

/// Most outstanding commands of a host before its Connect states the queue's length. Connect comes
/// alone; the rest is for hosts that do not wait for its response.
const ENTRIES_BEFORE_CONNECT: usize = 32;

/// If outstanding fetches average at least this many bytes, a receive takes at most [`NARROW`]
/// bytes into the receive buffer. The additional receive is cheaper than the copy that it saves.
const LARGE: usize = 16 << 10;
const NARROW: usize = 8 << 10;

/// The configuration shared by all connections of a transport.
#[derive(Debug, Clone)]
pub struct TcpTargetConfig {
    /// Largest in-capsule data on I/O queues, in bytes.
    pub in_capsule_bytes: u32,
    /// The same on admin queues and before Connect: at least 8192 (TCP 3.3.1).
    pub admin_in_capsule_bytes: u32,
    /// Largest H2CData payload (MAXH2CDATA): a multiple of 4, at least 4096.
    pub max_h2c_data_bytes: u32,
    /// Most bytes that one R2T requests. One R2T is outstanding per command, which satisfies any
    /// MAXR2T.
    pub r2t_bytes: u32,
    /// Digests are used when the host asks for them and they are allowed here.
    pub allow_digests: Digests,
    /// How hosts align payload (CPDA). Linux accepts [`DataAlignment::DWORD`] only.
    pub alignment: DataAlignment,
    /// Time from the connection to ICReq.
    pub handshake_timeout: Duration,
    /// Time from the connection to an accepted Connect.
    pub connect_timeout: Duration,
    /// Time for the rest of a PDU that has begun, and for requested data. Each data PDU restarts
    /// the time for data. If the latest R2T had not left the send queue when that time began, it
    /// begins again when it expires.
    pub stall_timeout: Duration,
    /// Longest time without received bytes, from ICReq on. `None`: Keep Alive detects a silent
    /// host.
    pub idle_timeout: Option<Duration>,
    /// Time from the start of the close to send the last responses, and for the host to close its
    /// end.
    pub linger: Duration,
}

impl Default for TcpTargetConfig {
    fn default() -> Self {
        Self {
            in_capsule_bytes: 4096,
            admin_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            max_h2c_data_bytes: 128 << 10,
            r2t_bytes: u32::MAX,
            allow_digests: Digests::BOTH,
            alignment: DataAlignment::DWORD,
            handshake_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(20),
            stall_timeout: Duration::from_secs(30),
            idle_timeout: None,
            linger: Duration::from_secs(3),
        }
    }
}

/// An event of the connection. See [`crate::transport::Event`].
#[derive(Debug)]
pub enum TargetEvent {
    /// See [`crate::transport::Event::Capsule`].
    Capsule {
        sqe: Sqe,
        data: Option<Buf>,
    },
    CapsuleDamaged {
        sqe: Sqe,
    },
    Fetched {
        tag: ReqTag,
        data: Buf,
    },
    FetchDamaged {
        tag: ReqTag,
    },
    /// The last event. The socket may have to stay open: see [`TargetConn::is_finished`].
    Closed(Closed),
}

/// The result of [`TargetConn::poll`].
#[derive(Debug)]
pub enum TargetPoll {
    Event(TargetEvent),
    /// The received bytes contain no further event.
    Starved,
    /// There is more, but it needs a buffer for a capsule's data, or responses must be sent first.
    Waiting,
}

/// The result of [`TargetConn::poll_into`], which passes the event to `sink`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polled {
    Event,
    Starved,
    Waiting,
}

/// The PDU whose payload is being received.
enum Receiving {
    Nothing,
    /// In-capsule data, and the range of it that the SGL names.
    Capsule {
        sqe: Sqe,
        offset: usize,
        length: usize,
    },
    /// In-capsule data that the SGL does not name.
    SkippedCapsule {
        sqe: Sqe,
    },
    H2cData {
        ttag: u16,
        length: u32,
    },
}

/// Host-to-controller data that was requested.
struct Fetch {
    cid: u16,
    /// `None` while the payload in progress has it.
    buf: Option<Buf>,
    total: u32,
    /// End of the range of the latest R2T.
    asked: u32,
    received: u32,
    damaged: bool,
}

/// The controller's end of one NVMe/TCP connection.
pub struct TargetConn {
    config: Rc<TcpTargetConfig>,
    lifecycle: Lifecycle,
    rx: Rx,
    tx: Tx,
    doing: Receiving,
    /// The rules for the next PDU, with the agreed digests.
    reader: Reader,
    /// How the host wants payload aligned (HPDA).
    host_alignment: DataAlignment,
    queue: Option<QueueParams>,
    /// Commands reported and not answered yet, and how many there may be.
    outstanding: usize,
    entries: usize,
    fetches: Vec<Option<Fetch>>,
    /// Number of fetches, and their bytes.
    fetching: usize,
    fetching_bytes: usize,
    /// Time since which the host owes data, or has sent none of the owed data.
    fetch_since: Nanos,
    /// Position of the end of the latest R2T in the sent stream.
    r2t_end: u64,
    /// R2Ts queued since all were last known to have left. Each fetch has one outstanding R2T, so
    /// the host owes data only while there are more fetches than that.
    unsent_r2ts: usize,
    waiting: bool,
    /// In-capsule data may be reported in the receive buffer.
    in_place: bool,
    opened: Nanos,
    heard: Nanos,
    /// The time since which a PDU is incomplete.
    partial: Partial,
    pdus_received: u64,
    pdus_sent: u64,
}

impl TargetConn {
    pub fn new(config: Rc<TcpTargetConfig>, now: Nanos) -> Self {
        let rules = Rules {
            alignment: config.alignment,
            max_in_capsule_bytes: config.admin_in_capsule_bytes,
            max_data_bytes: config.max_h2c_data_bytes,
            ..Rules::controller()
        };
        let mut rx = Rx::new();
        // However many I/O queues wait: this one may be about to carry Keep Alives.
        rx.set_urgent(true);
        Self {
            config,
            lifecycle: Lifecycle::new(now),
            rx,
            tx: Tx::new(8),
            doing: Receiving::Nothing,
            reader: Reader::new(rules),
            host_alignment: DataAlignment::DWORD,
            queue: None,
            outstanding: 0,
            entries: ENTRIES_BEFORE_CONNECT,
            fetches: Vec::new(),
            fetching: 0,
            fetching_bytes: 0,
            fetch_since: now,
            r2t_end: 0,
            unsent_r2ts: 0,
            waiting: false,
            in_place: false,
            opened: now,
            heard: now,
            partial: Partial::default(),
            pdus_received: 0,
            pdus_sent: 0,
        }
    }

    /// True if data may be sent from the device's memory, where it can still change: false with a
    /// data digest.
    pub fn takes_zero_copy(&self) -> bool {
        !self.reader.rules().digests.data
    }

    /// Sets whether in-capsule data of I/O commands may stay in the receive buffer. Only data that
    /// has arrived completely stays there. Set it if commands release the data soon, whatever the
    /// host does. The first half of a fused pair never stays there.
    pub fn set_in_place(&mut self, in_place: bool) {
        self.in_place = in_place;
    }

    /// False: do not read, for back-pressure on the host or because the connection is finished.
    #[inline]
    pub fn wants_read(&self) -> bool {
        !self.waiting && !self.lifecycle.is_finished()
    }

    /// Fills `out` with the memory for the next bytes. Returns false if no receive buffer is free:
    /// try again in the next turn.
    #[inline]
    pub fn recv_slices<'a>(
        &'a mut self,
        buffers: &mut RxBuffers,
        out: &mut RecvSlices<'a>,
    ) -> bool {
        // While much data is on its way, taking little more than its header lets the rest of it be
        // received into place instead of being copied there.
        let narrow = self.fetches_large();
        self.rx
            .slices(buffers, if narrow { NARROW } else { usize::MAX }, out)
    }

    /// True if the outstanding fetches are large on average: a receive then completes one of them.
    #[inline]
    pub fn fetches_large(&self) -> bool {
        self.fetching > 0 && self.fetching_bytes / self.fetching >= LARGE
    }

    /// True while data that this side requested by R2T is outstanding.
    #[inline]
    pub fn awaits_data(&self) -> bool {
        self.fetching > 0
    }

    /// Records that `n` bytes (at least 1) were received into [`TargetConn::recv_slices`].
    #[inline]
    pub fn received(&mut self, n: usize, now: Nanos) {
        self.heard = now;
        self.rx.received(n);
        if !self.is_open() {
            self.rx.drop_unread();
        }
    }

    /// The host closed its end, or the connection broke (`error`).
    pub fn peer_closed(&mut self, error: Option<&str>) {
        if self.is_open() {
            let why = match error {
                Some(error) => Closed::Broken(error.to_owned()),
                None if self.rx.is_mid_pdu() => {
                    Closed::Broken("closed by the host in the middle of a PDU".into())
                }
                None => Closed::Peer,
            };
            self.lifecycle.record_cause(why);
        }
        self.finish();
    }

    /// Returns the next event. Call it until the result is not `Event`.
    pub fn poll(&mut self, pools: &Pools, now: Nanos) -> TargetPoll {
        let mut event = None;
        match (
            self.poll_into(pools, now, &mut |given| event = Some(given)),
            event,
        ) {
            (Polled::Waiting, _) => TargetPoll::Waiting,
            (_, Some(event)) => TargetPoll::Event(event),
            (_, None) => TargetPoll::Starved,
        }
    }

    /// Like `poll`, for a caller that stores events itself: passes at most one event to `sink`.
    #[inline]
    pub fn poll_into(
        &mut self,
        pools: &Pools,
        now: Nanos,
        sink: &mut impl FnMut(TargetEvent),
    ) -> Polled {
        if self.is_open() {
            match self.advance(pools, now, sink) {
                Ok(polled) => {
                    self.waiting = polled == Polled::Waiting;
                    return polled;
                }
                Err(violation) => self.refuse(violation, now),
            }
        }
        self.news(sink)
    }

    /// Ends a turn of receiving: returns the receive buffer to the core, unless it holds bytes that
    /// have to be handled later. `more`: the socket or the buffer may have unhandled bytes.
    #[inline]
    pub fn end_receive(&mut self, buffers: &mut RxBuffers, more: bool, now: Nanos) {
        self.rx.return_buffer(buffers, more || self.waiting);
        if more || self.waiting {
            // The owed data may be here, but not parsed.
            self.fetch_since = now;
        }
        let waits_for_rest = !more && !self.waiting && self.rx.is_mid_pdu();
        self.partial.note(waits_for_rest, self.pdus_received, now);
    }

    /// Requests a command's data from the host. Respond to the command only after its fetch has
    /// ended.
    pub fn fetch(&mut self, tag: ReqTag, into: Buf, now: Nanos) {
        if !self.is_open() {
            return;
        }
        if self.fetching == 0 {
            self.fetch_since = now;
        }
        let index = usize::from(tag.index);
        if index >= self.fetches.len() {
            self.fetches.resize_with(index + 1, || None);
        }
        debug_assert!(
            self.fetches[index].is_none(),
            "two fetches with one transfer tag"
        );
        debug_assert!(!into.is_empty(), "a fetch of nothing");
        let total = into.len() as u32;
        let asked = total.min(self.config.r2t_bytes);
        self.fetches[index] = Some(Fetch {
            cid: tag.cid,
            buf: Some(into),
            total,
            asked,
            received: 0,
            damaged: false,
        });
        self.fetching += 1;
        self.fetching_bytes += total as usize;
        self.put_r2t(tag, 0, asked);
    }

    /// Queues a command's data and completion.
    #[inline]
    pub fn respond(&mut self, response: Response) {
        if !self.is_open() {
            return;
        }
        self.outstanding = self.outstanding.saturating_sub(1);
        let (cid, cqe) = (response.tag.cid, response.cqe);
        let ok = cqe.status().is_success();
        let length = match &response.zero_copy {
            Some(zero_copy) => zero_copy.len(),
            None => response.data.iter().map(|buf| buf.len()).sum(),
        };
        let digests = self.reader.rules().digests;
        if length > 0 && ok {
            let short = self.queue.is_some_and(|q| q.flow_control_off)
                && cqe.result() == 0
                && cqe.status().field() == 0;
            let flags = if short {
                PduFlags::LAST_PDU | PduFlags::SUCCESS
            } else {
                PduFlags::LAST_PDU
            };
            // One PDU for all of a command's data: the protocol sets no limit to it.
            let align = self.host_alignment;
            let header = DataPdu::c2h(cid, 0, length as u32, flags, digests, align);
            frame::put_before_data(&mut self.tx, &header, digests, align);
            match response.zero_copy {
                Some(zero_copy) => {
                    debug_assert!(!digests.data, "zero-copy data has no digest");
                    self.tx.push_view(zero_copy);
                }
                None => frame::put_data(&mut self.tx, digests, response.data),
            }
            self.pdus_sent += 1;
            if short {
                self.tx.mark();
                return;
            }
        }
        frame::put(&mut self.tx, &CapsuleResp::new(cqe, digests), digests);
        self.tx.mark();
        self.pdus_sent += 1;
    }

    /// The Connect was accepted.
    pub fn established(&mut self, params: QueueParams) {
        self.entries = usize::from(params.entries).max(1);
        if params.qid != 0 {
            let bytes = self.config.in_capsule_bytes;
            self.reader
                .change(|rules| rules.max_in_capsule_bytes = bytes);
            self.rx.set_urgent(false);
        }
        self.queue = Some(params);
        self.tx.reserve(self.entries);
        let slots = self.fetches.len().max(self.entries);
        self.fetches.resize_with(slots, || None);
    }

    pub fn close(&mut self, why: CloseWhy, now: Nanos) {
        match why {
            CloseWhy::Now => {
                if self.is_open() {
                    self.lifecycle.record_cause(Closed::Local);
                }
                self.finish();
            }
            CloseWhy::Drained if self.is_open() => {
                self.lifecycle.record_cause(Closed::Local);
                self.begin_closing(now);
            }
            CloseWhy::Drained => {}
        }
    }

    #[inline]
    pub fn wants_write(&self) -> bool {
        !self.tx.is_empty()
    }

    #[inline]
    pub fn send_slices<'a>(&'a self, out: &mut Slices<'a>) {
        self.tx.slices(out);
    }

    #[inline]
    pub fn sent(&mut self, n: usize, now: Nanos) {
        self.tx.sent(n);
        if self.unsent_r2ts > 0 && self.tx.has_left(self.r2t_end) {
            self.r2ts_left(now);
        }
        if self.tx.is_empty() {
            self.lifecycle.drained();
        }
    }

    /// True if [`TargetConn::takes_shutdown`] would return true.
    #[inline]
    pub fn has_shutdown(&self) -> bool {
        self.lifecycle.has_shutdown()
    }

    /// True once, when the sending side of the socket must be shut down.
    pub fn takes_shutdown(&mut self) -> bool {
        self.lifecycle.takes_shutdown()
    }

    /// True if the socket can be dropped: [`TargetEvent::Closed`] was polled, and the connection
    /// does not linger.
    pub fn is_finished(&self) -> bool {
        self.lifecycle.is_finished() && self.lifecycle.is_reported()
    }

    /// True if [`TargetConn::poll`] can make progress although no bytes have arrived.
    pub fn has_news(&self) -> bool {
        self.waiting || self.lifecycle.has_end()
    }

    /// The time at which to call [`TargetConn::handle_timeout`], unless an event comes first.
    #[inline]
    pub fn deadline(&self) -> Option<Nanos> {
        // A host that is connected and in the middle of nothing: asked for in every turn.
        let idle = self.config.idle_timeout.is_none();
        let quiet = idle && self.partial.since().is_none() && self.fetching == 0;
        if quiet && self.lifecycle.is_running() && self.queue.is_some() {
            return None;
        }
        self.next_deadline()
    }

    fn next_deadline(&self) -> Option<Nanos> {
        match self.lifecycle.phase() {
            ConnectionPhase::Handshake => Some(self.opened + self.config.handshake_timeout),
            ConnectionPhase::Running => {
                let connect = self
                    .queue
                    .is_none()
                    .then(|| self.opened + self.config.connect_timeout);
                let owing = (self.fetching > 0).then_some(self.fetch_since);
                let stall = [self.partial.since(), owing].into_iter().flatten().min();
                let stall = stall.map(|since| since + self.config.stall_timeout);
                let idle = self.config.idle_timeout.map(|timeout| self.heard + timeout);
                [connect, stall, idle].into_iter().flatten().min()
            }
            _ => self.lifecycle.deadline(self.config.linger),
        }
    }

    pub fn handle_timeout(&mut self, now: Nanos) {
        let is_over = |conn: &Self| conn.deadline().is_some_and(|deadline| deadline <= now);
        if is_over(self) && self.fetching > 0 && !self.owes_data() {
            // A host that is slow in reading earlier data has not got the R2T yet.
            self.fetch_since = now;
        }
        if is_over(self) {
            self.lifecycle.record_cause(Closed::TimedOut);
            self.finish();
        }
    }

    /// Numbers of PDUs received and sent.
    pub fn pdus(&self) -> (u64, u64) {
        (self.pdus_received, self.pdus_sent)
    }

    pub fn is_established(&self) -> bool {
        self.queue.is_some()
    }

    pub fn digests(&self) -> Digests {
        self.reader.rules().digests
    }

    fn is_open(&self) -> bool {
        self.lifecycle.is_open()
    }

    /// Passes the event `Closed` to `sink`, once.
    #[cold]
    fn news(&mut self, sink: &mut impl FnMut(TargetEvent)) -> Polled {
        self.waiting = false;
        match self.lifecycle.take_end() {
            Some(why) => {
                sink(TargetEvent::Closed(why));
                Polled::Event
            }
            None => Polled::Starved,
        }
    }

    fn put_r2t(&mut self, tag: ReqTag, offset: u32, length: u32) {
        let digests = self.reader.rules().digests;
        frame::put(
            &mut self.tx,
            &R2t::new(tag.cid, tag.index, offset, length, digests),
            digests,
        );
        self.r2t_end = self.tx.position();
        self.unsent_r2ts += 1;
        self.pdus_sent += 1;
    }

    /// Notes that all R2Ts have left. The host gets the full time for the first one, unless it owed
    /// data before.
    fn r2ts_left(&mut self, now: Nanos) {
        if !self.owes_data() {
            self.fetch_since = now;
        }
        self.unsent_r2ts = 0;
    }

    /// True if an R2T that is known to have left is outstanding.
    fn owes_data(&self) -> bool {
        self.fetching > self.unsent_r2ts
    }

    fn begin_closing(&mut self, now: Nanos) {
        self.lifecycle.begin_closing(now, self.tx.is_empty());
        self.doing = Receiving::Nothing;
        self.fetches.clear();
        self.rx.drop_unread();
    }

    fn finish(&mut self) {
        self.lifecycle.finish();
        self.doing = Receiving::Nothing;
        self.fetches.clear();
        self.tx.clear();
        self.rx.drop_unread();
    }
}

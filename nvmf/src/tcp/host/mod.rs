//! The host's side of one NVMe/TCP connection, as a state machine without a socket. The TCP
//! transport drives it.
//!
//! ```text
//!              ICReq / ICResp        violation          queue sent
//!   Handshake ───────────────▶ Running ────────▶ Closing ───────────▶ Lingering ──▶ Finished
//!       └──────────────────────────┴────── close, peer gone, deadline ──────────────────▲
//! ```
//!
//! A violation closes a connection in `Handshake` too. Then the close, the peer's close and the
//! deadline finish it.
//!
//! A table holds the commands by their identifier. Data for a read is received into the command's
//! buffer. Data for a write is sent in the capsule if it fits, otherwise when the controller
//! requests it. The layer above chooses the identifiers and counts outstanding commands.

mod guess;
mod pdus;

use std::collections::VecDeque;
use std::time::Duration;

use nacre_hugepages::Buf;
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::{
    ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, DataAlignment, DataPdu, Digests, IcReq, Rules,
};
use nacre_reactor::Nanos;

use self::guess::{GUESS_BYTES, Guessing};
use super::Polled;
use super::closing::{ConnectionPhase, Lifecycle, Partial};
use super::frame::{self, Reader};
use super::rx::{Guess, RecvSlices, Rx, RxBuffers};
use super::tx::{Slices, Tx};
use crate::transport::{Closed, HostCommand, HostEvent};

/// While a payload of at least this many bytes arrives, a receive takes at most [`NARROW`] bytes
/// into the receive buffer. `NARROW` is little more than the data digest and the next header.
const LARGE: u32 = 16 << 10;
const NARROW: usize = 64;

/// The configuration of the host's end.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Most outstanding commands, for sizing. Identifiers may have any value.
    pub entries: usize,
    /// Digests to request. A controller that agrees to other digests is refused, so that the
    /// requested protection is not lost silently.
    pub digests: Digests,
    /// The alignment of payload that the controller must use (HPDA).
    pub alignment: DataAlignment,
    /// Most outstanding R2Ts per command, as announced (MAXR2T + 1).
    pub max_r2t: u32,
    /// Time from the connection to ICResp.
    pub handshake_timeout: Duration,
    /// Time for the rest of a PDU that has begun.
    pub stall_timeout: Duration,
    /// Time from the start of the close to send a termination request, and for the controller to
    /// close its end.
    pub linger: Duration,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            entries: 128,
            digests: Digests::NONE,
            alignment: DataAlignment::DWORD,
            max_r2t: 16,
            handshake_timeout: Duration::from_secs(10),
            stall_timeout: Duration::from_secs(30),
            linger: Duration::from_secs(1),
        }
    }
}

/// The result of [`HostConn::poll`].
#[derive(Debug)]
pub enum HostPoll {
    Event(HostEvent),
    /// The received bytes contain no further event.
    Starved,
    /// There is more, but queued data must be sent first.
    Waiting,
}

/// An outstanding command.
#[derive(Default)]
struct OutstandingCommand {
    outstanding: bool,
    /// The controller has sent all data of the command.
    last: bool,
    damaged: bool,
    /// Distinguishes the command from others with its identifier.
    serial: u32,
    /// Host-to-controller data that is left for R2Ts, and the number of bytes requested of it.
    write: Option<Buf>,
    /// The command is a Write. It cannot succeed while `write` has unsent data.
    writes: bool,
    asked: u32,
    /// The position of the end of its queued data in the sent stream.
    data_end: u64,
    /// `None` while the payload in progress has the buffer.
    read: Option<Buf>,
    received: u32,
}

/// The host's end of one NVMe/TCP connection.
pub struct HostConn {
    config: HostConfig,
    lifecycle: Lifecycle,
    rx: Rx,
    tx: Tx,
    reader: Reader,
    /// CPDA and MAXH2CDATA of the controller.
    controller_alignment: DataAlignment,
    max_h2c_data: u32,
    in_capsule_bytes: u32,
    commands: Vec<OutstandingCommand>,
    /// Number of commands without a completion, and of commands submitted since the last check for
    /// completions.
    outstanding: usize,
    unlooked: usize,
    /// Reads in the order of their submission, for guesses. Some may be completed already.
    reads: VecDeque<(u16, u32)>,
    next_serial: u32,
    guessing: Guessing,
    /// C2HData whose payload is being received.
    receiving: Option<(u16, DataPdu)>,
    waiting: bool,
    opened: Nanos,
    partial: Partial,
    pdus_received: u64,
}

impl HostConn {
    /// Creates the machine for a connected socket and queues ICReq.
    pub fn new(config: HostConfig, now: Nanos) -> Self {
        let mut tx = Tx::new(config.entries.max(8));
        frame::put(
            &mut tx,
            &IcReq::new(config.alignment, config.digests, config.max_r2t),
            Digests::NONE,
        );
        let mut commands = Vec::new();
        commands.resize_with(config.entries, OutstandingCommand::default);
        Self {
            reader: Reader::new(Rules {
                alignment: config.alignment,
                ..Rules::host()
            }),
            config,
            lifecycle: Lifecycle::new(now),
            rx: Rx::new(),
            tx,
            controller_alignment: DataAlignment::DWORD,
            max_h2c_data: 0,
            in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            commands,
            outstanding: 0,
            unlooked: 0,
            reads: VecDeque::new(),
            next_serial: 0,
            guessing: Guessing::default(),
            receiving: None,
            waiting: false,
            opened: now,
            partial: Partial::default(),
            pdus_received: 0,
        }
    }

    /// Largest in-capsule data of I/O commands; fabrics commands always have 8192 bytes.
    pub fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.in_capsule_bytes = bytes;
    }

    /// Queues a command, after [`HostEvent::Ready`]. On an ended connection it waits to be
    /// reclaimed.
    #[inline]
    pub fn submit(&mut self, command: HostCommand) {
        debug_assert!(
            self.lifecycle.phase() != ConnectionPhase::Handshake,
            "a command before the connection was ready"
        );
        if !self.lifecycle.is_running() {
            return self.keep(command);
        }
        let HostCommand {
            mut sqe,
            write,
            read,
        } = command;
        let cid = usize::from(sqe.cid());
        if cid >= self.commands.len() {
            self.commands
                .resize_with(cid + 1, OutstandingCommand::default);
        }
        let limit = if sqe.is_fabrics() {
            ADMIN_IN_CAPSULE_BYTES
        } else {
            self.in_capsule_bytes
        };
        let write = write.filter(|data| !data.is_empty());
        let in_capsule = write
            .as_ref()
            .is_some_and(|data| data.len() <= limit as usize);
        let length = write
            .as_ref()
            .or(read.as_ref())
            .map_or(0, |data| data.len() as u32);
        sqe.set_sgl(if in_capsule {
            Sgl::InCapsule { offset: 0, length }
        } else {
            Sgl::Transport { length }
        });

        let (digests, align) = (self.reader.rules().digests, self.controller_alignment);
        let carried = if in_capsule { length } else { 0 };
        let header = CapsuleCmd::new(sqe, carried, digests, align);
        let mut data_end = 0;
        let left = match write {
            Some(data) if in_capsule => {
                frame::put_before_data(&mut self.tx, &header, digests, align);
                frame::put_data(&mut self.tx, digests, [data].into_iter().collect());
                data_end = self.tx.position();
                None
            }
            left => {
                frame::put(&mut self.tx, &header, digests);
                left
            }
        };
        let slot = &mut self.commands[cid];
        assert!(!slot.outstanding, "command identifier {cid} is in use");
        let serial = self.next_serial;
        self.next_serial = serial.wrapping_add(1);
        // Not only while guessing is on: it begins, and begins again, with the oldest read.
        if !digests.data && read.as_ref().is_some_and(|data| data.len() >= GUESS_BYTES) {
            self.reads.push_back((cid as u16, serial));
        }
        self.outstanding += 1;
        self.unlooked += 1;
        // Field by field: of the one before there is nothing left to drop.
        (slot.outstanding, slot.serial) = (true, serial);
        (slot.last, slot.damaged) = (false, false);
        slot.writes = sqe.opcode == io::WRITE;
        (slot.asked, slot.received, slot.data_end) = (0, 0, data_end);
        slot.write = left;
        slot.read = read;
    }

    /// Stores a command submitted after the end, for [`HostConn::reclaim`].
    #[cold]
    fn keep(&mut self, command: HostCommand) {
        let cid = usize::from(command.sqe.cid());
        if cid >= self.commands.len() {
            self.commands
                .resize_with(cid + 1, OutstandingCommand::default);
        }
        self.commands[cid] = OutstandingCommand {
            outstanding: true,
            write: command.write,
            read: command.read,
            ..OutstandingCommand::default()
        };
    }

    #[inline]
    pub fn wants_read(&self) -> bool {
        !self.waiting && !self.lifecycle.is_finished()
    }

    /// True if the controller must send something: a completion, the ICResp, or its close. If
    /// false, only a later poll finds out about other bytes or a closed connection.
    #[inline]
    pub fn expects(&self) -> bool {
        self.outstanding > 0 || !self.lifecycle.is_running()
    }

    /// False if a check for completions right after a send is useless, because all outstanding
    /// commands were submitted since the last check. Returns false at most once for them.
    #[inline]
    pub fn may_find(&mut self) -> bool {
        let news = std::mem::take(&mut self.unlooked);
        news == 0 || news < self.outstanding || !self.lifecycle.is_running() || self.has_news()
    }

    /// Fills `out` with the memory for the next bytes. Returns false if no receive buffer is free:
    /// try again in the next turn.
    #[inline]
    pub fn recv_slices<'a>(
        &'a mut self,
        buffers: &mut RxBuffers,
        out: &mut RecvSlices<'a>,
    ) -> bool {
        self.unlooked = 0;
        self.guess(buffers);
        // Behind much data there is probably more of it: taking no more than the next header lets
        // that be received into place too.
        let large = self
            .receiving
            .as_ref()
            .is_some_and(|(_, pdu)| pdu.datal.get() >= LARGE);
        self.rx
            .slices(buffers, if large { NARROW } else { usize::MAX }, out)
    }

    #[inline]
    pub fn received(&mut self, n: usize) {
        self.rx.received(n);
        self.guessing.pause = self.guessing.pause.saturating_sub(1);
        if !self.is_open() {
            self.rx.drop_unread();
        }
    }

    /// Records that a receive got no data.
    #[inline]
    pub fn found_nothing(&mut self) {
        self.rx.found_nothing();
    }

    /// The controller closed its end, or the connection broke (`error`).
    pub fn peer_closed(&mut self, error: Option<&str>) {
        if self.is_open() {
            let why = match error {
                Some(error) => Closed::Broken(error.to_owned()),
                None if self.rx.is_mid_pdu() => {
                    Closed::Broken("closed by the controller in the middle of a PDU".into())
                }
                None if self.lifecycle.phase() == ConnectionPhase::Handshake => {
                    Closed::Broken("closed by the controller before ICResp".into())
                }
                None => Closed::Peer,
            };
            self.lifecycle.record_cause(why);
        }
        self.finish();
    }

    /// Returns the next event. Call it until the result is not `Event`.
    pub fn poll(&mut self, now: Nanos) -> HostPoll {
        let mut event = None;
        match (self.poll_into(now, &mut |given| event = Some(given)), event) {
            (Polled::Waiting, _) => HostPoll::Waiting,
            (_, Some(event)) => HostPoll::Event(event),
            (_, None) => HostPoll::Starved,
        }
    }

    /// Like `poll`, for a caller that stores events itself: passes at most one event to `sink`.
    #[inline]
    pub fn poll_into(&mut self, now: Nanos, sink: &mut impl FnMut(HostEvent)) -> Polled {
        if self.is_open() {
            match self.advance(now, sink) {
                Ok(polled) => {
                    self.waiting = polled == Polled::Waiting;
                    return polled;
                }
                Err(violation) => self.refuse(violation, now),
            }
        }
        self.news(sink)
    }

    #[inline]
    pub fn end_receive(&mut self, buffers: &mut RxBuffers, more: bool, now: Nanos) {
        self.rx.return_buffer(buffers, more || self.waiting);
        let waits_for_rest = !more && !self.waiting && self.rx.is_mid_pdu();
        self.partial.note(waits_for_rest, self.pdus_received, now);
    }

    /// Ends the connection now. Queued data that has not left is dropped.
    pub fn close(&mut self) {
        self.lifecycle.record_cause(Closed::Local);
        self.finish();
    }

    /// Returns a command that did not complete, with its buffers, once the connection has ended.
    /// Its SQE has the command identifier only.
    pub fn reclaim(&mut self) -> Option<HostCommand> {
        if self.is_open() {
            return None;
        }
        while let Some(command) = self.commands.pop() {
            if command.outstanding {
                let (write, read) = (command.write, command.read);
                let sqe = Sqe::new(0, self.commands.len() as u16);
                return Some(HostCommand { sqe, write, read });
            }
        }
        None
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
    pub fn sent(&mut self, n: usize) {
        self.tx.sent(n);
        if self.tx.is_empty() {
            self.lifecycle.drained();
        }
    }

    /// True once, when the sending side of the socket must be shut down.
    pub fn takes_shutdown(&mut self) -> bool {
        self.lifecycle.takes_shutdown()
    }

    pub fn is_finished(&self) -> bool {
        self.lifecycle.is_finished() && self.lifecycle.is_reported()
    }

    /// True if [`HostConn::poll`] can make progress although no bytes have arrived.
    pub fn has_news(&self) -> bool {
        self.waiting || self.lifecycle.has_end()
    }

    pub fn deadline(&self) -> Option<Nanos> {
        match self.lifecycle.phase() {
            ConnectionPhase::Handshake => Some(self.opened + self.config.handshake_timeout),
            ConnectionPhase::Running => self
                .partial
                .since()
                .map(|since| since + self.config.stall_timeout),
            _ => self.lifecycle.deadline(self.config.linger),
        }
    }

    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.lifecycle.record_cause(Closed::TimedOut);
            self.finish();
        }
    }

    fn is_open(&self) -> bool {
        self.lifecycle.is_open()
    }

    fn begin_closing(&mut self, now: Nanos) {
        self.lifecycle.begin_closing(now, self.tx.is_empty());
        self.abandon();
    }

    fn finish(&mut self) {
        self.lifecycle.finish();
        self.tx.clear();
        self.abandon();
    }

    /// Returns the buffers of incomplete reads to their commands, where [`HostConn::reclaim`] finds
    /// them.
    fn abandon(&mut self) {
        if let Some((cid, _)) = self.receiving.take() {
            let buf = self.rx.take_payload();
            if let Some(command) = self.commands.get_mut(usize::from(cid)) {
                command.read = buf;
            }
        }
        while let Some(Guess { id, buf, .. }) = self.rx.take_guess() {
            if let Some(command) = self.commands.get_mut(usize::from(id)) {
                command.read = Some(buf);
            }
        }
        self.reads.clear();
        self.rx.drop_unread();
    }

    /// Passes the event `Closed` to `sink`, once.
    #[cold]
    fn news(&mut self, sink: &mut impl FnMut(HostEvent)) -> Polled {
        self.waiting = false;
        match self.lifecycle.take_end() {
            Some(why) => {
                sink(HostEvent::Closed(why));
                Polled::Event
            }
            None => Polled::Starved,
        }
    }
}

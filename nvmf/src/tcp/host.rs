//! The host's end of one NVMe/TCP connection.
//!
//! ```text
//!              ICReq / ICResp        violation          queue sent
//!   Handshake ───────────────▶ Running ────────▶ Closing ───────────▶ Lingering ──▶ Finished
//!       └──────────────────────────┴────── close, peer gone, deadline ──────────────────▲
//! ```
//!
//! Commands stand in a table by their identifier. Data for a read goes straight into the command's
//! buffer; data for a write leaves with the capsule when it fits and when the controller asks for it
//! otherwise. The layer above chooses the identifiers and counts what is outstanding.

use std::collections::VecDeque;
use std::time::Duration;

use nacre_hugepages::Buf;
use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::status::StatusCode;
use nacre_nvmf_wire::tcp::{
    ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, CommonHeader, DataAlignment, DataPdu, Digests,
    FatalErrorStatus, Field, Frame, IcReq, IcResp, Pdu, PduError, R2t, Reason, Rules, Side,
    TermReq,
};
use nacre_reactor::Nanos;

use super::frame::{self, Violation, is_damaged};
use super::rx::{Guess, RecvSlices, Rx, RxBuffers};
use super::tx::{Slices, Tx};
use crate::transport::{Closed, HostCommand, HostEvent};

/// How the host's end behaves.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// Commands that will be outstanding at most, for sizing; identifiers may be any.
    pub entries: usize,
    /// Digests to ask for. A controller that does not agree to exactly these is refused: going on
    /// without would silently drop the protection that was asked for.
    pub digests: Digests,
    /// How the controller is to align payload (HPDA).
    pub alignment: DataAlignment,
    /// R2Ts outstanding per command that we announce (MAXR2T, as a count).
    pub max_r2t: u32,
    /// From the connection to ICResp.
    pub handshake_timeout: Duration,
    /// For the rest of a PDU that has begun.
    pub stall_timeout: Duration,
    /// For a termination request to leave, and for the controller to close then.
    pub linger: Duration,
}

impl Default for HostConfig {
    fn default() -> HostConfig {
        HostConfig {
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

/// What one call of [`HostConn::poll`] came to.
#[derive(Debug)]
pub enum HostPoll {
    Event(HostEvent),
    /// Nothing more can be made of what has arrived.
    Starved,
    /// There is more, but what is queued has to leave first.
    Waiting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Handshake,
    Running,
    Closing,
    Lingering { shutdown: bool },
    Finished,
}

/// An outstanding command.
#[derive(Default)]
struct Command {
    outstanding: bool,
    /// The controller said that all data was sent.
    last: bool,
    damaged: bool,
    /// Tells the command from others that had its identifier.
    serial: u32,
    /// Host-to-controller data that is left for R2Ts, and how much of it was asked for.
    write: Option<Buf>,
    asked: u32,
    /// The payload in progress has the buffer while it is received.
    read: Option<Buf>,
    received: u32,
}

/// Reads of fewer bytes are not worth an entry of the I/O vector.
const GUESS_BYTES: usize = 2048;

/// Whether to guess what comes next (see [`super::rx`]).
///
/// On once the controller was seen to end reads by the SUCCESS flag: responses between the data would
/// spoil every guess. Each wrong guess pauses it for twice as many receives as the one before.
#[derive(Debug, Default)]
struct Guessing {
    success_seen: bool,
    /// Receives to go until the next guess.
    pause: u32,
    /// The last pause.
    paused: u32,
    hits: u32,
}

impl Guessing {
    fn is_on(&self) -> bool {
        self.success_seen && self.pause == 0
    }

    #[inline]
    fn hit(&mut self) {
        self.hits += 1;
        // Well guessed for a while: the next miss is forgiven soon.
        if self.hits == 1024 {
            self.paused = 0;
        }
    }

    fn miss(&mut self) {
        self.paused = (self.paused * 2).clamp(16, 4096);
        self.pause = self.paused;
        self.hits = 0;
    }
}

/// One connection.
pub struct HostConn {
    config: HostConfig,
    phase: Phase,
    rx: Rx,
    tx: Tx,
    rules: Rules,
    /// CPDA and MAXH2CDATA of the controller.
    controller_alignment: DataAlignment,
    max_h2c_data: u32,
    in_capsule_bytes: u32,
    commands: Vec<Command>,
    /// Reads in the order of their submission, for guessing; some may be stale.
    reads: VecDeque<(u16, u32)>,
    next_serial: u32,
    guessing: Guessing,
    /// C2HData whose payload is being received.
    receiving: Option<(u16, DataPdu)>,
    waiting: bool,
    why: Option<Closed>,
    told: bool,
    opened: Nanos,
    closing: Nanos,
    partial: Option<Nanos>,
    pdus_at_partial: u64,
    pdus_received: u64,
}

impl HostConn {
    /// A connection that was just made: ICReq is queued.
    pub fn new(config: HostConfig, now: Nanos) -> HostConn {
        let mut tx = Tx::new(config.entries.max(8));
        frame::put(
            &mut tx,
            &IcReq::new(config.alignment, config.digests, config.max_r2t),
            Digests::NONE,
        );
        let mut commands = Vec::new();
        commands.resize_with(config.entries, Command::default);
        HostConn {
            rules: Rules {
                alignment: config.alignment,
                ..Rules::host()
            },
            config,
            phase: Phase::Handshake,
            rx: Rx::new(),
            tx,
            controller_alignment: DataAlignment::DWORD,
            max_h2c_data: 0,
            in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            commands,
            reads: VecDeque::new(),
            next_serial: 0,
            guessing: Guessing::default(),
            receiving: None,
            waiting: false,
            why: None,
            told: false,
            opened: now,
            closing: now,
            partial: None,
            pdus_at_partial: 0,
            pdus_received: 0,
        }
    }

    /// Largest in-capsule data of I/O commands; fabrics commands always have 8192 bytes.
    pub fn set_in_capsule_bytes(&mut self, bytes: u32) {
        self.in_capsule_bytes = bytes;
    }

    /// Queues a command, after [`HostEvent::Ready`]. On a connection that has ended it is dropped.
    #[inline]
    pub fn submit(&mut self, command: HostCommand) {
        debug_assert!(
            self.phase != Phase::Handshake,
            "a command before the connection was ready"
        );
        if self.phase != Phase::Running {
            return;
        }
        let HostCommand {
            mut sqe,
            write,
            read,
        } = command;
        let cid = usize::from(sqe.cid());
        if cid >= self.commands.len() {
            self.commands.resize_with(cid + 1, Command::default);
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

        let (digests, align) = (self.rules.digests, self.controller_alignment);
        let carried = if in_capsule { length } else { 0 };
        let header = CapsuleCmd::new(sqe, carried, digests, align);
        let left = match write {
            Some(data) if in_capsule => {
                frame::put_before_data(&mut self.tx, &header, digests, align);
                frame::put_data(&mut self.tx, digests, [data].into_iter().collect());
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
        if self.guessing.is_on() && read.as_ref().is_some_and(|data| data.len() >= GUESS_BYTES) {
            self.reads.push_back((cid as u16, serial));
        }
        *slot = Command {
            outstanding: true,
            serial,
            write: left,
            read,
            ..Command::default()
        };
    }

    #[inline]
    pub fn wants_read(&self) -> bool {
        !self.waiting && self.phase != Phase::Finished
    }

    /// Where the next bytes go. `false`: no receive buffer is free, try again next turn.
    #[inline]
    pub fn recv_slices<'a>(
        &'a mut self,
        buffers: &mut RxBuffers,
        out: &mut RecvSlices<'a>,
    ) -> bool {
        self.guess(buffers);
        self.rx.slices(buffers, usize::MAX, out)
    }

    #[inline]
    pub fn received(&mut self, n: usize) {
        self.rx.received(n);
        self.guessing.pause = self.guessing.pause.saturating_sub(1);
        if !self.is_open() {
            self.rx.drop_unread();
        }
    }

    /// The controller closed its end, or the connection broke (`error`).
    pub fn peer_closed(&mut self, error: Option<&str>) {
        if self.is_open() {
            let why = match error {
                Some(error) => Closed::Broken(error.to_owned()),
                None if self.rx.is_mid_pdu() => {
                    Closed::Broken("closed by the controller in the middle of a PDU".into())
                }
                None if self.phase == Phase::Handshake => {
                    Closed::Broken("closed by the controller before ICResp".into())
                }
                None => Closed::Peer,
            };
            self.why.get_or_insert(why);
        }
        self.finish();
    }

    #[inline]
    pub fn poll(&mut self, now: Nanos) -> HostPoll {
        if self.is_open() {
            match self.advance(now) {
                Ok(poll) => {
                    self.waiting = matches!(poll, HostPoll::Waiting);
                    return poll;
                }
                Err(violation) => self.refuse(violation, now),
            }
        }
        self.news()
    }

    #[inline]
    pub fn settle(&mut self, buffers: &mut RxBuffers, more: bool, now: Nanos) {
        self.rx.settle(buffers, more || self.waiting);
        if more || self.waiting || !self.rx.is_mid_pdu() {
            self.partial = None;
        } else if self.partial.is_none() || self.pdus_at_partial != self.pdus_received {
            self.partial = Some(now);
            self.pdus_at_partial = self.pdus_received;
        }
    }

    /// Ends the connection now. What was queued and has not left is dropped.
    pub fn close(&mut self) {
        self.why.get_or_insert(Closed::Local);
        self.finish();
    }

    /// On a connection that has ended: a command that did not complete, with its buffers. Its entry
    /// has the identifier only.
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
        if self.tx.is_empty() && self.phase == Phase::Closing {
            self.phase = Phase::Lingering { shutdown: true };
        }
    }

    /// Whether to shut the sending side of the socket down; says so once.
    pub fn takes_shutdown(&mut self) -> bool {
        match &mut self.phase {
            Phase::Lingering { shutdown } => std::mem::take(shutdown),
            _ => false,
        }
    }

    pub fn is_finished(&self) -> bool {
        self.phase == Phase::Finished && self.told
    }

    /// Whether [`HostConn::poll`] would say something without anything having arrived.
    pub fn has_news(&self) -> bool {
        self.waiting
            || (!self.told && matches!(self.phase, Phase::Lingering { .. } | Phase::Finished))
    }

    pub fn deadline(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Handshake => Some(self.opened + self.config.handshake_timeout),
            Phase::Running => self.partial.map(|since| since + self.config.stall_timeout),
            Phase::Closing | Phase::Lingering { .. } => Some(self.closing + self.config.linger),
            Phase::Finished => None,
        }
    }

    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.deadline().is_some_and(|deadline| deadline <= now) {
            self.why.get_or_insert(Closed::TimedOut);
            self.finish();
        }
    }

    fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Handshake | Phase::Running)
    }

    #[inline]
    fn advance(&mut self, now: Nanos) -> Result<HostPoll, Violation> {
        loop {
            if self.rx.is_guessing() {
                self.judge_guess()?;
            }
            let handled = if self.receiving.is_some() {
                self.payload()?
            } else {
                match frame::read(self.rx.unread(), &self.rules)? {
                    Some((frame, Pdu::C2hData(&pdu))) => self.c2h_data(&frame, pdu)?,
                    Some((frame, Pdu::CapsuleResp(&cqe))) => Some(self.response(&frame, cqe)?),
                    Some((frame, Pdu::R2t(&pdu))) => self.r2t(&frame, &pdu)?,
                    Some((frame, Pdu::IcResp(&pdu))) => Some(self.handshake(&frame, &pdu)?),
                    Some((_, Pdu::C2hTermReq(&pdu))) => Some(self.terminated(&pdu, now)),
                    Some(_) => {
                        unreachable!("the rules let nothing through that a host does not receive")
                    }
                    None => Some(HostPoll::Starved),
                }
            };
            if let Some(poll) = handled {
                return Ok(poll);
            }
        }
    }

    /// ICResp (TCP 3.6.2.3).
    fn handshake(&mut self, frame: &Frame, answer: &IcResp) -> Result<HostPoll, Violation> {
        let (asked, agreed) = (self.config.digests, answer.digests());
        if agreed != asked {
            let reason = Reason::NotEqual {
                expected: asked.bits().into(),
                actual: agreed.bits().into(),
            };
            return Err(Violation::field(
                Field::Dgst,
                reason,
                FatalErrorStatus::UnsupportedParameter,
            ));
        }
        self.controller_alignment = answer.alignment();
        self.max_h2c_data = answer.maxh2cdata.get();
        self.rules.digests = agreed;
        self.rules.initialized = true;
        self.phase = Phase::Running;
        self.consume(frame);
        Ok(HostPoll::Event(HostEvent::Ready))
    }

    /// Says which data the next receive will probably bring.
    #[inline]
    fn guess(&mut self, buffers: &RxBuffers) {
        if self.reads.is_empty() || !self.rx.may_guess() || !self.is_open() {
            return;
        }
        let header = self
            .rules
            .alignment
            .align(DataPdu::SIZE as u32 + self.rules.digests.header_bytes())
            as usize;
        while let Some(&(cid, serial)) = self.reads.front() {
            let command = &mut self.commands[usize::from(cid)];
            let fresh = command.outstanding
                && command.serial == serial
                && command.received == 0
                && !command.last;
            if let Some(buf) = command.read.take_if(|_| fresh) {
                let guess = Guess {
                    id: cid,
                    len: buf.len(),
                    at: 0,
                    buf,
                };
                if let Err(back) = self.rx.guess(buffers, header, guess) {
                    command.read = Some(back.buf);
                    return;
                }
            }
            self.reads.pop_front();
        }
    }

    /// Looks at what a guess brought: in place, or to be put back in order. Afterwards either a
    /// payload is in progress or nothing of the guess is left.
    #[inline]
    fn judge_guess(&mut self) -> Result<(), Violation> {
        if self.receiving.is_none()
            && let Some((cid, header, length)) = self.rx.guessed()
        {
            if let Some((frame, Pdu::C2hData(&pdu))) = frame::read(self.rx.unread(), &self.rules)?
                && pdu.cccid.get() == cid
                && pdu.datao.get() == 0
                && pdu.datal.get() as usize == length
                && frame.data_offset as usize == header
            {
                self.rx.hit();
                self.guessing.hit();
                self.pdus_received += 1;
                self.receiving = Some((cid, pdu));
            } else {
                // A header cut in two is no wrong guess.
                if self.rx.unread().len() >= header {
                    self.guessing.miss();
                }
                self.rx.miss();
            }
        }
        if self.rx.guessed().is_none() {
            while let Some(Guess { id, buf, .. }) = self.rx.take_idle_guess() {
                let command = &mut self.commands[usize::from(id)];
                command.read = Some(buf);
                self.reads.push_front((id, command.serial));
            }
            // Leftovers of commands that ended another way must not pile up.
            if !self.guessing.is_on() || self.reads.len() > 4 * self.commands.len() {
                self.reads.clear();
            }
        }
        Ok(())
    }

    /// C2HData (TCP 3.6.2.7).
    #[inline]
    fn c2h_data(&mut self, frame: &Frame, pdu: DataPdu) -> Result<Option<HostPoll>, Violation> {
        let cid = pdu.cccid.get();
        let (offset, length) = (pdu.datao.get(), pdu.datal.get());
        let command = outstanding(&mut self.commands, cid)?;
        if command.last {
            return Err(Violation::UnexpectedData { cid });
        }
        let Some(buf) = &command.read else {
            return Err(Violation::UnexpectedData { cid });
        };
        let left = buf.len() as u32 - command.received;
        if offset != command.received || length > left {
            let field = if offset != command.received {
                Field::Datao
            } else {
                Field::Datal
            };
            let (expected_offset, expected_length) = (command.received, left);
            let reason = Reason::UnexpectedRange {
                offset,
                length,
                expected_offset,
                expected_length,
            };
            return Err(Violation::field(
                field,
                reason,
                FatalErrorStatus::DataOutOfRange,
            ));
        }
        let buf = command.read.take().expect("just seen");
        self.consume(frame);
        self.rx.begin(buf, offset as usize, length as usize);
        self.receiving = Some((cid, pdu));
        Ok(None)
    }

    /// Goes on with the payload of C2HData.
    #[inline]
    fn payload(&mut self) -> Result<Option<HostPoll>, Violation> {
        if !self.rx.advance() {
            return Ok(Some(HostPoll::Starved));
        }
        let mut digest = None;
        if self.rules.digests.data {
            let Some(&received) = self.rx.unread().first_chunk() else {
                return Ok(Some(HostPoll::Starved));
            };
            digest = Some(u32::from_le_bytes(received));
            self.rx.consume(4);
        }
        let Some((cid, pdu)) = self.receiving.take() else {
            return Ok(None);
        };
        let buf = self.rx.take_payload().expect("C2HData has a buffer");
        let command = outstanding(&mut self.commands, cid)?;
        let from = command.received as usize;
        command.received += pdu.datal.get();
        command.damaged |= is_damaged(&buf[from..command.received as usize], digest);
        command.last = pdu.is_last();
        command.read = Some(buf);
        if !pdu.is_success() {
            return Ok(None);
        }
        self.guessing.success_seen = !self.rules.digests.data;
        // The controller saved the response: the last data says that all is well (TCP 3.3.2.1).
        Ok(Some(self.complete(Cqe::success(cid))))
    }

    /// CapsuleResp (TCP 3.6.2.5).
    #[inline]
    fn response(&mut self, frame: &Frame, cqe: Cqe) -> Result<HostPoll, Violation> {
        outstanding(&mut self.commands, cqe.cid())?;
        self.consume(frame);
        Ok(self.complete(cqe))
    }

    #[inline]
    fn complete(&mut self, mut cqe: Cqe) -> HostPoll {
        let command = std::mem::take(&mut self.commands[usize::from(cqe.cid())]);
        if command.damaged && cqe.status().is_success() {
            cqe.set_status(StatusCode::TRANSIENT_TRANSPORT_ERROR);
        }
        HostPoll::Event(HostEvent::Completion {
            cqe,
            read: command.read,
            transferred: command.received,
        })
    }

    /// R2T (TCP 3.6.2.8): everything it asks for is queued at once, in pieces of MAXH2CDATA.
    fn r2t(&mut self, frame: &Frame, pdu: &R2t) -> Result<Option<HostPoll>, Violation> {
        // A controller that asks byte by byte must not make us hold a part for each.
        if self.tx.parts() > 8 * self.config.entries + 1024 {
            return Ok(Some(HostPoll::Waiting));
        }
        let cid = pdu.cccid.get();
        let (offset, length) = (pdu.r2to.get(), pdu.r2tl.get());
        let command = outstanding(&mut self.commands, cid)?;
        let Some(buf) = &command.write else {
            return Err(Violation::UnexpectedData { cid });
        };
        let left = buf.len() as u32 - command.asked;
        if offset != command.asked || length > left {
            let field = if offset != command.asked {
                Field::R2to
            } else {
                Field::R2tl
            };
            let (expected_offset, expected_length) = (command.asked, left);
            let reason = Reason::UnexpectedRange {
                offset,
                length,
                expected_offset,
                expected_length,
            };
            return Err(Violation::field(
                field,
                reason,
                FatalErrorStatus::DataOutOfRange,
            ));
        }
        command.asked += length;
        let end = command.asked;
        let (digests, align) = (self.rules.digests, self.controller_alignment);
        let mut at = offset;
        while at < end {
            let n = (end - at).min(self.max_h2c_data);
            let header = DataPdu::h2c(cid, pdu.ttag.get(), at, n, at + n == end, digests, align);
            frame::put_before_data(&mut self.tx, &header, digests, align);
            frame::put_data(
                &mut self.tx,
                digests,
                [buf.slice(at as usize, n as usize)].into_iter().collect(),
            );
            at += n;
        }
        if end as usize == buf.len() {
            command.write = None;
        }
        self.consume(frame);
        Ok(None)
    }

    /// C2HTermReq (TCP 3.6.2.10): the controller found us at fault and is about to close.
    fn terminated(&mut self, pdu: &TermReq, now: Nanos) -> HostPoll {
        let reason = frame::reason_of(pdu);
        tracing::warn!(%reason, "the controller ended a connection with C2HTermReq");
        self.why.get_or_insert(Closed::Protocol(format!(
            "the controller sent C2HTermReq: {reason}"
        )));
        self.tx.clear();
        self.begin_closing(now);
        self.news()
    }

    #[inline]
    fn consume(&mut self, frame: &Frame) {
        self.rx.consume(frame.data_offset as usize);
        self.pdus_received += 1;
    }

    /// Ends the connection for what the controller did: says so, and listens no more.
    #[cold]
    fn refuse(&mut self, violation: Violation, now: Nanos) {
        let unread = self.rx.unread();
        let hlen = unread
            .get(2)
            .map_or(0, |&hlen| usize::from(hlen))
            .max(CommonHeader::SIZE);
        violation.put(&mut self.tx, Side::Host, &unread[..hlen.min(unread.len())]);
        self.why
            .get_or_insert(Closed::Protocol(violation.to_string()));
        self.begin_closing(now);
    }

    fn begin_closing(&mut self, now: Nanos) {
        self.closing = now;
        self.phase = if self.tx.is_empty() {
            Phase::Lingering { shutdown: true }
        } else {
            Phase::Closing
        };
        self.abandon();
    }

    fn finish(&mut self) {
        self.phase = Phase::Finished;
        self.tx.clear();
        self.abandon();
    }

    /// Nothing more will arrive: buffers that were to be filled go back to their commands, where
    /// [`HostConn::reclaim`] finds them.
    fn abandon(&mut self) {
        if let Some((cid, _)) = self.receiving.take() {
            let buf = self.rx.take_payload();
            if let Some(command) = self.commands.get_mut(usize::from(cid)) {
                command.read = buf;
            }
        }
        while let Some(Guess { id, buf, .. }) = self.rx.take_idle_guess() {
            if let Some(command) = self.commands.get_mut(usize::from(id)) {
                command.read = Some(buf);
            }
        }
        self.reads.clear();
        self.rx.drop_unread();
    }

    /// The end, once.
    #[cold]
    fn news(&mut self) -> HostPoll {
        self.waiting = false;
        match self.phase {
            Phase::Lingering { .. } | Phase::Finished if !self.told => {
                self.told = true;
                HostPoll::Event(HostEvent::Closed(self.why.clone().unwrap_or(Closed::Local)))
            }
            _ => HostPoll::Starved,
        }
    }
}

#[inline]
fn outstanding(commands: &mut [Command], cid: u16) -> Result<&mut Command, PduError> {
    match commands.get_mut(usize::from(cid)) {
        Some(command) if command.outstanding => Ok(command),
        _ => Err(PduError::not_in_flight(Field::Cccid, cid)),
    }
}

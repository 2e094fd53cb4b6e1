//! Handles each PDU of the controller: checks it against the outstanding commands, then creates an
//! event or closes the connection with an error.

use std::ops::Range;

use nacre_nvmf_wire::cqe::Cqe;
use nacre_nvmf_wire::status::StatusCode;
use nacre_nvmf_wire::tcp::{
    CommonHeader, DataPdu, FatalErrorStatus, Field, Frame, IcResp, Pdu, PduError, R2t, Reason,
    Side, TermReq,
};
use nacre_reactor::Nanos;

use super::{HostConn, OutstandingCommand, Polled};
use crate::tcp::frame::{self, Violation, is_damaged};
use crate::transport::{Closed, HostEvent};

/// The destination of events, which are built in place, as for the controller.
pub(super) trait HostSink: FnMut(HostEvent) {}

impl<F: FnMut(HostEvent)> HostSink for F {}

impl HostConn {
    #[inline]
    pub(super) fn advance(
        &mut self,
        now: Nanos,
        sink: &mut impl HostSink,
    ) -> Result<Polled, Violation> {
        loop {
            if self.receiving.is_none() {
                self.judge_guess()?;
            }
            let handled = if self.receiving.is_some() {
                self.payload(sink)?
            } else {
                match self.reader.read(self.rx.unread())? {
                    Some((frame, Pdu::C2hData(&pdu))) => self.c2h_data(&frame, pdu)?,
                    Some((frame, Pdu::CapsuleResp(&cqe))) => {
                        Some(self.response(&frame, cqe, sink)?)
                    }
                    Some((frame, Pdu::R2t(&pdu))) => self.r2t(&frame, &pdu)?,
                    Some((frame, Pdu::IcResp(&pdu))) => Some(self.handshake(&frame, &pdu, sink)?),
                    Some((_, Pdu::C2hTermReq(&pdu))) => Some(self.terminated(&pdu, now, sink)),
                    Some(_) => {
                        unreachable!("the rules let nothing through that a host does not receive")
                    }
                    None => Some(Polled::Starved),
                }
            };
            if let Some(poll) = handled {
                return Ok(poll);
            }
        }
    }

    /// ICResp (TCP 3.6.2.3).
    fn handshake(
        &mut self,
        frame: &Frame,
        answer: &IcResp,
        sink: &mut impl HostSink,
    ) -> Result<Polled, Violation> {
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
        self.reader.change(|rules| {
            rules.digests = agreed;
            rules.initialized = true;
        });
        self.lifecycle.run();
        self.consume(frame);
        sink(HostEvent::Ready);
        Ok(Polled::Event)
    }

    /// C2HData (TCP 3.6.2.9).
    #[inline]
    fn c2h_data(&mut self, frame: &Frame, pdu: DataPdu) -> Result<Option<Polled>, Violation> {
        let cid = pdu.cccid.get();
        let (offset, length) = (pdu.datao.get(), pdu.datal.get());
        let command = outstanding(&mut self.commands, cid)?;
        if command.last {
            return Err(Violation::UnexpectedData { cid });
        }
        let Some(buf) = &command.read else {
            return Err(Violation::UnexpectedData { cid });
        };
        let rest = command.received..buf.len() as u32;
        expect_range(rest, (offset, Field::Datao), (length, Field::Datal))?;
        let buf = command.read.take().expect("just seen");
        self.consume(frame);
        self.rx.begin(buf, offset as usize, length as usize);
        self.receiving = Some((cid, pdu));
        Ok(None)
    }

    /// Continues with the payload of C2HData.
    #[inline]
    fn payload(&mut self, sink: &mut impl HostSink) -> Result<Option<Polled>, Violation> {
        if !self.rx.advance() {
            return Ok(Some(Polled::Starved));
        }
        let mut digest = None;
        if self.reader.rules().digests.data {
            let Some(&received) = self.rx.unread().first_chunk() else {
                return Ok(Some(Polled::Starved));
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
        self.guessing.success_seen = !self.reader.rules().digests.data;
        // The controller saved the response: the last data says that all is well (TCP 3.3.2.1).
        Ok(Some(self.complete(Cqe::success(cid), sink)))
    }

    /// CapsuleResp (TCP 3.6.2.7).
    #[inline]
    fn response(
        &mut self,
        frame: &Frame,
        cqe: Cqe,
        sink: &mut impl HostSink,
    ) -> Result<Polled, Violation> {
        let command = outstanding(&mut self.commands, cqe.cid())?;
        // A completed command's buffers belong to the caller, which may refill them at once. If a
        // controller completes a command before it has all requested data, the completion waits
        // until the buffers are released.
        if !self.tx.has_left(command.data_end) {
            return Ok(Polled::Waiting);
        }
        self.consume(frame);
        Ok(self.complete(cqe, sink))
    }

    #[inline]
    fn complete(&mut self, mut cqe: Cqe, sink: &mut impl HostSink) -> Polled {
        let command = &mut self.commands[usize::from(cqe.cid())];
        command.outstanding = false;
        self.outstanding -= 1;
        let left = command.write.take().is_some();
        if cqe.status().is_success() {
            if command.damaged {
                cqe.set_status(StatusCode::TRANSIENT_TRANSPORT_ERROR);
            } else if left && command.writes {
                let asked = command.asked;
                tracing::error!(
                    asked,
                    "the controller says that it wrote data that it never asked for"
                );
                cqe.set_status(StatusCode::DATA_TRANSFER_ERROR);
            }
        }
        sink(HostEvent::Completion {
            cqe,
            read: command.read.take(),
            transferred: command.received,
        });
        Polled::Event
    }

    /// R2T (TCP 3.6.2.8): queues all requested data at once, in parts of at most MAXH2CDATA.
    fn r2t(&mut self, frame: &Frame, pdu: &R2t) -> Result<Option<Polled>, Violation> {
        // A controller that asks byte by byte must not make us hold a part for each.
        if self.tx.parts() > 8 * self.config.entries + 1024 {
            return Ok(Some(Polled::Waiting));
        }
        let cid = pdu.cccid.get();
        let (offset, length) = (pdu.r2to.get(), pdu.r2tl.get());
        let command = outstanding(&mut self.commands, cid)?;
        let Some(buf) = &command.write else {
            return Err(Violation::UnexpectedData { cid });
        };
        let rest = command.asked..buf.len() as u32;
        expect_range(rest, (offset, Field::R2to), (length, Field::R2tl))?;
        command.asked += length;
        let end = command.asked;
        let (digests, align) = (self.reader.rules().digests, self.controller_alignment);
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
        command.data_end = self.tx.position();
        self.consume(frame);
        Ok(None)
    }

    /// C2HTermReq (TCP 3.6.2.10): the controller reports a violation of this side, and is about to
    /// close.
    fn terminated(&mut self, pdu: &TermReq, now: Nanos, sink: &mut impl HostSink) -> Polled {
        let reason = frame::reason_of(pdu);
        tracing::warn!(%reason, "the controller ended a connection with C2HTermReq");
        self.lifecycle.record_cause(Closed::Protocol(format!(
            "the controller sent C2HTermReq: {reason}"
        )));
        self.tx.clear();
        self.begin_closing(now);
        self.news(sink)
    }

    #[inline]
    fn consume(&mut self, frame: &Frame) {
        self.rx.consume(frame.data_offset as usize);
        self.pdus_received += 1;
    }

    /// Ends the connection after a violation of the controller: sends the cause, and stops reading.
    #[cold]
    pub(super) fn refuse(&mut self, violation: Violation, now: Nanos) {
        let unread = self.rx.unread();
        let hlen = unread
            .get(2)
            .map_or(0, |&hlen| usize::from(hlen))
            .max(CommonHeader::SIZE);
        violation.put(&mut self.tx, Side::Host, &unread[..hlen.min(unread.len())]);
        self.lifecycle
            .record_cause(Closed::Protocol(violation.to_string()));
        self.begin_closing(now);
    }
}

#[inline]
fn outstanding(
    commands: &mut [OutstandingCommand],
    cid: u16,
) -> Result<&mut OutstandingCommand, PduError> {
    match commands.get_mut(usize::from(cid)) {
        Some(command) if command.outstanding => Ok(command),
        _ => Err(PduError::not_in_flight(Field::Cccid, cid)),
    }
}

/// Refuses data that does not begin at the start of `rest`, or exceeds it.
#[inline]
fn expect_range(
    rest: Range<u32>,
    (offset, offset_field): (u32, Field),
    (length, length_field): (u32, Field),
) -> Result<(), Violation> {
    let left = rest.end - rest.start;
    if offset == rest.start && length <= left {
        return Ok(());
    }
    let field = if offset == rest.start {
        length_field
    } else {
        offset_field
    };
    let reason = Reason::UnexpectedRange {
        offset,
        length,
        expected_offset: rest.start,
        expected_length: left,
    };
    let status = FatalErrorStatus::DataOutOfRange;
    Err(Violation::field(field, reason, status))
}

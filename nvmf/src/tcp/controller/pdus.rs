//! Handles each PDU of the host: checks it against the state, then creates an event or closes the
//! connection with an error.

use nacre_hugepages::Buf;
use nacre_nvmf_wire::Fuse;
use nacre_nvmf_wire::sqe::{Sgl, Sqe};
use nacre_nvmf_wire::tcp::{
    CommonHeader, DataPdu, FatalErrorStatus, Field, Frame, IcReq, IcResp, Pdu, PduError, Reason,
    Side, TermReq,
};
use nacre_reactor::Nanos;

use super::{Polled, Receiving, TargetConn, TargetEvent};
use crate::tcp::frame::{self, Violation, is_damaged};
use crate::transport::{Closed, Pools, ReqTag};

/// Most unsent responses of an I/O queue, in multiples of its entries. Beyond it, the connection
/// stops reading.
const UNSENT_QUEUES: usize = 2;
/// Most unsent responses of an admin queue. Each may hold one of the few buffers that all admin
/// queues share.
const UNSENT_ADMIN: usize = 16;

/// `None`: continue. `Some`: the result of [`TargetConn::poll_into`].
type Handled = Result<Option<Polled>, Violation>;

/// The destination of events, which are built in place: returning them by value through the layers
/// costs more than parsing the PDUs.
pub(super) trait TargetSink: FnMut(TargetEvent) {}

impl<F: FnMut(TargetEvent)> TargetSink for F {}

impl TargetConn {
    #[inline]
    pub(super) fn advance(
        &mut self,
        pools: &Pools,
        now: Nanos,
        sink: &mut impl TargetSink,
    ) -> Result<Polled, Violation> {
        loop {
            let handled = if matches!(self.doing, Receiving::Nothing) {
                match self.reader.read(self.rx.unread())? {
                    Some((frame, Pdu::CapsuleCmd(&sqe))) => {
                        self.capsule(&frame, sqe, pools, sink)?
                    }
                    Some((frame, Pdu::H2cData(&pdu))) => self.h2c_data(&frame, &pdu)?,
                    Some((frame, Pdu::IcReq(&pdu))) => self.handshake(&frame, &pdu),
                    Some((_, Pdu::H2cTermReq(&pdu))) => self.terminated(&pdu, now, sink),
                    Some(_) => unreachable!(
                        "the rules let nothing through that a controller does not receive"
                    ),
                    None => Some(Polled::Starved),
                }
            } else {
                self.payload(now, sink)?
            };
            if let Some(poll) = handled {
                return Ok(poll);
            }
        }
    }

    /// ICReq (TCP 3.6.2.2).
    fn handshake(&mut self, frame: &Frame, asked: &IcReq) -> Option<Polled> {
        let digests = asked.digests().and(self.config.allow_digests);
        let answer = IcResp::new(
            self.config.alignment,
            digests,
            self.config.max_h2c_data_bytes,
        );
        frame::put(&mut self.tx, &answer, Default::default());
        self.host_alignment = asked.alignment();
        self.reader.change(|rules| {
            rules.digests = digests;
            rules.initialized = true;
        });
        self.lifecycle.run();
        self.rx.consume(frame.data_offset as usize);
        self.pdus_received += 1;
        self.pdus_sent += 1;
        None
    }

    /// CapsuleCmd (TCP 3.6.2.6).
    #[inline]
    fn capsule(
        &mut self,
        frame: &Frame,
        sqe: Sqe,
        pools: &Pools,
        sink: &mut impl TargetSink,
    ) -> Handled {
        let is_io = self.queue.is_some_and(|queue| queue.qid != 0);
        let unsent = if is_io {
            UNSENT_QUEUES * self.entries + 8
        } else {
            UNSENT_ADMIN
        };
        if self.tx.marks() >= unsent {
            return Ok(Some(Polled::Waiting));
        }
        if self.outstanding >= self.entries {
            return Err(Violation::QueueOverrun {
                entries: self.entries,
            });
        }
        let (header, length) = (frame.data_offset as usize, frame.data_len as usize);
        if length == 0 {
            self.rx.consume(header);
            return self.command(sink, TargetEvent::Capsule { sqe, data: None });
        }
        let Some((offset, meant)) = meant_range(&sqe, frame.data_len) else {
            self.rx.consume(header);
            self.rx.begin_skip(length);
            self.doing = Receiving::SkippedCapsule { sqe };
            return Ok(None);
        };
        let digest = self.reader.rules().digests.data_bytes() as usize;
        let is_here = self.rx.unread().len() >= header + length + digest;
        let in_place = self.in_place && self.rx.may_part();
        if is_here && is_io && in_place && sqe.fuse() == Fuse::Normal {
            return self.capsule_in_place(sqe, (header, length), (offset, meant), sink);
        }
        let buf = if is_io {
            pools.io.acquire(length)
        } else {
            pools.for_admin(length)
        };
        let Some(buf) = buf else {
            assert!(
                length <= pools.io.max_len().max(pools.admin.max_len()),
                "the largest buffer is smaller than the in-capsule data announced"
            );
            return Ok(Some(Polled::Waiting));
        };
        if !is_here {
            self.rx.consume(header);
            self.rx.begin(buf, 0, length);
            self.doing = Receiving::Capsule {
                sqe,
                offset,
                length: meant,
            };
            return Ok(None);
        }
        // All of it is here: no state in between.
        let mut data = buf;
        let bytes = &self.rx.unread()[header..];
        data.bytes_mut()
            .expect("just acquired")
            .copy_from_slice(&bytes[..length]);
        let digest = bytes[length..]
            .first_chunk()
            .filter(|_| digest > 0)
            .map(|bytes| u32::from_le_bytes(*bytes));
        self.rx
            .consume(header + length + self.reader.rules().digests.data_bytes() as usize);
        if is_damaged(&data, digest) {
            return self.command(sink, TargetEvent::CapsuleDamaged { sqe });
        }
        let data = Some(part(data, offset, meant));
        self.command(sink, TargetEvent::Capsule { sqe, data })
    }

    /// A command capsule whose data stays in the receive buffer.
    #[inline]
    fn capsule_in_place(
        &mut self,
        sqe: Sqe,
        (header, length): (usize, usize),
        (offset, meant): (usize, usize),
        sink: &mut impl TargetSink,
    ) -> Handled {
        let mut end = header + length;
        if self.reader.rules().digests.data {
            let bytes = self.rx.unread();
            let digest = bytes[end..].first_chunk().map(|b| u32::from_le_bytes(*b));
            let damaged = is_damaged(&bytes[header..end], digest);
            end += self.reader.rules().digests.data_bytes() as usize;
            if damaged {
                self.rx.consume(end);
                return self.command(sink, TargetEvent::CapsuleDamaged { sqe });
            }
        }
        let data = Some(self.rx.part(header + offset, meant));
        self.rx.consume(end);
        self.command(sink, TargetEvent::Capsule { sqe, data })
    }

    /// H2CData (TCP 3.6.2.8).
    fn h2c_data(&mut self, frame: &Frame, pdu: &DataPdu) -> Handled {
        let (cid, ttag) = (pdu.cccid.get(), pdu.ttag.get());
        let (offset, length) = (pdu.datao.get(), pdu.datal.get());
        let slot = self
            .fetches
            .get_mut(usize::from(ttag))
            .and_then(Option::as_mut);
        let fetch = slot.ok_or_else(|| PduError::not_in_flight(Field::Ttag, ttag))?;
        if cid != fetch.cid {
            let reason = Reason::NotEqual {
                expected: fetch.cid.into(),
                actual: cid.into(),
            };
            return Err(Violation::field(
                Field::Cccid,
                reason,
                FatalErrorStatus::InvalidHeaderField,
            ));
        }
        let left = fetch.asked - fetch.received;
        if offset != fetch.received || length > left {
            let field = if offset != fetch.received {
                Field::Datao
            } else {
                Field::Datal
            };
            let reason = Reason::UnexpectedRange {
                offset,
                length,
                expected_offset: fetch.received,
                expected_length: left,
            };
            return Err(Violation::field(
                field,
                reason,
                FatalErrorStatus::DataOutOfRange,
            ));
        }
        if pdu.is_last() != (length == left) {
            return Err(Violation::LastPdu {
                last: pdu.is_last(),
                left,
            });
        }
        // Only one payload is received at a time, and it gives the buffer back when it ends.
        let mut buf = fetch
            .buf
            .take()
            .ok_or_else(|| PduError::not_in_flight(Field::Ttag, ttag))?;
        if offset == 0 {
            // The buffers of all outstanding R2Ts take turns otherwise, and leave the cache.
            buf.exchange();
        }
        self.rx.consume(frame.data_offset as usize);
        self.rx.begin(buf, offset as usize, length as usize);
        self.doing = Receiving::H2cData { ttag, length };
        Ok(None)
    }

    /// H2CTermReq (TCP 3.6.2.9): the host reports a violation of this side, and is about to close.
    fn terminated(
        &mut self,
        pdu: &TermReq,
        now: Nanos,
        sink: &mut impl TargetSink,
    ) -> Option<Polled> {
        let reason = frame::reason_of(pdu);
        tracing::warn!(%reason, "the host ended a connection with H2CTermReq");
        self.pdus_received += 1;
        self.lifecycle.record_cause(Closed::Protocol(format!(
            "the host sent H2CTermReq: {reason}"
        )));
        self.tx.clear();
        self.begin_closing(now);
        Some(self.news(sink))
    }

    /// Continues with the payload of the current PDU.
    #[inline]
    fn payload(&mut self, now: Nanos, sink: &mut impl TargetSink) -> Handled {
        if !self.rx.advance() {
            return Ok(Some(Polled::Starved));
        }
        let received = if self.reader.rules().digests.data {
            match self.rx.unread().first_chunk() {
                Some(&digest) => Some(u32::from_le_bytes(digest)),
                None => return Ok(Some(Polled::Starved)),
            }
        } else {
            None
        };
        if received.is_some() {
            self.rx.consume(4);
        }
        match std::mem::replace(&mut self.doing, Receiving::Nothing) {
            Receiving::Nothing => Ok(None),
            Receiving::SkippedCapsule { sqe } => {
                self.rx.take_payload();
                self.command(sink, TargetEvent::Capsule { sqe, data: None })
            }
            Receiving::Capsule {
                sqe,
                offset,
                length,
            } => {
                let data = self
                    .rx
                    .take_payload()
                    .expect("a capsule's payload has a buffer");
                if is_damaged(&data, received) {
                    return self.command(sink, TargetEvent::CapsuleDamaged { sqe });
                }
                let data = Some(part(data, offset, length));
                self.command(sink, TargetEvent::Capsule { sqe, data })
            }
            Receiving::H2cData { ttag, length } => {
                let data = self.rx.take_payload().expect("H2CData has a buffer");
                self.pdus_received += 1;
                self.fetch_since = now;
                Ok(self.fetched(ttag, length, data, received, sink))
            }
        }
    }

    #[inline]
    fn command(&mut self, sink: &mut impl TargetSink, event: TargetEvent) -> Handled {
        self.outstanding += 1;
        self.pdus_received += 1;
        sink(event);
        Ok(Some(Polled::Event))
    }

    fn fetched(
        &mut self,
        ttag: u16,
        length: u32,
        data: Buf,
        digest: Option<u32>,
        sink: &mut impl TargetSink,
    ) -> Option<Polled> {
        let slot = self.fetches.get_mut(usize::from(ttag))?;
        let fetch = slot.as_mut()?;
        let from = fetch.received as usize;
        fetch.received += length;
        fetch.damaged |= is_damaged(&data[from..from + length as usize], digest);
        let tag = ReqTag {
            cid: fetch.cid,
            index: ttag,
        };
        if fetch.received == fetch.total {
            let damaged = fetch.damaged;
            self.fetching -= 1;
            self.fetching_bytes -= fetch.total as usize;
            *slot = None;
            sink(if damaged {
                TargetEvent::FetchDamaged { tag }
            } else {
                TargetEvent::Fetched { tag, data }
            });
            return Some(Polled::Event);
        }
        fetch.buf = Some(data);
        if fetch.received == fetch.asked {
            let offset = fetch.asked;
            let length = (fetch.total - offset).min(self.config.r2t_bytes);
            fetch.asked += length;
            self.put_r2t(tag, offset, length);
        }
        None
    }

    /// Ends the connection after a violation of the host: sends the cause, and stops reading.
    #[cold]
    pub(super) fn refuse(&mut self, violation: Violation, now: Nanos) {
        // The header in error is still unread: nothing is consumed before it was found good.
        let unread = self.rx.unread();
        let hlen = unread
            .get(2)
            .map_or(0, |&hlen| usize::from(hlen))
            .max(CommonHeader::SIZE);
        violation.put(
            &mut self.tx,
            Side::Controller,
            &unread[..hlen.min(unread.len())],
        );
        self.pdus_sent += 1;
        self.lifecycle
            .record_cause(Closed::Protocol(violation.to_string()));
        self.begin_closing(now);
    }
}

/// Offset and length of the data that the command's SGL names, if it is within `available` bytes.
#[inline]
fn meant_range(sqe: &Sqe, available: u32) -> Option<(usize, usize)> {
    let Ok(Sgl::InCapsule { offset, length }) = sqe.sgl() else {
        return None;
    };
    let end = offset.checked_add(u64::from(length))?;
    (length > 0 && end <= u64::from(available)).then_some((offset as usize, length as usize))
}

/// The part of a capsule's data that the command names: usually all of it.
#[inline]
fn part(data: Buf, offset: usize, length: usize) -> Buf {
    if offset == 0 && length == data.len() {
        data
    } else {
        data.slice(offset, length)
    }
}

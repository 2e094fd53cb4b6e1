//! Reservation commands of an I/O queue (Base 7.2 to 7.5): one at a time, and each sent at most
//! once. Replicated volumes use them to fence a former holder.
//!
//! Unlike I/O, these commands are not sent again after a lost connection, because the reservation
//! may have changed in between. The caller gets the failure and reads a report first.

use nacre_bdev::Status;
use nacre_bdev::reservation::{ActiveReservation, ReservationReport, ReservationRequest, Reserve};
use nacre_hugepages::{Buf, Pool};
use nacre_nvmf_wire::Sqe;
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, AcquireData, PersistChange, Register, RegisterAction, RegisterData,
    RegistrantExtended, Report, ReportHeader, ReservationType,
};
use nacre_nvmf_wire::identify::namespace::Rescap;
use nacre_reactor::Nanos;
use zerocopy::{FromBytes, IntoBytes};

use super::{IoQueue, QueuePhase, RESERVE};
use crate::host::pending::bdev_status;
use crate::host::queue::Finished;

/// Bytes of a Reservation Report: enough for many more registrants than a volume has.
const REPORT_BYTES: usize = 4096;

/// The reservation type: only registered hosts may write. A host can preempt all other registrants
/// with one command (PRKEY 0). The reservation ends with its last registrant.
const KIND: ReservationType = ReservationType::WriteExclusiveAllRegistrants;

/// A reservation request in progress.
pub(super) struct HostReservation {
    request: Reserve,
    sent: bool,
}

impl HostReservation {
    pub(super) fn is_sent(&self) -> bool {
        self.sent
    }

    /// True when it can be sent in this turn.
    pub(super) fn may_be_sent(&self, live: bool) -> bool {
        !self.sent && live
    }
}

impl IoQueue {
    pub(super) fn take_reserve(&mut self, request: Reserve) -> Result<(), Reserve> {
        if self.reserving.is_some() || self.link.has_failed() {
            return Err(request);
        }
        let sent = false;
        self.reserving = Some(Box::new(HostReservation { request, sent }));
        Ok(())
    }

    /// Sends the request if the queue is live and has a free entry.
    #[cold]
    pub(super) fn send_reserve(&mut self, now: Nanos) {
        let (Some(reserving), Some(queue), QueuePhase::Live) =
            (&mut self.reserving, &mut self.queue, self.phase)
        else {
            return;
        };
        if reserving.sent || queue.room() == 0 {
            return;
        }
        let persists = self.namespace.as_ref().is_some_and(|namespace| {
            Rescap::from_bits_retain(namespace.rescap).contains(Rescap::PERSIST_THROUGH_POWER_LOSS)
        });
        let ask = reserving.request.ask;
        let Some((sqe, data)) = command(ask, self.nsid, persists, &self.pool) else {
            // No buffer: retry in the next turn.
            return;
        };
        let (write, read) = match ask {
            ReservationRequest::Report => (None, Some(data)),
            _ => (Some(data), None),
        };
        queue.submit(sqe, write, read, RESERVE, now);
        reserving.sent = true;
    }

    #[cold]
    pub(super) fn reserved(&mut self, one: Finished) {
        let Some(reserving) = self.reserving.take() else {
            return;
        };
        let Reserve { ask, answer } = reserving.request;
        let status = one.cqe.status();
        let outcome = match (bdev_status(status), ask) {
            (Status::Ok, ReservationRequest::Report) => {
                let data = one.read.as_deref().unwrap_or_default();
                let arrived = data.len().min(one.transferred as usize);
                parse_report(&data[..arrived], &self.options.hostid).ok_or(Status::DeviceError)
            }
            (Status::Ok, _) => Ok(ReservationReport::default()),
            (status, _) => Err(status),
        };
        answer(outcome);
    }

    /// Fails the request, because its connection was lost or cannot be made. `only_sent`: only if
    /// it was sent.
    pub(super) fn end_reserve(&mut self, only_sent: bool) {
        if let Some(reserving) = self.reserving.take_if(|r| r.sent || !only_sent) {
            (reserving.request.answer)(Err(Status::Gone));
        }
    }
}

fn command(ask: ReservationRequest, nsid: u32, persists: bool, pool: &Pool) -> Option<(Sqe, Buf)> {
    let register = |action, current: u64, new: u64| {
        // Persist through power loss, so that the fence survives a restart of the target.
        let persist = match (action, persists) {
            (RegisterAction::Unregister, _) | (_, false) => PersistChange::Keep,
            (_, true) => PersistChange::Set,
        };
        let what = Register {
            action,
            ignore_existing_key: false,
            persist,
        };
        let (crkey, nrkey) = (current.into(), new.into());
        let data = RegisterData { crkey, nrkey };
        small(what.to_sqe(0, nsid), data.as_bytes(), pool)
    };
    let acquire = |action, key: u64| {
        let what = Acquire {
            action,
            ignore_existing_key: false,
            kind: KIND,
        };
        // PRKEY 0 preempts all other registrants.
        let (crkey, prkey) = (key.into(), 0.into());
        let data = AcquireData { crkey, prkey };
        small(what.to_sqe(0, nsid), data.as_bytes(), pool)
    };
    match ask {
        ReservationRequest::Report => {
            let report = Report {
                bytes: REPORT_BYTES as u64,
                extended: true,
            };
            Some((report.to_sqe(0, nsid), pool.acquire(REPORT_BYTES)?))
        }
        ReservationRequest::Register { current: None, key } => {
            register(RegisterAction::Register, 0, key)
        }
        ReservationRequest::Register {
            current: Some(current),
            key,
        } => register(RegisterAction::Replace, current, key),
        ReservationRequest::Unregister { key } => register(RegisterAction::Unregister, key, 0),
        ReservationRequest::Acquire { key } => acquire(AcquireAction::Acquire, key),
        ReservationRequest::Preempt { key } => acquire(AcquireAction::PreemptAndAbort, key),
    }
}

fn small(sqe: Sqe, bytes: &[u8], pool: &Pool) -> Option<(Sqe, Buf)> {
    let mut buf = pool.acquire(bytes.len())?;
    buf.bytes_mut()?.copy_from_slice(bytes);
    Some((sqe, buf))
}

/// Parses a report. `None`: it is too short, or has more registrants than the buffer.
fn parse_report(data: &[u8], host: &[u8; 16]) -> Option<ReservationReport> {
    let (header, _) = ReportHeader::ref_from_prefix(data).ok()?;
    let entries = data.get(ReportHeader::EXTENDED_SIZE..).unwrap_or_default();
    let held = match ReservationType::from_u8(header.rtype) {
        None if header.rtype == 0 => ActiveReservation::NotReserved,
        Some(kind) if kind == KIND => ActiveReservation::AllRegistrants,
        _ => ActiveReservation::Other(header.rtype),
    };
    let mut found = ReservationReport {
        held,
        ..ReservationReport::default()
    };
    for at in 0..usize::from(header.regctl.get()) {
        let entry = entries.get(at * RegistrantExtended::SIZE..)?;
        let (entry, _) = RegistrantExtended::ref_from_prefix(entry).ok()?;
        if entry.hostid == *host {
            found.own = Some(entry.rkey.get())
        } else {
            found.others.push(entry.rkey.get())
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use nacre_hugepages::ClassSpec;

    use super::*;

    fn report(rtype: u8, registrants: &[([u8; 16], u64)]) -> Vec<u8> {
        let header = ReportHeader {
            generation: 7.into(),
            rtype,
            regctl: (registrants.len() as u16).into(),
            reserved7: [0; 2],
            ptpls: 0,
            reserved10: [0; 14],
        };
        let mut data = header.as_bytes().to_vec();
        data.resize(ReportHeader::EXTENDED_SIZE, 0);
        for (hostid, key) in registrants {
            let entry = RegistrantExtended {
                cntlid: 0xffff.into(),
                rcsts: 1,
                reserved3: [0; 5],
                rkey: (*key).into(),
                hostid: *hostid,
                reserved32: [0; 32],
            };
            data.extend(entry.as_bytes());
        }
        data
    }

    /// A host is identified by its whole identifier, and a short report is refused.
    #[test]
    fn reports() {
        let (me, other) = ([1; 16], [2; 16]);
        let mut near = me;
        near[15] = 9;
        let all = report(5, &[(other, 8), (me, 7), (near, 9)]);
        let expected = ReservationReport {
            own: Some(7),
            others: vec![8, 9],
            held: ActiveReservation::AllRegistrants,
        };
        assert_eq!(parse_report(&all, &me), Some(expected));
        let short = &all[..all.len() - 1];
        assert_eq!(parse_report(short, &me), None, "the last one is cut off");
        assert_eq!(parse_report(&all[..23], &me), None);
        assert_eq!(
            parse_report(&report(0, &[]), &me),
            Some(ReservationReport::default())
        );
        let held = |rtype| parse_report(&report(rtype, &[]), &me).map(|s| s.held);
        assert_eq!(held(1), Some(ActiveReservation::Other(1)));
        assert_eq!(held(77), Some(ActiveReservation::Other(77)));
    }

    /// Each request, as the bytes that a target sees.
    #[test]
    fn commands() {
        let pool = Pool::heap(&[ClassSpec {
            size: 4096,
            count: 4,
        }]);
        let made = |ask, persists| {
            let (sqe, data) = command(ask, 3, persists, &pool).expect("a buffer");
            (sqe.opcode, sqe.cdw10.get(), data.to_vec())
        };
        let keys = |a: u64, b: u64| [a.to_le_bytes(), b.to_le_bytes()].concat();
        let first = ReservationRequest::Register {
            current: None,
            key: 5,
        };
        assert_eq!(made(first, true), (0x0d, 3 << 30, keys(0, 5)));
        let again = ReservationRequest::Register {
            current: Some(4),
            key: 5,
        };
        assert_eq!(made(again, false), (0x0d, 2, keys(4, 5)));
        let gone = ReservationRequest::Unregister { key: 5 };
        assert_eq!(made(gone, true), (0x0d, 1, keys(5, 0)));
        assert_eq!(
            made(ReservationRequest::Acquire { key: 5 }, true),
            (0x11, 5 << 8, keys(5, 0))
        );
        let all = ReservationRequest::Preempt { key: 5 };
        assert_eq!(made(all, true), (0x11, 5 << 8 | 2, keys(5, 0)));
        let (opcode, dwords, data) = made(ReservationRequest::Report, true);
        assert_eq!((opcode, dwords, data.len()), (0x0e, 1023, 4096));
    }
}

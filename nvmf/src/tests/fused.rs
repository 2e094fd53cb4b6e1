//! Tests of fused commands whose halves fail separately: each command is completed once, and the
//! next command is not taken for a half.

use nacre_nvmf_wire::commands::admin::Abort;
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};

use super::rig::*;
use crate::transport::{ConnId, Event};

const COMPARE: u16 = 1;
const WRITE: u16 = 2;

fn rw(op: u8, cid: u16, lba: u64) -> Sqe {
    ReadWrite::new(lba, 1)
        .to_sqe(op, cid, 1)
        .with_sgl(Sgl::Transport { length: BLOCK })
}

fn first(cid: u16, lba: u64) -> Sqe {
    let mut sqe = rw(opcode::COMPARE, cid, lba);
    sqe.set_fuse(Fuse::First);
    sqe
}

fn second(cid: u16, lba: u64) -> Sqe {
    let mut sqe = rw(opcode::WRITE, cid, lba);
    sqe.set_fuse(Fuse::Second);
    sqe
}

/// A pair on its way whose data the target has asked for.
fn pair() -> (Rig, ConnId) {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    rig.send(io, first(COMPARE, 0), None);
    rig.send(io, second(WRITE, 0), None);
    rig.turn();
    (rig, io)
}

/// The completed commands, by command identifier.
fn statuses(rig: &mut Rig) -> Vec<(u16, StatusCode)> {
    let mut answers = rig.statuses();
    answers.sort_by_key(|(cid, _)| *cid);
    answers
}

/// A pair goes through as if nothing had been before.
fn assert_works(rig: &mut Rig, io: ConnId) {
    rig.send(io, first(11, 7), None);
    rig.send(io, second(12, 7), None);
    rig.turn();
    rig.deliver(&[0; BLOCK as usize]);
    (0..3).for_each(|_| rig.turn());
    let ok = StatusCode::SUCCESS;
    assert_eq!(statuses(rig), [(11, ok), (12, ok)]);
}

/// Goal: the damaged half fails with that error, the other one is aborted, whichever it is and
/// whether it has its data.
#[test]
fn a_damaged_half_ends_both() {
    for (damaged, arrives_first) in [
        (COMPARE, true),
        (COMPARE, false),
        (WRITE, true),
        (WRITE, false),
    ] {
        let (mut rig, io) = pair();
        let mut fetches: Vec<_> = rig.wire.borrow_mut().fetches.drain(..).collect();
        fetches.sort_by_key(|(_, tag, _)| (tag.cid == damaged) != arrives_first);
        for (conn, tag, data) in fetches {
            rig.event(if tag.cid == damaged {
                Event::FetchDamaged { conn, tag }
            } else {
                Event::Fetched { conn, tag, data }
            });
            rig.turn();
        }
        let of = |cid| {
            if cid == damaged {
                (cid, StatusCode::TRANSIENT_TRANSPORT_ERROR)
            } else {
                (cid, StatusCode::ABORTED_FAILED_FUSED)
            }
        };
        assert_eq!(statuses(&mut rig), [of(COMPARE), of(WRITE)]);
        assert_works(&mut rig, io);
    }
}

/// Goal: if a first half is refused once it is in the table, neither its second half nor another
/// command in its place waits for it.
#[test]
fn a_refused_first_half_is_forgotten() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let length = BLOCK;
    let not_there = first(COMPARE, 0).with_sgl(Sgl::InCapsule { offset: 0, length });
    let refused = (COMPARE, StatusCode::SGL_OFFSET_INVALID.with_dnr());
    for (next, expected) in [
        (second(WRITE, 0), StatusCode::ABORTED_FAILED_FUSED),
        (
            Sqe::for_namespace(opcode::FLUSH, WRITE, 1),
            StatusCode::SUCCESS,
        ),
        (first(WRITE, 0), StatusCode::ABORTED_MISSING_FUSED),
    ] {
        rig.send(io, not_there, None);
        rig.send(io, next, None);
        (0..3).for_each(|_| rig.turn());
        if next.fuse() == Fuse::First {
            // It waits for its own second half, which does not come.
            assert_eq!(statuses(&mut rig), [refused]);
            rig.deliver(&[0; BLOCK as usize]);
            rig.send(io, Sqe::for_namespace(opcode::FLUSH, 3, 1), None);
            (0..3).for_each(|_| rig.turn());
            assert_eq!(
                statuses(&mut rig),
                [(WRITE, expected), (3, StatusCode::SUCCESS)]
            );
        } else {
            assert_eq!(statuses(&mut rig), [refused, (WRITE, expected)]);
        }
    }
    assert_works(&mut rig, io);
}

/// Goal: only Compare and Write make a pair; a Flush of all namespaces is no half of one either.
#[test]
fn other_commands_are_no_halves() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    for fuse in [Fuse::First, Fuse::Reserved] {
        let mut flush = Sqe::for_namespace(opcode::FLUSH, 5, u32::MAX);
        flush.set_fuse(fuse);
        let status = rig.status(io, flush, &[]);
        assert_eq!(status, StatusCode::INVALID_FIELD.with_dnr(), "{fuse:?}");
    }
    assert_works(&mut rig, io);
}

/// Goal: a half can be aborted while it waits for the other or for its data; the other half goes
/// with it.
#[test]
fn a_half_can_be_aborted() {
    let mut rig = Rig::with_malloc();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let abort = |cid| {
        let what = Abort { sqid: 1, cid };
        what.to_sqe(77)
    };
    // It has its data and waits for the other half.
    rig.send(io, first(COMPARE, 0), None);
    rig.turn();
    rig.deliver(&[0; BLOCK as usize]);
    rig.turn();
    rig.send(admin, abort(COMPARE), None);
    rig.turn();
    let aborted = (COMPARE, StatusCode::ABORT_REQUESTED);
    assert_eq!(statuses(&mut rig), [aborted, (77, StatusCode::SUCCESS)]);
    rig.send(io, second(WRITE, 0), None);
    rig.turn();
    assert_eq!(
        statuses(&mut rig),
        [(WRITE, StatusCode::ABORTED_FAILED_FUSED)]
    );

    // Both wait for their data.
    rig.send(io, first(COMPARE, 0), None);
    rig.send(io, second(WRITE, 0), None);
    rig.turn();
    rig.send(admin, abort(WRITE), None);
    rig.turn();
    rig.deliver(&[0; BLOCK as usize]);
    (0..2).for_each(|_| rig.turn());
    let expected = [
        (COMPARE, StatusCode::ABORTED_FAILED_FUSED),
        (WRITE, StatusCode::ABORT_REQUESTED),
        (77, StatusCode::SUCCESS),
    ];
    assert_eq!(statuses(&mut rig), expected);
    assert_works(&mut rig, io);
}

/// Goal: a half is refused before it has a place in the table (its capsule was damaged or its
/// identifier is taken): the other half, whichever it is, does not wait for it. Nor does a second
/// half wait when a damaged command precedes it.
#[test]
fn a_half_that_never_got_in_ends_both() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let damaged = |conn, sqe| Event::CapsuleDamaged { conn, sqe };
    let transient = StatusCode::TRANSIENT_TRANSPORT_ERROR;
    let ended = |rig: &mut Rig| {
        rig.turn();
        rig.deliver(&[0; BLOCK as usize]);
        (0..2).for_each(|_| rig.turn());
        statuses(rig)
    };

    rig.send(io, first(COMPARE, 0), None);
    rig.event(damaged(io, second(WRITE, 0)));
    let failed = (COMPARE, StatusCode::ABORTED_FAILED_FUSED);
    assert_eq!(ended(&mut rig), [failed, (WRITE, transient)]);

    rig.event(damaged(io, first(COMPARE, 0)));
    rig.send(io, second(WRITE, 0), None);
    let failed = (WRITE, StatusCode::ABORTED_FAILED_FUSED);
    assert_eq!(ended(&mut rig), [(COMPARE, transient), failed]);

    rig.send(io, first(COMPARE, 0), None);
    rig.event(damaged(io, rw(opcode::WRITE, 3, 0)));
    let alone = (COMPARE, StatusCode::ABORTED_MISSING_FUSED);
    assert_eq!(ended(&mut rig), [alone, (3, transient)]);

    rig.send(io, rw(opcode::WRITE, WRITE, 9), None);
    rig.send(io, first(COMPARE, 0), None);
    rig.send(io, second(WRITE, 0), None);
    let mut answers = ended(&mut rig);
    answers.sort_by_key(|(_, status)| status.field());
    let expected = [
        (WRITE, StatusCode::SUCCESS),
        (WRITE, StatusCode::COMMAND_ID_CONFLICT),
        (COMPARE, StatusCode::ABORTED_FAILED_FUSED),
    ];
    assert_eq!(answers, expected);
    assert_works(&mut rig, io);
}

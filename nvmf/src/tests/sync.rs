//! Tests of the fast path: commands on devices that complete an I/O inside `submit`.

use std::sync::Arc;

use nacre_bdev::{Bdev, Status};
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};

use super::rig::*;
use super::scripted::ScriptedBdev;
use crate::subsystems::TargetConfig;
use crate::transport::{ConnId, Response};

const BYTES: u32 = 4096;

fn in_capsule(cid: u16) -> Sqe {
    ReadWrite::new(8, BYTES / BLOCK)
        .to_sqe(opcode::WRITE, cid, 1)
        .with_sgl(Sgl::InCapsule {
            offset: 0,
            length: BYTES,
        })
}

fn fetched(cid: u16) -> Sqe {
    in_capsule(cid).with_sgl(Sgl::Transport { length: BYTES })
}

/// A device that executes every I/O synchronously, and a queue that has used it.
fn rig() -> (Rig, Arc<ScriptedBdev>, ConnId) {
    let mut rig = Rig::new(TargetConfig::default());
    let scripted = ScriptedBdev::new();
    scripted.script(|state| {
        state.limits.is_sync = true;
        state.prompt = true;
    });
    rig.add_namespace(Arc::clone(&scripted) as Arc<dyn Bdev>);
    let io = rig.io();
    // The first command is what opens the device.
    assert_eq!(write(&mut rig, io, 1), [(1, StatusCode::SUCCESS)]);
    scripted.script(|state| assert_eq!(state.sync_runs, 0));
    (rig, scripted, io)
}

fn write(rig: &mut Rig, io: ConnId, cid: u16) -> Vec<(u16, StatusCode)> {
    let data = rig.pools.io.acquire(BYTES as usize);
    rig.send(io, in_capsule(cid), data);
    rig.turn();
    rig.statuses()
}

/// Fast commands are completed in the turn of their arrival, without a place in the table. They are
/// counted, keep the controller alive, and are logged when they fail, as all others. The device is
/// still polled once, for its other work.
#[test]
fn answered_as_they_come() {
    let (mut rig, scripted, io) = rig();
    let free = rig.pools.io.stats()[0].free;
    let polls = scripted.state.lock().polls;
    for cid in 2..10 {
        rig.send(io, in_capsule(cid), rig.pools.io.acquire(BYTES as usize));
    }
    rig.turn();
    let all: Vec<u16> = rig.statuses().iter().map(|(cid, _)| *cid).collect();
    assert_eq!(all, (2..10).collect::<Vec<_>>());
    scripted.script(|state| assert_eq!((state.sync_runs, state.polls), (8, polls + 1)));
    assert_eq!(rig.pools.io.stats()[0].free, free, "their buffers are free");

    scripted.script(|state| state.status = Status::WriteError);
    assert_eq!(write(&mut rig, io, 10), [(10, StatusCode::WRITE_FAULT)]);
    scripted.script(|state| assert_eq!(state.sync_runs, 9));
    let qp = rig.group.queues.iter().find(|qp| qp.qid == 1);
    let qp = qp.expect("the I/O queue");
    assert_eq!(qp.requests.outstanding(), 0);
    let totals = qp.stats.totals().write;
    assert_eq!((totals.operations, totals.errors), (10, 1));
    assert_eq!(totals.bytes, 9 * u64::from(BYTES));
    let (errors, _) = qp.association.as_ref().expect("connected").errors();
    assert_eq!((errors[0].cid, errors[0].lba), (10, 8));
}

fn read(cid: u16) -> Sqe {
    ReadWrite::new(8, BYTES / BLOCK)
        .to_sqe(opcode::READ, cid, 1)
        .with_sgl(Sgl::Transport { length: BYTES })
}

fn answer(rig: &Rig) -> Response {
    let answered = rig.wire.borrow_mut().responses.pop_front();
    answered.expect("answered").1
}

/// A read over a transport that cannot send the device's memory has a buffer of the pool, and no
/// place in the table. A failed read returns its buffer immediately. Without a free buffer the read
/// waits, behind earlier commands.
#[test]
fn reads_into_a_buffer() {
    let (mut rig, scripted, io) = rig();
    let free = |rig: &Rig| rig.pools.io.stats()[0].free;
    let all = free(&rig);
    rig.send(io, read(2), None);
    rig.turn();
    let response = answer(&rig);
    assert_eq!(response.cqe.status(), StatusCode::SUCCESS);
    assert!(response.data.as_slice()[0][..] == [0x5a; BYTES as usize]);
    assert_eq!(response.data.as_slice().len(), 1);
    assert!(response.zero_copy.is_none());
    scripted.script(|state| assert_eq!(state.sync_runs, 1));
    assert_eq!(free(&rig), all - 1);
    drop(response);
    assert_eq!(free(&rig), all);

    scripted.script(|state| state.status = Status::ReadError);
    rig.send(io, read(3), None);
    rig.turn();
    let response = answer(&rig);
    assert_eq!(response.cqe.status(), StatusCode::UNRECOVERED_READ_ERROR);
    assert_eq!((response.data.as_slice().len(), free(&rig)), (0, all));

    scripted.script(|state| state.status = Status::Ok);
    let mut taken = Vec::new();
    while let Some(buf) = rig.pools.io.acquire(BYTES as usize) {
        taken.push(buf);
    }
    rig.send(io, read(4), None);
    rig.send(io, read(5), None);
    rig.turn();
    assert_eq!(rig.statuses(), []);
    // The second goes no other way now, lest it overtake the first.
    drop(taken.pop());
    let mut answered = Vec::new();
    for _ in 0..8 {
        rig.turn();
        answered.extend(rig.statuses());
    }
    let success = StatusCode::SUCCESS;
    assert_eq!(answered, [(4, success), (5, success)]);
    scripted.script(|state| assert_eq!(state.sync_runs, 2));

    // A device that cannot execute the read synchronously gets it through its queue, with one
    // buffer.
    drop(taken);
    scripted.script(|state| (state.prompt, state.held) = (false, true));
    rig.send(io, read(6), None);
    rig.turn();
    assert_eq!(free(&rig), all - 1);
    scripted.script(|state| state.held = false);
    rig.turn();
    assert_eq!(rig.statuses(), [(6, StatusCode::SUCCESS)]);
    assert_eq!(free(&rig), all);
}

/// Commands that the synchronous path does not support take the path with a request: an identifier
/// in use, halves of a fused pair, a device that cannot execute synchronously, a device with
/// waiting commands, invalid commands.
#[test]
fn unsupported_commands_leave_the_synchronous_path() {
    let (mut rig, scripted, io) = rig();
    let at_once = |scripted: &ScriptedBdev| scripted.state.lock().sync_runs;
    rig.send(io, fetched(2), None);
    rig.turn();
    assert_eq!(rig.wire.borrow().fetches.len(), 1);
    let conflict = StatusCode::COMMAND_ID_CONFLICT;
    assert_eq!(write(&mut rig, io, 2), [(2, conflict)]);
    assert_eq!(at_once(&scripted), 0);
    assert_eq!(write(&mut rig, io, 3), [(3, StatusCode::SUCCESS)]);
    assert_eq!(at_once(&scripted), 1, "another is none of its business");
    rig.deliver(&[0; BYTES as usize]);
    rig.turn();
    assert_eq!(rig.statuses(), [(2, StatusCode::SUCCESS)]);

    let mut second = in_capsule(4);
    second.set_fuse(nacre_nvmf_wire::Fuse::Second);
    rig.send(io, second, rig.pools.io.acquire(BYTES as usize));
    rig.turn();
    let alone = StatusCode::ABORTED_MISSING_FUSED;
    assert_eq!(rig.statuses(), [(4, alone)]);

    let mut beyond = in_capsule(5);
    beyond.cdw10 = 4096.into();
    rig.send(io, beyond, rig.pools.io.acquire(BYTES as usize));
    rig.turn();
    let outside = StatusCode::LBA_OUT_OF_RANGE.with_dnr();
    assert_eq!(rig.statuses(), [(5, outside)]);

    scripted.script(|state| (state.prompt, state.held) = (false, true));
    assert_eq!(write(&mut rig, io, 6), []);
    scripted.script(|state| state.held = false);
    rig.turn();
    assert_eq!(rig.statuses(), [(6, StatusCode::SUCCESS)]);
    assert_eq!(at_once(&scripted), 1);
    rig.hang_up(io);
}

//! Tests of the lists of waiting commands: their order and their bounds, when commands are aborted
//! or their queues end.

use nacre_hugepages::Buf;
use nacre_nvmf_wire::commands::admin::Abort;
use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};

use super::rig::*;
use super::scripted::{add_scripted, rig_scripted};
use crate::transport::ConnId;

const ABORT: u16 = 1000;

fn read(cid: u16) -> Sqe {
    ReadWrite::new(0, 1)
        .to_sqe(opcode::READ, cid, 1)
        .with_sgl(Sgl::Transport { length: BLOCK })
}

fn flush(cid: u16, nsid: u32) -> Sqe {
    Sqe::for_namespace(opcode::FLUSH, cid, nsid)
}

/// All buffers that a read could have.
fn hoard(rig: &Rig) -> Vec<Buf> {
    let classes = [MAX_TRANSFER as usize, 4096];
    let all = classes.map(|bytes| std::iter::from_fn(move || rig.pools.io.acquire(bytes)));
    all.into_iter().flatten().collect()
}

/// Sends a command that has to wait, and gives it up.
fn give_up(rig: &mut Rig, admin: ConnId, io: ConnId, sqe: Sqe) {
    rig.send(io, sqe, None);
    rig.turn();
    let abort = Abort {
        sqid: 1,
        cid: sqe.cid(),
    };
    rig.send(admin, abort.to_sqe(ABORT), None);
    rig.turn();
    rig.turn();
    let mut answers = rig.statuses();
    answers.sort_by_key(|(cid, _)| *cid);
    let aborted = (sqe.cid(), StatusCode::ABORT_REQUESTED);
    assert_eq!(answers, [aborted, (ABORT, StatusCode::SUCCESS)]);
}

/// Goal: a host that gives commands up and sends others, while there is no buffer or no room in the
/// device, or that leaves and comes again, does not make the lists grow.
#[test]
fn waiting_lists_do_not_grow_beyond_the_waiting_commands() {
    let (mut rig, scripted) = rig_scripted();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let held = hoard(&rig);
    // Something that goes on waiting, so that the list is never empty.
    rig.send(io, read(1), None);
    rig.turn();
    for _ in 0..500 {
        give_up(&mut rig, admin, io, read(2));
    }
    assert!(
        rig.group.core.buffers.waiting.len() <= 64,
        "{}",
        rig.group.core.buffers.waiting.len()
    );
    for _ in 0..50 {
        let (admin, cntlid) = rig.admin();
        let other = rig.io_queue(cntlid, 1);
        for cid in 1..15 {
            rig.send(other, read(cid), None);
        }
        rig.turn();
        rig.hang_up(other);
        rig.hang_up(admin);
        rig.turn();
    }
    assert!(
        rig.group.core.buffers.waiting.len() <= 64,
        "{}",
        rig.group.core.buffers.waiting.len()
    );
    drop(held);
    (0..3).for_each(|_| rig.turn());
    assert_eq!(rig.statuses(), [(1, StatusCode::SUCCESS)]);
    assert!(rig.group.core.buffers.waiting.is_empty());

    scripted.script(|state| state.full = true);
    rig.send(io, flush(1, 1), None);
    rig.turn();
    for _ in 0..500 {
        give_up(&mut rig, admin, io, flush(2, 1));
    }
    let waiting = rig.group.core.devices.all_waiting();
    assert!(waiting <= 256, "{waiting}");
    scripted.script(|state| state.full = false);
    (0..3).for_each(|_| rig.turn());
    assert_eq!(rig.statuses(), [(1, StatusCode::SUCCESS)]);
    assert_eq!(rig.group.core.devices.all_waiting(), 0);
}

/// Goal: a command does not get the turn of one that was given up and had its place in the table.
#[test]
fn in_the_order_in_which_they_came() {
    let mut rig = Rig::with_malloc();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    let mut held = hoard(&rig);
    for cid in 1..=3 {
        rig.send(io, read(cid), None);
    }
    rig.turn();
    let abort = Abort { sqid: 1, cid: 2 };
    rig.send(admin, abort.to_sqe(ABORT), None);
    rig.turn();
    rig.statuses();
    rig.send(io, read(4), None);
    rig.turn();
    // One at a time.
    let mut order = Vec::new();
    for _ in 0..3 {
        held.pop();
        (0..2).for_each(|_| rig.turn());
        let wire = std::rc::Rc::clone(&rig.wire);
        for (_, response) in wire.borrow_mut().responses.drain(..) {
            order.push(response.cqe.cid());
            held.extend(response.data.iter().cloned());
        }
    }
    assert_eq!(order, [1, 3, 4]);
}

/// Goal: a command that continues from one device to the next does not hold up those that wait for
/// the first, and goes to the end of the queue of the second.
#[test]
fn from_one_device_to_the_next() {
    let (mut rig, first) = rig_scripted();
    let second = add_scripted(&rig, 2);
    let io = rig.io();
    for scripted in [&first, &second] {
        scripted.script(|state| (state.full, state.held) = (true, true));
    }
    rig.send(io, flush(1, u32::MAX), None);
    rig.send(io, flush(2, 1), None);
    rig.send(io, flush(3, 2), None);
    rig.turn();
    first.script(|state| state.full = false);
    rig.turn();
    let taken = first.state.lock().submitted;
    assert_eq!(taken, 2, "both, in one turn");
    let waiting = rig.group.core.devices.all_waiting();
    assert_eq!(waiting, 2, "for the second");
    first.script(|state| state.held = false);
    second.script(|state| (state.full, state.held) = (false, false));
    (0..4).for_each(|_| rig.turn());
    let mut answers = rig.statuses();
    answers.sort_by_key(|(cid, _)| *cid);
    let ok = StatusCode::SUCCESS;
    assert_eq!(answers, [(1, ok), (2, ok), (3, ok)]);
}

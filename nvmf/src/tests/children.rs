//! Tests of commands with several device I/Os, and their status when a namespace is added or
//! removed meanwhile.

use std::sync::Arc;

use nacre_nvmf_wire::commands::io::CopyRange0;
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};
use zerocopy::IntoBytes;

use super::rig::*;
use super::scripted::{ScriptedBdev, add_scripted, rig_scripted};
use crate::subsystems::TargetConfig;

const FLUSH: u16 = 900;

fn remove(rig: &Rig, nsid: u32) {
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    subsystem.remove_namespace(nsid).unwrap();
}

/// Goal: a Flush of all namespaces flushes each of them once, whatever comes and goes before and
/// behind its position. Method: more namespaces than are flushed at a time, on devices that hold
/// their I/O.
#[test]
fn flush_of_all_while_namespaces_come_and_go() {
    let mut rig = Rig::new(TargetConfig::default());
    let mut disks: Vec<(u32, Arc<ScriptedBdev>)> = Vec::new();
    for nsid in 2..=20 {
        disks.push((nsid, add_scripted(&rig, nsid)));
    }
    let io = rig.io();
    for (_, disk) in &disks {
        disk.script(|state| state.held = true);
    }
    rig.send(io, Sqe::for_namespace(opcode::FLUSH, FLUSH, u32::MAX), None);
    rig.turn();
    disks.push((1, add_scripted(&rig, 1)));
    remove(&rig, 12);
    rig.pass(std::time::Duration::from_millis(200));
    for (_, disk) in &disks {
        disk.script(|state| state.held = false);
    }
    (0..20).for_each(|_| rig.turn());
    assert_eq!(rig.statuses(), [(FLUSH, StatusCode::SUCCESS)]);
    for (nsid, disk) in &disks {
        let expected = match nsid {
            // It was not there when the command came, and has no writes from before it.
            1 | 12 => 0,
            _ => 1,
        };
        assert_eq!(disk.state.lock().flushes, expected, "namespace {nsid}");
    }
}

/// Goal: a failed Copy names the lowest range that was not copied, not the last one.
#[test]
fn copy_names_the_range_that_failed() {
    let (mut rig, scripted) = rig_scripted();
    let io = rig.io();
    let ranges = [0u64, 100, 200].map(|from| CopyRange0::new(from, 4));
    let copy = copy_of(1000, 3);
    for (at, bad) in [0, 100, 200].into_iter().enumerate() {
        scripted.script(|state| state.bad = Some(bad));
        let sqe = copy.to_sqe(5, 1).with_sgl(Sgl::Transport { length: 96 });
        let cqe = rig.call(io, sqe, ranges.as_bytes()).cqe;
        assert_eq!(cqe.status().code(), StatusCode::UNRECOVERED_READ_ERROR);
        assert_eq!(cqe.dword0(), at as u32);
    }
    // A range that was never submitted was not copied either.
    scripted.script(|state| (state.held, state.full) = (false, true));
    let sqe = copy.to_sqe(6, 1).with_sgl(Sgl::Transport { length: 96 });
    rig.send(io, sqe, None);
    rig.turn();
    rig.deliver(ranges.as_bytes());
    rig.turn();
    remove(&rig, 1);
    rig.pass(std::time::Duration::from_millis(200));
    scripted.script(|state| state.full = false);
    rig.pass(std::time::Duration::from_millis(200));
    let cqe = rig.answer().cqe;
    assert_eq!(
        cqe.status(),
        StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr()
    );
    assert_eq!(cqe.dword0(), 0);
}

/// Goal: a command that waits for room in a device is completed though its namespace goes
/// meanwhile; the device is closed then.
#[test]
fn a_wait_for_room_outlives_the_namespace() {
    let (mut rig, scripted) = rig_scripted();
    let io = rig.io();
    scripted.script(|state| state.full = true);
    rig.send(io, Sqe::for_namespace(opcode::FLUSH, FLUSH, 1), None);
    rig.turn();
    remove(&rig, 1);
    rig.pass(std::time::Duration::from_millis(200));
    (0..3).for_each(|_| rig.turn());
    let gone = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    assert_eq!(rig.statuses(), [(FLUSH, gone)]);
    rig.pass(std::time::Duration::from_millis(200));
    assert_eq!(rig.group.devices_open(), 0);
}

/// Goal: I/O that hangs in a device can be given up though its namespace is gone: its host can
/// connect again.
#[test]
fn hanging_io_ends_after_its_namespace() {
    let (mut rig, scripted) = rig_scripted();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    scripted.script(|state| (state.held, state.aborts) = (true, true));
    rig.send(io, Sqe::for_namespace(opcode::FLUSH, FLUSH, 1), None);
    rig.turn();
    remove(&rig, 1);
    rig.pass(std::time::Duration::from_millis(200));
    assert!(rig.wire.borrow().responses.is_empty(), "it hangs");
    rig.hang_up(io);
    rig.hang_up(admin);
    rig.assert_clean();
    assert_eq!(rig.group.devices_open(), 0);
}

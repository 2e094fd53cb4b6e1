//! Tests of a namespace that is removed while its commands wait, and whose NSID is reused: its
//! commands never reach the new namespace.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::commands::io::{
    CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::commands::reservation::{
    PersistChange, Register, RegisterAction, RegisterData,
};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use zerocopy::IntoBytes;

use super::rig::*;
use super::scripted::{ScriptedBdev, add_scripted, rig_scripted};

const GONE: StatusCode = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
const CID: u16 = 900;

fn rw(op: u8, cid: u16) -> Sqe {
    ReadWrite::new(8, 1)
        .to_sqe(op, cid, 1)
        .with_sgl(Sgl::Transport { length: BLOCK })
}

fn remove(rig: &Rig) {
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    subsystem.remove_namespace(1).unwrap();
}

/// Namespace 1 is another one from here on, and every queue knows it.
fn replace(rig: &mut Rig) -> Arc<ScriptedBdev> {
    remove(rig);
    let after = add_scripted(rig, 1);
    rig.pass(Duration::from_millis(200));
    after
}

fn taken(scripted: &ScriptedBdev) -> u32 {
    scripted.state.lock().submitted
}

/// The host's data for a write to a removed namespace is not written to the namespace that has its
/// id, though it would fit.
#[test]
fn data_that_comes_late() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    for cid in [CID, CID + 1] {
        rig.send(io, rw(opcode::WRITE, cid), None);
        rig.turn();
        remove(&rig);
        rig.add_namespace(ram());
        if cid == CID {
            // Either way the queue learns of it: by the next command, or by the upkeep.
            assert_eq!(
                rig.status(io, rw(opcode::READ, 1), &[]),
                StatusCode::SUCCESS
            );
        } else {
            rig.pass(Duration::from_millis(200));
        }
        rig.deliver(&[0x77; BLOCK as usize]);
        rig.turn();
        assert_eq!(rig.statuses(), [(cid, GONE)]);
        let read = rig.call(io, rw(opcode::READ, 2), &[]);
        let data: Vec<u8> = read.data.iter().flat_map(|part| part.to_vec()).collect();
        assert_eq!(data, [0; BLOCK as usize], "nothing was written");
    }
    assert_eq!(
        rig.status(io, rw(opcode::WRITE, 3), &[1; 512]),
        StatusCode::SUCCESS
    );
}

/// Commands of several device I/Os end where they are, and so do those that wait for room.
#[test]
fn children_that_are_left() {
    let ranges: Vec<DsmRange> = (0..20).map(|i| DsmRange::new(16 + 2 * i, 1)).collect();
    let deallocate = DatasetManagement {
        ranges: 20,
        deallocate: true,
        ..Default::default()
    };
    let sources: Vec<CopyRange0> = (0..12).map(|i| CopyRange0::new(2 * i, 1)).collect();
    let zeroes = WriteZeroes {
        slba: 8,
        blocks: 8,
        ..WriteZeroes::default()
    };
    let data = |sqe: Sqe, length: u32| sqe.with_sgl(Sgl::Transport { length });
    let cases = [
        (data(deallocate.to_sqe(CID, 1), 320), ranges.as_bytes()),
        (
            data(copy_of(1000, 12).to_sqe(CID, 1), 384),
            sources.as_bytes(),
        ),
        (zeroes.to_sqe(CID, 1), &[]),
        (Sqe::for_namespace(opcode::FLUSH, CID, 1), &[]),
    ];
    for (sqe, bytes) in cases {
        for full in [false, true] {
            let (mut rig, before) = rig_scripted();
            let io = rig.io();
            before.script(|state| (state.held, state.full) = (true, full));
            rig.send(io, sqe, None);
            rig.turn();
            if !bytes.is_empty() {
                rig.deliver(bytes);
                rig.turn();
            }
            let begun = taken(&before);
            assert_eq!(begun == 0, full);
            let after = replace(&mut rig);
            before.script(|state| (state.held, state.full) = (false, false));
            (0..4).for_each(|_| rig.turn());
            rig.pass(Duration::from_millis(200));
            let all = begun == 1;
            let expected = if all { StatusCode::SUCCESS } else { GONE };
            assert_eq!(rig.statuses(), [(CID, expected)], "{sqe:?} full {full}");
            assert_eq!(taken(&before), begun, "no more of it is begun");
            assert_eq!(taken(&after), 0, "{sqe:?}");
            assert_eq!(rig.group.devices_open(), 0, "nobody uses either");
        }
    }
}

/// The halves of a pair are for one namespace, or there is no pair.
#[test]
fn halves_of_a_pair() {
    let mut first = rw(opcode::COMPARE, CID);
    first.set_fuse(Fuse::First);
    let mut second = rw(opcode::WRITE, CID + 1);
    second.set_fuse(Fuse::Second);
    let (mut rig, before) = rig_scripted();
    let io = rig.io();
    rig.send(io, first, None);
    rig.turn();
    let after = replace(&mut rig);
    rig.send(io, second, None);
    rig.turn();
    rig.deliver(&[0; BLOCK as usize]);
    (0..3).for_each(|_| rig.turn());
    let mut answers = rig.statuses();
    answers.sort_by_key(|(cid, _)| *cid);
    assert_eq!(answers.len(), 2);
    assert!(answers.iter().all(|(_, status)| !status.is_success()));
    assert_eq!((taken(&before), taken(&after)), (0, 0));

    // Both are here, and wait for their data.
    rig.send(io, first, None);
    rig.send(io, second, None);
    rig.turn();
    let last = replace(&mut rig);
    rig.deliver(&[0; BLOCK as usize]);
    (0..3).for_each(|_| rig.turn());
    let mut answers = rig.statuses();
    answers.sort_by_key(|(cid, _)| *cid);
    let expected = [(CID, GONE), (CID + 1, StatusCode::ABORTED_FAILED_FUSED)];
    assert_eq!(answers, expected);
    assert_eq!((taken(&after), taken(&last)), (0, 0));
}

/// A host that registers with a namespace is not registered with another one.
#[test]
fn reservations() {
    let (mut rig, _) = rig_scripted();
    let io = rig.io();
    let register = Register {
        action: RegisterAction::Register,
        ignore_existing_key: false,
        persist: PersistChange::Keep,
    };
    let data = RegisterData {
        crkey: 0.into(),
        nrkey: 7.into(),
    };
    let sqe = register.to_sqe(CID, 1);
    rig.send(io, sqe.with_sgl(Sgl::Transport { length: 16 }), None);
    rig.turn();
    replace(&mut rig);
    rig.deliver(data.as_bytes());
    rig.turn();
    assert_eq!(rig.statuses(), [(CID, GONE)]);
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    let state = subsystem.namespaces()[0].namespace.reservation.state();
    assert!(state.expect("known").registrants.is_empty());
}

//! Tests that the announced limits are enforced: each limit is read from Identify, then used in
//! full, then exceeded by one.

use nacre_nvmf_wire::commands::io::{
    CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::features::fid;
use nacre_nvmf_wire::identify::{NvmController, cns};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sgl, StatusCode};
use zerocopy::IntoBytes;

use super::host::INVALID;
use super::rig::*;
use super::scripted::rig_scripted;
use crate::subsystems::{QueueLimits, TargetConfig};
use crate::transport::{ConnId, TransportType};

/// A rig with small and odd limits, its admin queue and an I/O queue.
fn rig() -> (Rig, ConnId, ConnId) {
    let mut rig = Rig::new(TargetConfig {
        dsm_ranges: 3,
        copy_ranges: 2,
        copy_blocks: 8,
        write_zeroes_bytes: 3 * 4096 + 1,
        verify_bytes: 100_000,
        ..TargetConfig::default()
    });
    rig.add_namespace(ram());
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    (rig, admin, io)
}

#[test]
fn transfer_size() {
    let (mut rig, admin, io) = rig();
    let bytes = rig
        .identify_controller(admin)
        .max_transfer_bytes(4096)
        .unwrap();
    assert_eq!(bytes, u64::from(MAX_TRANSFER));
    let most = bytes as u32 / BLOCK;
    for (blocks, expected) in [(most, StatusCode::SUCCESS), (most + 1, INVALID)] {
        let sgl = Sgl::Transport {
            length: blocks * BLOCK,
        };
        for op in [opcode::READ, opcode::WRITE, opcode::COMPARE] {
            let cid = rig.cid();
            let sqe = ReadWrite::new(0, blocks).to_sqe(op, cid, 1).with_sgl(sgl);
            let zeroes = vec![0; (blocks * BLOCK) as usize];
            assert_eq!(
                rig.status(io, sqe, &zeroes),
                expected,
                "{op:#x} of {blocks} blocks"
            );
        }
    }
}

#[test]
fn write_zeroes_and_verify_sizes() {
    let (mut rig, admin, io) = rig();
    let id: NvmController = rig.identify(admin, cns::IO_CONTROLLER, 0).unwrap();
    assert_eq!((id.wzsl, id.vsl), (1, 4), "rounded down to powers of two");
    let most = (4096 << id.wzsl) / BLOCK;
    for (blocks, expected) in [(most, StatusCode::SUCCESS), (most + 1, INVALID)] {
        let zeroes = WriteZeroes {
            slba: 0,
            blocks,
            ..WriteZeroes::default()
        };
        let cid = rig.cid();
        assert_eq!(
            rig.status(io, zeroes.to_sqe(cid, 1), &[]),
            expected,
            "{blocks} blocks"
        );
    }
    let most = (4096 << id.vsl) / BLOCK;
    for (blocks, expected) in [(most, StatusCode::SUCCESS), (most + 1, INVALID)] {
        let cid = rig.cid();
        let verify = ReadWrite::new(0, blocks).to_sqe(opcode::VERIFY, cid, 1);
        assert_eq!(rig.status(io, verify, &[]), expected, "{blocks} blocks");
    }
}

#[test]
fn dataset_management_ranges() {
    let (mut rig, admin, io) = rig();
    let id: NvmController = rig.identify(admin, cns::IO_CONTROLLER, 0).unwrap();
    let most = u16::from(id.dmrl);
    assert_eq!((most, id.dmrsl.get(), id.dmsl.get()), (3, 0, 0));
    let too_many = StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr();
    for (ranges, expected) in [(most, StatusCode::SUCCESS), (most + 1, too_many)] {
        let dsm = DatasetManagement {
            ranges,
            deallocate: true,
            ..Default::default()
        };
        let data = vec![DsmRange::new(0, 8); usize::from(ranges)];
        let cid = rig.cid();
        let length = data.as_bytes().len() as u32;
        let sqe = dsm.to_sqe(cid, 1).with_sgl(Sgl::Transport { length });
        assert_eq!(
            rig.status(io, sqe, data.as_bytes()),
            expected,
            "{ranges} ranges"
        );
    }
}

#[test]
fn copy_sizes() {
    let (mut rig, admin, io) = rig();
    let id = rig.identify_namespace(admin, 1);
    let (ranges, blocks) = (id.msrc + 1, id.mssrl.get());
    assert_eq!((ranges, blocks, id.mcl.get()), (2, 8, 8));
    let too_much = StatusCode::COMMAND_SIZE_LIMIT_EXCEEDED.with_dnr();
    let (one, half) = (u32::from(blocks), u32::from(blocks / 2));
    for (sources, expected) in [
        (vec![one], StatusCode::SUCCESS),
        (vec![one + 1], too_much),
        (vec![half, half], StatusCode::SUCCESS),
        (vec![half, half + 1], too_much),
        (vec![1, 1, 1], too_much),
    ] {
        let copy = copy_of(1000, sources.len() as u16);
        let data: Vec<CopyRange0> = sources.iter().map(|n| CopyRange0::new(100, *n)).collect();
        let length = data.as_bytes().len() as u32;
        let cid = rig.cid();
        let sqe = copy.to_sqe(cid, 1).with_sgl(Sgl::Transport { length });
        assert_eq!(
            rig.status(io, sqe, data.as_bytes()),
            expected,
            "{sources:?}"
        );
    }
    let ocfs = rig.identify_controller(admin).ocfs.get();
    assert_eq!(ocfs, 1, "format 0h alone");
}

/// Goal: each namespace reports the most blocks of a fused pair, and accepts as many; the
/// controller reports the limit of all of them. Method: the layer's emulation, and devices with
/// limits of their own.
#[test]
fn compare_and_write_size() {
    let (mut rig, admin, io) = rig();
    assert_eq!(rig.identify_namespace(admin, 1).nacwu.get(), 127);
    compare_and_write(&mut rig, admin, io, 128);
    for own in [1, 2, 64] {
        let (mut rig, scripted) = rig_scripted();
        scripted.script(|state| state.limits.compare_and_write_blocks = own);
        let (admin, cntlid) = rig.admin();
        let io = rig.io_queue(cntlid, 1);
        compare_and_write(&mut rig, admin, io, own);
    }
}

fn compare_and_write(rig: &mut Rig, admin: ConnId, io: ConnId, most: u32) {
    let id = rig.identify_controller(admin);
    assert_eq!((id.fuses.get(), id.acwu.get()), (1, 0));
    let namespace = rig.identify_namespace(admin, 1);
    assert_eq!(namespace.compare_and_write_blocks(id.acwu.get()), most);
    let too_large = StatusCode::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr();
    for (blocks, expected) in [(most, StatusCode::SUCCESS), (most + 1, too_large)] {
        let sgl = Sgl::Transport {
            length: blocks * BLOCK,
        };
        let half = |op, fuse, cid| {
            let mut sqe = ReadWrite::new(0, blocks).to_sqe(op, cid, 1).with_sgl(sgl);
            sqe.set_fuse(fuse);
            sqe
        };
        let (a, b) = (rig.cid(), rig.cid());
        rig.send(io, half(opcode::COMPARE, Fuse::First, a), None);
        rig.send(io, half(opcode::WRITE, Fuse::Second, b), None);
        for _ in 0..4 {
            rig.turn();
            rig.deliver(&vec![0; (blocks * BLOCK) as usize]);
        }
        rig.turn();
        let answers = rig.answers();
        assert_eq!(answers.len(), 2);
        assert_eq!(answers[0].status(), expected, "{blocks} blocks");
    }
}

/// Goal: the host gets as many queues as it asked for, or as there are, and not one more.
#[test]
fn number_of_queues() {
    for (asked, granted) in [(1u32, 1u16), (3, 3), (500, 4)] {
        let mut rig = Rig::new(TargetConfig {
            queue_limits: QueueLimits {
                max_io_queues: 4,
                ..QueueLimits::default()
            },
            ..TargetConfig::default()
        });
        rig.add_namespace(ram());
        let (admin, cntlid) = rig.admin();
        let answer = rig.set_feature(
            admin,
            fid::NUMBER_OF_QUEUES,
            (asked - 1) << 16 | (asked - 1),
        );
        assert_eq!(
            answer,
            Ok(u32::from(granted - 1) << 16 | u32::from(granted - 1))
        );
        rig.io_queue(cntlid, granted);
        let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, granted + 1, cntlid, 16);
        assert_eq!(cqe.status().code(), StatusCode::CONNECT_INVALID_PARAMETERS);
    }
}

/// Goal: a transport with more I/O queues than the target's own number, or with fewer, has as many
/// as its controllers announce: a host that was granted a number and is refused one of them gives
/// the whole connection up.
#[test]
fn number_of_queues_of_a_transport() {
    for announced in [2u16, 6] {
        let mut rig = Rig::new(TargetConfig {
            queue_limits: QueueLimits {
                max_io_queues: 4,
                ..QueueLimits::default()
            },
            ..TargetConfig::default()
        });
        rig.add_namespace(ram());
        let kind = TransportType::Loopback;
        let limits = QueueLimits {
            max_io_queues: announced,
            ..rig.target.queue_limits(kind)
        };
        rig.target.set_queue_limits(kind, limits);
        let (admin, cntlid) = rig.admin();
        let refused = |rig: &mut Rig| {
            let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, announced + 1, cntlid, 16);
            cqe.status().code()
        };
        // A host that asks for no number has all of them.
        assert_eq!(refused(&mut rig), StatusCode::CONNECT_INVALID_PARAMETERS);
        let most = u32::from(announced - 1) << 16 | u32::from(announced - 1);
        let granted = rig.set_feature(admin, fid::NUMBER_OF_QUEUES, 99 << 16 | 99);
        assert_eq!(granted, Ok(most));
        for qid in 1..=announced {
            rig.io_queue(cntlid, qid);
        }
        assert_eq!(refused(&mut rig), StatusCode::CONNECT_INVALID_PARAMETERS);
    }
}

/// Goal: MAXCMD and MQES agree, and are what Connect takes.
#[test]
fn queue_entries() {
    let (mut rig, admin, _) = rig();
    let id = rig.identify_controller(admin);
    let entries = id.maxcmd.get();
    let cntlid = id.cntlid.get();
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 2, cntlid, entries);
    assert!(cqe.status().is_success());
    let (_, cqe) = rig.connect_as(HOSTNQN, SUBNQN, 3, cntlid, entries + 1);
    assert_eq!(cqe.status().code(), StatusCode::CONNECT_INVALID_PARAMETERS);
}

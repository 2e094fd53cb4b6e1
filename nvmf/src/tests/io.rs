//! Tests of I/O commands through the whole target to a RAM disk, and of their failures.

use nacre_nvmf_wire::commands::io as commands;
use nacre_nvmf_wire::commands::io::{
    CopyRange0, DatasetManagement, DsmRange, ReadWrite, WriteZeroes,
};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::{Fuse, Sgl, Sqe, StatusCode};
use zerocopy::IntoBytes;

use super::rig::*;
use crate::transport::ConnId;

fn rw(op: u8, cid: u16, lba: u64, blocks: u32) -> Sqe {
    ReadWrite::new(lba, blocks)
        .to_sqe(op, cid, 1)
        .with_sgl(Sgl::Transport {
            length: blocks * BLOCK,
        })
}

fn pattern(blocks: u32, seed: u8) -> Vec<u8> {
    (0..blocks * BLOCK)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 9) as u8)
        .collect()
}

fn write(rig: &mut Rig, io: ConnId, lba: u64, data: &[u8]) {
    let cid = rig.cid();
    let sqe = rw(opcode::WRITE, cid, lba, data.len() as u32 / BLOCK);
    let status = rig.status(io, sqe, data);
    assert!(status.is_success(), "{status}");
}

fn read(rig: &mut Rig, io: ConnId, lba: u64, blocks: u32) -> Vec<u8> {
    let cid = rig.cid();
    let response = rig.call(io, rw(opcode::READ, cid, lba, blocks), &[]);
    assert!(
        response.cqe.status().is_success(),
        "{}",
        response.cqe.status()
    );
    response
        .data
        .iter()
        .flat_map(|part| part.to_vec())
        .collect()
}

#[test]
fn reads_return_the_written_data() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    for (lba, blocks) in [(0, 1), (7, 8), (100, 256), (BLOCKS - 1, 1)] {
        let data = pattern(blocks, lba as u8);
        write(&mut rig, io, lba, &data);
        assert_eq!(read(&mut rig, io, lba, blocks), data);
    }
}

/// Goal: in-capsule data is used as it came, without asking the host for it.
#[test]
fn in_capsule_write() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let data = pattern(2, 5);
    let mut buf = rig.pools.io.acquire(data.len()).unwrap();
    buf.bytes_mut().unwrap().copy_from_slice(&data);
    let sgl = Sgl::InCapsule {
        offset: 0,
        length: data.len() as u32,
    };
    let sqe = rw(opcode::WRITE, 77, 3, 2).with_sgl(sgl);
    rig.send(io, sqe, Some(buf));
    rig.turn();
    assert!(rig.wire.borrow().fetches.is_empty());
    assert!(rig.answer().cqe.status().is_success());
    assert_eq!(read(&mut rig, io, 3, 2), data);
    // An in-capsule SGL whose capsule did not hold the data.
    rig.send(io, sqe, None);
    rig.turn();
    assert_eq!(
        rig.answer().cqe.status(),
        StatusCode::SGL_OFFSET_INVALID.with_dnr()
    );
}

#[test]
fn bad_commands_are_refused_by_reason() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let cases: Vec<(&str, Sqe, StatusCode)> = vec![
        (
            "past the end",
            rw(opcode::READ, 1, BLOCKS - 1, 2),
            StatusCode::LBA_OUT_OF_RANGE,
        ),
        (
            "lba overflow",
            rw(opcode::WRITE, 2, u64::MAX, 2),
            StatusCode::LBA_OUT_OF_RANGE,
        ),
        (
            "above MDTS",
            rw(opcode::READ, 3, 0, 257),
            StatusCode::INVALID_FIELD,
        ),
        (
            "short SGL",
            rw(opcode::READ, 4, 0, 2).with_sgl(Sgl::Transport { length: 512 }),
            StatusCode::DATA_SGL_LENGTH_INVALID,
        ),
        (
            "in-capsule SGL for a read",
            rw(opcode::READ, 5, 0, 1).with_sgl(Sgl::InCapsule {
                offset: 0,
                length: 512,
            }),
            StatusCode::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
        (
            "keyed SGL where none are announced",
            rw(opcode::READ, 5, 0, 1).with_sgl(Sgl::Keyed {
                address: 4096,
                length: 512,
                key: 1,
                invalidate: false,
            }),
            StatusCode::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
        (
            "descriptors in the capsule where none are announced",
            rw(opcode::READ, 5, 0, 1).with_sgl(Sgl::InCapsuleDescriptors {
                offset: 0,
                length: 16,
            }),
            StatusCode::SGL_DESCRIPTOR_TYPE_INVALID,
        ),
        (
            "no such namespace",
            Sqe::for_namespace(opcode::FLUSH, 6, 2),
            StatusCode::INVALID_NAMESPACE_OR_FORMAT,
        ),
        (
            "no such opcode",
            Sqe::for_namespace(0x55, 7, 1),
            StatusCode::INVALID_OPCODE,
        ),
    ];
    for (what, sqe, expected) in cases {
        let status = rig.status(io, sqe, &[]);
        assert_eq!(status, expected.with_dnr(), "{what}");
    }
}

/// Goal: PRINFO, the storage tag check and the tags are ignored, as no namespace has protection
/// information.
#[test]
fn protection_fields_are_ignored() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let data = pattern(1, 9);
    write(&mut rig, io, 5, &data);
    for field in 0..32 {
        let protection = commands::Protection {
            action: field & 1 != 0,
            check: field >> 1 & 0b111,
            storage_tag: field & 0x10 != 0,
            reference_tag: u32::from(field) << 8,
            application_tag: field.into(),
            application_tag_mask: field.into(),
        };
        let rw = ReadWrite {
            protection,
            ..ReadWrite::new(5, 1)
        };
        let sgl = Sgl::Transport { length: BLOCK };
        for op in [opcode::WRITE, opcode::READ, opcode::COMPARE, opcode::VERIFY] {
            let sqe = rw.to_sqe(op, rig.cid(), 1);
            let (sqe, sent) = match op {
                opcode::VERIFY => (sqe, &[][..]),
                opcode::READ => (sqe.with_sgl(sgl), &[][..]),
                _ => (sqe.with_sgl(sgl), &data[..]),
            };
            let status = rig.status(io, sqe, sent);
            assert!(status.is_success(), "{op:#x} with {field:#x}: {status}");
        }
        let zeroes = WriteZeroes {
            slba: 8,
            blocks: 1,
            protection,
            ..WriteZeroes::default()
        };
        let cid = rig.cid();
        assert!(rig.status(io, zeroes.to_sqe(cid, 1), &[]).is_success());
        let copy = commands::CopyCommand {
            protection,
            read_protection: field & 0xf,
            ..copy_of(20, 1)
        };
        let range = CopyRange0::new(5, 1);
        let length = range.as_bytes().len() as u32;
        let sqe = copy.to_sqe(rig.cid(), 1);
        let sqe = sqe.with_sgl(Sgl::Transport { length });
        assert!(rig.status(io, sqe, range.as_bytes()).is_success());
        assert_eq!(read(&mut rig, io, 20, 1), data);
    }
}

/// Goal: with no buffer free, commands wait in order and none fails.
#[test]
fn no_buffers_is_back_pressure() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let held: Vec<_> = std::iter::from_fn(|| rig.pools.io.acquire(4096)).collect();
    for cid in 100..110 {
        rig.send(io, rw(opcode::READ, cid, 0, 1), None);
    }
    rig.turn();
    assert!(rig.answers().is_empty());
    drop(held);
    rig.turn();
    let mut order: Vec<u16> = rig.answers().iter().map(|c| c.cid()).collect();
    for _ in 0..10 {
        rig.turn();
        order.extend(rig.answers().iter().map(|c| c.cid()));
    }
    assert_eq!(order, (100..110).collect::<Vec<_>>());
}

#[test]
fn duplicate_command_ids_conflict() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    rig.send(io, rw(opcode::WRITE, 5, 0, 1), None);
    rig.send(io, rw(opcode::READ, 5, 0, 1), None);
    rig.turn();
    assert_eq!(rig.answer().cqe.status(), StatusCode::COMMAND_ID_CONFLICT);
    rig.deliver(&pattern(1, 0));
    rig.turn();
    assert!(rig.answer().cqe.status().is_success());
}

/// Goal: a host with more commands outstanding than its queue has entries loses that connection.
#[test]
fn overrun_costs_the_connection() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    for cid in 0..17 {
        rig.send(io, rw(opcode::WRITE, cid, 0, 1), None);
    }
    rig.turn();
    rig.turn();
    assert_eq!(rig.group.queue_pairs(), 1, "the admin queue stays");
}

#[test]
fn leaving_in_the_middle_returns_everything() {
    let mut rig = Rig::with_malloc();
    let (admin, cntlid) = rig.admin();
    let io = rig.io_queue(cntlid, 1);
    for cid in 0..8 {
        rig.send(io, rw(opcode::WRITE, cid, 0, 1), None);
    }
    rig.turn();
    rig.hang_up(io);
    rig.hang_up(admin);
    rig.wire.borrow_mut().fetches.clear();
    rig.assert_clean();
}

#[test]
fn write_zeroes_and_deallocate() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    write(&mut rig, io, 0, &pattern(64, 1));
    let zeroes = WriteZeroes {
        slba: 8,
        blocks: 8,
        ..WriteZeroes::default()
    };
    assert!(rig.status(io, zeroes.to_sqe(900, 1), &[]).is_success());
    assert_eq!(read(&mut rig, io, 8, 8), vec![0; 8 * BLOCK as usize]);

    let ranges: Vec<DsmRange> = (0..20).map(|i| DsmRange::new(16 + 2 * i, 1)).collect();
    let dsm = DatasetManagement {
        ranges: 20,
        deallocate: true,
        ..Default::default()
    };
    let sqe = dsm.to_sqe(901, 1).with_sgl(Sgl::Transport { length: 320 });
    assert!(rig.status(io, sqe, ranges.as_bytes()).is_success());
    for i in 0..20 {
        assert_eq!(read(&mut rig, io, 16 + 2 * i, 1), vec![0; 512], "range {i}");
        assert_ne!(
            read(&mut rig, io, 17 + 2 * i, 1),
            vec![0; 512],
            "between ranges"
        );
    }
    let outside = [DsmRange::new(0, 1), DsmRange::new(BLOCKS, 1)];
    let dsm = DatasetManagement {
        ranges: 2,
        deallocate: true,
        ..Default::default()
    };
    let sqe = dsm.to_sqe(902, 1).with_sgl(Sgl::Transport { length: 32 });
    assert_eq!(
        rig.status(io, sqe, outside.as_bytes()),
        StatusCode::LBA_OUT_OF_RANGE.with_dnr()
    );
    assert_eq!(
        read(&mut rig, io, 0, 1),
        pattern(64, 1)[..512],
        "nothing of it was done"
    );
}

#[test]
fn copy_gathers_ranges() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let data = pattern(32, 9);
    write(&mut rig, io, 0, &data);
    let ranges = [
        CopyRange0::new(4, 2),
        CopyRange0::new(20, 1),
        CopyRange0::new(10, 5),
    ];
    let copy = copy_of(1000, 3);
    let sqe = copy.to_sqe(50, 1).with_sgl(Sgl::Transport { length: 96 });
    let status = rig.status(io, sqe, ranges.as_bytes());
    assert!(status.is_success(), "{status}");
    let b = BLOCK as usize;
    let expected = [
        &data[4 * b..6 * b],
        &data[20 * b..21 * b],
        &data[10 * b..15 * b],
    ]
    .concat();
    assert_eq!(read(&mut rig, io, 1000, 8), expected);
    let onto_itself = commands::CopyCommand { sdlba: 21, ..copy };
    let sqe = onto_itself
        .to_sqe(51, 1)
        .with_sgl(Sgl::Transport { length: 96 });
    let sources = [
        CopyRange0::new(4, 2),
        CopyRange0::new(20, 1),
        CopyRange0::new(23, 5),
    ];
    let status = rig.status(io, sqe, sources.as_bytes());
    assert_eq!(status, StatusCode::OVERLAPPING_IO_RANGE.with_dnr());
}

#[test]
fn compare_verify_and_flush() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let data = pattern(8, 3);
    write(&mut rig, io, 0, &data);
    assert!(
        rig.status(io, rw(opcode::COMPARE, 60, 0, 8), &data)
            .is_success()
    );
    let status = rig.status(io, rw(opcode::COMPARE, 61, 8, 8), &data);
    assert_eq!(status.code(), StatusCode::COMPARE_FAILURE);
    let verify = ReadWrite::new(0, 2048).to_sqe(opcode::VERIFY, 62, 1);
    assert!(rig.status(io, verify, &[]).is_success());
    for nsid in [1, u32::MAX] {
        let cid = rig.cid();
        assert!(
            rig.status(io, Sqe::for_namespace(opcode::FLUSH, cid, nsid), &[])
                .is_success()
        );
    }
}

/// A verify of an unreadable block has the status of a read, whether the device or the layer does
/// it.
#[test]
fn verify_meets_a_bad_block() {
    use nacre_bdev::fault::{self, Action, Fault};
    use nacre_bdev::{Op, registry::Registry};
    let registry = Registry::new();
    let base = ram();
    let base_name = base.name().to_owned();
    registry.register(base).unwrap();
    let config = fault::Config {
        base_name,
        uuid: None,
    };
    let device = fault::create(config, &registry).unwrap();
    let failing = Fault {
        range: Some((100, 1)),
        ..Fault::new(Action::FailMedium).on(&[Op::Verify])
    };
    device.inject(failing).unwrap();
    let mut rig = Rig::with_bdev(device);
    let io = rig.io();
    for (lba, blocks, expected) in [
        (0, 100, StatusCode::SUCCESS),
        (90, 20, StatusCode::UNRECOVERED_READ_ERROR),
        (101, 1947, StatusCode::SUCCESS),
    ] {
        let cid = rig.cid();
        let verify = ReadWrite::new(lba, blocks).to_sqe(opcode::VERIFY, cid, 1);
        assert_eq!(rig.status(io, verify, &[]).code(), expected, "{lba}");
    }
}

/// Sends a fused pair; the target fetches both halves' data.
fn fused(rig: &mut Rig, io: ConnId, lba: u64, expected: &[u8], new: &[u8]) -> Vec<StatusCode> {
    let (a, b) = (rig.cid(), rig.cid());
    let mut first = rw(opcode::COMPARE, a, lba, expected.len() as u32 / BLOCK);
    let mut second = rw(opcode::WRITE, b, lba, new.len() as u32 / BLOCK);
    first.set_fuse(Fuse::First);
    second.set_fuse(Fuse::Second);
    rig.send(io, first, None);
    rig.send(io, second, None);
    rig.turn();
    let fetches: Vec<_> = rig.wire.borrow_mut().fetches.drain(..).collect();
    assert_eq!(fetches.len(), 2);
    // The write's data arrives first: order must not matter.
    for (conn, tag, mut buf) in fetches.into_iter().rev() {
        let data = if tag.cid == a { expected } else { new };
        buf.bytes_mut().unwrap().copy_from_slice(data);
        rig.fetched(conn, tag, buf);
        rig.turn();
    }
    rig.turn();
    let answers = rig.answers();
    assert_eq!(answers.iter().map(|c| c.cid()).collect::<Vec<_>>(), [a, b]);
    answers.iter().map(|c| c.status()).collect()
}

#[test]
fn fused_compare_and_write() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let (old, new) = (pattern(1, 1), pattern(1, 2));
    write(&mut rig, io, 5, &old);
    let both = fused(&mut rig, io, 5, &old, &new);
    assert!(both.iter().all(|s| s.is_success()), "{both:?}");
    assert_eq!(read(&mut rig, io, 5, 1), new);
    let both = fused(&mut rig, io, 5, &old, &old);
    assert_eq!(both[0].code(), StatusCode::COMPARE_FAILURE);
    assert_eq!(both[1].code(), StatusCode::ABORTED_FAILED_FUSED);
    assert_eq!(read(&mut rig, io, 5, 1), new);
}

#[test]
fn half_a_fused_pair_is_aborted() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    let mut first = rw(opcode::COMPARE, 1, 0, 1);
    first.set_fuse(Fuse::First);
    rig.send(io, first, None);
    rig.send(io, Sqe::for_namespace(opcode::FLUSH, 2, 1), None);
    rig.turn();
    rig.deliver(&pattern(1, 0));
    rig.turn();
    rig.turn();
    let mut answers: Vec<_> = rig
        .answers()
        .iter()
        .map(|c| (c.cid(), c.status()))
        .collect();
    answers.sort_by_key(|a| a.0);
    assert_eq!(answers[0], (1, StatusCode::ABORTED_MISSING_FUSED));
    assert!(answers[1].1.is_success());

    let mut second = rw(opcode::WRITE, 3, 0, 1);
    second.set_fuse(Fuse::Second);
    let status = rig.status(io, second, &[]);
    assert_eq!(status, StatusCode::ABORTED_MISSING_FUSED);
}

/// Goal: a namespace that goes while I/O queues live is refused cleanly and its bdev closed.
#[test]
fn namespace_removed_and_added_live() {
    let mut rig = Rig::with_malloc();
    let io = rig.io();
    write(&mut rig, io, 0, &pattern(1, 4));
    let subsystem = rig.target.subsystem(&nqn(SUBNQN)).unwrap();
    subsystem.remove_namespace(1).unwrap();
    let cid = rig.cid();
    let status = rig.status(io, rw(opcode::READ, cid, 0, 1), &[]);
    assert_eq!(status, StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
    assert!(rig.group.devices_open() == 0, "the bdev is still open");
    rig.add_namespace(ram());
    assert_eq!(read(&mut rig, io, 0, 1), vec![0; 512]);
}

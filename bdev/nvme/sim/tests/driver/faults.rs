//! Tests of failed commands, and of the statuses that the layers above return for them.

use std::time::Duration;

use nacre_bdev::injection::Injection;
use nacre_bdev::{Flags, Op, Queue, Status};
use nacre_bdev_nvme::DriveOptions;
use nacre_bdev_nvme_sim::{Action, Config, Pace, Rule, Target};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::opcode::io;

use super::rig::Rig;

/// Goal: each NVMe status maps to the bdev status of the same meaning. A status with Do Not Retry
/// is not retried.
#[test]
fn statuses() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    for (op, status, expected) in [
        (
            Op::Read,
            StatusCode::UNRECOVERED_READ_ERROR,
            Status::ReadError,
        ),
        (Op::Write, StatusCode::WRITE_FAULT, Status::WriteError),
        (Op::Write, StatusCode::LBA_OUT_OF_RANGE, Status::OutOfRange),
        (Op::Write, StatusCode::CAPACITY_EXCEEDED, Status::NoSpace),
        (
            Op::Write,
            StatusCode::NAMESPACE_IS_WRITE_PROTECTED,
            Status::WriteProtected,
        ),
        (Op::Read, StatusCode::GUARD_CHECK_ERROR, Status::Integrity),
    ] {
        let opcode = match op {
            Op::Read => io::READ,
            _ => io::WRITE,
        };
        let before = rig.drive.stats().io[usize::from(opcode)];
        let action = Action::Status(status.with_dnr());
        rig.drive.inject(Rule::next(Target::IoOp(opcode), action));
        let io = match op {
            Op::Read => rig.read(0, 1),
            _ => rig.write(0, 1, 1),
        };
        assert_eq!(rig.status(&mut *queue, io), expected, "{status}");
        let tries = rig.drive.stats().io[usize::from(opcode)] - before;
        assert_eq!(tries, 1, "{status}");
    }
    rig.end(&controller, queue);
}

/// Goal: a command with a retryable status is sent again, up to the limit.
#[test]
fn retries() {
    let mut rig = Rig::new(Config::default());
    let options = DriveOptions {
        retry_limit: 3,
        ..DriveOptions::new("nvme0")
    };
    let (controller, _bdev, mut queue) = rig.one(options);
    let interrupted = Action::Status(StatusCode::COMMAND_INTERRUPTED.with_crd(1));
    let target = Target::IoOp(io::READ);
    rig.drive.inject(Rule::next(target, interrupted).times(2));
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Ok);
    assert_eq!(rig.drive.stats().io[usize::from(io::READ)], 3);
    assert_eq!(controller.status().resubmitted, 2);
    rig.drive.inject(Rule::always(target, interrupted));
    let read = rig.read(0, 1);
    let status = rig.status(&mut *queue, read);
    assert!(!status.is_ok());
    assert_eq!(rig.drive.stats().io[usize::from(io::READ)], 3 + 4);
    rig.drive.heal();
    rig.end(&controller, queue);
}

/// Goal: error injection fails the given number of commands of an opcode, after their execution or
/// in place of it, and nothing of it stays.
#[test]
fn injected_errors() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let queue_ref = &mut *queue;
    let fault = Injection {
        sct: StatusCode::WRITE_FAULT.sct(),
        sc: StatusCode::WRITE_FAULT.sc(),
        count: 2,
        unsent: None,
    };
    controller.inject_io(io::WRITE, Some(fault));
    for (value, expected) in [
        (1, Status::WriteError),
        (2, Status::WriteError),
        (3, Status::Ok),
    ] {
        let write = rig.write(0, 1, value);
        assert_eq!(rig.status(queue_ref, write), expected);
        assert_eq!(rig.values(queue_ref, 0, 1), [value], "it was executed");
    }
    let delay = Duration::from_millis(20);
    let unsent = Injection {
        count: 1,
        unsent: Some(delay),
        ..fault
    };
    controller.inject_io(io::WRITE, Some(unsent));
    let (sent, begun) = (rig.drive.stats().io, rig.core.clock().now());
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(queue_ref, write), Status::WriteError);
    assert!(rig.core.clock().now().since(begun) >= delay);
    assert_eq!(rig.drive.stats().io, sent);
    assert_eq!(rig.values(queue_ref, 0, 1), [3]);
    controller.inject_io(io::WRITE, None);
    let write = rig.write(0, 1, 4);
    assert_eq!(rig.status(queue_ref, write), Status::Ok);

    // A queue that is closed does not wait for its commands.
    let long = Injection {
        unsent: Some(Duration::from_secs(3600)),
        ..unsent
    };
    controller.inject_io(io::READ, Some(long));
    let read = rig.read(0, 1);
    rig.submit(queue_ref, read);
    rig.turn(queue_ref);
    assert_eq!(queue_ref.inflight(), 1);
    rig.end(&controller, queue);
}

/// Goal: every operation, FUA and flush included, has its effect on the medium, and compare finds
/// differences.
#[test]
fn operations() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let queue_ref = &mut *queue;
    let write = rig.write(0, 8, 1);
    assert_eq!(rig.status(queue_ref, write), Status::Ok);
    assert_eq!(rig.drive.dirty_blocks(), 8);
    let fua = rig.write(0, 4, 2).flags(Flags::FUA);
    assert_eq!(rig.status(queue_ref, fua), Status::Ok);
    assert_eq!(rig.drive.dirty_blocks(), 4);
    let flush = rig.io(Op::Flush, 0, 0);
    assert_eq!(rig.status(queue_ref, flush), Status::Ok);
    assert_eq!(rig.drive.dirty_blocks(), 0);
    let zeroes = rig.io(Op::WriteZeroes, 1, 1).flags(Flags::DEALLOCATE);
    assert_eq!(rig.status(queue_ref, zeroes), Status::Ok);
    let unmap = rig.io(Op::Unmap, 5, 2);
    assert_eq!(rig.status(queue_ref, unmap), Status::Ok);
    assert_eq!(rig.values(queue_ref, 0, 8), [2, 0, 2, 2, 1, 0, 0, 1]);
    let copy = rig.io(Op::Copy, 100, 4).source(1);
    assert_eq!(rig.status(queue_ref, copy), Status::Ok);
    assert_eq!(rig.values(queue_ref, 100, 4), [0, 2, 2, 1]);
    for (value, expected) in [(1, Status::Ok), (3, Status::Miscompare)] {
        let data = rig.buf(512, value);
        let compare = rig.io(Op::Compare, 7, 1).with(data);
        assert_eq!(rig.status(queue_ref, compare), expected);
        let (old, new) = (rig.buf(512, value), rig.buf(512, 8));
        let swap = rig.io(Op::CompareAndWrite, 4, 1).with(old).with(new);
        assert_eq!(rig.status(queue_ref, swap), expected);
    }
    assert_eq!(rig.values(queue_ref, 4, 1), [8]);
    assert!(rig.drive.stats().fused >= 2);
    rig.end(&controller, queue);
}

/// Goal: the drive reaches buffers at any address, in up to the maximum number of parts.
#[test]
fn scattered_data() {
    for (sgl, sgls) in [(true, 1), (false, 1), (true, 2), (true, 0)] {
        let sgls = nacre_nvmf_wire::identify::controller::Sgls::from_bits_retain(sgls);
        let mut rig = Rig::new(Config {
            sgls,
            ..Config::default()
        });
        let options = DriveOptions {
            sgl,
            ..DriveOptions::new("nvme0")
        };
        let (controller, _bdev, mut queue) = rig.one(options);
        for (number, cuts) in [
            vec![(0usize, 4096usize)],
            vec![(512, 4096)],
            vec![(0, 32 << 10)],
            vec![(1024, 32 << 10)],
            vec![(0, 512), (4096, 1024)],
            vec![(3584, 1024), (60 << 10, 4096)],
            vec![(60 << 10, 4096), (0, 28 << 10)],
            vec![(100, 512)],
            vec![(6, 1024), (2050, 512)],
            vec![(4, 700), (1024, 324)],
        ]
        .into_iter()
        .enumerate()
        {
            let total: usize = cuts.iter().map(|(_, len)| len).sum();
            let blocks = (total / 512) as u32;
            let mut filled = rig.buf(64 << 10, 0);
            let bytes = filled.bytes_mut().unwrap();
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = (at / 97 + number) as u8;
            }
            let expected: Vec<u8> = cuts
                .iter()
                .flat_map(|&(at, len)| bytes[at..at + len].to_vec())
                .collect();
            let mut write = rig.io(Op::Write, 1000, blocks);
            for &(at, len) in &cuts {
                write.data.push(filled.slice(at, len));
            }
            drop(filled);
            let status = rig.status(&mut *queue, write);
            rig.drive.check();
            assert_eq!(status, Status::Ok, "write {number}, sgl {sgl}");
            let stored = rig.drive.stored(1, 1000, blocks.into()).unwrap();
            assert!(stored == expected, "write {number}, sgl {sgl}");
            let mut read = rig.io(Op::Read, 1000, blocks);
            for &(at, len) in &cuts {
                read.data.push(rig.buf(64 << 10, 0).slice(at, len));
            }
            let completion = rig.run(&mut *queue, read);
            assert_eq!(completion.status, Status::Ok);
            let read: Vec<u8> = completion
                .data
                .iter()
                .flat_map(|buf| buf.to_vec())
                .collect();
            assert!(read == expected, "read {number}, sgl {sgl}");
        }
        let stats = rig.drive.stats();
        assert!(stats.prps > 0);
        assert_eq!(stats.sgls > 0, sgl && sgls.bits() != 0);
        rig.end(&controller, queue);
    }
}

/// Goal: a read into a shared buffer that would need a copy is refused before a command is sent. It
/// succeeds once the buffer is no longer shared.
#[test]
fn a_read_into_shared_memory() {
    let mut rig = Rig::new(Config {
        sgls: nacre_nvmf_wire::identify::controller::Sgls::empty(),
        ..Config::default()
    });
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let write = rig.write(0, 2, 5);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    let buf = rig.buf(4096, 1);
    let shared = buf.clone();
    let before = rig.drive.stats().io[usize::from(io::READ)];
    // An address without any alignment.
    let read = rig.io(Op::Read, 0, 2).with(buf.slice(6, 1024));
    drop(buf);
    let completion = rig.run(&mut *queue, read);
    assert_eq!(completion.status, Status::DeviceError);
    assert_eq!(rig.drive.stats().io[usize::from(io::READ)], before);
    assert!(shared.iter().all(|byte| *byte == 1));
    drop(shared);
    let mut read = rig.io(Op::Read, 0, 2);
    read.data = completion.data;
    let completion = rig.run(&mut *queue, read);
    assert_eq!(completion.status, Status::Ok);
    assert!(completion.data[0].iter().all(|byte| *byte == 5));
    drop(completion);
    rig.end(&controller, queue);
}

/// Goal: completions out of order end the right I/O.
#[test]
fn out_of_order() {
    let mut rig = Rig::new(Config {
        pace: Pace {
            latency: (Duration::from_micros(5), Duration::from_micros(900)),
            ..Pace::default()
        },
        ..Config::default()
    });
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    for round in 0..20u8 {
        for at in 0..40u64 {
            let write = rig.write(at * 2, 2, round ^ at as u8);
            rig.submit(&mut *queue, write);
        }
        let statuses = rig.run_until_idle(&mut *queue);
        assert_eq!(statuses, vec![Status::Ok; 40]);
        for at in 0..40u64 {
            let stored = rig.drive.stored(1, at * 2, 2).unwrap();
            assert!(stored.iter().all(|byte| *byte == round ^ at as u8));
        }
    }
    assert_eq!(controller.status().resets, 0);
    rig.end(&controller, queue);
}

/// Goal: a lost interrupt only delays I/O: on a queue that sleeps, the I/O still completes.
#[test]
fn lost_and_spurious_interrupts() {
    let mut rig = Rig::new(Config {
        pace: Pace {
            latency: (Duration::from_micros(300), Duration::from_micros(300)),
            ..Pace::default()
        },
        ..Config::default()
    });
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let warm = rig.read(0, 1);
    rig.run(&mut *queue, warm);
    let lose = Rule::always(Target::Io, Action::LoseInterrupt);
    rig.drive.inject(lose);
    let read = rig.read(0, 1);
    let token = rig.submit(&mut *queue, read);
    // Like a reactor that sleeps as soon as possible: polls when the queue's descriptor is
    // readable, or at its deadline.
    let mut polls = 0;
    let began = rig.core.now();
    while !rig.ended.contains_key(&token) {
        polls += 1;
        assert!(polls < 1000, "the I/O does not complete");
        rig.turn(&mut *queue);
        let now = rig.core.now();
        match queue.arm(now) {
            nacre_reactor::Idle::Busy => rig.core.advance(Duration::from_micros(50)),
            nacre_reactor::Idle::Until(at) => {
                rig.core
                    .advance((at.since(now)).max(Duration::from_nanos(1)));
            }
            nacre_reactor::Idle::Quiet => {
                assert!(
                    rig.ended.contains_key(&token),
                    "the queue has no deadline and its I/O is pending"
                )
            }
        }
        queue.disarm();
    }
    assert!(rig.core.now().since(began) < Duration::from_secs(2));
    rig.ended.clear();
    for vector in 0..4 {
        rig.drive.interrupt(vector);
    }
    rig.drive.heal();
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Ok);
    assert_eq!(controller.status().resets, 0);
    rig.end(&controller, queue);
}

/// Goal: an invalid completion (an unused identifier, the same completion twice, the wrong phase)
/// is counted and resets the drive. Every I/O still completes exactly once, with the right result.
#[test]
fn invalid_completions_reset_the_drive() {
    for action in [
        Action::WrongCid(1),
        Action::WrongCid(0x8000),
        Action::WrongCid(0xffff),
        Action::Duplicate,
        Action::WrongPhase,
    ] {
        let mut rig = Rig::new(Config::default());
        let options = DriveOptions {
            timeout: Duration::from_secs(2),
            ..DriveOptions::new("nvme0")
        };
        let (controller, _bdev, mut queue) = rig.one(options);
        let rule = Rule::next(Target::IoOp(io::WRITE), action).after(2);
        rig.drive.inject(rule);
        for at in 0..8u64 {
            let write = rig.write(at, 1, at as u8 + 1);
            rig.submit(&mut *queue, write);
        }
        let statuses = rig.run_until_idle(&mut *queue);
        assert_eq!(statuses, vec![Status::Ok; 8], "{action:?}");
        rig.pass(&mut *queue, Duration::from_secs(5));
        let status = controller.status();
        if action != Action::WrongPhase {
            assert!(status.protocol_errors >= 1, "{action:?}: {status:?}");
        }
        assert!(
            status.resets + status.queue_resets >= 1,
            "{action:?}: {status:?}"
        );
        let values = rig.values(&mut *queue, 0, 8);
        assert_eq!(values, [1, 2, 3, 4, 5, 6, 7, 8], "{action:?}");
        rig.end(&controller, queue);
    }
}

/// Goal: wrong values in completion fields that the driver does not need (SQID and SQHD) have no
/// effect.
#[test]
fn wrong_sqid_and_sqhd_are_ignored() {
    let mut rig = Rig::new(Config {
        queue_entries: 8,
        ..Config::default()
    });
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    for action in [
        Action::WrongSqid(1),
        Action::WrongSqid(0xfff0),
        Action::WrongHead(3),
        Action::WrongHead(0xfff0),
    ] {
        rig.drive.inject(Rule::always(Target::Io, action));
        // The queue wraps several times.
        for round in 0..8u8 {
            for lba in 0..7 {
                let write = rig.write(lba, 1, round);
                rig.submit(&mut *queue, write);
            }
            assert_eq!(
                rig.run_until_idle(&mut *queue),
                [Status::Ok; 7],
                "{action:?}"
            );
            assert_eq!(rig.values(&mut *queue, 0, 7), [round; 7], "{action:?}");
        }
        rig.drive.heal();
    }
    let status = controller.status();
    assert_eq!(
        (
            status.resets,
            status.timeouts,
            status.protocol_errors,
            status.resubmitted
        ),
        (0, 0, 0, 0)
    );
    rig.end(&controller, queue);
}

/// Goal: an error status is reported although the drive executed the command. If the status permits
/// a retry, idempotent operations are retried and others are not.
#[test]
fn done_and_yet_an_error() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let write_op = Target::IoOp(io::WRITE);
    let failed = Action::DoneButStatus(StatusCode::WRITE_FAULT);
    rig.drive.inject(Rule::next(write_op, failed));
    let write = rig.write(3, 2, 7);
    assert_eq!(rig.status(&mut *queue, write), Status::WriteError);
    assert_eq!(rig.values(&mut *queue, 3, 2), [7, 7]);
    assert_eq!(controller.status().resubmitted, 0);

    let again = Action::DoneButStatus(StatusCode::COMMAND_INTERRUPTED);
    rig.drive.inject(Rule::next(write_op, again).times(2));
    let write = rig.write(3, 2, 8);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.drive.inject(Rule::next(Target::IoOp(io::COPY), again));
    let copy = rig.io(Op::Copy, 10, 4).source(2);
    assert_eq!(rig.status(&mut *queue, copy), Status::Ok);
    assert_eq!(rig.values(&mut *queue, 10, 4), [0, 8, 8, 0]);
    assert_eq!(controller.status().resubmitted, 3);

    // A retried compare-and-write would compare with its own data, so the host gets a status that
    // requests no retry.
    let before = rig.drive.stats().fused;
    rig.drive.inject(Rule::next(write_op, again));
    let (old, new) = (rig.buf(512, 8), rig.buf(512, 9));
    let swap = rig.io(Op::CompareAndWrite, 3, 1).with(old).with(new);
    assert_eq!(rig.status(&mut *queue, swap), Status::Aborted);
    assert_eq!(rig.drive.stats().fused, before + 1);
    assert_eq!(rig.values(&mut *queue, 3, 1), [9]);
    assert_eq!(controller.status().resubmitted, 3);
    rig.end(&controller, queue);
}

/// Goal: an aborted I/O completes as aborted, or normally. A queue that is dropped with I/O in
/// flight keeps its buffers until the drive is done with them.
#[test]
fn aborted_by_the_owner() {
    let mut rig = Rig::new(Config::default());
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let warm = rig.read(0, 1);
    rig.run(&mut *queue, warm);
    rig.drive.inject(Rule::next(Target::Io, Action::Hold));
    let read = rig.read(0, 1);
    let token = rig.submit(&mut *queue, read);
    rig.turn(&mut *queue);
    assert!(queue.abort(token));
    assert!(!queue.abort(token + 1000));
    assert_eq!(rig.wait(&mut *queue, token).status, Status::Aborted);
    let mut second = rig.open(&bdev);
    rig.drive.inject(Rule::next(Target::Io, Action::Hold));
    let read = rig.read(0, 8);
    rig.submit(&mut *second, read);
    rig.turn(&mut *second);
    drop(second);
    let used = |rig: &Rig| {
        let stats = rig.memory.pool.stats();
        stats
            .iter()
            .map(|class| class.count - class.free)
            .sum::<usize>()
    };
    assert!(used(&rig) > 0, "the drive may still write to it");
    rig.drive.release();
    rig.pass(&mut *queue, Duration::from_secs(1));
    assert_eq!(used(&rig), 0);
    rig.end(&controller, queue);
}

/// Goal: I/O beyond the queue's capacity is handed back and succeeds once there is room; no I/O is
/// lost.
#[test]
fn back_pressure() {
    let mut rig = Rig::new(Config {
        queue_entries: 8,
        ..Config::default()
    });
    let (controller, bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    let mut second = rig.open(&bdev);
    let warm = rig.read(0, 1);
    rig.run(&mut *queue, warm);
    rig.drive.inject(Rule::always(Target::Io, Action::Hold));
    let fill = |rig: &mut Rig, queue: &mut dyn Queue| {
        let mut taken = 0;
        loop {
            let io = rig.write(taken, 1, 1);
            if queue.submit(io).is_err() {
                break taken;
            }
            taken += 1;
            assert!(taken < 1000, "the queue has no bound");
        }
    };
    let first_taken = fill(&mut rig, &mut *queue);
    let second_taken = fill(&mut rig, &mut *second);
    assert!(first_taken >= 7 && second_taken >= 1);
    rig.drive.heal();
    rig.run_until_idle(&mut *queue);
    rig.run_until_idle(&mut *second);
    let write = rig.write(0, 1, 1);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    drop(second);
    rig.end(&controller, queue);
}

/// Goal: a drive that misses shadow doorbells delays I/O by some milliseconds, also while the
/// reactor sleeps. No I/O times out. A drive that misses none gets no extra doorbell write.
#[test]
fn missed_shadow_doorbells() {
    let mut rig = Rig::new(Config {
        shadow_doorbells: true,
        ..Config::default()
    });
    let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
    for at in 0..20 {
        let write = rig.write(at, 1, 1);
        assert_eq!(rig.status(&mut *queue, write), Status::Ok);
        rig.pass(&mut *queue, Duration::from_millis(30));
    }
    assert_eq!(controller.status().nudges, 0);
    rig.drive.lose_shadow_doorbells(true);
    rig.pass(&mut *queue, Duration::from_millis(30));
    for sleeps in [false, true] {
        let before = controller.status().nudges;
        let began = rig.core.now();
        for at in 0..20u64 {
            let write = rig.write(at, 1, at as u8);
            let token = rig.submit(&mut *queue, write);
            let end = rig.core.now() + Duration::from_millis(50);
            while !rig.ended.contains_key(&token) {
                assert!(rig.core.now() < end, "write {at}, asleep: {sleeps}");
                rig.turn(&mut *queue);
                let now = rig.core.now();
                let nap = match queue.arm(now) {
                    nacre_reactor::Idle::Until(at) if sleeps => at.since(now),
                    _ => Duration::from_micros(500),
                };
                queue.disarm();
                rig.core.advance(nap.max(Duration::from_micros(1)));
            }
            // Idle long enough that the drive stops polling its shadow doorbells.
            rig.pass(&mut *queue, Duration::from_millis(30));
        }
        let nudges = controller.status().nudges - before;
        assert!((15..=40).contains(&nudges), "{nudges}, asleep: {sleeps}");
        assert!(rig.core.now().since(began) < Duration::from_millis(20 * 80));
    }
    let status = controller.status();
    assert_eq!((status.timeouts, status.resets, status.aborts), (0, 0, 0));
    rig.drive.lose_shadow_doorbells(false);
    // A slow drive gets an extra doorbell write, which has no effect.
    let before = controller.status().nudges;
    rig.drive.inject(Rule::next(
        Target::Io,
        Action::Late(Duration::from_millis(95)),
    ));
    let write = rig.write(0, 1, 9);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    let nudges = controller.status().nudges - before;
    assert!((7..=10).contains(&nudges), "{nudges}");
    rig.ended.clear();
    assert_eq!(rig.values(&mut *queue, 0, 3), [9, 1, 2]);
    rig.end(&controller, queue);
}

//! The conformance cases: each tests one guarantee of a block device.

use std::time::{Duration, Instant};

use nacre_hugepages::Buf;
use nacre_reactor::Idle;

use super::rig::{Rig, flat, pattern};
use super::{Case, Subject};
use crate::device::Support;
use crate::io::{Extents, Flags, Op, Status};
use crate::queue::{Busy, Done};

pub(super) const ALL: &[Case] = &[
    ("identity and limits make sense", identity),
    (
        "written data is read back, in all sizes, also at the edges",
        sizes,
    ),
    ("an I/O may have two extents", two_extents),
    (
        "a zero-copy read has the written data",
        reads_without_a_copy,
    ),
    ("what lies outside the device is out of range", out_of_range),
    ("no blocks: nothing is done, successfully", no_blocks),
    ("unsupported operations are refused as such", unsupported),
    ("a full queue hands the I/O back untouched", full_queue),
    ("a list without room is respected", no_room),
    ("an aborted I/O completes once", abort),
    ("flush and force unit access", flush),
    ("write zeroes", write_zeroes),
    ("unmap", unmap),
    ("compare", compare),
    ("compare and write", compare_and_write),
    ("copy", copy),
    ("verify", verify),
    ("a read-only device refuses writes", read_only),
    ("a dropped queue returns every buffer", drop_in_flight),
    ("an idle queue lets its reactor sleep", idle),
];

fn identity(subject: &Subject) {
    let (geometry, limits) = (subject.device.geometry(), subject.device.limits());
    assert!(geometry.block_size.is_power_of_two() && geometry.block_size >= 512);
    assert!(
        geometry
            .physical_block_size
            .is_multiple_of(geometry.block_size)
    );
    assert!(limits.max_blocks >= 1 && limits.max_unmap_blocks >= 1);
    assert!(limits.queue_depth >= 1 && limits.atomic_blocks >= 1);
    assert!(!subject.device.name().is_empty() && !subject.device.product_name().is_empty());
    assert!(!subject.device.uuid().is_nil());
    assert_eq!(subject.device.supports(Op::Read), Support::Native);
}

fn sizes(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let total = rig.geometry.blocks;
    let sizes = [1, 2, 3, 7, 8, 9, 16, 31, 64, 100, 200];
    let largest = subject.largest();
    for (tag, blocks) in sizes
        .into_iter()
        .filter(|size| *size <= largest)
        .chain([largest])
        .enumerate()
    {
        for lba in [0, 1, total / 2 - 1, total - u64::from(blocks)] {
            if !subject.writable() {
                rig.read(lba, blocks);
                continue;
            }
            let bytes = pattern(blocks, rig.geometry.block_size, lba, tag as u8);
            rig.write(lba, &bytes);
            let read = rig.read(lba, blocks);
            if subject.keeps_data {
                assert!(read == bytes, "{blocks} blocks at {lba}");
            }
        }
    }
}

/// A read without extents of at most `zero_copy_blocks` returns a view of the device's memory. The
/// view outlives the queue.
fn reads_without_a_copy(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let most = subject.device.limits().zero_copy_blocks;
    // Only the layer decides whether to read without extents; modules need not support it.
    if most == 0 {
        return;
    }
    let largest = subject.largest().min(most);
    let mut kept = Vec::new();
    for (lba, blocks) in [
        (0, 1),
        (3, largest.min(5)),
        (rig.geometry.blocks - 1, 1),
        (0, largest),
    ] {
        let bytes = pattern(blocks, rig.geometry.block_size, lba, 0x1e);
        if subject.writable() {
            rig.write(lba, &bytes);
        }
        let io = rig.io(Op::Read, lba, blocks);
        let completion = rig.run(io);
        assert_eq!(completion.status, Status::Ok);
        assert!(completion.data.is_empty());
        let zero_copy = completion.zero_copy.expect("a view of memory");
        let mut seen = vec![0; zero_copy.len()];
        zero_copy.read(0, &mut seen);
        assert_eq!(seen.len(), rig.bytes(blocks));
        assert!(!subject.keeps_data || !subject.writable() || seen == bytes);
        kept.push((zero_copy, seen));
    }
    let outside = rig.io(Op::Read, rig.geometry.blocks, 1);
    assert_eq!(rig.status_of(outside), Status::OutOfRange);
    drop(rig);
    let (last, seen) = kept.pop().expect("several");
    let mut again = vec![0; last.len()];
    last.read(0, &mut again);
    assert!(again == seen, "the memory stays while a view of it exists");
}

fn two_extents(subject: &Subject) {
    let blocks = 6;
    if !subject.writable() || subject.largest() < blocks {
        return;
    }
    let mut rig = Rig::new(subject);
    let bytes = pattern(blocks, rig.geometry.block_size, 5, 9);
    for first in 1..blocks {
        let (a, b) = bytes.split_at(rig.bytes(first));
        let (a, b) = (rig.buf_of(a), rig.buf_of(b));
        let io = rig.io(Op::Write, 5, blocks).with(a).with(b);
        rig.ok(io);
        let (a, b) = (rig.buf(first, 0), rig.buf(blocks - first, 0));
        let io = rig.io(Op::Read, 5, blocks).with(a).with(b);
        let completion = rig.run(io);
        assert_eq!(completion.status, Status::Ok);
        let lens: Vec<usize> = completion.data.iter().map(Buf::len).collect();
        assert_eq!(
            lens,
            [rig.bytes(first), rig.bytes(blocks - first)],
            "the same extents return"
        );
        if subject.keeps_data {
            assert!(flat(&completion.data) == bytes, "split after {first}");
        }
    }
}

fn out_of_range(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let total = rig.geometry.blocks;
    let ops = [
        Op::Read,
        Op::Write,
        Op::Unmap,
        Op::WriteZeroes,
        Op::Compare,
        Op::CompareAndWrite,
        Op::Copy,
        Op::Verify,
    ];
    for op in ops.into_iter().filter(|op| subject.does(*op)) {
        for (lba, blocks) in [
            (total - 1, 2),
            (total, 1),
            (total + 7, 1),
            (u64::MAX, 2),
            (u64::MAX - 1, 1),
        ] {
            let mut io = rig.io(op, lba, blocks);
            io.data = data_for(&rig, op, blocks);
            let given = io.data.len();
            let completion = rig.run(io);
            assert_eq!(
                completion.status,
                Status::OutOfRange,
                "{op:?} of {blocks} at {lba}"
            );
            assert_eq!(
                completion.data.len(),
                given,
                "buffers return with an error, too"
            );
        }
    }
    if subject.does(Op::Copy) {
        let io = rig.io(Op::Copy, 0, 2).source(total - 1);
        assert_eq!(rig.status_of(io), Status::OutOfRange);
    }
}

fn no_blocks(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let total = rig.geometry.blocks;
    let ops = [
        Op::Read,
        Op::Write,
        Op::Unmap,
        Op::WriteZeroes,
        Op::Compare,
        Op::Copy,
        Op::Verify,
    ];
    for op in ops.into_iter().filter(|op| subject.does(*op)) {
        let io = rig.io(op, total, 0).source(0);
        assert_eq!(rig.status_of(io), Status::Ok, "{op:?}");
    }
}

fn unsupported(subject: &Subject) {
    let mut rig = Rig::new(subject);
    for op in Op::ALL
        .into_iter()
        .filter(|op| subject.device.supports(*op) == Support::No)
    {
        let mut io = rig.io(op, 0, 1).source(8);
        io.data = data_for(&rig, op, 1);
        let status = rig.status_of(io);
        let refused = matches!(status, Status::Unsupported | Status::WriteProtected);
        assert!(refused, "{op:?}: {status:?}");
    }
}

fn full_queue(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let depth = subject.device.limits().queue_depth as usize;
    let mut taken = 0;
    for round in 0..3 {
        // A depth beyond the number of the pool's buffers is never reached.
        while let Some(buf) = rig.pool.acquire(rig.geometry.block_size as usize) {
            let at = buf.as_ptr();
            let io = rig
                .io(Op::Read, taken as u64 % rig.geometry.blocks, 1)
                .with(buf);
            let (token, lba) = (io.token, io.lba);
            let Err((Busy, back)) = rig.try_submit(io) else {
                taken += 1;
                continue;
            };
            let same = (back.token, back.op, back.lba, back.blocks) == (token, Op::Read, lba, 1);
            assert!(
                same && back.data[0].as_ptr() == at,
                "handed back changed: {back:?}"
            );
            break;
        }
        assert!(
            rig.queue.inflight() <= depth,
            "took more than its depth of {depth}"
        );
        assert!(rig.queue.inflight() > 0, "took nothing in round {round}");
        let all_ok = rig
            .wait_all()
            .iter()
            .all(|completion| completion.status == Status::Ok);
        assert!(all_ok, "a full queue is no error");
    }
}

fn no_room(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let count = take_some(
        &mut rig,
        5.min(subject.device.limits().queue_depth as usize),
    );
    let mut one = Done::with_capacity(1);
    let since = Instant::now();
    let mut seen = std::collections::HashSet::new();
    while seen.len() < count {
        assert!(
            since.elapsed().as_secs() < 30,
            "completions without room are lost"
        );
        let now = rig.now();
        rig.queue.poll(now, &mut one);
        let left = rig.queue.inflight();
        assert_eq!(left + one.len() + seen.len(), count);
        if !one.has_room() {
            assert_eq!(rig.queue.poll(now, &mut one), 0, "there is no room");
            assert_eq!(rig.queue.inflight(), left);
        }
        let tokens: Vec<_> = one.drain().map(|completion| completion.token).collect();
        assert!(
            tokens.into_iter().all(|token| seen.insert(token)),
            "completed twice"
        );
    }
}

fn abort(subject: &Subject) {
    let mut rig = Rig::new(subject);
    assert!(!rig.queue.abort(0xDEAD_BEEF), "there is no such I/O");
    for round in 0..4 {
        let count = 8.min(subject.device.limits().queue_depth as u64);
        let submit = |lba: u64, rig: &mut Rig| {
            let op = if subject.writable() && lba.is_multiple_of(2) {
                Op::Write
            } else {
                Op::Read
            };
            let buf = rig.buf(1, 7);
            let io = rig.io(op, lba, 1).with(buf);
            rig.submit(io)
        };
        let tokens: Vec<_> = (0..count).map(|lba| submit(lba, &mut rig)).collect();
        if round % 2 == 1 {
            let now = rig.now();
            // Submits to the device without collecting completions.
            let mut none = Done::with_capacity(0);
            rig.queue.poll(now, &mut none);
        }
        let aborted: Vec<_> = tokens.iter().skip(1).copied().collect();
        let took: Vec<bool> = aborted
            .iter()
            .map(|token| rig.queue.abort(*token))
            .collect();
        for completion in rig.wait_all() {
            let at = aborted.iter().position(|token| *token == completion.token);
            let may = at.is_some_and(|at| took[at]);
            let fine = completion.status.is_ok() || (may && completion.status == Status::Aborted);
            assert!(fine, "{completion:?}, asked to abort: {may}");
            assert_eq!(completion.data.len(), 1, "its buffer returns");
        }
        assert!(!rig.queue.abort(tokens[0]), "it is over");
    }
}

fn flush(subject: &Subject) {
    let mut rig = Rig::new(subject);
    if subject.device.limits().volatile_cache {
        assert!(subject.does(Op::Flush), "a cache that cannot be flushed");
    }
    if subject.does(Op::Flush) {
        let io = rig.io(Op::Flush, 0, 0);
        rig.ok(io);
    }
    if subject.writable() {
        let bytes = pattern(2, rig.geometry.block_size, 3, 1);
        rig.write_with(3, &bytes, Flags::FUA);
        if subject.keeps_data {
            assert!(rig.read(3, 2) == bytes);
        }
    }
}

fn write_zeroes(subject: &Subject) {
    if !subject.does(Op::WriteZeroes) {
        return;
    }
    let mut rig = Rig::new(subject);
    let largest = subject.device.limits().max_unmap_blocks.min(300) as u32;
    for flags in [
        Flags::empty(),
        Flags::DEALLOCATE,
        Flags::FUA,
        Flags::DEALLOCATE | Flags::FUA,
    ] {
        for blocks in [1, 5, largest] {
            let around = fill(&mut rig, 10, 310, 0x77);
            let io = rig.io(Op::WriteZeroes, 20, blocks).flags(flags);
            rig.ok(io);
            let mut expected = around;
            let (from, len) = (rig.bytes(10), rig.bytes(blocks));
            expected[from..from + len].fill(0);
            if subject.keeps_data {
                assert!(
                    read_range(&mut rig, 10, 310) == expected,
                    "{blocks} blocks, {flags:?}"
                );
            }
        }
    }
}

fn unmap(subject: &Subject) {
    if !subject.does(Op::Unmap) {
        return;
    }
    let mut rig = Rig::new(subject);
    let limits = subject.device.limits();
    let align = u64::from(limits.unmap_granularity_blocks.max(1));
    let blocks = (limits.max_unmap_blocks.min(128) / align * align).max(1);
    let first = align.max(16).next_multiple_of(align);
    if first + blocks + 8 > rig.geometry.blocks {
        return;
    }
    let total = (blocks + 16) as u32;
    let before = fill(&mut rig, first - 8, total, 0x55);
    let io = rig.io(Op::Unmap, first, blocks as u32);
    rig.ok(io);
    if subject.keeps_data {
        let after = read_range(&mut rig, first - 8, total);
        let (from, to) = (rig.bytes(8), rig.bytes(8 + blocks as u32));
        assert!(
            after[..from] == before[..from] && after[to..] == before[to..],
            "the neighbours stay"
        );
        if limits.unmap_zeroes {
            assert!(
                after[from..to].iter().all(|byte| *byte == 0),
                "reads as zeroes"
            );
        }
    }
}

fn compare(subject: &Subject) {
    if !subject.does(Op::Compare) || !subject.writable() || !subject.keeps_data {
        return;
    }
    let mut rig = Rig::new(subject);
    let blocks = subject.largest().min(150);
    let mut bytes = fill(&mut rig, 0, blocks, 0x21);
    let ask = |rig: &mut Rig, bytes: &[u8]| {
        let (a, b) = bytes.split_at(bytes.len() / rig.bytes(1) / 2 * rig.bytes(1));
        let mut io = rig.io(Op::Compare, 0, blocks);
        if !a.is_empty() {
            io = io.with(rig.buf_of(a));
        }
        let io = io.with(rig.buf_of(b));
        rig.status_of(io)
    };
    assert_eq!(ask(&mut rig, &bytes), Status::Ok);
    for at in [0, bytes.len() / 2, bytes.len() - 1] {
        bytes[at] ^= 1;
        assert_eq!(ask(&mut rig, &bytes), Status::Miscompare, "byte {at}");
        bytes[at] ^= 1;
    }
    assert_eq!(ask(&mut rig, &bytes), Status::Ok);
}

fn compare_and_write(subject: &Subject) {
    if !subject.does(Op::CompareAndWrite) || !subject.keeps_data {
        return;
    }
    let mut rig = Rig::new(subject);
    let most = subject.largest_swap();
    assert!(most >= 1, "a compare-and-write of no block");
    for blocks in [1, 2, 8, most].into_iter().filter(|n| *n <= most) {
        let old = fill(&mut rig, 4, blocks, 1);
        let new = pattern(blocks, rig.geometry.block_size, 4, 2);
        let mut swap = |expected: &[u8], new: &[u8], flags: Flags| {
            let (expected, new) = (rig.buf_of(expected), rig.buf_of(new));
            let io = rig
                .io(Op::CompareAndWrite, 4, blocks)
                .with(expected)
                .with(new)
                .flags(flags);
            let completion = rig.run(io);
            assert_eq!(completion.data.len(), 2, "both buffers return");
            (completion.status, rig.read(4, blocks))
        };
        assert!(swap(&new, &old, Flags::empty()) == (Status::Miscompare, old.clone()));
        assert!(swap(&old, &new, Flags::empty()) == (Status::Ok, new.clone()));
        let mut nearly = new.clone();
        *nearly.last_mut().expect("not empty") ^= 0x80;
        assert!(swap(&nearly, &old, Flags::empty()) == (Status::Miscompare, new.clone()));
        assert!(swap(&new, &old, Flags::FUA) == (Status::Ok, old.clone()));
    }
}

fn copy(subject: &Subject) {
    if !subject.does(Op::Copy) {
        return;
    }
    let mut rig = Rig::new(subject);
    let blocks = subject.largest().min(150);
    let most = u64::from(blocks);
    // Disjoint, adjacent, overlapping in both directions, and identical ranges.
    for (from, to) in [
        (0, 200),
        (200, 0),
        (10, 10 + most),
        (50, 53),
        (53, 50),
        (20, 20),
        (0, most - 1),
    ] {
        let mut expected = fill(&mut rig, 0, 360, to as u8);
        let io = rig.io(Op::Copy, to, blocks).source(from);
        rig.ok(io);
        let (len, source) = (rig.bytes(blocks), rig.bytes(from as u32));
        expected.copy_within(source..source + len, rig.bytes(to as u32));
        if subject.keeps_data {
            assert!(
                read_range(&mut rig, 0, 360) == expected,
                "{blocks} blocks from {from} to {to}"
            );
        }
    }
}

fn verify(subject: &Subject) {
    if !subject.does(Op::Verify) {
        return;
    }
    let mut rig = Rig::new(subject);
    let total = rig.geometry.blocks;
    let most = subject.device.limits().max_verify_blocks;
    let before = if subject.writable() {
        fill(&mut rig, 0, 32, 0x3e)
    } else {
        read_range(&mut rig, 0, 32)
    };
    // More than a bounce buffer holds, and more than most devices read in one request.
    let many = (total - 1).min(4096) as u32;
    for (lba, blocks) in [(0, 1), (3, 29), (total - 1, 1), (1, many)] {
        let blocks = blocks.min(most);
        let io = rig.io(Op::Verify, lba, blocks);
        let completion = rig.run(io);
        let what = format!("{blocks} blocks at {lba}");
        assert_eq!(completion.status, Status::Ok, "{what}");
        assert!(completion.data.is_empty() && completion.zero_copy.is_none());
    }
    if subject.keeps_data {
        assert!(read_range(&mut rig, 0, 32) == before, "nothing changes");
    }
}

fn read_only(subject: &Subject) {
    if subject.writable() {
        return;
    }
    let mut rig = Rig::new(subject);
    for op in Op::ALL.into_iter().filter(|op| op.is_write()) {
        if subject.device.supports(op) == Support::No {
            continue;
        }
        let mut io = rig.io(op, 0, 1).source(1);
        io.data = data_for(&rig, op, 1);
        assert_eq!(rig.status_of(io), Status::WriteProtected, "{op:?}");
    }
    rig.read(0, 1);
}

fn drop_in_flight(subject: &Subject) {
    let mut rig = Rig::new(subject);
    let free = |rig: &Rig| {
        rig.pool
            .stats()
            .iter()
            .map(|class| class.count - class.free)
            .sum::<usize>()
    };
    take_some(
        &mut rig,
        10.min(subject.device.limits().queue_depth as usize),
    );
    let now = rig.now();
    // Submits to the device without collecting completions.
    rig.queue.poll(now, &mut Done::with_capacity(0));
    take_some(&mut rig, 10);
    assert!(free(&rig) > 0);
    rig.queue = std::sync::Arc::clone(&subject.device)
        .open(&rig.pool)
        .expect("opens again");
    let own = free(&Rig::new(subject));
    let since = Instant::now();
    // Once the device is done with them.
    while free(&rig) != own {
        assert!(
            since.elapsed() < Duration::from_secs(30),
            "only the queue's own buffers are out: {} are, and {own} should be",
            free(&rig)
        );
        let now = rig.now();
        rig.queue.poll(now, &mut Done::with_capacity(1));
        std::thread::yield_now();
    }
}

fn idle(subject: &Subject) {
    let mut rig = Rig::new(subject);
    rig.read(0, 1);
    let now = rig.now();
    assert_ne!(rig.queue.arm(now), Idle::Busy, "nothing is under way");
    rig.queue.disarm();
    rig.read(0, 1);
}

/// Submits reads past the rig's bookkeeping until so many were taken, or the queue is full.
fn take_some(rig: &mut Rig, most: usize) -> usize {
    for lba in 0..most {
        let buf = rig.buf(1, 0);
        let io = rig.io(Op::Read, lba as u64, 1).with(buf);
        if rig.queue.submit(io).is_err() {
            assert!(rig.queue.inflight() > 0, "full with nothing under way");
            return lba;
        }
    }
    most
}

/// Buffers as `op` wants them, contents no matter.
fn data_for(rig: &Rig, op: Op, blocks: u32) -> Extents {
    let count = op.data_len(1);
    (0..count).map(|_| rig.buf(blocks, 0)).collect()
}

/// Writes a pattern over a range, in requests that the device takes.
pub(super) fn fill(rig: &mut Rig, lba: u64, blocks: u32, tag: u8) -> Vec<u8> {
    let bytes = pattern(blocks, rig.geometry.block_size, lba, tag);
    for (index, block) in bytes.chunks(rig.bytes(1)).enumerate() {
        let buf = rig.buf_of(block);
        let io = rig.io(Op::Write, lba + index as u64, 1).with(buf);
        rig.submit(io);
        if index % 64 == 63 {
            rig.wait_all();
        }
    }
    assert!(
        rig.wait_all()
            .iter()
            .all(|completion| completion.status.is_ok())
    );
    bytes
}

/// Reads a range, in requests that the device takes.
pub(super) fn read_range(rig: &mut Rig, lba: u64, blocks: u32) -> Vec<u8> {
    (0..u64::from(blocks))
        .flat_map(|at| rig.read(lba + at, 1))
        .collect()
}

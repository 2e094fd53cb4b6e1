//! The conformance case with random operations, several in flight. A byte array is the model of the
//! device's contents.

use std::collections::HashMap;

use nacre_random::Random;

use super::cases::{fill, read_range};
use super::rig::{Rig, flat};
use super::{Case, Subject};
use crate::io::{Completion, Extents, Flags, Io, Op, Status, Token};

pub(super) const ALL: &[Case] = &[("random operations agree with an array of bytes", random)];

/// Operations per run: some seconds on a file, and every pair of operations many times.
const STEPS: usize = 2_000;
/// Number of blocks at the device's end that the run uses.
const WINDOW: u32 = 400;
const DEPTH: usize = 8;

/// The expected result of an I/O in flight.
struct Expected {
    first: u64,
    end: u64,
    /// Second range that must not change meanwhile (the source of a copy).
    source: Option<(u64, u64)>,
    writes: bool,
    read: Option<Vec<u8>>,
    status: Status,
}

fn random(subject: &Subject) {
    if !subject.writable() || !subject.keeps_data {
        return;
    }
    let mut random = Random::new(subject.seed);
    let mut rig = Rig::new(subject);
    let base = rig.geometry.blocks - u64::from(WINDOW);
    let mut oracle = fill(&mut rig, base, WINDOW, 0xE1);
    let ops: Vec<Op> = Op::ALL.into_iter().filter(|op| subject.does(*op)).collect();
    let mut open: HashMap<Token, Expected> = HashMap::new();
    for _ in 0..STEPS / subject.haste as usize {
        let op = ops[random.below(ops.len() as u64) as usize];
        let (io, expected) = make(&mut rig, &mut random, &oracle, op, base, subject);
        while open.len() >= DEPTH || open.values().any(|other| conflict(other, &expected)) {
            complete_one(&mut rig, &mut open);
        }
        let mut expected = expected;
        apply(&io, &mut expected, &mut oracle, base);
        open.insert(io.token, expected);
        rig.submit(io);
    }
    while !open.is_empty() {
        complete_one(&mut rig, &mut open);
    }
    assert!(
        read_range(&mut rig, base, WINDOW) == oracle,
        "the device differs in the end"
    );
}

/// Overlapping reads and writes have no defined order, so they are not in flight together.
fn conflict(a: &Expected, b: &Expected) -> bool {
    let ranges = |e: &Expected| {
        [
            Some((e.first, e.end, e.writes)),
            e.source.map(|(f, t)| (f, t, false)),
        ]
    };
    let overlap = |x: (u64, u64, bool), y: (u64, u64, bool)| (x.2 || y.2) && x.0 < y.1 && y.0 < x.1;
    let (mine, theirs) = (ranges(a), ranges(b));
    mine.into_iter()
        .flatten()
        .any(|x| theirs.into_iter().flatten().any(|y| overlap(x, y)))
}

fn complete_one(rig: &mut Rig, open: &mut HashMap<Token, Expected>) {
    let Some(token) = open.keys().next().copied() else {
        return;
    };
    let completion = rig.wait(token);
    let expected = open.remove(&token).expect("just found");
    check(&completion, &expected);
}

fn check(completion: &Completion, expected: &Expected) {
    assert_eq!(
        completion.status, expected.status,
        "blocks {}..{}",
        expected.first, expected.end
    );
    if let Some(bytes) = &expected.read {
        assert!(
            &flat(&completion.data) == bytes,
            "read {}..{}",
            expected.first,
            expected.end
        );
    }
}

/// Chooses an I/O. The oracle already contains the effect of all I/O in flight. This I/O waits for
/// conflicting I/O, so it operates on that state.
fn make(
    rig: &mut Rig,
    random: &mut Random,
    oracle: &[u8],
    op: Op,
    base: u64,
    subject: &Subject,
) -> (Io, Expected) {
    let window = u64::from(WINDOW);
    let most = match op {
        Op::CompareAndWrite => subject.largest_swap().min(8),
        Op::Unmap | Op::WriteZeroes => subject.device.limits().max_unmap_blocks.min(window) as u32,
        _ => subject.largest(),
    };
    let blocks = match random.below(8) {
        0 | 1 => 1,
        2..=6 => 1 + random.below(u64::from(most.min(16))) as u32,
        _ => 1 + random.below(u64::from(most)) as u32,
    };
    let place = |random: &mut Random| random.below(window - u64::from(blocks) + 1);
    let (at, source) = (place(random), place(random));
    let boundary = u64::from(subject.device.limits().optimal_boundary_blocks);
    let mut io = rig.io(op, base + at, blocks);
    if boundary > 0
        && subject.device.limits().max_blocks != u32::MAX
        && matches!(op, Op::Read | Op::Write | Op::Compare)
    {
        io.blocks = blocks.min((boundary - io.lba % boundary) as u32);
    }
    let blocks = io.blocks;
    let bytes = rig.bytes(blocks);
    let from = rig.bytes(at as u32);
    let mut expected = Expected {
        first: io.lba,
        end: io.lba + u64::from(blocks),
        source: None,
        writes: op.is_write(),
        read: None,
        status: Status::Ok,
    };
    let wrong = random.below(2) == 0;
    let current = |random: &mut Random| {
        let mut data = oracle[from..from + bytes].to_vec();
        if wrong {
            data[random.below(bytes as u64) as usize] ^= 1 << random.below(8);
        }
        data
    };
    let fresh = |random: &mut Random| {
        let salt = random.draw();
        let word = |at: u64| {
            (salt ^ at)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15)
                .to_le_bytes()
        };
        (0..bytes as u64 / 8).flat_map(word).collect::<Vec<u8>>()
    };
    match op {
        Op::Read => io = io.with(rig.buf(blocks, 0)),
        Op::Write => {
            let bytes = fresh(random);
            io.data = in_extents(rig, random, &bytes);
        }
        Op::Compare => {
            let bytes = current(random);
            io.data = in_extents(rig, random, &bytes);
        }
        Op::CompareAndWrite => {
            io.data.push(rig.buf_of(&current(random)));
            io.data.push(rig.buf_of(&fresh(random)));
        }
        Op::Copy => {
            io.source_lba = base + source;
            expected.source = Some((io.source_lba, io.source_lba + u64::from(blocks)));
        }
        Op::Flush => (expected.end, expected.writes) = (expected.first, false),
        Op::Unmap | Op::WriteZeroes | Op::Verify => {}
    }
    if wrong && matches!(op, Op::Compare | Op::CompareAndWrite) {
        expected.status = Status::Miscompare;
    }
    if op == Op::Unmap && !subject.device.limits().unmap_zeroes {
        // The device chooses the contents after an unmap, so write zeroes to make them known again.
        io.op = Op::WriteZeroes;
        if !subject.does(Op::WriteZeroes) {
            io.op = Op::Flush;
            (expected.end, expected.writes) = (expected.first, false);
        }
    }
    if matches!(io.op, Op::Write | Op::WriteZeroes | Op::CompareAndWrite) && random.below(8) == 0 {
        io.flags |= Flags::FUA;
    }
    if io.op == Op::WriteZeroes && random.below(2) == 0 {
        io.flags |= Flags::DEALLOCATE;
    }
    (io, expected)
}

/// Applies to the oracle the operation that the device is about to execute.
fn apply(io: &Io, expected: &mut Expected, oracle: &mut [u8], base: u64) {
    let block = oracle.len() / WINDOW as usize;
    let span = |lba: u64| {
        let from = (lba - base) as usize * block;
        from..from + io.blocks as usize * block
    };
    match io.op {
        Op::Read => expected.read = Some(oracle[span(io.lba)].to_vec()),
        Op::Write => oracle[span(io.lba)].copy_from_slice(&flat(&io.data)),
        Op::Unmap | Op::WriteZeroes => oracle[span(io.lba)].fill(0),
        Op::Copy => oracle.copy_within(span(io.source_lba), span(io.lba).start),
        Op::CompareAndWrite if expected.status.is_ok() => {
            oracle[span(io.lba)].copy_from_slice(&io.data[1]);
        }
        _ => {}
    }
}

/// Puts the bytes into one extent or two.
fn in_extents(rig: &Rig, random: &mut Random, bytes: &[u8]) -> Extents {
    let blocks = bytes.len() / rig.bytes(1);
    let first = random.below(blocks as u64) as usize * rig.bytes(1);
    let (a, b) = bytes.split_at(first);
    [a, b]
        .into_iter()
        .filter(|part| !part.is_empty())
        .map(|part| rig.buf_of(part))
        .collect()
}

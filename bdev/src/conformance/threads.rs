//! Conformance cases with several threads. Each thread has its own queue to the same device.

use std::sync::atomic::{AtomicBool, Ordering};

use nacre_random::Random;

use super::rig::{Rig, pattern};
use super::{Case, Subject};
use crate::io::{Op, Status};

pub(super) const ALL: &[Case] = &[
    ("two queues on two threads", two_queues),
    (
        "compare and write counts right from several threads",
        counter,
    ),
];

fn two_queues(subject: &Subject) {
    let half = subject.device.geometry().blocks / 2;
    std::thread::scope(|scope| {
        for core in 0..2u64 {
            scope.spawn(move || {
                let mut rig = Rig::new(subject);
                let mut random = Random::new(subject.seed ^ core);
                for round in 0..300 / subject.haste {
                    let blocks = 1 + random.below(u64::from(subject.largest().min(16))) as u32;
                    let lba = core * half + random.below(half - u64::from(blocks));
                    if !subject.writable() {
                        rig.read(lba, blocks);
                        continue;
                    }
                    let bytes = pattern(blocks, rig.geometry.block_size, lba, round as u8);
                    if blocks_cross_boundary(subject, lba, blocks) {
                        continue;
                    }
                    rig.write(lba, &bytes);
                    let read = rig.read(lba, blocks);
                    assert!(
                        !subject.keeps_data || read == bytes,
                        "core {core}, {blocks} at {lba}"
                    );
                }
            });
        }
    });
}

fn blocks_cross_boundary(subject: &Subject, lba: u64, blocks: u32) -> bool {
    let limits = subject.device.limits();
    let boundary = u64::from(limits.optimal_boundary_blocks);
    boundary > 0 && limits.max_blocks != u32::MAX && lba % boundary + u64::from(blocks) > boundary
}

/// Two threads increment a counter in the first of two blocks. Each increment is one Compare and
/// Write of both blocks. A third thread rewrites the second block meanwhile; a Compare and Write
/// must never undo or tear that write.
fn counter(subject: &Subject) {
    const ROUNDS: u64 = 150;
    if !subject.does(Op::CompareAndWrite) || !subject.keeps_data || subject.largest_swap() < 2 {
        return;
    }
    let rounds = ROUNDS / u64::from(subject.haste);
    let (counted, stop) = (64, AtomicBool::new(false));
    let mut rig = Rig::new(subject);
    let block = rig.bytes(1);
    rig.write(counted, &vec![0; 2 * block]);
    std::thread::scope(|scope| {
        let counters: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    let mut rig = Rig::new(subject);
                    let mut wins = 0;
                    while wins < rounds {
                        let old = rig.read(counted, 2);
                        let mut new = old.clone();
                        let next = number(&old) + 1;
                        new[..8].copy_from_slice(&next.to_le_bytes());
                        let (old, new) = (rig.buf_of(&old), rig.buf_of(&new));
                        let io = rig.io(Op::CompareAndWrite, counted, 2).with(old).with(new);
                        match rig.status_of(io) {
                            Status::Ok => wins += 1,
                            Status::Miscompare => {}
                            other => panic!("compare and write: {other:?}"),
                        }
                    }
                })
            })
            .collect();
        let stop = &stop;
        let writer = scope.spawn(move || {
            let mut rig = Rig::new(subject);
            let mut round = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let mut bytes = vec![0; block];
                round += 1;
                bytes[..8].copy_from_slice(&round.to_le_bytes());
                rig.write(counted + 1, &bytes);
                assert_eq!(
                    number(&rig.read(counted + 1, 1)),
                    round,
                    "a swap undid a later write"
                );
                // Not always there: else a swap of both blocks might never win.
                std::thread::sleep(std::time::Duration::from_micros(300));
            }
        });
        for counter in counters {
            counter.join().expect("a counter finished");
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("the writer finished");
    });
    assert_eq!(
        number(&rig.read(counted, 1)),
        2 * rounds,
        "every success counted once"
    );
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

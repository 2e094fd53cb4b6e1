//! Seeded runs: random I/O on a drive with late, missing and invalid completions, fatal failures
//! and resets. An oracle has the possible contents of each block.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use nacre_bdev::{Op, Status, Token};
use nacre_bdev_nvme::DriveOptions;
use nacre_bdev_nvme_sim::{Chances, Config, Pace};
use nacre_random::Random;

use super::rig::Rig;

const SEEDS: u64 = 200;
const BLOCKS: u64 = 96;
/// The variable with the seed of one run to repeat.
const SEED_VARIABLE: &str = "NACRE_NVME_SEED";

struct PendingIo {
    op: Op,
    lba: u64,
    blocks: u32,
    value: u8,
}

/// The possible contents of each block, and the I/O in flight, at most one per block.
struct Model {
    may_hold: Vec<Vec<u8>>,
    pending: HashMap<Token, PendingIo>,
}

impl Model {
    fn is_free(&self, lba: u64, blocks: u32) -> bool {
        let end = lba + u64::from(blocks);
        let apart =
            |a: &PendingIo| a.op == Op::Flush || a.lba + u64::from(a.blocks) <= lba || end <= a.lba;
        self.pending.values().all(apart)
    }

    fn collect(&mut self, rig: &mut Rig, seed: u64) {
        let ended: BTreeMap<Token, _> = rig.ended.drain().collect();
        for (token, completion) in ended {
            let asked = self.pending.remove(&token).expect("a pending command");
            let first = asked.lba as usize;
            let range = first..first + asked.blocks as usize;
            let ok = completion.status == Status::Ok;
            match asked.op {
                Op::Read if ok => {
                    let bytes = &completion.data[0];
                    for (block, lba) in bytes.chunks(512).zip(range) {
                        let may = &self.may_hold[lba];
                        let same = block.iter().all(|byte| *byte == block[0]);
                        assert!(
                            same && may.contains(&block[0]),
                            "seed {seed}: block {lba} holds {}, not {may:?}",
                            block[0]
                        );
                    }
                }
                Op::Write | Op::WriteZeroes => {
                    for may in &mut self.may_hold[range] {
                        if ok {
                            may.clear();
                        }
                        may.push(asked.value);
                    }
                }
                _ => {}
            }
        }
    }
}

/// Returns the number of controller resets.
fn run(seed: u64) -> u64 {
    let mut random = Random::new(seed);
    let mut rig = Rig::new(Config {
        seed,
        shadow_doorbells: seed.is_multiple_of(2),
        deletion_completes: seed.is_multiple_of(3),
        queue_entries: if seed.is_multiple_of(5) { 8 } else { 64 },
        pace: Pace {
            latency: (Duration::ZERO, Duration::from_millis(2)),
            ..Pace::default()
        },
        ..Config::default()
    });
    let (controller, _bdev, mut queue) = rig.one(DriveOptions {
        timeout: Duration::from_millis(400),
        retry_limit: 6,
        ..DriveOptions::new("nvme0")
    });
    rig.drive.set_chances(Chances {
        retryable: 5_000,
        fatal_status: 2_000,
        never: 4_000,
        late: 10_000,
        late_by: Duration::from_secs(1),
        wrong_cid: 1_000,
        duplicate: 1_000,
        wrong_phase: 1_000,
        controller_fatal: 1_500,
        reset_itself: 1_500,
        ..Chances::default()
    });
    let mut model = Model {
        may_hold: vec![vec![0]; BLOCKS as usize],
        pending: HashMap::new(),
    };
    for _ in 0..250 {
        let blocks = 1 + random.below(8) as u32;
        let lba = random.below(BLOCKS - u64::from(blocks));
        let value = random.draw() as u8;
        let (op, io) = match random.below(8) {
            0 => (Op::Flush, rig.io(Op::Flush, 0, 0)),
            1 => (Op::WriteZeroes, rig.io(Op::WriteZeroes, lba, blocks)),
            2..5 => (Op::Write, rig.write(lba, blocks, value)),
            _ => (Op::Read, rig.read(lba, blocks)),
        };
        let value = if op == Op::WriteZeroes { 0 } else { value };
        let token = io.token;
        if (op == Op::Flush || model.is_free(lba, blocks)) && queue.submit(io).is_ok() {
            let asked = PendingIo {
                op,
                lba,
                blocks,
                value,
            };
            model.pending.insert(token, asked);
        }
        if random.below(3) == 0 {
            rig.pass(&mut *queue, Duration::from_millis(1));
            model.collect(&mut rig, seed);
        }
    }
    while queue.inflight() > 0 {
        rig.until(&mut *queue, |rig| !rig.ended.is_empty());
        model.collect(&mut rig, seed);
    }
    assert!(model.pending.is_empty(), "seed {seed}: I/O was lost");
    rig.drive.heal();
    let asked = controller.clone();
    let reset = rig.core.block_on(async move { asked.reset().await });
    assert_eq!(reset, Ok(()), "seed {seed}");
    for lba in 0..BLOCKS {
        let holds = rig.values(&mut *queue, lba, 1)[0];
        let may = &model.may_hold[lba as usize];
        assert!(
            may.contains(&holds),
            "seed {seed}: block {lba} holds {holds}, not {may:?}"
        );
    }
    let resets = controller.status().resets;
    rig.end(&controller, queue);
    resets
}

#[test]
fn seeded_runs() {
    let given = std::env::var(SEED_VARIABLE).ok();
    if let Some(seed) = given.and_then(|text| text.parse().ok()) {
        run(seed);
        return;
    }
    let mut resets = 0;
    for seed in 1..=SEEDS {
        match std::panic::catch_unwind(|| run(seed)) {
            Ok(count) => resets += count,
            Err(panic) => {
                eprintln!("replay with {SEED_VARIABLE}={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    // Each run requests one reset; failures of the drive must cause more.
    assert!(
        resets > SEEDS + SEEDS / 4,
        "{resets} resets are too few to tell"
    );
}

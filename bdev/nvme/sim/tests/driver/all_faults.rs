//! Seeded runs with all operations and all faults, including removal and return of the drive, on a
//! core that sleeps whenever it may. An oracle has the possible contents of each block.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Completion, Flags, Op, Queue, Status, Token};
use nacre_bdev_nvme::{Controller, DriveOptions, Function, State};
use nacre_bdev_nvme_sim::{CacheSurvival, Chances, Config, Pace};
use nacre_random::Random;
use nacre_reactor::Idle;

use super::rig::Rig;

const SEEDS: u64 = 120;
const BLOCKS: u64 = 64;
const STEPS: usize = 200;
/// Replays one run.
const SEED_VARIABLE: &str = "NACRE_NVME_EVERYTHING_SEED";

struct PendingIo {
    op: Op,
    flags: Flags,
    lba: u64,
    blocks: u32,
    source: u64,
    /// Compared with, and written.
    old: u8,
    new: u8,
}

/// The possible contents of each block now, and those after a power loss: all values since the
/// block was last known to be on the medium.
#[derive(Default, Clone)]
struct Block {
    now: Vec<u8>,
    since: Vec<u8>,
}

impl Block {
    /// It holds one of these, or, unless this was `done`, its earlier contents.
    fn wrote(&mut self, values: &[u8], done: bool, through: bool) {
        if done {
            self.now.clear();
        }
        for value in values {
            add(&mut self.now, *value);
            add(&mut self.since, *value);
        }
        if done && through {
            self.since.clone_from(&self.now);
        }
    }

    fn is(&mut self, value: u8) {
        self.now = vec![value];
    }
}

fn add(to: &mut Vec<u8>, value: u8) {
    if !to.contains(&value) {
        to.push(value);
    }
}

struct World {
    seed: u64,
    rig: Rig,
    controller: Arc<Controller>,
    queue: Box<dyn Queue>,
    blocks: Vec<Block>,
    /// Never two I/Os on one block.
    pending: HashMap<Token, PendingIo>,
    random: Random,
    ended: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut config = Config {
            seed,
            shadow_doorbells: seed.is_multiple_of(2),
            queue_entries: if seed.is_multiple_of(5) { 8 } else { 64 },
            vectors: if seed.is_multiple_of(7) { 0 } else { 4 },
            pace: Pace {
                latency: (Duration::ZERO, Duration::from_millis(2)),
                ..Pace::default()
            },
            ..Config::default()
        };
        config.namespaces[0].ignores_advice = seed.is_multiple_of(3);
        let mut rig = Rig::new(config);
        let (controller, _, queue) = rig.one(DriveOptions {
            timeout: Duration::from_millis(400),
            retry_limit: 6,
            ..DriveOptions::new("nvme0")
        });
        let zero = Block {
            now: vec![0],
            since: vec![0],
        };
        Self {
            seed,
            rig,
            controller,
            queue,
            blocks: vec![zero; BLOCKS as usize],
            pending: HashMap::new(),
            random: Random::new(seed),
            ended: 0,
        }
    }

    fn range(lba: u64, blocks: u32) -> std::ops::Range<usize> {
        lba as usize..lba as usize + blocks as usize
    }

    fn is_free(&self, lba: u64, blocks: u32) -> bool {
        let end = lba + u64::from(blocks);
        let apart = |first: u64, count: u32| first + u64::from(count) <= lba || end <= first;
        self.pending
            .values()
            .all(|a| apart(a.lba, a.blocks) && (a.op != Op::Copy || apart(a.source, a.blocks)))
    }

    /// One value that a range may hold, or any.
    fn guess(&mut self, lba: u64) -> u8 {
        let may = &self.blocks[lba as usize].now;
        match self.random.below(4) {
            0 => self.random.draw() as u8,
            _ => may[self.random.below(may.len() as u64) as usize],
        }
    }

    fn ask(&mut self) {
        let blocks = 1 + self.random.below(6) as u32;
        let lba = self.random.below(BLOCKS - u64::from(blocks));
        let source = self.random.below(BLOCKS - u64::from(blocks));
        let op = Op::ALL[self.random.below(Op::COUNT as u64) as usize];
        let new = self.random.draw() as u8;
        let mut asked = PendingIo {
            op,
            flags: Flags::empty(),
            lba,
            blocks,
            source,
            old: self.guess(lba),
            new,
        };
        if self.random.below(6) == 0
            && matches!(op, Op::Write | Op::WriteZeroes | Op::CompareAndWrite)
        {
            asked.flags = Flags::FUA;
        }
        match op {
            // So that its durable blocks are known.
            Op::Flush if !self.pending.is_empty() => return,
            Op::Flush => asked.blocks = 0,
            _ if !self.is_free(lba, blocks) => return,
            Op::Copy if !self.is_free(source, blocks) => return,
            Op::WriteZeroes | Op::Unmap => asked.new = 0,
            _ => {}
        }
        let bytes = blocks as usize * 512;
        let mut io = self
            .rig
            .io(op, lba, asked.blocks)
            .flags(asked.flags)
            .source(source);
        let fills: &[u8] = match op {
            Op::Read => &[0xa5],
            Op::Write => &[new],
            Op::Compare => &[asked.old],
            Op::CompareAndWrite => &[asked.old, new],
            _ => &[],
        };
        for fill in fills {
            io = io.with(self.rig.buf(bytes, *fill));
        }
        let token = io.token;
        if self.queue.submit(io).is_ok() {
            self.pending.insert(token, asked);
        }
    }

    /// A turn, and a sleep if the core would sleep; the drive wakes it, or its own deadline.
    fn pause(&mut self) {
        self.rig.turn(&mut *self.queue);
        self.collect();
        let now = self.rig.core.now();
        let nap = match self.queue.arm(now) {
            Idle::Busy => Duration::from_micros(50),
            Idle::Until(at) => at
                .since(now)
                .clamp(Duration::from_nanos(1), Duration::from_millis(5)),
            Idle::Quiet => {
                let open = self.queue.inflight();
                assert_eq!(open, 0, "seed {}: it would sleep forever", self.seed);
                Duration::from_millis(1)
            }
        };
        self.queue.disarm();
        self.rig.core.advance(nap);
    }

    fn until(&mut self, what: impl Fn(&Self) -> bool) {
        for _ in 0..2_000_000 {
            if what(self) {
                return;
            }
            self.pause();
        }
        panic!(
            "seed {}: it does not come to pass: {:?}",
            self.seed,
            self.controller.status()
        );
    }

    fn collect(&mut self) {
        let mut ended: Vec<(Token, Completion)> = self.rig.ended.drain().collect();
        ended.sort_by_key(|(token, _)| *token);
        for (token, completion) in ended {
            let asked = self.pending.remove(&token).expect("a pending command");
            self.ended += 1;
            self.check_completion(&asked, &completion);
        }
    }

    fn check_completion(&mut self, asked: &PendingIo, completion: &Completion) {
        let seed = self.seed;
        let done = completion.status == Status::Ok;
        let through = asked.flags.contains(Flags::FUA);
        let range = Self::range(asked.lba, asked.blocks);
        let source = Self::range(asked.source, asked.blocks);
        let what = format!("seed {seed}: {:?} at {}", asked.op, asked.lba);
        match asked.op {
            Op::Read if done => {
                for (bytes, block) in completion.data[0].chunks(512).zip(&mut self.blocks[range]) {
                    let same = bytes.iter().all(|byte| *byte == bytes[0]);
                    assert!(
                        same && block.now.contains(&bytes[0]),
                        "{what}: {} is not one of {:?}",
                        bytes[0],
                        block.now
                    );
                    block.is(bytes[0]);
                }
            }
            Op::Write | Op::WriteZeroes => {
                for block in &mut self.blocks[range] {
                    block.wrote(&[asked.new], done, through);
                }
            }
            // Whether the advice is taken is the drive's affair.
            Op::Unmap => {
                for block in &mut self.blocks[range] {
                    block.wrote(&[0], false, false);
                }
            }
            Op::Compare | Op::CompareAndWrite => {
                let blocks = &mut self.blocks[range];
                if done {
                    assert!(
                        blocks.iter().all(|block| block.now.contains(&asked.old)),
                        "{what}: not equal"
                    );
                    blocks.iter_mut().for_each(|block| block.is(asked.old));
                } else if completion.status == Status::Miscompare {
                    let equal = blocks.iter().all(|block| block.now == [asked.old]);
                    assert!(!equal, "{what}: equal");
                }
                if asked.op == Op::CompareAndWrite && completion.status != Status::Miscompare {
                    blocks
                        .iter_mut()
                        .for_each(|block| block.wrote(&[asked.new], done, through));
                }
            }
            Op::Copy => {
                let values: Vec<Vec<u8>> = self.blocks[source]
                    .iter()
                    .map(|block| block.now.clone())
                    .collect();
                // After an interrupted copy onto part of itself, a source may be a written
                // destination.
                let any: Vec<u8> = values.concat();
                for (block, values) in self.blocks[range].iter_mut().zip(&values) {
                    if done {
                        block.wrote(values, true, false)
                    } else {
                        block.wrote(&any, false, false)
                    }
                }
            }
            Op::Flush if done => {
                for block in &mut self.blocks {
                    block.since.clone_from(&block.now);
                }
            }
            Op::Read | Op::Flush | Op::Verify => {}
        }
    }

    fn pull(&mut self) {
        let keep = match self.random.below(3) {
            0 => CacheSurvival::All,
            1 => CacheSurvival::Some,
            _ => CacheSurvival::Nothing,
        };
        self.rig.drive.pull(keep);
        self.until(|world| {
            world.queue.inflight() == 0 && world.controller.status().state == State::Removed
        });
        for block in &mut self.blocks {
            for value in block.since.clone() {
                add(&mut block.now, value);
            }
            // The present contents are the only ones.
            block.since.clone_from(&block.now);
        }
        let function: Arc<dyn Function> = self.rig.drive.plug();
        let back = self.controller.clone();
        let returned = self
            .rig
            .core
            .block_on(async move { back.returned(function).await });
        assert!(
            returned.is_ok(),
            "seed {}: {:?}",
            self.seed,
            returned.err().map(|e| e.to_string())
        );
    }
}

/// How many I/Os ended, and how often the controller was reset.
fn run(seed: u64) -> (u64, u64) {
    let mut world = World::new(seed);
    world.rig.drive.set_chances(Chances {
        retryable: 4_000,
        fatal_status: 2_000,
        done_but_status: 3_000,
        never: 3_000,
        late: 8_000,
        late_by: Duration::from_secs(1),
        wrong_cid: 800,
        duplicate: 800,
        wrong_phase: 800,
        lost_interrupt: 30_000,
        controller_fatal: 1_000,
        reset_itself: 1_000,
    });
    let mut pulls = 0;
    for _ in 0..STEPS {
        world.ask();
        if world.random.below(3) == 0 {
            world.pause();
        }
        if world.random.below(80) == 0 {
            world.pull();
            pulls += 1;
        }
    }
    world.until(|world| world.queue.inflight() == 0);
    world.collect();
    assert!(world.pending.is_empty(), "seed {seed}: I/O was lost");
    world.rig.drive.heal();
    let asked = world.controller.clone();
    let reset = world.rig.core.block_on(async move { asked.reset().await });
    assert_eq!(reset, Ok(()), "seed {seed}");
    let status = world.controller.status();
    assert_eq!(status.losses, pulls, "seed {seed}: {status:?}");
    let World {
        mut rig,
        controller,
        mut queue,
        blocks,
        ended,
        ..
    } = world;
    for (lba, block) in blocks.iter().enumerate() {
        let holds = rig.values(&mut *queue, lba as u64, 1)[0];
        let may = &block.now;
        assert!(
            may.contains(&holds),
            "seed {seed}: block {lba} holds {holds}, not {may:?}"
        );
    }
    rig.end(&controller, queue);
    (ended, status.resets)
}

#[test]
fn seeded_runs_with_every_fault() {
    let given = std::env::var(SEED_VARIABLE).ok();
    if let Some(seed) = given.and_then(|text| text.parse().ok()) {
        run(seed);
        return;
    }
    let (mut ended, mut resets) = (0, 0);
    for seed in 1..=SEEDS {
        match std::panic::catch_unwind(|| run(seed)) {
            Ok((some, times)) => (ended, resets) = (ended + some, resets + times),
            Err(panic) => {
                eprintln!("replay with {SEED_VARIABLE}={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(ended > SEEDS * STEPS as u64 / 4, "{ended} I/Os are too few");
    // One is asked for in each; the drive is to give reasons for more.
    assert!(
        resets > SEEDS + SEEDS / 8,
        "{resets} resets are too few to tell"
    );
}

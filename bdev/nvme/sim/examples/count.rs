//! Runs a number of 4 KiB I/Os through the driver on a simulated drive. `cargo xtask bench nvme`
//! counts the instructions of it:
//!
//! ```text
//! count read|write DEPTH IOS
//! ```
//!
//! Rounds of: DEPTH submits, the poll that rings the doorbell, the drive's turn, the poll that
//! collects all completions. DEPTH is at most 256. With a depth of 0: one read, and `IOS` polls
//! while it is in flight.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Done, Io, Op, Queue};
use nacre_bdev_nvme::{Controller, DriveOptions, Function};
use nacre_bdev_nvme_sim::{Config, Drive, NamespaceConfig, Ticker};
use nacre_hugepages::{Arena, ArenaOptions, Buf, ClassSpec, HugepagePolicy, Pool};
use nacre_reactor::TestCore;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;
const MOST: usize = 256;

/// The requested run.
struct Plan {
    op: Op,
    /// 0: only polls, with one I/O in flight.
    depth: usize,
    ios: u64,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(plan) = plan(&arguments) else {
        eprintln!("usage: count read|write DEPTH IOS, with a depth of at most {MOST}");
        return ExitCode::from(2);
    };
    run(&plan);
    ExitCode::SUCCESS
}

fn plan(arguments: &[String]) -> Option<Plan> {
    let [op, depth, ios] = arguments else {
        return None;
    };
    let op = match op.as_str() {
        "read" => Op::Read,
        "write" => Op::Write,
        _ => return None,
    };
    let depth = depth.parse().ok().filter(|depth| *depth <= MOST)?;
    let ios = ios.parse().ok()?;
    Some(Plan { op, depth, ios })
}

fn run(plan: &Plan) {
    let config = Config {
        namespaces: vec![NamespaceConfig::new(1, BLOCK as u32, BLOCKS)],
        ..Config::default()
    };
    let mut core = TestCore::new();
    // Time 0 means that no poll has happened yet.
    core.clock().advance(Duration::from_secs(1));
    let classes = [ClassSpec {
        size: BLOCK,
        count: MOST + 1,
    }];
    let arena = Arena::allocate(ArenaOptions {
        hugepages: HugepagePolicy::Off,
        ..ArenaOptions::new(Pool::bytes_for(&classes) as u64)
    });
    let arena = arena.expect("memory for buffers");
    arena
        .register(config.slot, config.iommu.clone())
        .expect("no other user has the slot");
    let pool = Pool::on_arena(&arena, &classes).expect("carved to measure");

    let drive = Drive::new(config);
    core.add_poller(Box::new(Ticker(drive.clone())))
        .expect("the first poller");
    let function: Arc<dyn Function> = drive.plug();
    let handle = core.core().clone();
    let attach = async move {
        Controller::attach(&handle, function, DriveOptions::new("count"), Arc::new(())).await
    };
    let controller = core.block_on(attach).expect("a drive without faults");
    let device = controller.namespaces().remove(0);
    let buf = || pool.acquire(BLOCK).expect("the pool has enough buffers");
    let mut rig = Rig {
        queue: Arc::clone(&device).open(&pool).expect("the first queue"),
        bufs: (0..plan.depth.max(1)).map(|_| buf()).collect(),
        done: Done::with_capacity(MOST),
        core,
    };
    // The first I/O waits for the creation of the queue.
    rig.rounds(Op::Write, 1, 1);
    match plan.depth {
        0 => rig.wait(plan.ios),
        depth => rig.rounds(plan.op, depth, plan.ios),
    }
    let mut core = rig.core;
    drop((rig.queue, rig.bufs));
    core.block_on(async move { controller.detach().await });
    drive.check();
}

struct Rig {
    core: TestCore,
    queue: Box<dyn Queue>,
    bufs: Vec<Buf>,
    done: Done,
}

impl Rig {
    /// Executes `ios` I/Os, `depth` at a time.
    fn rounds(&mut self, op: Op, depth: usize, ios: u64) {
        let mut left = ios;
        while left > 0 {
            let batch = left.min(depth as u64);
            for at in 0..batch {
                // Consecutive I/Os are far apart, like random ones.
                self.submit(at, op, (left - at) * 389 % BLOCKS);
            }
            self.poll();
            self.finish(batch as usize);
            left -= batch;
        }
    }

    /// Submits one I/O, and polls this number of times before it completes.
    fn wait(&mut self, polls: u64) {
        self.submit(0, Op::Read, 0);
        for _ in 0..=polls {
            self.poll();
        }
        self.finish(1);
    }

    fn submit(&mut self, token: u64, op: Op, lba: u64) {
        let buf = self.bufs.pop().expect("one for each of a round");
        let io = Io::new(token, op, lba, 1).with(buf);
        assert!(self.queue.submit(io).is_ok(), "the queue has room");
    }

    fn poll(&mut self) {
        self.queue.poll(self.core.now(), &mut self.done);
    }

    fn finish(&mut self, ios: usize) {
        assert!(self.done.is_empty(), "the drive had no turn");
        while self.done.is_empty() {
            self.core.turn();
            self.poll();
        }
        assert_eq!(self.done.len(), ios, "the drive answers all in one turn");
        for mut completion in self.done.drain() {
            assert!(completion.status.is_ok(), "a drive without faults");
            self.bufs.extend(completion.data.pop());
        }
    }
}

//! Goal: no fault, crash or second holder makes a volume lose an acknowledged write, return two
//! values for one question, leave replicas different, or fail to heal. Method: many short runs of
//! the simulator, each determined by its seed, on as many threads as there are cores.

use std::sync::atomic::{AtomicU64, Ordering};

use nacre_bdev_replica_sim::{Options, Report, replay, run};

const FIRST: u64 = 1;

/// As many as time allows: `cargo xtask test` sets this.
fn runs() -> u64 {
    match std::env::var_os("NACRE_TEST_AT_LENGTH") {
        Some(_) => 3000,
        None => 600,
    }
}

#[test]
fn many_short_runs() {
    let (next, runs) = (AtomicU64::new(FIRST), runs());
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().min(8));
    let work = || {
        let (mut sum, mut failed) = (Report::default(), Vec::new());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= FIRST + runs {
                return (sum, failed);
            }
            match run(seed, &Options::default()) {
                Ok(report) => sum = sum + report,
                Err(what) => failed.push(format!("seed {seed}: {what}\nagain: {}", replay(seed))),
            }
        }
    };
    let (mut sum, mut failed) = (Report::default(), Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            let (report, found) = worker.join().expect("a run catches its panics");
            sum = sum + report;
            failed.extend(found);
        }
    });
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
    // A simulator without events finds nothing.
    let enough = [
        ("reads", sum.reads, 40 * runs),
        ("acknowledged writes", sum.writes, 40 * runs),
        ("I/Os given up", sum.aborts, 4 * runs),
        ("openings", sum.opens, runs),
        ("crashes", sum.crashes, runs),
        ("lost caches", sum.power_losses, runs),
        ("replicas out", sum.retired, runs / 4),
        ("replicas copied", sum.resynced, runs),
        ("fenced holders", sum.fenced, runs / 20),
        ("hosts that went", sum.left, runs / 2),
        ("watermarks", sum.watermarks, runs / 20),
        ("disks that lost their end", sum.cut, runs / 10),
        ("replicas that had it back", sum.cut_replicas, runs / 20),
    ];
    for (what, found, least) in enough {
        assert!(found >= least, "only {found} {what} in {runs} runs");
    }
}

/// A seed determines a run: repeated, it is the same, to the last event.
#[test]
fn a_seed_is_a_run() {
    for seed in [3, 17, 41] {
        let report = |_| run(seed, &Options::default()).map(|report| format!("{report:?}"));
        let [first, second] = [0, 1].map(report);
        assert_eq!(first, second, "seed {seed}");
    }
}

//! Goal: no fault, crash or second holder makes a volume lose an acknowledged write, return two
//! values for one question, leave replicas different, or fail to heal. Method: many short runs of
//! the simulator, each determined by its seed, on as many threads as there are cores.

use nacre_bdev_replica_sim::{Options, replay, run};
use nacre_random::seeds::{assert_enough, run_all, seeds};

#[test]
fn many_short_runs() {
    let seeds = seeds(600, 3000);
    let runs = seeds.end - seeds.start;
    let run = |seed| {
        let again = |what| format!("{what}\nagain: {}", replay(seed));
        run(seed, &Options::default()).map_err(again)
    };
    let sum = run_all(seeds, run).unwrap_or_else(|failures| panic!("{failures}"));
    let enough = [
        ("reads", sum.reads, 40 * runs),
        ("acknowledged writes", sum.writes, 40 * runs),
        ("I/Os given up", sum.aborts, 4 * runs),
        ("openings", sum.opens, runs),
        ("crashes", sum.crashes, runs),
        ("lost caches", sum.power_losses, runs),
        ("replicas out", sum.retired, runs / 4),
        ("silent replicas out", sum.silent, runs / 1000),
        ("replicas copied", sum.resynced, runs),
        ("fenced holders", sum.fenced, runs / 20),
        ("hosts that went", sum.left, runs / 2),
        ("watermarks", sum.watermarks, runs / 20),
        ("disks that lost their end", sum.cut, runs / 10),
        ("leases that ended", sum.leases.ended, runs / 8),
        (
            "former holders that went on",
            sum.leases.outlived,
            runs / 40,
        ),
        ("answers by confirmation", sum.leases.confirmed, runs),
        ("replicas that had it back", sum.cut_replicas, runs / 20),
        ("holds", sum.holds.held, runs / 2),
        ("holds with replicas compared", sum.holds.compared, runs / 8),
    ];
    assert_enough(runs, &enough);
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

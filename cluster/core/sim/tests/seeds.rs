//! Goal: no stall, crash, partition, or absence of the store makes two nodes serve, loses an
//! acknowledged write, or leaves the volume without a holder. Method: many short runs of the
//! simulator, each determined by its seed, on as many threads as there are cores.

use nacre_cluster_core_sim::{Options, replay, run};
use nacre_random::seeds::{assert_enough, run_all, seeds};

#[test]
fn many_short_runs() {
    let seeds = seeds(600, 5000);
    let runs = seeds.end - seeds.start;
    let run = |seed| {
        let again = |what| format!("{what}\nagain: {}", replay(seed));
        run(seed, &Options::default()).map_err(again)
    };
    let sum = run_all(seeds, run).unwrap_or_else(|failures| panic!("{failures}"));
    let enough = [
        ("reads", sum.reads, 100 * runs),
        ("acknowledged writes", sum.writes, 80 * runs),
        ("retries on another path", sum.retries, 3 * runs),
        ("takes", sum.takes, 2 * runs),
        ("fences", sum.fences, runs),
        ("handovers", sum.handovers, runs / 4),
        ("crashes", sum.crashes, runs),
        ("losses of two nodes", sum.losses, runs / 8),
        ("stalls", sum.stalls, 2 * runs),
        ("promotions", sum.promotions, runs),
        ("held answers", sum.held, 2 * runs),
        ("rounds of confirmation", sum.confirmations, runs),
    ];
    assert_enough(runs, &enough);
}

/// A seed determines a run: repeated, it is the same.
#[test]
fn a_seed_is_a_run() {
    for seed in [3, 17, 41] {
        let [first, second] = [0, 1].map(|_| run(seed, &Options::default()));
        assert_eq!(first, second, "seed {seed}");
    }
}

//! Runs a simulator with many seeds, on one thread per core, eight at most.

use std::ops::{Add, Range};
use std::sync::atomic::{AtomicU64, Ordering};

/// The seeds of a test, from 1 on: `short` without the environment variable
/// `NACRE_TEST_AT_LENGTH`, half of `long` if it is `ci`, as `cargo xtask test` sets it, else
/// `long`.
pub fn seeds(short: u64, long: u64) -> Range<u64> {
    const FIRST: u64 = 1;
    match std::env::var_os("NACRE_TEST_AT_LENGTH") {
        None => FIRST..FIRST + short,
        Some(value) if value == "ci" => FIRST..FIRST + long / 2,
        Some(_) => FIRST..FIRST + long,
    }
}

/// Calls `run` with every seed, and returns the sum of the reports. If runs fail, all seeds run
/// all the same; the error has the seed and text of each failure.
pub fn run_all<R: Default + Add<Output = R> + Send>(
    seeds: Range<u64>,
    run: impl Fn(u64) -> Result<R, String> + Sync,
) -> Result<R, String> {
    let next = AtomicU64::new(seeds.start);
    let results = on_all_cores(|| {
        let (mut sum, mut failures) = (R::default(), Vec::new());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return (sum, failures);
            }
            match run(seed) {
                Ok(report) => sum = sum + report,
                Err(what) => failures.push(format!("seed {seed}: {what}")),
            }
        }
    });
    let (mut sum, mut failures) = (R::default(), Vec::new());
    for (report, found) in results {
        sum = sum + report;
        failures.extend(found);
    }
    if failures.is_empty() {
        Ok(sum)
    } else {
        Err(failures.join("\n\n"))
    }
}

/// Calls `work` once on each of up to eight threads, one per core, and returns all results. A panic
/// of a thread is passed on.
pub fn on_all_cores<T: Send>(work: impl Fn() -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get().min(8));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(&work)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, T>| {
            let result = worker.join();
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().map(join).collect()
    })
}

/// Checks that a simulator's runs had enough events of each kind: a run without faults proves
/// nothing. `counts` has the name of each event, its count, and the least allowed count.
///
/// # Panics
/// When a count is too low.
pub fn assert_enough(runs: u64, counts: &[(&str, u64, u64)]) {
    for (what, found, least) in counts {
        assert!(found >= least, "only {found} {what} in {runs} runs");
    }
}

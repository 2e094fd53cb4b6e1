//! The program of `cargo xtask simulate`: runs the simulator for one seed after the other.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use nacre_bdev_replica_sim::{LEASES_EVERY, Options, has_leases, replay, run};

const USAGE: &str = "usage: simulate [--seed N] [--runs N | --minutes M] [--ios N] \
    [--leases] [--trace [--block N]] [--mutation NAME (with the feature `mutations`)]";

fn main() -> ExitCode {
    let (mut seed, mut runs, mut minutes) = (1u64, None, None);
    let mut only_leases = false;
    let mut options = Options::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|n| n.parse::<u64>().ok());
        let understood = match arg.as_str() {
            "--seed" => number().map(|n| seed = n),
            "--runs" => number().map(|n| runs = Some(n)),
            "--minutes" => number().map(|n| minutes = Some(n)),
            "--ios" => number().map(|n| options.ios = n),
            "--block" => number().map(|n| options.block = Some(n)),
            #[cfg(feature = "mutations")]
            "--mutation" => args.next().and_then(|name| {
                use nacre_bdev_replica_sim::Mutation;
                let mut all = Mutation::ALL.into_iter();
                let which = all.find(|which| format!("{which:?}") == name);
                which.map(|which| Mutation::activate(Some(which)))
            }),
            "--leases" => {
                only_leases = true;
                Some(())
            }
            "--trace" => {
                options.trace = true;
                Some(())
            }
            _ => None,
        };
        if understood.is_none() {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    let runs = runs.unwrap_or_else(|| if minutes.is_some() { u64::MAX } else { 100 });
    let end = minutes.map(|m| Instant::now() + Duration::from_secs(60 * m));
    // A failing run panics in the middle of its world; the error contains its message.
    if !options.trace {
        std::panic::set_hook(Box::new(|_| {}));
    }
    let began = Instant::now();
    let (mut done, mut failed) = (0u64, 0u64);
    let mut sum = nacre_bdev_replica_sim::Report::default();
    while only_leases && !has_leases(seed) {
        seed = seed.wrapping_add(1);
    }
    while done < runs && end.is_none_or(|end| Instant::now() < end) {
        match run(seed, &options) {
            Ok(report) => sum = sum + report,
            Err(what) => {
                failed += 1;
                println!("seed {seed}: {what}\nagain: {}\n", replay(seed));
            }
        }
        seed = seed.wrapping_add(if only_leases { LEASES_EVERY } else { 1 });
        done += 1;
    }
    println!(
        "{done} runs in {:?}, {failed} failed; {sum:?}",
        began.elapsed()
    );
    match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

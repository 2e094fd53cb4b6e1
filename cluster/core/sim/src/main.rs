//! The program of `cargo xtask simulate cluster`: runs the simulator for one seed after the other.

#![forbid(unsafe_code)]

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nacre_cluster_core_sim::{Options, Report, replay, run};

const USAGE: &str = "usage: simulate cluster [--seed N] [--runs N | --minutes M] [--seconds N] \
    [--trace] [--mutation NAME (with the feature `mutations`)]";

struct Arguments {
    seed: u64,
    runs: Option<u64>,
    minutes: Option<u64>,
    options: Options,
}

fn main() -> ExitCode {
    let Some(arguments) = Arguments::parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let start = Instant::now();
    let limit = arguments
        .minutes
        .map(|minutes| Duration::from_secs(60 * minutes));
    let most = arguments
        .runs
        .or_else(|| limit.map(|_| u64::MAX))
        .unwrap_or(100);
    let (mut sum, mut failures, mut runs) = (Report::default(), 0, 0);
    let _ = (arguments.seed..).try_for_each(|seed| {
        if runs == most || limit.is_some_and(|limit| start.elapsed() >= limit) {
            return ControlFlow::Break(());
        }
        runs += 1;
        match run(seed, &arguments.options) {
            Ok(report) => sum = sum + report,
            Err(what) => {
                println!("seed {seed}: {what}\nagain: {}\n", replay(seed));
                failures += 1;
            }
        }
        ControlFlow::Continue(())
    });
    let took = start.elapsed();
    println!("{runs} runs in {took:?}, {failures} failed; {sum:?}");
    ExitCode::from(u8::from(failures > 0))
}

impl Arguments {
    fn parse(mut given: impl Iterator<Item = String>) -> Option<Self> {
        let mut arguments = Self {
            seed: 1,
            runs: None,
            minutes: None,
            options: Options::default(),
        };
        while let Some(name) = given.next() {
            if name == "--trace" {
                arguments.options.trace = true;
                continue;
            }
            let value = given.next()?;
            match name.as_str() {
                "--seed" => arguments.seed = value.parse().ok()?,
                "--runs" => arguments.runs = Some(value.parse().ok()?),
                "--minutes" => arguments.minutes = Some(value.parse().ok()?),
                "--seconds" => arguments.options.seconds = value.parse().ok()?,
                #[cfg(feature = "mutations")]
                "--mutation" => {
                    use nacre_cluster_core_sim::Mutation;
                    let mut all = Mutation::ALL.into_iter();
                    let which = all.find(|which| format!("{which:?}") == value)?;
                    Mutation::activate(Some(which));
                }
                _ => return None,
            }
        }
        Some(arguments)
    }
}

//! `cargo xtask simulate pool`: runs the simulation tests of the pool core from a seed, with
//! optimization.
//!
//! The checker and its deliberate faults are tests of `nacre-bdev-pool-core`, so that the shipped
//! crate has none of them.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::setup;

/// Runs without `--runs`.
const RUNS: u64 = 20_000;

/// The seeds to run. Without an argument, also every short history.
#[derive(Debug, PartialEq, Eq)]
struct Seeds {
    first: u64,
    runs: u64,
    with_histories: bool,
}

impl Seeds {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut seeds = Self {
            first: 1,
            runs: RUNS,
            with_histories: arguments.is_empty(),
        };
        let mut rest = arguments.iter();
        while let Some(option) = rest.next() {
            let field = match option.as_str() {
                "--seed" => &mut seeds.first,
                "--runs" => &mut seeds.runs,
                _ => bail!("simulate pool takes --seed N and --runs N, not {option}"),
            };
            let number = rest
                .next()
                .with_context(|| format!("{option} needs a number"))?;
            *field = number
                .parse()
                .with_context(|| format!("{option} {number} is not a number"))?;
        }
        Ok(seeds)
    }
}

pub(crate) fn simulate(root: &Path, arguments: &[String]) -> Result<ExitCode> {
    let seeds = Seeds::parse(arguments)?;
    let mut cargo = setup::cargo();
    cargo
        .current_dir(root)
        .args(["test", "--quiet", "--release", "--locked", "--lib"])
        .args(["--package", "nacre-bdev-pool-core", "--"])
        .args(["--nocapture", "--exact", "tests::seeds::many_seeds"])
        .arg("tests::seeds::many_seeds_of_several_disks")
        .arg("tests::seeds::many_seeds_of_external_devices")
        .args(
            seeds
                .with_histories
                .then_some([
                    "tests::enumeration::every_short_history",
                    "tests::enumeration::histories_of_two_disks",
                    "tests::enumeration::histories_with_a_removal",
                    "tests::enumeration::operations_during_a_removal",
                    "tests::enumeration::longer_histories_of_parents",
                    "tests::enumeration::writes_during_copies",
                ])
                .into_iter()
                .flatten(),
        )
        .env("NACRE_TEST_AT_LENGTH", "1")
        .env("NACRE_POOL_SEED", seeds.first.to_string())
        .env("NACRE_POOL_RUNS", seeds.runs.to_string());
    let status = cargo.status().context("running cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments() {
        let parse = |text: &str| {
            let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
            Seeds::parse(&words)
        };
        let all = Seeds {
            first: 1,
            runs: RUNS,
            with_histories: true,
        };
        assert_eq!(parse("").unwrap(), all);
        let one = Seeds {
            first: 7,
            runs: 1,
            with_histories: false,
        };
        assert_eq!(parse("--seed 7 --runs 1").unwrap(), one);
        for wrong in ["--seed", "--runs x", "--trace", "7"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}

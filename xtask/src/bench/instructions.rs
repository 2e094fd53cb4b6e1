//! Part of `cargo xtask bench tcp`: instructions per request in the daemon's user space. The count
//! does not depend on the machine's load, so it shows a regression of one percent.
//!
//! Callgrind counts the instructions of the whole daemon in two runs with different numbers of
//! requests. The difference is the cost of the additional requests, without start, connect and
//! stop. Reactors sleep when idle in these runs, so idle turns do not count.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::target::{Target, number};
use crate::setup::{self, Need};

pub(super) const NEEDS: &[Need] = &[Need {
    program: "valgrind",
    package: "valgrind",
}];
/// Callgrind runs about fifty times slower than native code.
const LOAD_LIMIT: Duration = Duration::from_secs(300);
const FEW: u32 = 2_000;
const MANY: u32 = 22_000;

pub(super) fn measure(nacre: &Path) -> Result<()> {
    setup::ensure(NEEDS)?;
    for (what, rw, depth) in [
        ("4 KiB read, depth 1", "randread", 1),
        ("4 KiB read, depth 128", "randread", 128),
        ("4 KiB write, depth 1", "randwrite", 1),
        ("4 KiB write, depth 128", "randwrite", 128),
    ] {
        let (few, many) = (
            count(nacre, rw, depth, FEW)?,
            count(nacre, rw, depth, MANY)?,
        );
        let each = (many.instructions - few.instructions) / (many.requests - few.requests);
        println!("instructions per {what}, target in user space: {each:.0}");
    }
    Ok(())
}

struct Count {
    instructions: f64,
    requests: f64,
}

fn count(nacre: &Path, rw: &str, depth: u32, requests: u32) -> Result<Count> {
    let out = std::env::temp_dir().join(format!("nacre-callgrind-{}", std::process::id()));
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(nacre);
    let target = Target::start_as(nacre, command, &["--interrupt-mode"])?;
    let load = [
        "--rw",
        rw,
        "--size",
        "4096",
        "--depth",
        &depth.to_string(),
        "--queues",
        "1",
        "--ios",
        &requests.to_string(),
    ];
    let answer = target.load(&load, LOAD_LIMIT)?;
    target.stop()?;
    Ok(Count {
        instructions: total_of(&out)?,
        requests: number(&answer, &["read", "ios"])? + number(&answer, &["write", "ios"])?,
    })
}

/// Returns the total in callgrind's output file, and removes the file.
pub(super) fn total_of(out: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(out)
        .with_context(|| format!("reading what callgrind left in {}", out.display()))?;
    std::fs::remove_file(out).with_context(|| format!("removing {}", out.display()))?;
    total(&text)
}

/// The sum over all threads, which callgrind writes at the end of its file.
fn total(text: &str) -> Result<f64> {
    let Some(line) = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("totals:"))
    else {
        bail!("callgrind's file has no totals");
    };
    line.trim().parse().context("callgrind's totals")
}

#[cfg(test)]
mod tests {
    use super::total;

    #[test]
    fn the_last_totals_line_counts() {
        assert_eq!(
            total("events: Ir\nfn=(1)\n1 2\ntotals: 1234\n").unwrap(),
            1234.0
        );
        assert!(total("events: Ir\n").is_err());
    }
}

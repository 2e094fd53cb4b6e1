//! The suite `spdk-compare` of `cargo xtask test`: runs `tests/spdk/compare.py`, which compares the
//! RPCs of Nacre with those of SPDK's target, call by call.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::process::{self, End};
use crate::setup;
use crate::tally::Tally;

/// Environment variable with the folder of an SPDK build.
pub const VARIABLE: &str = "NACRE_SPDK_DIR";

/// The name of this suite, for filters.
pub const NAME: &str = "spdk-compare";

const SCRIPT: &str = "tests/spdk/compare.py";
const BUILD_LIMIT: Duration = Duration::from_secs(1800);
const LIMIT: Duration = Duration::from_secs(1200);

pub fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

pub fn run(root: &Path) -> Result<Tally> {
    let Some(build) = std::env::var_os(VARIABLE).filter(|dir| !dir.is_empty()) else {
        let mut tally = Tally::default();
        tally.skip(format!("{NAME}: {VARIABLE} names no SPDK build"));
        return Ok(tally);
    };
    let nacre = build_nacre(root)?;
    let mut command = Command::new("python3");
    command
        .current_dir(root)
        // -B: write no compiled copy into the repository.
        .args(["-B", SCRIPT, "--spdk"])
        .arg(PathBuf::from(build))
        .arg("--nacre")
        .arg(nacre);
    let mut reader = Reader::default();
    let end = process::stream(&mut command, LIMIT, |line| reader.line(line))?;
    Ok(reader.finish(end))
}

fn build_nacre(root: &Path) -> Result<PathBuf> {
    let arguments = [
        "--locked",
        "--package",
        "nacre-engine-cli",
        "--bin",
        "nacre",
    ];
    setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
    Ok(crate::target_dir(root).join("debug/nacre"))
}

/// Reads the script's output: each failure, and the totals in the last line.
#[derive(Default)]
struct Reader {
    tally: Tally,
    sum: Option<(u64, u64)>,
}

impl Reader {
    fn line(&mut self, line: &str) {
        if let Some(failure) = line.strip_prefix("FAILED: ") {
            self.tally.failures.push(format!("{NAME}: {failure}"));
        } else {
            self.sum = sum(line);
        }
    }

    fn finish(mut self, end: End) -> Tally {
        match self.sum {
            Some((passed, failed)) if end.success() == (failed == 0) => {
                self.tally.passed = passed;
                self.tally.failed = failed;
            }
            _ => self.tally.fail(format!("{NAME}: {end} without a sum")),
        }
        self.tally
    }
}

/// The numbers of `12 passed, 3 failed`.
fn sum(line: &str) -> Option<(u64, u64)> {
    let (passed, failed) = line.split_once(" passed, ")?;
    let failed = failed.strip_suffix(" failed")?;
    Some((passed.parse().ok()?, failed.parse().ok()?))
}

#[cfg(test)]
mod tests {
    //! Goal: the script's result becomes the suite's result. Method: sample outputs with exit
    //! codes.

    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    fn read(text: &str, code: i32) -> Tally {
        let mut reader = Reader::default();
        text.lines().for_each(|line| reader.line(line));
        reader.finish(End::Exited(ExitStatus::from_raw(code << 8)))
    }

    #[test]
    fn the_last_line_counts() {
        let good = read("-- calls\n1 calls of 1 methods\n12 passed, 0 failed\n", 0);
        assert_eq!(good.to_string(), "12 passed, 0 failed");
        let bad = read("FAILED: x, good: -1, not -19\n11 passed, 1 failed\n", 1);
        assert_eq!(bad.to_string(), "11 passed, 1 failed");
        assert_eq!(bad.failures, ["spdk-compare: x, good: -1, not -19"]);
    }

    #[test]
    fn output_without_totals_is_a_failure() {
        for (text, code) in [
            ("", 0),
            ("Traceback\n", 1),
            ("12 passed, 0 failed\n", 1),
            ("11 passed, 1 failed\n", 0),
            ("12 passed, 0 failed\nTraceback\n", 1),
        ] {
            assert_eq!(read(text, code).failed, 1, "{text}");
        }
    }

    #[test]
    fn filters_match_the_name() {
        let filter = |text: &str| [text.to_owned()];
        assert!(matches(&[]) && matches(&filter("spdk")));
        assert!(!matches(&filter("digest")));
    }
}

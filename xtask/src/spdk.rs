//! The suite `spdk-compare` of `cargo xtask test`: runs `tests/spdk/compare.py`, which compares the
//! RPCs of Nacre with those of SPDK's target, call by call.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::tally::{ScriptTest, Tally};
use crate::{process, vm};

/// Environment variable with the folder of an SPDK build.
pub(crate) const VARIABLE: &str = "NACRE_SPDK_DIR";

/// The name of this suite, for filters.
pub(crate) const NAME: &str = "spdk-compare";

const SCRIPT: &str = "tests/spdk/compare.py";
const LIMIT: Duration = Duration::from_secs(1200);

pub(crate) fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

pub(crate) fn run(root: &Path) -> Result<Tally> {
    let Some(build) = std::env::var_os(VARIABLE).filter(|dir| !dir.is_empty()) else {
        let mut tally = Tally::default();
        tally.skip(format!("{NAME}: {VARIABLE} names no SPDK build"));
        return Ok(tally);
    };
    let nacre = vm::debug_nacre(root, None)?;
    let mut command = Command::new("python3");
    command
        .current_dir(root)
        // -B: write no compiled copy into the repository.
        .args(["-B", SCRIPT, "--spdk"])
        .arg(PathBuf::from(build))
        .arg("--nacre")
        .arg(nacre);
    let mut reader = ScriptTest::new(NAME);
    let end = process::stream(&mut command, LIMIT, |line| reader.line(line))?;
    Ok(reader.finish(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_match_the_name() {
        let filter = |text: &str| [text.to_owned()];
        assert!(matches(&[]) && matches(&filter("spdk")));
        assert!(!matches(&filter("digest")));
    }
}

//! The suite `alerts` of `cargo xtask test`: checks and tests the alerting rules in `deploy` with
//! Prometheus's `promtool`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use crate::tally::Tally;
use crate::{process, vm};

const LIMIT: Duration = Duration::from_secs(60);
const NAME: &str = "alerts";
const PROMTOOL: &str = "usr/bin/promtool";

/// True if a filter selects this suite.
pub(crate) fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

pub(crate) fn run(root: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    // Unpacked, because installing the package would start a server.
    let promtool = match vm::unpacked("prometheus", PROMTOOL) {
        Ok(folder) => folder.join(PROMTOOL),
        Err(error) => {
            println!("SKIPPED: {NAME}: no promtool (Debian's package prometheus): {error:#}");
            tally.skip(format!("{NAME}: no promtool: {error:#}"));
            return Ok(tally);
        }
    };
    for (what, file) in [("check", "alerts.yml"), ("test", "alerts_test.yml")] {
        let mut command = Command::new(&promtool);
        command.current_dir(root.join("deploy"));
        let result = process::capture(command.args([what, "rules", file]), LIMIT);
        match &result {
            Ok(said) => println!("{}", said.trim()),
            Err(error) => println!("{error:#}"),
        }
        tally.check(
            &format!("{NAME}: promtool {what} rules {file}"),
            result.is_ok(),
        );
    }
    Ok(tally)
}

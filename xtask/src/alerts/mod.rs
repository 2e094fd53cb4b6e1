//! The suite `alerts` of `cargo xtask test`: checks and tests the alerting rules and the Grafana
//! dashboard in `deploy`, with Prometheus's `promtool` where it can be had.

mod coverage;
mod dashboard;
mod expression;
mod metrics;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::tally::Tally;
use crate::{process, setup, vm};

const LIMIT: Duration = Duration::from_secs(120);
const NAME: &str = "alerts";
const PROMTOOL: &str = "usr/bin/promtool";

/// True if a filter selects this suite.
pub(crate) fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

pub(crate) fn run(root: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    let deploy = root.join("deploy");
    let gaps = coverage::gaps(
        &read(&deploy.join("alerts.yml"))?,
        &read(&deploy.join("alerts_test.yml"))?,
    );
    report(&mut tally, "each alert has tests", &gaps);
    let dashboard = dashboard::check(
        &read(&deploy.join("grafana-nacre.json"))?,
        &read(&root.join("docs/reference/metrics.md"))?,
    )
    .context("deploy/grafana-nacre.json")?;
    report(&mut tally, "the dashboard is sound", &dashboard.faults);

    // Unpacked, because installing the package would start a server.
    let promtool = match vm::unpacked("prometheus", PROMTOOL) {
        Ok(folder) => folder.join(PROMTOOL),
        Err(error) => {
            println!("SKIPPED: {NAME}: no promtool (Debian's package prometheus): {error:#}");
            tally.skip(format!("{NAME}: no promtool: {error:#}"));
            return Ok(tally);
        }
    };
    let expressions = expressions(root, &dashboard)?;
    for (what, file) in [
        ("check", deploy.join("alerts.yml")),
        ("test", deploy.join("alerts_test.yml")),
        ("check", expressions),
    ] {
        let mut command = Command::new(&promtool);
        command.current_dir(&deploy);
        let result = process::capture(command.args([what, "rules"]).arg(&file), LIMIT);
        match &result {
            Ok(said) => println!("{}", said.trim()),
            Err(error) => println!("{error:#}"),
        }
        let file = file.file_name().unwrap_or_default().display();
        tally.check(
            &format!("{NAME}: promtool {what} rules {file}"),
            result.is_ok(),
        );
    }
    Ok(tally)
}

/// Prints the faults, and counts one test.
fn report(tally: &mut Tally, test: &str, faults: &[String]) {
    for fault in faults {
        println!("{fault}");
    }
    tally.check(&format!("{NAME}: {test}"), faults.is_empty());
}

/// Writes the dashboard's expressions as rules; returns the file.
fn expressions(root: &Path, dashboard: &dashboard::Checked) -> Result<PathBuf> {
    let folder = crate::target_dir(root).join(NAME);
    setup::create_dir(&folder)?;
    let file = folder.join("dashboard-expressions.yml");
    fs::write(&file, dashboard.rules()?).with_context(|| format!("writing {}", file.display()))?;
    Ok(file)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

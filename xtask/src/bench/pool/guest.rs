//! The rows of `cargo xtask bench pool --vm`: loads of the stock kernel's initiator, in the virtual
//! machine (`tests/vm/bench-pool.sh`). Each compares a pool with something else: first writes with
//! dm-thin, which the kernel's own target serves, and write and FLUSH with a bare file.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::super::guest_results;
use super::{Bar, FIRST_PASS, FRESH, Options, Row, Table};
use crate::setup::{self, Need};
use crate::vm::{self, Vm};

const NEEDS: &[Need] = &[setup::need("dmsetup", "dmsetup")];
const BOOT_ALLOWANCE: Duration = Duration::from_secs(600);
/// Seconds of a round beyond the measured ones, in an emulated machine.
const SECONDS_PER_ROUND: u64 = 240;

const FLUSH: &str = "4 KiB write and FLUSH, depth 1, allocated";
/// The script's words for rows, with the row's name, the device that a pool is compared with, and
/// the least ratio of IOPS that is good enough.
const ROWS: [(&str, &str, &str, f64); 3] = [
    ("flush", FLUSH, "bare file", 0.95),
    ("overwrite", FIRST_PASS, "dm-thin, 64 KiB", 2.0),
    ("fresh", FRESH, "dm-thin, 64 KiB", 2.0),
];

pub(super) fn measure(
    root: &Path,
    nacre: &Path,
    options: &Options,
    table: &mut Table,
) -> Result<()> {
    if !ROWS.iter().any(|(_, name, ..)| options.wants(name)) {
        return Ok(());
    }
    setup::ensure(NEEDS)?;
    let vm = Vm::prepare()?.with_parallel_cpus();
    let out = vm::scratch(root, "bench-pool")?;
    println!("virtual machine: {}", vm.describe());
    let seconds = options.seconds.ceil() as u64;
    let line = format!(
        "NACRE={} bash {} {} {} {seconds} >{} 2>&1",
        vm::quoted(nacre),
        vm::quoted(&root.join("tests/vm/bench-pool.sh")),
        vm::quoted(&out),
        options.rounds,
        vm::quoted(&out.join("log")),
    );
    let rounds = options.rounds as u64;
    let limit = BOOT_ALLOWANCE + Duration::from_secs(rounds * (SECONDS_PER_ROUND + 4 * seconds));
    let end = vm.boot(root, &line, &out, limit)?;
    let results = guest_results(&out, &end)?;
    let mut rows = read(&results)?;
    rows.retain(|row| options.wants(&row.line.name));
    table.rows.extend(rows);
    table.note(format!("virtual machine: {}", vm.describe()));
    Ok(())
}

/// Reads lines of `figure ROW nacre|other ROUND IOPS`: a pair per row and round, in any order.
fn read(results: &str) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = ROWS
        .iter()
        .map(|(_, name, beside, bar)| Row::ratio(*name, beside, Bar::AtLeast(*bar)))
        .collect();
    let mut pending: Vec<(&str, &str, &str, f64)> = Vec::new();
    for text in results.lines().filter(|line| *line != "done") {
        let words: Vec<&str> = text.split_whitespace().collect();
        let ["figure", word, side @ ("nacre" | "other"), round, iops] = *words else {
            bail!("no figure: {text:?}");
        };
        let Some(at) = ROWS.iter().position(|row| row.0 == word) else {
            bail!("no row: {text:?}");
        };
        let iops = iops.parse::<f64>().ok().filter(|iops| *iops > 0.0);
        let iops = iops.with_context(|| format!("no number: {text:?}"))?;
        match pending
            .iter()
            .position(|(of, _, in_round, _)| *of == word && *in_round == round)
        {
            None => pending.push((word, side, round, iops)),
            Some(first) => {
                let (_, first, _, before) = pending.remove(first);
                ensure!(first != side, "measured twice: {text:?}");
                match side {
                    "nacre" => rows[at].add(iops, before),
                    _ => rows[at].add(before, iops),
                }
            }
        }
    }
    if let Some((row, side, round, _)) = pending.first() {
        bail!("the figure of {row} for {side} in round {round} has no pair");
    }
    ensure!(
        rows.iter().all(|row| !row.line.rounds.is_empty()),
        "the guest did not measure every row"
    );
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = "figure flush nacre 1 90\nfigure flush other 1 100\n\
                         figure overwrite other 1 10\nfigure overwrite nacre 1 30\n\
                         figure fresh nacre 1 50\nfigure fresh other 1 100\ndone\n";

    /// Goal: figures are paired by row and round, whichever side came first. Method: two rounds of
    /// a row between those of others.
    #[test]
    fn figures_are_paired() {
        let text = format!("{WHOLE}figure flush other 2 10\nfigure flush nacre 2 20\n");
        let rows = read(&text).unwrap();
        assert_eq!(rows[0].line.rounds, [(90.0, 100.0), (20.0, 10.0)]);
        assert_eq!(rows[1].line.rounds, [(30.0, 10.0)]);
        assert!(rows[1].met() && !rows[2].met());
    }

    /// Goal: a figure that is missing, double or malformed is refused. Method: each line left out,
    /// and added lines of each kind.
    #[test]
    fn other_results_are_refused() {
        assert!(read(WHOLE).is_ok());
        let lines: Vec<&str> = WHOLE.lines().filter(|line| *line != "done").collect();
        for at in 0..lines.len() {
            let mut fewer = lines.clone();
            fewer.remove(at);
            assert!(read(&fewer.join("\n")).is_err(), "without {}", lines[at]);
        }
        for more in [
            "figure flush nacre 2 1\nfigure flush nacre 2 1",
            "figure flush spdk 2 1",
            "figure speed nacre 2 1",
            "figure flush nacre 2 null",
            "figure flush nacre 2 0",
            "figure flush nacre 2",
        ] {
            assert!(read(&format!("{WHOLE}{more}\n")).is_err(), "{more}");
        }
    }
}

//! `cargo xtask bench pool`: the bars of pools, as ratios and times of one run.
//!
//! ```text
//!   memory.rs  a pool on a RAM disk beside a bare RAM disk: the cost of the code
//!   files.rs   a pool on a file beside a bare file; the import of a very large pool
//!   peer.rs    SPDK's lvols (`--spdk`)
//!   guest.rs   dm-thin and FLUSH, under the stock kernel's initiator (`--vm`)
//!   scene.rs   the daemon, its devices and the loads on them
//! ```
//!
//! The load is `nacre perf` over TCP on loopback, as in the other benchmarks, so a ratio is that of
//! the whole path. A missed bar is printed and does not fail the command.

mod files;
mod guest;
mod memory;
mod peer;
mod scene;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::{Value, json};

use super::Line;
use super::spdk::Spdk;
use super::tcp::build;

/// Rows beside SPDK's lvols and beside dm-thin.
const FIRST_PASS: &str = "overwrite after a snapshot, first pass";
const FRESH: &str = "first write, 4 KiB random, large fresh volume";

#[derive(Args)]
pub(crate) struct Options {
    /// Interleaved rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement of allocated space, and of one FLUSH load in the virtual machine.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Measure only rows whose name contains this.
    #[arg(long)]
    filter: Option<String>,
    /// Measure this `nacre` instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
    /// The folder of an SPDK build, to compare with its lvols.
    #[arg(long, env = crate::spdk::VARIABLE)]
    spdk: Option<PathBuf>,
    /// Also compare with dm-thin, and measure FLUSH, in the virtual machine; takes minutes.
    #[arg(long)]
    vm: bool,
    /// Folder for the files below pools, 4 GiB [default: the temporary folder].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write the figures to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.filter
            .as_deref()
            .is_none_or(|part| name.contains(part))
    }
}

pub(super) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 {
        bail!("this takes two cores, one for each side; this machine has {cores}");
    }
    ensure!(
        options.rounds > 0,
        "without a round there is nothing to compare"
    );
    let spdk = options.spdk.as_deref().map(Spdk::find).transpose()?;
    let nacre = match &options.nacre {
        Some(path) => path
            .canonicalize()
            .with_context(|| format!("finding {}", path.display()))?,
        None => build(root, "nacre-engine-cli", "nacre")?,
    };
    let mut table = Table::default();
    memory::measure(&nacre, options, &mut table)?;
    files::measure(&nacre, options, &mut table)?;
    match &spdk {
        Some(spdk) => peer::measure(&nacre, spdk, options, &mut table)?,
        None => table.note(format!(
            "SPDK's lvols are not measured: neither --spdk nor {} names a build",
            crate::spdk::VARIABLE
        )),
    }
    if options.vm {
        guest::measure(root, &nacre, options, &mut table)?;
    } else {
        table.note("dm-thin and FLUSH are not measured: they take --vm".into());
    }
    ensure!(!table.rows.is_empty(), "no row has such a name");
    table.print();
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&table.json())?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The value that a row has to reach.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Bar {
    AtLeast(f64),
    AtMost(f64),
}

/// The unit of a row's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Ratio,
    Milliseconds,
    Seconds,
}

impl Unit {
    fn suffix(self) -> &'static str {
        match self {
            Self::Ratio => "",
            Self::Milliseconds => " ms",
            Self::Seconds => " s",
        }
    }
}

/// One bar. A row of times has pairs with 1, so that its ratio is the time.
struct Row {
    line: Line,
    /// The other side of the comparison.
    beside: &'static str,
    bar: Bar,
    unit: Unit,
}

impl Row {
    fn ratio(name: impl Into<String>, beside: &'static str, bar: Bar) -> Self {
        Self::new(name.into(), beside, bar, Unit::Ratio)
    }

    fn time(name: impl Into<String>, bar: Bar, unit: Unit) -> Self {
        Self::new(name.into(), "-", bar, unit)
    }

    fn new(name: String, beside: &'static str, bar: Bar, unit: Unit) -> Self {
        let (Bar::AtLeast(goal) | Bar::AtMost(goal)) = bar;
        let line = Line {
            name,
            goal,
            rounds: Vec::new(),
        };
        Self {
            line,
            beside,
            bar,
            unit,
        }
    }

    fn add(&mut self, ours: f64, other: f64) {
        self.line.rounds.push((ours, other));
    }

    fn add_time(&mut self, time: f64) {
        self.add(time, 1.0);
    }

    /// A row without a measurement has no value, and meets no bar.
    fn met(&self) -> bool {
        match self.bar {
            Bar::AtLeast(bar) => self.line.ratio() >= bar,
            Bar::AtMost(bar) => self.line.ratio() <= bar,
        }
    }

    fn text(&self) -> String {
        let (sign, bar) = match self.bar {
            Bar::AtLeast(bar) => (">=", bar),
            Bar::AtMost(bar) => ("<=", bar),
        };
        let suffix = self.unit.suffix();
        let sides = match self.unit {
            Unit::Ratio => [self.line.ours(), self.line.limit()].map(|side| format!("{side:.0}")),
            _ => [String::new(), String::new()],
        };
        let rounds: Vec<String> = (self.line.rounds.iter())
            .map(|(ours, other)| format!("{:.2}", ours / other))
            .collect();
        format!(
            "{:<46} {:<16} {:>11} {:>11} {:>10} {:>10} {:<6} {}",
            self.line.name,
            self.beside,
            sides[0],
            sides[1],
            format!("{:.2}{suffix}", self.line.ratio()),
            format!("{sign} {bar}{suffix}"),
            if self.met() { "met" } else { "MISSED" },
            rounds.join(" "),
        )
    }

    fn json(&self) -> Value {
        let mut row = self.line.json();
        row["beside"] = json!(self.beside);
        row["at_most"] = json!(matches!(self.bar, Bar::AtMost(_)));
        row["unit"] = json!(self.unit.suffix().trim());
        row["met"] = json!(self.met());
        row
    }
}

/// All rows of a run, and what a reader has to know about them.
#[derive(Default)]
struct Table {
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl Table {
    /// Prints a note at once, and again below the table.
    fn note(&mut self, text: String) {
        println!("note: {text}");
        self.notes.push(text);
    }

    fn print(&self) {
        println!(
            "\n{:<46} {:<16} {:>11} {:>11} {:>10} {:>10} {:<6} rounds",
            "", "beside", "nacre", "the other", "value", "bar", ""
        );
        for row in &self.rows {
            println!("{}", row.text());
        }
        for note in &self.notes {
            println!("note: {note}");
        }
        let met = self.rows.iter().filter(|row| row.met()).count();
        println!("\n{met} of {} bars met", self.rows.len());
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        json!({ "rows": rows, "notes": self.notes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a bar is met on its good side only. Method: values below, at and above both kinds of
    /// bars, and a row without a measurement.
    #[test]
    fn bars_have_a_good_side() {
        for (bar, value, met) in [
            (Bar::AtLeast(0.5), 0.49, false),
            (Bar::AtLeast(0.5), 0.5, true),
            (Bar::AtLeast(0.5), 3.0, true),
            (Bar::AtMost(2.0), 1.0, true),
            (Bar::AtMost(2.0), 2.0, true),
            (Bar::AtMost(2.0), 2.1, false),
        ] {
            let mut row = Row::ratio("x", "bare", bar);
            assert!(!row.met(), "{bar:?} without a measurement");
            row.add(value * 100.0, 100.0);
            assert_eq!(row.met(), met, "{bar:?} with {value}");
        }
    }

    /// Goal: a row of times shows the median time, and programs can tell it from a ratio. Method:
    /// three rounds of a row, as text and as JSON.
    #[test]
    fn a_time_is_the_median_of_its_rounds() {
        let mut row = Row::time("snapshot", Bar::AtMost(10.0), Unit::Milliseconds);
        for time in [30.0, 4.0, 5.0] {
            row.add_time(time);
        }
        let text = row.text();
        for part in ["5.00 ms", "<= 10 ms", " met ", "30.00 4.00 5.00"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let json = row.json();
        assert_eq!(json["ratio"], 5.0);
        assert_eq!(json["goal"], 10.0);
        assert_eq!(json["at_most"], true);
        assert_eq!(json["unit"], "ms");
        assert_eq!(json["met"], true);
    }

    /// Goal: a missed bar is in sight. Method: the text of a ratio below its bar.
    #[test]
    fn a_missed_bar_is_printed() {
        let mut row = Row::ratio("first write", "bare", Bar::AtLeast(0.6));
        row.add(10.0, 100.0);
        let text = row.text();
        for part in ["0.10", ">= 0.6", "MISSED"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}

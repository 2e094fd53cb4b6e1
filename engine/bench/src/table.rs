//! Writes the results of `nacre bench` for a terminal, as a table for each workload (*line*) with a
//! row for each target or device (*side*).

use super::comparison::{Comparison, Figures, Latency, LineResult, Outcome, SideResult};

/// The columns, each with its unit. Latencies of a mix are reads / writes.
const COLUMNS: [&str; 12] = [
    "",
    "I/O per s",
    "per host core",
    "per target core",
    "MB/s",
    "mean us",
    "p50 us",
    "p99 us",
    "p99.9 us",
    "host s/GiB",
    "target s/GiB",
    "machine s/GiB",
];

/// The whole text: machine, parameters of the run, sides, notes; then each line with its table,
/// failures and ratios.
pub fn table(comparison: &Comparison) -> String {
    let mut lines = heading(comparison);
    for line in &comparison.lines {
        lines.push(String::new());
        lines.push(line.name.clone());
        lines.extend(aligned(line));
        lines.extend(failures(line));
        lines.extend(ratios(line));
    }
    lines.join("\n")
}

fn heading(comparison: &Comparison) -> Vec<String> {
    let mut lines = vec![machine(comparison), run(comparison)];
    lines.extend(comparison.sides.iter().map(|side| {
        let words = side.setting.words();
        format!(
            "{}: {} ({words}; {})",
            side.name, side.target, side.description
        )
    }));
    lines.extend(comparison.notes.iter().map(|note| format!("note: {note}")));
    lines
}

/// The machine in one line.
pub(crate) fn machine(comparison: &Comparison) -> String {
    let machine = &comparison.machine;
    let memory = match machine.memory_bytes {
        Some(bytes) => format!(", {:.1} GiB of memory", bytes as f64 / (1u64 << 30) as f64),
        None => String::new(),
    };
    let is_virtual = if machine.is_virtual {
        "virtual machine"
    } else {
        "machine"
    };
    format!(
        "{is_virtual}: {} processors ({}){memory}, Linux {}, nacre {}",
        machine.processors, machine.processor, machine.kernel, comparison.version
    )
}

/// The parameters of the run in one line.
pub(crate) fn run(comparison: &Comparison) -> String {
    let cores = |cores: &[usize]| {
        let cores: Vec<String> = cores.iter().map(usize::to_string).collect();
        cores.join(",")
    };
    let load = match comparison.cores.as_slice() {
        [] => "any core".to_owned(),
        some => format!("core {}", cores(some)),
    };
    let target = match &comparison.target_cores {
        Some(some) => format!(", target on core {}", cores(some)),
        None => String::new(),
    };
    format!(
        "medians of {} rounds of {} s each; queues: {}; load on {load}{target}",
        comparison.rounds, comparison.seconds, comparison.queues
    )
}

fn aligned(line: &LineResult) -> Vec<String> {
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    rows.extend(line.results.iter().map(row));
    let mut widths = [0; COLUMNS.len()];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let text = |row: &Vec<String>| {
        let mut text = String::new();
        for (at, (cell, width)) in row.iter().zip(widths).enumerate() {
            text.push_str(&match at {
                0 => format!("  {cell:width$}"),
                _ => format!("  {cell:>width$}"),
            });
        }
        text.trim_end().to_owned()
    };
    rows.iter().map(text).collect()
}

fn row(result: &SideResult) -> Vec<String> {
    let mut row = vec![result.side.clone()];
    match &result.median {
        Some(figures) => row.extend(cells(figures)),
        None => row.push("failed".into()),
    }
    row
}

/// The figures in the order of the columns.
pub(crate) fn cells(figures: &Figures) -> [String; COLUMNS.len() - 1] {
    let latency = |of: fn(&Latency) -> f64| {
        let both = [&figures.read_latency, &figures.write_latency];
        let shown: Vec<String> = both.into_iter().flatten().map(|l| micros(of(l))).collect();
        shown.join("/")
    };
    [
        count(figures.iops),
        figures.iops_per_host_core.map_or_else(unknown, count),
        figures.iops_per_target_core.map_or_else(unknown, count),
        format!("{:.1}", figures.megabytes_per_second),
        latency(|l| l.mean_us),
        latency(|l| l.p50_us),
        latency(|l| l.p99_us),
        latency(|l| l.p99_9_us),
        figures
            .host_cpu_seconds_per_gib
            .map_or_else(unknown, seconds),
        figures
            .target_cpu_seconds_per_gib
            .map_or_else(unknown, seconds),
        figures
            .machine_cpu_seconds_per_gib
            .map_or_else(unknown, seconds),
    ]
}

/// The columns of [`cells`].
pub(crate) fn columns() -> &'static [&'static str] {
    &COLUMNS[1..]
}

fn unknown() -> String {
    "not known".into()
}

fn count(n: f64) -> String {
    format!("{n:.0}")
}

fn micros(us: f64) -> String {
    match us {
        us if us >= 100.0 => format!("{us:.0}"),
        us if us >= 10.0 => format!("{us:.1}"),
        us => format!("{us:.2}"),
    }
}

fn seconds(s: f64) -> String {
    format!("{s:.2}")
}

/// The failures of a line, one text for each side that has some.
pub(crate) fn failures(line: &LineResult) -> Vec<String> {
    let each = line.results.iter().filter_map(|result| {
        let (count, why) = result.failures();
        let rounds = result.rounds.len();
        Some(format!(
            "  {}: {count} of {rounds} rounds failed: {}",
            result.side, why?
        ))
    });
    each.collect()
}

/// The ratios between sides of a line, one text each. Then the share of the network link that each
/// side reached, where that is known.
pub(crate) fn ratios(line: &LineResult) -> Vec<String> {
    let each = line.ratios.iter().map(|ratio| {
        let mut text = format!(
            "  {} to {}: throughput {:.2}",
            ratio.side, ratio.to, ratio.throughput
        );
        if let Some(latency) = ratio.latency {
            text.push_str(&format!(", mean latency {latency:.2}"));
        }
        if let Some(cpu) = ratio.target_cpu {
            text.push_str(&format!(", processor time of the target {cpu:.2}"));
        }
        if ratio.emulated {
            text.push_str(" (no RDMA hardware with a network: says nothing about it)");
        }
        text
    });
    let links = line.results.iter().filter_map(|result| {
        let share = result.median.as_ref()?.link_share?;
        Some(format!(
            "  {}: {:.0} % of the link",
            result.side,
            share * 100.0
        ))
    });
    each.chain(links).collect()
}

/// The number of failed rounds, of all lines and sides.
pub fn failed_runs(comparison: &Comparison) -> usize {
    let outcomes = comparison.lines.iter().flat_map(|line| &line.results);
    outcomes
        .flat_map(|result| &result.rounds)
        .filter(|outcome| matches!(outcome, Outcome::Failed(_)))
        .count()
}

#[cfg(test)]
mod tests {
    use super::super::comparison::tests::comparison;
    use super::*;

    /// Goal: a reader of the text finds the machine, the kind of each path, units and failures.
    #[test]
    fn text_for_a_terminal() {
        let comparison = comparison();
        let text = table(&comparison);
        for part in [
            "virtual machine: 2 processors (A & B), 4.0 GiB of memory, Linux 6.1, nacre 0.0.0",
            "medians of 3 rounds of 1 s each; queues: 1; load on core 1, target on core 0",
            "rdma: rdma://10.9.8.1:4420 (RDMA emulated in software; lo <both ends>)",
            "note: a note",
            "\n4 KiB random read, depth 1\n",
            "  rdma: 1 of 3 rounds failed: the connection was lost",
            "  rdma to tcp: throughput 1.50, mean latency 0.50, processor time of the target 0.50 \
             (no RDMA hardware with a network: says nothing about it)",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        let device = text.lines().find(|line| line.starts_with("  device "));
        let words: Vec<&str> = device.unwrap().split_whitespace().collect();
        assert_eq!(words[..5], ["device", "1000", "1000", "2000", "4.1"]);
        assert_eq!(words[5..9], ["1000", "900", "2000", "3000"]);
        assert_eq!(failed_runs(&comparison), 1);
    }

    /// Goal: a figure that could not be measured says so, instead of 0.
    #[test]
    fn unknown_figures_say_so() {
        let mut figures = comparison().lines[0].results[0].median.unwrap();
        figures.target_cpu_seconds_per_gib = None;
        figures.iops_per_target_core = None;
        let cells = cells(&figures);
        assert_eq!(
            (cells[2].as_str(), cells[9].as_str()),
            ("not known", "not known")
        );
        assert_eq!(cells.len(), columns().len());
    }
}

//! The stock kernel's initiator on Nacre, beside the same initiator on the kernel's own `nvmet-tcp` over a RAM
//! disk: fio inside the virtual machine, the two taking turns (`tests/vm/bench.sh`).

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::{Line, VmOptions, print_table};
use crate::vm::{self, Vm};

/// Of nvmet's rate, at every depth.
const GOAL: f64 = 0.9;
const BOOT_ALLOWANCE: Duration = Duration::from_secs(300);
/// Two directions at three depths on two targets.
const MEASUREMENTS_PER_ROUND: u64 = 12;

pub fn run(root: &Path, options: &VmOptions) -> Result<ExitCode> {
    ensure!(
        options.rounds > 0,
        "without a round there is nothing to compare"
    );
    let nacre = vm::nacre(root, options.nacre.as_deref())?;
    let vm = Vm::prepare()?;
    let out = vm::scratch(root, "bench")?;
    println!(
        "virtual machine: {}; {} rounds",
        vm.describe(),
        options.rounds
    );
    let line = format!(
        "NACRE={} bash {} {} {} {} >{} 2>&1",
        vm::quoted(&nacre),
        vm::quoted(&root.join("tests/vm/bench.sh")),
        vm::quoted(&out),
        options.rounds,
        options.seconds,
        vm::quoted(&out.join("log")),
    );
    // Each measurement ramps up and starts fio, which takes a few seconds when emulated.
    let limit = BOOT_ALLOWANCE
        + Duration::from_secs(options.rounds * MEASUREMENTS_PER_ROUND * (options.seconds + 8));
    let end = vm.boot(root, &line, &out, limit)?;
    let results = std::fs::read_to_string(out.join("results")).unwrap_or_default();
    if !results.lines().any(|line| line == "done") {
        let log = std::fs::read_to_string(out.join("log")).unwrap_or_default();
        bail!(
            "the guest did not finish ({end}); see {}\n{log}",
            out.display()
        );
    }
    let lines = lines(&results)?;
    print_table("nvmet-tcp", &lines);
    let missed = lines.iter().filter(|line| !line.reached()).count();
    println!(
        "\n{} of {} goals reached",
        lines.len() - missed,
        lines.len()
    );
    Ok(if missed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Pairs the figures up: `figure nacre|nvmet RW DEPTH ROUND IOPS`, Nacre first in every pair.
fn lines(results: &str) -> Result<Vec<Line>> {
    let mut lines: Vec<Line> = Vec::new();
    let mut pending = None;
    for text in results.lines().filter(|line| *line != "done") {
        let words: Vec<&str> = text.split_whitespace().collect();
        let ["figure", side, rw, depth, round, iops] = *words.as_slice() else {
            bail!("no figure: {text:?}");
        };
        let iops: f64 = iops.parse().with_context(|| format!("no rate: {text:?}"))?;
        let name = format!("4 KiB {rw}, depth {depth}");
        match (side, pending.take()) {
            ("nacre", None) => pending = Some((name, round.to_owned(), iops)),
            ("nvmet", Some((of, in_round, ours))) if of == name && in_round == round => {
                match lines.iter_mut().find(|line| line.name == name) {
                    Some(line) => line.rounds.push((ours, iops)),
                    None => lines.push(Line {
                        name,
                        goal: GOAL,
                        rounds: vec![(ours, iops)],
                    }),
                }
            }
            _ => bail!("a figure without its pair: {text:?}"),
        }
    }
    if lines.is_empty() {
        bail!("the guest measured nothing");
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_paired_by_line_and_round() {
        let text = "figure nacre randread 1 1 90\nfigure nvmet randread 1 1 100\n\
                    figure nacre randread 1 2 120\nfigure nvmet randread 1 2 100\ndone\n";
        let lines = lines(text).unwrap();
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].rounds, [(90.0, 100.0), (120.0, 100.0)]);
    }

    #[test]
    fn a_figure_without_its_pair_is_refused() {
        for text in [
            "figure nvmet randread 1 1 100\n",
            "figure nacre randread 1 1 100\nfigure nvmet randread 32 1 100\n",
            "figure nacre randread 1 1\n",
            "done\n",
        ] {
            assert!(lines(text).is_err(), "{text}");
        }
    }
}

//! `cargo xtask bench vm` and `rdma`: Nacre against the kernel's target (nvmet) over a RAM disk,
//! both under the stock kernel's initiator. Fio runs inside the virtual machine, and the two
//! targets alternate (`tests/vm/bench.sh`). `vm` uses TCP. `rdma` uses soft-RoCE, and also compares
//! Nacre over RDMA with Nacre over TCP.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use super::tcp::build;
use super::{Line, VmOptions, guest_results, print_table};
use crate::vm::{self, Vm};

const BOOT_ALLOWANCE: Duration = Duration::from_secs(300);

#[derive(Args)]
pub(crate) struct TcpOptions {
    #[command(flatten)]
    guest: VmOptions,
    /// Also measure a target that only counts bytes, once polling and once sleeping while idle: the
    /// most that a target outside the kernel reaches in this guest, beside nvmet.
    #[arg(long)]
    limit: bool,
}

/// The transport of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BenchTransport {
    Tcp,
    Rdma,
}

impl BenchTransport {
    fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }

    /// Measurements of the guest in one round. TCP has two directions at three depths, on both
    /// sides, or on four with the limit target. RDMA has two directions at four depths, on both
    /// sides. It also has two directions at two depths over both transports.
    fn measurements_per_round(self, with_limit: bool) -> u64 {
        match self {
            // The limit target polls and sleeps.
            Self::Tcp if with_limit => 12 + 12,
            Self::Tcp => 12,
            Self::Rdma => 16 + 8,
        }
    }
}

/// Each line must reach this fraction of nvmet's rate.
const GOAL: f64 = 0.95;

pub(super) fn run_tcp(root: &Path, options: &TcpOptions) -> Result<ExitCode> {
    let limit = if options.limit {
        Some(build(root, "nacre-benches", "limit-target")?)
    } else {
        None
    };
    run(root, &options.guest, BenchTransport::Tcp, limit.as_deref())
}

pub(super) fn run_rdma(root: &Path, options: &VmOptions) -> Result<ExitCode> {
    run(root, options, BenchTransport::Rdma, None)
}

fn run(
    root: &Path,
    options: &VmOptions,
    over: BenchTransport,
    limit_target: Option<&Path>,
) -> Result<ExitCode> {
    ensure!(
        options.rounds > 0,
        "without a round there is nothing to compare"
    );
    let nacre = vm::fast_nacre(root, options.nacre.as_deref())?;
    let vm = Vm::prepare()?.with_parallel_cpus();
    let out = vm::scratch(root, "bench")?;
    println!(
        "virtual machine: {}; {} rounds",
        vm.describe(),
        options.rounds
    );
    let limit_program = limit_target
        .map(|path| format!("LIMIT_TARGET={} ", vm::quoted(path)))
        .unwrap_or_default();
    let line = format!(
        "{limit_program}NACRE={} bash {} {} {} {} {} >{} 2>&1",
        vm::quoted(&nacre),
        vm::quoted(&root.join("tests/vm/bench.sh")),
        vm::quoted(&out),
        options.rounds,
        options.seconds,
        over.word(),
        vm::quoted(&out.join("log")),
    );
    // Each measurement ramps up and starts fio, which takes a few seconds when emulated.
    let limit = BOOT_ALLOWANCE
        + Duration::from_secs(
            options.rounds
                * over.measurements_per_round(limit_target.is_some())
                * (options.seconds + 8),
        );
    let end = vm.boot(root, &line, &out, limit)?;
    let results = guest_results(&out, &end)?;
    let figures = Figures::read(&results)?;
    let lines = figures.lines;
    print_table("nacre", &format!("nvmet-{}", over.word()), &lines);
    for (side, limits) in [("polls", &figures.polls), ("sleeps", &figures.sleeps)] {
        if !limits.is_empty() {
            print_table(side, "nvmet-tcp", limits);
        }
    }
    if over == BenchTransport::Rdma {
        print_transports(&figures.transports);
    }
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

/// Measurements of the guest.
#[derive(Default)]
struct Figures {
    /// Nacre against nvmet.
    lines: Vec<Line>,
    /// The limit target against nvmet, while idle polling or sleeping.
    polls: Vec<Line>,
    sleeps: Vec<Line>,
    transports: Vec<Transports>,
}

/// One line of the table TCP and RDMA: I/O per second and mean latency in microseconds, by
/// round.
#[derive(Debug, Default, PartialEq)]
struct Transports {
    rw: String,
    depth: u32,
    tcp: Vec<(f64, f64)>,
    rdma: Vec<(f64, f64)>,
}

impl Figures {
    /// Reads lines of `figure SIDE RW BYTES DEPTH ROUND IOPS MICROSECONDS`. A `nacre` line precedes
    /// its `nvmet` line, which precedes those of the limit target; `tcp` and `rdma` lines are
    /// Nacre's, for the table of transports.
    fn read(results: &str) -> Result<Self> {
        let mut figures = Self::default();
        let mut pending = None;
        let mut nvmet: Option<(String, f64)> = None;
        for text in results.lines().filter(|line| *line != "done") {
            let words: Vec<&str> = text.split_whitespace().collect();
            let ["figure", side, rw, bytes, depth, round, iops, mean] = *words.as_slice() else {
                bail!("no figure: {text:?}");
            };
            let number = |text: &str| {
                text.parse::<f64>()
                    .with_context(|| format!("no number: {text:?}"))
            };
            let (iops, mean) = (number(iops)?, number(mean)?);
            let depth: u32 = depth
                .parse()
                .with_context(|| format!("no depth: {text:?}"))?;
            if side == "tcp" || side == "rdma" {
                figures.transport(side, rw, depth, (iops, mean));
                continue;
            }
            let name = format!("{bytes} {rw}, depth {depth}");
            match (side, pending.take()) {
                ("nacre", None) => pending = Some((name, round.to_owned(), iops)),
                ("nvmet", Some((of, in_round, ours))) if of == name && in_round == round => {
                    pair(&mut figures.lines, &name, GOAL, (ours, iops));
                    nvmet = Some((name, iops));
                }
                ("polls" | "sleeps", None) => {
                    let Some((_, beside)) = nvmet.as_ref().filter(|(of, _)| *of == name) else {
                        bail!("a figure without its pair: {text:?}");
                    };
                    let lines = match side {
                        "polls" => &mut figures.polls,
                        _ => &mut figures.sleeps,
                    };
                    pair(lines, &name, 0.0, (iops, *beside));
                }
                _ => bail!("a figure without its pair: {text:?}"),
            }
        }
        if figures.lines.is_empty() {
            bail!("the guest measured nothing");
        }
        Ok(figures)
    }

    fn transport(&mut self, side: &str, rw: &str, depth: u32, figure: (f64, f64)) {
        let is_it = |place: &Transports| place.rw == rw && place.depth == depth;
        let at = self.transports.iter().position(is_it).unwrap_or_else(|| {
            self.transports.push(Transports {
                rw: rw.to_owned(),
                depth,
                ..Transports::default()
            });
            self.transports.len() - 1
        });
        let place = &mut self.transports[at];
        match side {
            "tcp" => place.tcp.push(figure),
            _ => place.rdma.push(figure),
        }
    }
}

fn pair(lines: &mut Vec<Line>, name: &str, goal: f64, pair: (f64, f64)) {
    match lines.iter_mut().find(|line| line.name == name) {
        Some(line) => line.rounds.push(pair),
        None => lines.push(Line {
            name: name.to_owned(),
            goal,
            rounds: vec![pair],
        }),
    }
}

/// Prints the table of TCP and RDMA: 4 KiB sequential reads and random writes, the figures that
/// vendors publish.
fn print_transports(places: &[Transports]) {
    println!(
        "\n4 KiB over TCP and over soft-RoCE in this virtual machine (no RDMA hardware: the ratio says nothing about it)"
    );
    println!(
        "{:<24} {:>10} {:>10} {:>10} {:>10} {:>7}",
        "", "TCP MB/s", "us", "RDMA MB/s", "us", "ratio"
    );
    let middle = |of: &[(f64, f64)], which: fn(&(f64, f64)) -> f64| {
        super::median(&of.iter().map(which).collect::<Vec<_>>())
    };
    let rate = |of: &[(f64, f64)]| middle(of, |f| f.0) * 4096.0 / 1e6;
    for place in places {
        let ratios: Vec<f64> = place
            .rdma
            .iter()
            .zip(&place.tcp)
            .map(|(r, t)| r.0 / t.0)
            .collect();
        println!(
            "{:<24} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>7.2}",
            format!("{}, {} outstanding", place.rw, place.depth),
            rate(&place.tcp),
            middle(&place.tcp, |f| f.1),
            rate(&place.rdma),
            middle(&place.rdma, |f| f.1),
            super::median(&ratios),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_paired_by_line_and_round() {
        let text = "figure nacre randread 4k 1 1 90 11\nfigure nvmet randread 4k 1 1 100 10\n\
                    figure nacre randread 4k 1 2 120 9\nfigure nvmet randread 4k 1 2 100 10\n\
                    figure polls randread 4k 1 2 80 12\nfigure sleeps randread 4k 1 2 60 13\n\
                    figure tcp read 4k 128 1 50 3\nfigure rdma read 4k 128 1 100 2\ndone\n";
        let figures = Figures::read(text).unwrap();
        assert_eq!(figures.lines.len(), 1);
        assert_eq!(figures.lines[0].goal, GOAL);
        assert_eq!(figures.lines[0].rounds, [(90.0, 100.0), (120.0, 100.0)]);
        assert_eq!(figures.polls[0].rounds, [(80.0, 100.0)]);
        assert_eq!(figures.sleeps[0].rounds, [(60.0, 100.0)]);
        assert_eq!(
            figures.transports,
            [Transports {
                rw: "read".into(),
                depth: 128,
                tcp: vec![(50.0, 3.0)],
                rdma: vec![(100.0, 2.0)],
            }]
        );
    }

    #[test]
    fn a_figure_without_its_pair_is_refused() {
        for text in [
            "figure nvmet randread 4k 1 1 100 1\n",
            "figure nacre randread 4k 1 1 100 1\nfigure nvmet randread 4k 32 1 100 1\n",
            "figure nacre randread 4k 1 1\n",
            "figure polls randread 4k 1 1 100 1\n",
            "done\n",
        ] {
            assert!(Figures::read(text).is_err(), "{text}");
        }
    }
}

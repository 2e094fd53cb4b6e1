//! `cargo xtask test` and `cargo xtask ci`: run every test suite and print one total.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;

use crate::process::{self, End};
use crate::setup;
use crate::tally::{CargoTest, Tally};
use crate::{alerts, cluster, deploy, spdk, tidy, units, vm, web};

const FORMAT_LIMIT: Duration = Duration::from_secs(120);
const LINT_LIMIT: Duration = Duration::from_secs(1500);
const MUTATION_LIMIT: Duration = Duration::from_secs(900);
const MUTATIONS: &str = "nacre-bdev-replica-sim/mutations,nacre-cluster-core-sim/mutations";
/// The targets whose packages, and those that they depend on, have code behind the feature.
const MUTATED: &[&str] = &[
    "--test=mutations",
    "--test=seeds",
    "--bin=simulate",
    "--bin=simulate-cluster",
];

#[derive(Args)]
pub(crate) struct Options {
    /// Run only the tests inside the virtual machine.
    #[arg(long, conflicts_with = "no_vm")]
    vm_only: bool,
    /// Run everything except the virtual machine.
    #[arg(long)]
    no_vm: bool,
    /// Run only tests whose name contains one of these, separated by commas; skips format and
    /// lints.
    #[arg(long, value_delimiter = ',')]
    filter: Vec<String>,
    /// Use this `nacre` in the virtual machine and in packages instead of building one.
    #[arg(long)]
    nacre: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let (mut tally, _) = suites(root, options, false);
    if !options.filter.is_empty() && tally == Tally::default() {
        tally.fail(format!(
            "no test's name contains {}",
            options.filter.join(" or ")
        ));
    }
    tally.print_details();
    println!("{tally}");
    Ok(tally.exit_code())
}

/// Runs every suite. A suite that cannot run fails, and so does a case that the virtual machine
/// skips, unless the archive lacks its newer kernel. A missing rustfmt or clippy is a skip. The
/// last line of output is the count.
pub(crate) fn ci(root: &Path) -> Result<ExitCode> {
    let options = Options {
        vm_only: false,
        no_vm: false,
        filter: Vec::new(),
        nacre: None,
    };
    let start = Instant::now();
    if let Err(error) = setup::ensure(setup::OPTIONAL) {
        // The test that needs them reports that it was skipped.
        println!("{error:#}");
    }
    let (tally, stages) = suites(root, &options, true);
    tally.print_details();
    println!("all suites took {:.0} s", start.elapsed().as_secs_f64());
    println!("   time  processors");
    for stage in stages {
        let (took, busy) = (stage.took.as_secs_f64(), stage.busy.as_secs_f64());
        println!("{took:>5.0} s {busy:>9.0} s  {}", stage.name);
    }
    println!("{tally}");
    Ok(tally.exit_code())
}

/// A suite that ran.
struct Stage {
    name: &'static str,
    took: Duration,
    /// Processor time of the suite's processes, summed over all processors.
    busy: Duration,
}

/// Processor time of the processes that this one has waited for: proc_pid_stat(5), fields 16 and
/// 17, in hundredths of a second.
fn busy_children() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(13).take(2);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(10 * ticks)
}

/// Runs the selected suites. A suite that cannot run counts as one failure, and the others still
/// run. `strict`: fail if the virtual machine cannot run, or skips a case.
fn suites(root: &Path, options: &Options, strict: bool) -> (Tally, Vec<Stage>) {
    let mut total = Tally::default();
    let mut stages = Vec::new();
    let mut suite = |name: &'static str, run: &mut dyn FnMut() -> Result<Tally>| {
        println!("\n== {name}");
        let (start, before) = (Instant::now(), busy_children());
        let result = run();
        let took = start.elapsed();
        stages.push(Stage {
            name,
            took,
            busy: busy_children().saturating_sub(before),
        });
        match result {
            Ok(tally) => {
                println!("== {name}: {tally} ({:.0} s)", took.as_secs_f64());
                total.add(tally);
            }
            Err(error) => {
                println!("== {name}: {error:#}");
                total.fail(format!("{name}: {error:#}"));
            }
        }
    };
    let filter = options.filter.as_slice();
    let mut nacre = options.nacre.clone();
    let has_guests = !options.no_vm && vm::matches(root, filter);
    if !options.vm_only {
        if filter.is_empty() {
            suite("format", &mut || format(root));
            suite("tidy", &mut || tidy::run(root));
            suite("lints", &mut || lints(root));
        }
        let mut programs = Vec::new();
        suite("build of the tests", &mut || {
            let (tally, built) = units::build(root)?;
            programs = built;
            if tally.failed == 0 && nacre.is_none() {
                nacre = Some(vm::built_nacre(root)?);
            }
            Ok(tally)
        });
        let deploys = deploy::matches(filter);
        let beside = deploys && deploy::mostly_waits();
        let name = if beside { "tests and deploy" } else { "tests" };
        suite(name, &mut || {
            let tests = || units::run(root, &programs, filter);
            if beside {
                deploy::beside(root, filter, nacre.as_deref(), tests)
            } else {
                tests()
            }
        });
        suite("mutations", &mut || mutations(root, filter));
        if cluster::matches(filter) {
            suite("cluster", &mut || cluster::suite(root, nacre.as_deref()));
        }
        if alerts::matches(filter) {
            suite("alerts", &mut || alerts::run(root));
        }
        if web::matches(filter) {
            suite("page", &mut || web::suite(root, nacre.as_deref()));
        }
        if deploys && !beside {
            suite("deploy", &mut || {
                deploy::run(root, filter, nacre.as_deref())
            });
        }
        if spdk::matches(filter) {
            suite("SPDK", &mut || spdk::run(root));
        }
    }
    if has_guests {
        let selection = vm::Selection {
            filter: filter.to_vec(),
            target: vm::Target::Nacre,
            nacre,
            guests: None,
            kernel: vm::Series::default(),
        };
        suite("virtual machine", &mut || {
            virtual_machine(root, &selection, strict)
        });
    }
    (total, stages)
}

fn format(root: &Path) -> Result<Tally> {
    component(root, "rustfmt", &["fmt", "--version"], |tally| {
        let mut command = setup::cargo();
        command
            .current_dir(root)
            .args(["fmt", "--all", "--", "--check"]);
        let end = process::stream(&mut command, FORMAT_LIMIT, |_| {})?;
        tally.check("format: `cargo fmt` would change something", end.success());
        Ok(())
    })
}

/// Runs clippy on the workspace, and on the code behind the feature `mutations`.
fn lints(root: &Path) -> Result<Tally> {
    component(root, "clippy", &["clippy", "--version"], |tally| {
        // `--workspace` with targets by name, not `--package`: see `mutations`.
        let of_mutations = [&["--features", MUTATIONS], MUTATED].concat();
        for (name, selection) in [
            ("lints", &["--all-targets"][..]),
            ("lints of mutations", &of_mutations),
        ] {
            let mut command = setup::cargo();
            command.current_dir(root).args(["clippy", "--workspace"]);
            command.args(selection);
            command.args(["--locked", "--", "-D", "warnings"]);
            let end = process::stream(&mut command, LINT_LIMIT, |_| {})?;
            tally.check(
                &format!("{name}: clippy has something to say"),
                end.success(),
            );
        }
        Ok(())
    })
}

/// Runs `check` if rustup has or can install the component; otherwise reports it as skipped.
fn component(
    root: &Path,
    name: &str,
    probe: &[&str],
    check: impl FnOnce(&mut Tally) -> Result<()>,
) -> Result<Tally> {
    let mut tally = Tally::default();
    let there = || {
        let mut command = setup::cargo();
        process::capture(
            command.current_dir(root).args(probe),
            Duration::from_secs(60),
        )
        .is_ok()
    };
    if !there() {
        println!("this toolchain lacks {name}: adding it");
        let mut rustup = Command::new("rustup");
        rustup.current_dir(root).args(["component", "add", name]);
        if let Err(error) = process::capture(&mut rustup, Duration::from_secs(300)) {
            println!("{error:#}");
        }
    }
    if there() {
        check(&mut tally)?;
    } else {
        tally.skip(format!(
            "{name}: the toolchain does not have it and rustup cannot add it"
        ));
    }
    Ok(tally)
}

/// Mutation tests: the checkers of each simulator must find each deliberate fault, in replicated
/// volumes and in clusters. A feature excludes the faults from all other builds.
fn mutations(root: &Path, filter: &[String]) -> Result<Tally> {
    let mut command = setup::cargo();
    command
        .current_dir(root)
        // `--workspace` selects the features of dependencies as in the build of the tests. With
        // `--package` Cargo would build the dependencies again.
        .args(["test", "--workspace", "--locked", "--no-fail-fast"])
        .args(["--features", MUTATIONS, "--test", "mutations", "--"])
        .args(filter);
    let mut reader = CargoTest::default();
    let end = process::stream(&mut command, MUTATION_LIMIT, |line| reader.line(line))?;
    Ok(finish(reader, "mutations", end, filter))
}

fn finish(reader: CargoTest, suite: &str, end: End, filter: &[String]) -> Tally {
    let mut tally = reader.finish(suite, end);
    if !filter.is_empty() && end.success() && tally.passed == 0 {
        // With a filter, a suite may have nothing to run.
        tally = Tally::default();
    }
    tally
}

fn virtual_machine(root: &Path, selection: &vm::Selection, strict: bool) -> Result<Tally> {
    if !cfg!(target_arch = "x86_64") {
        let why =
            "virtual machine: the tests boot an x86-64 kernel, and this is another architecture";
        let mut tally = Tally::default();
        if strict {
            tally.fail(why)
        } else {
            tally.skip(why)
        }
        return Ok(tally);
    }
    let mut tally = vm::run_suite(root, selection)?;
    if strict {
        forbid_skips(&mut tally);
    }
    if let Some(what) = vm::not_asked_for(root, &selection.filter)? {
        tally.skip(what);
    }
    Ok(tally)
}

/// Skipped cases fail, except for those whose newer kernel the archive lacks.
fn forbid_skips(tally: &mut Tally) {
    let (newer, skipped): (Vec<_>, Vec<_>) = std::mem::take(&mut tally.skipped)
        .into_iter()
        .partition(|what| what.contains(vm::NO_NEWER_KERNEL));
    tally.skipped = newer;
    skipped
        .into_iter()
        .for_each(|what| tally.fail(format!("{what} (must not be skipped here)")));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: CI tolerates one reason for a skip.
    #[test]
    fn only_a_missing_newer_kernel_may_skip_a_case() {
        let mut tally = Tally::default();
        let newer = format!("vm 118-concat: {}: 404", vm::NO_NEWER_KERNEL);
        tally.skip(newer.clone());
        tally.skip("vm 220-dcb: no lldpd");
        forbid_skips(&mut tally);
        assert_eq!(tally.skipped, [newer]);
        assert_eq!(
            tally.failures,
            ["vm 220-dcb: no lldpd (must not be skipped here)"]
        );
    }
}

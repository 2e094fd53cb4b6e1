//! `cargo xtask …`: builds, runs, tests and measures Nacre on a machine that has only a Rust
//! toolchain.
//!
//! ```text
//! run       demonstrates Nacre: serves a namespace over NVMe/TCP, writes it and reads it back
//! cluster   demonstrates a volume that outlives the node that serves it
//! test      runs every test suite, also in the virtual machine; last line: `N passed, M failed`
//! ci        like test, but a case that the virtual machine skips fails
//! bench     compares Nacre with a limit or a peer, in ratios
//! deb       builds the Debian package
//! image     builds the appliance's disk image
//! web       builds the administration page
//! vm        opens a shell, a command or single tests in the virtual machine
//! simulate  simulates replicated volumes on failing disks, a cluster, or a pool, from a seed
//! tidy      checks the repository's own rules
//! ```
//!
//! A command installs missing programs from the ordinary registries (apt, pip) by package name.
//! Without root it prints the command to type.

#![forbid(unsafe_code)]

mod alerts;
mod bench;
mod cluster;
mod deb;
mod deploy;
mod image;
mod pool;
mod process;
mod run;
mod setup;
mod spdk;
mod tally;
mod test;
mod tidy;
mod units;
mod vm;
mod web;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Build, run, test and measure Nacre"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build Nacre, serve a namespace over NVMe/TCP, write and read it back verified, and stop
    /// cleanly.
    Run(run::Options),
    /// Start a cluster of three nodes in network namespaces, kill the node that serves a volume
    /// under verified load, and print the longest I/O.
    Cluster(cluster::Options),
    /// Run every test: format, lints, tidiness, unit and model tests, and the virtual machine.
    Test(test::Options),
    /// Run what continuous integration runs: `test` with nothing skipped in the virtual machine,
    /// and a last line with the counts.
    Ci,
    /// Build the Debian package.
    Deb(deb::Options),
    /// Build the appliance's disk image; its second boot entry installs it from a USB disk.
    Image(image::Options),
    /// Build the administration page from `web/` into the files that the daemon embeds.
    Web(web::Options),
    /// Measure against a limit or a peer in the same run.
    Bench {
        #[command(subcommand)]
        what: bench::Benchmark,
    },
    /// Simulate replicated volumes on failing disks, or (first argument `cluster`) nodes that fail
    /// over, or (`pool`) a pool whose disk loses power, in virtual time; each run comes from a seed
    /// and is checked.
    #[command(disable_help_flag = true)]
    Simulate {
        /// [cluster] [--seed N] [--runs N | --minutes M] [--ios N] [--trace]; without any: 100 runs
        /// from seed 1. pool [--seed N] [--runs N]; without any: 20,000 runs from seed 1, and every
        /// short history with a crash at each point.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// The virtual machine with the stock kernel.
    Vm {
        #[command(subcommand)]
        command: vm::VmCommand,
    },
    /// Check the repository's own rules (placeholders, ignored tests, long files, unsafe code,
    /// machine paths).
    Tidy {
        /// Print the contents of `xtask/src/tidy/words.txt` for the current tree, and check
        /// nothing.
        #[arg(long)]
        words: bool,
    },
}

fn main() -> ExitCode {
    match dispatch(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode> {
    let root = root()?;
    std::env::set_current_dir(&root).with_context(|| format!("entering {}", root.display()))?;
    match command {
        Command::Run(options) => run::run(&root, &options),
        Command::Cluster(options) => cluster::run(&root, &options),
        Command::Test(options) => test::run(&root, &options),
        Command::Ci => test::ci(&root),
        Command::Deb(options) => deb::run(&root, &options),
        Command::Image(options) => image::run(&root, &options),
        Command::Web(options) => web::run(&root, &options),
        Command::Bench { what } => bench::run(&root, &what),
        Command::Simulate { arguments } => simulate(&root, &arguments),
        Command::Vm { command } => vm::run(&root, &command),
        Command::Tidy { words: true } => {
            tidy::print_words(&root)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Tidy { words: false } => {
            let tally = tidy::run(&root)?;
            Ok(tally.exit_code())
        }
    }
}

/// Runs the simulator until it ends or is interrupted.
fn simulate(root: &Path, arguments: &[String]) -> Result<ExitCode> {
    if arguments.first().is_some_and(|what| what == "pool") {
        return pool::simulate(root, &arguments[1..]);
    }
    let is_cluster = arguments.first().is_some_and(|what| what == "cluster");
    let (package, program) = if is_cluster {
        ("nacre-cluster-core-sim", "simulate-cluster")
    } else {
        ("nacre-bdev-replica-sim", "simulate")
    };
    let mut cargo = setup::cargo();
    cargo
        .current_dir(root)
        .args(["run", "--quiet", "--package", package])
        .args(["--bin", program, "--"]);
    let arguments = arguments.iter().skip(usize::from(is_cluster));
    let status = cargo.args(arguments).status().context("running cargo")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The repository's root: the parent folder of this crate.
fn root() -> Result<PathBuf> {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .context("CARGO_MANIFEST_DIR is not set: start this with `cargo xtask`")?;
    Ok(Path::new(&here)
        .parent()
        .context("xtask has no parent folder")?
        .to_path_buf())
}

/// Cargo's target directory. The environment may set it, or a cargo configuration that only cargo
/// can find.
fn target_dir(root: &Path) -> PathBuf {
    if let Some(dir) = std::env::var_os("CARGO_TARGET_DIR") {
        return root.join(dir);
    }
    let mut ask = setup::cargo();
    ask.current_dir(root)
        .args(["metadata", "--no-deps", "--offline", "--format-version=1"]);
    let output = process::capture(&mut ask, Duration::from_secs(60)).ok();
    let dir = output
        .and_then(|text| serde_json::from_str::<serde_json::Value>(&text).ok())
        .and_then(|facts| Some(PathBuf::from(facts["target_directory"].as_str()?)));
    dir.unwrap_or_else(|| root.join("target"))
}

//! The tests of all packages: unit, integration, property and golden tests, replayed fuzz corpora,
//! and examples of the documentation.
//!
//! ```text
//!   cargo test --no-run ── programs ──▶ queue ─┬─ lane ─┬─▶ results
//!                                              └─ lane ─┘
//!   cargo test --doc
//! ```
//!
//! Cargo runs one test program after the other. Most of their time is waiting for daemons, etcd
//! and timeouts, so several programs run at the same time here.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use serde_json::Value;

use crate::process;
use crate::setup::AT_LENGTH;
use crate::tally::{CargoTest, Tally};
use crate::{setup, vm};

/// Time for the build, and for each test program.
const LIMIT: Duration = Duration::from_secs(1500);
/// The program in Debian's package etcd-server.
const ETCD: &str = "usr/bin/etcd";
/// Test programs that take longest, first. They start in this order, so that none of them runs
/// alone at the end.
const LONG: [&str; 5] = [
    "nacre_bdev_pool_core",
    "daemon",
    "seeds",
    "nacre_engine",
    "real",
];

/// Programs at the same time, and tests of one: many start daemons and members of etcd.
const MOST_LANES: usize = 4;
const MOST_THREADS: usize = 8;

/// A test program that Cargo built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// The folder of its package, where Cargo would run it.
    folder: PathBuf,
    /// The source below the folder: `bdev/src/lib.rs`, or `engine/cli/tests/cli/main.rs`.
    name: String,
    target: String,
    file: PathBuf,
}

impl Program {
    /// Reads a message of `cargo --message-format=json`.
    fn read(root: &Path, line: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(line).ok()?;
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            return None;
        }
        let manifest = Path::new(message["manifest_path"].as_str()?);
        let folder = manifest.parent()?.to_owned();
        let target = message["target"]["name"].as_str()?.to_owned();
        let source = Path::new(message["target"]["src_path"].as_str()?);
        let place = source.strip_prefix(root).unwrap_or(source);
        Some(Self {
            file: message["executable"].as_str()?.into(),
            name: place.display().to_string(),
            folder,
            target,
        })
    }

    /// Programs that are not listed come last.
    fn rank(&self) -> usize {
        let mut long = LONG.iter();
        let listed = long.position(|name| *name == self.target);
        listed.unwrap_or(LONG.len())
    }
}

/// Builds the test programs, and the programs of the packages.
pub(crate) fn build(root: &Path) -> Result<(Tally, Vec<Program>)> {
    let mut command = setup::cargo();
    command.current_dir(root).args([
        "test",
        "--workspace",
        "--locked",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    let mut programs = Vec::new();
    let end = process::lines(&mut command, LIMIT, |line| match line.strip_prefix('{') {
        Some(_) => programs.extend(Program::read(root, line)),
        None => println!("{line}"),
    })?;
    let mut tally = Tally::default();
    if !end.success() {
        tally.fail(format!("the tests do not build: {end}"));
    }
    programs.sort_by_key(|program| (program.rank(), program.name.clone()));
    Ok((tally, programs))
}

/// Runs the programs, and the examples of the documentation. With a filter, the tests whose names
/// contain one of its words.
pub(crate) fn run(root: &Path, programs: &[Program], filter: &[String]) -> Result<Tally> {
    // Unpacked, because installing the package would start a server. Tests skip themselves without.
    let etcd = match vm::unpacked("etcd-server", ETCD) {
        Ok(folder) => Some(folder.join(ETCD)),
        Err(error) => {
            println!("no etcd (Debian's package etcd-server): {error:#}");
            None
        }
    };
    let cpus = std::thread::available_parallelism().map_or(2, usize::from);
    let lanes = cpus.min(MOST_LANES);
    let threads = (3 * cpus / lanes).clamp(2, MOST_THREADS);
    let queue = Mutex::new(programs.iter());
    let total = Mutex::new(Tally::default());
    let lane = || {
        loop {
            let Some(program) = queue.lock().next() else {
                return;
            };
            let mut command = Command::new(&program.file);
            command
                .args(filter)
                .env("RUST_TEST_THREADS", threads.to_string());
            if let Some(etcd) = &etcd {
                command.env("NACRE_TEST_ETCD", etcd);
            }
            let tally = run_one(program, &mut command, &total).unwrap_or_else(|error| {
                let mut tally = Tally::default();
                tally.fail(format!("{}: {error:#}", program.name));
                tally
            });
            total.lock().add(tally);
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        for lane in lanes {
            if let Err(panic) = lane.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    let mut total = total.into_inner();
    total.add(documentation(root, filter)?);
    if filter.is_empty() && total.passed == 0 {
        total.fail("tests: not a single test ran");
    }
    Ok(total)
}

/// The value of [`AT_LENGTH`] for the test programs: that of the environment, else `ci`, with which
/// simulators run a part of their seeds.
fn length() -> OsString {
    std::env::var_os(AT_LENGTH).unwrap_or_else(|| "ci".into())
}

/// Runs one program, and prints its output when it has ended.
fn run_one(program: &Program, command: &mut Command, printing: &Mutex<Tally>) -> Result<Tally> {
    command
        .current_dir(&program.folder)
        // Tests expect the environment that Cargo gives them.
        .env("CARGO_MANIFEST_DIR", &program.folder)
        .env("CARGO", setup::cargo().get_program())
        .env(AT_LENGTH, length());
    let start = Instant::now();
    let mut reader = CargoTest::of(&program.name);
    let mut output = Vec::new();
    let end = process::lines(command, LIMIT, |line| {
        reader.line(line);
        output.push(line.to_owned());
    })
    .with_context(|| format!("running {}", program.name))?;
    // One program prints at a time.
    let _printing = printing.lock();
    println!(
        "\n     Ran {} ({:.0} s)",
        program.name,
        start.elapsed().as_secs_f64()
    );
    output.iter().for_each(|line| println!("{line}"));
    let has_result = reader.has_result();
    let mut tally = reader.ended(&program.name, end);
    if end.success() && !has_result {
        tally.fail(format!("{}: it ended without a result", program.name));
    }
    Ok(tally)
}

fn documentation(root: &Path, filter: &[String]) -> Result<Tally> {
    let mut command = setup::cargo();
    command
        .current_dir(root)
        .args(["test", "--workspace", "--locked", "--no-fail-fast", "--doc"])
        .arg("--")
        .args(filter);
    let mut reader = CargoTest::default();
    let end = process::stream(&mut command, LIMIT, |line| reader.line(line))?;
    Ok(reader.ended("documentation", end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_cargo_are_read() {
        let message = |kind: &str, is_test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "manifest_path": "/src/bdev/Cargo.toml",
                "target": { "name": "nacre_bdev", "kind": [kind], "src_path": "/src/bdev/src/lib.rs" },
                "profile": { "test": is_test },
                "executable": is_test.then_some("/target/debug/deps/nacre_bdev-1"),
            })
            .to_string()
        };
        let read = |line: &str| Program::read(Path::new("/src"), line);
        let program = read(&message("lib", true)).expect("a test program");
        assert_eq!(program.name, "bdev/src/lib.rs");
        assert_eq!(program.folder, Path::new("/src/bdev"));
        assert_eq!(program.file, Path::new("/target/debug/deps/nacre_bdev-1"));
        assert_eq!(read(&message("lib", false)), None);
        assert_eq!(read("{\"reason\":\"build-finished\"}"), None);
        assert_eq!(read("{"), None);
    }

    /// Goal: the tests of a program count, and so does a crash. Method: shells that print what
    /// libtest prints.
    #[test]
    fn a_program_is_counted() {
        let program = Program {
            folder: "/".into(),
            name: "crate/src/lib.rs".to_owned(),
            target: "crate".to_owned(),
            file: "/bin/sh".into(),
        };
        let run = |script: &str| {
            let mut command = Command::new(&program.file);
            command.args(["-c", script]);
            run_one(&program, &mut command, &Mutex::default()).expect("a shell starts")
        };
        let good =
            run("test -n \"$NACRE_TEST_AT_LENGTH\" && echo 'test result: ok. 3 passed; 0 failed'");
        assert_eq!((good.passed, good.failed), (3, 0));
        let bad = run(
            "echo 'test a::b ... FAILED'; echo 'test result: FAILED. 1 passed; 1 failed'; exit 101",
        );
        assert_eq!(bad.failures, ["crate/src/lib.rs: a::b"]);
        let crashed = run("kill -SEGV $$");
        assert_eq!((crashed.passed, crashed.failed), (0, 1));
        assert_eq!(run("echo 'test result: ok. 0 passed; 0 failed'").failed, 0);
        assert_eq!(run("exit 0").failed, 1);
    }
}

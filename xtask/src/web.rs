//! Builds the administration page: `web/` becomes `engine/web/dist/`, which the daemon embeds.
//!
//! The built files are committed, so that a build of the daemon needs no Node.js. `--check` proves
//! that they are the result of the sources.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::setup::{self, need};
use crate::tally::{ScriptTest, Tally};
use crate::{process, vm};

const NAME: &str = "page";
const BROWSER: &str = "page in a browser";
const NAMESPACES: &[&str] = &["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
const LIMIT: Duration = Duration::from_secs(600);
/// The oldest Node.js that the builder runs on.
const NODE: (u32, u32) = (20, 19);

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Fail if the built files differ from those that are committed.
    #[arg(long)]
    check: bool,
}

/// True if a filter selects this suite.
pub(crate) fn matches(filter: &[String]) -> bool {
    filter.is_empty() || filter.iter().any(|part| NAME.contains(part.as_str()))
}

/// The suite `page` of `cargo xtask test`. The committed files have to be those that `web/` builds.
/// A browser then runs the cases of users, also with the daemon.
pub(crate) fn suite(root: &Path, nacre: Option<&Path>) -> Result<Tally> {
    let mut tally = Tally::default();
    if node().is_none_or(|version| version < NODE) {
        let (major, minor) = NODE;
        let why = format!("{NAME}: no Node.js {major}.{minor} or later");
        println!("SKIPPED: {why}");
        tally.skip(why);
        return Ok(tally);
    }
    let code = run(root, &Options { check: true })?;
    let what = "page: engine/web/dist is not what web/ builds";
    tally.check(what, code == ExitCode::SUCCESS);
    if setup::is_root()? {
        tally.add(browser(root, &vm::debug_nacre(root, nacre)?)?);
    } else {
        tally.skip(format!("{BROWSER}: a network of its own needs root"));
    }
    Ok(tally)
}

/// The cases of `web/tests`, in a network of their own. They need the packages of the last build.
fn browser(root: &Path, nacre: &Path) -> Result<Tally> {
    if let Err(error) = setup::ensure(&[need("chromium", "chromium"), need("ip", "iproute2")]) {
        let mut tally = Tally::default();
        println!("SKIPPED: {BROWSER}: no chromium: {error:#}");
        tally.skip(format!("{BROWSER}: no chromium: {error:#}"));
        return Ok(tally);
    }
    let mut probe = Command::new("unshare");
    if process::capture(probe.args(NAMESPACES).arg("true"), LIMIT).is_err() {
        println!("SKIPPED: {BROWSER}: no namespaces here");
        let mut tally = Tally::default();
        tally.skip(format!("{BROWSER}: no namespaces here"));
        return Ok(tally);
    }
    let mut command = Command::new("unshare");
    command
        .current_dir(root.join("web"))
        .args(NAMESPACES)
        .args(["sh", "-c"])
        .arg("ip link set lo up && exec node tests/run.mjs --short")
        .env("NACRE", nacre);
    let mut reader = ScriptTest::new(BROWSER);
    let end = process::stream(&mut command, LIMIT, |line| reader.line(line))?;
    Ok(reader.finish(end))
}

/// The version of Node.js on this machine.
fn node() -> Option<(u32, u32)> {
    let output = Command::new("node").arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut numbers = text.trim().strip_prefix('v')?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    setup::ensure(&[need("npm", "npm")])?;
    let (web, dist) = (root.join("web"), root.join("engine/web/dist"));
    let before = contents(&dist)?;
    npm(&web, &["ci", "--ignore-scripts", "--no-audit", "--no-fund"])?;
    npm(&web, &["run", "build"])?;
    if !options.check {
        return Ok(ExitCode::SUCCESS);
    }
    let after = contents(&dist)?;
    let names = before.keys().chain(after.keys());
    let mut different: Vec<&String> = names.filter(|n| before.get(*n) != after.get(*n)).collect();
    different.sort_unstable();
    different.dedup();
    if different.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    for name in different {
        println!("engine/web/dist/{name} is not what web/ builds");
    }
    println!("type `cargo xtask web`, and commit the result");
    Ok(ExitCode::FAILURE)
}

fn npm(web: &Path, arguments: &[&str]) -> Result<()> {
    let mut npm = Command::new("npm");
    let status = npm.current_dir(web).args(arguments).status();
    if !status.context("running npm")?.success() {
        bail!("npm {} failed", arguments.join(" "));
    }
    Ok(())
}

/// The files of a folder and of its folders, by path.
fn contents(folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        let entries = std::fs::read_dir(&next);
        for entry in entries.with_context(|| format!("reading {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder)?.display().to_string();
            found.insert(name, std::fs::read(&path)?);
        }
    }
    Ok(found)
}

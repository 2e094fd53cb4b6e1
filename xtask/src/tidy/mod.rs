//! `cargo xtask tidy`: checks the repository's own rules for source, documents and dependencies.
//! Each finding gives the place and the remedy.

mod documents;
mod examples;
mod folders;
mod generators;
mod layers;
mod lints;
mod literal;
mod names;
mod repeats;
mod types;
mod words;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process;
use crate::tally::Tally;

const LONGEST_FILE: usize = 700;

/// Crates that may contain unsafe code; every other crate root forbids it.
const UNSAFE_ALLOWED: &[&str] = &[
    "hugepages",
    "bdev/uring",
    "bdev/nvme/sim",
    "bdev/nvme/vfio",
    "engine/peer",
    "engine/sandbox",
    "transports/rdma/verbs",
    "transports/tls",
];

/// Patterns in source, each with its replacement. Split in pieces, so that this file does not
/// match.
const BANNED: &[(&str, &str)] = &[
    (concat!("todo", "!("), "finish it, or leave it out"),
    (concat!("unimplemented", "!("), "return a typed error"),
    (concat!("dbg", "!("), "use tracing"),
    (
        concat!("#[", "ignore"),
        "run the test, or skip it aloud with its reason",
    ),
    (concat!("thread::", "sleep_ms"), "use Duration"),
];

/// Paths and hosts of one particular machine do not belong in a repository.
const MACHINE_PATHS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/Us", "ers/"),
    concat!("/root/", ".c"),
    concat!("snapshot", ".debian.org"),
];

pub(crate) fn run(root: &Path) -> Result<Tally> {
    let files = tracked_files(root)?;
    let mut tally = Tally::default();
    let checks: [(&str, Vec<String>); 18] = [
        ("placeholders and ignored tests", banned(root, &files)?),
        ("long files", long_files(root, &files)?),
        ("unsafe code", unsafe_code(root, &files)?),
        ("machine paths", machine_paths(root, &files)?),
        ("files that end in a newline", ragged_files(root, &files)?),
        ("imports that run up", layers::findings(root, &files)?),
        ("folders", folders::findings(root, &files)?),
        ("tables of lints", lints::findings(root, &files)?),
        ("random generators", generators::findings(root, &files)?),
        ("large types", types::findings(root, &files)?),
        ("names of types", names::findings(root, &files)?),
        ("repeated lines", repeats::findings(root, &files)?),
        ("words", words::findings(root, &files)?),
        ("links", documents::links(root, &files)?),
        ("long pages", documents::lengths(root)?),
        ("commands", documents::commands(root, &files)?),
        ("named tests", documents::tests(root, &files)?),
        ("documentation tests", examples::findings(root, &files)?),
    ];
    for (name, findings) in checks {
        for finding in &findings {
            println!("{finding}");
        }
        tally.check(
            &format!("tidy: {name}: {} finding(s)", findings.len()),
            findings.is_empty(),
        );
    }
    Ok(tally)
}

/// Prints the contents of `words.txt` for the current tree.
pub(crate) fn print_words(root: &Path) -> Result<()> {
    print!("{}", words::table(root, &tracked_files(root)?)?);
    Ok(())
}

/// The files that git tracks. New files that are not added yet do not count.
fn tracked_files(root: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("git");
    command
        .current_dir(root)
        .args(["ls-files", "-z", "--cached"]);
    let out = process::capture(&mut command, Duration::from_secs(60))?;
    Ok(out
        .split('\0')
        .filter(|name| !name.is_empty() && root.join(name).is_file())
        .map(str::to_owned)
        .collect())
}

fn rust_files(files: &[String]) -> impl Iterator<Item = &String> {
    files.iter().filter(|name| name.ends_with(".rs"))
}

/// The folder of the crate that a source file belongs to, and the file's path below `src`.
fn crate_of(file: &str) -> Option<(&str, &str)> {
    match file.split_once("/src/") {
        Some(split) => Some(split),
        None => file.strip_prefix("src/").map(|inside| ("", inside)),
    }
}

/// True for a file that holds tests only.
fn is_test(file: &str) -> bool {
    let name = file.rsplit_once('/').map_or(file, |(_, name)| name);
    let is_tests = name == "tests.rs" || name == "testing.rs";
    is_tests || file.starts_with("tests/") || file.contains("/tests/")
}

fn read(root: &Path, file: &str) -> Result<String> {
    let bytes = std::fs::read(root.join(file)).with_context(|| format!("reading {file}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn banned(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in rust_files(files) {
        for (number, line) in read(root, file)?.lines().enumerate() {
            for (pattern, instead) in BANNED {
                if line.contains(pattern) && !line.trim_start().starts_with("//") {
                    findings.push(format!("{file}:{}: {pattern}: {instead}", number + 1));
                }
            }
        }
    }
    Ok(findings)
}

fn long_files(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in rust_files(files) {
        let lines = read(root, file)?.lines().count();
        if lines > LONGEST_FILE {
            findings.push(format!(
                "{file}: {lines} lines, more than {LONGEST_FILE}: split it by what it does"
            ));
        }
    }
    Ok(findings)
}

fn unsafe_code(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|name| name.ends_with("Cargo.toml")) {
        let dir = file.strip_suffix("Cargo.toml").unwrap_or_default();
        if UNSAFE_ALLOWED.contains(&dir.trim_end_matches('/')) {
            continue;
        }
        for crate_root in crate_roots(root, files, dir)? {
            if !read(root, crate_root)?.contains("#![forbid(unsafe_code)]") {
                findings.push(format!(
                    "{crate_root}: without #![forbid(unsafe_code)]; unsafe code lives in {}",
                    UNSAFE_ALLOWED.join(" and ")
                ));
            }
        }
    }
    Ok(findings)
}

/// `src/lib.rs`, `src/main.rs` and `src/bin/*` of the crate in `dir`. Fuzz targets are exempt:
/// libFuzzer's macro expands to unsafe code.
fn crate_roots<'a>(root: &Path, files: &'a [String], dir: &str) -> Result<Vec<&'a String>> {
    if dir.starts_with("fuzz/") || !read(root, &format!("{dir}Cargo.toml"))?.contains("[package]") {
        return Ok(Vec::new());
    }
    let bins = format!("{dir}src/bin/");
    let is_root = |name: &String| {
        *name == format!("{dir}src/lib.rs")
            || *name == format!("{dir}src/main.rs")
            || name
                .strip_prefix(&bins)
                .is_some_and(|rest| rest.ends_with(".rs") && !rest.contains('/'))
    };
    Ok(files.iter().filter(|name| is_root(name)).collect())
}

fn machine_paths(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|name| is_text(name)) {
        for (number, line) in read(root, file)?.lines().enumerate() {
            for path in MACHINE_PATHS {
                if line.contains(path) {
                    findings.push(format!(
                        "{file}:{}: {path} is a path of one machine",
                        number + 1
                    ));
                }
            }
        }
    }
    Ok(findings)
}

fn ragged_files(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in files
        .iter()
        .filter(|name| is_text(name) && !name.contains("/snapshots/"))
    {
        let text = read(root, file)?;
        if !text.is_empty() && !text.ends_with('\n') {
            findings.push(format!("{file}: end it with a newline"));
        }
    }
    Ok(findings)
}

fn is_text(name: &str) -> bool {
    let endings = [
        ".rs", ".toml", ".md", ".sh", ".json", ".yml", ".yaml", ".txt", ".service",
    ];
    endings.iter().any(|ending| name.ends_with(ending)) || name == ".ci/run"
}

//! Checks the documents: every relative link leads to a file and heading, every `cargo xtask`
//! command exists, and so does every test that the page of sources names, in the package that it
//! names. A test of the engine checks the `nacre` commands.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use clap::{Command, CommandFactory};
use regex::Regex;

use super::read;

/// Links without a target.
pub(super) fn links(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let link = Regex::new(r"\]\(([^)\s]+)\)")?;
    let mut findings = Vec::new();
    for file in documents(files) {
        let text = read(root, file)?;
        for (number, line) in prose(&text) {
            for found in link.captures_iter(line) {
                if let Some(fault) = broken(root, file, &text, &found[1])? {
                    findings.push(format!("{file}:{number}: {}: {fault}", &found[1]));
                }
            }
        }
    }
    Ok(findings)
}

/// Most lines of the README, and most words of ARCHITECTURE: pages that a newcomer reads whole.
const README_LINES: usize = 200;
const ARCHITECTURE_WORDS: usize = 1_500;

/// Pages that are too long.
pub(super) fn lengths(root: &Path) -> Result<Vec<String>> {
    let lines = read(root, "README.md")?.lines().count();
    let words = word_count(&read(root, "ARCHITECTURE.md")?);
    let pages = [
        ("README.md", lines, README_LINES, "lines"),
        ("ARCHITECTURE.md", words, ARCHITECTURE_WORDS, "words"),
    ];
    let long = pages.into_iter().filter(|(_, found, most, _)| found > most);
    let finding = |(page, found, most, unit)| format!("{page}: {found} {unit}, more than {most}");
    Ok(long.map(finding).collect())
}

/// Words, without the marks of tables and drawings.
fn word_count(text: &str) -> usize {
    let has_letter = |word: &&str| word.contains(char::is_alphanumeric);
    text.split_whitespace().filter(has_letter).count()
}

/// `cargo xtask` commands and flags that do not exist.
pub(super) fn commands(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut xtask = crate::Cli::command();
    xtask.build();
    let command = Regex::new(r"cargo xtask ([^`|#&>;]*)")?;
    let mut findings = Vec::new();
    for file in documents(files) {
        for (number, line) in read(root, file)?.lines().enumerate() {
            for found in command.captures_iter(line) {
                if let Some(fault) = unknown(&xtask, &found[1]) {
                    findings.push(format!("{file}:{}: {}: {fault}", number + 1, &found[0]));
                }
            }
        }
    }
    Ok(findings)
}

/// The page whose tables name tests as `package::test`, and guest cases as `vm NAME`. Its table of
/// prefixes has the folder and the name of each package.
const ROWS: &str = "docs/reference/sources.md";

/// Tests and guest cases of [`ROWS`] that do not exist, or are in another package.
pub(super) fn tests(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let function = Regex::new(r"\bfn ([a-z0-9_]+)")?;
    let mut functions: BTreeSet<(&str, String)> = BTreeSet::new();
    for file in files.iter().filter(|name| name.ends_with(".rs")) {
        let text = read(root, file)?;
        let folder = package_folder(files, file);
        functions.extend(
            function
                .captures_iter(&text)
                .map(|f| (folder, f[1].to_owned())),
        );
    }
    let page = read(root, ROWS)?;
    let packages = Packages::parse(&page)?;
    let mut findings = packages.faults(root)?;
    let named = Regex::new(r"`([\w-]+)::(?:[\w-]+::)*([a-z0-9_]+)`|`vm ([0-9]+[a-z0-9-]*)")?;
    for (number, line) in page.lines().enumerate() {
        for found in named.captures_iter(line) {
            let fault = if let Some(case) = found.get(3) {
                let script = format!("tests/vm/cases/{}.sh", case.as_str());
                (!files.contains(&script)).then(|| "no such test".to_owned())
            } else {
                packages.fault(&functions, &found[1], &found[2])
            };
            findings.extend(
                fault.map(|fault| format!("{ROWS}:{}: {}: {fault}", number + 1, &found[0])),
            );
        }
    }
    Ok(findings)
}

/// The packages of [`ROWS`] by prefix: folder and name.
struct Packages(BTreeMap<String, (String, String)>);

impl Packages {
    fn parse(page: &str) -> Result<Self> {
        let row = Regex::new(r"(?m)^\| `([\w-]+)` \| `([\w/-]+)` \| `([\w-]+)` \|$")?;
        let packages = row.captures_iter(page).map(|row| {
            let [prefix, folder, name] = [1, 2, 3].map(|at| row[at].to_owned());
            (prefix, (folder, name))
        });
        Ok(Self(packages.collect()))
    }

    /// Folders that do not contain the named package.
    fn faults(&self, root: &Path) -> Result<Vec<String>> {
        let mut findings = Vec::new();
        for (folder, name) in self.0.values() {
            let manifest = root.join(folder).join("Cargo.toml");
            let is_it = manifest.exists()
                && std::fs::read_to_string(manifest)?.contains(&format!("name = \"{name}\""));
            if !is_it {
                findings.push(format!("{ROWS}: {folder}: no package {name}"));
            }
        }
        Ok(findings)
    }

    /// The reason why `prefix::test` names no test. `functions`: folders of packages, with the
    /// names of their functions.
    fn fault(
        &self,
        functions: &BTreeSet<(&str, String)>,
        prefix: &str,
        test: &str,
    ) -> Option<String> {
        let Some((folder, _)) = self.0.get(prefix) else {
            return Some(format!("no prefix {prefix} in the table of packages"));
        };
        if functions.contains(&(folder.as_str(), test.to_owned())) {
            return None;
        }
        let elsewhere = functions.iter().find(|(_, name)| name == test);
        Some(match elsewhere {
            Some((other, _)) => format!("the test is in {other}, not in {folder}"),
            None => "no such test".to_owned(),
        })
    }
}

/// The folder of the package that a source file belongs to; empty for none.
fn package_folder<'a>(files: &[String], file: &'a str) -> &'a str {
    let mut folder = file;
    while let Some((above, _)) = folder.rsplit_once('/') {
        if files.contains(&format!("{above}/Cargo.toml")) {
            return above;
        }
        folder = above;
    }
    ""
}

fn documents(files: &[String]) -> impl Iterator<Item = &String> {
    files.iter().filter(|name| name.ends_with(".md"))
}

/// Lines outside of fenced blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_fenced = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        (!is_fenced && !is_fence).then_some((index + 1, line))
    })
}

fn broken(root: &Path, file: &str, text: &str, target: &str) -> Result<Option<String>> {
    if target.contains("://") || target.starts_with("mailto:") {
        return Ok(None);
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = Path::new(file).parent().unwrap_or_else(|| Path::new(""));
    let full = root.join(folder).join(path);
    if !path.is_empty() && !full.exists() {
        return Ok(Some("no such file".to_owned()));
    }
    if anchor.is_empty() {
        return Ok(None);
    }
    let has = if path.is_empty() {
        anchors(text).contains(anchor)
    } else {
        anchors(&std::fs::read_to_string(&full)?).contains(anchor)
    };
    Ok((!has).then(|| format!("no heading for #{anchor}")))
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|(_, line)| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = |c: &char| c.is_alphanumeric() || *c == ' ' || *c == '-' || *c == '_';
        title
            .chars()
            .filter(kept)
            .collect::<String>()
            .replace(' ', "-")
    };
    headings.map(|(_, line)| anchor(line)).collect()
}

/// The first word of `line` that the command does not know.
fn unknown(xtask: &Command, line: &str) -> Option<String> {
    let mut command = xtask;
    let mut is_value = false;
    for word in line.split_whitespace() {
        // Words after the end of a sentence, an ellipsis or `--` are not part of the command.
        if word == "--" || word.contains('…') || command.get_name() == "simulate" {
            return None;
        }
        if std::mem::take(&mut is_value) {
            continue;
        }
        if let Some(flag) = word.strip_prefix("--") {
            let name = flag.split('=').next().unwrap_or(flag);
            let arg = command
                .get_arguments()
                .find(|arg| arg.get_long() == Some(name));
            let Some(arg) = arg else {
                return Some(format!("no flag --{name}"));
            };
            is_value = arg.get_action().takes_values() && !flag.contains('=');
        } else if let Some(sub) = command.find_subcommand(word) {
            command = sub;
        } else if command.has_subcommands() {
            return Some(format!("no command {word}"));
        } else {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_are_those_of_headings() {
        let text = "# One daemon at a time\n```\n# no heading\n```\n## It's `so`: far\n";
        let expected = ["its-so-far", "one-daemon-at-a-time"].map(str::to_owned);
        assert_eq!(anchors(text), BTreeSet::from(expected));
    }

    #[test]
    fn a_test_is_looked_up_in_its_package() {
        let page = "| `a` | `x/a` | `nacre-a` |\n| row | `a::b` |\n";
        let packages = Packages::parse(page).unwrap();
        let names = [("x/a", "here"), ("x/b", "there")];
        let functions = BTreeSet::from(names.map(|(folder, name)| (folder, name.to_owned())));
        let fault = |prefix, test| packages.fault(&functions, prefix, test).unwrap_or_default();
        assert_eq!(fault("a", "here"), "");
        assert_eq!(fault("a", "there"), "the test is in x/b, not in x/a");
        assert_eq!(fault("a", "nowhere"), "no such test");
        assert_eq!(fault("b", "there"), "no prefix b in the table of packages");
    }

    #[test]
    fn package_folders_are_the_nearest() {
        let files = ["x/Cargo.toml", "x/y/Cargo.toml"].map(str::to_owned);
        assert_eq!(package_folder(&files, "x/y/src/tests/a.rs"), "x/y");
        assert_eq!(package_folder(&files, "x/src/a.rs"), "x");
        assert_eq!(package_folder(&files, "a.rs"), "");
    }

    #[test]
    fn links_to_missing_files_and_headings_are_found() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join("docs")).unwrap();
        std::fs::write(place.path().join("docs/a.md"), "# Here\n").unwrap();
        let text = "[a](docs/a.md) [b](docs/b.md) [c](docs/a.md#here) [d](docs/a.md#gone) [e](#up) [f](https://x.y/z)\n";
        std::fs::write(place.path().join("R.md"), text).unwrap();
        let found = links(place.path(), &["R.md".to_owned()]).unwrap();
        assert_eq!(
            found,
            [
                "R.md:1: docs/b.md: no such file",
                "R.md:1: docs/a.md#gone: no heading for #gone",
                "R.md:1: #up: no heading for #up",
            ]
        );
    }

    #[test]
    fn marks_are_no_words() {
        assert_eq!(word_count("| a | b-c |\n|---|---|\n a ──▶ b\n"), 4);
    }

    #[test]
    fn unknown_commands_and_flags_are_found() {
        let mut xtask = crate::Cli::command();
        xtask.build();
        for (line, good) in [
            ("test --filter digest,resync", true),
            ("vm run -- nvme version", true),
            ("simulate --seed 1 --anything", true),
            ("bench nvme --no-vm", true),
            ("tests", false),
            ("test --filters a", false),
            ("bench everything", false),
        ] {
            assert_eq!(unknown(&xtask, line).is_none(), good, "{line}");
        }
    }
}

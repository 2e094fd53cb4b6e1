//! Counts unclear phrases ([`HABITS`]) in comments and in text for users.
//!
//! Comments have a limit per 1,000 lines of a crate. Text for users (string literals of product
//! code, documents, the sample configuration) has the limit 0. `words.txt` lists the crates and
//! documents that are still above a limit, each with its allowed number of findings. Lower these
//! numbers when you rewrite a file; a place that is not in the list must meet the limits.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use regex::Regex;

use super::literal::Literal;
use super::{is_test, read, rust_files};

/// Places that are above a limit, each with the findings it may have: `PLACE KIND COUNT` per line.
const ALLOWED: &str = include_str!("words.txt");

/// Longest comment line, in characters.
const WIDEST: usize = 100;

/// An unclear construction, its limit per 1,000 comment lines, and the remedy.
struct Habit {
    name: &'static str,
    pattern: &'static str,
    per_thousand: f64,
    remedy: &'static str,
}

const HABITS: [Habit; 5] = [
    Habit {
        name: "clause for a noun",
        pattern: r"\b[Ww]hat (is|was|has|had|does|did|came|comes|stands|waits|cannot|can|there is|it|they|a|the)\b",
        per_thousand: 5.0,
        remedy: "name the thing: the write, the replica, the free space",
    },
    Habit {
        name: "person",
        pattern: r"\b([Ss]ome|[Nn]o|[Aa]ny|[Ee]very)body\b",
        per_thousand: 0.5,
        remedy: "name the part: a host, another daemon, no caller",
    },
    Habit {
        name: "told",
        pattern: r"\b[Tt](old|ell|ells|elling)\b",
        per_thousand: 2.0,
        remedy: "say reports, notifies, announces, or knows",
    },
    Habit {
        name: "who without a noun",
        pattern: r"\b[Ww]hoever\b|(^|[.,;:(] ?|\b(?i:for|to|by|from|of|at|with|and|or|if|that|when|as|than) )[Ww]ho\b",
        per_thousand: 1.0,
        remedy: "put the noun first: a caller that, the host that",
    },
    Habit {
        name: "phrase without a noun",
        pattern: r"^(Of the|Of a|Of an|Of its|Those (that|which|of|with)|As it|Known to) \w",
        per_thousand: 1.0,
        remedy: "begin with the noun: the connections that, the time of",
    },
];

/// Comment lines wider than `WIDEST`; a kind of its own beside the habits.
const WIDE: &str = "wide";
/// Any habit inside text that users see.
const TEXT: &str = "text";

/// The findings of one place (a crate, or one document), by kind.
#[derive(Default)]
struct Place {
    comment_lines: usize,
    findings: BTreeMap<&'static str, Vec<String>>,
}

impl Place {
    fn find(&mut self, kind: &'static str, file: &str, number: usize, line: &str) {
        let found = self.findings.entry(kind).or_default();
        found.push(format!("{file}:{number}: {}", line.trim()));
    }

    /// The number of findings of `kind` that the rules allow here.
    fn limit(&self, kind: &str) -> usize {
        let per_thousand = HABITS.iter().find(|habit| habit.name == kind);
        per_thousand.map_or(0, |habit| {
            (self.comment_lines as f64 * habit.per_thousand / 1000.0).ceil() as usize
        })
    }
}

/// Compares every place with its limits. Prints the findings of a place that is above them.
pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let allowed = allowed()?;
    let mut complaints = Vec::new();
    for (name, place) in places(root, files)? {
        for (kind, found) in &place.findings {
            let debt = allowed.get(&(name.as_str(), *kind)).copied();
            let limit = place.limit(kind).max(debt.unwrap_or(0));
            if found.len() <= limit {
                continue;
            }
            found.iter().for_each(|line| println!("{kind}: {line}"));
            complaints.push(format!(
                "{name}: {} of \"{kind}\" above, at most {limit}: {}",
                found.len(),
                remedy(kind)
            ));
        }
    }
    Ok(complaints)
}

/// The contents of `words.txt` for the tree as it is: what `cargo xtask tidy --words` prints.
pub(super) fn table(root: &Path, files: &[String]) -> Result<String> {
    let mut lines = Vec::new();
    for (name, place) in places(root, files)? {
        for (kind, found) in &place.findings {
            if found.len() > place.limit(kind) {
                lines.push(format!("{name}\t{kind}\t{}\n", found.len()));
            }
        }
    }
    Ok(lines.concat())
}

fn remedy(kind: &str) -> &'static str {
    match kind {
        WIDE => "wrap comments at 100 columns",
        TEXT => "users read this: name the field, the cause and the remedy, in plain English",
        _ => HABITS
            .iter()
            .find(|habit| habit.name == kind)
            .map_or("", |habit| habit.remedy),
    }
}

fn allowed() -> Result<BTreeMap<(&'static str, &'static str), usize>> {
    let entry = |line: &'static str| {
        let mut fields = line.split('\t');
        let (place, kind, count) = (fields.next()?, fields.next()?, fields.next()?);
        Some(((place, kind), count.parse().ok()?))
    };
    ALLOWED
        .lines()
        .map(|line| entry(line).with_context(|| format!("words.txt: not three fields: {line}")))
        .collect()
}

fn places(root: &Path, files: &[String]) -> Result<BTreeMap<String, Place>> {
    let habits = HABITS.map(|habit| Regex::new(habit.pattern).map(|regex| (habit.name, regex)));
    let habits = habits.into_iter().collect::<Result<Vec<_>, _>>()?;
    let crates = crates(files);
    let mut places: BTreeMap<String, Place> = BTreeMap::new();
    for file in rust_files(files) {
        let owner = crates.iter().find(|dir| file.starts_with(**dir));
        let place = owner.map_or("fuzz", |dir| dir.trim_end_matches('/'));
        let place = places.entry(place.to_owned()).or_default();
        source(&read(root, file)?, file, &habits, place);
    }
    for file in files.iter().filter(|name| has_hash_comments(name)) {
        let place = places.entry(file.clone()).or_default();
        script(&read(root, file)?, file, place);
    }
    for file in files.iter().filter(|name| is_document(name)) {
        let place = places.entry(file.clone()).or_default();
        let mut is_fenced = false;
        for (index, line) in read(root, file)?.lines().enumerate() {
            // Blocks show the program's own output, whose text counts in its source.
            is_fenced ^= line.trim_start().starts_with("```");
            if is_fenced || line.starts_with("    ") {
                continue;
            }
            if habits.iter().any(|(_, regex)| regex.is_match(line)) {
                place.find(TEXT, file, index + 1, line);
            }
        }
    }
    Ok(places)
}

/// Scripts and configuration files, whose comments begin with `#`.
fn has_hash_comments(name: &str) -> bool {
    const ENDS: [&str; 9] = [
        "conf", "py", "rules", "service", "sh", "sysusers", "toml", "yaml", "yml",
    ];
    const FOLDERS: [&str; 3] = [".ci/", "deploy/deb/", "deploy/image/root/usr/lib/nacre/"];
    let file = name.rsplit_once('/').map_or(name, |(_, file)| file);
    let end = file.rsplit_once('.').map(|(_, end)| end);
    end.is_some_and(|end| ENDS.contains(&end))
        || file == "Containerfile"
        || FOLDERS.iter().any(|folder| name.starts_with(folder))
}

/// Finds wide comments, also those behind code. `#: ` begins a setting, which is no comment.
fn script(text: &str, file: &str, place: &mut Place) {
    for (index, line) in text.lines().enumerate() {
        let start = line.find("# ");
        let is_comment =
            start.is_some_and(|at| line[..at].ends_with(char::is_whitespace) || at == 0);
        if is_comment && line.chars().count() > WIDEST {
            place.find(WIDE, file, index + 1, line);
        }
    }
}

/// Folders with a Cargo.toml, the deepest first, each with a slash at its end.
fn crates(files: &[String]) -> Vec<&str> {
    let mut dirs: Vec<&str> = files
        .iter()
        .filter_map(|name| name.strip_suffix("Cargo.toml"))
        .filter(|dir| !dir.is_empty())
        .collect();
    dirs.sort_by_key(|dir| std::cmp::Reverse(dir.len()));
    dirs
}

/// Documents that users read, and the sample configuration. The references are generated from
/// string literals, which count in their crates.
fn is_document(name: &str) -> bool {
    let is_generated = name.starts_with("docs/reference/");
    (name.ends_with(".md") && !is_generated) || name == "nacre.sample.toml"
}

fn source(text: &str, file: &str, habits: &[(&'static str, Regex)], place: &mut Place) {
    let mut in_tests = is_test(file) || file.starts_with("xtask/") || file.starts_with("benches/");
    let mut literal = Literal::default();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let texts = literal.of_line(line);
        if let Some(comment) = line.trim_start().strip_prefix("//")
            && texts.is_empty()
        {
            place.comment_lines += 1;
            if line.chars().count() > WIDEST {
                place.find(WIDE, file, number, line);
            }
            let words = comment.trim_start_matches(['/', '!', ' ']);
            for (name, regex) in habits {
                if regex.is_match(words) {
                    place.find(name, file, number, line);
                }
            }
            continue;
        }
        // Inline test modules stand at the end of a file.
        in_tests |= line.starts_with("#[cfg(test)]");
        if in_tests {
            continue;
        }
        if habits.iter().any(|(_, regex)| regex.is_match(&texts)) {
            place.find(TEXT, file, number, line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> BTreeMap<&'static str, usize> {
        let habits: Vec<_> = HABITS
            .iter()
            .map(|habit| (habit.name, Regex::new(habit.pattern).expect("a pattern")))
            .collect();
        let mut place = Place::default();
        source(text, "made/src/up.rs", &habits, &mut place);
        let counts = place.findings.iter();
        counts.map(|(kind, found)| (*kind, found.len())).collect()
    }

    /// One line per habit, in a comment, and the plain sentence that replaces it.
    #[test]
    fn habits_are_found_in_comments_and_plain_sentences_are_not() {
        let cases = [
            (concat!("// Wha", "t is under way."), "clause for a noun"),
            (concat!("/// Nobo", "dy waits."), "person"),
            (concat!("// The host is to", "ld."), "told"),
            (concat!("//! For wh", "o polls."), "who without a noun"),
            (
                concat!("/// Of t", "he queue pair, once."),
                "phrase without a noun",
            ),
        ];
        for (line, kind) in cases {
            assert_eq!(found(line), BTreeMap::from([(kind, 1)]), "{line}");
        }
        let plain = "// Pending writes.\n/// A caller who polls.\n// The host receives an event.";
        assert_eq!(found(plain), BTreeMap::new());
    }

    #[test]
    fn literals_of_product_code_count_as_text_and_those_of_tests_do_not() {
        let line = concat!("warn!(\"nobo", "dy answers\");\n");
        assert_eq!(found(line), BTreeMap::from([(TEXT, 1)]));
        assert_eq!(found(&format!("#[cfg(test)]\n{line}")), BTreeMap::new());
        let name = concat!("let nobo", "dy = 1;");
        assert_eq!(found(name), BTreeMap::new());
        let name = concat!("one and two and three and nobo", "dy(4);");
        assert_eq!(found(name), BTreeMap::new());
    }

    #[test]
    fn a_wide_comment_is_found() {
        assert_eq!(found(&format!("// {}", "x".repeat(97))), BTreeMap::new());
        let wide = format!("// {}", "x".repeat(98));
        assert_eq!(found(&wide), BTreeMap::from([(WIDE, 1)]));
    }

    /// Goal: wide comments of scripts are found, and wide lines of code are not.
    #[test]
    fn a_wide_comment_of_a_script_is_found() {
        let found = |line: &str| {
            let mut place = Place::default();
            script(line, "a.sh", &mut place);
            place.findings.len()
        };
        let long = "x".repeat(99);
        assert_eq!(found(&format!("# {long}")), 1);
        assert_eq!(found(&format!("a=1 # {long}")), 1);
        assert_eq!(found(&format!("a={long}")), 0);
        assert_eq!(found(&format!("a={long}#3")), 0);
        assert_eq!(found("# short"), 0);
        for (name, is_one) in [
            ("nacre.sample.toml", true),
            (".ci/run", true),
            ("deploy/deb/postinst", true),
            ("docs/glossary.md", false),
        ] {
            assert_eq!(has_hash_comments(name), is_one, "{name}");
        }
    }

    #[test]
    fn the_table_of_debts_is_readable() {
        allowed().expect("three fields per line");
    }
}

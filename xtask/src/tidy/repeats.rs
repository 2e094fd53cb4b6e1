//! Finds duplicated code: runs of [`RUN`] or more equal lines, outside tests.
//!
//! Ignores blank lines, comments, attributes, imports and indentation. Lines that differ in a name
//! are different lines: code of the same shape with other names is often clearer than a shared
//! helper.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use anyhow::Result;

use super::{is_test, read};

/// Length of the shortest run that is reported.
const RUN: usize = 10;

/// Pairs of files that may share a run, with the reason. Remove a pair when it shares none.
const ALLOWED: &[(&str, &str, &str)] = &[
    (
        "bdev/src/delay/channel.rs",
        "bdev/src/fault/channel.rs",
        "calls that a queue passes on to its base, between others that differ",
    ),
    (
        "bdev/src/delay/mod.rs",
        "bdev/src/fault/mod.rs",
        "one-line accessors of a stacked device",
    ),
    (
        "bdev/src/delay/mod.rs",
        "bdev/src/passthru/mod.rs",
        "one-line accessors of a stacked device",
    ),
    (
        "bdev/src/malloc/mod.rs",
        "bdev/src/null/mod.rs",
        "one-line accessors of a device",
    ),
    (
        "bdev/src/malloc/channel.rs",
        "bdev/src/null/channel.rs",
        "calls that a queue of finished I/O passes on, between others that differ",
    ),
    (
        "nvmf/src/tcp/controller/mod.rs",
        "nvmf/src/tcp/host/mod.rs",
        "the same interface of both ends; what they share is in closing.rs, rx.rs and tx.rs",
    ),
    (
        "transports/rdma/src/stats.rs",
        "transports/tcp/src/stats.rs",
        "macros that declare different counters in the same way",
    ),
];

/// A place where a run begins: an index of the list of sources, and one of its code lines.
type Place = (usize, usize);

struct Source<'a> {
    file: &'a str,
    /// The code lines: the line number, and a number for its text. Lines with equal text have equal
    /// numbers.
    lines: Vec<(usize, u32)>,
}

#[derive(Debug, PartialEq, Eq)]
struct Repeat<'a> {
    lines: usize,
    one: (&'a str, usize),
    other: (&'a str, usize),
}

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for file in files {
        let is_code = file.ends_with(".rs") || file.ends_with(".sh");
        // The bodies of fuzz targets are tests.
        let is_fuzz = file.starts_with("fuzz/") || file.ends_with("/fuzzing.rs");
        if is_code && !is_test(file) && !is_fuzz {
            texts.push((file.as_str(), read(root, file)?));
        }
    }
    let mut findings = Vec::new();
    let mut unused: BTreeSet<(&str, &str)> = ALLOWED.iter().map(|pair| (pair.0, pair.1)).collect();
    for repeat in repeats(&texts) {
        let (one, other) = (repeat.one, repeat.other);
        let is_it = |pair: &(&str, &str)| *pair == (one.0, other.0) || *pair == (other.0, one.0);
        if ALLOWED.iter().any(|pair| is_it(&(pair.0, pair.1))) {
            unused.retain(|pair| !is_it(pair));
            continue;
        }
        findings.push(format!(
            "{}:{}: {} lines that stand again at {}:{}: let both places use one",
            one.0, one.1, repeat.lines, other.0, other.1
        ));
    }
    findings.extend(unused.iter().map(|(one, other)| {
        format!("{one} and {other} share no run: remove them from xtask/src/tidy/repeats.rs")
    }));
    Ok(findings)
}

/// The longest runs that two places share. A run in three places gives two repeats.
fn repeats<'a>(texts: &[(&'a str, String)]) -> Vec<Repeat<'a>> {
    let mut numbers = HashMap::new();
    let sources: Vec<Source> = texts
        .iter()
        .map(|(file, text)| Source {
            file,
            lines: code_of(text, &mut numbers),
        })
        .collect();
    let mut last: HashMap<Vec<u32>, Place> = HashMap::new();
    let mut found = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        for at in 0..(source.lines.len() + 1).saturating_sub(RUN) {
            let run = source.lines[at..at + RUN].iter().map(|line| line.1);
            let Some(before) = last.insert(run.collect(), (index, at)) else {
                continue;
            };
            found.extend(repeat(&sources, before, (index, at)));
        }
    }
    found
}

/// The run that begins at both places; `None` if it began before.
fn repeat<'a>(sources: &[Source<'a>], one: Place, other: Place) -> Option<Repeat<'a>> {
    let lines = |place: Place| &sources[place.0].lines;
    let line = |place: Place, after: usize| lines(place).get(place.1 + after).map(|line| line.1);
    let before = |place: Place| Some(lines(place)[place.1.checked_sub(1)?].1);
    let overlap = one.0 == other.0 && other.1 < one.1 + RUN;
    if overlap || (before(one).is_some() && before(one) == before(other)) {
        return None;
    }
    let same = |after: &usize| line(one, *after).is_some_and(|l| Some(l) == line(other, *after));
    Some(Repeat {
        lines: (0..).take_while(same).count(),
        one: (sources[one.0].file, lines(one)[one.1].0),
        other: (sources[other.0].file, lines(other)[other.1].0),
    })
}

/// The code lines of a text. `numbers` assigns a number to each different line.
fn code_of<'a>(text: &'a str, numbers: &mut HashMap<&'a str, u32>) -> Vec<(usize, u32)> {
    let mut code = Vec::new();
    let (mut in_import, mut in_tests) = (false, false);
    for (index, whole) in text.lines().enumerate() {
        let line = whole.trim();
        if in_tests {
            in_tests = whole != "}";
            continue;
        }
        if whole.starts_with("#[cfg(test)]") {
            in_tests = true;
            continue;
        }
        if in_import || is_import(line) {
            in_import = !line.ends_with(';');
            continue;
        }
        if line.is_empty() || line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        let next = numbers.len() as u32;
        code.push((index + 1, *numbers.entry(line).or_insert(next)));
    }
    code
}

fn is_import(line: &str) -> bool {
    let public = line.strip_prefix("pub").map_or(line, |rest| {
        rest.strip_prefix("(crate)").unwrap_or(rest).trim_start()
    });
    public.starts_with("use ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text of lines that stand nowhere else, and the same ten in between.
    fn with_ten(before: &[&str], after: &[&str]) -> String {
        let ten: Vec<String> = (0..10).map(|n| format!("    call_{n}();")).collect();
        let ten: Vec<&str> = ten.iter().map(String::as_str).collect();
        [before, &ten, after].concat().join("\n")
    }

    fn of(texts: &[String]) -> Vec<(usize, usize, usize)> {
        let named: Vec<(&str, String)> = texts.iter().map(|text| ("a.rs", text.clone())).collect();
        let found = repeats(&named).into_iter();
        found.map(|r| (r.lines, r.one.1, r.other.1)).collect()
    }

    #[test]
    fn ten_equal_lines_in_a_row_are_found_once() {
        let one = with_ten(&["one();"], &["two();"]);
        let other = with_ten(&["three();", "four();"], &[]);
        assert_eq!(of(&[one.clone(), other]), [(10, 2, 3)]);
        assert_eq!(of(&[one.clone(), one]), [(12, 1, 1)]);
    }

    #[test]
    fn comments_attributes_imports_and_indentation_do_not_count() {
        let one = with_ten(&[], &[]);
        let other = one.replace(
            "    call_3",
            "// Why.\n\n#[allow(dead_code)]\nuse a::{\n    b,\n};\ncall_3",
        );
        assert_eq!(of(&[one.clone(), other]), [(10, 1, 1)]);
        let nine = one.replace("call_9", "call_ten");
        assert_eq!(of(&[one, nine]), []);
    }

    #[test]
    fn a_file_may_repeat_itself_and_tests_may() {
        let twice = [with_ten(&[], &["other();"]), with_ten(&[], &[])].join("\n");
        assert_eq!(of(&[twice]), [(10, 1, 12)]);
        let tested = [
            with_ten(&[], &["#[cfg(test)]"]),
            with_ten(&["mod tests {"], &["}"]),
        ];
        assert_eq!(of(&[tested.join("\n")]), []);
        let same = ["f();"; 30].join("\n");
        assert_eq!(
            of(&[same]),
            [],
            "a run does not repeat itself by overlapping"
        );
    }
}

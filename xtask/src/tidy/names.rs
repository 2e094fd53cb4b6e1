//! Checks that the types that are `pub` or `pub(crate)` in a crate have different names, so that a
//! name in an import means one type. Ignores test modules.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use regex::Regex;

use super::literal::Literal;
use super::{crate_of, is_test, read, rust_files};

/// Names that several public types of a crate share: the crate, the name, and the reason. The list
/// may only become shorter.
const ALLOWED: &[(&str, &str, &str)] = &[
    (
        "bdev",
        "Config",
        "each module has one, with the module's path: null::Config",
    ),
    (
        "xtask",
        "Options",
        "each subcommand has one, with the subcommand's module: run::Options",
    ),
];

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let definitions = Definitions::new()?;
    let mut places: BTreeMap<(&str, String), Vec<String>> = BTreeMap::new();
    for file in rust_files(files) {
        if let Some((place, inside)) = crate_of(file)
            && !is_test(file)
        {
            for name in definitions.of(&read(root, file)?) {
                let of_name = places.entry((place, name)).or_default();
                of_name.push(inside.to_owned());
            }
        }
    }
    Ok(compare(&places, ALLOWED))
}

/// `places`: the files with a public type, by crate and name.
fn compare(
    places: &BTreeMap<(&str, String), Vec<String>>,
    allowed: &[(&str, &str, &str)],
) -> Vec<String> {
    let shared = places.iter().filter(|(_, files)| files.len() > 1);
    let is_allowed = |krate: &str, name: &str| {
        let is_it = |entry: &&(&str, &str, &str)| (entry.0, entry.1) == (krate, name);
        allowed.iter().any(|entry| is_it(&entry))
    };
    let mut findings: Vec<String> = shared
        .filter(|((krate, name), _)| !is_allowed(krate, name))
        .map(|((krate, name), files)| {
            format!(
                "{krate}: {} public types are called {name} ({}): give each its own name",
                files.len(),
                files.join(", ")
            )
        })
        .collect();
    let is_shared = |krate: &str, name: &str| {
        let files = places.get(&(krate, name.to_owned()));
        files.is_some_and(|files| files.len() > 1)
    };
    let unused = allowed.iter().filter(|entry| !is_shared(entry.0, entry.1));
    findings.extend(unused.map(|(krate, name, _)| {
        format!(
            "{krate}: one type is called {name}: remove the exception in xtask/src/tidy/names.rs"
        )
    }));
    findings
}

struct Definitions {
    definition: Regex,
}

impl Definitions {
    fn new() -> Result<Self> {
        Ok(Self {
            // Types within a module of the file are indented; they belong to tests or macros.
            definition: Regex::new(
                r"^pub(?:\(crate\))? (?:unsafe )?(?:struct|enum|union|trait|type) (\w+)",
            )?,
        })
    }

    fn of(&self, text: &str) -> Vec<String> {
        let mut literal = Literal::default();
        let mut names = Vec::new();
        for line in text.lines() {
            let is_code = !literal.is_open();
            literal.of_line(line);
            if let Some(found) = self.definition.captures(line).filter(|_| is_code) {
                names.push(found[1].to_owned());
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_types_are_found() {
        let text = "pub struct A;\npub(crate) struct B;\npub(super) struct L;\nenum C {}\npub enum D {\n    E,\n}\n\
                    pub unsafe trait F {}\npub type G = u8;\nmod m {\n    pub struct H;\n}\n\
                    const T: &str = r#\"\npub struct I;\n\"#;\npub fn j() {}\npub union K {}\n";
        let names = Definitions::new().unwrap().of(text);
        assert_eq!(names, ["A", "B", "D", "F", "G", "K"]);
    }

    /// Goal: a shared name is reported unless it is allowed; an exception without use is reported.
    #[test]
    fn shared_names_are_reported() {
        let mut places = BTreeMap::new();
        for (krate, name, file) in [
            ("one", "A", "a.rs"),
            ("one", "A", "b.rs"),
            ("one", "B", "b.rs"),
            ("two", "B", "a.rs"),
        ] {
            let files: &mut Vec<String> = places.entry((krate, name.to_owned())).or_default();
            files.push(file.to_owned());
        }
        let of = |allowed: &[(&str, &str, &str)]| compare(&places, allowed);
        assert_eq!(
            of(&[]),
            ["one: 2 public types are called A (a.rs, b.rs): give each its own name"]
        );
        assert_eq!(of(&[("one", "A", "why")]), [""; 0]);
        assert_eq!(
            of(&[("one", "A", "why"), ("two", "A", "why")]),
            ["two: one type is called A: remove the exception in xtask/src/tidy/names.rs"]
        );
    }
}

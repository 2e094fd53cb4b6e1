//! Checks that the modules of a crate import each other in one direction only.
//!
//! A room is a file or folder directly under `src`; an import between two rooms is an arrow. The
//! arrows of a crate must form no cycle, so that its rooms can be read from the bottom up. Tests
//! are ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use regex::Regex;

use super::{crate_of, is_test, read, rust_files};

/// Known cycles. A crate without an entry has none; remove an entry together with its cycle.
const CIRCLES: &[(&str, &[&str])] = &[
    (
        "bdev/nvme",
        &["channel control controller device event pair table"],
    ),
    ("bdev/nvme/sim", &["drive function", "features post state"]),
];

type Arrows = BTreeMap<String, BTreeSet<String>>;

pub fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut crates: BTreeMap<&str, Vec<(&str, String)>> = BTreeMap::new();
    for file in rust_files(files) {
        if let Some((place, inside)) = crate_of(file) {
            crates
                .entry(place)
                .or_default()
                .push((inside, read(root, file)?));
        }
    }
    let mut findings = Vec::new();
    for (place, sources) in &crates {
        let found: BTreeSet<String> = circles(&arrows(sources)?)
            .iter()
            .map(|circle| circle.join(" "))
            .collect();
        let allowed: BTreeSet<String> = CIRCLES
            .iter()
            .filter(|(of, _)| of == place)
            .flat_map(|(_, circles)| circles.iter().map(|c| (*c).to_owned()))
            .collect();
        findings.extend(found.difference(&allowed).map(|circle| {
            format!("{place}/src: modules import each other: {circle}; move the shared names down")
        }));
        findings.extend(allowed.difference(&found).map(|circle| {
            format!(
                "{place}/src: the circle {circle} has changed: correct xtask/src/tidy/layers.rs"
            )
        }));
    }
    Ok(findings)
}

fn room(inside: &str) -> &str {
    let first = inside.split('/').next().unwrap_or(inside);
    first.strip_suffix(".rs").unwrap_or(first)
}

/// `sources` holds paths below `src`, each with the file's text.
fn arrows(sources: &[(&str, String)]) -> Result<Arrows> {
    let rooms: BTreeSet<&str> = sources.iter().map(|(inside, _)| room(inside)).collect();
    let exported = exports(sources)?;
    let crate_path = Regex::new(r"\bcrate::(\{[^;]*;|\w+)")?;
    let first_names = Regex::new(r"[{,]\s*(\w+)")?;
    let super_path = Regex::new(r"(super::)?\bsuper::(\w+)")?;
    let inline_tests = Regex::new(r"#\[cfg\(test\)\]\s*(#\[[^\]]*\]\s*)*mod \w+ \{")?;
    let comment = Regex::new(r"//[^\n]*")?;
    let mut arrows = Arrows::new();
    for (inside, text) in sources {
        let from = room(inside);
        if is_test(inside) || ["lib", "main", "bin"].contains(&from) {
            continue;
        }
        let text = inline_tests.split(text).next().unwrap_or_default();
        let text = comment.replace_all(text, "");
        let mut names: Vec<String> = Vec::new();
        for found in crate_path.captures_iter(&text) {
            match &found[1] {
                group if group.starts_with('{') => {
                    names.extend(first_names.captures_iter(group).map(|n| n[1].to_owned()));
                }
                name => names.push(name.to_owned()),
            }
        }
        let is_top = !inside.contains('/') || inside.ends_with("/mod.rs");
        if is_top && inside.matches('/').count() <= 1 {
            let found = super_path.captures_iter(&text);
            names.extend(
                found
                    .filter(|n| n.get(1).is_none())
                    .map(|n| n[2].to_owned()),
            );
        }
        for name in names {
            let to = match rooms.get(name.as_str()) {
                Some(room) => (*room).to_owned(),
                None => exported.get(&name).cloned().unwrap_or_default(),
            };
            if rooms.contains(to.as_str()) && to != from && to != "lib" && to != "main" {
                arrows.entry(from.to_owned()).or_default().insert(to);
            }
        }
    }
    Ok(arrows)
}

/// Names exported by the crate's root, each with its room.
fn exports(sources: &[(&str, String)]) -> Result<BTreeMap<String, String>> {
    let line = Regex::new(r"pub(?:\(crate\))? use (\w+)(?:::\w+)*::(\{[^}]*\}|\w+)")?;
    let word = Regex::new(r"\w+")?;
    let mut exported = BTreeMap::new();
    let roots = sources
        .iter()
        .filter(|(inside, _)| ["lib.rs", "main.rs"].contains(inside));
    for (_, text) in roots {
        for found in line.captures_iter(text) {
            for name in word.find_iter(&found[2]) {
                exported.insert(name.as_str().to_owned(), found[1].to_owned());
            }
        }
    }
    Ok(exported)
}

/// Groups of rooms that import each other, directly or indirectly; each group is sorted.
fn circles(arrows: &Arrows) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = arrows
        .keys()
        .map(|room| (room, reach(arrows, room)))
        .collect();
    let mut circles: Vec<Vec<String>> = Vec::new();
    for (room, there) in &reached {
        let is_known = circles.iter().any(|circle| circle.contains(room));
        if is_known || !there.contains(room) {
            continue;
        }
        let back = |other: &&&String| reached.get(**other).is_some_and(|r| r.contains(room));
        circles.push(there.iter().filter(back).map(|r| (*r).clone()).collect());
    }
    circles
}

fn reach<'a>(arrows: &'a Arrows, from: &String) -> BTreeSet<&'a String> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&String> = arrows.get(from).into_iter().flatten().collect();
    while let Some(room) = open.pop() {
        if found.insert(room) {
            open.extend(arrows.get(room).into_iter().flatten());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(sources: &[(&str, &str)]) -> Vec<Vec<String>> {
        let sources: Vec<_> = sources.iter().map(|(p, t)| (*p, (*t).to_owned())).collect();
        circles(&arrows(&sources).unwrap())
    }

    #[test]
    fn one_direction_is_no_cycle() {
        let found = circles_of(&[
            ("lib.rs", "pub mod a; pub mod b;"),
            ("a.rs", "use crate::b::B;"),
            ("b/mod.rs", "// use crate::a::A;"),
            ("b/tests.rs", "use crate::a::A;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn every_kind_of_import_counts() {
        for back in [
            "use crate::a::A;",
            "use super::a;",
            "use crate::{c, a::A};",
            "fn f() { crate::a::g() }",
            "use crate::A;",
        ] {
            let found = circles_of(&[
                ("lib.rs", "pub use a::A; mod b;"),
                ("a.rs", "use super::b::B;"),
                ("b.rs", back),
                ("c.rs", ""),
            ]);
            assert_eq!(found, [["a", "b"]], "{back}");
        }
    }
}

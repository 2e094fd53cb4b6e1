//! Checks that the modules of a crate import each other in one direction only.
//!
//! A module here is a file or folder directly in `src`. The imports between the modules of a crate
//! must form no cycle, so that a reader can start at the bottom. Ignores tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use regex::Regex;

use super::{crate_of, is_test, read, rust_files};

/// The imports of a crate: each module, with the modules that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
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
        findings.extend(cycles(&imports(sources)?).iter().map(|cycle| {
            let cycle = cycle.join(" ");
            format!("{place}/src: modules import each other: {cycle}; move the shared names down")
        }));
    }
    Ok(findings)
}

/// The module of a file, from its path below `src`.
fn module(inside: &str) -> &str {
    let first = inside.split('/').next().unwrap_or(inside);
    first.strip_suffix(".rs").unwrap_or(first)
}

/// The imports in these sources: paths below `src`, each with the file's text.
fn imports(sources: &[(&str, String)]) -> Result<Imports> {
    let modules: BTreeSet<&str> = sources.iter().map(|(inside, _)| module(inside)).collect();
    let exported = exports(sources)?;
    let crate_path = Regex::new(r"\bcrate::(\{[^;]*;|\w+)")?;
    let first_names = Regex::new(r"[{,]\s*(\w+)")?;
    let super_path = Regex::new(r"(super::)?\bsuper::(\w+)")?;
    let inline_tests = Regex::new(r"#\[cfg\(test\)\]\s*(#\[[^\]]*\]\s*)*mod \w+ \{")?;
    let comment = Regex::new(r"//[^\n]*")?;
    let mut imports = Imports::new();
    for (inside, text) in sources {
        let from = module(inside);
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
            let to = match modules.get(name.as_str()) {
                Some(module) => (*module).to_owned(),
                None => exported.get(&name).cloned().unwrap_or_default(),
            };
            if modules.contains(to.as_str()) && to != from && to != "lib" && to != "main" {
                imports.entry(from.to_owned()).or_default().insert(to);
            }
        }
    }
    Ok(imports)
}

/// Names exported by the crate's root, each with its module.
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

/// Groups of modules that import each other, directly or indirectly; each group is sorted.
fn cycles(imports: &Imports) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = imports
        .keys()
        .map(|module| (module, reach(imports, module)))
        .collect();
    let mut cycles: Vec<Vec<String>> = Vec::new();
    for (module, reachable) in &reached {
        let is_known = cycles.iter().any(|cycle| cycle.contains(module));
        if is_known || !reachable.contains(module) {
            continue;
        }
        let back = |other: &&&String| reached.get(**other).is_some_and(|r| r.contains(module));
        cycles.push(
            reachable
                .iter()
                .filter(back)
                .map(|r| (*r).clone())
                .collect(),
        );
    }
    cycles
}

fn reach<'a>(imports: &'a Imports, from: &String) -> BTreeSet<&'a String> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&String> = imports.get(from).into_iter().flatten().collect();
    while let Some(module) = open.pop() {
        if found.insert(module) {
            open.extend(imports.get(module).into_iter().flatten());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles_of(sources: &[(&str, &str)]) -> Vec<Vec<String>> {
        let sources: Vec<_> = sources.iter().map(|(p, t)| (*p, (*t).to_owned())).collect();
        cycles(&imports(&sources).unwrap())
    }

    #[test]
    fn one_direction_is_no_cycle() {
        let found = cycles_of(&[
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
            let found = cycles_of(&[
                ("lib.rs", "pub use a::A; mod b;"),
                ("a.rs", "use super::b::B;"),
                ("b.rs", back),
                ("c.rs", ""),
            ]);
            assert_eq!(found, [["a", "b"]], "{back}");
        }
    }
}

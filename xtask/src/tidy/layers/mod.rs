//! Checks that the modules in each folder below a `src` import each other in one direction only.
//!
//! The modules of a folder are its files and the folders in it, each with everything below. Their
//! imports must form no circle, so that a reader can start at the bottom. A folder and the modules
//! in it may import each other. Ignores tests.

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use self::imports::Module;
use super::{crate_of, read, rust_files};

/// The imports between the modules of a folder: each module, with the modules that it imports.
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
    let mut folders = BTreeMap::new();
    for (place, sources) in &crates {
        for (folder, imports) in by_folder(&imports::read(sources)?) {
            let folder = [&[format!("{place}/src")], folder.as_slice()].concat();
            folders.insert(folder.join("/"), imports);
        }
    }
    Ok(compare(&folders))
}

/// The imports that connect two modules of one folder, by folder.
fn by_folder(imports: &BTreeSet<(Module, Module)>) -> BTreeMap<Module, Imports> {
    let mut folders: BTreeMap<Module, Imports> = BTreeMap::new();
    for (from, to) in imports {
        let common = from.iter().zip(to).take_while(|(a, b)| a == b).count();
        if let (Some(a), Some(b)) = (from.get(common), to.get(common)) {
            let imports = folders.entry(from[..common].to_vec()).or_default();
            imports.entry(a.clone()).or_default().insert(b.clone());
        }
    }
    folders
}

fn compare(folders: &BTreeMap<String, Imports>) -> Vec<String> {
    let mut findings = Vec::new();
    for (folder, imports) in folders {
        for circle in circles(imports) {
            let arrows: Vec<String> = circle.iter().map(|m| arrows(imports, m, &circle)).collect();
            let arrows = arrows.join("; ");
            findings.push(format!(
                "{folder}: modules import each other: {arrows}; move the shared names down"
            ));
        }
    }
    findings
}

/// The imports of a module within its circle.
fn arrows(imports: &Imports, module: &str, circle: &[&str]) -> String {
    let imported = imports.get(module).into_iter().flatten();
    let imported: Vec<&str> = imported
        .map(String::as_str)
        .filter(|to| circle.contains(to))
        .collect();
    format!("{module} -> {}", imported.join(" "))
}

/// Groups of modules that import each other, directly or indirectly; each group is sorted.
fn circles(imports: &Imports) -> Vec<Vec<&str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> = imports
        .keys()
        .map(|module| (module.as_str(), reach(imports, module)))
        .collect();
    let mut circles: Vec<Vec<&str>> = Vec::new();
    for (module, reachable) in &reached {
        let is_known = circles.iter().any(|circle| circle.contains(module));
        if is_known || !reachable.contains(module) {
            continue;
        }
        let back = |other: &&&str| reached.get(**other).is_some_and(|r| r.contains(module));
        circles.push(reachable.iter().filter(back).copied().collect());
    }
    circles
}

fn reach<'a>(imports: &'a Imports, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&String> = imports.get(from).into_iter().flatten().collect();
    while let Some(module) = open.pop() {
        if found.insert(module.as_str()) {
            open.extend(imports.get(module).into_iter().flatten());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders_of(sources: &[(&str, &str)]) -> BTreeMap<String, Imports> {
        let sources: Vec<_> = sources.iter().map(|(p, t)| (*p, (*t).to_owned())).collect();
        let folders = by_folder(&imports::read(&sources).unwrap()).into_iter();
        folders.map(|(path, all)| (path.join("/"), all)).collect()
    }

    /// The circles in these sources, each with its folder.
    fn circles_of(sources: &[(&str, &str)]) -> Vec<String> {
        let mut all = Vec::new();
        for (folder, imports) in folders_of(sources) {
            let found = circles(&imports).into_iter();
            all.extend(found.map(|circle| format!("{folder}: {}", circle.join(" "))));
        }
        all
    }

    /// Goal: imports in one direction, of tests, in text and within a folder are no circle.
    #[test]
    fn one_direction_is_no_circle() {
        let found = circles_of(&[
            ("lib.rs", "pub mod a; pub mod b; #[cfg(test)] mod rig;"),
            ("a.rs", "use crate::b::B; use rig::a; use super::other::A;"),
            ("b/mod.rs", "// use crate::a::A;\nmod c; pub use c::C;"),
            ("b/c.rs", "use super::d; const A: &str = \"crate::a::A\";"),
            (
                "b/d.rs",
                "use super::B; pub(in crate::a) const A: char = '\"';",
            ),
            ("b/tests.rs", "use crate::a::A;"),
            (
                "b/e.rs",
                "#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}",
            ),
            ("b/f.rs", "#[cfg(test)] use crate::a::{A, C}; fn f() {}"),
            ("rig/mod.rs", "use crate::a::A;"),
        ]);
        assert!(found.is_empty(), "{found:?}");
    }

    /// Goal: every form of a path counts. Method: `a` imports `b`, and `b` imports `a` in one form.
    #[test]
    fn every_kind_of_import_counts() {
        for back in [
            "use crate::a::A;",
            "use super::a;",
            "use super::{a, d};",
            "use super::{d::{self, D}, a::{self, A as E}};",
            "use crate::{d, a::A};",
            "use {super::d, super::a::*};",
            "use self::super::a;",
            "fn f() { crate::a::g() }",
            "fn f() { for x in super::a::g() {} }",
            "fn f() { info!(\"{}\", super::a::g::<u8>()) }",
            "mod inline { use super::super::a::A; }",
            "mod inline { mod more {} } use super::a;",
            "use crate::A;",
            "use super::Other;",
            "use crate::c::A;",
            "use super::{c::deep::A};",
            "#[cfg(test)] mod tests { fn f() {} } use super::a;",
        ] {
            let found = circles_of(&[
                ("lib.rs", "pub use a::A; use a::A as Other; mod b; mod c;"),
                ("a.rs", "use super::b::B;"),
                ("b.rs", back),
                ("d.rs", ""),
                ("c/mod.rs", "mod deep; pub use deep::A;"),
                ("c/deep.rs", "pub use crate::A;"),
            ]);
            assert_eq!(found, [": a b"], "{back}");
        }
    }

    /// Goal: the modules of every folder are compared, each with everything below it.
    #[test]
    fn every_folder_counts() {
        let found = circles_of(&[
            ("main.rs", "mod x; mod y;"),
            ("x/mod.rs", "mod a; mod b;"),
            ("x/a/mod.rs", "mod low;"),
            ("x/a/low.rs", "use super::super::b::B; use crate::y::Y;"),
            ("x/b.rs", "use super::a::A;"),
            ("y.rs", "use crate::x::b;"),
        ]);
        assert_eq!(found, [": x y", "x: a b"]);
    }

    /// Goal: a circle is a finding that names each import in it, and not those that leave it.
    #[test]
    fn a_finding_names_the_imports() {
        let found = compare(&folders_of(&[
            ("x/a.rs", "use super::b;"),
            ("x/b.rs", "use super::{c, d};"),
            ("x/c.rs", "use super::a;"),
            ("x/d.rs", ""),
        ]));
        let expected = "x: modules import each other: a -> b; b -> c; c -> a; \
                        move the shared names down";
        assert_eq!(found, [expected]);
    }
}

//! Checks that dependencies between the top folders of the workspace go downwards only, and that
//! each crate is named after its folder. Test modules and folders of modules must have one style.
//!
//! [`LAYERS`] orders the top folders, each with all crates in it. `nvmf/wire` is a layer of its
//! own, because the NVMe driver in `bdev` uses it. `cluster/csi` is in the layer `engine`, of whose
//! management socket it is a client. Dev-dependencies do not count.
//!
//! CONTRIBUTING.md states the convention for test modules.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use regex::Regex;

use super::{read, rust_files};

/// The layers from the top down. A crate may depend on crates of its own layer and of lower ones.
const LAYERS: &[&str] = &[
    "xtask",
    "tests",
    "benches",
    "engine",
    "cluster",
    "transports",
    "nvmf",
    "bdev",
    "reactor",
    "hugepages",
    "nvmf/wire",
    "random",
    "units",
];

/// The declaration of a module, in a file of its own, that exists in tests only.
const TEST_MODULE: &str =
    r"#\[cfg\((?:test|any\(test[^\]]*)\)\]\n(?:#\[[^\n]*\n)*(?:pub(?:\([^)]*\))? )?mod (\w+);";

/// Names of the support code of tests in other projects. Here it is `rig`.
const SUPPORT: &[&str] = &[
    "common", "fixture", "fixtures", "harness", "helper", "helpers", "kit", "support", "testing",
    "util", "utils",
];

/// The part of a crate's manifest that the rules need.
#[derive(Debug, PartialEq, Eq)]
struct Manifest {
    name: String,
    /// Crates of this workspace, without those that only tests use.
    depends_on: Vec<String>,
}

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut crates = BTreeMap::new();
    for file in files {
        if let Some(folder) = file.strip_suffix("/Cargo.toml")
            && folder != "fuzz"
        {
            let manifest = Manifest::parse(&read(root, file)?);
            crates.insert(
                folder.to_owned(),
                manifest.with_context(|| format!("{file} has no name"))?,
            );
        }
    }
    let mut findings = compare(&crates);
    let mut in_sources = files.iter().filter(|file| is_below_target(file));
    findings.extend(in_sources.next().map(|file| {
        format!("{file}: a folder named target holds the output of builds; name it otherwise")
    }));
    findings.extend(style(files));
    let declaration = Regex::new(TEST_MODULE)?;
    for file in rust_files(files) {
        findings.extend(test_modules(file, &read(root, file)?, &declaration));
    }
    Ok(findings)
}

/// Findings about the names of source files.
fn style(files: &[String]) -> Vec<String> {
    let folders: BTreeSet<&str> = rust_files(files)
        .filter_map(|file| Some(file.rsplit_once('/')?.0))
        .collect();
    let mut findings = Vec::new();
    for file in rust_files(files) {
        let path = file.strip_suffix(".rs").unwrap_or(file);
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if folders.contains(path) {
            findings.push(format!(
                "{file}: a module with files below it is a folder: move it to {path}/mod.rs"
            ));
        }
        if let Some(subject) = name.strip_suffix("_tests") {
            findings.push(format!(
                "{file}: move it to {folder}/tests/{subject}.rs, or to tests.rs in the folder of \
                 its module"
            ));
        }
        let module = match name {
            "mod" => folder.rsplit_once('/').map_or(folder, |(_, name)| name),
            name => name,
        };
        if file.contains("/tests/") && SUPPORT.contains(&module) {
            findings.push(format!(
                "{file}: support code of tests is called rig: move it there"
            ));
        }
    }
    findings
}

/// Findings about modules that exist in tests only.
fn test_modules(file: &str, text: &str, declaration: &Regex) -> Vec<String> {
    let names = declaration
        .captures_iter(text)
        .map(|found| found[1].to_owned());
    names
        .filter(|name| !["tests", "testing"].contains(&name.as_str()))
        .map(|name| {
            format!(
                "{file}: the module {name} exists in tests only: move it into tests, or call it \
                 testing if other modules or crates use it"
            )
        })
        .collect()
}

/// True for a source below a folder with the name of Cargo's output.
fn is_below_target(file: &str) -> bool {
    file.contains("/src/") && file.contains("/target/")
}

fn compare(crates: &BTreeMap<String, Manifest>) -> Vec<String> {
    let folders: BTreeMap<&str, &str> = crates
        .iter()
        .map(|(folder, manifest)| (manifest.name.as_str(), folder.as_str()))
        .collect();
    let mut findings = Vec::new();
    for (folder, manifest) in crates {
        let expected = name_of(folder);
        if manifest.name != expected {
            let name = &manifest.name;
            findings.push(format!(
                "{folder}/Cargo.toml: the crate is called {name}: call it {expected}, after its folder"
            ));
        }
        let Some(here) = layer(folder) else {
            findings.push(format!(
                "{folder}: the folder has no layer: add it to LAYERS in xtask/src/tidy/folders.rs"
            ));
            continue;
        };
        for name in &manifest.depends_on {
            let Some(there) = folders.get(name.as_str()) else {
                continue;
            };
            if layer(there).is_some_and(|there| there < here) {
                findings.push(format!(
                    "{folder}/Cargo.toml: depends on {name} in {there}, which is above {folder}: \
                     move the shared code down"
                ));
            }
        }
    }
    findings
}

/// The position of a folder's layer in [`LAYERS`].
fn layer(folder: &str) -> Option<usize> {
    let name = match folder {
        "nvmf/wire" => folder,
        // A client of the management socket.
        "cluster/csi" => "engine",
        _ => folder.split('/').next()?,
    };
    LAYERS.iter().position(|layer| *layer == name)
}

/// The name of the crate in `folder`: `nacre-` and the path with dashes, where `transports` becomes
/// `transport`.
fn name_of(folder: &str) -> String {
    if folder == "xtask" {
        return folder.to_owned();
    }
    let path = match folder.strip_prefix("transports/") {
        Some(rest) => format!("transport-{rest}"),
        None => folder.to_owned(),
    };
    format!("nacre-{}", path.replace('/', "-"))
}

impl Manifest {
    fn parse(text: &str) -> Option<Self> {
        let mut section = "";
        let mut name = None;
        let mut depends_on = Vec::new();
        for line in text.lines().map(str::trim) {
            if line.starts_with('[') {
                section = line;
            } else if section == "[package]" && name.is_none() {
                let value = line.strip_prefix("name = \"");
                name = value.and_then(|rest| rest.strip_suffix('"'));
            } else if section == "[dependencies]" && line.starts_with("nacre-") {
                let end = line.find(['.', ' ', '=']).unwrap_or(line.len());
                depends_on.push(line[..end].to_owned());
            }
        }
        Some(Self {
            name: name?.to_owned(),
            depends_on,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(crates: &[(&str, &str, &[&str])]) -> Vec<String> {
        let crates = crates.iter().map(|(folder, name, depends_on)| {
            let manifest = Manifest {
                name: (*name).to_owned(),
                depends_on: depends_on.iter().map(|d| (*d).to_owned()).collect(),
            };
            ((*folder).to_owned(), manifest)
        });
        compare(&crates.collect())
    }

    #[test]
    fn manifests_are_read() {
        let text = "[package]\nname = \"nacre-bdev\"\n[dependencies]\nnacre-reactor.workspace = true\n\
            nacre-hugepages = { workspace = true }\nslab.workspace = true\n[dev-dependencies]\n\
            nacre-bdev-replica.workspace = true\n[[bench]]\nname = \"layer\"\n";
        let expected = Manifest {
            name: "nacre-bdev".into(),
            depends_on: vec!["nacre-reactor".into(), "nacre-hugepages".into()],
        };
        assert_eq!(Manifest::parse(text), Some(expected));
        assert_eq!(Manifest::parse("[workspace]\n"), None);
    }

    #[test]
    fn dependencies_down_and_sideways_are_accepted() {
        let found = compared(&[
            ("transports/tcp", "nacre-transport-tcp", &["nacre-nvmf"]),
            (
                "transports/rdma",
                "nacre-transport-rdma",
                &["nacre-transport-rdma-verbs"],
            ),
            ("transports/rdma/verbs", "nacre-transport-rdma-verbs", &[]),
            ("nvmf", "nacre-nvmf", &["nacre-nvmf-wire", "nacre-bdev"]),
            (
                "bdev/nvme",
                "nacre-bdev-nvme",
                &["nacre-bdev", "nacre-nvmf-wire"],
            ),
            ("bdev", "nacre-bdev", &[]),
            ("nvmf/wire", "nacre-nvmf-wire", &[]),
        ]);
        assert_eq!(found, [""; 0]);
    }

    #[test]
    fn a_dependency_upwards_is_found() {
        let found = compared(&[
            ("bdev/remote", "nacre-bdev-remote", &["nacre-transport-tcp"]),
            ("transports/tcp", "nacre-transport-tcp", &[]),
        ]);
        assert!(
            found.len() == 1 && found[0].contains("above bdev/remote"),
            "{found:?}"
        );
    }

    #[test]
    fn no_source_is_below_a_folder_named_target() {
        assert!(is_below_target("nvmf/src/target/hosts.rs"));
        assert!(!is_below_target("nvmf/src/target.rs"));
        assert!(!is_below_target("target/src/hosts.rs"));
    }

    #[test]
    fn names_and_folders_are_checked() {
        let found = compared(&[("transports/rdma", "nacre-rdma", &[])]);
        assert!(
            found.len() == 1 && found[0].contains("call it nacre-transport-rdma"),
            "{found:?}"
        );
        let found = compared(&[("cellar", "nacre-cellar", &[])]);
        assert!(found.len() == 1 && found[0].contains("LAYERS"), "{found:?}");
    }

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Goal: each deviation from the convention for folders and test modules is reported with the
    /// new name, and the convention itself is accepted.
    #[test]
    fn one_style_of_folders_and_test_modules() {
        let good = files(&[
            "bdev/src/lib.rs",
            "bdev/src/layer/mod.rs",
            "bdev/src/layer/tests/mod.rs",
            "bdev/src/layer/tests/rig.rs",
            "bdev/src/testing.rs",
            "reactor/tests/rig/mod.rs",
        ]);
        assert_eq!(style(&good), [""; 0]);
        for (bad, part) in [
            (["a/src/b.rs", "a/src/b/c.rs"], "move it to a/src/b/mod.rs"),
            (["a/src/b_tests.rs", "a/src/b.rs"], "a/src/tests/b.rs"),
            (
                ["a/src/tests/mod.rs", "a/src/tests/helpers.rs"],
                "called rig",
            ),
            (["a/tests/c.rs", "a/tests/support/mod.rs"], "called rig"),
        ] {
            let found = style(&files(&bad));
            assert!(found.len() == 1 && found[0].contains(part), "{found:?}");
        }
    }

    #[test]
    fn modules_of_tests_are_called_tests_or_testing() {
        let declaration = Regex::new(TEST_MODULE).unwrap();
        let of = |text: &str| test_modules("a/src/lib.rs", text, &declaration);
        let good = "mod a;\n#[cfg(test)]\nmod tests;\n#[cfg(any(test, feature = \"testing\"))]\n\
                    pub mod testing;\n#[cfg(test)]\nmod switch {\n}\n#[cfg(not(test))]\nmod b;\n";
        assert_eq!(of(good), [""; 0]);
        let bad = "#[cfg(test)]\n#[allow(dead_code)]\npub(crate) mod strict;\n";
        let found = of(bad);
        assert!(found.len() == 1 && found[0].contains("strict"), "{found:?}");
    }
}

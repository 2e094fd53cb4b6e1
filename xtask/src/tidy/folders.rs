//! Checks that dependencies between the top folders of the workspace go downwards only, and that
//! each crate is named after its folder.
//!
//! [`LAYERS`] orders the top folders, each with all crates in it. `nvmf/wire` is a layer of its
//! own, because the NVMe driver in `bdev` uses it. Dev-dependencies do not count.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};

use super::read;

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
    let mut findings = judge(&crates);
    let mut in_sources = files.iter().filter(|file| is_below_target(file));
    findings.extend(in_sources.next().map(|file| {
        format!("{file}: a folder named target holds the output of builds; name it otherwise")
    }));
    Ok(findings)
}

/// True for a source below a folder with the name of Cargo's output.
fn is_below_target(file: &str) -> bool {
    file.contains("/src/") && file.contains("/target/")
}

fn judge(crates: &BTreeMap<String, Manifest>) -> Vec<String> {
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

    fn judged(crates: &[(&str, &str, &[&str])]) -> Vec<String> {
        let crates = crates.iter().map(|(folder, name, depends_on)| {
            let manifest = Manifest {
                name: (*name).to_owned(),
                depends_on: depends_on.iter().map(|d| (*d).to_owned()).collect(),
            };
            ((*folder).to_owned(), manifest)
        });
        judge(&crates.collect())
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
        let found = judged(&[
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
        let found = judged(&[
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
        let found = judged(&[("transports/rdma", "nacre-rdma", &[])]);
        assert!(
            found.len() == 1 && found[0].contains("call it nacre-transport-rdma"),
            "{found:?}"
        );
        let found = judged(&[("cellar", "nacre-cellar", &[])]);
        assert!(found.len() == 1 && found[0].contains("LAYERS"), "{found:?}");
    }
}

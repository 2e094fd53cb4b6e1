//! Checks that every package has the lints of the workspace. `fuzz` is a workspace of its own and
//! cannot inherit them, so its table must have the same lines.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;

use super::read;

/// A line that only the workspace has: its value names a configuration of the loom models.
const ONLY_HERE: &str = "unexpected_cfgs";

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let workspace = read(root, "Cargo.toml")?;
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| file.ends_with("/Cargo.toml")) {
        let text = read(root, file)?;
        if file == "fuzz/Cargo.toml" {
            findings.extend(missing(&workspace, &text).map(|line| {
                format!("{file}: lacks a lint of the workspace: add {line} to its table")
            }));
        } else if !text.contains("[lints]\nworkspace = true\n") {
            findings.push(format!(
                "{file}: lacks the lints: add [lints] with workspace = true"
            ));
        }
    }
    Ok(findings)
}

/// Lints of the workspace that `copy` lacks.
fn missing<'a>(workspace: &'a str, copy: &str) -> impl Iterator<Item = &'a str> {
    let has: BTreeSet<&str> = lints(copy, "[lints.").into_iter().collect();
    let all = lints(workspace, "[workspace.lints.");
    all.into_iter()
        .filter(move |line| !has.contains(line) && !line.starts_with(ONLY_HERE))
}

/// The lines of the tables whose header begins with `header`.
fn lints<'a>(text: &'a str, header: &str) -> Vec<&'a str> {
    let mut is_inside = false;
    let mut lines = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            is_inside = line.starts_with(header);
        } else if is_inside && !line.is_empty() && !line.starts_with('#') {
            lines.push(line);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lint_that_the_copy_lacks_is_found() {
        let workspace = "[workspace.lints.rust]\na = \"deny\"\nunexpected_cfgs = 1\n\n\
                         [workspace.lints.clippy]\n# Why.\nb = \"warn\"\n[profile.dev]\nc = 1\n";
        let copy = |lints: &str| format!("[lints.rust]\na = \"deny\"\n[lints.clippy]\n{lints}");
        let of = |lints| missing(workspace, &copy(lints)).collect::<Vec<_>>();
        assert_eq!(of("b = \"warn\"\n"), [""; 0]);
        assert_eq!(of("b = \"deny\"\n"), ["b = \"warn\""]);
    }
}

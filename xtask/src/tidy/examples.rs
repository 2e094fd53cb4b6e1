//! Crates without an example in their documentation switch documentation tests off: rustdoc would
//! read the whole crate to find none, which takes longer than most test suites.

use std::path::Path;

use anyhow::Result;

use super::{crate_of, read, rust_files};

const OFF: &str = "doctest = false";
/// Words after the fence of a block that is not compiled.
const OTHER: &[&str] = &["text", "console", "toml", "json", "sh", "ignore"];

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for library in files.iter().filter(|name| name.ends_with("src/lib.rs")) {
        let Some((folder, _)) = crate_of(library) else {
            continue;
        };
        let manifest = format!("{folder}/Cargo.toml");
        let is_off = read(root, &manifest)?.lines().any(|line| line == OFF);
        let mut example = None;
        for file in rust_files(files).filter(|file| is_of(file, folder)) {
            if has_example(&read(root, file)?) {
                example = Some(file);
                break;
            }
        }
        match (example, is_off) {
            (None, false) => findings.push(format!(
                "{manifest}: no documentation has an example: add `{OFF}` under [lib]"
            )),
            (Some(file), true) => findings.push(format!(
                "{manifest}: {file} has an example, which is not tested: remove `{OFF}`"
            )),
            _ => {}
        }
    }
    Ok(findings)
}

/// True for a source file of the crate in `folder`, not of a crate below it.
fn is_of(file: &str, folder: &str) -> bool {
    crate_of(file).is_some_and(|(of, _)| of == folder)
}

/// True if a documentation comment has a block that rustdoc compiles.
fn has_example(source: &str) -> bool {
    let mut is_inside = false;
    for line in source.lines().map(str::trim_start) {
        let comment = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"));
        let Some(fence) = comment.and_then(|text| text.trim_start().strip_prefix("```")) else {
            continue;
        };
        if !is_inside && !OTHER.contains(&fence.trim()) {
            return true;
        }
        is_inside = !is_inside;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_and_drawings_are_distinguished() {
        assert!(!has_example(
            "//! ```text\n//!  a -> b\n//! ```\nfn f() {}\n"
        ));
        assert!(!has_example("// ```\n// no documentation\n// ```\n"));
        for example in ["", "rust", "no_run", "compile_fail,E0382", "should_panic"] {
            let text = format!("/// ```text\n/// ```\n    /// ```{example}\n    /// f();\n");
            assert!(has_example(&text), "{example}");
        }
    }
}

//! The folders of the kernel's file systems ([`Roots`]), and reading single values from sysfs.

use std::fs;
use std::path::{Path, PathBuf};

/// The folders of the kernel's file systems. In a test, all are below one folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    pub sys: PathBuf,
    pub dev: PathBuf,
    pub proc: PathBuf,
    /// The folder that has a folder of modules per kernel release, `/lib/modules`.
    pub modules: PathBuf,
}

impl Roots {
    pub fn real() -> Self {
        Self::below("/")
    }

    /// `<root>/sys`, `<root>/dev`, `<root>/proc` and `<root>/lib/modules`.
    pub fn below(root: impl AsRef<Path>) -> Self {
        let root = root.as_ref();
        Self {
            sys: root.join("sys"),
            dev: root.join("dev"),
            proc: root.join("proc"),
            modules: root.join("lib/modules"),
        }
    }
}

impl Default for Roots {
    fn default() -> Self {
        Self::real()
    }
}

/// The file's text without the white space around it. `None` if it cannot be read: the device does
/// not have this attribute, or is being removed.
pub(crate) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

/// Like [`text`]; `None` also for an empty file.
pub(crate) fn filled(path: &Path) -> Option<String> {
    text(path).filter(|text| !text.is_empty())
}

/// A number, decimal or with 0x before it.
pub(crate) fn number(path: &Path) -> Option<u64> {
    let text = text(path)?;
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The names in a folder, sorted, numbers by value; empty if there is no such folder.
pub(crate) fn names(path: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_by(|a, b| match (a.parse::<u64>(), b.parse::<u64>()) {
        (Ok(a), Ok(b)) => a.cmp(&b),
        _ => a.cmp(b),
    });
    names
}

/// The last part of a link's target: a driver's name from `device/driver`.
pub(crate) fn link_name(path: &Path) -> Option<String> {
    let target = fs::read_link(path).ok()?;
    target.file_name()?.to_str().map(str::to_owned)
}

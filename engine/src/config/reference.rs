//! The reference of all configuration keys, docs/reference/configuration.md. Generated from the
//! sample configuration, which a test compares with the settings' types and defaults.

use std::fmt::Write;

use super::source::{has_any_key, variable};

pub const SAMPLE: &str = include_str!("../../../nacre.sample.toml");

/// Markdown of every section and key of the sample.
pub fn markdown() -> String {
    let mut out = String::from(
        "# Configuration\n\n\
         Written by `nacre config --reference` from [nacre.sample.toml](../../nacre.sample.toml); do not edit.\n\n\
         `nacre config sample` prints the sample file. `nacre config check FILE` checks a file, and\n\
         `nacre config show` prints each setting in effect with its origin. A flag wins over a variable,\n\
         a variable over the file. The column \"default\" shows an example in parentheses where a key has no default.\n",
    );
    // The first comment describes the file.
    let text = SAMPLE.split_once("\n\n").map_or(SAMPLE, |(_, rest)| rest);
    let (mut section, mut comment, mut in_table) = (String::new(), String::new(), false);
    for line in text.lines() {
        let (line, is_example) = match line.strip_prefix("#: ") {
            Some(rest) => (rest, true),
            None => (line, false),
        };
        if line.is_empty() {
            comment.clear();
        } else if let Some(words) = line.strip_prefix("# ") {
            if !comment.is_empty() {
                comment.push(' ');
            }
            comment.push_str(words);
        } else if line.starts_with('[') {
            section = line.trim_matches(['[', ']']).to_owned();
            let about = std::mem::take(&mut comment);
            writeln!(out, "\n## {line}").expect("writing to a string");
            if !about.is_empty() {
                writeln!(out, "\n{about}").expect("writing to a string");
            }
            in_table = false;
        } else if let Some((key, value)) = line.split_once(" = ") {
            if !in_table {
                out.push_str("\n| key | default | variable | meaning |\n|---|---|---|---|\n");
                in_table = true;
            }
            row(&mut out, &section, key, value, is_example, &comment);
            comment.clear();
        }
    }
    out
}

fn row(out: &mut String, section: &str, key: &str, value: &str, is_example: bool, about: &str) {
    let is_list_item = [
        "alert.webhook",
        "alert.mail",
        "key",
        "remote",
        "bdev",
        "nvmf.listener",
        "nvmf.subsystem",
        "nvmf.subsystem.host",
        "nvmf.subsystem.namespace",
    ]
    .contains(&section);
    let path = format!("{section}.{key}");
    let variable = if is_list_item || has_any_key(&path) {
        String::new()
    } else {
        format!("`{}`", variable(&path))
    };
    let value = if is_example {
        format!("(`{value}`)")
    } else {
        format!("`{value}`")
    };
    let about = about.replace('|', "\\|");
    writeln!(out, "| `{key}` | {value} | {variable} | {about} |").expect("writing to a string");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_reference_is_current() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../docs/reference/configuration.md"
        );
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/reference/configuration.md is out of date: run `nacre config --reference > docs/reference/configuration.md`"
        );
    }

    /// Goal: every key of the sample has a row, including the ones after `#: `.
    #[test]
    fn every_key_of_the_sample_has_a_row() {
        let keys = SAMPLE
            .lines()
            .filter(|l| !l.starts_with("# ") && l.contains(" = "));
        let rows = markdown().lines().filter(|l| l.starts_with("| `")).count();
        assert_eq!(rows, keys.count());
    }
}

//! Manual pages of the package: `nacre(1)`, one page for each command with its subcommands, and
//! `nacre.toml(5)`. The text is what `nacre COMMAND --help` prints.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::{LIMIT, Tree, read};
use crate::process::capture;

/// The width of a terminal of 80 columns less the indentation of `man`.
const WIDTH: &str = "72";

pub(super) fn write(tree: &Tree, root: &Path, nacre: &Path, version: &str) -> Result<()> {
    let help = help_of(nacre, &[])?;
    let all = subcommands(&help);
    let names: Vec<String> = all.iter().map(|name| format!("nacre-{name}(1)")).collect();
    let mut page = Page::new("nacre", 1, version, &help);
    page.section("DESCRIPTION", &help);
    page.section("SEE ALSO", &format!("{}, nacre.toml(5)", names.join(", ")));
    page.write(tree)?;
    for name in &all {
        let help = help_of(nacre, &[name])?;
        let mut page = Page::new(&format!("nacre-{name}"), 1, version, &help);
        page.section("DESCRIPTION", &help);
        for sub in subcommands(&help) {
            let title = format!("NACRE {name} {sub}").to_uppercase();
            page.section(&title, &help_of(nacre, &[name, &sub])?);
        }
        page.section("SEE ALSO", "nacre(1), nacre.toml(5)");
        page.write(tree)?;
    }
    let sample = read(root, "nacre.sample.toml")?;
    let mut page = Page::new("nacre.toml", 5, version, "The configuration of nacre serve");
    page.section("DESCRIPTION", &sample);
    page.section("SEE ALSO", "nacre-serve(1), nacre-config(1)");
    page.write(tree)
}

fn help_of(nacre: &Path, command: &[&str]) -> Result<String> {
    let mut ask = Command::new(nacre);
    // Defaults that come from the environment would appear in the text.
    ask.env_clear().env("COLUMNS", WIDTH);
    capture(ask.args(command).arg("--help"), LIMIT)
        .with_context(|| format!("asking for the help of {}", command.join(" ")))
}

/// The names in the section "Commands" of a help text.
fn subcommands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    lines
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  "))
        // A deeper indentation continues the line before.
        .filter(|line| !line.starts_with(' '))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

struct Page {
    name: String,
    chapter: u8,
    text: String,
}

impl Page {
    /// `help`: its first line says what the page is about.
    fn new(name: &str, chapter: u8, version: &str, help: &str) -> Self {
        let about = help.lines().next().unwrap_or_default();
        let text = format!(
            ".TH {} {chapter} \"\" \"Nacre {version}\" \"Nacre\"\n.SH NAME\n{} \\- {}\n",
            escaped(name).to_uppercase(),
            escaped(name),
            escaped(about)
        );
        Self {
            name: name.to_owned(),
            chapter,
            text,
        }
    }

    fn section(&mut self, title: &str, body: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, ".SH \"{}\"\n.nf", escaped(title));
        for line in body.trim_end().lines() {
            let _ = writeln!(self.text, "{}", escaped(line));
        }
        self.text.push_str(".fi\n");
    }

    fn write(&self, tree: &Tree) -> Result<()> {
        let Self { name, chapter, .. } = self;
        let path = format!("usr/share/man/man{chapter}/{name}.{chapter}");
        tree.write_compressed(&path, &self.text)
    }
}

/// A line of text for troff: no requests, no escapes, hyphens that can be copied.
fn escaped(line: &str) -> String {
    let text = line.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) {
        format!("\\&{text}")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_from_the_help() {
        let help = "Volumes\n\nUsage: nacre volume <COMMAND>\n\nCommands:\n  list    List them\n  \
            bench   Compare TCP,\n          RDMA and devices\n  help    Print this\n\nOptions:\n  -h  Help\n";
        assert_eq!(subcommands(help), ["list", "bench"]);
        assert_eq!(subcommands("Usage: nacre perf\n"), Vec::<String>::new());
    }

    #[test]
    fn text_is_no_request_of_troff() {
        assert_eq!(escaped(".TH \\n --all"), "\\&.TH \\en \\-\\-all");
        let mut page = Page::new("nacre", 1, "0.1.0", "The engine\nmore\n");
        page.section("DESCRIPTION", "one\n.two\n");
        assert_eq!(
            page.text,
            ".TH NACRE 1 \"\" \"Nacre 0.1.0\" \"Nacre\"\n.SH NAME\nnacre \\- The engine\n\
            .SH \"DESCRIPTION\"\n.nf\none\n\\&.two\n.fi\n"
        );
    }
}

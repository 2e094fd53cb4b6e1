//! Goal: every `nacre` command in a document exists, with its flags; so does every RPC method.
//! Method: commands in code blocks and backticks are looked up in clap's definition of the
//! commands.

use std::path::{Path, PathBuf};

use clap::Command;

/// The commands of a text: of its code blocks, and of its text between backticks.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut is_fenced, mut prose) = (false, String::new());
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        } else if is_fenced || line.starts_with("    ") {
            let line = line.trim_start().trim_start_matches("$ ");
            if line.starts_with("nacre ") {
                found.push(line.to_owned());
            }
        } else {
            prose.push_str(line.trim_start_matches(['#', '/', '!', ' ']));
            prose.push(' ');
        }
    }
    let spans = prose.split('`').skip(1).step_by(2);
    found.extend(spans.filter(|s| s.starts_with("nacre ")).map(str::to_owned));
    found
}

/// The words of a command up to a comment, a pipe or an omission; a quoted text is one word.
fn words(line: &str) -> Vec<String> {
    let (mut out, mut word, mut quote) = (Vec::new(), String::new(), None);
    for c in line.chars().chain([' ']) {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => quote = Some(c),
            (None, ' ') => {
                if ["|", ">", "&&", "\\", "…", "&", "||"].contains(&word.as_str())
                    || word.starts_with('#')
                {
                    return out;
                }
                let ends = word.ends_with(';');
                if !word.is_empty() {
                    out.push(word.trim_end_matches(';').to_owned());
                }
                if ends {
                    return out;
                }
                word.clear();
            }
            (_, c) => word.push(c),
        }
    }
    out
}

/// The error in a command, if it has one.
fn fault(root: &Command, line: &str) -> Option<String> {
    let methods = nacre_engine::methods::all();
    let mut command = root;
    let mut is_value = false;
    for word in words(line).iter().skip(1) {
        if std::mem::take(&mut is_value) {
            continue;
        }
        // `[--json]` and `--a|--b` are notation.
        let word = word.trim_matches(['[', ']']);
        let flag = word.split('=').next().unwrap_or(word);
        if flag.starts_with('-') && flag.len() > 1 && !flag.starts_with("-1") {
            let arg = command
                .get_arguments()
                .find(|arg| match flag.strip_prefix("--") {
                    Some(long) => {
                        arg.get_long() == Some(long)
                            || arg.get_all_aliases().is_some_and(|all| all.contains(&long))
                    }
                    None => arg.get_short() == flag.chars().nth(1),
                });
            let Some(arg) = arg else {
                return Some(format!("`{}` has no {flag}", command.get_name()));
            };
            let takes = arg.get_action().takes_values();
            is_value = takes && !word.contains('=') && (flag.starts_with("--") || flag.len() == 2);
            continue;
        }
        if let Some(sub) = command.find_subcommand(word) {
            command = sub;
        } else if command.get_name() == "rpc" && word.contains('_') && !word.contains(['=', '{']) {
            if methods.find(word).is_none() {
                return Some(format!("no RPC method {word}"));
            }
        } else if command.has_subcommands()
            && !word.chars().any(|c| c.is_uppercase())
            && command.get_positionals().next().is_none()
        {
            return Some(format!("`{}` has no command {word}", command.get_name()));
        }
    }
    None
}

fn documents(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            documents(&path, found);
        } else if name.ends_with(".md") || ["nacre.sample.toml", "alerts.yml"].contains(&&*name) {
            found.push(path);
        }
    }
}

#[test]
fn every_command_in_a_document_exists() {
    let mut root = super::super::command();
    root.build();
    let top = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut paths = Vec::new();
    documents(top, &mut paths);
    let (mut faults, mut count) = (Vec::new(), 0);
    for path in &paths {
        for line in commands(&std::fs::read_to_string(path).unwrap()) {
            count += 1;
            if let Some(fault) = fault(&root, &line) {
                faults.push(format!("{}: {line}: {fault}", path.display()));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 200, "only {count} commands found");
}

#[test]
fn wrong_commands_are_found() {
    let mut root = super::super::command();
    root.build();
    let text = "Run `nacre bdev list --json`.\n\n    nacre volume create v a b   # two\n    nacre bdev lost\n\n```\n$ nacre serve --not-a-flag\n```\n`nacre config chekc` `nacre rpc bdev_gone name=a` and `nacre rpc bdev_get_bdevs | head`";
    let faults: Vec<bool> = commands(text)
        .iter()
        .map(|c| fault(&root, c).is_some())
        .collect();
    assert_eq!(faults, [false, true, true, false, true, true, false]);
}

//! Reads the imports of a crate: each path in its sources, resolved to the module with the name.
//!
//! Skips items under `#[cfg(test)]`. Macros count like other code. A name that a module takes over
//! with `*` counts as a name of that module.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use regex::Regex;

use crate::tidy::is_test;

/// The path of a module below the root of its crate. The root is empty.
pub(super) type Module = Vec<String>;

/// The most re-exports of one name that a path passes.
const MOST_ALIASES: usize = 8;

/// The imports between the files of a crate: from, to. The sources are paths below `src`, each with
/// the file's text.
pub(super) fn read(sources: &[(&str, String)]) -> Result<BTreeSet<(Module, Module)>> {
    let lexer = lexer()?;
    let is_source = |file: &str| !is_test(file) && !file.starts_with("bin/");
    let mut scans: Vec<Scan> = sources
        .iter()
        .filter(|(file, _)| is_source(file))
        .map(|(file, text)| Scan::new(module(file), &tokens(&lexer, text)))
        .collect();
    let tests: BTreeSet<Module> = scans.iter_mut().flat_map(|s| s.tests.drain(..)).collect();
    scans.retain(|scan| !(1..=scan.file.len()).any(|n| tests.contains(&scan.file[..n])));

    let mut names = Names::default();
    for scan in &scans {
        names.files.insert(scan.file.clone());
        for path in &scan.paths {
            if let Some(alias) = &path.alias {
                let key = (path.module.clone(), alias.clone());
                names.aliases.insert(key, path.segments.clone());
            }
        }
    }
    let mut imports = BTreeSet::new();
    for scan in &scans {
        for path in &scan.paths {
            if let Some(to) = names.owner(&path.module, &path.segments, MOST_ALIASES) {
                imports.insert((scan.file.clone(), to));
            }
        }
    }
    Ok(imports)
}

/// The module of a file, from the file's path below `src`.
fn module(file: &str) -> Module {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let mut module: Module = path.split('/').map(str::to_owned).collect();
    module.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
    module
}

/// The files of a crate, and the names that `use` declares in its modules.
#[derive(Default)]
struct Names {
    files: BTreeSet<Module>,
    /// The paths that names stand for.
    aliases: BTreeMap<(Module, String), Vec<String>>,
}

impl Names {
    /// The file with the name at the end of `path`, a path in `module`. None for a name of another
    /// crate.
    fn owner(&self, module: &Module, path: &[String], aliases: usize) -> Option<Module> {
        let mut at = module.clone();
        for (index, segment) in path.iter().enumerate() {
            match segment.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => drop(at.pop()),
                _ => {
                    at.push(segment.clone());
                    if self.files.contains(&at) {
                        continue;
                    }
                    at.pop();
                    let is_local = index > 0;
                    let here = is_local.then(|| self.file(at.clone()));
                    let alias = self.aliases.get(&(at.clone(), segment.clone()));
                    let (Some(alias), Some(aliases)) = (alias, aliases.checked_sub(1)) else {
                        return here;
                    };
                    let path = [alias, &path[index + 1..]].concat();
                    return self.owner(&at, &path, aliases).or(here);
                }
            }
        }
        Some(self.file(at))
    }

    /// The file with this module, which may be an inline one.
    fn file(&self, mut module: Module) -> Module {
        while !module.is_empty() && !self.files.contains(&module) {
            module.pop();
        }
        module
    }
}

/// The imports in a file.
struct Scan {
    file: Module,
    paths: Vec<Path>,
    /// Modules of test code that have files of their own.
    tests: Vec<Module>,
}

struct Path {
    /// The module around the path: the file, or an inline module.
    module: Module,
    segments: Vec<String>,
    /// The name that a `use` declares for the path.
    alias: Option<String>,
}

impl Scan {
    fn new(file: Module, tokens: &[&str]) -> Self {
        let mut module = file.clone();
        let mut scan = Self {
            file,
            paths: Vec::new(),
            tests: Vec::new(),
        };
        // The depth in braces, and the depths at which inline modules begin.
        let mut depth = 0_usize;
        let mut inline = Vec::new();
        let mut at = 0;
        while at < tokens.len() {
            let (past, rest) = tokens.split_at(at);
            at += 1;
            match rest {
                ["#", "[", "cfg", "(", "test", ..]
                | ["#", "[", "cfg", "(", "all", "(", "test", ..] => {
                    let item = &rest[..length_of_item(rest)];
                    if let [.., "mod", name, ";"] = item {
                        scan.tests
                            .push([&module[..], &[(*name).to_owned()]].concat());
                    }
                    at += item.len() - 1;
                }
                ["mod", name, "{", ..] => {
                    module.push((*name).to_owned());
                    inline.push(depth);
                }
                ["{", ..] => depth += 1,
                ["}", ..] => {
                    depth = depth.saturating_sub(1);
                    if inline.pop_if(|begin| *begin == depth).is_some() {
                        module.pop();
                    }
                }
                ["use", ..] => at = scan.tree(&module, tokens, at, &[], true),
                // The path of `pub(in crate::x)` is no import.
                ["crate" | "super" | "self", "::", ..]
                    if !matches!(past, [.., "::"] | [.., "(", "in"]) =>
                {
                    at = scan.tree(&module, tokens, at - 1, &[], false);
                }
                _ => {}
            }
        }
        scan
    }

    /// Reads the paths that begin with the segments in `start` and continue at `at`. Returns the
    /// position behind them.
    fn tree(
        &mut self,
        module: &Module,
        tokens: &[&str],
        mut at: usize,
        start: &[String],
        is_use: bool,
    ) -> usize {
        let mut segments = start.to_vec();
        loop {
            match &tokens[at.min(tokens.len())..] {
                ["{", ..] => {
                    while matches!(tokens.get(at), Some(&("{" | ","))) {
                        at = self.tree(module, tokens, at + 1, &segments, is_use);
                    }
                    return at + 1;
                }
                ["self", ..] if !segments.is_empty() => at += 1,
                [word, ..] if is_word(word) => {
                    segments.push((*word).to_owned());
                    at += 1;
                }
                _ => break,
            }
            if tokens.get(at) != Some(&"::") {
                break;
            }
            at += 1;
        }
        let mut alias = segments.last().cloned();
        match &tokens[at.min(tokens.len())..] {
            ["as", name, ..] if is_use => {
                alias = Some((*name).to_owned());
                at += 2;
            }
            ["*", ..] if is_use => {
                alias = None;
                at += 1;
            }
            _ => {}
        }
        if !segments.is_empty() {
            self.paths.push(Path {
                module: module.clone(),
                segments,
                alias: alias.filter(|_| is_use),
            });
        }
        at
    }
}

/// The number of tokens of the item at the start of `tokens`, with its attributes.
fn length_of_item(tokens: &[&str]) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate() {
        match *token {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => {
                if depth == 0 {
                    return index;
                }
                depth -= 1;
                if depth == 0 && *token == "}" {
                    return index + 1;
                }
            }
            ";" | "," if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Matches a comment, a literal, or a token. Tokens are the first group.
fn lexer() -> Result<Regex> {
    let comment = r"//[^\n]*|/\*.*?\*/";
    let text = r##"b?r#".*?"#|b?r"[^"]*"|"(?:\\.|[^"\\])*"|'(?:\\[^']+|[^'\\])'"##;
    let token = r"(\w+|::|\S)";
    Ok(Regex::new(&format!("(?s){comment}|{text}|{token}"))?)
}

fn tokens<'a>(lexer: &Regex, text: &'a str) -> Vec<&'a str> {
    let found = lexer.captures_iter(text);
    found.filter_map(|c| c.get(1).map(|m| m.as_str())).collect()
}

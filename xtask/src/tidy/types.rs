//! Limits the size of types: the lines of all `impl` blocks of a type in its crate, and the fields
//! of a struct. A limit on the length of files alone would allow one type spread over many files.
//! Comments do not count: a limit that they reach would be paid with documents.
//!
//! Ignores test modules. The sources are formatted by rustfmt, so a block ends at the first closing
//! brace with the indentation of its first line.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use regex::Regex;

use super::literal::Literal;
use super::{crate_of, is_test, read, rust_files};

const MOST_LINES: usize = 1_000;
const MOST_FIELDS: usize = 24;

/// Types above a limit: crate, type, and its own limits of lines and fields. These limits may only
/// be lowered. Remove an entry when its type meets both general limits. The structs of `rdma/verbs`
/// mirror the C library, and the parameters of `engine` those of SPDK's calls, which are flat.
const ALLOWED: &[(&str, &str, usize, usize)] = &[
    ("engine", "AttachParams", 282, 33),
    ("transports/rdma/verbs", "DeviceAttributes", 0, 25),
    ("transports/rdma/verbs", "ibv_device_attr", 0, 40),
    ("transports/rdma/verbs", "ibv_qp_attr", 0, 26),
];

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Size {
    lines: usize,
    fields: usize,
}

impl Size {
    fn fits(self, limit: Self) -> bool {
        self.lines <= limit.lines && self.fields <= limit.fields
    }
}

const LIMIT: Size = Size {
    lines: MOST_LINES,
    fields: MOST_FIELDS,
};

pub(super) fn findings(root: &Path, files: &[String]) -> Result<Vec<String>> {
    let mut crates: BTreeMap<&str, Vec<(&str, String)>> = BTreeMap::new();
    for file in rust_files(files) {
        if let Some((place, inside)) = crate_of(file)
            && !is_test(file)
        {
            let sources = crates.entry(place).or_default();
            sources.push((inside, read(root, file)?));
        }
    }
    let mut findings = Vec::new();
    let mut unused: Vec<(&str, &str)> = ALLOWED.iter().map(|entry| (entry.0, entry.1)).collect();
    for (place, sources) in &crates {
        for ((file, name), size) in sizes(sources)? {
            let mut limit = LIMIT;
            let is_it = |entry: &&(&str, &str, usize, usize)| entry.0 == *place && entry.1 == name;
            if let Some((_, _, lines, fields)) = ALLOWED.iter().find(is_it) {
                limit = Size {
                    lines: MOST_LINES.max(*lines),
                    fields: MOST_FIELDS.max(*fields),
                };
            }
            if !size.fits(LIMIT) {
                unused.retain(|entry| *entry != (*place, name.as_str()));
            }
            if !size.fits(limit) {
                findings.push(format!(
                    "{place}/src/{file}: {name} has {} lines in its impl blocks and {} fields, at \
                     most {} and {}: give a part of it an owner with its own few fields",
                    size.lines, size.fields, limit.lines, limit.fields
                ));
            }
        }
    }
    findings.extend(unused.iter().map(|(place, name)| {
        format!("{place}: {name} meets the limits: remove it from xtask/src/tidy/types.rs")
    }));
    Ok(findings)
}

/// A file below `src`, and a type that it defines.
type Type = (String, String);

/// The types of a crate. `sources`: paths below `src`, and the text.
fn sizes(sources: &[(&str, String)]) -> Result<BTreeMap<Type, Size>> {
    let blocks = Blocks::new()?;
    let mut sizes = BTreeMap::new();
    let mut impls = Vec::new();
    for (file, text) in sources {
        for block in blocks.of(text) {
            match block {
                Block::Definition { name, fields } => {
                    let size = Size { lines: 0, fields };
                    sizes.insert(((*file).to_owned(), name), size);
                }
                Block::Impl { name, lines } => impls.push((*file, name, lines)),
            }
        }
    }
    for (file, name, lines) in impls {
        let named = sizes.keys().filter(|(_, known)| *known == name);
        // If several modules have a type of this name, the block belongs to the nearest one.
        let nearest = named.max_by_key(|(of, _)| shared(of, file)).cloned();
        // Ignore blocks for types of other crates.
        if let Some(size) = nearest.and_then(|of| sizes.get_mut(&of)) {
            size.lines += lines;
        }
    }
    Ok(sizes)
}

/// The length of the common prefix of two paths; greatest for equal paths.
fn shared(one: &str, other: &str) -> usize {
    let parts = one.split('/').zip(other.split('/'));
    parts.take_while(|(a, b)| a == b).count()
}

enum Block {
    Definition { name: String, fields: usize },
    Impl { name: String, lines: usize },
}

struct Blocks {
    definition: Regex,
    field: Regex,
    test: Regex,
}

impl Blocks {
    fn new() -> Result<Self> {
        let visible = r"(?:pub(?:\([^)]*\))? )?";
        Ok(Self {
            definition: Regex::new(&format!(r"^{visible}(?:struct|enum|union) (\w+)"))?,
            field: Regex::new(&format!(r"^{visible}(?:r#)?\w+: "))?,
            test: Regex::new(r"^#\[cfg\((?:all\()?test\b")?,
        })
    }

    fn of(&self, text: &str) -> Vec<Block> {
        let mut found = Vec::new();
        let mut literal = Literal::default();
        let lines: Vec<(bool, &str)> = text
            .lines()
            .map(|line| {
                // A line that begins inside of a literal is text, whatever it looks like.
                let is_code = !literal.is_open();
                literal.of_line(line);
                (is_code, line)
            })
            .collect();
        let mut at = 0;
        let mut is_test = false;
        while let Some((is_code, line)) = lines.get(at) {
            let code = line.trim_start();
            let indent = line.len() - code.len();
            if !is_code || code.is_empty() || code.starts_with("//") {
                at += 1;
                continue;
            }
            if code.starts_with("#[") {
                is_test |= self.test.is_match(code);
                at += 1;
                continue;
            }
            let is_test = std::mem::take(&mut is_test);
            let is_impl = ["impl ", "impl<", "unsafe impl"]
                .iter()
                .any(|word| code.starts_with(word));
            let definition = self.definition.captures(code);
            if !is_test && !is_impl && definition.is_none() {
                at += 1;
                continue;
            }
            let end = end_of(&lines, at, indent);
            let block = &lines[at..=end];
            if is_test {
                at = end + 1;
                continue;
            }
            match definition {
                Some(definition) => found.push(Block::Definition {
                    name: definition[1].to_owned(),
                    fields: if code.contains("struct ") {
                        self.fields(block, indent + 4)
                    } else {
                        0
                    },
                }),
                None => found.extend(subject(block).map(|name| Block::Impl {
                    name,
                    lines: block.iter().filter(|line| !is_comment(line)).count(),
                })),
            }
            at = end + 1;
        }
        found
    }

    fn fields(&self, block: &[(bool, &str)], indent: usize) -> usize {
        let is_field = |(is_code, line): &&(bool, &str)| {
            let code = line.trim_start();
            *is_code && line.len() - code.len() == indent && self.field.is_match(code)
        };
        block.iter().filter(is_field).count()
    }
}

fn is_comment((is_code, line): &&(bool, &str)) -> bool {
    *is_code && line.trim_start().starts_with("//")
}

/// The last line of the block that begins at `start` in column `indent`.
fn end_of(lines: &[(bool, &str)], start: usize, indent: usize) -> usize {
    let closes = |(is_code, line): &(bool, &str)| {
        let code = line.trim_start();
        *is_code && line.len() - code.len() == indent && code.starts_with(['}', ')'])
    };
    let first = lines[start].1.trim_end();
    if first.ends_with('}') || first.ends_with(';') {
        return start;
    }
    let rest = lines[start + 1..].iter().position(closes);
    rest.map_or(lines.len() - 1, |after| start + 1 + after)
}

/// The type that an `impl` block is for: `Lane` of `impl<'a> Queue for replica::Lane<'a> {`.
fn subject(block: &[(bool, &str)]) -> Option<String> {
    let mut header = String::new();
    for (_, line) in block {
        header.push_str(line.trim());
        header.push(' ');
        if line.trim_end().ends_with(['{', '}']) {
            break;
        }
    }
    let header = outside_of_angles(&header);
    let header = header.split(" where ").next().unwrap_or_default();
    let header = header.split('{').next().unwrap_or_default();
    let (_, header) = header.split_once("impl")?;
    let name = header.rsplit_once(" for ").map_or(header, |(_, name)| name);
    let name = name.trim().trim_start_matches(['&', '(']);
    let name = name.split_whitespace().last()?;
    let name = name.rsplit("::").next()?;
    name.chars()
        .all(|c| c.is_alphanumeric() || c == '_')
        .then(|| name.to_owned())
}

/// The text without generic parameters and arguments.
fn outside_of_angles(text: &str) -> String {
    let mut depth = 0;
    let mut before = ' ';
    let mut outside = String::new();
    for c in text.chars() {
        match c {
            '<' => depth += 1,
            // The arrow of a function's type.
            '>' if before == '-' => {}
            '>' => depth -= 1,
            _ if depth == 0 => outside.push(c),
            _ => {}
        }
        before = c;
    }
    outside
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(sources: &[(&str, &str)]) -> BTreeMap<Type, Size> {
        let sources: Vec<_> = sources.iter().map(|(p, t)| (*p, (*t).to_owned())).collect();
        sizes(&sources).unwrap()
    }

    fn size_of(name: &str, text: &str) -> (usize, usize) {
        let sizes = of(&[("a.rs", text)]);
        let size = sizes[&("a.rs".to_owned(), name.to_owned())];
        (size.lines, size.fields)
    }

    /// Goal: the blocks of a type count together, whatever their header looks like. Method: one
    /// header each, and the lines of its block.
    #[test]
    fn the_lines_of_every_block_count() {
        for (lines, header) in [
            (3, "impl A {"),
            (3, "impl<T: Fn(u32) -> Vec<u8>> super::A<T> {"),
            (3, "unsafe impl Send for A {"),
            (3, "impl<'a> Queue<'a> for &'a A<'a> {"),
            (3, "impl fmt::Display for crate::a::A {"),
            (5, "impl<T> Queue for A<T>\nwhere\n    T: Clone, {"),
            (0, "impl From<A> for B {"),
        ] {
            let text = format!("pub struct A;\n\n{header}\n    fn f() {{}}\n}}\n");
            assert_eq!(size_of("A", &text), (lines, 0), "{header}");
            let twice = format!("{text}\n{header}\n    fn g() {{}}\n}}\nimpl C for A {{}}\n");
            assert_eq!(size_of("A", &twice), (2 * lines + 1, 0), "{header}");
        }
    }

    /// Goal: documents of a type cost nothing. Method: comments, and a text that looks like one.
    #[test]
    fn comments_do_not_count() {
        let text = "impl A {\n    /// Doc.\n    fn f() {\n        // Why.\n        g(\"\n// text\");\n    }\n}\n";
        assert_eq!(size_of("A", &format!("struct A;\n{text}")), (6, 0));
    }

    /// Goal: a block ends at its own brace. Method: blocks with braces inside of literals,
    /// functions and modules; the line behind each block must not count.
    #[test]
    fn a_block_ends_at_its_own_brace() {
        let with_literal =
            "enum A {\n    B,\n}\nimpl A {\n    const T: &str = r#\"\n}\n\"#;\n}\nfn f() {\n}\n";
        assert_eq!(size_of("A", with_literal), (5, 0));
        let in_module = "mod m {\n    struct A(u8);\n    impl A {\n        fn f() {\n        }\n    }\n    fn g() {}\n}\n";
        assert_eq!(size_of("A", in_module), (4, 0));
    }

    #[test]
    fn fields_of_structs_count_and_those_of_variants_do_not() {
        let text = "pub(crate) struct A {\n    /// One: two.\n    pub(super) a: u8,\n    #[serde(default)]\n    b: fn(\n        c: u8,\n    ),\n    r#type: u8,\n}\n";
        assert_eq!(size_of("A", text), (0, 3));
        assert_eq!(size_of("A", "enum A {\n    B { c: u8 },\n}\n"), (0, 0));
        assert_eq!(
            size_of("A", "struct A(\n    u8,\n    u8,\n);\nimpl A {}\n"),
            (1, 0)
        );
    }

    #[test]
    fn tests_do_not_count() {
        let text = "struct A;\n\n#[cfg(test)]\nimpl A {\n    fn f() {}\n}\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n    impl A {\n        fn g() {}\n    }\n}\n\nimpl A {}\n";
        assert_eq!(size_of("A", text), (1, 0));
        for (file, expected) in [
            ("nvmf/src/tests/rig.rs", true),
            ("bdev/src/null/tests.rs", true),
            ("tests/src/rng.rs", true),
            ("nvmf/src/queues/request.rs", false),
            ("nvmf/src/contests.rs", false),
        ] {
            assert_eq!(is_test(file), expected, "{file}");
        }
    }

    /// Goal: types with the same name stay apart. Method: one in each of two folders, and blocks in
    /// the files beside them.
    #[test]
    fn a_block_counts_for_the_nearest_type_of_its_name() {
        let sizes = of(&[
            ("lane/mod.rs", "struct State;\n"),
            ("lane/end.rs", "impl State {\n}\n"),
            ("control/mod.rs", "struct State;\nimpl State {}\n"),
        ]);
        let lines: Vec<usize> = sizes.values().map(|size| size.lines).collect();
        assert_eq!(lines, [1, 2]);
    }
}

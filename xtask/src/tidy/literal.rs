//! Finds the string literals in Rust source, for the checks that must tell text from code.

/// Reads a source file line by line and finds its string literals, including raw ones and those of
/// several lines.
#[derive(Default)]
pub(super) struct Literal {
    /// The terminator of the literal that continues on the next line, and whether a backslash
    /// escapes in it.
    open: Option<(String, bool)>,
}

impl Literal {
    /// True if the next line begins inside of a literal.
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// The text of the line's literals, separated by spaces.
    pub(super) fn of_line(&mut self, line: &str) -> String {
        let mut said = String::new();
        let mut rest = line;
        loop {
            let Some((end, escapes)) = self.open.clone() else {
                let Some((open, after)) = opening(rest) else {
                    return said;
                };
                self.open = Some(open);
                rest = after;
                continue;
            };
            let Some(at) = closing(rest, &end, escapes) else {
                said.push_str(rest);
                return said;
            };
            said.push_str(&rest[..at]);
            said.push(' ');
            rest = &rest[at + end.len()..];
            self.open = None;
        }
    }
}

/// The first literal that begins in `code`, and the code behind its first quote.
fn opening(code: &str) -> Option<((String, bool), &str)> {
    let mut at = 0;
    while let Some(next) = code[at..].chars().next() {
        let rest = &code[at..];
        if rest.starts_with("//") {
            return None;
        }
        // A quote as a character literal.
        if rest.starts_with("'\"'") || rest.starts_with("'\\\"'") {
            at += if rest.starts_with("'\"'") { 3 } else { 4 };
            continue;
        }
        if next == '"' {
            let hashes = code[..at].bytes().rev().take_while(|b| *b == b'#').count();
            let is_raw = code[..at - hashes].ends_with('r');
            let end = format!(
                "\"{}",
                if is_raw {
                    "#".repeat(hashes)
                } else {
                    String::new()
                }
            );
            return Some(((end, !is_raw), &code[at + 1..]));
        }
        at += next.len_utf8();
    }
    None
}

fn closing(text: &str, end: &str, escapes: bool) -> Option<usize> {
    let mut at = 0;
    while let Some(next) = text[at..].chars().next() {
        if text[at..].starts_with(end) {
            return Some(at);
        }
        at += next.len_utf8();
        if escapes && next == '\\' {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_read_over_lines() {
        for (text, said) in [
            (r#"a("b", c, "d")"#, vec!["b d "]),
            (r#"a("b\"c") // "d""#, vec![r#"b\"c "#]),
            ("a('\"', \"b\")", vec!["b "]),
            ("r#\"a \"b\" c\"# d", vec!["a \"b\" c "]),
            (
                "a = \"b \\\n   // c\\\n d\";",
                vec!["b \\", "   // c\\", " d "],
            ),
        ] {
            let mut literal = Literal::default();
            let found: Vec<String> = text.lines().map(|line| literal.of_line(line)).collect();
            assert_eq!(found, said, "{text}");
        }
    }
}

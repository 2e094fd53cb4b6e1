//! Reads a PromQL expression: which metrics it selects, and which labels it names.
//!
//! It does not check the grammar; `promtool` does. It keeps a stack of open parentheses, because
//! the meaning of a name depends on the innermost one: `rate(…)`, `by (…)`.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};

/// Functions that take a counter over a range.
const OF_COUNTERS: [&str; 3] = ["rate", "irate", "increase"];

const AGGREGATIONS: [&str; 12] = [
    "sum",
    "min",
    "max",
    "avg",
    "count",
    "topk",
    "bottomk",
    "quantile",
    "stddev",
    "stdvar",
    "group",
    "count_values",
];

/// Words that are neither metrics nor followed by labels.
const OPERATORS: [&str; 8] = [
    "and", "or", "unless", "bool", "offset", "inf", "nan", "atan2",
];

/// Words with a list of labels.
const WITH_LABELS: [&str; 6] = [
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
];

/// A metric that an expression selects.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selected {
    pub metric: String,
    /// Labels of its matchers.
    pub labels: Vec<String>,
    /// True as the argument of `rate`, `irate` or `increase`.
    pub is_rate: bool,
}

/// What an expression uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Expression {
    pub selected: Vec<Selected>,
    /// Labels of `by`: those that its result has.
    pub by: BTreeSet<String>,
    /// Labels of `by`, of joins, and those that `label_replace` reads.
    pub named: BTreeSet<String>,
    /// Labels that `label_replace` makes.
    pub made: BTreeSet<String>,
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Number,
    Sign(char),
}

/// An open parenthesis, by the word before it.
struct Scope {
    word: String,
    texts: Vec<String>,
}

impl Expression {
    pub(super) fn read(text: &str) -> Result<Self> {
        let tokens = tokens(text)?;
        let mut read = Self::default();
        let mut scopes: Vec<Scope> = Vec::new();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token {
                Token::Sign('(') => scopes.push(Scope {
                    word: word_before(&tokens, at - 1),
                    texts: Vec::new(),
                }),
                Token::Sign(')') => {
                    let scope = scopes.pop().context("a parenthesis is closed twice")?;
                    if scope.word == "label_replace" {
                        let [made, _, source, _] = &scope.texts[..] else {
                            bail!("label_replace needs four texts");
                        };
                        read.made.insert(made.clone());
                        read.named.insert(source.clone());
                    }
                }
                Token::Sign('{') => bail!("a selector has no metric"),
                Token::Text(text) => {
                    if let Some(scope) = scopes.last_mut() {
                        scope.texts.push(text.clone());
                    }
                }
                Token::Word(word) => {
                    let around = scopes.last().map_or("", |scope| &scope.word);
                    if WITH_LABELS.contains(&around) {
                        read.named.insert(word.clone());
                        if around == "by" {
                            read.by.insert(word.clone());
                        }
                        continue;
                    }
                    let is_called = tokens.get(at) == Some(&Token::Sign('('));
                    let words = [&AGGREGATIONS[..], &OPERATORS, &WITH_LABELS].concat();
                    if is_called || words.contains(&word.as_str()) {
                        continue;
                    }
                    let is_rate = OF_COUNTERS.contains(&around);
                    let labels = matchers(&tokens, &mut at)?;
                    read.selected.push(Selected {
                        metric: word.clone(),
                        labels,
                        is_rate,
                    });
                    skip_range(&tokens, &mut at)?;
                }
                Token::Number | Token::Sign(_) => {}
            }
        }
        if !scopes.is_empty() {
            bail!("a parenthesis is not closed");
        }
        Ok(read)
    }
}

/// The word before the parenthesis at `at`, or an empty one.
fn word_before(tokens: &[Token], at: usize) -> String {
    match at.checked_sub(1).map(|before| &tokens[before]) {
        Some(Token::Word(word)) => word.clone(),
        _ => String::new(),
    }
}

/// The labels of `{label="value", …}` at `at`, if it is there.
fn matchers(tokens: &[Token], at: &mut usize) -> Result<Vec<String>> {
    let mut labels = Vec::new();
    if tokens.get(*at) != Some(&Token::Sign('{')) {
        return Ok(labels);
    }
    loop {
        *at += 1;
        match tokens.get(*at) {
            Some(Token::Word(label)) => labels.push(label.clone()),
            Some(Token::Sign('}')) => break,
            Some(_) => {}
            None => bail!("a selector is not closed"),
        }
    }
    *at += 1;
    Ok(labels)
}

/// Passes `[5m]` at `at`, if it is there.
fn skip_range(tokens: &[Token], at: &mut usize) -> Result<()> {
    if tokens.get(*at) == Some(&Token::Sign('[')) {
        let end = tokens[*at..].iter().position(|t| *t == Token::Sign(']'));
        *at += end.context("a range is not closed")? + 1;
    }
    Ok(())
}

fn tokens(text: &str) -> Result<Vec<Token>> {
    let mut found = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let is_of_word = |c: &char| c.is_ascii_alphanumeric() || *c == '_' || *c == ':';
        if c.is_ascii_alphabetic() || c == '_' {
            let mut word = String::from(c);
            while let Some(next) = chars.next_if(is_of_word) {
                word.push(next);
            }
            found.push(Token::Word(word));
        } else if c.is_ascii_digit() || c == '.' {
            while chars.next_if(|c| is_of_word(c) || *c == '.').is_some() {}
            found.push(Token::Number);
        } else if c == '"' || c == '\'' {
            let mut inside = String::new();
            loop {
                match chars.next().context("a text is not closed")? {
                    '\\' => inside.extend(chars.next()),
                    end if end == c => break,
                    other => inside.push(other),
                }
            }
            found.push(Token::Text(inside));
        } else if !c.is_whitespace() {
            found.push(Token::Sign(c));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(metric: &str, labels: &[&str], is_rate: bool) -> Selected {
        Selected {
            metric: metric.to_owned(),
            labels: labels.iter().map(|l| (*l).to_owned()).collect(),
            is_rate,
        }
    }

    fn set(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|w| (*w).to_owned()).collect()
    }

    #[test]
    fn metrics_and_labels_are_found() {
        let text = "histogram_quantile(0.99, sum by (le, op) (rate(a_bucket{op=~\"read|write\", x!='}'}[5m]))) > 1e-3";
        let read = Expression::read(text).unwrap();
        assert_eq!(read.selected, [selected("a_bucket", &["op", "x"], true)]);
        assert_eq!(read.by, set(&["le", "op"]));

        let text =
            "(a - b{c=\"d\"} offset 5m) / on (pool) group_left () max without (e) (f) > bool 0";
        let read = Expression::read(text).unwrap();
        let found = [
            selected("a", &[], false),
            selected("b", &["c"], false),
            selected("f", &[], false),
        ];
        assert_eq!(read.selected, found);
        assert_eq!(
            (read.by, read.named),
            (BTreeSet::new(), set(&["pool", "e"]))
        );

        // The grouping can stand behind its argument.
        let read =
            Expression::read("topk(10, sum(increase(a[1h])) by (host)) or vector(0)").unwrap();
        assert_eq!(read.selected, [selected("a", &[], true)]);
        assert_eq!(read.by, set(&["host"]));

        // A parenthesis between `rate` and a metric makes it no rate: promtool refuses a range.
        let read = Expression::read("rate(sum(a)[5m:])").unwrap();
        assert_eq!(read.selected, [selected("a", &[], false)]);
    }

    #[test]
    fn label_replace_makes_a_label() {
        let text = "label_replace(rate(a[5m]), \"volume\", \"$1\", \"bdev\", \"(.+)\") and on (volume) b == 1";
        let read = Expression::read(text).unwrap();
        assert_eq!(
            (read.made, read.named),
            (set(&["volume"]), set(&["bdev", "volume"]))
        );
        assert_eq!(
            read.selected,
            [selected("a", &[], true), selected("b", &[], false)]
        );
    }

    #[test]
    fn broken_expressions_are_refused() {
        for text in [
            "sum(a",
            "a)",
            "a{b=\"c",
            "a{b=\"c\"",
            "{b=\"c\"}",
            "rate(a[5m)",
            "label_replace(a, \"b\")",
        ] {
            assert!(Expression::read(text).is_err(), "{text}");
        }
    }
}

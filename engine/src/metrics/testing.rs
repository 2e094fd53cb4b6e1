//! A strict parser of the OpenMetrics text format, for tests. Every scraper accepts text that
//! passes it.

use std::collections::{BTreeMap, BTreeSet};

/// Counts per bound of one histogram, and its `_count`.
#[derive(Default)]
struct Buckets {
    bounds: Vec<(f64, f64)>,
    count: Option<f64>,
    sum: bool,
}

/// Checks the text. Returns the number of families.
///
/// # Panics
/// At the first line that a strict parser refuses, or that repeats a sample.
pub(super) fn check(text: &str) -> usize {
    let body = text
        .strip_suffix("# EOF\n")
        .expect("the text ends with EOF");
    let mut families = BTreeMap::<String, String>::new();
    let mut family = String::new();
    let mut seen = BTreeSet::new();
    let mut histograms = BTreeMap::<String, Buckets>::new();
    for line in body.lines() {
        if let Some(meta) = line.strip_prefix("# ") {
            let mut words = meta.splitn(3, ' ');
            let (what, name, rest) = (words.next(), words.next().expect(line), words.next());
            match what {
                Some("HELP") => {
                    assert!(
                        families.insert(name.into(), String::new()).is_none(),
                        "{line}: twice"
                    );
                    family = name.to_owned();
                }
                Some("TYPE") => {
                    assert_eq!(name, family, "{line}: behind its help");
                    families.insert(name.into(), rest.expect(line).into());
                }
                _ => panic!("{line}"),
            }
            continue;
        }
        let (name, labels, value) = sample(line);
        let kind = families[&family].as_str();
        let suffix = name
            .strip_prefix(family.as_str())
            .unwrap_or_else(|| panic!("{line} in {family}"));
        let identity = format!("{name}{labels:?}");
        assert!(seen.insert(identity), "{line}: twice");
        let mut of = labels.clone();
        let bound = of.remove("le");
        let histogram = histograms.entry(format!("{family}{of:?}"));
        match (kind, suffix, bound) {
            ("counter", "_total", None) => assert!(value >= 0.0, "{line}"),
            ("gauge", "", None) => {}
            ("histogram", "_sum", None) => histogram.or_default().sum = true,
            ("histogram", "_count", None) => histogram.or_default().count = Some(value),
            ("histogram", "_bucket", Some(bound)) => {
                let bound = bound.replace("+Inf", "inf").parse().expect(line);
                histogram.or_default().bounds.push((bound, value));
            }
            _ => panic!("{line}: no sample of a {kind}"),
        }
    }
    for (of, histogram) in &histograms {
        let ascends = |pair: &[(f64, f64)]| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1;
        assert!(
            histogram.bounds.windows(2).all(ascends),
            "{of}: {:?}",
            histogram.bounds
        );
        let last = *histogram.bounds.last().expect(of);
        assert_eq!(last, (f64::INFINITY, histogram.count.expect(of)), "{of}");
        assert!(histogram.sum, "{of} has no sum");
    }
    families.len()
}

/// Name, labels and value of a line.
fn sample(line: &str) -> (&str, BTreeMap<String, String>, f64) {
    let end = line.find(['{', ' ']).expect(line);
    let (name, mut rest) = line.split_at(end);
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    assert!(
        name.chars().all(word) && !name.starts_with(|c: char| c.is_ascii_digit()),
        "{line}"
    );
    let mut labels = BTreeMap::new();
    if let Some(after) = rest.strip_prefix("{}") {
        rest = after;
    } else if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, value) = rest.split_once("=\"").expect(line);
            assert!(!label.is_empty() && label.chars().all(word), "{line}");
            let mut text = String::new();
            let mut chars = value.char_indices();
            let end = loop {
                match chars.next().expect(line) {
                    (at, '"') => break at,
                    (_, '\\') => match chars.next().expect(line).1 {
                        'n' => text.push('\n'),
                        c @ ('"' | '\\') => text.push(c),
                        c => panic!("{line}: \\{c}"),
                    },
                    (_, c) => text.push(c),
                }
            };
            assert!(
                labels.insert(label.to_owned(), text).is_none(),
                "{line}: {label} twice"
            );
            rest = &value[end + 1..];
            match rest.split_at(1) {
                (",", more) => rest = more,
                ("}", more) => {
                    rest = more;
                    break;
                }
                _ => panic!("{line}"),
            }
        }
    }
    let value = rest.strip_prefix(' ').expect(line).parse().expect(line);
    (name, labels, value)
}

#[test]
fn invalid_text_is_refused() {
    let good = "# HELP nacre_x X.\n# TYPE nacre_x counter\nnacre_x_total{a=\"1\"} 3\n# EOF\n";
    assert_eq!(check(good), 1);
    let sample = "nacre_x_total{a=\"1\"} 3\n";
    for bad in [
        good.replace(sample, &sample.repeat(2)),
        good.replace("_total", ""),
        good.replace("# EOF\n", ""),
        good.replace(" 3", " three"),
    ] {
        std::panic::catch_unwind(|| check(&bad)).expect_err(&bad);
    }
}

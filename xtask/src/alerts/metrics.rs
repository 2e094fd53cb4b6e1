//! The metrics that an expression can use: those of `docs/reference/metrics.md`, and two that
//! Prometheus makes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};

/// Labels that Prometheus adds to each metric.
const ADDED: [&str; 2] = ["instance", "job"];

#[derive(Debug)]
pub(super) struct Known {
    /// True for a counter, and for each part of a histogram: only its rate has a meaning.
    pub is_counter: bool,
    pub labels: BTreeSet<String>,
}

#[derive(Debug)]
pub(super) struct KnownMetrics(BTreeMap<String, Known>);

impl KnownMetrics {
    /// Reads the table of the reference.
    pub(super) fn read(reference: &str) -> Result<Self> {
        let mut known = BTreeMap::new();
        for line in reference.lines().filter(|l| l.starts_with("| `")) {
            let mut cells = line.split('|').map(str::trim).skip(1);
            let (Some(name), Some(kind), Some(labels)) = (cells.next(), cells.next(), cells.next())
            else {
                bail!("a row with less than three cells: {line}");
            };
            let name = name.trim_matches('`');
            let labels = labels.split(',').map(|l| l.trim().trim_matches('`'));
            let labels: BTreeSet<String> = labels
                .chain(ADDED)
                .filter(|label| !label.is_empty())
                .map(str::to_owned)
                .collect();
            let mut add = |name: String, is_counter, labels| {
                known.insert(name, Known { is_counter, labels });
            };
            match kind {
                "gauge" => add(name.to_owned(), false, labels),
                "counter" => add(name.to_owned(), true, labels),
                "histogram" => {
                    let mut with_bound = labels.clone();
                    with_bound.insert("le".to_owned());
                    add(format!("{name}_bucket"), true, with_bound);
                    add(format!("{name}_sum"), true, labels.clone());
                    add(format!("{name}_count"), true, labels);
                }
                other => bail!("{name} has the type {other}"),
            }
        }
        if known.is_empty() {
            bail!("the reference has no metric");
        }
        // An alert has the labels of its expression, so those of any metric.
        let mut of_alerts: BTreeSet<String> =
            known.values().flat_map(|k| k.labels.clone()).collect();
        of_alerts.extend(["alertname", "alertstate", "severity"].map(str::to_owned));
        for (name, labels) in [
            ("up", ADDED.map(str::to_owned).into()),
            ("ALERTS", of_alerts),
        ] {
            let is_counter = false;
            known.insert(name.to_owned(), Known { is_counter, labels });
        }
        Ok(Self(known))
    }

    pub(super) fn find(&self, name: &str) -> Result<&Known> {
        self.0
            .get(name)
            .with_context(|| format!("docs/reference/metrics.md has no metric {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_metrics() {
        let text = "# Metrics\n\n| metric | type | labels | |\n|---|---|---|---|\n\
            | `a` | gauge |  | Level. |\n| `b_total` | counter | `x`, `y` | Counts. |\n\
            | `c_seconds` | histogram | `x` | Time. |\n";
        let known = KnownMetrics::read(text).unwrap();
        assert!(!known.find("a").unwrap().is_counter);
        let counter = known.find("b_total").unwrap();
        assert!(counter.is_counter && counter.labels.contains("y"));
        assert!(!counter.labels.contains("le"));
        assert!(
            known
                .find("c_seconds_bucket")
                .unwrap()
                .labels
                .contains("le")
        );
        assert!(!known.find("c_seconds_sum").unwrap().labels.contains("le"));
        assert!(known.find("c_seconds").is_err() && known.find("b").is_err());
        assert!(known.find("ALERTS").unwrap().labels.contains("y"));
        assert!(KnownMetrics::read("no table").is_err());
        assert!(KnownMetrics::read("| `a` | info | | |").is_err());
    }
}

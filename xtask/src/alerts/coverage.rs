//! Which alerts have tests: each one must fire in a case of `alerts_test.yml`, and be silent in
//! another.

use std::collections::{BTreeMap, BTreeSet};

/// The alerts of `rules` whose tests are incomplete, with what is missing; and the alerts of
/// `tests` that do not exist.
pub(super) fn gaps(rules: &str, tests: &str) -> Vec<String> {
    let alerts: BTreeSet<&str> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    let mut cases: BTreeMap<&str, Cases> = BTreeMap::new();
    let mut lines = tests.lines().peekable();
    while let Some(line) = lines.next() {
        let case = line.trim();
        let Some((_, named)) = case.split_once("alertname: ") else {
            continue;
        };
        let name = named.split([',', '}']).next().unwrap_or_default();
        // A case over several lines ends where the next case or test begins.
        let mut is_firing = false;
        while let Some(line) =
            lines.next_if(|l| !l.contains("alertname: ") && !l.contains("interval: "))
        {
            is_firing |= line.contains("exp_labels: ");
        }
        let cases = cases.entry(name).or_default();
        cases.fires |= is_firing;
        cases.is_silent |= !is_firing;
    }
    let mut gaps = Vec::new();
    for name in &alerts {
        let found = cases.get(name).copied().unwrap_or_default();
        if !found.fires {
            gaps.push(format!("no test in which {name} fires"));
        }
        if !found.is_silent {
            gaps.push(format!("no test in which {name} does not fire"));
        }
    }
    let unknown = cases.keys().filter(|name| !alerts.contains(*name));
    gaps.extend(unknown.map(|name| format!("a test of {name}, which does not exist")));
    gaps
}

#[derive(Default, Clone, Copy)]
struct Cases {
    fires: bool,
    is_silent: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alert_has_tests() {
        let rules = include_str!("../../../deploy/alerts.yml");
        let tests = include_str!("../../../deploy/alerts_test.yml");
        assert_eq!(gaps(rules, tests), Vec::<String>::new());
    }

    #[test]
    fn missing_tests_are_found() {
        let rules = "rules:\n  - alert: A\n    expr: a\n  - alert: B\n  - alert: C\n  - alert: D\n";
        let tests = "\
  - interval: 1m
    alert_rule_test:
      - {alertname: A, eval_time: 1m}
      - alertname: A
        eval_time: 2m
        exp_alerts:
          - exp_labels: {severity: info}
      - alertname: B
        eval_time: 2m
  - interval: 1m
    alert_rule_test:
      - alertname: C
        eval_time: 2m
        exp_alerts:
          - exp_labels: {severity: info}
      - {alertname: E, eval_time: 1m}
";
        let expected = [
            "no test in which B fires",
            "no test in which C does not fire",
            "no test in which D fires",
            "no test in which D does not fire",
            "a test of E, which does not exist",
        ];
        assert_eq!(gaps(rules, tests), expected);
    }
}

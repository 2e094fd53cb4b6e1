//! Checks `deploy/grafana-nacre.json`, because no Grafana is at hand: its form, its layout, and
//! that each expression uses existing metrics in the right way.
//!
//! ```text
//! JSON ── panels ──▶ form, layout
//!            └──── expressions ──▶ metrics and labels ──▶ a file of rules for promtool
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;

use super::expression::Expression;
use super::metrics::KnownMetrics;

/// Columns of Grafana's grid.
const COLUMNS: u32 = 24;

/// The data source of every panel: a variable of the dashboard.
const SOURCE: &str = "${datasource}";

/// Variables of Grafana itself, each with a value for `promtool`.
const GRAFANA: [(&str, &str); 2] = [("__rate_interval", "5m"), ("__range", "1h")];

#[derive(Debug, Deserialize)]
struct Dashboard {
    #[serde(rename = "__inputs")]
    inputs: Vec<Input>,
    #[serde(rename = "__requires")]
    requires: Vec<Requirement>,
    id: Value,
    uid: String,
    title: String,
    #[serde(rename = "schemaVersion")]
    schema: u32,
    templating: Templating,
    panels: Vec<Panel>,
}

#[derive(Debug, Deserialize)]
struct Input {
    name: String,
    #[serde(rename = "pluginId")]
    plugin: String,
}

#[derive(Debug, Deserialize)]
struct Requirement {
    #[serde(rename = "type")]
    kind: String,
    id: String,
}

#[derive(Debug, Deserialize)]
struct Templating {
    list: Vec<Variable>,
}

#[derive(Debug, Deserialize)]
struct Variable {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    query: Value,
    current: Value,
}

#[derive(Debug, Deserialize)]
struct Panel {
    id: u32,
    #[serde(rename = "type")]
    kind: String,
    title: String,
    #[serde(default)]
    description: String,
    #[serde(rename = "gridPos")]
    place: Place,
    #[serde(rename = "fieldConfig", default)]
    fields: Fields,
    #[serde(default)]
    targets: Vec<Target>,
    /// Panels of a collapsed row.
    #[serde(default)]
    panels: Vec<Self>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Place {
    x: u32,
    y: u32,
    w: u32,
    h: u32,
}

#[derive(Debug, Default, Deserialize)]
struct Fields {
    defaults: Defaults,
}

#[derive(Debug, Default, Deserialize)]
struct Defaults {
    #[serde(default)]
    unit: String,
}

#[derive(Debug, Deserialize)]
struct Target {
    #[serde(rename = "refId")]
    id: String,
    expr: String,
    #[serde(rename = "legendFormat", default)]
    legend: String,
}

/// The result of a check.
#[derive(Debug, Default)]
pub(super) struct Checked {
    pub faults: Vec<String>,
    /// Expressions with values for their variables, by the place where they stand.
    expressions: Vec<(String, String)>,
}

impl Checked {
    /// The expressions as recording rules, which `promtool check rules` parses.
    pub(super) fn rules(&self) -> Result<String> {
        let mut text = String::from("groups:\n  - name: dashboard\n    rules:\n");
        for (at, (place, expr)) in self.expressions.iter().enumerate() {
            // YAML takes texts of JSON.
            let expr = serde_json::to_string(expr)?;
            writeln!(text, "      # {place}")?;
            writeln!(text, "      - {{record: \"dashboard:{at}\", expr: {expr}}}")?;
        }
        Ok(text)
    }

    fn fault(&mut self, place: &str, what: impl std::fmt::Display) {
        self.faults.push(format!("{place}: {what}"));
    }
}

/// Checks a dashboard against the reference of the metrics. An error means that it is no dashboard.
pub(super) fn check(text: &str, reference: &str) -> Result<Checked> {
    let document: Value = serde_json::from_str(text).context("no JSON")?;
    let dashboard: Dashboard =
        serde_json::from_value(document.clone()).context("no dashboard of Grafana")?;
    let known = KnownMetrics::read(reference)?;
    let mut checked = Checked::default();
    form(&dashboard, &mut checked);
    sources(&document, "dashboard", &mut checked);
    let variables = variables(&dashboard, &known, &mut checked);
    layout(&dashboard.panels, &mut checked);
    for panel in all(&dashboard.panels).filter(|panel| panel.kind != "row") {
        for target in &panel.targets {
            let place = format!("{}, {}", panel.title, target.id);
            match with_values(&target.expr, &variables) {
                Ok(expr) => {
                    uses(&expr, &target.legend, &known, &place, &mut checked);
                    checked.expressions.push((place, expr));
                }
                Err(error) => checked.fault(&place, format!("{error:#}")),
            }
        }
    }
    Ok(checked)
}

/// The panels, and those in collapsed rows.
fn all(panels: &[Panel]) -> impl Iterator<Item = &Panel> {
    panels
        .iter()
        .flat_map(|p| std::iter::once(p).chain(&p.panels))
}

fn form(dashboard: &Dashboard, checked: &mut Checked) {
    let mut expect = |is_right: bool, what: &str| {
        if !is_right {
            checked.fault("dashboard", what);
        }
    };
    let [input] = &dashboard.inputs[..] else {
        return expect(false, "it needs one input, the data source");
    };
    expect(input.plugin == "prometheus", "the input is no Prometheus");
    // Grafana numbers dashboards; an id of another Grafana would overwrite one.
    expect(dashboard.id.is_null(), "id is not null");
    expect(
        !dashboard.uid.is_empty() && dashboard.uid.len() <= 40,
        "no uid of at most 40 letters",
    );
    expect(!dashboard.title.is_empty(), "no title");
    // Grafana 10 has 38, and later versions upgrade it.
    expect(
        dashboard.schema == 38,
        "schemaVersion is not that of Grafana 10",
    );
    let required: BTreeSet<&str> = dashboard
        .requires
        .iter()
        .filter(|r| r.kind == "panel")
        .map(|r| r.id.as_str())
        .collect();
    let panels = all(&dashboard.panels);
    let used: BTreeSet<&str> = panels
        .map(|p| p.kind.as_str())
        .filter(|k| *k != "row")
        .collect();
    expect(
        required == used,
        "__requires does not have the types of the panels",
    );
    let chosen = format!("${{{}}}", input.name);
    let is_chosen = |v: &&Variable| v.kind == "datasource" && v.current["value"] == chosen.as_str();
    let variable = dashboard.templating.list.iter().find(is_chosen);
    let is_used = variable.is_some_and(|v| SOURCE == format!("${{{}}}", v.name));
    expect(
        is_used,
        "the input is not the value of the variable datasource",
    );
}

/// Finds data sources other than the variable.
fn sources(value: &Value, place: &str, checked: &mut Checked) {
    match value {
        Value::Object(fields) => {
            let title = fields.get("title").and_then(Value::as_str).unwrap_or(place);
            if let Some(source) = fields.get("datasource")
                && (source["uid"] != SOURCE || source["type"] != "prometheus")
            {
                checked.fault(title, format!("it has the data source {source}"));
            }
            if fields.contains_key("expr") && !fields.contains_key("datasource") {
                checked.fault(title, "an expression has no data source");
            }
            for value in fields.values() {
                sources(value, title, checked);
            }
        }
        Value::Array(values) => values.iter().for_each(|v| sources(v, place, checked)),
        _ => {}
    }
}

/// The variables with values for `promtool`. Checks their queries.
fn variables(
    dashboard: &Dashboard,
    known: &KnownMetrics,
    checked: &mut Checked,
) -> BTreeMap<String, String> {
    let mut values: BTreeMap<String, String> = GRAFANA
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
    for variable in &dashboard.templating.list {
        if variable.kind == "query" {
            let place = format!("variable {}", variable.name);
            if let Err(error) = query(variable, &values, known, &place, checked) {
                checked.fault(&place, format!("{error:#}"));
            }
        }
        values.insert(variable.name.clone(), ".*".to_owned());
    }
    values
}

/// Checks a query `label_values(selector, label)`.
fn query(
    variable: &Variable,
    values: &BTreeMap<String, String>,
    known: &KnownMetrics,
    place: &str,
    checked: &mut Checked,
) -> Result<()> {
    let text = variable.query["query"].as_str().context("no query")?;
    let inside = text
        .strip_prefix("label_values(")
        .and_then(|rest| rest.strip_suffix(')'));
    let parts = inside.and_then(|inside| inside.rsplit_once(','));
    let Some((selector, label)) = parts else {
        bail!("not label_values(selector, label): {text}");
    };
    let expr = with_values(selector, values)?;
    uses(
        &expr,
        &format!("{{{{{}}}}}", label.trim()),
        known,
        place,
        checked,
    );
    checked.expressions.push((place.to_owned(), expr));
    Ok(())
}

/// Ids, texts and units; and that no panel covers another.
fn layout(panels: &[Panel], checked: &mut Checked) {
    let mut ids = BTreeSet::new();
    for panel in all(panels) {
        let place = format!("panel {} ({})", panel.id, panel.title);
        if !ids.insert(panel.id) {
            checked.fault(&place, "its id is in use");
        }
        if panel.title.trim().is_empty() {
            checked.fault(&place, "it has no title");
        }
        if panel.kind == "row" {
            continue;
        }
        if panel.description.trim().is_empty() {
            checked.fault(&place, "it has no description");
        }
        if panel.fields.defaults.unit.is_empty() {
            checked.fault(&place, "it has no unit");
        }
        if panel.targets.is_empty() {
            checked.fault(&place, "it has no expression");
        }
        let refs: BTreeSet<&str> = panel.targets.iter().map(|t| t.id.as_str()).collect();
        if refs.len() != panel.targets.len() {
            checked.fault(&place, "two expressions have one refId");
        }
    }
    // Panels of a collapsed row get their places when it opens.
    overlaps(panels, checked);
    for row in panels {
        overlaps(&row.panels, checked);
    }
}

fn overlaps(panels: &[Panel], checked: &mut Checked) {
    for (at, panel) in panels.iter().enumerate() {
        let a = panel.place;
        if a.w == 0 || a.h == 0 || a.x + a.w > COLUMNS {
            checked.fault(&panel.title, "it is outside of the grid");
        }
        for other in &panels[..at] {
            let b = other.place;
            let is_beside = a.x + a.w <= b.x || b.x + b.w <= a.x;
            let is_below = a.y + a.h <= b.y || b.y + b.h <= a.y;
            if !is_beside && !is_below {
                checked.fault(&panel.title, format!("it covers {}", other.title));
            }
        }
    }
}

/// Replaces variables, `$name` and `${name}`. `$1` is a group of a regular expression.
fn with_values(expr: &str, values: &BTreeMap<String, String>) -> Result<String> {
    let mut text = String::new();
    let mut parts = expr.split('$');
    text.extend(parts.next());
    for part in parts {
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let braced = part.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let (name, rest) = braced
            .unwrap_or_else(|| part.split_at(part.find(|c| !is_of_name(c)).unwrap_or(part.len())));
        if name.starts_with(|c: char| c.is_ascii_digit()) {
            write!(text, "${part}")?;
            continue;
        }
        let value = values
            .get(name)
            .with_context(|| format!("no variable {name}"))?;
        text.push_str(value);
        text.push_str(rest);
    }
    Ok(text)
}

/// Checks the metrics and labels of an expression, and the labels of its legend.
fn uses(expr: &str, legend: &str, known: &KnownMetrics, place: &str, checked: &mut Checked) {
    let read = match Expression::read(expr) {
        Ok(read) => read,
        Err(error) => return checked.fault(place, format!("{error:#}: {expr}")),
    };
    if read.selected.is_empty() {
        checked.fault(place, format!("no metric: {expr}"));
    }
    let mut labels = read.made.clone();
    for selected in &read.selected {
        let name = &selected.metric;
        let metric = match known.find(name) {
            Ok(metric) => metric,
            Err(error) => {
                checked.fault(place, error);
                continue;
            }
        };
        labels.extend(metric.labels.iter().cloned());
        for label in &selected.labels {
            if !metric.labels.contains(label) {
                checked.fault(place, format!("{name} has no label {label}"));
            }
        }
        match (metric.is_counter, selected.is_rate) {
            (true, false) => checked.fault(place, format!("{name} is a counter without a rate")),
            (false, true) => checked.fault(place, format!("{name} is a gauge under a rate")),
            _ => {}
        }
    }
    if read.selected.iter().any(|s| known.find(&s.metric).is_err()) {
        return;
    }
    for label in read.named.iter().filter(|label| !labels.contains(*label)) {
        checked.fault(place, format!("no metric has the label {label}: {expr}"));
    }
    // An aggregation leaves the labels of `by`.
    let left = if read.by.is_empty() {
        &labels
    } else {
        &read.by
    };
    for part in legend.split("{{").skip(1) {
        let label = part.split("}}").next().unwrap_or_default().trim();
        if !left.contains(label) {
            checked.fault(
                place,
                format!("the legend has the label {label}, its values do not"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const REFERENCE: &str = include_str!("../../../docs/reference/metrics.md");

    #[test]
    fn the_committed_dashboard_is_sound() {
        let text = include_str!("../../../deploy/grafana-nacre.json");
        let checked = check(text, REFERENCE).unwrap();
        assert_eq!(checked.faults, Vec::<String>::new());
        let count = checked.expressions.len();
        assert!(count > 80, "{count} expressions");
        let rules = checked.rules().unwrap();
        assert!(!rules.contains("$instance") && !rules.contains("__rate_interval"));
    }

    fn panel(id: u32, x: u32, expr: &str, legend: &str) -> Value {
        let source = json!({ "type": "prometheus", "uid": "${datasource}" });
        json!({
            "id": id, "type": "timeseries", "title": format!("P{id}"), "description": "It shows.",
            "gridPos": { "x": x, "y": 0, "w": 12, "h": 8 }, "datasource": source,
            "fieldConfig": { "defaults": { "unit": "s" } },
            "targets": [{ "refId": "A", "expr": expr, "legendFormat": legend, "datasource": source }],
        })
    }

    /// A dashboard with two panels, of which the first one has this expression.
    fn dashboard(expr: &str, legend: &str) -> Value {
        let source = json!({ "type": "prometheus", "uid": "${datasource}" });
        json!({
            "__inputs": [{ "name": "DS", "pluginId": "prometheus" }],
            "__requires": [{ "type": "panel", "id": "timeseries" }],
            "id": null, "uid": "x", "title": "X", "schemaVersion": 38,
            "templating": { "list": [
                { "name": "datasource", "type": "datasource", "query": "prometheus", "current": { "value": "${DS}" } },
                { "name": "instance", "type": "query", "datasource": source, "current": {},
                  "query": { "query": "label_values(nacre_uptime_seconds, instance)" } },
            ] },
            "panels": [panel(1, 0, expr, legend), panel(2, 12, "nacre_open_fds{instance=~\"$instance\"}", "{{instance}}")],
        })
    }

    fn faults(dashboard: &Value) -> Vec<String> {
        check(&dashboard.to_string(), REFERENCE).unwrap().faults
    }

    #[test]
    fn sound_expressions_are_accepted() {
        for (expr, legend) in [
            (
                "sum by (op) (rate(nacre_nvmf_bytes_total{instance=~\"${instance}\"}[$__rate_interval]))",
                "{{op}}",
            ),
            (
                "histogram_quantile(0.5, sum by (le) (rate(nacre_nvmf_latency_seconds_bucket[5m])))",
                "p50",
            ),
            (
                "label_replace(nacre_bdev_inflight, \"volume\", \"$1\", \"bdev\", \"(.+)\")",
                "{{volume}}",
            ),
            (
                "count(ALERTS{alertstate=\"firing\", volume=\"v\"}) or vector(0)",
                "",
            ),
        ] {
            assert_eq!(
                faults(&dashboard(expr, legend)),
                Vec::<String>::new(),
                "{expr}"
            );
        }
    }

    #[test]
    fn wrong_expressions_are_found() {
        for (expr, legend, fault) in [
            ("nacre_gone", "", "no metric nacre_gone"),
            ("rate(nacre_rpc_calls[5m])", "", "no metric nacre_rpc_calls"),
            (
                "rate(nacre_nvmf_latency_seconds[5m])",
                "",
                "no metric nacre_nvmf_latency_seconds",
            ),
            (
                "nacre_pool_bytes{volume=\"v\"}",
                "",
                "nacre_pool_bytes has no label volume",
            ),
            (
                "rate(nacre_nvmf_latency_seconds_sum{le=\"1\"}[5m])",
                "",
                "no label le",
            ),
            (
                "sum by (gone) (nacre_pool_bytes)",
                "",
                "no metric has the label gone",
            ),
            ("nacre_rpc_calls_total", "", "is a counter without a rate"),
            ("rate(nacre_pool_bytes[5m])", "", "is a gauge under a rate"),
            (
                "sum by (pool) (nacre_pool_bytes)",
                "{{instance}}",
                "the legend has the label instance",
            ),
            ("nacre_pool_bytes{pool=\"$gone\"}", "", "no variable gone"),
            ("vector(0)", "", "no metric"),
            ("sum(nacre_pool_bytes", "", "not closed"),
        ] {
            let found = faults(&dashboard(expr, legend));
            assert!(
                found.len() == 1 && found[0].contains(fault),
                "{expr}: {found:?}"
            );
        }
    }

    #[test]
    fn faults_of_form_are_found() {
        let changes: [(&str, Value, &str); 15] = [
            ("/panels/1/id", json!(1), "its id is in use"),
            ("/panels/1/title", json!(" "), "it has no title"),
            ("/panels/1/description", json!(""), "it has no description"),
            (
                "/panels/1/fieldConfig/defaults/unit",
                json!(""),
                "it has no unit",
            ),
            ("/panels/1/targets", json!([]), "it has no expression"),
            ("/panels/1/gridPos/x", json!(11), "it covers P1"),
            (
                "/panels/1/gridPos/w",
                json!(13),
                "it is outside of the grid",
            ),
            ("/panels/1/datasource/uid", json!("abc"), "the data source"),
            (
                "/panels/1/targets/0/datasource",
                json!("Prometheus"),
                "the data source",
            ),
            ("/panels/1/type", json!("gauge"), "__requires"),
            ("/id", json!(7), "id is not null"),
            ("/uid", json!(""), "no uid"),
            ("/schemaVersion", json!(41), "schemaVersion"),
            (
                "/templating/list/0/current/value",
                json!("default"),
                "the input is not",
            ),
            (
                "/templating/list/1/query/query",
                json!("label_values(nacre_gone, instance)"),
                "no metric nacre_gone",
            ),
        ];
        for (path, value, fault) in changes {
            let mut changed = dashboard("nacre_open_fds", "");
            *changed.pointer_mut(path).unwrap() = value;
            let found = faults(&changed);
            assert!(
                found.len() == 1 && found[0].contains(fault),
                "{path}: {found:?}"
            );
        }
    }

    #[test]
    fn panels_of_collapsed_rows_are_checked() {
        let mut changed = dashboard("nacre_open_fds", "");
        let place = json!({ "x": 0, "y": 8, "w": 24, "h": 1 });
        let row = |panels: Vec<Value>| json!({ "id": 9, "type": "row", "title": "R", "gridPos": place, "panels": panels });
        // They may cover panels outside of the row.
        let inside = vec![panel(3, 0, "nacre_open_fds", "")];
        changed["panels"].as_array_mut().unwrap().push(row(inside));
        assert_eq!(faults(&changed), Vec::<String>::new());
        let inside = vec![
            panel(3, 0, "nacre_gone", ""),
            panel(3, 6, "nacre_open_fds", ""),
        ];
        changed["panels"][2] = row(inside);
        let found = faults(&changed).join("\n");
        for fault in [
            "its id is in use",
            "P3: it covers P3",
            "no metric nacre_gone",
        ] {
            assert!(found.contains(fault), "{fault}: {found}");
        }
    }

    #[test]
    fn other_documents_are_refused() {
        assert!(check("{", REFERENCE).is_err());
        assert!(check("{}", REFERENCE).is_err());
    }
}

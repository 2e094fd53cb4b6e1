//! The layers as sources of the `config` crate, each value with its origin.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};

use config::{Map, Source, Value, ValueKind};
use toml_edit::{Document, Item};

use super::lists::{item_template, known_keys};
use super::{Flag, Problem, hints};
use crate::values::suggest::closest;

/// A layer: keys with their values and origins.
#[derive(Debug, Clone, Default)]
pub struct Layer(Map<String, Value>);

pub type FileSource = Layer;

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, config::ConfigError> {
        Ok(self.0.clone())
    }
}

impl Layer {
    /// Parses TOML and adds a problem for each unknown key.
    pub fn parse(
        name: &str,
        text: &str,
        known: &serde_json::Value,
        problems: &mut Vec<Problem>,
    ) -> Self {
        let line = |at: usize| text[..at.min(text.len())].matches('\n').count() + 1;
        let document: Document<String> = match text.parse::<Document<String>>() {
            Ok(document) => document,
            Err(error) => {
                let at = error.span().map_or(0, |s| s.start);
                let origin = format!("{name}:{}", line(at));
                let cause = error.message().replace('\n', "; ");
                problems.push(Problem::new(origin, "", format!("not TOML: {cause}")));
                return Self::default();
            }
        };
        let mut reader = Reader {
            name,
            line: &line,
            problems,
            known,
        };
        let value = reader.value("", document.as_item(), known, 0);
        match value.kind {
            ValueKind::Table(table) => Self(table),
            _ => unreachable!("a TOML document is a table"),
        }
    }
}

/// True for tables whose keys the user chooses.
pub fn has_any_key(path: &str) -> bool {
    matches!(
        path,
        "rpc.tls.roles" | "cluster.labels" | "cluster.pool_class"
    )
}

struct Reader<'a> {
    name: &'a str,
    line: &'a dyn Fn(usize) -> usize,
    problems: &'a mut Vec<Problem>,
    /// All known keys, for hints about misplaced ones.
    known: &'a serde_json::Value,
}

impl Reader<'_> {
    /// Converts a TOML item. `path` has no list indexes, because it is the path in `known`.
    fn value(&mut self, path: &str, item: &Item, known: &serde_json::Value, near: usize) -> Value {
        let at = item.span().map_or(near, |s| s.start);
        let origin = format!("{}:{}", self.name, (self.line)(at));
        if let Some(table) = item.as_table_like() {
            if !known.is_object() {
                let expected = match known {
                    serde_json::Value::Array(_) => "a list",
                    serde_json::Value::Bool(_) => "true or false",
                    serde_json::Value::Number(_) => "a number",
                    _ => "a single value",
                };
                let cause = format!("{path}: a table is not {expected}");
                self.problems.push(Problem::new(&origin, path, cause));
                return Value::new(Some(&origin), ValueKind::Nil);
            }
            let mut map = Map::new();
            for (key, item) in table.iter() {
                let at = table
                    .get_key_value(key)
                    .and_then(|(k, _)| k.span())
                    .map_or(at, |s| s.start);
                let full = if path.is_empty() {
                    key.to_owned()
                } else {
                    format!("{path}.{key}")
                };
                match known.get(key) {
                    _ if has_any_key(path) => {
                        let value = self.value(&full, item, &serde_json::Value::Null, at);
                        map.insert(key.to_owned(), value);
                    }
                    Some(known) => {
                        let template = known_keys(&full);
                        let value = self.value(&full, item, template.as_ref().unwrap_or(known), at);
                        if value.kind != ValueKind::Nil {
                            map.insert(key.to_owned(), value);
                        }
                    }
                    None => self.unknown(&full, key, known, at),
                }
            }
            return Value::new(Some(&origin), ValueKind::Table(map));
        }
        if let Some(tables) = item.as_array_of_tables() {
            let items = tables.iter().map(|t| {
                self.value(
                    path,
                    &Item::Table(t.clone()),
                    known,
                    t.span().map_or(at, |s| s.start),
                )
            });
            let items = items.collect::<Vec<_>>();
            return Value::new(Some(&origin), ValueKind::Array(items));
        }
        let kind = match item.as_value() {
            Some(toml_edit::Value::String(v)) => ValueKind::String(v.value().clone()),
            Some(toml_edit::Value::Integer(v)) => ValueKind::I64(*v.value()),
            Some(toml_edit::Value::Float(v)) => ValueKind::Float(*v.value()),
            Some(toml_edit::Value::Boolean(v)) => ValueKind::Boolean(*v.value()),
            Some(toml_edit::Value::Datetime(v)) => ValueKind::String(v.value().to_string()),
            Some(toml_edit::Value::Array(values)) => {
                let items = values
                    .iter()
                    .map(|v| self.value(path, &Item::Value(v.clone()), known, at));
                ValueKind::Array(items.collect::<Vec<_>>())
            }
            Some(toml_edit::Value::InlineTable(_)) | None => ValueKind::Nil,
        };
        Value::new(Some(&origin), kind)
    }

    fn unknown(&mut self, full: &str, key: &str, known: &serde_json::Value, at: usize) {
        let origin = format!("{}:{}", self.name, (self.line)(at));
        let problem = Problem::new(origin, full, format!("unknown key \"{full}\""));
        let names: Vec<&str> = known
            .as_object()
            .map_or(Vec::new(), |o| o.keys().map(String::as_str).collect());
        let prefix = full.strip_suffix(key).unwrap_or("");
        let elsewhere = || {
            let mut leaves = Vec::new();
            collect_leaves("", self.known, &mut leaves);
            let leaves = leaves.into_iter().map(|(path, _)| path);
            let mut same = leaves.filter(|path| path.rsplit('.').next() == Some(key));
            same.next()
        };
        let remedy = if let Some(hint) = hints::of(full) {
            Some(hint.to_owned())
        } else if let Some(close) = closest(key, names.iter().copied()) {
            Some(format!("did you mean \"{prefix}{close}\"?"))
        } else if let Some(other) = elsewhere() {
            Some(format!("did you mean \"{other}\"?"))
        } else if names.is_empty() {
            None
        } else {
            Some(format!("known here: {}", names.join(", ")))
        };
        self.problems.push(match remedy {
            Some(remedy) => problem.remedy(remedy),
            None => problem,
        });
    }
}

/// `NACRE_REACTOR_BUSY_POLL_US` sets `reactor.busy_poll_us`; lists are written with commas.
#[derive(Debug)]
pub struct EnvSource;

/// Variables that other parts of the program read, such as the host identity for commands that
/// connect to a target.
const OTHER_VARIABLES: [&str; 11] = [
    "NACRE_CONFIG",
    "NACRE_HOSTNQN",
    "NACRE_HOSTID",
    COMMANDS_SOCKET,
    "NACRE_TLS",
    "NACRE_TLS_CERT",
    "NACRE_TLS_KEY",
    "NACRE_TLS_CA",
    "NACRE_TLS_CRL",
    "NACRE_TLS_SERVER_NAME",
    "NACRE_CONFORMANCE_SEED",
];

/// The socket variable of the commands. The daemon's own variable differs, see [`variable`].
pub const COMMANDS_SOCKET: &str = "NACRE_RPC_SOCKET";

impl EnvSource {
    pub fn collect(
        env: impl IntoIterator<Item = (OsString, OsString)>,
        known: &serde_json::Value,
        problems: &mut Vec<Problem>,
    ) -> Layer {
        let mut leaves = Vec::new();
        collect_leaves("", known, &mut leaves);
        let names: Vec<String> = leaves.iter().map(|(path, _)| variable(path)).collect();
        let mut layer = Layer::default();
        for (name, text) in env {
            // Ignore variables of other programs, which may hold any bytes.
            if !name.as_encoded_bytes().starts_with(b"NACRE_") {
                continue;
            }
            let name = name.to_string_lossy().into_owned();
            if OTHER_VARIABLES.contains(&name.as_str())
                || is_of_kubernetes(&name, &text)
                || is_of_the_tests(&name)
            {
                continue;
            }
            let origin = format!("${name}");
            let Some(at) = names.iter().position(|n| *n == name) else {
                let problem = Problem::new(&origin, "", format!("unknown variable {name}"));
                problems.push(match closest(&name, names.iter().map(String::as_str)) {
                    Some(close) => problem.remedy(format!("did you mean {close}?")),
                    None => match hints::of_variable(&name) {
                        Some(hint) => problem.remedy(hint),
                        None => problem,
                    },
                });
                continue;
            };
            let (path, list) = &leaves[at];
            let Ok(text) = text.into_string() else {
                problems.push(Problem::new(&origin, path, format!("{name} is not UTF-8")));
                continue;
            };
            let kind = if *list {
                let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
                ValueKind::Array(
                    parts
                        .map(|p| Value::new(Some(&origin), p.to_owned()))
                        .collect::<Vec<_>>(),
                )
            } else {
                ValueKind::String(text)
            };
            insert(&mut layer.0, path, Value::new(Some(&origin), kind));
        }
        layer
    }
}

/// True for variables that Kubernetes sets in containers about services. A service with the name
/// `nacre-rdma` has `NACRE_RDMA_SERVICE_HOST`, `NACRE_RDMA_PORT=tcp://…`,
/// `NACRE_RDMA_PORT_4420_TCP_ADDR` and others.
fn is_of_kubernetes(name: &str, text: &OsStr) -> bool {
    let url = text.to_str().and_then(|text| text.split_once("://"));
    let is_url = url.is_some_and(|(scheme, _)| ["tcp", "udp", "sctp"].contains(&scheme));
    let of_a_port = |(_, rest): (&str, &str)| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let protocol = rest[digits..].split('_').nth(1);
        digits > 0 && matches!(protocol, Some("TCP" | "UDP" | "SCTP"))
    };
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        || (name.ends_with("_PORT") && is_url)
        || name.split_once("_PORT_").is_some_and(of_a_port)
}

/// True for variables of `cargo xtask` and of the tests, which may be set in the shell that starts
/// a daemon.
fn is_of_the_tests(name: &str) -> bool {
    ["NACRE_TEST_", "NACRE_VM_", "NACRE_SPDK_"]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

/// The variable that sets a key. For the socket's path it differs from [`COMMANDS_SOCKET`], so that
/// the setting of the commands does not change the daemon's socket.
pub fn variable(path: &str) -> String {
    match path {
        "rpc.socket" => "NACRE_SERVE_RPC_SOCKET".to_owned(),
        _ => format!("NACRE_{}", path.replace('.', "_").to_uppercase()),
    }
}

/// Collects the paths of all scalars and simple lists; the flag is true for a list. Lists of tables
/// have no variable.
fn collect_leaves(path: &str, known: &serde_json::Value, out: &mut Vec<(String, bool)>) {
    match known.as_object() {
        Some(table) => {
            for (key, value) in table {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                collect_leaves(&path, value, out);
            }
        }
        None if item_template(path).is_none() => out.push((path.to_owned(), known.is_array())),
        None => {}
    }
}

/// Settings from the command line.
#[derive(Debug)]
pub struct FlagSource;

impl FlagSource {
    #[allow(clippy::new_ret_no_self)]
    pub fn new(flags: &[Flag]) -> Layer {
        let mut layer = Layer::default();
        let mut seen = HashSet::new();
        // As usual on a command line, the last of two flags for one key applies.
        for flag in flags.iter().rev().filter(|f| seen.insert(f.key)) {
            insert(&mut layer.0, flag.key, json(&flag.value, flag.flag));
        }
        layer
    }
}

/// The values without their origins.
pub fn to_json(value: &Value) -> serde_json::Value {
    match &value.kind {
        ValueKind::Nil => serde_json::Value::Null,
        ValueKind::Boolean(b) => (*b).into(),
        ValueKind::I64(n) => (*n).into(),
        ValueKind::U64(n) => (*n).into(),
        ValueKind::I128(n) => n.to_string().into(),
        ValueKind::U128(n) => n.to_string().into(),
        ValueKind::Float(n) => (*n).into(),
        ValueKind::String(text) => text.as_str().into(),
        ValueKind::Array(items) => items.iter().map(to_json).collect(),
        ValueKind::Table(table) => {
            let members = table
                .iter()
                .map(|(key, value)| (key.clone(), to_json(value)));
            serde_json::Value::Object(members.collect())
        }
    }
}

fn json(value: &serde_json::Value, origin: &str) -> Value {
    let origin = origin.to_owned();
    let kind = match value {
        serde_json::Value::Null => ValueKind::Nil,
        serde_json::Value::Bool(b) => ValueKind::Boolean(*b),
        serde_json::Value::Number(n) => n.as_i64().map_or_else(
            || ValueKind::Float(n.as_f64().unwrap_or(0.0)),
            ValueKind::I64,
        ),
        serde_json::Value::String(s) => ValueKind::String(s.clone()),
        serde_json::Value::Array(items) => {
            ValueKind::Array(items.iter().map(|v| json(v, &origin)).collect::<Vec<_>>())
        }
        serde_json::Value::Object(map) => ValueKind::Table(
            map.iter()
                .map(|(k, v)| (k.clone(), json(v, &origin)))
                .collect(),
        ),
    };
    Value::new(Some(&origin), kind)
}

fn insert(into: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        None => drop(into.insert(path.to_owned(), value)),
        Some((head, rest)) => {
            let table = into
                .entry(head.to_owned())
                .or_insert_with(|| Value::new(None, ValueKind::Table(Map::new())));
            if let ValueKind::Table(table) = &mut table.kind {
                insert(table, rest, value);
            }
        }
    }
}

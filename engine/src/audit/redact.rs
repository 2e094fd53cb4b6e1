//! Removes secrets from the parameters of calls, and bounds their size, for the audit log.
//!
//! The types decide: the schema of [`SecretText`](crate::rpc::secret::SecretText) is `writeOnly`,
//! and such a value is replaced. Of a parameter that the schema does not have, only the name is
//! shown. Text in the form of a key is replaced everywhere, because a user may give a key where its
//! name belongs.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::rpc::secret::{SecretValue, WRITE_ONLY};

/// Replacement of a secret.
const SECRET: &str = "(secret)";
/// Replacement of the end of a long value, and of unknown values.
const REST: &str = "…";
const MAX_TEXT: usize = 512;
const MAX_ITEMS: usize = 32;
const MAX_DEPTH: usize = 8;
const MAX_BYTES: usize = 8192;

/// The first characters of a key's text: NVMe Base 2.0, 8.13.5.7, and NVMe/TCP 1.0, 3.6.1.5.
const KEYS: [&str; 2] = ["DHHC-1:", "NVMeTLSkey-1:"];

/// The redacted parameters of a call. `schema`: that of the method's parameters.
pub fn params(schema: &Value, params: Option<&RawValue>) -> Value {
    let Some(params) = params else {
        return Value::Null;
    };
    let value = match serde_json::from_str(params.get()).map(SecretValue) {
        Ok(value) => one(&value.0, schema, schema, 0),
        Err(_) => Value::from(REST),
    };
    match value.to_string().len() {
        0..=MAX_BYTES => value,
        bytes => Value::from(format!("({bytes} bytes)")),
    }
}

/// The text, with every key in it replaced.
pub fn text(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    let first = |rest: &str| KEYS.iter().filter_map(|key| rest.find(key)).min();
    while let Some(at) = first(rest) {
        out.push_str(&rest[..at]);
        out.push_str(SECRET);
        let is_part = |c: char| c.is_ascii_alphanumeric() || ":+/=-".contains(c);
        let end = rest[at..].find(|c| !is_part(c));
        rest = end.map_or("", |end| &rest[at + end..]);
    }
    out.push_str(rest);
    out
}

fn one(value: &Value, schema: &Value, root: &Value, depth: usize) -> Value {
    let schema = resolve(schema, root);
    if schema[WRITE_ONLY] == true {
        return Value::from(SECRET);
    }
    if depth >= MAX_DEPTH {
        return Value::from(REST);
    }
    match value {
        Value::String(of) => Value::from(shortened(&text(of))),
        Value::Array(items) => {
            let shown = items.iter().take(MAX_ITEMS);
            let mut shown: Vec<Value> = shown
                .map(|item| one(item, &schema["items"], root, depth + 1))
                .collect();
            if items.len() > MAX_ITEMS {
                shown.push(Value::from(REST));
            }
            Value::from(shown)
        }
        Value::Object(members) => {
            let is_open = !schema["properties"].is_object();
            let mut shown = Map::new();
            for (name, member) in members.iter().take(MAX_ITEMS) {
                let of = match &schema["properties"][name.as_str()] {
                    Value::Null if is_open => one(member, &Value::Null, root, depth + 1),
                    Value::Null => Value::from(REST),
                    known => one(member, known, root, depth + 1),
                };
                shown.insert(shortened(&text(name)), of);
            }
            Value::from(shown)
        }
        plain => plain.clone(),
    }
}

/// Follows `$ref`, and takes the type of an optional value.
fn resolve<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MAX_DEPTH {
        let path = schema["$ref"].as_str().and_then(|at| at.strip_prefix('#'));
        let branches = schema["anyOf"].as_array();
        let some = branches.and_then(|all| all.iter().find(|of| of["type"] != "null"));
        schema = match (path, some) {
            (Some(path), _) => root.pointer(path).unwrap_or(&Value::Null),
            (None, Some(some)) => some,
            (None, None) => return schema,
        };
    }
    schema
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}{REST}", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no secret passes, whatever a client sends. Method: a table of calls.

    use schemars::JsonSchema;
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::rpc::secret::SecretText;

    #[derive(Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Params {
        name: String,
        text: SecretText,
        maybe: Option<SecretText>,
        many: Vec<SecretText>,
        inner: Option<Inner>,
        free: Value,
    }

    #[derive(Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Inner {
        note: String,
        psk: SecretText,
    }

    fn shown(value: Value) -> Value {
        let schema = Value::from(schemars::schema_for!(Params));
        let raw = serde_json::value::to_raw_value(&value).unwrap();
        params(&schema, Some(&raw))
    }

    #[test]
    fn secrets_are_found_by_their_type() {
        let value = json!({
            "name": "a", "text": "hunter2", "maybe": "hunter2", "many": ["hunter2", "hunter2"],
            "inner": { "note": "n", "psk": "hunter2" }, "free": { "x": [1, "y"] },
            "txet": "hunter2",
        });
        assert_eq!(
            shown(value),
            json!({
                "name": "a", "text": "(secret)", "maybe": "(secret)", "many": ["(secret)", "(secret)"],
                "inner": { "note": "n", "psk": "(secret)" }, "free": { "x": [1, "y"] },
                "txet": "…",
            })
        );
        // A secret of a wrong type is a secret.
        assert_eq!(
            shown(json!({ "text": { "a": ["hunter2"] } })),
            json!({ "text": "(secret)" })
        );
        let schema = Value::from(schemars::schema_for!(Params));
        assert_eq!(params(&schema, None), Value::Null);
    }

    #[test]
    fn keys_are_hidden_wherever_they_are() {
        const KEY: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let tls = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
        assert_eq!(
            text(&format!("no key \"{KEY}\"; or {tls}")),
            "no key \"(secret)\"; or (secret)"
        );
        assert_eq!(text("nothing"), "nothing");
        let value = json!({ "name": KEY, "free": [{ tls: KEY }] });
        assert_eq!(
            shown(value),
            json!({ "name": "(secret)", "free": [{ "(secret)": "(secret)" }] })
        );
    }

    #[test]
    fn long_parameters_are_cut() {
        let long = shown(json!({ "name": "ä".repeat(10_000), "free": vec![1; 100] }));
        assert_eq!(long["name"].as_str().unwrap().chars().count(), MAX_TEXT + 1);
        assert_eq!(long["free"].as_array().unwrap().len(), MAX_ITEMS + 1);
        let large = shown(json!({ "free": vec!["x".repeat(500); 32] }));
        assert!(large.as_str().unwrap().ends_with(" bytes)"), "{large}");
        let mut deep = json!("hunter2");
        for _ in 0..100 {
            deep = json!([deep]);
        }
        assert!(shown(json!({ "free": deep })).to_string().len() < 100);
    }
}

//! Prints one JSON object as lines of key and value; keys of nested objects are joined to a path.

use serde_json::Value;

use super::{Failure, output};

pub(crate) fn print(value: &Value) -> Result<(), Failure> {
    output::table(
        &["key", "value"],
        lines(value).into_iter().map(|(key, text)| vec![key, text]),
    )
}

fn lines(value: &Value) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    walk("", value, &mut lines);
    // Names before other values.
    lines.sort_by_key(|(key, _)| !matches!(key.as_str(), "name" | "nqn"));
    lines
}

fn walk(path: &str, value: &Value, lines: &mut Vec<(String, String)>) {
    let below = |key: &str| match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    };
    match value {
        // The capabilities that are set, not a line per absent one.
        Value::Object(flags) if flags.len() > 3 && flags.values().all(Value::is_boolean) => {
            let on = flags.iter().filter(|(_, v)| **v == Value::Bool(true));
            let names: Vec<&str> = on.map(|(key, _)| key.as_str()).collect();
            lines.push((path.to_owned(), names.join(",")));
        }
        Value::Object(fields) => {
            for (key, value) in fields {
                walk(&below(key), value, lines);
            }
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            for (index, item) in items.iter().enumerate() {
                walk(&below(&index.to_string()), item, lines);
            }
        }
        other => lines.push((path.to_owned(), output::cell(Some(other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn facts_by_their_path() {
        let value = json!({
            "name": "ram0",
            "aliases": ["a", "b"],
            "claimed": false,
            "can": { "read": true, "write": true, "zcopy": false, "abort": false },
            "listen": [{ "port": "4420", "on": true }],
            "none": {},
        });
        let line = |key: &str, text: &str| (key.to_owned(), text.to_owned());
        assert_eq!(
            lines(&value),
            [
                line("name", "ram0"),
                line("aliases", "a,b"),
                line("can", "read,write"),
                line("claimed", "no"),
                line("listen.0.on", "yes"),
                line("listen.0.port", "4420"),
            ]
        );
    }
}

//! The reference of all methods, generated from their types: docs/reference/rpc.md.

use std::fmt::Write;

use serde_json::Value;

use super::examples::{self, Example};
use super::spdk::not_offered;
use crate::rpc::{MethodEntry, When};

/// Markdown of every method, its parameters and its reply.
pub fn markdown() -> String {
    let mut out = String::from(
        "# RPC methods\n\n\
         Written by `nacre rpc --reference` from the parameter types; do not edit.\n\n\
         JSON-RPC 2.0 over the daemon's unix socket, in SPDK's dialect: `nacre rpc METHOD key=value …`,\n\
         or SPDK's own `rpc.py`. Methods that change something have done so durably when they answer.\n\n\
         The class of a method decides who may call it: viewers only `read`; operators also `operate`; admins also\n\
         `admin` and `secret`. Calls of all classes but `read` are audited. See [security](../operate/security.md).\n\n\
         The examples are one session with a daemon; a test makes these calls. `…` marks omitted parts.\n",
    );
    let registry = super::all();
    let examples = examples::all();
    for entry in registry.iter() {
        method(&mut out, entry).expect("writing to a string");
        if let Some(shown) = examples::of(&examples, entry.name) {
            example(&mut out, shown).expect("writing to a string");
        }
    }
    out.push_str("\n## Not offered\n\nSPDK's methods that are not here, each with the reason; -32601 is the answer.\n\n| why | methods |\n|---|---|\n");
    for (why, names) in not_offered() {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        writeln!(out, "| {why} | {} |", names.join(", ")).expect("writing to a string");
    }
    out
}

fn method<C: 'static>(out: &mut String, entry: &MethodEntry<C>) -> std::fmt::Result {
    writeln!(out, "\n## {}\n\n{}", entry.name, entry.about)?;
    match entry.when {
        When::Startup => writeln!(out, "Only before `framework_start_init`.")?,
        When::Always => writeln!(out, "At any time.")?,
        When::Runtime => {}
    }
    writeln!(out, "Class: {}.", entry.class.word())?;
    if !entry.aliases.is_empty() {
        writeln!(out, "Also called {}.", entry.aliases.join(", "))?;
    }
    let schema = Value::from((entry.params_schema)());
    let fields = fields(&schema, &schema, "");
    if fields.is_empty() {
        writeln!(out, "\nNo parameters.")?;
    } else {
        writeln!(out, "\n| parameter | type | | |\n|---|---|---|---|")?;
        for field in fields {
            let need = if field.required { "required" } else { "" };
            writeln!(
                out,
                "| `{}` | {} | {need} | {} |",
                field.name, field.kind, field.about
            )?;
        }
    }
    let reply = Value::from((entry.reply_schema)());
    writeln!(out, "\nAnswer: {}", kind(&reply, &reply))
}

/// Writes the command that makes the call, and its reply.
fn example(out: &mut String, example: &Example) -> std::fmt::Result {
    let params = match &example.params {
        Value::Null => String::new(),
        params => format!(" '{params}'"),
    };
    if let Some(why) = &example.not_run {
        writeln!(out, "\nExample (no test makes this call: {why}):")?;
    } else {
        writeln!(out, "\nExample:")?;
    }
    writeln!(out, "\n    nacre rpc {}{params}", example.call)?;
    if example.not_run.is_some() {
        return Ok(());
    }
    let answer = match &example.error {
        Value::Null => &example.answer,
        error => error,
    };
    let text = serde_json::to_string_pretty(answer).expect("a JSON value serialises");
    if !example.error.is_null() {
        writeln!(out, "\nThe daemon refuses it:")?;
    }
    writeln!(out, "\n```json\n{text}\n```")
}

/// True if a parameter of a method, named by its path, is a string.
pub fn is_text(method: &str, path: &str) -> bool {
    let registry = super::all();
    let Some(entry) = registry.find(method) else {
        return false;
    };
    let schema = Value::from((entry.params_schema)());
    let fields = fields(&schema, &schema, "");
    fields.iter().any(|f| f.name == path && f.kind == "string")
}

struct Field {
    name: String,
    kind: String,
    required: bool,
    about: String,
}

/// The members of an object schema; those of nested objects with a path.
fn fields(schema: &Value, root: &Value, prefix: &str) -> Vec<Field> {
    let schema = resolve(schema, root);
    let required = schema["required"].as_array();
    let mut out = Vec::new();
    for (name, member) in schema["properties"].as_object().into_iter().flatten() {
        let full = format!("{prefix}{name}");
        let about = member["description"]
            .as_str()
            .unwrap_or("")
            .replace('\n', " ");
        let is_required = required.is_some_and(|r| r.iter().any(|n| n == name));
        out.push(Field {
            name: full.clone(),
            kind: kind(member, root),
            required: is_required,
            about,
        });
        let inner = resolve(unwrap_option(member), root);
        if inner["properties"].is_object() {
            out.extend(fields(inner, root, &format!("{full}.")));
        }
    }
    out
}

fn resolve<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut schema = schema;
    while let Some(path) = schema["$ref"].as_str().and_then(|r| r.strip_prefix('#')) {
        schema = root.pointer(path).unwrap_or(&Value::Null);
    }
    schema
}

/// An optional type is "T or null" in a schema; returns T.
fn unwrap_option(schema: &Value) -> &Value {
    let branches = schema["anyOf"].as_array();
    branches
        .and_then(|b| b.iter().find(|s| s["type"] != "null"))
        .unwrap_or(schema)
}

fn kind(schema: &Value, root: &Value) -> String {
    let schema = resolve(unwrap_option(schema), root);
    let constants = |list: &Value| {
        let names = list.as_array()?.iter().map(|s| s.get("const").unwrap_or(s));
        names
            .map(|v| v.as_str().map(|v| format!("`{v}`")))
            .collect::<Option<Vec<_>>>()
    };
    if let Some(words) = constants(&schema["enum"]).or_else(|| constants(&schema["oneOf"])) {
        return words.join(", ");
    }
    let name = match &schema["type"] {
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            let named: Vec<&str> = names
                .iter()
                .filter_map(Value::as_str)
                .filter(|n| *n != "null")
                .collect();
            named.join(" or ")
        }
        _ => return "any".into(),
    };
    match name.as_str() {
        "array" if schema["items"].is_object() => {
            format!("array of {}", kind(&schema["items"], root))
        }
        "object"
            if schema["properties"].is_object() && std::ptr::eq(schema, resolve(root, root)) =>
        {
            let names: Vec<&str> = schema["properties"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(k, _)| k.as_str())
                .collect();
            format!("object of {}", names.join(", "))
        }
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_reference_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/rpc.md");
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == markdown(),
            "docs/reference/rpc.md is out of date: run `nacre rpc --reference > docs/reference/rpc.md`"
        );
    }
}

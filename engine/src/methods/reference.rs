//! The reference of all methods, generated from their types: docs/reference/rpc.md.

use std::fmt::Write;

use serde_json::Value;

use super::examples::{self, Example};
use super::spdk::not_offered;
use crate::rpc::{Class, MethodEntry, When};

/// Markdown of every method, its parameters and its reply.
pub fn markdown() -> String {
    let mut out = String::from(
        "# RPC methods\n\n\
         Written by `nacre rpc --reference` from the parameter types; do not edit.\n\n\
         JSON-RPC 2.0 over the daemon's unix socket, in SPDK's dialect: `nacre rpc METHOD key=value …`,\n\
         or SPDK's own `rpc.py`. Methods that change something have done so durably when they answer.\n\n\
         Each method says whether it changes something (the configuration, stored data, the behaviour of devices, hosts\n\
         or other machines), and which role a client needs: viewer, operator or admin. Every call of a method that needs\n\
         operator or admin is a line of the audit log, whether it changes something or not; a call about keys (class\n\
         `secret`) has two, and a call that a parameter makes a change has one. See [security](../operate/security.md).\n\n\
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
    let class = match entry.class {
        Class::Secret => " (class `secret`)",
        Class::Read | Class::Operate | Class::Admin => "",
    };
    writeln!(
        out,
        "{} Role: {}{class}.",
        entry.changes,
        entry.class.role().word()
    )?;
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
    writeln!(out, "\nExample:\n\n    nacre rpc {}{params}", example.call)?;
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
        // The words of a field, or else those of its type.
        let about = [member, resolve(unwrap_option(member), root)]
            .into_iter()
            .find_map(|schema| schema["description"].as_str())
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

/// The type T of an optional value, whose schema is "T or null".
fn unwrap_option(schema: &Value) -> &Value {
    let branches = schema["anyOf"].as_array();
    branches
        .and_then(|b| b.iter().find(|s| s["type"] != "null"))
        .unwrap_or(schema)
}

/// The values of an enum. Values without a comment are one list in the schema; each other one is a
/// schema of its own.
fn constants(schema: &Value) -> Option<Vec<String>> {
    if let Some(branches) = schema["oneOf"].as_array() {
        let words = branches.iter().map(constants).collect::<Option<Vec<_>>>();
        return words.map(|words| words.concat());
    }
    let words = match schema.get("const") {
        Some(word) => std::slice::from_ref(word),
        None => schema["enum"].as_array()?.as_slice(),
    };
    let quoted = |word: &Value| word.as_str().map(|word| format!("`{word}`"));
    words.iter().map(quoted).collect()
}

fn kind(schema: &Value, root: &Value) -> String {
    let schema = resolve(unwrap_option(schema), root);
    if let Some(words) = constants(schema) {
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
    use crate::rpc::{Changes, Order};

    /// Goal: each parameter has words. Method: the rows of the reference, of every method.
    #[test]
    fn each_parameter_has_words() {
        let registry = crate::methods::all();
        let mut without = Vec::new();
        let mut rows = 0;
        for entry in registry.iter() {
            let schema = Value::from((entry.params_schema)());
            for field in fields(&schema, &schema, "") {
                rows += 1;
                if field.about.trim().is_empty() {
                    without.push(format!("{} {}", entry.name, field.name));
                }
            }
        }
        assert!(rows > 700, "only {rows} rows were read");
        assert!(
            without.is_empty(),
            "write a comment at the field, or at its type:\n{}",
            without.join("\n")
        );
    }

    /// Goal: the reference says truthfully which methods change something. Method: compare what a
    /// method says with its name, its order and its class.
    #[test]
    fn what_a_method_changes_fits_its_kind() {
        const READS: [&str; 5] = ["get", "list", "export", "wait", "status"];
        /// Calls that clients order among changes, and that change nothing.
        const IN_ORDER: [&str; 3] = [
            "nvmf_create_target",
            "nvmf_delete_target",
            "sock_set_default_impl",
        ];
        let mut wrong = Vec::new();
        for entry in crate::methods::all().iter() {
            let (name, changes) = (entry.name, entry.changes);
            let reads = name.split('_').any(|word| READS.contains(&word)) && name != "pool_export";
            if reads && changes == Changes::Something {
                wrong.push(format!("{name}: its name reads, and it changes something"));
            }
            if entry.class == Class::Read && changes == Changes::Something {
                wrong.push(format!(
                    "{name}: a viewer may call it, and it changes something"
                ));
            }
            let is_ordered = entry.order == Order::Exclusive && !IN_ORDER.contains(&name);
            if is_ordered && changes == Changes::Nothing {
                wrong.push(format!("{name}: it runs alone, and changes nothing"));
            }
            if let Changes::With(parameters) = changes {
                let schema = Value::from((entry.params_schema)());
                let known = fields(&schema, &schema, "");
                for parameter in parameters {
                    assert!(known.iter().any(|field| field.name == *parameter), "{name}");
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

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

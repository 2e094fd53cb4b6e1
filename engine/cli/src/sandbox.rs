//! `nacre info sandbox`: the capabilities of the daemon, and its system call filter.

use serde_json::Value;

use super::{Connection, Failure, output};
use nacre_engine::methods::sandbox::GetSandbox;
use nacre_engine_rpc::NoParams;

pub(crate) fn run(connection: &Connection) -> Result<(), Failure> {
    let sandbox = connection.call_for_json::<GetSandbox>(&NoParams {})?;
    if connection.json {
        return output::json(&sandbox);
    }
    output::table(&["name", "value"], rows(&sandbox))
}

fn rows(sandbox: &Value) -> Vec<Vec<String>> {
    let fields = sandbox.as_object().into_iter().flatten();
    let text = |value: &Value| match value {
        Value::Array(all) if all.is_empty() => "none".to_owned(),
        Value::Array(all) => {
            let all = all.iter().map(|one| output::cell(Some(one)));
            all.collect::<Vec<_>>().join("\n")
        }
        value => output::cell(Some(value)),
    };
    fields
        .map(|(name, value)| vec![name.clone(), text(value)])
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_have_a_line_for_each_item() {
        let rows = rows(&json!({ "mode": "enforce", "capabilities": ["a", "b"], "problems": [] }));
        assert!(
            rows.contains(&vec!["capabilities".into(), "a\nb".into()]),
            "{rows:?}"
        );
        assert!(rows.contains(&vec!["problems".into(), "none".into()]));
        assert!(rows.contains(&vec!["mode".into(), "enforce".into()]));
    }
}

//! Prints the results of commands, as tables or as JSON.

use std::io::Write;

use comfy_table::{Table, presets};
use serde_json::Value;

use super::{Connection, Failure};
use nacre_engine::methods::{bdev, cluster, nvmf, volume};
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;
use nacre_engine_rpc::client::ClientError;
pub use nacre_engine_values::{count, size::bytes};

/// Prints `text` and a newline.
pub fn line(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

pub fn json(value: &Value) -> Result<(), Failure> {
    line(&serde_json::to_string_pretty(value).expect("a JSON value serialises"))
}

/// A table without lines: `cut` and `awk` can parse the columns.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Result<(), Failure> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().map(|h| h.to_uppercase()));
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let text = table.to_string();
    line(
        &text
            .lines()
            .map(str::trim_end)
            .collect::<Vec<_>>()
            .join("\n"),
    )
}

/// A table of an array of objects: a column per pointer (`/a/b`), empty for missing values.
pub fn columns(items: &Value, columns: &[(&str, &str)]) -> Result<(), Failure> {
    let header: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let rows = items.as_array().map_or(&[][..], Vec::as_slice);
    table(
        &header,
        rows.iter().map(|item| {
            columns
                .iter()
                .map(|(_, at)| cell(item.pointer(at)))
                .collect()
        }),
    )
}

/// One value in a cell.
pub fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Bool(on)) => if *on { "yes" } else { "no" }.into(),
        Some(Value::Array(items)) => items
            .iter()
            .map(|v| cell(Some(v)))
            .collect::<Vec<_>>()
            .join(","),
        Some(other) => other.to_string(),
    }
}

pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// A refusal for a user of commands: the field, the cause and the remedy. The method's name and its
/// code appear only if the daemon gives no cause.
pub fn refusal(error: &ClientError) -> String {
    match error {
        ClientError::Refused { error, .. } if error.data.is_some() => in_commands(
            &error
                .data
                .as_deref()
                .map(ToString::to_string)
                .unwrap_or_default(),
        ),
        _ => error.to_string(),
    }
}

/// The command of each method that remedies name.
const COMMANDS: [(&str, &str); 16] = [
    (name::<bdev::accept::Accept>(), "bdev accept"),
    (name::<bdev::list::GetBdevs>(), "bdev list"),
    (name::<bdev::nvme::AttachController>(), "bdev attach"),
    (name::<cluster::status::GetNodes>(), "cluster nodes"),
    (
        name::<cluster::status::GetClusterStatus>(),
        "cluster status",
    ),
    (name::<cluster::volumes::GetVolumes>(), "cluster volumes"),
    (
        name::<nvmf::subsystem::DeleteSubsystem>(),
        "subsystem delete",
    ),
    (name::<nvmf::subsystem::GetSubsystems>(), "subsystem list"),
    (name::<nvmf::host::AddHost>(), "host allow"),
    (
        name::<nvmf::listener::GetSubsystemListeners>(),
        "listener list",
    ),
    (name::<volume::create::Create>(), "volume create"),
    (name::<volume::list::GetVolume>(), "volume show"),
    (name::<volume::list::List>(), "volume list"),
    (name::<volume::replicas::Replace>(), "volume replace"),
    (name::<volume::operate::Thaw>(), "volume thaw"),
    (
        name::<volume::snapshots::ListVolumeSnapshots>(),
        "volume snapshot list",
    ),
];

/// The name of a method.
const fn name<M: Method<Engine>>() -> &'static str {
    M::NAME
}

/// Replaces each name of an RPC method by a command: its own, or `nacre rpc METHOD`.
fn in_commands(text: &str) -> String {
    let methods = nacre_engine::methods::all();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut typed = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(is_part) {
        let (before, from) = rest.split_at(at);
        let (word, after) = from.split_at(from.find(|c| !is_part(c)).unwrap_or(from.len()));
        typed.push_str(before);
        let command = COMMANDS.iter().find(|(method, _)| *method == word);
        let is_typed = typed.ends_with("nacre rpc ") || typed.ends_with('"');
        match command {
            _ if is_typed || methods.find(word).is_none() => typed.push_str(word),
            Some((_, command)) => typed.push_str(&format!("`nacre {command}`")),
            None => typed.push_str(&format!("`nacre rpc {word}`")),
        }
        rest = after;
    }
    typed.push_str(rest);
    typed
}

/// Prints nothing for people on success, and the changed object for programs.
pub(crate) fn done(connection: &Connection, what: Value) -> Result<(), Failure> {
    if connection.json { json(&what) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: one of a thing is no plural, and remedies can be typed.
    #[test]
    fn words_for_people() {
        assert_eq!(count(1, "I/O"), "1 I/O");
        assert_eq!(count(0, "warning"), "0 warnings");
        for (text, typed) in [
            (
                "no device \"x\"; bdev_get_bdevs lists them",
                "no device \"x\"; `nacre bdev list` lists them",
            ),
            (
                "call nvmf_create_transport first",
                "call `nacre rpc nvmf_create_transport` first",
            ),
            ("see `nacre rpc volume_get`", "see `nacre rpc volume_get`"),
            (
                "the device \"volume_get\" is gone",
                "the device \"volume_get\" is gone",
            ),
            ("volume_gets, ünd so", "volume_gets, ünd so"),
        ] {
            assert_eq!(in_commands(text), typed);
        }
    }

    /// Goal: each command of a remedy exists.
    #[test]
    fn commands_of_methods_exist() {
        let (root, methods) = (crate::command(), nacre_engine::methods::all());
        for (method, words) in COMMANDS {
            assert!(methods.find(method).is_some(), "{method}");
            let mut command = &root;
            for word in words.split(' ') {
                let sub = command.find_subcommand(word);
                command = sub.unwrap_or_else(|| panic!("no command \"{words}\""));
            }
        }
    }
}

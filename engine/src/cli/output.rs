//! Output of commands: a table for people, JSON for programs.

use std::io::Write;

use comfy_table::{Table, presets};
use serde_json::Value;

use super::Failure;

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

/// A number of bytes with a unit.
pub fn bytes(count: u64) -> String {
    bytesize::ByteSize(count).display().iec().to_string()
}

pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Text of the daemon for people who type commands: names of methods become commands.
pub fn in_commands(text: &str) -> String {
    const WORDS: [(&str, &str); 4] = [
        ("bdev_get_bdevs lists", "`nacre bdev list` lists"),
        ("volume_get lists", "`nacre volume list` lists"),
        (
            "create the subsystem with ana_reporting",
            "create the subsystem with `--ana`",
        ),
        ("nvmf_subsystem_add_host", "`nacre host allow`"),
    ];
    let mut text = text.to_owned();
    for (method, command) in WORDS {
        text = text.replace(method, command);
    }
    text
}

/// `1 warning`, `2 warnings`.
pub fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: one of a thing is no plural, and remedies can be typed.
    #[test]
    fn words_for_people() {
        assert_eq!(count(1, "I/O"), "1 I/O");
        assert_eq!(count(0, "warning"), "0 warnings");
        assert_eq!(
            in_commands("no device \"x\"; bdev_get_bdevs lists them"),
            "no device \"x\"; `nacre bdev list` lists them"
        );
    }
}

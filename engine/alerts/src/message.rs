//! The content of an alert.

use std::fmt::Write;

use serde::Serialize;

/// One message about one or more events. It is the JSON body of a webhook, and the text of a mail.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Message {
    /// The same in every attempt, so that receivers can recognise a message that arrived twice.
    pub id: String,
    /// `events`, or `test` for a message without events.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// RFC 3339, in UTC.
    pub timestamp: String,
    /// The host name of the daemon's machine.
    pub node: String,
    /// One line that names the most severe event.
    pub text: String,
    /// Oldest first.
    pub events: Vec<Event>,
    /// Events before these that were dropped while the receiver was unreachable.
    pub lost: u64,
}

/// An event, with the fields of the RPC method `events_get`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Event {
    pub id: u64,
    pub time: String,
    pub category: &'static str,
    pub severity: &'static str,
    #[serde(rename = "type")]
    pub kind: &'static str,
    pub ctx: String,
    pub text: String,
    pub facts: serde_json::Value,
    pub left_out: u64,
}

impl Message {
    /// The text of a mail.
    pub(crate) fn mail_text(&self) -> String {
        let mut text = String::new();
        let write = &mut text;
        let written = if self.events.is_empty() {
            writeln!(write, "{}", self.text)
        } else {
            self.events.iter().try_for_each(|event| {
                let left_out = match event.left_out {
                    0 => String::new(),
                    n => format!(" ({n} more like it)"),
                };
                writeln!(
                    write,
                    "{}  {}  {}{left_out}",
                    event.time, event.severity, event.text
                )
            })
        };
        written.expect("writing to a string");
        if self.lost > 0 {
            let lost = format!("{} earlier events were dropped.", self.lost);
            text += &format!("\n{lost}\n");
        }
        text += &format!(
            "\nNode: {}\n\"nacre events\" on it shows all events; \"nacre alert silence\" stops these messages for a time.\n",
            self.node
        );
        text
    }
}

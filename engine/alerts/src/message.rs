//! The content of an alert.

use serde::Serialize;

/// One message about one or more events, or a test without events. It is the JSON body of a
/// webhook, and the text of a mail.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Message {
    /// The same in every attempt, so that receivers can recognise a message that arrived twice.
    pub id: String,
    /// `events`, or `test` for a message without events.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Time of the message: RFC 3339, in UTC.
    pub timestamp: String,
    /// The host name of the daemon's machine.
    pub node: String,
    /// One line that names the most severe event.
    pub text: String,
    /// Oldest first.
    pub events: Vec<Event>,
    /// Events that the receiver lost since its last message: given up, or more than can wait.
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
    /// Number of similar events that a limit suppressed.
    pub left_out: u64,
}

/// Most characters of an event in a mail, and of a subject.
const LINE: usize = 500;

impl Message {
    /// The text of a mail. No text of an event can begin a line of its own.
    pub(crate) fn mail_text(&self) -> String {
        let mut text = String::new();
        if self.events.is_empty() {
            text += &format!("{}\n", self.subject());
        }
        for event in &self.events {
            let left_out = match event.left_out {
                0 => String::new(),
                n => format!(" ({n} more like it)"),
            };
            let line = one_line(&event.text, LINE);
            text += &format!("{}  {}  {line}{left_out}\n", event.time, event.severity);
        }
        if self.lost > 0 {
            text += &format!("\n{} earlier events were lost.\n", self.lost);
        }
        text += &format!(
            "\nNode: {}\n\"nacre events\" on it shows all events; \"nacre alert silence\" stops these messages for a time.\n",
            one_line(&self.node, LINE)
        );
        text
    }

    pub(crate) fn subject(&self) -> String {
        one_line(&self.text, LINE)
    }

    /// The node's name with the characters that a domain can have.
    pub(crate) fn domain(&self) -> String {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        let name: String = self.node.chars().filter(|c| is_allowed(*c)).collect();
        if name.is_empty() {
            return "localhost".into();
        }
        name
    }
}

/// At most `most` characters of the text, then `…` if it is longer. Spaces replace control
/// characters, separators of lines, and marks that reorder the text around them.
pub fn one_line(text: &str, most: usize) -> String {
    let is_unsafe =
        |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let replaced = text.chars().map(|c| if is_unsafe(c) { ' ' } else { c });
    let mut line: String = replaced.take(most).collect();
    if text.chars().nth(most).is_some() {
        line.push('…');
    }
    line
}

//! Formats the lines of the console screen: a label, and a text beside it.

use ratatui::text::Line;

/// Most lines under one label: the screen of a serial terminal has 24.
const MOST_LINES: usize = 4;
/// Columns of a label.
pub(super) const LABEL: usize = 14;

pub(super) fn row(label: &str, text: impl Into<String>) -> Line<'static> {
    Line::from(format!("  {label:LABEL$}{}", text.into()))
}

/// Adds a line per text under one label. If there are more than [`MOST_LINES`], the last line has
/// the number of the others.
pub(super) fn rows(lines: &mut Vec<Line<'static>>, label: &str, texts: &[String]) {
    for (at, text) in texts.iter().take(MOST_LINES).enumerate() {
        lines.push(row(if at == 0 { label } else { "" }, text.clone()));
    }
    if texts.len() > MOST_LINES {
        lines.push(row("", format!("and {} more", texts.len() - MOST_LINES)));
    }
}

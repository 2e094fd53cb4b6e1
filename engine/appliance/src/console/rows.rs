//! Lines with a label, and text beside it.

use ratatui::text::Line;

/// Most lines of one kind: the screen of a serial terminal has 24.
const MOST_LINES: usize = 4;
pub(super) const LABEL: usize = 14;

pub(super) fn row(label: &str, text: impl Into<String>) -> Line<'static> {
    Line::from(format!("  {label:LABEL$}{}", text.into()))
}

/// Rows with one label; a row that says how many are missing.
pub(super) fn rows(lines: &mut Vec<Line<'static>>, label: &str, texts: &[String]) {
    for (at, text) in texts.iter().take(MOST_LINES).enumerate() {
        lines.push(row(if at == 0 { label } else { "" }, text.clone()));
    }
    if texts.len() > MOST_LINES {
        lines.push(row("", format!("and {} more", texts.len() - MOST_LINES)));
    }
}

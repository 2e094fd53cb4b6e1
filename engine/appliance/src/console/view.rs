//! Draws the screen, in ASCII: a serial terminal may show no other characters.

use ratatui::backend::{Backend, ClearType};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::Paragraph;
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};
use serde_json::Value;

use super::app::{App, FIELDS, Form, Page, Question};
use super::rows::{LABEL, row, rows};
use super::{Answers, Daemon, Facts, install};
use crate::network::TIME_TO_CONFIRM_S;
use crate::slots::SlotState;

/// A terminal on an empty screen. ratatui's own clearing asks the terminal for its cursor, and a
/// serial line without a terminal does not answer. The kernel's terminal has no second screen, so
/// messages of the boot are still there.
pub fn cleared<B: Backend>(mut backend: B, area: Rect) -> Result<Terminal<B>, B::Error> {
    backend.clear_region(ClearType::All)?;
    let options = TerminalOptions {
        viewport: Viewport::Fixed(area),
    };
    Terminal::with_options(backend, options)
}

pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let [title, body, message, keys] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Min(0),
        Constraint::Length(2),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let facts = &app.facts;
    let name = format!("Nacre {} on {}", facts.version, facts.host);
    // Every letter has the style, blanks too: the title is one piece on a serial line.
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new(Span::styled(name, bold)), title);
    let lines = match &app.page {
        Page::Overview => match &facts.install {
            Some(disks) => install::disks(disks),
            None => overview(facts),
        },
        Page::Ask(question) => ask(*question, facts),
        Page::Reset(typed) => reset(typed, facts),
        Page::Name(typed) => name_of(facts, typed),
        Page::Interfaces(names) => interfaces(names),
        Page::Network(form) => network(form),
        Page::Target(typed) => install::target(typed),
        Page::Overwrite { serial, typed } => install::overwrite(facts, serial, typed),
    };
    let mut paragraph = Paragraph::new(Text::from(lines));
    if facts.install.is_some() {
        // The reason against a disk is longer than a line.
        paragraph = paragraph.wrap(ratatui::widgets::Wrap { trim: false });
    }
    frame.render_widget(paragraph, body);
    let wrapped = Paragraph::new(app.message.as_str());
    let wrapped = wrapped.wrap(ratatui::widgets::Wrap { trim: true });
    frame.render_widget(wrapped, message);
    let keys_text = match &app.page {
        Page::Overview if facts.pending.is_some() => {
            "k keep the new network  u undo it  r restart  p power off"
        }
        Page::Overview if facts.install.is_some() => "i install  r restart  p power off",
        Page::Overview => "n network  m name  r restart  p power off  f factory reset",
        Page::Ask(_) => "y yes  Esc no",
        Page::Reset(_) => "Enter erase  Esc leave all as it is",
        Page::Name(_) => "Enter apply  Esc back",
        Page::Interfaces(_) => "1-9 choose  Esc back",
        Page::Target(_) => "Enter install  Esc back",
        Page::Overwrite { .. } => "Enter overwrite the disk  Esc leave all as it is",
        Page::Network(_) => "Enter next, at the end apply  Tab up down move  Esc back",
    };
    frame.render_widget(Paragraph::new(Span::styled(keys_text, bold)), keys);
}

fn overview(facts: &Facts) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    match &facts.daemon {
        Daemon::Unknown => lines.push(row("service", "starting")),
        Daemon::Away(cause) => {
            lines.push(row("service", format!("does not answer: {cause}")));
            rows(&mut lines, "trouble", &facts.trouble);
        }
        Daemon::Up(answers) => {
            lines.push(row("service", "active"));
            rows(&mut lines, "volumes", &volumes(answers));
            rows(&mut lines, "listeners", &answers.listeners);
        }
    }
    if facts.addresses.is_empty() {
        lines.push(row(
            "addresses",
            "none: is a cable connected, and does DHCP answer?",
        ));
    }
    rows(&mut lines, "addresses", &facts.addresses);
    if let Daemon::Up(answers) = &facts.daemon {
        page(&mut lines, answers, facts);
    }
    if let Some(slot) = &facts.other_slot {
        let text = match slot.state {
            SlotState::Untried => "starts at the next restart",
            SlotState::Failed => "has no tries left; this version runs instead",
            SlotState::Running | SlotState::Good | SlotState::Incomplete => "is on the disk",
        };
        lines.push(row("update", format!("version {} {text}", slot.version)));
    }
    if let Some(interface) = &facts.pending {
        lines.push(Line::default());
        lines.push(row(
            "network",
            format!("new settings of {interface} end within {TIME_TO_CONFIRM_S} s unless kept"),
        ));
    }
    lines
}

/// The volumes with trouble, or one line for all.
fn volumes(answers: &Answers) -> Vec<String> {
    let Some(volumes) = &answers.volumes else {
        return vec!["unknown: the daemon refused to list them".into()];
    };
    let volumes = volumes.as_array().map_or(&[][..], Vec::as_slice);
    let text = |volume: &Value, field: &str| volume[field].as_str().unwrap_or("?").to_owned();
    let troubled: Vec<String> = volumes
        .iter()
        .filter(|volume| volume["state"] != "healthy")
        .map(|volume| format!("{} {}", text(volume, "name"), text(volume, "state")))
        .collect();
    match (troubled.is_empty(), volumes.len()) {
        (false, _) => troubled,
        (true, 0) => vec!["none".into()],
        (true, 1) => vec!["1, healthy".into()],
        (true, count) => vec![format!("{count}, all healthy")],
    }
}

/// The administration page: its URL, with addresses of the machine in place of all addresses.
fn page(lines: &mut Vec<Line<'static>>, answers: &Answers, facts: &Facts) {
    let Some(web) = &answers.web else {
        return;
    };
    let listen = web["listen"].as_array().map_or(&[][..], Vec::as_slice);
    let urls = listen.iter().filter_map(Value::as_str);
    let urls: Vec<String> = urls.flat_map(|url| reachable(url, facts)).collect();
    if urls.is_empty() {
        lines.push(row("page", "off: set [web] listen in the configuration"));
        return;
    }
    rows(lines, "page", &urls);
    if let Some(fingerprint) = web["fingerprint"].as_str() {
        // Two lines, each with whole bytes.
        let bytes = fingerprint.strip_prefix("SHA256:").unwrap_or(fingerprint);
        let half = (fingerprint.len() - bytes.len() / 2).saturating_sub(1);
        let colon = fingerprint.get(half..).and_then(|rest| rest.find(':'));
        let middle = colon.map_or(fingerprint.len(), |colon| half + colon + 1);
        let (first, second) = fingerprint.split_at(middle);
        lines.push(row("certificate", first.to_owned()));
        if !second.is_empty() {
            lines.push(row("", second.to_owned()));
        }
    }
    if let Some(code) = web["setup_code"].as_str() {
        lines.push(row("set-up code", code.to_owned()));
    }
}

fn reachable(url: &str, facts: &Facts) -> Vec<String> {
    for any in ["://0.0.0.0:", "://[::]:"] {
        if let Some((scheme, port)) = url.split_once(any) {
            let addresses = facts.addresses.iter().filter_map(|line| {
                let address = line.split_whitespace().nth(1)?.split('/').next()?;
                // A browser wants an IPv4 address, or brackets.
                (!address.contains(':')).then_some(address)
            });
            let urls: Vec<String> = addresses
                .map(|address| format!("{scheme}://{address}:{port}"))
                .collect();
            return if urls.is_empty() {
                vec![url.to_owned()]
            } else {
                urls
            };
        }
    }
    vec![url.to_owned()]
}

fn ask(question: Question, facts: &Facts) -> Vec<Line<'static>> {
    let act = match question {
        Question::Restart => "Restart",
        Question::PowerOff => "Power off",
    };
    let effect = match facts.install {
        None => "  Hosts lose the volumes that only this node serves.",
        Some(_) => {
            "  Remove the USB disk once the screen is dark: the machine then starts from its disk."
        }
    };
    vec![
        Line::from(format!("  {act} {}?", facts.host)),
        Line::default(),
        Line::from(effect),
    ]
}

fn reset(typed: &str, facts: &Facts) -> Vec<Line<'static>> {
    vec![
        Line::from(
            "  A factory reset erases configuration, accounts, keys, the record of volumes,",
        ),
        Line::from(
            "  logs and network settings. Data on other drives stays. The machine restarts.",
        ),
        Line::default(),
        Line::from(format!(
            "  Type the name of this machine, {}, to go on:",
            facts.host
        )),
        Line::default(),
        Line::from(format!("  > {typed}_")),
    ]
}

fn name_of(facts: &Facts, typed: &str) -> Vec<Line<'static>> {
    vec![
        Line::from(format!("  This machine has the name {}.", facts.host)),
        Line::from("  The page's own certificate is made again for a new name."),
        Line::default(),
        Line::from("  The new name: letters, digits, '-', and '.' between parts"),
        Line::default(),
        Line::from(format!("  > {typed}_")),
    ]
}

fn interfaces(names: &[String]) -> Vec<Line<'static>> {
    if names.is_empty() {
        return vec![Line::from("  This machine has no network interface.")];
    }
    let numbered = names.iter().enumerate();
    numbered
        .map(|(at, name)| Line::from(format!("  {}  {name}", at + 1)))
        .collect()
}

fn network(form: &Form) -> Vec<Line<'static>> {
    let mut lines = vec![
        Line::from(format!("  Network settings of {}", form.interface)),
        Line::default(),
    ];
    for (at, (field, hint)) in FIELDS.iter().enumerate() {
        let cursor = if at == form.at { "> " } else { "  " };
        let end = if at == form.at { "_" } else { "" };
        lines.push(Line::from(format!(
            "{cursor}{field:LABEL$}{}{end}",
            form.values[at]
        )));
        lines.push(Line::from(format!("  {:LABEL$}({hint})", "")));
    }
    lines
}

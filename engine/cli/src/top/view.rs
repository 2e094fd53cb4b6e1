//! Draws the live view of `nacre top`, in the space that the terminal has.
//!
//! Lines have priorities: the headline, then the panel, reactors, listeners, keys. Columns have
//! ranks: a narrow terminal shows the most useful ones, and names are shortened at their beginning.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::app::{App, Link, Panel};
use super::report;
use super::snapshot::{Listener, Reactor, Snapshot, Sort};

pub(super) fn draw(frame: &mut Frame, app: &mut App) {
    let area = frame.area();
    if area.height == 0 || area.width == 0 {
        return;
    }
    let nothing = Snapshot::default();
    let snapshot = app.snapshot.take();
    let shown = snapshot.as_ref().unwrap_or(&nothing);
    let keys = u16::from(area.height >= 6);
    // The panel gets half of the room if it needs it, the blocks above it share the rest.
    let room = area.height.saturating_sub(1 + keys);
    let rows = u16::try_from(panel_rows(app.panel, shown)).unwrap_or(u16::MAX);
    let above = room - rows.saturating_add(1).min(room.div_ceil(2));
    let reactors = block_height(shown.reactors.len(), above.saturating_mul(2) / 3);
    let listeners = block_height(shown.listeners.len(), above - reactors);
    let [head, upper, middle, panel, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(reactors),
        Constraint::Length(listeners),
        Constraint::Min(0),
        Constraint::Length(keys),
    ])
    .areas(area);
    frame.render_widget(Paragraph::new(headline(app, shown)), head);
    draw_reactors(frame, upper, &shown.reactors);
    draw_listeners(frame, middle, &shown.listeners);
    draw_panel(frame, panel, app, shown);
    frame.render_widget(
        Paragraph::new(keys_line(app)).style(Style::new().add_modifier(Modifier::DIM)),
        foot,
    );
    if app.link != Link::Up {
        // The data below is out of date.
        let below = Rect {
            y: area.y + 1,
            height: area.height - 1,
            ..area
        };
        frame
            .buffer_mut()
            .set_style(below, Style::new().add_modifier(Modifier::DIM));
    }
    app.snapshot = snapshot;
}

/// Lines of a block of `rows`, with its header and a gap, if a useful part of it fits.
fn block_height(rows: usize, most: u16) -> u16 {
    let wanted = u16::try_from(rows).unwrap_or(u16::MAX).saturating_add(2);
    // Fewer than two rows of several would not even show their number.
    if most < wanted.min(4) || rows == 0 {
        0
    } else {
        wanted.min(most)
    }
}

fn panel_rows(panel: Panel, snapshot: &Snapshot) -> usize {
    match panel {
        Panel::Namespaces => snapshot.namespaces.len(),
        Panel::Devices => snapshot.devices.len(),
        Panel::Connections => snapshot.connections.len(),
        Panel::Paths => snapshot.paths.len(),
        Panel::Pools => snapshot.pools.len(),
    }
}

fn headline(app: &App, snapshot: &Snapshot) -> Line<'static> {
    let bad = |text: String| Line::styled(text, Style::new().fg(Color::White).bg(Color::Red));
    match &app.link {
        Link::Gone(why) => return bad(format!("{why} (retrying)")),
        Link::Waiting => return Line::raw("waiting for the daemon"),
        Link::Up => {}
    }
    if let Some(seconds) = app.silence() {
        return bad(format!("the daemon has not answered for {seconds} s"));
    }
    let mut line = Line::styled(
        report::headline(snapshot),
        Style::new().add_modifier(Modifier::BOLD),
    );
    if let Some(first) = snapshot.refused.first() {
        let more = match snapshot.refused.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        line.push_span(Span::styled(
            format!("  refused: {first}{more}"),
            Style::new().fg(Color::Red),
        ));
    }
    line
}

fn keys_line(app: &App) -> String {
    let paused = if app.paused { "PAUSED " } else { "" };
    let panel = match app.panel {
        Panel::Namespaces => "devices",
        Panel::Devices => "connections",
        Panel::Connections => "paths",
        Panel::Paths => "pools",
        Panel::Pools => "namespaces",
    };
    let histograms = if app.histograms { "off" } else { "on" };
    format!(
        "{paused}every {}  q quit  Tab {panel}  sort: n i b l p e  r reverse  h histograms {histograms}  +- pace  space pause",
        humantime::format_duration(app.interval)
    )
}

/// One column of a table.
#[derive(Clone, Copy)]
struct Column {
    title: &'static str,
    /// Least width; a name takes the remaining width.
    width: u16,
    name: bool,
    /// Columns with a higher rank are left out first.
    rank: u8,
    sort: Option<Sort>,
}

const fn name(title: &'static str, width: u16, rank: u8) -> Column {
    Column {
        title,
        width,
        name: true,
        rank,
        sort: Some(Sort::Name),
    }
}

const fn number(title: &'static str, width: u16, rank: u8) -> Column {
    Column {
        title,
        width,
        name: false,
        rank,
        sort: None,
    }
}

const fn key(title: &'static str, width: u16, rank: u8, sort: Sort) -> Column {
    Column {
        title,
        width,
        name: false,
        rank,
        sort: Some(sort),
    }
}

/// The core goes first in a narrow terminal: most names contain it.
const REACTOR: [Column; 8] = [
    name(report::REACTOR[0], 12, 0),
    number(report::REACTOR[1], 4, 9),
    name(report::REACTOR[2], 9, 3),
    number(report::REACTOR[3], 6, 0),
    number(report::REACTOR[4], 6, 2),
    number(report::REACTOR[5], 6, 2),
    number(report::REACTOR[6], 6, 1),
    number(report::REACTOR[7], 6, 1),
];

const LISTENER: [Column; 5] = [
    name(report::LISTENER[0], 18, 0),
    number(report::LISTENER[1], 10, 4),
    number(report::LISTENER[2], 5, 1),
    number(report::LISTENER[3], 11, 3),
    number(report::LISTENER[4], 6, 2),
];

const DEVICE: [Column; 9] = [
    name(report::DEVICE[0], 10, 0),
    key(report::DEVICE[1], 6, 1, Sort::Iops),
    key(report::DEVICE[2], 6, 1, Sort::Iops),
    key(report::DEVICE[3], 9, 2, Sort::Bytes),
    key(report::DEVICE[4], 9, 2, Sort::Bytes),
    key(report::DEVICE[5], 6, 4, Sort::Latency),
    key(report::DEVICE[6], 6, 4, Sort::Latency),
    key(report::DEVICE[7], 6, 3, Sort::P99),
    key(report::DEVICE[8], 6, 5, Sort::Errors),
];

/// The columns of a namespace, and those of its device.
fn namespace_columns() -> Vec<Column> {
    let own = [
        name(report::NAMESPACE[0], 12, 0),
        number(report::NAMESPACE[1], 4, 0),
        name(report::DEVICE[0], 8, 6),
    ];
    [&own[..], &DEVICE[1..]].concat()
}

const CONNECTION: [Column; 7] = [
    name(report::CONNECTION[0], 14, 0),
    name(report::CONNECTION[1], 12, 1),
    number(report::CONNECTION[2], 6, 4),
    number(report::CONNECTION[3], 6, 0),
    name(report::CONNECTION[4], 11, 2),
    name(report::CONNECTION[5], 18, 5),
    name(report::CONNECTION[6], 8, 3),
];

const PATH: [Column; 10] = [
    name(report::PATH[0], 10, 0),
    name(report::PATH[1], 18, 1),
    name(report::PATH[2], 9, 2),
    name(report::PATH[3], 13, 6),
    name(report::PATH[4], 4, 3),
    number(report::PATH[5], 6, 4),
    number(report::PATH[6], 6, 4),
    number(report::PATH[7], 9, 7),
    number(report::PATH[8], 9, 7),
    number(report::PATH[9], 6, 5),
];

const POOL: [Column; 8] = [
    name(report::POOL[0], 10, 0),
    name(report::POOL[1], 6, 2),
    number(report::POOL[2], 9, 3),
    number(report::POOL[3], 6, 1),
    number(report::POOL[4], 9, 1),
    number(report::POOL[5], 5, 6),
    number(report::POOL[6], 7, 4),
    number(report::POOL[7], 5, 5),
];

fn draw_panel(frame: &mut Frame, area: Rect, app: &mut App, snapshot: &Snapshot) {
    let (columns, rows): (Vec<Column>, Vec<Vec<String>>) = match app.panel {
        Panel::Namespaces => (
            namespace_columns(),
            snapshot.namespaces.iter().map(report::namespace).collect(),
        ),
        Panel::Devices => (
            DEVICE.to_vec(),
            snapshot.devices.iter().map(report::device).collect(),
        ),
        Panel::Connections => (
            CONNECTION.to_vec(),
            snapshot
                .connections
                .iter()
                .map(report::connection)
                .collect(),
        ),
        Panel::Paths => (
            PATH.to_vec(),
            snapshot.paths.iter().map(report::path).collect(),
        ),
        Panel::Pools => (
            POOL.to_vec(),
            snapshot.pools.iter().map(report::pool).collect(),
        ),
    };
    app.page = usize::from(area.height.saturating_sub(1)).max(1);
    app.scroll = app.scroll.min(rows.len().saturating_sub(app.page));
    draw_table(frame, area, &columns, &rows, app.scroll, Some(app.sort));
}

fn draw_table(
    frame: &mut Frame,
    area: Rect,
    columns: &[Column],
    rows: &[Vec<String>],
    scroll: usize,
    sort: Option<Sort>,
) {
    if area.height == 0 || area.width == 0 {
        return;
    }
    let mut lines = table(columns, rows, area.width, sort);
    lines.drain(1..=scroll.min(rows.len()));
    frame.render_widget(Paragraph::new(lines), area);
}

/// The header and the rows of a table that is `room` wide.
fn table(
    columns: &[Column],
    rows: &[Vec<String>],
    room: u16,
    sort: Option<Sort>,
) -> Vec<Line<'static>> {
    let widths = fit(columns, rows, room);
    let header = Line::from_iter(widths.iter().map(|&(at, width)| {
        let column = &columns[at];
        let style = Style::new().add_modifier(Modifier::REVERSED);
        let sorted = sort.is_some() && column.sort == sort;
        let style = if sorted {
            style.add_modifier(Modifier::BOLD | Modifier::UNDERLINED)
        } else {
            style
        };
        let title = aligned(&column.title.to_uppercase(), width, column.name);
        Span::styled(format!("{title} "), style)
    }));
    let lines = rows.iter().map(|cells| {
        Line::from_iter(widths.iter().map(|&(at, width)| {
            let (cell, column) = (&cells[at], &columns[at]);
            let bad = column.sort == Some(Sort::Errors) && cell != "0";
            let style = if bad {
                Style::new().fg(Color::Red)
            } else {
                Style::new()
            };
            Span::styled(format!("{} ", aligned(cell, width, column.name)), style)
        }))
    });
    std::iter::once(header).chain(lines).collect()
}

/// Which columns fit, with their widths.
fn fit(columns: &[Column], rows: &[Vec<String>], room: u16) -> Vec<(usize, u16)> {
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    let width = |at: usize| columns[at].width.max(columns[at].title.len() as u16) + 1;
    let needed = |kept: &[usize]| kept.iter().map(|&at| width(at)).sum::<u16>();
    while needed(&kept) > room && kept.len() > 1 {
        // The last of those with the highest rank.
        let least = kept
            .iter()
            .copied()
            .enumerate()
            .max_by_key(|&(place, at)| (columns[at].rank, place));
        kept.remove(least.expect("there are several").0);
    }
    let mut spare = room.saturating_sub(needed(&kept));
    kept.into_iter()
        .map(|at| {
            // A number may be longer than usual, a name as long as it likes: as far as there is
            // room.
            let longest = rows
                .iter()
                .map(|cells| Span::raw(cells[at].as_str()).width())
                .max()
                .unwrap_or(0);
            let least = width(at) - 1;
            let more = u16::try_from(longest)
                .unwrap_or(u16::MAX)
                .saturating_sub(least)
                .min(spare);
            spare -= more;
            (at, (least + more).min(room))
        })
        .collect()
}

/// `text` in exactly `width` columns; longer text loses its beginning, where names are alike.
fn aligned(text: &str, width: u16, left: bool) -> String {
    let width = usize::from(width);
    let mut shown = text.to_owned();
    if Span::raw(text).width() > width {
        let mut rest = text.chars();
        while Span::raw(rest.as_str()).width() >= width.max(1) && rest.next().is_some() {}
        shown = format!("…{}", rest.as_str());
    }
    let pad = " ".repeat(width.saturating_sub(Span::raw(shown.as_str()).width()));
    if left { shown + &pad } else { pad + &shown }
}

fn draw_listeners(frame: &mut Frame, area: Rect, listeners: &[Listener]) {
    // The last line is the gap to the next block.
    let area = Rect {
        height: area.height.saturating_sub(1),
        ..area
    };
    let (shown, more) = cut(listeners, area.height);
    let mut rows: Vec<Vec<String>> = shown.iter().map(report::listener).collect();
    if let Some(more) = more {
        let mut row = vec![String::new(); LISTENER.len()];
        row[0] = more;
        rows.push(row);
    }
    draw_table(frame, area, &LISTENER, &rows, 0, None);
}

/// Returns the items that fit below a header in `height` lines. If not all do, the last line says
/// so.
fn cut<T>(all: &[T], height: u16) -> (&[T], Option<String>) {
    let room = usize::from(height.saturating_sub(1));
    if all.len() <= room {
        return (all, None);
    }
    let shown = &all[..room.saturating_sub(1)];
    (
        shown,
        Some(format!("… and {} more", all.len() - shown.len())),
    )
}

/// The table of the reactors, with each reactor's time as a bar: busy, polling idle, asleep.
fn draw_reactors(frame: &mut Frame, area: Rect, reactors: &[Reactor]) {
    if area.height == 0 {
        return;
    }
    // The table gets the room of its columns; the bar gets the rest.
    let bar = usize::from(area.width).saturating_sub(62).min(50);
    let (shown, more) = cut(reactors, area.height.saturating_sub(1));
    let rows: Vec<Vec<String>> = shown.iter().map(report::reactor).collect();
    let mut lines = table(&REACTOR, &rows, area.width - bar as u16, None);
    let header = Style::new().add_modifier(Modifier::REVERSED);
    lines[0].push_span(Span::styled(" ".repeat(bar), header));
    for (line, reactor) in lines[1..].iter_mut().zip(shown) {
        let Some(share) = reactor.share else {
            continue;
        };
        let busy = (share.busy * bar as f64).round() as usize;
        let awake = ((share.busy + share.idle) * bar as f64).round() as usize;
        let idle = awake.saturating_sub(busy);
        line.push_span(Span::styled(
            "█".repeat(busy),
            Style::new().fg(Color::Green),
        ));
        line.push_span(Span::styled(
            "░".repeat(idle),
            Style::new().fg(Color::Yellow),
        ));
        line.push_span("·".repeat(bar.saturating_sub(awake.max(busy))));
    }
    lines.extend(more.map(Line::raw));
    frame.render_widget(Paragraph::new(lines), area);
}

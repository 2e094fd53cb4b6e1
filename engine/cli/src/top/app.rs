//! The state of the live view of `nacre top`, and the effect of keys on it. Independent of terminal
//! and daemon.

use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::INTERVALS;
use super::poll::{Order, Sample, Update, WATCHED_MAX};
use super::snapshot::{Snapshot, Sort};

pub(super) struct App {
    pub interval: Duration,
    pub sort: Sort,
    pub reverse: bool,
    pub panel: Panel,
    /// The first visible line of the panel. Drawing keeps it in range.
    pub scroll: usize,
    /// Number of visible lines, as last drawn.
    pub page: usize,
    pub paused: bool,
    pub histograms: bool,
    pub link: Link,
    pub snapshot: Option<Snapshot>,
    last: Option<Sample>,
    updated: Instant,
    watched: Vec<String>,
    orders: Vec<Order>,
    /// The last displayed age of the data, in seconds.
    age: Option<u64>,
}

/// The panel in the largest part of the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Panel {
    Namespaces,
    Devices,
    Connections,
    Paths,
    Pools,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Link {
    /// No data yet.
    Waiting,
    Up,
    Gone(String),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Stay,
    Quit,
}

impl App {
    pub(super) fn new(interval: Duration, sort: Sort, reverse: bool, histograms: bool) -> Self {
        Self {
            interval,
            sort,
            reverse,
            panel: Panel::Namespaces,
            scroll: 0,
            page: 1,
            paused: false,
            histograms,
            link: Link::Waiting,
            snapshot: None,
            last: None,
            updated: Instant::now(),
            watched: Vec::new(),
            orders: Vec::new(),
            age: None,
        }
    }

    pub(super) fn on_update(&mut self, update: Update) {
        self.updated = Instant::now();
        match update {
            Update::Gone(why) => {
                self.link = Link::Gone(why);
                // Do not compare the next sample with this one.
                self.last = None;
            }
            Update::Sample(sample) => {
                self.link = Link::Up;
                if !self.paused {
                    let mut snapshot = Snapshot::between(self.last.as_ref(), &sample);
                    snapshot.sort(self.sort, self.reverse);
                    self.snapshot = Some(snapshot);
                    self.watch();
                }
                self.last = Some(*sample);
            }
        }
    }

    pub(super) fn on_key(&mut self, key: KeyEvent) -> Flow {
        let page = self.page.max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return Flow::Quit;
            }
            KeyCode::Char('q') | KeyCode::Esc => return Flow::Quit,
            KeyCode::Tab | KeyCode::Right => self.show(self.panel.next()),
            KeyCode::BackTab | KeyCode::Left => self.show(self.panel.previous()),
            KeyCode::Char('n') => self.sort_by(Sort::Name),
            KeyCode::Char('i') => self.sort_by(Sort::Iops),
            KeyCode::Char('b') => self.sort_by(Sort::Bytes),
            KeyCode::Char('l') => self.sort_by(Sort::Latency),
            KeyCode::Char('p') => self.sort_by(Sort::P99),
            KeyCode::Char('e') => self.sort_by(Sort::Errors),
            KeyCode::Char('r') => {
                self.reverse = !self.reverse;
                self.resort();
            }
            KeyCode::Char('h') => {
                self.histograms = !self.histograms;
                self.orders.push(Order::Histograms(self.histograms));
                self.orders.push(Order::Now);
            }
            KeyCode::Char('+' | '=') => self.pace(self.interval / 2),
            KeyCode::Char('-') => self.pace(self.interval * 2),
            KeyCode::Char(' ') => self.paused = !self.paused,
            KeyCode::Up => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::Down => self.scroll += 1,
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(page),
            KeyCode::PageDown => self.scroll += page,
            KeyCode::Home => self.scroll = 0,
            KeyCode::End => self.scroll = usize::MAX / 2,
            _ => {}
        }
        Flow::Stay
    }

    /// The orders for the poller.
    pub(super) fn orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    /// Seconds since the poller's last update, if the data is out of date.
    pub(super) fn silence(&self) -> Option<u64> {
        let age = self.updated.elapsed();
        (age > self.interval * 3 + Duration::from_secs(2)).then_some(age.as_secs())
    }

    /// True when the displayed age of the data is out of date.
    pub(super) fn grows_old(&mut self) -> bool {
        let age = self.silence();
        let changed = age != self.age;
        self.age = age;
        changed
    }

    fn show(&mut self, panel: Panel) {
        self.panel = panel;
        self.scroll = 0;
    }

    fn sort_by(&mut self, sort: Sort) {
        self.sort = sort;
        self.reverse = false;
        self.resort();
    }

    fn resort(&mut self) {
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.sort(self.sort, self.reverse);
        }
        self.watch();
    }

    fn pace(&mut self, interval: Duration) {
        self.interval = interval.clamp(INTERVALS.0, INTERVALS.1);
        self.orders.push(Order::Interval(self.interval));
    }

    /// Requests percentiles of the devices at the top. While all devices can be queried, the order
    /// does not matter, and the histograms stay enabled.
    fn watch(&mut self) {
        let Some(snapshot) = &self.snapshot else {
            return;
        };
        let mut names = snapshot.bdevs();
        if names.len() > WATCHED_MAX {
            names.drain(..self.scroll.min(names.len() - WATCHED_MAX));
            names.truncate(WATCHED_MAX);
        }
        names.sort();
        if names != self.watched {
            self.watched.clone_from(&names);
            self.orders.push(Order::Watch(names));
        }
    }
}

impl Panel {
    fn next(self) -> Self {
        match self {
            Self::Namespaces => Self::Devices,
            Self::Devices => Self::Connections,
            Self::Connections => Self::Paths,
            Self::Paths => Self::Pools,
            Self::Pools => Self::Namespaces,
        }
    }

    fn previous(self) -> Self {
        self.next().next().next().next()
    }
}

//! The watchdog: reports reactors whose turn takes too long, with the code that blocks it.
//!
//! One thread checks all reactors at intervals of half the shortest limit. It reads the statistics
//! that they publish, which costs them nothing. A sleeping reactor is not stalled. A reactor whose
//! thread is not scheduled appears stalled. The report then contains the time for which the thread
//! waited for a core, if the kernel provides that time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::Nanos;
use crate::core::Shared;
use crate::handle::ReactorHandle;
use crate::stats::{Activity, Stall};

/// Most log lines per reactor and window; further stalls are only counted.
const LINES_PER_WINDOW: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// The checking thread. Dropping this ends the thread.
pub struct Watchdog {
    control: Arc<WatchdogControl>,
    thread: Option<JoinHandle<()>>,
}

struct WatchdogControl {
    state: Mutex<WatchdogState>,
    changed: Condvar,
}

struct WatchdogState {
    stop: bool,
    watched: Vec<Watched>,
}

struct Watched {
    shared: Arc<Shared>,
    limit: Duration,
    /// The last reported turn, and how long it must last for the next report.
    turn: Option<Nanos>,
    report_at: Duration,
    /// A turn that has lasted half the limit, and how long the reactor's thread had waited for a
    /// core by then, since its start. The first half of the turn is not covered, because reading
    /// that time costs a file access.
    suspect: Option<(Nanos, Option<Duration>)>,
    window_began: Nanos,
    lines: u32,
    suppressed: u32,
}

impl Watchdog {
    /// Starts to check `handles` for turns longer than `limit`, or than the reactor's own
    /// `watchdog_limit`.
    pub fn start(handles: Vec<ReactorHandle>, limit: Duration) -> std::io::Result<Self> {
        let watched: Vec<Watched> = handles
            .into_iter()
            .map(|handle| Watched::new(handle, limit))
            .collect();
        let shortest = watched.iter().map(|w| w.limit).min().unwrap_or(limit);
        let period = (shortest / 2).max(Duration::from_millis(1));
        let state = Mutex::new(WatchdogState {
            stop: false,
            watched,
        });
        let control = Arc::new(WatchdogControl {
            state,
            changed: Condvar::new(),
        });
        let theirs = Arc::clone(&control);
        let thread = std::thread::Builder::new()
            .name("nacre-watchdog".to_owned())
            .spawn(move || watch(&theirs, period))?;
        Ok(Self {
            control,
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.control.state.lock().stop = true;
        self.control.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic; a panic would have been printed.
            let _ = thread.join();
        }
    }
}

fn watch(control: &WatchdogControl, period: Duration) {
    let mut state = control.state.lock();
    while !state.stop {
        state.watched.retain_mut(Watched::check);
        let goes_on = |state: &mut WatchdogState| !state.stop;
        control.changed.wait_while_for(&mut state, goes_on, period);
    }
}

impl Watched {
    fn new(handle: ReactorHandle, limit: Duration) -> Self {
        let shared = handle.shared;
        Self {
            limit: shared.watchdog_limit.unwrap_or(limit),
            shared,
            turn: None,
            report_at: limit,
            suspect: None,
            window_began: Nanos::ZERO,
            lines: 0,
            suppressed: 0,
        }
    }

    /// Returns false when the reactor has ended and needs no more checks.
    fn check(&mut self) -> bool {
        let (doing, began) = self.shared.counters.pulse.read();
        if doing == Activity::Ended {
            return false;
        }
        let now = self.shared.clock.now();
        let lasted = now.since(began);
        // The second read: the values belong together only if the turn is still the same.
        let same = self.shared.counters.pulse.read().1 == began;
        if doing == Activity::Asleep || lasted < self.limit / 2 || !same {
            return true;
        }
        if self.suspect.is_none_or(|(turn, _)| turn != began) {
            self.suspect = Some((began, self.waited_for_core()));
        }
        if lasted < self.limit {
            return true;
        }
        if self.turn != Some(began) {
            self.turn = Some(began);
            self.report_at = self.limit;
            self.shared.stalls.fetch_add(1, Ordering::Relaxed);
        }
        let stall = Stall {
            reactor: self.shared.name.clone(),
            culprit: self.shared.directory.describe(doing),
            lasted,
            began,
            waited_for_core: self.waited_since_suspected(),
        };
        if lasted >= self.report_at {
            // A turn that never ends is reported at doubling intervals.
            self.report_at = lasted * 2;
            self.report(&stall, now);
        }
        *self.shared.last_stall.lock() = Some(stall);
        true
    }

    fn report(&mut self, stall: &Stall, now: Nanos) {
        if now.since(self.window_began) >= WINDOW {
            self.window_began = now;
            self.lines = 0;
        }
        if self.lines >= LINES_PER_WINDOW {
            self.suppressed += 1;
            return;
        }
        self.lines += 1;
        let suppressed = std::mem::take(&mut self.suppressed);
        tracing::warn!(
            reactor = %stall.reactor,
            culprit = %stall.culprit,
            lasted = ?stall.lasted,
            limit = ?self.limit,
            waited_for_core = ?stall.waited_for_core,
            suppressed,
            "reactor stalled: its turn takes too long"
        );
    }

    fn waited_since_suspected(&self) -> Option<Duration> {
        let (_, before) = self.suspect?;
        Some(self.waited_for_core()?.saturating_sub(before?))
    }

    /// How long the thread was ready and not running, since its start.
    fn waited_for_core(&self) -> Option<Duration> {
        let tid = self.shared.tid.load(Ordering::Relaxed);
        let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
        text.split_whitespace()
            .nth(1)?
            .parse()
            .ok()
            .map(Duration::from_nanos)
    }
}

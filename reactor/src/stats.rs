//! The published statistics of a reactor. Its own thread writes them with relaxed stores, once per
//! turn; any thread reads them.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::{Mode, Nanos};

/// Identifies a poller on its reactor; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PollerId(pub u64);

/// A reactor's time accounting and work counters since its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReactorStats {
    pub name: String,
    /// The core that the reactor is pinned to.
    pub core: Option<usize>,
    /// Its thread id, as in /proc/self/task.
    pub tid: i32,
    pub mode: Mode,
    pub alive: bool,
    /// True while the reactor sleeps.
    pub sleeping: bool,
    /// Nanoseconds in turns with work, in turns without work (`idle_ns`), and asleep (`sleep_ns`).
    pub busy_ns: u64,
    pub idle_ns: u64,
    pub sleep_ns: u64,
    pub turns: u64,
    pub sleeps: u64,
    /// Sleeps that ended before their deadline.
    pub wakeups: u64,
    /// Yields of an idle reactor during which another thread used the core for 1 ms or longer.
    pub core_taken: u64,
    pub messages: u64,
    pub futures_run: u64,
    pub timers_fired: u64,
    /// Local futures that have not ended, pending timers, and messages in the mailbox.
    pub tasks: usize,
    pub timers: usize,
    pub mailbox_len: usize,
    pub longest_turn_ns: u64,
    /// Turns that the watchdog found too long.
    pub stalls: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PollerStats {
    pub id: PollerId,
    pub name: String,
    pub run_count: u64,
    /// Calls of the poller that found work.
    pub busy_count: u64,
    /// Items of work.
    pub items: u64,
}

/// A turn that took longer than the watchdog's limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stall {
    pub reactor: String,
    /// The code that ran: a poller by name, a message or a future by its source location.
    pub culprit: String,
    /// How long the turn had taken at the last check.
    pub lasted: Duration,
    /// Time when the turn began.
    pub began: Nanos,
    /// Time, at least, for which the thread was ready while the kernel ran something else. If this
    /// is close to `lasted`, another thread on the core is the cause.
    pub waited_for_core: Option<Duration>,
}

/// A counter with one writer, which can use a load and a store instead of a locked instruction.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.set(self.read().wrapping_add(n));
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Counters of a reactor, on their own cache lines (two, for the adjacent-line prefetcher), apart
/// from data that other threads write.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct Counters {
    pub(crate) busy_ns: Counter,
    pub(crate) idle_ns: Counter,
    pub(crate) sleep_ns: Counter,
    pub(crate) turns: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) wakeups: Counter,
    pub(crate) core_taken: Counter,
    pub(crate) messages: Counter,
    pub(crate) futures_run: Counter,
    pub(crate) timers_fired: Counter,
    pub(crate) longest_turn_ns: Counter,
    pub(crate) tasks: AtomicUsize,
    pub(crate) timers: AtomicUsize,
    pub(crate) pulse: CurrentActivity,
}

/// The reactor's current activity, for the watchdog.
#[derive(Default)]
pub(crate) struct CurrentActivity {
    turn_began: AtomicU64,
    doing: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    Housekeeping,
    Asleep,
    Message(LabelId),
    Poller(PollerId),
    Arming(PollerId),
    Future(LabelId),
    Timers,
    Ended,
}

const KIND_SHIFT: u32 = 56;

impl Activity {
    fn encode(self) -> u64 {
        let (kind, index) = match self {
            Self::Housekeeping => (0, 0),
            Self::Asleep => (1, 0),
            Self::Message(label) => (2, u64::from(label.0)),
            Self::Poller(id) => (3, id.0),
            Self::Arming(id) => (4, id.0),
            Self::Future(label) => (5, u64::from(label.0)),
            Self::Timers => (6, 0),
            Self::Ended => (7, 0),
        };
        kind << KIND_SHIFT | index
    }

    fn decode(word: u64) -> Self {
        let index = word & ((1 << KIND_SHIFT) - 1);
        match word >> KIND_SHIFT {
            1 => Self::Asleep,
            2 => Self::Message(LabelId(index as u32)),
            3 => Self::Poller(PollerId(index)),
            4 => Self::Arming(PollerId(index)),
            5 => Self::Future(LabelId(index as u32)),
            6 => Self::Timers,
            7 => Self::Ended,
            _ => Self::Housekeeping,
        }
    }
}

impl CurrentActivity {
    // The release stores order the start of a turn before its work. So a reader that sees the
    // reactor awake also sees the start of this turn, not of the turn before the sleep.

    pub(crate) fn turn(&self, now: Nanos) {
        self.turn_began.store(now.0, Ordering::Release);
        self.now_doing(Activity::Housekeeping);
    }

    pub(crate) fn now_doing(&self, doing: Activity) {
        self.doing.store(doing.encode(), Ordering::Release);
    }

    pub(crate) fn read(&self) -> (Activity, Nanos) {
        let doing = Activity::decode(self.doing.load(Ordering::Acquire));
        (doing, Nanos(self.turn_began.load(Ordering::Acquire)))
    }
}

#[derive(Default)]
pub(crate) struct PollerCounters {
    pub(crate) run_count: Counter,
    pub(crate) busy_count: Counter,
    pub(crate) items: Counter,
}

/// Index of a source location in [`Directory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LabelId(pub(crate) u32);

/// The names of pollers, and the source locations of messages and futures. Locked for additions,
/// removals and queries, not in each turn.
#[derive(Default)]
pub(crate) struct Directory {
    inner: Mutex<DirectoryInner>,
}

#[derive(Default)]
struct DirectoryInner {
    pollers: Vec<(PollerId, String, Arc<PollerCounters>)>,
    labels: Vec<&'static Location<'static>>,
}

impl Directory {
    pub(crate) fn add_poller(&self, id: PollerId, name: &str, counters: &Arc<PollerCounters>) {
        self.inner
            .lock()
            .pollers
            .push((id, name.to_owned(), Arc::clone(counters)));
    }

    pub(crate) fn remove_poller(&self, id: PollerId) {
        self.inner.lock().pollers.retain(|(other, ..)| *other != id);
    }

    /// The number of labels is limited by the number of places in the source that send or spawn.
    pub(crate) fn add_label(&self, location: &'static Location<'static>) -> LabelId {
        let labels = &mut self.inner.lock().labels;
        labels.push(location);
        LabelId(labels.len() as u32 - 1)
    }

    pub(crate) fn pollers(&self) -> Vec<PollerStats> {
        let stats = |(id, name, counters): &(PollerId, String, Arc<PollerCounters>)| PollerStats {
            id: *id,
            name: name.clone(),
            run_count: counters.run_count.read(),
            busy_count: counters.busy_count.read(),
            items: counters.items.read(),
        };
        self.inner.lock().pollers.iter().map(stats).collect()
    }

    pub(crate) fn describe(&self, doing: Activity) -> String {
        match doing {
            Activity::Housekeeping => "the reactor itself".to_owned(),
            Activity::Asleep => "sleep".to_owned(),
            Activity::Message(label) => format!("message sent at {}", self.label(label)),
            Activity::Poller(id) => format!("poller \"{}\"", self.poller_name(id)),
            Activity::Arming(id) => format!("arming of poller \"{}\"", self.poller_name(id)),
            Activity::Future(label) => format!("future spawned at {}", self.label(label)),
            Activity::Timers => "timers".to_owned(),
            Activity::Ended => "nothing (stopped)".to_owned(),
        }
    }

    fn label(&self, label: LabelId) -> String {
        let labels = &self.inner.lock().labels;
        labels
            .get(label.0 as usize)
            .map_or_else(|| "?".to_owned(), |l| l.to_string())
    }

    fn poller_name(&self, id: PollerId) -> String {
        let pollers = &self.inner.lock().pollers;
        let named = pollers.iter().find(|(other, ..)| *other == id);
        named.map_or_else(
            || format!("#{} (removed)", id.0),
            |(_, name, _)| name.clone(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a value that is published as one word reads back unchanged.
    #[test]
    fn doing_round_trips() {
        let label = LabelId(u32::MAX);
        let id = PollerId((1 << KIND_SHIFT) - 1);
        for doing in [
            Activity::Housekeeping,
            Activity::Asleep,
            Activity::Message(label),
            Activity::Poller(id),
            Activity::Arming(id),
            Activity::Future(label),
            Activity::Timers,
            Activity::Ended,
        ] {
            assert_eq!(Activity::decode(doing.encode()), doing);
        }
    }
}

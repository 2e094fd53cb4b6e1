//! Events: a ring buffer, which `notify_get_notifications` returns in SPDK's form, and `events_get`
//! and `events_subscribe` with more details.
//!
//! Limits on bursts apply by type and subject. Frequent events (a flapping link, a drive with bad
//! blocks) have a limit of some per second. Events that a peer can cause at will (a refused
//! connection) have a limit of one per minute. The next event of the same type and subject has the
//! number of suppressed ones. If none follows, the last suppressed event is sent with that number.

mod queue;
mod types;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant, SystemTime};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Notify;

pub use queue::EventQueue;
pub use types::{TYPES, markdown};

/// Number of events in the ring, as in SPDK; older ones are dropped.
pub const KEPT: usize = 1024;

/// Most events of one type and subject within a time; further ones are only counted.
#[derive(Debug, Clone, Copy)]
struct Pace {
    sent: u32,
    within: Duration,
}

const BURST: Pace = Pace {
    sent: 8,
    within: Duration::from_secs(1),
};
/// Rate limit for events that a peer causes.
const REPEAT: Pace = Pace {
    sent: 1,
    within: Duration::from_secs(60),
};

/// The subject area of an event, for filters.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    JsonSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Block devices.
    Device,
    /// Subsystems, namespaces and listeners.
    Target,
    /// Links, and the transport in use.
    Transport,
    /// Replicated volumes as a whole.
    Volume,
    /// Replicas of volumes.
    Replica,
    /// Configured objects, and the success of their restoration.
    State,
}

impl Category {
    pub const ALL: [Self; 6] = [
        Self::Device,
        Self::Target,
        Self::Transport,
        Self::Volume,
        Self::Replica,
        Self::State,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Target => "target",
            Self::Transport => "transport",
            Self::Volume => "volume",
            Self::Replica => "replica",
            Self::State => "state",
        }
    }
}

/// The effect of an event.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Something happened as it should.
    Info,
    /// A degradation without an effect on hosts.
    Warning,
    /// Hosts are affected.
    Error,
}

impl clap::ValueEnum for Severity {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Info, Self::Warning, Self::Error]
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(self.word().into())
    }
}

impl Severity {
    pub fn word(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// An event in SPDK's format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Event {
    #[serde(rename = "type")]
    pub kind: String,
    /// The subject of the event, usually a name.
    pub ctx: String,
    /// Counts from 0 since the daemon's start.
    pub id: u64,
}

/// An event with all its details.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct EventDetails {
    /// Counts from 0 since the daemon's start.
    pub id: u64,
    /// RFC 3339, in UTC.
    pub time: String,
    pub category: Category,
    pub severity: Severity,
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The subject of the event, usually a name.
    pub ctx: String,
    /// A sentence for people.
    pub text: String,
    /// Further facts, by name.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub facts: Value,
    /// Number of equal events that the rate limit left out before this one.
    #[serde(skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// The ring of the latest events, the queues of receivers, and the rate limits.
#[derive(Debug, Default)]
pub struct Notifications {
    ring: RefCell<VecDeque<Rc<EventDetails>>>,
    queues: RefCell<Vec<Weak<EventQueue>>>,
    next: Cell<u64>,
    bursts: RefCell<BTreeMap<RepeatKey, Burst>>,
    more: Notify,
}

/// Events with the same key count as repeats.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RepeatKey {
    kind: &'static str,
    ctx: String,
    /// Distinguishes events of the same kind and subject.
    cause: String,
}

#[derive(Debug)]
struct Burst {
    pace: Pace,
    since: Instant,
    sent: u32,
    left_out: u64,
    /// Text and facts of the latest suppressed event.
    last: Option<(String, Value)>,
}

impl Notifications {
    /// Sends an event that needs no text beyond its type and subject.
    ///
    /// # Panics
    /// If `kind` is not one of [`TYPES`], from which clients learn the types.
    pub fn send(&self, kind: &'static str, ctx: impl Into<String>) {
        let ctx = ctx.into();
        let text = format!("{}: {ctx}", kind.replace('_', " "));
        self.report(kind, ctx, text, Value::Null);
    }

    /// Sends an event with a text and facts.
    ///
    /// # Panics
    /// As for [`Notifications::send`].
    pub fn report(&self, kind: &'static str, ctx: String, text: String, facts: Value) {
        let cause = String::new();
        let key = RepeatKey { kind, ctx, cause };
        let category = known(kind).1;
        let pace = match category {
            Category::Transport | Category::Replica => Some(BURST),
            Category::Device if kind.starts_with("nvme_") => Some(BURST),
            // Other events result from management calls.
            _ => None,
        };
        self.report_at(key, pace, (text, facts), Instant::now());
    }

    /// Sends an event that a peer can cause at will: one per minute with the same type, subject and
    /// `cause`.
    ///
    /// # Panics
    /// As for [`Notifications::send`].
    pub fn report_repeating(
        &self,
        kind: &'static str,
        (ctx, cause): (String, String),
        text: String,
        facts: Value,
    ) {
        let key = RepeatKey { kind, ctx, cause };
        self.report_at(key, Some(REPEAT), (text, facts), Instant::now());
    }

    /// Sends the last suppressed event of each burst that is over. Call it periodically.
    pub fn report_left_out(&self) {
        self.report_left_out_at(Instant::now());
    }

    fn report_left_out_at(&self, now: Instant) {
        let mut over = Vec::new();
        for (key, burst) in &mut *self.bursts.borrow_mut() {
            if now.duration_since(burst.since) >= burst.pace.within
                && let Some(last) = burst.last.take()
            {
                let left_out = std::mem::take(&mut burst.left_out) - 1;
                (burst.since, burst.sent) = (now, 1);
                over.push((key.clone(), last, left_out));
            }
        }
        for (key, last, left_out) in over {
            self.push(key, last, left_out);
        }
    }

    fn report_at(&self, key: RepeatKey, pace: Option<Pace>, said: (String, Value), now: Instant) {
        let left_out = match pace {
            Some(pace) => match self.admit(&key, pace, now) {
                Some(left_out) => left_out,
                None => {
                    if let Some(burst) = self.bursts.borrow_mut().get_mut(&key) {
                        burst.last = Some(said);
                    }
                    return;
                }
            },
            None => 0,
        };
        self.push(key, said, left_out);
    }

    fn push(&self, key: RepeatKey, (text, facts): (String, Value), left_out: u64) {
        let (kind, category, severity) = known(key.kind);
        let mut ring = self.ring.borrow_mut();
        if ring.len() == KEPT {
            ring.pop_front();
        }
        let id = self.next.get();
        self.next.set(id + 1);
        let event = Rc::new(EventDetails {
            id,
            time: humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            category,
            severity,
            kind,
            ctx: key.ctx,
            text,
            facts,
            left_out,
        });
        ring.push_back(Rc::clone(&event));
        drop(ring);
        self.queues.borrow_mut().retain(|queue| {
            let queue = queue.upgrade();
            queue.inspect(|queue| queue.offer(&event)).is_some()
        });
        self.more.notify_waiters();
    }

    /// Adds events from now on to the queue, for as long as it exists.
    pub fn attach(&self, queue: &Rc<EventQueue>) {
        self.queues.borrow_mut().push(Rc::downgrade(queue));
    }

    /// As [`Notifications::attach`], and also adds the events in the ring.
    pub fn attach_with_kept(&self, queue: &Rc<EventQueue>) {
        self.ring
            .borrow()
            .iter()
            .for_each(|event| queue.offer(event));
        self.attach(queue);
    }

    /// The number of suppressed events before this one. `None`: this one is suppressed too.
    fn admit(&self, key: &RepeatKey, pace: Pace, now: Instant) -> Option<u64> {
        let mut bursts = self.bursts.borrow_mut();
        // Forget quiet keys, so that the map holds at most those of the last minute.
        bursts.retain(|_, burst| {
            burst.left_out > 0 || now.duration_since(burst.since) < burst.pace.within
        });
        if bursts.len() >= KEPT {
            bursts.clear();
        }
        let burst = bursts.entry(key.clone()).or_insert_with(|| Burst {
            pace,
            since: now,
            sent: 0,
            left_out: 0,
            last: None,
        });
        if now.duration_since(burst.since) >= pace.within {
            (burst.since, burst.sent) = (now, 0);
        }
        if burst.sent >= pace.sent {
            burst.left_out += 1;
            return None;
        }
        burst.sent += 1;
        burst.last = None;
        Some(std::mem::take(&mut burst.left_out))
    }

    /// Returns at most `max` events from id `from`, oldest first.
    pub fn since(&self, from: u64, max: u64) -> Vec<Event> {
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        let ring = self.ring.borrow();
        let event = |details: &Rc<EventDetails>| Event {
            kind: details.kind.to_owned(),
            ctx: details.ctx.clone(),
            id: details.id,
        };
        ring.iter()
            .filter(|e| e.id >= from)
            .take(max)
            .map(event)
            .collect()
    }

    /// Returns at most `max` events from id `from` for which `wanted` is true, oldest first.
    pub fn after(
        &self,
        from: u64,
        max: usize,
        wanted: impl Fn(&EventDetails) -> bool,
    ) -> Vec<EventDetails> {
        let ring = self.ring.borrow();
        let ours = ring.iter().filter(|e| e.id >= from && wanted(e));
        ours.take(max).map(|event| (**event).clone()).collect()
    }

    /// The id of the next event.
    pub fn next(&self) -> u64 {
        self.next.get()
    }

    /// The oldest id in the ring; the next id if the ring is empty.
    pub fn oldest(&self) -> u64 {
        self.ring
            .borrow()
            .front()
            .map_or_else(|| self.next.get(), |e| e.id)
    }

    /// Resolves with the next event after this call, not after the first poll.
    pub fn more(&self) -> impl Future<Output = ()> + '_ {
        self.more.notified()
    }
}

/// # Panics
/// When `kind` is not one of [`TYPES`].
pub fn severity(kind: &str) -> Severity {
    known(kind).2
}

/// # Panics
/// When `kind` is not one of [`TYPES`].
fn known(kind: &str) -> (&'static str, Category, Severity) {
    let known = TYPES.iter().find(|(name, ..)| *name == kind);
    let (kind, category, severity, _) =
        *known.unwrap_or_else(|| panic!("unknown event type {kind}"));
    (kind, category, severity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_drops_the_oldest() {
        let notes = Notifications::default();
        for n in 0..KEPT + 3 {
            notes.send("bdev_register", format!("b{n}"));
        }
        let all = notes.since(0, u64::MAX);
        assert_eq!((all.len(), all[0].id), (KEPT, 3));
        assert_eq!((notes.oldest(), notes.next()), (3, KEPT as u64 + 3));
        let some = notes.since(KEPT as u64, 2);
        assert_eq!(some.iter().map(|e| e.id).collect::<Vec<_>>(), [1024, 1025]);
        assert!(notes.since(u64::MAX, 5).is_empty());
    }

    /// Goal: a burst is reported in part, with its size; another subject is not limited by it.
    #[test]
    fn bursts_are_limited_and_counted() {
        let notes = Notifications::default();
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let sent = |ctx: &str, ms: u64| {
            let key = RepeatKey {
                kind: "replica_read_repair",
                ctx: ctx.to_owned(),
                cause: String::new(),
            };
            notes.admit(&key, BURST, at(ms))
        };
        let first: Vec<_> = (0..12).map(|_| sent("v", 0)).collect();
        assert_eq!(
            first.iter().filter(|t| t.is_some()).count(),
            BURST.sent as usize
        );
        assert_eq!(sent("w", 1), Some(0));
        assert_eq!(sent("v", 999), None);
        assert_eq!(sent("v", 1000), Some(5));
        assert_eq!(sent("v", 1001), Some(0));
        sent("x", 10_000);
        assert_eq!(notes.bursts.borrow().len(), 1, "other bursts are over");
    }

    /// Goal: a host that is refused twice a second does not displace all other events. The number
    /// of refusals is reported, at the latest after it gave up. Another cause is reported at once.
    #[test]
    fn repeated_peer_events_are_reported_once_a_minute() {
        let notes = Notifications::default();
        let start = Instant::now();
        let refused = |cause: &str, ms: u64| {
            let key = RepeatKey {
                kind: "rdma_refused",
                ctx: "10.0.0.2".into(),
                cause: cause.into(),
            };
            let said = (format!("{cause} at {ms}"), Value::Null);
            notes.report_at(key, Some(REPEAT), said, start + Duration::from_millis(ms));
        };
        for n in 0..48 {
            refused("no resources", n * 500);
        }
        refused("too deep", 24_000);
        let left_out = || {
            let sent = notes.after(0, KEPT, |_| true);
            sent.iter()
                .map(|e| (e.text.clone(), e.left_out))
                .collect::<Vec<_>>()
        };
        let said = |text: &str, left_out| (text.to_owned(), left_out);
        assert_eq!(
            left_out(),
            [said("no resources at 0", 0), said("too deep at 24000", 0)]
        );
        notes.report_left_out_at(start + Duration::from_secs(59));
        assert_eq!(left_out().len(), 2);
        notes.report_left_out_at(start + Duration::from_secs(60));
        assert_eq!(left_out()[2..], [said("no resources at 23500", 46)]);
        notes.report_left_out_at(start + Duration::from_secs(600));
        assert_eq!(left_out().len(), 3, "all repeats are reported");
    }

    #[test]
    fn types_are_named_once_and_categories_as_they_are_written() {
        let mut names: Vec<&str> = TYPES.iter().map(|(name, ..)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TYPES.len());
        for category in Category::ALL {
            assert_eq!(serde_json::json!(category), category.word());
        }
    }
}

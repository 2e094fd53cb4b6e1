//! Alerts: messages about events to the receivers of `[alert]`.
//!
//! ```text
//!   Notifications (ring) ──▶ one task per receiver ─▶ gather ─▶ send ─▶ again after a pause
//!                             │ severity, category      │
//!                             └ silences                └ at most EVENTS_PER_MESSAGE
//! ```
//!
//! A receiver has a place in the ring of events and no queue of its own: while it cannot be
//! reached, older events leave the ring, and the next message has their number. Everything is
//! asynchronous or on helper threads, so a receiver that hangs delays only itself.

mod send;
mod silences;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use nacre_engine_alerts::{Event, Failure, Message, Retry};
use serde_json::json;
use tokio::task::AbortHandle;
use tracing::{info, warn};
use uuid::Uuid;

use crate::config::alert::{AlertReceiver, AlertSettings};
use crate::notify::EventDetails;
use crate::services::engine::Engine;

pub use silences::{Silence, Silences};

const EVENTS_PER_MESSAGE: usize = 100;
/// Failed attempts in a row after which other receivers get an event about it.
const REPORT_AFTER: u32 = 4;
/// Longest summary in characters: mail programs show about as many.
const SUMMARY: usize = 150;

/// Time limits of deliveries. A receiver's setting limits the age of a message.
#[derive(Debug, Clone, Copy)]
pub struct DeliveryPace {
    pub attempt: Duration,
    pub first_pause: Duration,
    pub longest_pause: Duration,
}

impl Default for DeliveryPace {
    fn default() -> Self {
        Self {
            attempt: Duration::from_secs(20),
            first_pause: Duration::from_secs(5),
            longest_pause: Duration::from_secs(300),
        }
    }
}

#[derive(Debug, Default)]
pub struct Alerts {
    pub silences: Silences,
    running: RefCell<Vec<Rc<AlertTask>>>,
    pace: Cell<DeliveryPace>,
}

/// A receiver and the task that sends to it.
#[derive(Debug)]
pub struct AlertTask {
    pub receiver: AlertReceiver,
    state: RefCell<DeliveryState>,
    task: RefCell<Option<AbortHandle>>,
}

/// How the deliveries to a receiver go.
#[derive(Debug, Clone, Default)]
pub struct DeliveryState {
    /// The first event that was neither sent, given up nor passed over.
    next: u64,
    /// Events that left the ring before they were examined, since the last message.
    lost: u64,
    /// Messages since the daemon's start.
    pub delivered: u64,
    pub dropped: u64,
    pub last_delivery: Option<SystemTime>,
    /// The latest failure, while attempts fail.
    pub error: Option<String>,
    pub failing_since: Option<SystemTime>,
    failures: u32,
    is_reported: bool,
}

/// The events of one message.
struct Batch {
    /// Oldest first.
    events: Vec<EventDetails>,
    /// Number of events that left the ring before they could be sent.
    lost: u64,
    /// The event to continue with.
    next: u64,
}

impl Alerts {
    /// Sends to these receivers from now on. Unchanged ones continue; a changed one continues with
    /// the event after its last message; a new one gets the events that the daemon still has.
    pub fn declare(&self, engine: &Rc<Engine>, settings: &AlertSettings) {
        let mut old = self.running.take();
        let mut running = Vec::new();
        for receiver in settings.receivers() {
            let same = old.iter().position(|old| old.receiver == receiver);
            if let Some(same) = same {
                running.push(old.swap_remove(same));
                continue;
            }
            let former = old
                .iter()
                .find(|old| old.receiver.name() == receiver.name());
            let next = former.map_or(0, |former| former.state.borrow().next);
            running.push(AlertTask::start(engine, receiver, next));
        }
        for gone in old {
            gone.stop();
        }
        self.running.replace(running);
    }

    pub fn receivers(&self) -> Vec<Rc<AlertTask>> {
        self.running.borrow().clone()
    }

    pub fn set_pace(&self, pace: DeliveryPace) {
        self.pace.set(pace);
    }

    /// Sends a test message, once.
    pub async fn test(&self, receiver: &AlertReceiver) -> Result<(), Failure> {
        let node = node();
        let text = format!("nacre on {node}: test message");
        let message = message("test", (node, text), Vec::new(), 0);
        send::once(receiver, &message, self.pace.get().attempt).await
    }
}

impl AlertTask {
    fn start(engine: &Rc<Engine>, receiver: AlertReceiver, next: u64) -> Rc<Self> {
        let state = DeliveryState {
            next,
            ..DeliveryState::default()
        };
        let running = Rc::new(Self {
            receiver,
            state: RefCell::new(state),
            task: RefCell::default(),
        });
        let following = follow(Rc::clone(engine), Rc::clone(&running));
        let task = tokio::task::spawn_local(following).abort_handle();
        running.task.replace(Some(task));
        running
    }

    fn stop(&self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }

    pub fn state(&self) -> DeliveryState {
        self.state.borrow().clone()
    }

    /// Number of events that wait to be sent.
    pub fn pending(&self, engine: &Engine) -> usize {
        let next = self.state.borrow().next;
        let wanted = |event: &EventDetails| self.wants(engine, event);
        engine.notes.after(next, usize::MAX, wanted).len()
    }

    fn wants(&self, engine: &Engine, event: &EventDetails) -> bool {
        // A receiver that fails is not told so.
        let is_own = event.kind.starts_with("alert_") && event.ctx == self.receiver.name();
        self.receiver.selection().takes(event)
            && !is_own
            && !engine.alerts.silences.cover(event, Instant::now())
    }

    /// Passes over events that are not wanted. True if no other events remain.
    fn skip(&self, engine: &Engine) -> bool {
        let notes = &engine.notes;
        let state = &mut *self.state.borrow_mut();
        state.lost += notes.oldest().saturating_sub(state.next);
        let wanted = notes.after(state.next, 1, |event| self.wants(engine, event));
        state.next = wanted
            .first()
            .map_or_else(|| notes.next(), |event| event.id);
        wanted.is_empty()
    }

    /// The next events to send.
    fn batch(&self, engine: &Engine) -> Option<Batch> {
        let notes = &engine.notes;
        let state = &*self.state.borrow();
        let wanted = |event: &EventDetails| self.wants(engine, event);
        let events = notes.after(state.next, EVENTS_PER_MESSAGE, wanted);
        let next = match events.last() {
            Some(last) if events.len() == EVENTS_PER_MESSAGE => last.id + 1,
            _ => notes.next(),
        };
        // Events that left the ring while others were gathered.
        let lost = state.lost + notes.oldest().saturating_sub(state.next);
        (!events.is_empty()).then_some(Batch { events, lost, next })
    }

    async fn deliver(&self, engine: &Engine, message: &Message) {
        let pace = engine.alerts.pace.get();
        let retry = Retry {
            first: pace.first_pause,
            longest: pace.longest_pause,
            give_up: Duration::from_secs(self.receiver.selection().retry_for_s),
        };
        let begun = Instant::now();
        for attempt in 1.. {
            let failure = match send::once(&self.receiver, message, pace.attempt).await {
                Ok(()) => return self.succeeded(engine),
                Err(failure) => failure,
            };
            let pause = if failure.is_final() {
                None
            } else {
                retry.pause(attempt, begun.elapsed(), failure.retry_after())
            };
            self.failed(engine, &failure, pause.is_none());
            match pause {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return,
            }
        }
    }

    fn succeeded(&self, engine: &Engine) {
        let state = &mut *self.state.borrow_mut();
        state.delivered += 1;
        state.last_delivery = Some(SystemTime::now());
        state.failures = 0;
        state.error = None;
        if state.failing_since.take().is_some() {
            info!(
                receiver = self.receiver.name(),
                "alerts are delivered again"
            );
        }
        if std::mem::take(&mut state.is_reported) {
            let name = self.receiver.name();
            let text = format!("alerts to \"{name}\" are delivered again");
            engine
                .notes
                .report("alert_recovered", name.to_owned(), text, json!(null));
        }
    }

    fn failed(&self, engine: &Engine, failure: &Failure, is_dropped: bool) {
        let (name, cause) = (self.receiver.name(), failure.to_string());
        let state = &mut *self.state.borrow_mut();
        if state.failing_since.is_none() || is_dropped {
            let outcome = if is_dropped { "dropped" } else { "tried again" };
            warn!(
                receiver = name,
                error = cause,
                "an alert was not delivered; it is {outcome}"
            );
        }
        state.failing_since.get_or_insert_with(SystemTime::now);
        state.failures = state.failures.saturating_add(1);
        state.dropped += u64::from(is_dropped);
        if (is_dropped || state.failures >= REPORT_AFTER) && !state.is_reported {
            state.is_reported = true;
            let text = format!("alerts to \"{name}\" are not delivered: {cause}");
            let facts = json!({ "error": cause });
            engine
                .notes
                .report("alert_failed", name.to_owned(), text, facts);
        }
        state.error = Some(cause);
    }
}

/// Sends events to a receiver until the task is aborted.
async fn follow(engine: Rc<Engine>, running: Rc<AlertTask>) {
    let gather = Duration::from_secs(running.receiver.selection().gather_s);
    loop {
        let more = engine.notes.more();
        if running.skip(&engine) {
            more.await;
            continue;
        }
        tokio::time::sleep(gather).await;
        if let Some(batch) = running.batch(&engine) {
            let message = about(&batch.events, batch.lost);
            running.deliver(&engine, &message).await;
            let state = &mut *running.state.borrow_mut();
            (state.next, state.lost) = (batch.next, 0);
        }
    }
}

/// The message about these events.
fn about(events: &[EventDetails], lost: u64) -> Message {
    let node = node();
    // The first of the most severe ones.
    let worst = events.iter().rev().max_by_key(|event| event.severity);
    let text = match worst {
        Some(event) => {
            let others = match events.len() - 1 {
                0 => String::new(),
                n => format!(" (and {n} more)"),
            };
            let said: String = event.text.chars().take(SUMMARY).collect();
            format!("nacre on {node}: {}: {said}{others}", event.severity.word())
        }
        None => String::new(),
    };
    let events = events.iter().map(|event| Event {
        id: event.id,
        time: event.time.clone(),
        category: event.category.word(),
        severity: event.severity.word(),
        kind: event.kind,
        ctx: event.ctx.clone(),
        text: event.text.clone(),
        facts: event.facts.clone(),
        left_out: event.left_out,
    });
    message("events", (node, text), events.collect(), lost)
}

fn message(
    kind: &'static str,
    (node, text): (String, String),
    events: Vec<Event>,
    lost: u64,
) -> Message {
    Message {
        id: Uuid::new_v4().to_string(),
        kind,
        timestamp: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        node,
        // A line: it becomes the subject of a mail.
        text: text.replace(char::is_control, " "),
        events,
        lost,
    }
}

fn node() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;

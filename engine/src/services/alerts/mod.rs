//! Alerts: messages about events to receivers, which are configured in `[alert]` or added by calls.
//!
//! ```text
//!   Notifications ──▶ EventQueue of a receiver ──▶ gather ─▶ send ─▶ again after a pause
//!                      │ severity, category         │
//!                      └ silences                   └ at most EVENTS_PER_MESSAGE
//! ```
//!
//! While a receiver cannot be reached, its events wait in its queue. The next message has the
//! number of lost events: those that were given up, or did not fit into the queue. Deliveries run
//! as tasks and on helper threads, so a receiver that hangs delays only itself.

mod send;
mod silences;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nacre_engine_alerts::{Event, Failure, Message, Progress, Retry, one_line};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tracing::{info, warn};
use uuid::Uuid;

use crate::config::alert::{AlertReceiver, AlertSettings};
use crate::notify::{EventDetails, EventQueue};
use crate::services::Engine;
use crate::services::machine::host_name;

pub use silences::{Silence, Silences};

const EVENTS_PER_MESSAGE: usize = 100;
/// Failed attempts in a row after which `alert_failed` is reported to the other receivers.
const REPORT_AFTER: u32 = 4;
/// Most characters of a summary; mail programs show about as many.
const SUMMARY: usize = 150;

/// Time limit of an attempt, and the pauses between attempts. The receiver's `retry_for_s` limits
/// the time after which a message is given up.
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

/// Prefix of the journal keys of receivers.
pub const PREFIX: &str = "alert/";

#[derive(Debug, Default)]
pub struct Alerts {
    pub silences: Rc<Silences>,
    /// The receivers of the configuration file.
    declared: RefCell<Vec<AlertReceiver>>,
    /// The receivers that calls have added. They replace declared ones with the same name.
    added: RefCell<Vec<AlertReceiver>>,
    /// `None` before the daemon has started its receivers.
    running: RefCell<Option<Vec<Rc<AlertTask>>>>,
    pace: Cell<DeliveryPace>,
}

/// A receiver and the task that sends to it.
#[derive(Debug)]
pub struct AlertTask {
    pub receiver: AlertReceiver,
    queue: Rc<EventQueue>,
    state: RefCell<DeliveryState>,
    /// Allows one helper thread at a time. A receiver that is changed keeps the permit of its
    /// former task.
    permit: Arc<Semaphore>,
    task: RefCell<Option<AbortHandle>>,
}

/// Counts and errors of the deliveries to a receiver.
#[derive(Debug, Clone, Default)]
pub struct DeliveryState {
    /// Delivered messages.
    pub delivered: u64,
    pub dropped: u64,
    pub failed_attempts: u64,
    pub last_delivery: Option<SystemTime>,
    /// The latest failure; `None` after a successful delivery.
    pub error: Option<String>,
    pub failing_since: Option<SystemTime>,
    failures: u32,
    is_reported: bool,
}

impl Alerts {
    /// Replaces the receivers of the configuration file, and starts their tasks.
    pub fn declare(&self, engine: &Rc<Engine>, settings: &AlertSettings) {
        self.declared.replace(settings.receivers());
        self.update(engine);
    }

    /// Adds a receiver by call, or replaces the added one of this name.
    pub fn add(&self, engine: &Rc<Engine>, receiver: AlertReceiver) {
        let mut added = self.added.borrow_mut();
        match added.iter_mut().find(|one| one.name() == receiver.name()) {
            Some(former) => *former = receiver,
            None => added.push(receiver),
        }
        drop(added);
        self.update(engine);
    }

    /// Removes an added receiver. Its waiting events are lost.
    pub fn remove(&self, engine: &Rc<Engine>, name: &str) {
        self.added.borrow_mut().retain(|one| one.name() != name);
        self.update(engine);
    }

    /// True if a call has added a receiver of this name.
    pub fn is_added(&self, name: &str) -> bool {
        self.added.borrow().iter().any(|one| one.name() == name)
    }

    /// Number of receivers that calls have added.
    pub fn added(&self) -> usize {
        self.added.borrow().len()
    }

    /// True if the configuration file has a receiver of this name.
    pub fn is_declared(&self, name: &str) -> bool {
        self.declared.borrow().iter().any(|one| one.name() == name)
    }

    /// Starts and stops tasks. Unchanged receivers continue. A changed receiver keeps its waiting
    /// events and its state. A new one gets later events; at the daemon's start also the stored
    /// ones.
    fn update(&self, engine: &Rc<Engine>) {
        let old = self.running.take();
        let is_start = old.is_none() || crate::journal::is_replaying();
        let mut old = old.unwrap_or_default();
        let mut running = Vec::new();
        let mut wanted = self.declared.borrow().clone();
        wanted.retain(|one| !self.is_added(one.name()));
        wanted.extend(self.added.borrow().iter().cloned());
        for receiver in wanted {
            let former = old
                .iter()
                .position(|old| old.receiver.name() == receiver.name());
            let former = former.map(|former| old.swap_remove(former));
            if let Some(same) = former.as_ref().filter(|old| old.receiver == receiver) {
                running.push(Rc::clone(same));
                continue;
            }
            let task = Rc::new(AlertTask::new(engine, receiver, former.as_deref()));
            if is_start && former.is_none() {
                engine.notes.attach_with_kept(&task.queue);
            } else {
                engine.notes.attach(&task.queue);
            }
            if let Some(former) = former {
                former.stop();
            }
            task.start(engine);
            running.push(task);
        }
        for gone in old {
            gone.stop();
        }
        self.running.replace(Some(running));
    }

    pub fn receivers(&self) -> Vec<Rc<AlertTask>> {
        self.running.borrow().clone().unwrap_or_default()
    }

    pub fn set_pace(&self, pace: DeliveryPace) {
        self.pace.set(pace);
    }

    /// Sends a test message, with one attempt.
    pub async fn test(&self, engine: &Engine, task: &AlertTask) -> Result<(), Failure> {
        let node = node();
        let text = format!("nacre on {node}: test message");
        let message = message("test", (node, text), Vec::new(), 0);
        let to = (&task.receiver, &task.permit);
        let limit = self.pace.get().attempt;
        send::once(
            to,
            &engine.keyring,
            &message,
            &mut Progress::default(),
            limit,
        )
        .await
    }
}

impl AlertTask {
    fn new(engine: &Engine, receiver: AlertReceiver, former: Option<&Self>) -> Self {
        let (selecting, silences) = (receiver.clone(), Rc::clone(&engine.alerts.silences));
        let queue = EventQueue::new(move |event| {
            // A receiver that fails gets no event about that.
            let is_own = event.kind.starts_with("alert_") && event.ctx == selecting.name();
            selecting.selection().takes(event) && !is_own && !silences.cover(event, Instant::now())
        });
        if let Some(former) = former {
            queue.inherit(&former.queue, |event| receiver.selection().takes(event));
        }
        Self {
            receiver,
            queue: Rc::new(queue),
            state: RefCell::new(former.map(Self::state).unwrap_or_default()),
            permit: former.map_or_else(
                || Arc::new(Semaphore::new(1)),
                |former| Arc::clone(&former.permit),
            ),
            task: RefCell::default(),
        }
    }

    fn start(self: &Rc<Self>, engine: &Rc<Engine>) {
        let following = follow(Rc::clone(engine), Rc::clone(self));
        let task = tokio::task::spawn_local(following).abort_handle();
        self.task.replace(Some(task));
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
    pub fn pending(&self) -> usize {
        self.queue.len()
    }

    /// Sends the message until it is delivered or given up. True if at least one recipient has it.
    async fn deliver(&self, engine: &Engine, message: &Message) -> bool {
        let pace = engine.alerts.pace.get();
        let retry = Retry {
            first: pace.first_pause,
            longest: pace.longest_pause,
            give_up: Duration::from_secs(self.receiver.selection().retry_for_s),
        };
        let (begun, to) = (Instant::now(), (&self.receiver, &self.permit));
        let mut progress = Progress::default();
        for attempt in 1.. {
            let sending = send::once(to, &engine.keyring, message, &mut progress, pace.attempt);
            let failure = match sending.await {
                Ok(()) => {
                    self.succeeded(engine);
                    return true;
                }
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
                None => break,
            }
        }
        progress.is_partial()
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
        let (name, cause) = (self.receiver.name(), failure.cause());
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
        state.failed_attempts += 1;
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
async fn follow(engine: Rc<Engine>, task: Rc<AlertTask>) {
    let gather = Duration::from_secs(task.receiver.selection().gather_s);
    let queue = &task.queue;
    loop {
        queue.filled().await;
        tokio::time::sleep(gather).await;
        let (events, lost) = (queue.begin(EVENTS_PER_MESSAGE), queue.lost());
        if task.deliver(&engine, &about(&events, lost)).await {
            queue.finish(lost);
        } else {
            queue.give_up();
        }
    }
}

/// Makes a message of these events. `lost`: number of lost events before them.
fn about(events: &[Rc<EventDetails>], lost: u64) -> Message {
    let node = node();
    // The first of the most severe ones.
    let worst = events.iter().rev().max_by_key(|event| event.severity);
    let text = match worst {
        Some(event) => {
            let others = match events.len() - 1 {
                0 => String::new(),
                n => format!(" (and {n} more)"),
            };
            let said = one_line(&event.text, SUMMARY);
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
        text,
        events,
        lost,
    }
}

fn node() -> String {
    one_line(&host_name(), 64)
}

#[cfg(test)]
mod tests;

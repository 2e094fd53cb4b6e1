//! Live data by server-sent events: one sample each tick (1 s) for all streams, none without a
//! stream. A stream ends with its session or API token, or when its client reads too slowly.

use std::cell::{Cell, RefCell};
use std::fmt::Write as _;
use std::rc::Rc;
use std::time::Duration;

use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::logins::{Logins, SignedIn, now_ms};

pub const MAX_STREAMS: usize = 32;
/// Most unsent messages of a stream; a stream with more ends.
const MAX_BEHIND: usize = 32;
/// Number of ticks between heartbeats.
const HEARTBEAT: u32 = 15;
/// The delay before the browser reconnects, in milliseconds.
const RETRY: &str = "retry: 2000\n\n";

/// The source of live data.
pub trait Source: 'static {
    fn phase(&self) -> &'static str;

    /// Called with true when the first stream opens, and with false when the last one has ended.
    fn watch(&self, watched: bool);

    /// The metrics since the last call. `None`: there is no earlier sample.
    fn metrics(&self) -> impl Future<Output = Option<Value>>;

    /// The id of the next event.
    fn next_event(&self) -> u64;

    /// The stored events with ids from `from` to before `before`, with their JSON.
    fn events(&self, from: u64, before: u64) -> Vec<(u64, String)>;

    /// The kinds of objects that may have changed since the last call.
    fn take_changed(&self) -> Vec<&'static str>;
}

#[derive(Debug)]
struct Stream {
    sender: mpsc::Sender<Bytes>,
    of: SignedIn,
}

#[derive(Debug)]
pub struct Live<S> {
    source: Rc<S>,
    logins: Rc<Logins>,
    tick: Duration,
    streams: RefCell<Vec<Stream>>,
    running: Cell<bool>,
    /// The id of the first event that was not sent to the streams.
    next_event: Cell<u64>,
}

impl<S: Source> Live<S> {
    pub fn new(source: Rc<S>, logins: Rc<Logins>, tick: Duration) -> Rc<Self> {
        Rc::new(Self {
            source,
            logins,
            tick,
            streams: RefCell::default(),
            running: Cell::new(false),
            next_event: Cell::new(0),
        })
    }

    /// Number of open streams.
    pub fn streams(&self) -> usize {
        self.streams.borrow().len()
    }

    /// Opens a stream. `None`: [`MAX_STREAMS`] are open. `last`: id of the last event that the
    /// client has.
    pub fn open(self: &Rc<Self>, of: SignedIn, last: Option<u64>) -> Option<mpsc::Receiver<Bytes>> {
        let mut streams = self.streams.borrow_mut();
        streams.retain(|stream| !stream.sender.is_closed());
        if streams.len() >= MAX_STREAMS {
            return None;
        }
        if !self.running.get() {
            self.next_event.set(self.source.next_event());
        }
        let (sender, receiver) = mpsc::channel(MAX_BEHIND);
        let mut first = format!("{RETRY}{}", self.snapshot());
        if let Some(last) = last {
            let next = self.next_event.get();
            // An id beyond the next one is of an earlier daemon: all stored events are new.
            let from = match last.checked_add(1) {
                Some(from) if from <= next => from,
                _ => 0,
            };
            self.add_events(&mut first, from, next);
        }
        // The channel is empty.
        let _ = sender.try_send(first.into());
        streams.push(Stream { sender, of });
        if !self.running.replace(true) {
            tokio::task::spawn_local(Rc::clone(self).run());
        }
        Some(receiver)
    }

    async fn run(self: Rc<Self>) {
        self.source.watch(true);
        // Changes before the first stream need not be reported.
        self.source.take_changed();
        let mut phase = self.source.phase();
        let mut ticks = interval(self.tick);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for tick in 1_u32.. {
            ticks.tick().await;
            if !self.has_streams() {
                break;
            }
            let mut text = String::new();
            if self.source.phase() != phase {
                phase = self.source.phase();
                text.push_str(&self.snapshot());
            }
            let next = self.source.next_event();
            self.add_events(&mut text, self.next_event.replace(next), next);
            let changed = self.source.take_changed();
            if !changed.is_empty() {
                add(&mut text, "changed", &json!({ "kinds": changed }));
            }
            // A data plane that hangs must not stop the stream.
            let metrics = timeout(5 * self.tick, self.source.metrics()).await;
            if let Ok(Some(metrics)) = metrics {
                add(&mut text, "metrics", &metrics);
            }
            if tick.is_multiple_of(HEARTBEAT) {
                text.push_str(":\n\n");
            }
            if !text.is_empty() {
                self.send(&text.into());
            }
        }
        self.running.set(false);
        self.source.watch(false);
    }

    /// Ends streams whose client, session or API token is gone. False: no stream is left.
    fn has_streams(&self) -> bool {
        let mut streams = self.streams.borrow_mut();
        streams.retain(|stream| !stream.sender.is_closed() && self.logins.is_valid(&stream.of));
        !streams.is_empty()
    }

    /// Sends to all streams, and ends those with too many unsent messages.
    fn send(&self, bytes: &Bytes) {
        let mut streams = self.streams.borrow_mut();
        streams.retain(|stream| stream.sender.try_send(bytes.clone()).is_ok());
    }

    fn snapshot(&self) -> String {
        let mut text = String::new();
        let snapshot = json!({ "time_ms": now_ms(), "phase": self.source.phase() });
        add(&mut text, "snapshot", &snapshot);
        text
    }

    fn add_events(&self, text: &mut String, from: u64, before: u64) {
        if from >= before {
            return;
        }
        for (id, json) in self.source.events(from, before) {
            let _ = write!(text, "event: event\nid: {id}\ndata: {json}\n\n");
        }
    }
}

fn add(text: &mut String, event: &str, data: &Value) {
    let _ = write!(text, "event: {event}\ndata: {data}\n\n");
}

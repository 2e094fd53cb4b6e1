//! Silences: events about which no alerts are sent for a time. They end with the daemon.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant, SystemTime};

use crate::notify::EventDetails;

#[derive(Debug, Clone)]
pub struct Silence {
    pub id: u64,
    pub until: SystemTime,
    ends: Instant,
    /// Types of events; empty: all.
    pub types: Vec<String>,
    /// The subject of the events; none: any.
    pub object: Option<String>,
}

#[derive(Debug, Default)]
pub struct Silences {
    all: RefCell<Vec<Silence>>,
    next: Cell<u64>,
}

impl Silences {
    /// Most silences at a time.
    pub const MOST: usize = 64;

    /// Adds a silence; `None`: there are too many.
    pub fn add(
        &self,
        length: Duration,
        mut types: Vec<String>,
        object: Option<String>,
    ) -> Option<Silence> {
        types.sort_unstable();
        types.dedup();
        let mut all = self.active();
        if all.len() >= Self::MOST {
            return None;
        }
        let id = self.next.get() + 1;
        self.next.set(id);
        let silence = Silence {
            id,
            until: SystemTime::now() + length,
            ends: Instant::now() + length,
            types,
            object,
        };
        all.push(silence.clone());
        self.all.replace(all);
        Some(silence)
    }

    /// Ends a silence; false: there is none with this id.
    pub fn end(&self, id: u64) -> bool {
        let mut all = self.active();
        let before = all.len();
        all.retain(|silence| silence.id != id);
        let ended = all.len() < before;
        self.all.replace(all);
        ended
    }

    /// Silences that have not ended.
    pub fn active(&self) -> Vec<Silence> {
        let (all, now) = (self.all.borrow(), Instant::now());
        all.iter().filter(|one| one.ends > now).cloned().collect()
    }

    pub fn cover(&self, event: &EventDetails, now: Instant) -> bool {
        self.all.borrow().iter().any(|silence| {
            silence.ends > now
                && (silence.types.is_empty() || silence.types.iter().any(|kind| kind == event.kind))
                && silence
                    .object
                    .as_ref()
                    .is_none_or(|object| *object == event.ctx)
        })
    }
}

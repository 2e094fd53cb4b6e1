//! Events worth telling: a ring that `notify_get_notifications` reads, as SPDK's.

use std::cell::RefCell;
use std::collections::VecDeque;

use schemars::JsonSchema;
use serde::Serialize;

/// Events kept; older ones are forgotten. As SPDK.
pub const KEPT: usize = 1024;

/// Every type of event there is.
pub const TYPES: [&str; 16] = [
    "bdev_register",
    "bdev_unregister",
    "bdev_resize",
    "nvmf_subsystem_add",
    "nvmf_subsystem_remove",
    "nvmf_namespace_change",
    "nvmf_listener_change",
    "nvmf_ana_change",
    "remote_connected",
    "remote_failed",
    "remote_lost",
    "remote_refused",
    "transport_downgraded",
    "transport_restored",
    "state_restore_failed",
    "state_restored",
];

#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Event {
    #[serde(rename = "type")]
    pub kind: String,
    /// What it happened to, usually a name.
    pub ctx: String,
    /// Counts up from 0 over the daemon's life.
    pub id: u64,
}

#[derive(Debug, Default)]
pub struct Notifications {
    ring: RefCell<VecDeque<Event>>,
    next: std::cell::Cell<u64>,
}

impl Notifications {
    /// # Panics
    /// When `kind` is not one of [`TYPES`]: clients learn the types from there.
    pub fn send(&self, kind: &'static str, ctx: impl Into<String>) {
        assert!(TYPES.contains(&kind), "unknown event type {kind}");
        let mut ring = self.ring.borrow_mut();
        if ring.len() == KEPT {
            ring.pop_front();
        }
        let id = self.next.get();
        self.next.set(id + 1);
        ring.push_back(Event {
            kind: kind.into(),
            ctx: ctx.into(),
            id,
        });
    }

    /// At most `max` events from `from` on, oldest first.
    pub fn since(&self, from: u64, max: u64) -> Vec<Event> {
        let max = usize::try_from(max).unwrap_or(usize::MAX);
        self.ring
            .borrow()
            .iter()
            .filter(|e| e.id >= from)
            .take(max)
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_forgets_the_oldest() {
        let notes = Notifications::default();
        for n in 0..KEPT + 3 {
            notes.send("bdev_register", format!("b{n}"));
        }
        let all = notes.since(0, u64::MAX);
        assert_eq!((all.len(), all[0].id), (KEPT, 3));
        let some = notes.since(KEPT as u64, 2);
        assert_eq!(some.iter().map(|e| e.id).collect::<Vec<_>>(), [1024, 1025]);
        assert!(notes.since(u64::MAX, 5).is_empty());
    }
}

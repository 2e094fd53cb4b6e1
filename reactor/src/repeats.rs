//! A rate limit for log lines and events that a peer can cause repeatedly. The first is reported
//! immediately, later ones once per interval with the number of suppressed ones.
//!
//! Not for the data path, which does not log.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::Nanos;

/// Most keys in the table. A full table drops the least recently reported key.
const KEYS: usize = 256;

/// Decides which repetitions of an event to report. Equal keys `K` mean the same event.
#[derive(Debug)]
pub struct Repeats<K> {
    interval: Duration,
    reported: HashMap<K, Report>,
}

#[derive(Debug)]
struct Report {
    at: Nanos,
    left_out: u64,
}

impl<K: Eq + Hash + Clone> Repeats<K> {
    /// `interval`: the shortest time between two reports with the same key.
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            reported: HashMap::new(),
        }
    }

    /// Counts an event. `Some(n)`: report it; `n` repetitions were suppressed since the last
    /// report. `None`: suppress it.
    pub fn admit(&mut self, key: K, now: Nanos) -> Option<u64> {
        if let Some(last) = self.reported.get_mut(&key) {
            if now.since(last.at) < self.interval {
                last.left_out += 1;
                return None;
            }
            last.at = now;
            return Some(std::mem::take(&mut last.left_out));
        }
        if self.reported.len() >= KEYS {
            let oldest = self.reported.iter().min_by_key(|(_, last)| last.at);
            if let Some(key) = oldest.map(|(key, _)| key.clone()) {
                self.reported.remove(&key);
            }
        }
        let first = Report {
            at: now,
            left_out: 0,
        };
        self.reported.insert(key, first);
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_are_counted_and_other_facts_are_reported_at_once() {
        let at = |s: u64| Nanos::ZERO + Duration::from_secs(s);
        let mut repeats = Repeats::new(Duration::from_secs(60));
        assert_eq!(repeats.admit("a", at(0)), Some(0));
        assert_eq!(repeats.admit("a", at(1)), None);
        assert_eq!(repeats.admit("b", at(2)), Some(0));
        assert_eq!(repeats.admit("a", at(59)), None);
        assert_eq!(repeats.admit("a", at(60)), Some(2));
        assert_eq!(repeats.admit("a", at(120)), Some(0));
    }

    #[test]
    fn the_memory_of_facts_is_bounded() {
        let mut repeats = Repeats::new(Duration::from_secs(60));
        for key in 0..10 * KEYS {
            assert_eq!(repeats.admit(key, Nanos::ZERO), Some(0));
        }
        assert_eq!(repeats.reported.len(), KEYS);
    }
}

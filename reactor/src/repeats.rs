//! Rate limit for repeated facts: the first is reported at once, later ones once per interval with
//! the number left out in between.
//!
//! It is for log lines and events that a peer can cause at will. It is not for the data path,
//! which logs nothing.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::Nanos;

/// Most facts remembered; beyond it the least recently reported one is dropped.
const KEYS: usize = 256;

/// Decides which repeats of a fact to report. Equal keys `K` mean the same fact.
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
    /// `interval`: the shortest time between two reports of the same fact.
    pub fn new(interval: Duration) -> Repeats<K> {
        Repeats {
            interval,
            reported: HashMap::new(),
        }
    }

    /// `Some(n)`: report this one, with the number `n` of repeats left out since the last report.
    /// `None`: leave it out.
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

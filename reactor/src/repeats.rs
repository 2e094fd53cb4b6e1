//! Repeats of one fact, collapsed: the first is told at once, then one per interval, with the count in between.
//!
//! For log lines and events that a peer can cause as often as it likes. Not for the data path, which logs nothing.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use crate::Nanos;

/// Facts remembered at a time. Beyond it the one told longest ago is forgotten.
const KEYS: usize = 256;

/// Decides which repeats of a fact to tell. `K` is what makes two of them the same fact.
#[derive(Debug)]
pub struct Repeats<K> {
    interval: Duration,
    told: HashMap<K, Told>,
}

#[derive(Debug)]
struct Told {
    at: Nanos,
    left_out: u64,
}

impl<K: Eq + Hash + Clone> Repeats<K> {
    /// `interval`: the least time between two that are told of the same fact.
    pub fn new(interval: Duration) -> Repeats<K> {
        Repeats {
            interval,
            told: HashMap::new(),
        }
    }

    /// `Some(n)`: tell this one, and that `n` like it were left out since the last. `None`: leave it out.
    pub fn admit(&mut self, key: K, now: Nanos) -> Option<u64> {
        if let Some(told) = self.told.get_mut(&key) {
            if now.since(told.at) < self.interval {
                told.left_out += 1;
                return None;
            }
            told.at = now;
            return Some(std::mem::take(&mut told.left_out));
        }
        if self.told.len() >= KEYS {
            let oldest = self.told.iter().min_by_key(|(_, told)| told.at);
            if let Some(key) = oldest.map(|(key, _)| key.clone()) {
                self.told.remove(&key);
            }
        }
        let first = Told {
            at: now,
            left_out: 0,
        };
        self.told.insert(key, first);
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_are_counted_and_other_facts_are_told_at_once() {
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
        assert_eq!(repeats.told.len(), KEYS);
    }
}

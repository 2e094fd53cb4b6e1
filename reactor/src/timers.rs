//! The timers of a reactor's futures: a binary heap by deadline. Entries know their position in the
//! heap, so a cancelled timer is removed immediately.

use std::task::Waker;

use slab::Slab;

use crate::Nanos;

pub(crate) struct Timers {
    entries: Slab<Entry>,
    /// A min-heap of keys into `entries`, by deadline, then by age.
    heap: Vec<usize>,
    next_age: u64,
}

struct Entry {
    deadline: Nanos,
    age: u64,
    waker: Waker,
    /// Index in `heap`.
    at: usize,
}

impl Timers {
    pub(crate) fn new() -> Self {
        Self {
            entries: Slab::new(),
            heap: Vec::new(),
            next_age: 0,
        }
    }

    pub(crate) fn next(&self) -> Option<Nanos> {
        self.heap.first().map(|&key| self.entries[key].deadline)
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    pub(crate) fn insert(&mut self, deadline: Nanos, waker: Waker) -> usize {
        let at = self.heap.len();
        let age = self.next_age;
        self.next_age += 1;
        let key = self.entries.insert(Entry {
            deadline,
            age,
            waker,
            at,
        });
        self.heap.push(key);
        self.sift_up(at);
        key
    }

    /// The waker of a timer that is still waiting.
    pub(crate) fn waker_mut(&mut self, key: usize, age: u64) -> Option<&mut Waker> {
        self.entries
            .get_mut(key)
            .filter(|e| e.age == age)
            .map(|e| &mut e.waker)
    }

    pub(crate) fn age(&self, key: usize) -> u64 {
        self.entries[key].age
    }

    /// Removes a timer. Returns its waker, which the caller must drop after its borrows end.
    pub(crate) fn cancel(&mut self, key: usize, age: u64) -> Option<Waker> {
        self.entries.get(key).filter(|e| e.age == age)?;
        Some(self.remove(key))
    }

    /// Removes a timer that is due, and returns its waker.
    pub(crate) fn pop_due(&mut self, now: Nanos) -> Option<Waker> {
        let &key = self.heap.first()?;
        (self.entries[key].deadline <= now).then(|| self.remove(key))
    }

    fn remove(&mut self, key: usize) -> Waker {
        let entry = self.entries.remove(key);
        let last = self.heap.len() - 1;
        self.heap.swap_remove(entry.at);
        if entry.at < last {
            self.entries[self.heap[entry.at]].at = entry.at;
            self.sift_down(entry.at);
            self.sift_up(entry.at);
        }
        entry.waker
    }

    fn sift_up(&mut self, mut at: usize) {
        while at > 0 {
            let parent = (at - 1) / 2;
            if !self.before(at, parent) {
                return;
            }
            self.swap(at, parent);
            at = parent;
        }
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let left = 2 * at + 1;
            if left >= self.heap.len() {
                return;
            }
            let right = left + 1;
            let child = if right < self.heap.len() && self.before(right, left) {
                right
            } else {
                left
            };
            if !self.before(child, at) {
                return;
            }
            self.swap(child, at);
            at = child;
        }
    }

    fn before(&self, a: usize, b: usize) -> bool {
        let order = |at: usize| {
            let entry = &self.entries[self.heap[at]];
            (entry.deadline, entry.age)
        };
        order(a) < order(b)
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.entries[self.heap[a]].at = a;
        self.entries[self.heap[b]].at = b;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Insert(u64),
        Cancel(prop::sample::Index),
        Pop(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..50u64).prop_map(Step::Insert),
            2 => any::<prop::sample::Index>().prop_map(Step::Cancel),
            2 => (0..50u64).prop_map(Step::Pop),
        ]
    }

    proptest! {
        /// Goal: timers fire in order of deadline, then age, whatever was cancelled before.
        /// Method: random steps against an ordered map.
        #[test]
        fn behaves_as_an_ordered_map(steps in prop::collection::vec(step(), 1..200)) {
            let mut timers = Timers::new();
            let mut oracle = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Insert(deadline) => {
                        let key = timers.insert(Nanos(deadline), Waker::noop().clone());
                        oracle.insert((deadline, timers.age(key)), key);
                    }
                    Step::Cancel(which) if !oracle.is_empty() => {
                        let (&(deadline, age), &key) =
                            oracle.iter().nth(which.index(oracle.len())).unwrap();
                        prop_assert!(timers.cancel(key, age).is_some());
                        prop_assert!(timers.cancel(key, age).is_none());
                        oracle.remove(&(deadline, age));
                    }
                    Step::Cancel(_) => {}
                    Step::Pop(now) => {
                        let due = oracle.first_key_value().filter(|((d, _), _)| *d <= now);
                        prop_assert_eq!(timers.pop_due(Nanos(now)).is_some(), due.is_some());
                        if due.is_some() {
                            oracle.pop_first();
                        }
                    }
                }
                prop_assert_eq!(timers.len(), oracle.len());
                let next = oracle.first_key_value().map(|((d, _), _)| Nanos(*d));
                prop_assert_eq!(timers.next(), next);
                for (&(_, age), &key) in &oracle {
                    prop_assert!(timers.waker_mut(key, age).is_some());
                }
            }
        }
    }
}

//! The last errors of work that a loop repeats, so that each error is logged once.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// The last errors, by the object of the work.
#[derive(Debug)]
pub(super) struct LastErrors<K>(RefCell<BTreeMap<K, String>>);

impl<K> Default for LastErrors<K> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Ord + Clone> LastErrors<K> {
    /// Stores the last error of an object. True if it differs from the one before, and should be
    /// logged.
    pub(super) fn is_new(&self, of: &K, error: &str) -> bool {
        let mut errors = self.0.borrow_mut();
        if errors.get(of).is_some_and(|last| last == error) {
            return false;
        }
        errors.insert(of.clone(), error.to_owned());
        true
    }

    /// Clears an object's error after success. The next error counts as new.
    pub(super) fn clear(&self, of: &K) {
        self.0.borrow_mut().remove(of);
    }

    /// Drops the errors of objects that do not exist any more.
    pub(super) fn retain(&self, is_there: impl Fn(&K) -> bool) {
        self.0.borrow_mut().retain(|of, _| is_there(of));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an error is logged once, until it changes or the work succeeds.
    #[test]
    fn an_error_is_new_once() {
        let errors = LastErrors::default();
        assert!(errors.is_new(&1, "damaged"));
        assert!(!errors.is_new(&1, "damaged"));
        assert!(errors.is_new(&2, "damaged"), "of another object");
        assert!(errors.is_new(&1, "late") && errors.is_new(&1, "damaged"));
        errors.clear(&1);
        assert!(errors.is_new(&1, "damaged"));
        errors.retain(|of| *of == 2);
        assert!(errors.is_new(&1, "damaged") && !errors.is_new(&2, "damaged"));
    }
}

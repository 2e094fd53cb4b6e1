//! Failover tests: make a listener inaccessible for a limited time, and restore its ANA states
//! afterwards.
//!
//! The ANA states of a test are not stored: a daemon that restarts meanwhile has the stored states.

use std::cell::RefCell;

use nacre_nvmf::subsystems::AnaStates;
use nacre_nvmf::transport::ListenerId;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;

/// The listeners under test.
#[derive(Debug, Default)]
pub struct FailoverTests {
    running: RefCell<Vec<FailoverTest>>,
    started: RefCell<u64>,
}

#[derive(Debug)]
struct FailoverTest {
    nqn: Nqn,
    listener: ListenerId,
    /// The states before the test.
    before: AnaStates,
    /// Number of the last test of this listener. Only the timer with this number ends it.
    number: u64,
}

impl FailoverTests {
    /// Records a test, and returns its number. During a test of the same listener, the states from
    /// before the first test are kept.
    pub fn begin(&self, nqn: &Nqn, listener: ListenerId, states: &AnaStates) -> u64 {
        let number = {
            let mut started = self.started.borrow_mut();
            *started += 1;
            *started
        };
        let mut running = self.running.borrow_mut();
        match running.iter_mut().find(|test| test.is_of(nqn, listener)) {
            Some(test) => test.number = number,
            None => running.push(FailoverTest {
                nqn: nqn.clone(),
                listener,
                before: states.clone(),
                number,
            }),
        }
        number
    }

    /// Ends the test of a listener; with `number`, only if it is the last one. Returns the ANA
    /// states to restore.
    pub fn end(&self, nqn: &Nqn, listener: ListenerId, number: Option<u64>) -> Option<AnaStates> {
        let mut running = self.running.borrow_mut();
        let ends = |test: &FailoverTest| {
            test.is_of(nqn, listener) && number.is_none_or(|number| test.number == number)
        };
        let at = running.iter().position(ends)?;
        Some(running.swap_remove(at).before)
    }

    /// Notes the state of a group that was set during a test, for the time after the test.
    pub fn change(&self, nqn: &Nqn, listener: ListenerId, group: u32, state: AnaState) {
        let mut running = self.running.borrow_mut();
        if let Some(test) = running.iter_mut().find(|test| test.is_of(nqn, listener)) {
            test.before.set(Some(group), state);
        }
    }

    /// Ends all tests of a subsystem that is deleted.
    pub fn forget(&self, nqn: &Nqn) {
        self.running.borrow_mut().retain(|test| test.nqn != *nqn);
    }
}

impl FailoverTest {
    fn is_of(&self, nqn: &Nqn, listener: ListenerId) -> bool {
        self.nqn == *nqn && self.listener == listener
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a repeated test keeps the first states, and only the latest timer ends it.
    #[test]
    fn the_first_states_return() {
        let tests = FailoverTests::default();
        let nqn = Nqn::new("nqn.2025-01.io.nacre:v").unwrap();
        let listener = ListenerId(7);
        let before = AnaStates::new(AnaState::NonOptimized);
        let first = tests.begin(&nqn, listener, &before);
        let second = tests.begin(&nqn, listener, &AnaStates::new(AnaState::Inaccessible));
        assert_eq!(tests.end(&nqn, listener, Some(first)), None);
        assert_eq!(tests.end(&nqn, ListenerId(8), None), None);
        assert_eq!(
            tests.end(&nqn, listener, Some(second)),
            Some(before.clone())
        );
        assert_eq!(tests.end(&nqn, listener, None), None, "once");
        tests.begin(&nqn, listener, &before);
        assert_eq!(tests.end(&nqn, listener, None), Some(before));
    }
}

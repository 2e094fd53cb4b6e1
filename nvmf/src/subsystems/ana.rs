//! Asymmetric Namespace Access (Base 8.1): the ANA state of each ANA group on each listener.
//! `subsystem/ana.rs` changes the states and builds the log page.
//!
//! ```text
//!   management ──set_ana_state──▶ SubsystemListener::ana ──▶ View of every controller there
//!                                        │                      │ one byte per namespace, which an
//!                                        ▼                      ▼ I/O command looks at
//!                                   log page 0Ch, event      302h / 301h / 303h
//! ```
//!
//! A state belongs to a listener of one subsystem, so that two subsystems on one address can
//! differ.

use std::collections::BTreeMap;

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::log::ana::AnaState;

/// The states of all groups on one listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnaStates {
    /// State of the groups that have none of their own.
    all: Changed,
    groups: BTreeMap<u32, Changed>,
}

/// A state, and the change count of the subsystem's ANA log at its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Changed {
    pub state: AnaState,
    pub at: u64,
}

impl AnaStates {
    /// All groups in this state.
    pub fn new(state: AnaState) -> Self {
        Self {
            all: Changed { state, at: 0 },
            groups: BTreeMap::new(),
        }
    }

    pub fn of(&self, group: u32) -> AnaState {
        self.of_group(group).state
    }

    /// The state of groups without a state of their own.
    pub fn of_others(&self) -> AnaState {
        self.all.state
    }

    /// The groups that have a state of their own.
    pub fn exceptions(&self) -> impl Iterator<Item = (u32, AnaState)> + '_ {
        self.groups
            .iter()
            .map(|(&group, changed)| (group, changed.state))
    }

    pub(super) fn of_group(&self, group: u32) -> Changed {
        self.groups.get(&group).copied().unwrap_or(self.all)
    }

    /// Sets the state of one group, or of all groups. Returns true if a state changed.
    pub fn set(&mut self, group: Option<u32>, state: AnaState) -> bool {
        self.set_at(group, state, 0)
    }

    pub(super) fn set_at(&mut self, group: Option<u32>, state: AnaState, at: u64) -> bool {
        let changed = Changed { state, at };
        match group {
            Some(group) if self.of(group) == state => false,
            Some(group) => {
                self.groups.insert(group, changed);
                true
            }
            None => {
                let mut groups = self.groups.values();
                let changes = self.all.state != state || groups.any(|of| of.state != state);
                if changes {
                    self.groups.clear();
                    self.all = changed;
                }
                changes
            }
        }
    }
}

impl Default for AnaStates {
    fn default() -> Self {
        Self::new(AnaState::Optimized)
    }
}

/// The status for a command on a namespace whose state does not allow it; `None`: it is allowed. No
/// status has DNR, so hosts retry on another path, or here after a change of the state.
pub(crate) fn refusal(state: AnaState) -> Option<StatusCode> {
    match state {
        AnaState::Optimized | AnaState::NonOptimized => None,
        AnaState::Inaccessible => Some(StatusCode::ANA_INACCESSIBLE),
        AnaState::PersistentLoss => Some(StatusCode::ANA_PERSISTENT_LOSS),
        AnaState::Change => Some(StatusCode::ANA_TRANSITION),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: only a change of a state counts, also where single groups have the state of all.
    #[test]
    fn what_counts_as_a_change() {
        let mut states = AnaStates::new(AnaState::Optimized);
        assert!(!states.set(None, AnaState::Optimized));
        assert!(states.set(Some(2), AnaState::Inaccessible));
        assert!(!states.set(Some(2), AnaState::Inaccessible));
        assert!(states.set(None, AnaState::Optimized), "group 2 changes");
        assert!(states.set(Some(2), AnaState::Inaccessible));
        assert!(states.set(Some(2), AnaState::Optimized));
        assert!(!states.set(None, AnaState::Optimized));
        assert_eq!(states.of(2), AnaState::Optimized);
    }
}

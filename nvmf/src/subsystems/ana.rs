//! Asymmetric Namespace Access (Base 8.1): the ANA state of each ANA group on each listener, its
//! changes by management, and the log page.
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
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf_wire::log::ana::AnaState;
use nacre_nvmf_wire::{Nqn, StatusCode};

use crate::subsystems::association::pending;
use crate::subsystems::subsystem::{State, Subsystem, SubsystemError, view_for, visible_to};
use crate::transport::ListenerId;

/// The states of all groups on one listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnaStates {
    /// State of the groups that have none of their own.
    all: Changed,
    groups: BTreeMap<u32, Changed>,
}

/// A state, and the change count of the subsystem's ANA log at its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Changed {
    state: AnaState,
    at: u64,
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

    fn of_group(&self, group: u32) -> Changed {
        self.groups.get(&group).copied().unwrap_or(self.all)
    }

    /// Sets the state of one group, or of all groups. Returns true if a state changed.
    pub fn set(&mut self, group: Option<u32>, state: AnaState) -> bool {
        self.set_at(group, state, 0)
    }

    fn set_at(&mut self, group: Option<u32>, state: AnaState, at: u64) -> bool {
        let changed = Changed { state, at };
        match group {
            Some(group) if self.of(group) == state => false,
            Some(group) => {
                self.groups.insert(group, changed);
                true
            }
            None if self.all.state == state && self.groups.is_empty() => false,
            None => {
                self.groups.clear();
                self.all = changed;
                true
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

/// The contents of the ANA log page for one controller.
pub(crate) struct AnaLog {
    pub change_count: u64,
    pub groups: Vec<AnaLogGroup>,
}

pub(crate) struct AnaLogGroup {
    pub group: u32,
    pub state: AnaState,
    pub change_count: u64,
    pub nsids: Vec<u32>,
}

impl Subsystem {
    /// Sets the state of one ANA group, or of all, on a listener of this subsystem. Controllers
    /// that came through it adopt the state with their next command, and their hosts get an event.
    /// Returns whether anything changed.
    pub fn set_ana_state(
        &self,
        listener: ListenerId,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<bool, SubsystemError> {
        self.check_ana(group, state)?;
        let mut guard = self.state();
        let at = guard.ana_changes + 1;
        let found = guard.listeners.iter_mut().find(|l| l.id == listener);
        let found = found.ok_or_else(|| SubsystemError::NoListener {
            nqn: self.nqn().to_string(),
            address: format!("listener {}", listener.0),
        })?;
        if !found.ana.set_at(group, state, at) {
            return Ok(false);
        }
        guard.ana_changes = at;
        self.changes.fetch_add(1, Ordering::AcqRel);
        let all = guard.controllers.values();
        for association in all.filter(|a| a.listener == listener) {
            let (old, new) = (
                association.view(),
                view_for(&guard, &association.hostnqn, listener),
            );
            if old.same_access(&new) {
                continue;
            }
            association.set_view(Arc::new(new), &[]);
            for queue in association.queues() {
                queue.group.wake();
            }
            association.notify(pending::ANA);
        }
        Ok(true)
    }

    /// Moves a namespace to another ANA group. Its controllers adopt the group's state with their
    /// next command; hosts get events for the namespace and the ANA log. Returns the previous
    /// group.
    pub fn set_ana_group(&self, nsid: u32, group: u32) -> Result<u32, SubsystemError> {
        let max = self.config.max_namespaces;
        if group == 0 || group > max {
            return Err(SubsystemError::AnaGroupOutOfRange { group, max });
        }
        let mut guard = self.state();
        let entry = guard
            .namespaces
            .get_mut(&nsid)
            .ok_or_else(|| self.no_namespace(nsid))?;
        let before = entry.namespace.ana_group();
        if before == group {
            return Ok(before);
        }
        entry.namespace.set_ana_group(group);
        entry.ana_group = Some(group);
        guard.ana_members_changed([before, group]);
        self.publish_views(&guard, &[nsid]);
        for association in guard.controllers.values() {
            if association.view().get(nsid).is_some() {
                association.notify(pending::ANA);
            }
        }
        Ok(before)
    }

    /// Checks the initial states of a new listener of this subsystem.
    pub(crate) fn check_ana_states(&self, states: &AnaStates) -> Result<(), SubsystemError> {
        self.check_ana(None, states.all.state)?;
        for (&group, of) in &states.groups {
            self.check_ana(Some(group), of.state)?;
        }
        Ok(())
    }

    /// Checks a state for listeners of this subsystem.
    pub(crate) fn check_ana(
        &self,
        group: Option<u32>,
        state: AnaState,
    ) -> Result<(), SubsystemError> {
        let max = self.config.max_namespaces;
        match group {
            Some(group) if group == 0 || group > max => {
                Err(SubsystemError::AnaGroupOutOfRange { group, max })
            }
            // Without ANA reporting, hosts would treat the ANA statuses as failures.
            _ if !self.config.ana_reporting && state != AnaState::Optimized => {
                Err(SubsystemError::NoAnaReporting {
                    nqn: self.nqn().to_string(),
                })
            }
            _ => Ok(()),
        }
    }

    /// The ANA log for `host` on `listener`: the groups with namespaces that the host may access.
    pub(crate) fn ana_log(&self, host: &Nqn, listener: ListenerId) -> AnaLog {
        let state = self.state();
        let mut members = BTreeMap::<u32, Vec<u32>>::new();
        for entry in state.namespaces.values().filter(|n| visible_to(n, host)) {
            let namespace = &entry.namespace;
            members
                .entry(namespace.ana_group())
                .or_default()
                .push(namespace.nsid);
        }
        let found = state.listeners.iter().find(|l| l.id == listener);
        let ana = found.map(|l| l.ana.clone()).unwrap_or_default();
        let describe = |(group, nsids)| {
            let Changed { state: access, at } = ana.of_group(group);
            let joined = state.ana_members.get(&group).copied().unwrap_or(0);
            AnaLogGroup {
                group,
                state: access,
                change_count: at.max(joined),
                nsids,
            }
        };
        AnaLog {
            change_count: state.ana_changes,
            groups: members.into_iter().map(describe).collect(),
        }
    }
}

impl State {
    /// Records that namespaces joined or left these groups.
    pub(crate) fn ana_members_changed(&mut self, groups: impl IntoIterator<Item = u32>) {
        self.ana_changes += 1;
        for group in groups {
            self.ana_members.insert(group, self.ana_changes);
        }
    }
}

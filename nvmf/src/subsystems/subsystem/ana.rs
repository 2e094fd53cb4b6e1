//! Changes of ANA states and ANA groups by management, and the contents of the ANA log page.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::ana::AnaState;

use super::{State, Subsystem, SubsystemError, view_for, visible_to};
use crate::subsystems::ana::{AnaStates, Changed};
use crate::subsystems::association::pending;
use crate::transport::ListenerId;

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
    /// Sets the state of one ANA group, or of all, on a listener of this subsystem. Controllers of
    /// the listener with namespaces in the group adopt the state with their next command, and their
    /// hosts get an event. Returns false if nothing changed.
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
        self.check_ana(None, states.of_others())?;
        for (group, state) in states.exceptions() {
            self.check_ana(Some(group), state)?;
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

//! The listeners of a subsystem.

use std::sync::atomic::Ordering;

use super::{Subsystem, SubsystemError, SubsystemListener};
use crate::subsystems::association::Teardown;
use crate::subsystems::withheld::Withheld;
use crate::transport::{Address, ListenerId, TransportType};

impl Subsystem {
    /// Marks that an address is being opened for this subsystem, until the result is dropped.
    pub(crate) fn opening(&self) -> OpeningGuard<'_> {
        self.state().opening += 1;
        OpeningGuard(self)
    }

    pub(crate) fn add_listener(&self, listener: SubsystemListener) -> Result<(), SubsystemError> {
        let mut state = self.state();
        if state.listeners.iter().any(|l| l.id == listener.id) {
            return Err(SubsystemError::ListenerExists {
                nqn: self.nqn().to_string(),
                address: listener.address.to_string(),
            });
        }
        state.listeners.push(listener);
        self.changes.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Removes a listener, and ends the associations through it. Returns false if there is none.
    pub(crate) fn remove_listener(&self, id: ListenerId) -> bool {
        let mut state = self.state();
        let before = state.listeners.len();
        state.listeners.retain(|l| l.id != id);
        if state.listeners.len() == before {
            return false;
        }
        self.changes.fetch_add(1, Ordering::AcqRel);
        for association in state.controllers.values().filter(|a| a.listener == id) {
            association.tear_down(Teardown::ListenerRemoved);
        }
        true
    }

    pub fn listeners(&self) -> Vec<SubsystemListener> {
        self.state().listeners.clone()
    }

    /// Refuses hosts on a listener, and disconnects those that are connected through it; `None`:
    /// admits hosts. Returns true if the setting changed.
    pub(crate) fn withhold(
        &self,
        kind: TransportType,
        address: &Address,
        why: Option<Withheld>,
    ) -> Result<bool, SubsystemError> {
        let mut state = self.state();
        let same = |l: &&mut SubsystemListener| l.transport == kind && l.address == *address;
        let found = state.listeners.iter_mut().find(same);
        let found = found.ok_or_else(|| SubsystemError::NoListener {
            nqn: self.nqn().to_string(),
            address: address.to_string(),
        })?;
        let (id, before) = (found.id, std::mem::replace(&mut found.withheld, why));
        if before == why {
            return Ok(false);
        }
        self.changes.fetch_add(1, Ordering::AcqRel);
        if why.is_some() {
            for association in state.controllers.values().filter(|a| a.listener == id) {
                association.tear_down(Teardown::ListenerWithheld);
            }
        }
        Ok(true)
    }
}

/// See [`Subsystem::opening`].
pub(crate) struct OpeningGuard<'a>(&'a Subsystem);

impl Drop for OpeningGuard<'_> {
    fn drop(&mut self) {
        self.0.state().opening -= 1;
    }
}

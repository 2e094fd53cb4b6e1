//! The hosts that a subsystem lets in, and their keys.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf_wire::Nqn;

use super::{HostSecrets, State, Subsystem, SubsystemError, SubsystemKind};
use crate::auth::KeySource;
use crate::subsystems::association::Teardown;
use crate::tls::PskKey;

impl Subsystem {
    /// Allows a host. With keys it must authenticate itself, with a PSK it must use TLS, also where
    /// any host is allowed. A PSK ends its controllers that have a queue in clear.
    pub fn add_host(&self, host: &Nqn, secrets: HostSecrets) -> Result<(), SubsystemError> {
        let mut state = self.state();
        if state.hosts.contains_key(host) {
            return Err(SubsystemError::HostExists {
                host: host.to_string(),
            });
        }
        let must_encrypt = secrets.psk.is_some();
        state.hosts.insert(host.clone(), secrets);
        self.changes.fetch_add(1, Ordering::AcqRel);
        if must_encrypt {
            for association in state.controllers.values() {
                if association.hostnqn == *host && association.has_clear_queue() {
                    association.tear_down(Teardown::MustEncrypt);
                }
            }
        }
        Ok(())
    }

    /// Also disconnects the host, unless any host is allowed.
    pub fn remove_host(&self, host: &Nqn) -> Result<(), SubsystemError> {
        let mut state = self.state();
        if state.hosts.remove(host).is_none() {
            return Err(SubsystemError::NoHost {
                host: host.to_string(),
            });
        }
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.drop_unwelcome(&state);
        Ok(())
    }

    /// Changes the keys of a host of the list. Queues that are connected go on; the keys count for
    /// queues and transactions from here on.
    pub fn set_host_keys(
        &self,
        host: &Nqn,
        keys: Option<Arc<dyn KeySource>>,
    ) -> Result<(), SubsystemError> {
        match self.state().hosts.get_mut(host) {
            Some(present) => present.keys = keys,
            None => {
                return Err(SubsystemError::NoHost {
                    host: host.to_string(),
                });
            }
        }
        Ok(())
    }

    /// The keys of a host that must authenticate itself.
    pub fn host_keys(&self, host: &Nqn) -> Option<Arc<dyn KeySource>> {
        self.state().hosts.get(host)?.keys.clone()
    }

    /// The PSK of a host that must use TLS.
    pub fn host_psk(&self, host: &Nqn) -> Option<Arc<dyn PskKey>> {
        self.state().hosts.get(host)?.psk.clone()
    }

    /// Turning it off disconnects the hosts that are not in the list.
    pub fn set_allow_any_host(&self, allow: bool) {
        let mut state = self.state();
        state.allow_any_host = allow;
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.drop_unwelcome(&state);
    }

    fn drop_unwelcome(&self, state: &State) {
        if self.kind == SubsystemKind::Discovery {
            return;
        }
        for association in state.controllers.values() {
            if !state.allow_any_host && !state.hosts.contains_key(&association.hostnqn) {
                association.tear_down(Teardown::HostRemoved);
            }
        }
    }

    pub fn allows_any_host(&self) -> bool {
        self.state().allow_any_host
    }

    pub fn hosts(&self) -> Vec<Nqn> {
        self.state().hosts.keys().cloned().collect()
    }

    pub fn allows(&self, host: &Nqn) -> bool {
        let state = self.state();
        self.kind == SubsystemKind::Discovery
            || state.allow_any_host
            || state.hosts.contains_key(host)
    }
}

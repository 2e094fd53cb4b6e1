//! The hosts that a subsystem allows, and their keys.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nacre_nvmf_wire::Nqn;

use super::{Allowed, HostSecrets, State, Subsystem, SubsystemError};
use crate::auth::KeySource;
use crate::subsystems::association::{Association, Phase, Teardown};
use crate::subsystems::subsystem_config::SubsystemKind;
use crate::tls::PskKey;

/// A new secret for a host, and the former one, which stays valid beside it.
#[derive(Debug)]
pub enum Rotation {
    Keys {
        new: Arc<dyn KeySource>,
        former: Option<Arc<dyn KeySource>>,
    },
    Psk {
        new: Arc<dyn PskKey>,
        former: Option<Arc<dyn PskKey>>,
    },
}

/// The kinds of secrets of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SecretKind {
    /// Keys for DH-HMAC-CHAP.
    Keys,
    /// PSK for TLS.
    Psk,
}

/// True if both are the same object.
fn is_same<T: ?Sized>(one: Option<&Arc<T>>, other: Option<&Arc<T>>) -> bool {
    one.zip(other).is_some_and(|(a, b)| Arc::ptr_eq(a, b))
}

impl Subsystem {
    /// Allows a host. With keys it must authenticate itself, with a PSK it must use TLS, even if
    /// any host is allowed. A PSK or `concat` ends the host's controllers that have a queue without
    /// TLS.
    pub fn add_host(&self, host: &Nqn, secrets: HostSecrets) -> Result<(), SubsystemError> {
        let mut state = self.state();
        if state.hosts.contains_key(host) {
            return Err(SubsystemError::HostExists {
                host: host.to_string(),
            });
        }
        let must_encrypt = secrets.psk.is_some() || secrets.concat;
        let allowed = Allowed {
            secrets,
            ..Allowed::default()
        };
        state.hosts.insert(host.clone(), allowed);
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

    /// Removes a host from the allowed ones. It is disconnected, unless any host is allowed.
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

    /// Replaces the keys of an allowed host, and ends a rotation of them. Connected queues
    /// continue; the keys apply to later queues and transactions.
    pub fn set_host_keys(
        &self,
        host: &Nqn,
        keys: Option<Arc<dyn KeySource>>,
    ) -> Result<(), SubsystemError> {
        match self.state().hosts.get_mut(host) {
            Some(present) => (present.secrets.keys, present.former.keys) = (keys, None),
            None => {
                return Err(SubsystemError::NoHost {
                    host: host.to_string(),
                });
            }
        }
        Ok(())
    }

    /// Gives an allowed host a new secret. The former one stays valid until
    /// [`Subsystem::end_rotation`].
    pub fn rotate(&self, host: &Nqn, rotation: Rotation) -> Result<(), SubsystemError> {
        let mut state = self.state();
        let ours = |a: &&Arc<_>| Self::is_in_use(a, host);
        let controllers = state.controllers.values().filter(ours).count();
        let Some(present) = state.hosts.get_mut(host) else {
            return Err(SubsystemError::NoHost {
                host: host.to_string(),
            });
        };
        match rotation {
            Rotation::Keys { new, former } => {
                (present.secrets.keys, present.former.keys) = (Some(new), former);
            }
            Rotation::Psk { new, former } => {
                (present.secrets.psk, present.former.psk) = (Some(new), former);
            }
        }
        present.controllers = controllers;
        Ok(())
    }

    /// Invalidates the former secret of a host. Connected queues continue.
    pub fn end_rotation(&self, host: &Nqn, kind: SecretKind) {
        if let Some(present) = self.state().hosts.get_mut(host) {
            match kind {
                SecretKind::Keys => present.former.keys = None,
                SecretKind::Psk => present.former.psk = None,
            }
        }
    }

    /// True if a host uses its new secret on every queue. The criterion is at least as many
    /// controllers as when the rotation began, each with I/O queues. Fewer do not count, because a
    /// host that lost a path may return with the former secret.
    ///
    /// For [`SecretKind::Keys`], a host that uses a generated PSK has rotated only after it
    /// authenticated itself again. The PSK does not show which keys it was made with.
    pub fn has_rotated(&self, host: &Nqn, kind: SecretKind) -> bool {
        let state = self.state();
        let Some(Allowed {
            secrets,
            controllers,
            ..
        }) = state.hosts.get(host)
        else {
            return false;
        };
        let mut count = 0;
        let ours = |a: &&Arc<_>| Self::is_in_use(a, host);
        for association in state.controllers.values().filter(ours) {
            let is_new = association.all_queues(|queue| match kind {
                SecretKind::Keys => is_same(queue.auth.keys().as_ref(), secrets.keys.as_ref()),
                SecretKind::Psk => {
                    let used = queue.secure.as_ref().map(|channel| &channel.psk);
                    is_same(used, secrets.psk.as_ref())
                }
            });
            if !is_new {
                return false;
            }
            count += 1;
        }
        count >= (*controllers).max(1)
    }

    fn is_in_use(association: &Association, host: &Nqn) -> bool {
        association.hostnqn == *host && association.phase() != Phase::Closing
    }

    /// The sets of keys that a host may use: its own, then the former ones of a rotation.
    pub fn keys_of(&self, host: &Nqn) -> Vec<Arc<dyn KeySource>> {
        let state = self.state();
        let Some(Allowed {
            secrets, former, ..
        }) = state.hosts.get(host)
        else {
            return Vec::new();
        };
        secrets.keys.iter().chain(&former.keys).cloned().collect()
    }

    /// The PSKs that a host may use: its own, then the former one of a rotation.
    pub fn psks_of(&self, host: &Nqn) -> Vec<Arc<dyn PskKey>> {
        let state = self.state();
        let Some(Allowed {
            secrets, former, ..
        }) = state.hosts.get(host)
        else {
            return Vec::new();
        };
        secrets.psk.iter().chain(&former.psk).cloned().collect()
    }

    /// The keys of a host that must authenticate itself.
    pub fn host_keys(&self, host: &Nqn) -> Option<Arc<dyn KeySource>> {
        self.state().hosts.get(host)?.secrets.keys.clone()
    }

    /// The PSK of a host that must use TLS.
    pub fn host_psk(&self, host: &Nqn) -> Option<Arc<dyn PskKey>> {
        self.state().hosts.get(host)?.secrets.psk.clone()
    }

    /// True if a host must ask for secure channel concatenation.
    pub fn host_must_concat(&self, host: &Nqn) -> bool {
        let state = self.state();
        state
            .hosts
            .get(host)
            .is_some_and(|host| host.secrets.concat)
    }

    /// Turning it off disconnects hosts that are not allowed by name.
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

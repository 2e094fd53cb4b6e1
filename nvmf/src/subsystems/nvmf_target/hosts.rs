//! The hosts of a target's subsystems, and their keys.

use std::sync::Arc;

use nacre_nvmf_wire::Nqn;

use super::{Target, TargetError};
use crate::auth::KeySource;
use crate::subsystems::subsystem::{HostSecrets, Rotation};

impl Target {
    /// Allows a host, as `Subsystem::add_host`. Call it on a management thread, because it may
    /// start the helper thread.
    pub fn add_host_with(
        &self,
        nqn: &Nqn,
        host: &Nqn,
        secrets: HostSecrets,
    ) -> Result<(), TargetError> {
        let subsystem = self.subsystem(nqn)?;
        self.prepare_for(&secrets.keys)?;
        subsystem.add_host(host, secrets)?;
        self.discovery_changed();
        Ok(())
    }

    /// Changes the keys of a host, as `Subsystem::set_host_keys`.
    pub fn set_host_keys(
        &self,
        nqn: &Nqn,
        host: &Nqn,
        keys: Option<Arc<dyn KeySource>>,
    ) -> Result<(), TargetError> {
        let subsystem = self.subsystem(nqn)?;
        self.prepare_for(&keys)?;
        subsystem.set_host_keys(host, keys)?;
        self.authentication.generated.forget(nqn, Some(host));
        Ok(())
    }

    /// Gives a host a new secret, as `Subsystem::rotate`.
    pub fn rotate(&self, nqn: &Nqn, host: &Nqn, rotation: Rotation) -> Result<(), TargetError> {
        let subsystem = self.subsystem(nqn)?;
        let of_keys = matches!(rotation, Rotation::Keys { .. });
        if let Rotation::Keys { new, .. } = &rotation {
            self.prepare_for(&Some(Arc::clone(new)))?;
        }
        subsystem.rotate(host, rotation)?;
        if of_keys {
            let in_force = subsystem.keys_of(host);
            let generated = &self.authentication.generated;
            generated.keep_those_of(nqn, host, &in_force);
        }
        Ok(())
    }

    fn prepare_for(&self, keys: &Option<Arc<dyn KeySource>>) -> Result<(), TargetError> {
        if keys.is_none() {
            return Ok(());
        }
        let started = self.authentication.helper().start();
        started.map_err(|error| TargetError::Helper(error.to_string()))
    }

    pub fn remove_host(&self, nqn: &Nqn, host: &Nqn) -> Result<(), TargetError> {
        self.subsystem(nqn)?.remove_host(host)?;
        self.authentication.generated.forget(nqn, Some(host));
        self.discovery_changed();
        Ok(())
    }
}

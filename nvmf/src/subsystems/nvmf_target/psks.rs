//! Finds the TLS pre-shared keys (PSKs) of hosts in a target's subsystems, for the TLS handshakes
//! of a transport.

use std::sync::{Arc, Weak};

use nacre_nvmf_wire::Nqn;
use nacre_reactor::Clock;

use super::Target;
use crate::subsystems::subsystem::Subsystem;
use crate::subsystems::subsystem_config::SubsystemKind;
use crate::tls::{Identity, PskKey, PskSource, TlsFailure};

/// Most different PSKs of one host that a handshake with the discovery subsystem tries. Each try
/// may read a file.
const MOST_FOR_DISCOVERY: usize = 32;

impl Target {
    /// The PSKs with which a host may use a subsystem. The discovery subsystem has no list of
    /// hosts: it takes the host's PSK of any subsystem.
    pub(crate) fn host_psks(&self, subsystem: &Subsystem, host: &Nqn) -> Vec<Arc<dyn PskKey>> {
        if subsystem.kind == SubsystemKind::Nvm {
            return subsystem.psks_of(host);
        }
        let mut psks: Vec<Arc<dyn PskKey>> = Vec::new();
        for psk in self.subsystems().iter().flat_map(|s| s.psks_of(host)) {
            if psks.len() < MOST_FOR_DISCOVERY && !psks.iter().any(|p| Arc::ptr_eq(p, &psk)) {
                psks.push(psk);
            }
        }
        psks
    }
}

/// The PSKs of a target. Holds a weak reference, because the target owns the transports that own
/// this.
pub struct TargetPsks(Weak<Target>);

impl TargetPsks {
    pub fn new(target: &Arc<Target>) -> Self {
        Self(Arc::downgrade(target))
    }
}

impl PskSource for TargetPsks {
    fn psks(&self, identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        let Some(target) = self.0.upgrade() else {
            return Vec::new();
        };
        if identity.is_generated {
            let generated = &target.authentication.generated;
            let found = generated.find(identity, Clock::real().now());
            return found.into_iter().map(|psk| psk as _).collect();
        }
        match target.subsystem(&identity.subsystem) {
            Ok(subsystem) => target.host_psks(&subsystem, &identity.host),
            Err(_) => Vec::new(),
        }
    }

    fn failed(&self, failure: TlsFailure) {
        if let Some(target) = self.0.upgrade() {
            target.authentication.report_tls(failure);
        }
    }
}

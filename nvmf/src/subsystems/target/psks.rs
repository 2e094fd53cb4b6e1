//! The PSKs of a target's hosts, as the TLS handshakes of a transport look them up.

use std::sync::{Arc, Weak};

use super::Target;
use crate::tls::{Identity, PskKey, PskSource, TlsFailure};

/// The PSKs of a target. It does not keep the target, which keeps its transports.
pub struct TargetPsks(Weak<Target>);

impl TargetPsks {
    pub fn new(target: &Arc<Target>) -> TargetPsks {
        TargetPsks(Arc::downgrade(target))
    }
}

impl PskSource for TargetPsks {
    fn psks(&self, identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        let target = self.0.upgrade();
        let subsystem = target.and_then(|target| target.subsystem(&identity.subsystem).ok());
        let key = subsystem.and_then(|subsystem| subsystem.host_psk(&identity.host));
        key.into_iter().collect()
    }

    fn failed(&self, failure: TlsFailure) {
        if let Some(target) = self.0.upgrade() {
            target.authentication.report_tls(failure);
        }
    }
}

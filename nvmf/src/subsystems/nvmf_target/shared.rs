//! The subsystems of this target that other targets serve too.

use std::collections::BTreeMap;

use nacre_nvmf_wire::Nqn;
use parking_lot::Mutex;

use super::Target;
use crate::subsystems::shared_ports::{SharedPorts, SharedSubsystem};

#[derive(Debug, Default)]
pub(super) struct Shared(Mutex<BTreeMap<Nqn, SharedSubsystem>>);

impl Shared {
    /// The ports to list for a host, by subsystem. A host that the entry does not allow still gets
    /// the identifiers of this target's ports, where the subsystem here allows it.
    pub(super) fn ports_for(&self, host: &Nqn) -> BTreeMap<Nqn, SharedPorts> {
        let shared = self.0.lock();
        let ports = shared.iter().map(|(nqn, of)| {
            let is_allowed = of.allows(host);
            let listed = of.ports.iter().filter(|port| is_allowed || port.is_here);
            let listed = SharedPorts {
                listed: listed.cloned().collect(),
                later_ids: of.later_ids,
            };
            (nqn.clone(), listed)
        });
        ports.collect()
    }
}

impl Target {
    /// Sets the ports of a subsystem that other targets serve too; `None`: no other one does. This
    /// target need not serve the subsystem. Hosts are notified of a change.
    pub fn share(&self, nqn: &Nqn, of: Option<SharedSubsystem>) {
        let mut shared = self.shared.0.lock();
        if shared.get(nqn) == of.as_ref() {
            return;
        }
        match of {
            Some(of) => shared.insert(nqn.clone(), of),
            None => shared.remove(nqn),
        };
        drop(shared);
        self.discovery_changed();
    }
}

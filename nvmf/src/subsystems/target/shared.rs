//! Subsystems that several targets serve, such as the volumes of a cluster: the discovery log of
//! each target names the ports of all of them.

use std::collections::{BTreeMap, BTreeSet};

use nacre_nvmf_wire::Nqn;
use parking_lot::Mutex;

use super::Target;
use crate::transport::{Address, TransportType};

/// The ports of a subsystem on all targets, and the hosts that may hear of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedSubsystem {
    pub hosts: BTreeSet<Nqn>,
    pub any_host: bool,
    pub ports: Vec<SharedPort>,
}

/// A port of a shared subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPort {
    /// PORTID, the same in the discovery logs of all targets.
    pub id: u16,
    pub transport: TransportType,
    pub address: Address,
    /// A port of this target: listed only while the subsystem has a listener there.
    pub is_here: bool,
}

impl SharedSubsystem {
    fn allows(&self, host: &Nqn) -> bool {
        self.any_host || self.hosts.contains(host)
    }
}

#[derive(Debug, Default)]
pub(super) struct Shared(Mutex<BTreeMap<Nqn, SharedSubsystem>>);

impl Shared {
    /// The ports to list for a host, by subsystem. A host that the entry does not allow still gets
    /// the identifiers of this target's ports, where the subsystem here allows it.
    pub(super) fn ports_for(&self, host: &Nqn) -> BTreeMap<Nqn, Vec<SharedPort>> {
        let shared = self.0.lock();
        let ports = shared.iter().map(|(nqn, of)| {
            let is_allowed = of.allows(host);
            let listed = of.ports.iter().filter(|port| is_allowed || port.is_here);
            (nqn.clone(), listed.cloned().collect())
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

//! Subsystems that several targets serve, such as the volumes of a cluster: the discovery log of
//! each target names the ports of all of them.

use std::collections::{BTreeMap, BTreeSet};

use nacre_nvmf_wire::Nqn;
use parking_lot::Mutex;

use super::Target;
use crate::transport::{Address, TlsPolicy, TransportType};

/// PORTIDs for the listeners of one target that are not among the ports of a shared subsystem.
pub const LATER_IDS: u16 = 1 << 10;

/// The ports of a subsystem on all targets, and the hosts whose discovery log has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedSubsystem {
    pub hosts: BTreeSet<Nqn>,
    pub any_host: bool,
    pub ports: Vec<SharedPort>,
    /// The first of [`LATER_IDS`] PORTIDs for this target's listeners that `ports` does not have;
    /// `None`: the numbers of the listeners.
    pub later_ids: Option<u16>,
}

/// A port of a shared subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPort {
    /// PORTID, the same in the discovery logs of all targets.
    pub id: u16,
    pub transport: TransportType,
    pub address: Address,
    /// Whether connections use TLS; `None`: unknown.
    pub tls: Option<TlsPolicy>,
    /// A port of this target: listed only while the subsystem has a listener there.
    pub is_here: bool,
}

/// The ports of a shared subsystem for one host.
#[derive(Debug, Clone, Default)]
pub struct SharedPorts {
    /// Ports of other targets that serve the subsystem, and the identifiers of this target's.
    pub listed: Vec<SharedPort>,
    /// See [`SharedSubsystem::later_ids`].
    pub later_ids: Option<u16>,
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

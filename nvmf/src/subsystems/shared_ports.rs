//! Subsystems that several targets serve, such as the volumes of a cluster. The discovery log of
//! each target lists the ports of all of them.

use std::collections::BTreeSet;

use nacre_nvmf_wire::Nqn;

use crate::transport::{Address, TlsPolicy, TransportType};

/// Number of PORTIDs for listeners of one target that are not among the ports of a shared
/// subsystem.
pub const LATER_IDS: u16 = 1 << 10;

/// The ports of a subsystem on all targets, and the hosts in whose discovery log they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedSubsystem {
    pub hosts: BTreeSet<Nqn>,
    pub any_host: bool,
    pub ports: Vec<SharedPort>,
    /// The first of [`LATER_IDS`] PORTIDs for this target's listeners that are not in `ports`;
    /// `None`: PORTIDs follow from the listener ids.
    pub later_ids: Option<u16>,
}

/// A port of a shared subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedPort {
    /// PORTID, the same in the discovery logs of all targets.
    pub id: u16,
    pub transport: TransportType,
    pub address: Address,
    /// The TLS policy; `None`: unknown.
    pub tls: Option<TlsPolicy>,
    /// A port of this target: listed only while the subsystem has a listener there.
    pub is_here: bool,
}

/// The ports of a shared subsystem for one host.
#[derive(Debug, Clone, Default)]
pub struct SharedPorts {
    /// Ports of other targets that serve the subsystem, and of this target with their PORTIDs.
    pub listed: Vec<SharedPort>,
    /// See [`SharedSubsystem::later_ids`].
    pub later_ids: Option<u16>,
}

impl SharedSubsystem {
    pub(super) fn allows(&self, host: &Nqn) -> bool {
        self.any_host || self.hosts.contains(host)
    }
}

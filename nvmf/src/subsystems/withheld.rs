//! Withholds a subsystem from a listener: the subsystem's discovery log entries omit the listener,
//! and hosts that connect there are refused.
//!
//! A refused host gets the status of a listener without the subsystem, so that it tries another
//! path. The log names the setting that is the cause.

use std::sync::atomic::Ordering;

use nacre_nvmf_wire::Nqn;

use crate::subsystems::association::Teardown;
use crate::subsystems::nvmf_target::{Target, TargetError};
use crate::subsystems::subsystem::{Subsystem, SubsystemError, SubsystemListener};
use crate::transport::{Address, TransportType};

/// The reason why a subsystem refuses hosts on one of its listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withheld {
    /// The listener has `tcp_fallback = false`.
    TcpFallback,
    /// The volume's `transport_policy` admits other transports only.
    TransportPolicy,
    /// Management said so and gave no reason.
    ByRequest,
}

impl Withheld {
    /// Returns the text for the log: why a host is refused, and the remedy.
    pub(crate) fn refusal(self, nqn: &Nqn, host: &Nqn, kind: TransportType) -> String {
        let (setting, remedy) = match self {
            Self::TcpFallback => (
                "tcp_fallback = false of the listener",
                "set tcp_fallback = true, or move what uses the volume to a host with RDMA",
            ),
            Self::TransportPolicy => (
                "the transport_policy of the volume",
                "connect over the other transport, or change the policy with `nacre volume set \
                 --transport-policy`",
            ),
            Self::ByRequest => (
                "withheld = true of the listener",
                "connect over another transport, or add the listener again without withheld",
            ),
        };
        format!("{host} came to {nqn} over {kind}, which {setting} excludes; {remedy}")
    }
}

impl Target {
    /// Turns hosts away from a listener of a subsystem, or admits them there again. The listener
    /// stays: a host that reconnects meanwhile would be refused for good by one that is gone.
    pub fn withhold(
        &self,
        nqn: &Nqn,
        kind: TransportType,
        address: &Address,
        why: Option<Withheld>,
    ) -> Result<(), TargetError> {
        if self.subsystem(nqn)?.withhold(kind, address, why)? {
            self.discovery_changed();
        }
        Ok(())
    }
}

impl Subsystem {
    /// Hosts that are connected through a listener are disconnected when they are turned away from
    /// it. Answers whether anything changed.
    fn withhold(
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
                association.tear_down(Teardown::ListenerRemoved);
            }
        }
        Ok(true)
    }
}

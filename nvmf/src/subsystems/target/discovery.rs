//! The target's part in discovery: its own names, and the contents of a host's log.

use std::sync::atomic::Ordering;

use nacre_nvmf_wire::Nqn;

use super::{Target, TargetError};
use crate::subsystems::association::pending;
use crate::subsystems::discovery::{Reachable, Snapshot};
use crate::transport::{Address, TransportType};

/// Another discovery or NVM subsystem that the discovery log points to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referral {
    pub transport: TransportType,
    pub address: Address,
    pub subnqn: Nqn,
    /// `subnqn` is a discovery subsystem's; only its well-known name shows that by itself.
    pub discovery: bool,
    pub secure_channel: bool,
}

impl Target {
    /// The name that no other discovery subsystem has.
    pub fn unique_discovery_nqn(&self) -> Option<Nqn> {
        self.discovery_nqn.lock().clone()
    }

    /// The name of the discovery subsystem for hosts: its unique name, or else the well-known one.
    pub fn discovery_nqn(&self) -> Nqn {
        self.unique_discovery_nqn().unwrap_or_else(Nqn::discovery)
    }

    /// Gives the discovery subsystem a unique name in place of its present one. Hosts can no longer
    /// connect to the old name; connected hosts stay. `None`, or the well-known name: it has only
    /// that one.
    pub fn set_discovery_nqn(&self, nqn: Option<Nqn>) -> Result<(), TargetError> {
        let nqn = nqn.filter(|n| !n.is_discovery());
        let subsystems = self.subsystems.read();
        if let Some(taken) = nqn.as_ref().filter(|n| subsystems.contains_key(*n)) {
            return Err(TargetError::SubsystemExists {
                nqn: taken.to_string(),
            });
        }
        let before = std::mem::replace(&mut *self.discovery_nqn.lock(), nqn.clone());
        drop(subsystems);
        if before != nqn {
            self.discovery_changed();
        }
        Ok(())
    }

    pub fn add_referral(&self, referral: Referral) -> Result<(), TargetError> {
        let mut referrals = self.referrals.lock();
        if referrals.iter().any(|r| same_referral(r, &referral)) {
            return Err(TargetError::ReferralExists {
                address: referral.address.to_string(),
            });
        }
        referrals.push(referral);
        drop(referrals);
        self.discovery_changed();
        Ok(())
    }

    pub fn remove_referral(&self, referral: &Referral) -> Result<(), TargetError> {
        let mut referrals = self.referrals.lock();
        let before = referrals.len();
        referrals.retain(|r| !same_referral(r, referral));
        if referrals.len() == before {
            return Err(TargetError::NoReferral {
                address: referral.address.to_string(),
            });
        }
        drop(referrals);
        self.discovery_changed();
        Ok(())
    }

    pub fn referrals(&self) -> Vec<Referral> {
        self.referrals.lock().clone()
    }

    /// GENCTR of the discovery log.
    pub fn discovery_generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The contents of a host's discovery log.
    pub fn discovery_snapshot(&self, host: &Nqn) -> Snapshot {
        // First of all: what changes from here on shows in a later generation.
        let generation = self.discovery_generation();
        let subsystems = self.subsystems();
        let allowed = subsystems.iter().filter(|s| s.allows(host));
        Snapshot {
            generation,
            subsystems: allowed
                .map(|s| Reachable {
                    nqn: s.nqn().clone(),
                    model: s.config.controller_model,
                    listeners: s.listeners(),
                    has_psk: s.host_psk(host).is_some(),
                })
                .collect(),
            discovery: self.discovery.listeners(),
            discovery_nqn: self.discovery_nqn(),
            referrals: self.referrals(),
            // Each entry reports ASQSZ; the least of all transports is right for every entry.
            admin_entries: self.least_admin_entries(),
            same_transport: self.config.discovery_same_transport,
            same_address: self.config.discovery_same_address,
            same_service: self.config.discovery_same_service,
        }
    }

    fn least_admin_entries(&self) -> u16 {
        let kinds = self.plugs().iter().map(|p| p.kind()).collect::<Vec<_>>();
        let entries = kinds
            .into_iter()
            .map(|kind| self.queue_limits(kind).max_admin_entries);
        entries.min().unwrap_or(self.config.max_admin_entries)
    }

    pub(crate) fn discovery_changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.discovery.notify(pending::DISCOVERY);
    }
}

fn same_referral(a: &Referral, b: &Referral) -> bool {
    (a.transport, &a.address, &a.subnqn) == (b.transport, &b.address, &b.subnqn)
}

//! Discovery by the target: the NQN of the discovery subsystem, referrals, and the snapshot for a
//! host's discovery log.

use std::sync::atomic::Ordering;

use nacre_nvmf_wire::Nqn;

use super::{ListenOptions, Target, TargetError};
use crate::subsystems::association::pending;
use crate::subsystems::discovery::{Reachable, Referral, Snapshot};
use crate::transport::{Address, ListenerOptions, TlsPolicy, TransportType};

impl Target {
    /// The unique NQN of the discovery subsystem; `None`: it has only the well-known one.
    pub fn unique_discovery_nqn(&self) -> Option<Nqn> {
        self.discovery_nqn.lock().clone()
    }

    /// The NQN of the discovery subsystem in the discovery log: the unique one, or else the
    /// well-known one.
    pub fn discovery_nqn(&self) -> Nqn {
        self.unique_discovery_nqn().unwrap_or_else(Nqn::discovery)
    }

    /// Gives the discovery subsystem a unique NQN in place of its current one. Hosts can no longer
    /// connect to the old one; connected hosts stay. `None`, or the well-known NQN: it has only
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
        let mut shared = self.shared.ports_for(host);
        let allowed = subsystems.iter().filter(|s| s.allows(host));
        let mut reachable: Vec<Reachable> = allowed
            .map(|s| Reachable {
                nqn: s.nqn().clone(),
                model: s.config.controller_model,
                listeners: s.listeners(),
                shared: shared.remove(s.nqn()).unwrap_or_default(),
                has_psk: s.host_psk(host).is_some(),
                must_concat: s.host_must_concat(host),
                knows_host: true,
            })
            .collect();
        // Subsystems that only other targets serve.
        reachable.extend(shared.into_iter().map(|(nqn, shared)| Reachable {
            shared,
            knows_host: false,
            ..Reachable::new(nqn)
        }));
        Snapshot {
            generation,
            subsystems: reachable,
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

    /// Opens, changes or closes the discovery service's own port at the address of a listener that
    /// was added or removed, because hosts look there first. A change of its TLS policy opens it
    /// again, and its hosts reconnect. If the port cannot be opened, a warning is logged.
    pub(super) fn update_discovery_port(&self, kind: TransportType, address: &Address) {
        let Some(address) = self.discovery_address(address) else {
            return;
        };
        let wanted = self.discovery_policy(kind, &address);
        let listeners = self.discovery.listeners();
        let mut open = listeners.iter().filter(|l| l.transport == kind);
        let is = open.find(|l| l.address == address).map(|l| l.options.tls());
        let entry = (kind, address);
        let is_automatic = self.automatic().contains(&entry);
        if is == wanted || (is.is_some() && !is_automatic) {
            return;
        }
        self.automatic().retain(|a| *a != entry);
        if is.is_some()
            && let Err(error) = self.remove_listener(self.discovery.nqn(), kind, &entry.1)
        {
            tracing::debug!(%error, "the discovery port was closed already");
        }
        let Some(tls) = wanted else { return };
        let options = ListenOptions {
            listener: ListenerOptions {
                tls: Some(tls).filter(|tls| *tls != TlsPolicy::Off),
                ..ListenerOptions::default()
            },
            ..ListenOptions::default()
        };
        match self.add_listener_with(self.discovery.nqn(), kind, &entry.1, options) {
            Ok(_) => self.automatic().push(entry),
            Err(error) => tracing::warn!(%error, "no discovery service on its well-known port"),
        }
    }

    /// Closes the discovery port that the target opened where a subsystem is about to be served
    /// with another TLS policy. [`Target::update_discovery_port`] opens it again.
    pub(super) fn free_discovery_port(
        &self,
        kind: TransportType,
        address: &Address,
        tls: TlsPolicy,
    ) {
        let listeners = self.discovery.listeners();
        let mut there = listeners.iter().filter(|l| l.transport == kind);
        let differs = there.any(|l| l.address == *address && l.options.tls() != tls);
        let is_automatic = || {
            let automatic = self.automatic();
            automatic
                .iter()
                .any(|(of, at)| (*of, at) == (kind, address))
        };
        if differs
            && is_automatic()
            && let Err(error) = self.remove_listener(self.discovery.nqn(), kind, address)
        {
            tracing::debug!(%error, "the discovery port was closed already");
        }
    }

    /// The TLS policy of the discovery port at an address: `allow` if a listener there takes TLS.
    /// Not `require`: hosts commonly discover in clear and then connect with TLS. But a subsystem
    /// that is itself served at the discovery port shares the listener, and its policy counts.
    /// `None`: no subsystem is served at another port there.
    fn discovery_policy(&self, kind: TransportType, discovery: &Address) -> Option<TlsPolicy> {
        let subsystems = self.subsystems();
        let listeners = subsystems.iter().flat_map(|s| s.listeners());
        let there = listeners
            .filter(|l| l.transport == kind)
            .filter(|l| self.discovery_address(&l.address).as_ref() == Some(discovery));
        let (shared, others): (Vec<_>, Vec<_>) = there.partition(|l| l.address == *discovery);
        let policies = others.iter().map(|l| match l.options.tls() {
            TlsPolicy::Off => TlsPolicy::Off,
            TlsPolicy::Allow | TlsPolicy::Require => TlsPolicy::Allow,
        });
        let policy = policies.reduce(|a, b| if a == b { a } else { TlsPolicy::Allow })?;
        Some(shared.first().map_or(policy, |l| l.options.tls()))
    }

    fn discovery_address(&self, address: &Address) -> Option<Address> {
        match (self.config.discovery_port, address) {
            (Some(port), Address::Ip(ip)) => {
                let mut of_discovery = *ip;
                of_discovery.set_port(port);
                Some(Address::Ip(of_discovery))
            }
            _ => None,
        }
    }

    fn least_admin_entries(&self) -> u16 {
        let kinds = self.plugs().iter().map(|p| p.kind()).collect::<Vec<_>>();
        let entries = kinds
            .into_iter()
            .map(|kind| self.queue_limits(kind).max_admin_entries);
        entries
            .min()
            .unwrap_or(self.config.queue_limits.max_admin_entries)
    }

    pub(crate) fn discovery_changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.discovery.notify(pending::DISCOVERY);
    }
}

fn same_referral(a: &Referral, b: &Referral) -> bool {
    (a.transport, &a.address, &a.subnqn) == (b.transport, &b.address, &b.subnqn)
}

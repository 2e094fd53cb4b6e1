//! Hosts that must use secure channel concatenation, for the doctor.

use nacre_nvmf::auth::{Group, Hash, Offer};
use nacre_nvmf::subsystems::Target;
use nacre_nvmf::transport::{TlsPolicy, TransportType};

use crate::config::Settings;
use crate::doctor::ConcatHost;

/// The hosts of a running target.
pub fn of_target(target: &Target) -> Vec<ConcatHost> {
    let offer = target.authentication.offer();
    let mut found = Vec::new();
    for subsystem in target.subsystems() {
        let has_listener = subsystem.listeners().iter().any(|listener| {
            listener.transport == TransportType::Tcp && listener.options.tls() == TlsPolicy::Allow
        });
        let hosts = subsystem.hosts().into_iter();
        let hosts = hosts.filter(|host| subsystem.host_must_concat(host));
        found.extend(hosts.map(|host| {
            let names = (subsystem.nqn().to_string(), host.to_string());
            concat_host(names, has_listener, &offer)
        }));
    }
    found
}

/// The hosts of a configuration.
pub fn of_settings(settings: &Settings) -> Vec<ConcatHost> {
    let nvmf = &settings.nvmf;
    // The file was checked.
    let offer = Offer {
        hashes: Offer::hashes_of(&nvmf.dhchap_digests).unwrap_or_default(),
        groups: Offer::groups_of(&nvmf.dhchap_dhgroups).unwrap_or_default(),
    };
    let listeners = settings.listeners();
    let mut found = Vec::new();
    for subsystem in &nvmf.subsystem {
        let has_listener = listeners.iter().any(|listener| {
            let serves =
                subsystem.listeners.is_empty() || subsystem.listeners.contains(&listener.name);
            serves && listener.options.tls() == TlsPolicy::Allow
        });
        let hosts = subsystem.host.iter().filter(|host| host.keys.must_concat());
        found.extend(hosts.map(|host| {
            let names = (subsystem.nqn.clone(), host.nqn.clone());
            concat_host(names, has_listener, &offer)
        }));
    }
    found
}

fn concat_host(
    (subsystem, host): (String, String),
    has_listener: bool,
    offer: &Offer,
) -> ConcatHost {
    ConcatHost {
        subsystem,
        host,
        has_listener,
        has_group: offer.groups.iter().any(|group| *group != Group::Null),
        has_hash: offer.hashes.iter().any(|hash| *hash != Hash::Sha512),
    }
}

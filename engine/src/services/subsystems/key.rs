//! The journal keys of the target's objects. A key is the path of its object. NQNs are escaped in
//! it, so that a name with a slash cannot match the key of another object:
//!
//! ```text
//!   nvmf/transport/TCP                 nvmf/referral/TCP/192.0.2.1:8009/<nqn>
//!   nvmf/discovery_nqn
//!   nvmf/subsystem/<nqn>               and below it /host/<nqn>, /listener/TCP/192.0.2.1:4420,
//!                                      /listener/TCP/192.0.2.1:4420/ana, /ns/<nsid>,
//!                                      /ns/<nsid>/host/<nqn>, /ns/<nsid>/reservation
//! ```
//!
//! Settings of an object are part of its record. For an object that the configuration file
//! declares, they are records below its key, such as `/allow_any_host` and `/ns/<nsid>/ana_group`:
//! the object itself is not stored.

use std::fmt::Display;

use nacre_nvmf::transport::TransportType;
use nacre_nvmf_wire::Nqn;

fn part(nqn: &Nqn) -> String {
    nqn.as_str().replace('%', "%25").replace('/', "%2F")
}

pub const DISCOVERY_NQN: &str = "nvmf/discovery_nqn";

pub fn transport(kind: TransportType) -> String {
    format!("nvmf/transport/{kind}")
}

pub fn referral(kind: TransportType, address: &impl Display, nqn: &Nqn) -> String {
    format!("nvmf/referral/{kind}/{address}/{}", part(nqn))
}

pub fn subsystem(nqn: &Nqn) -> String {
    format!("nvmf/subsystem/{}", part(nqn))
}

/// Key of the setting `allow_any_host` of a declared subsystem.
pub fn allow_any_host(nqn: &Nqn) -> String {
    format!("{}/allow_any_host", subsystem(nqn))
}

pub fn host(nqn: &Nqn, host: &Nqn) -> String {
    format!("{}/host/{}", subsystem(nqn), part(host))
}

/// Key of a change of the host's keys after it was allowed.
pub fn host_keys(nqn: &Nqn, host: &Nqn) -> String {
    format!("{}/keys", self::host(nqn, host))
}

/// Key of a rotation of the host's key of this kind.
pub fn rotation(nqn: &Nqn, host: &Nqn, kind: &str) -> String {
    format!("{}/rotation/{kind}", self::host(nqn, host))
}

pub fn listener(nqn: &Nqn, kind: TransportType, address: &impl Display) -> String {
    format!("{}/listener/{kind}/{address}", subsystem(nqn))
}

/// Key of ANA states set on a listener: for all groups, or for one.
pub fn ana(listener: &str, group: Option<u32>) -> String {
    match group {
        None => format!("{listener}/ana"),
        Some(group) => format!("{listener}/ana/{group}"),
    }
}

pub fn namespaces(nqn: &Nqn) -> String {
    format!("{}/ns/", subsystem(nqn))
}

pub fn namespace(nqn: &Nqn, nsid: u32) -> String {
    format!("{}{nsid}", namespaces(nqn))
}

/// Key of the ANA group of a declared namespace.
pub fn ana_group(nqn: &Nqn, nsid: u32) -> String {
    format!("{}/ana_group", namespace(nqn, nsid))
}

/// Key of the namespace's reservation, if it persists through power loss.
pub fn reservation(nqn: &Nqn, nsid: u32) -> String {
    format!("{}/reservation", namespace(nqn, nsid))
}

pub fn namespace_host(nqn: &Nqn, nsid: u32, host: &Nqn) -> String {
    format!("{}/host/{}", namespace(nqn, nsid), part(host))
}

/// Prefix of all keys below that of an object.
pub fn below(key: &str) -> String {
    format!("{key}/")
}

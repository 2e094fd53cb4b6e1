//! `nvmf_*`: subsystems, namespaces, listeners and hosts of the NVMe-oF target.
//!
//! ```text
//!   target      the one target, its start-up options
//!   transport   nvmf_create_transport, nvmf_get_transports
//!   subsystem   subsystems
//!   host        hosts that may use a subsystem
//!   listener    listeners of one subsystem
//!   listeners   all listeners with their states
//!   namespace   namespaces of a subsystem, and their removal with the device
//!   discovery   name of the discovery subsystem, referrals
//!   connected   controllers, queue pairs, statistics
//!   reservation storage of reservations that persist through power loss
//! ```
//!
//! Error codes and messages are SPDK's; `data` adds the cause and the remedy. A journal key is the
//! path of the object. NQNs are escaped in it, so that a name with a slash cannot match another
//! object's key:
//!
//! ```text
//!   nvmf/transport/TCP                 nvmf/referral/TCP/192.0.2.1:8009/<nqn>
//!   nvmf/discovery_nqn
//!   nvmf/subsystem/<nqn>               and below it /host/<nqn>, /listener/TCP/192.0.2.1:4420,
//!                                      /listener/TCP/192.0.2.1:4420/ana, /ns/<nsid>,
//!                                      /ns/<nsid>/host/<nqn>, /ns/<nsid>/reservation
//! ```
//!
//! Settings of an object are part of its record. Settings of an object that the configuration file
//! declares have their own records below it, /allow_any_host and /ns/<nsid>/ana_group: the object
//! itself stays out of the store.

mod address;
mod connected;
mod discovery;
mod host;
mod listener;
mod listeners;
mod namespace;
mod refusal;
mod reservation;
mod subsystem;
mod target;
mod transport;

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::subsystems::{Subsystem, SubsystemKind};
use nacre_nvmf_wire::Nqn;
use tracing::warn;

use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INVALID_PARAMS};
use crate::rpc::{Registry, RpcError};
use crate::services::engine::Engine;
use crate::store::{Change, Edit};

pub use discovery::configured_nqn;
pub use listener::{ADD_LISTENER, AnaWord, is_stored_listener, withhold};
pub use namespace::{bdev_gone, forget_namespaces_of};
pub use reservation::{ReservationJobs, store_reservations};
pub use subsystem::{CREATE_SUBSYSTEM, derived_serial_number};
pub use target::{DiscoveryFilter, config};

/// An address in the form that replies use.
pub fn address_reply(
    kind: nacre_nvmf::transport::TransportType,
    address: &nacre_nvmf::transport::Address,
) -> impl serde::Serialize + use<> {
    address::AddressReply::new(kind, address)
}

pub fn register(registry: &mut Registry<Engine>) {
    target::register(registry);
    transport::register(registry);
    subsystem::register(registry);
    listener::register(registry);
    listeners::register(registry);
    namespace::register(registry);
    reservation::register(registry);
    host::register(registry);
    discovery::register(registry);
    connected::register(registry);
}

/// Name of the only target.
pub const TARGET: &str = "nvmf_tgt";

/// How long a removal waits for host connections to close.
const PATIENCE: Duration = Duration::from_secs(10);

/// Refuses any target name but ours. For methods that act on the target itself.
fn check_target(tgt_name: Option<&str>) -> Result<(), RpcError> {
    match tgt_name {
        None | Some(TARGET) => Ok(()),
        Some(_) => Err(refusal::failed(
            "Unable to find a target.",
            format!("the one target here is named {TARGET}"),
        )
        .field("tgt_name")
        .remedy("leave tgt_name out")),
    }
}

/// As `check_target`, for methods that act on a subsystem: SPDK uses another code and text there.
fn check_target_of_subsystem(tgt_name: Option<&str>) -> Result<(), RpcError> {
    check_target(tgt_name).map_err(|refused| RpcError {
        code: INVALID_PARAMS,
        message: format!("NVMf target '{}' not found", tgt_name.unwrap_or_default()),
        ..refused
    })
}

/// Finds a subsystem by name, including the discovery subsystem.
fn any_subsystem(
    plane: &Plane,
    tgt_name: Option<&str>,
    nqn: &str,
) -> Result<Arc<Subsystem>, RpcError> {
    check_target_of_subsystem(tgt_name)?;
    match Nqn::new(nqn) {
        Ok(name) => plane.target.subsystem(&name).or_refuse(),
        Err(error) => Err(refusal::no_subsystem(nqn).cause(error.to_string())),
    }
}

/// Finds an NVM subsystem by name. Refuses the discovery subsystem, which has no namespaces and no
/// access list: each host sees the subsystems that it may use.
fn nvm_subsystem(
    plane: &Plane,
    tgt_name: Option<&str>,
    nqn: &str,
) -> Result<Arc<Subsystem>, RpcError> {
    let subsystem = any_subsystem(plane, tgt_name, nqn)?;
    match subsystem.kind {
        SubsystemKind::Nvm => Ok(subsystem),
        SubsystemKind::Discovery => Err(RpcError::errno(
            Errno::ENOTSUP,
            "the discovery subsystem has neither namespaces nor a list of hosts",
        )
        .field("nqn")
        .remedy("name an NVM subsystem; nvmf_get_subsystems lists them")),
    }
}

pub fn host_nqn(text: &str) -> Result<Nqn, RpcError> {
    let host = Nqn::foreign(text).map_err(|error| {
        RpcError::invalid_params(error.to_string())
            .field("host")
            .remedy("give the host's NQN, as in its /etc/nvme/hostnqn")
    })?;
    if !host.is_well_formed() {
        warn!(%host, "the host's name is not a valid NQN; the host is served under it nevertheless");
    }
    Ok(host)
}

/// Edits that forget an object that could not be restored, with everything below it. An object
/// created later under the same name must not inherit these records.
pub fn forget_lost(key: &str) -> Vec<Edit> {
    let own = Edit::Remove(key.to_owned());
    if key.starts_with("nvmf/") {
        vec![Edit::RemoveAll(key::below(key)), own]
    } else {
        vec![own]
    }
}

/// Forgets a subsystem and everything below it.
pub fn without_subsystem(nqn: &Nqn) -> Change {
    let own = key::subsystem(nqn);
    Change(vec![Edit::RemoveAll(key::below(&own)), Edit::Remove(own)])
}

/// Keys of journal records.
mod key {
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

    /// Settings of a subsystem that the configuration file declares.
    pub fn allow_any_host(nqn: &Nqn) -> String {
        format!("{}/allow_any_host", subsystem(nqn))
    }

    pub fn host(nqn: &Nqn, host: &Nqn) -> String {
        format!("{}/host/{}", subsystem(nqn), part(host))
    }

    pub fn listener(nqn: &Nqn, kind: TransportType, address: &impl Display) -> String {
        format!("{}/listener/{kind}/{address}", subsystem(nqn))
    }

    /// ANA states set on a listener: all groups here, single groups below.
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

    /// Settings of a namespace that the configuration file declares.
    pub fn ana_group(nqn: &Nqn, nsid: u32) -> String {
        format!("{}/ana_group", namespace(nqn, nsid))
    }

    /// The namespace's reservation, if it persists through power loss.
    pub fn reservation(nqn: &Nqn, nsid: u32) -> String {
        format!("{}/reservation", namespace(nqn, nsid))
    }

    pub fn namespace_host(nqn: &Nqn, nsid: u32, host: &Nqn) -> String {
        format!("{}/host/{}", namespace(nqn, nsid), part(host))
    }

    /// Prefix of all keys below an object.
    pub fn below(key: &str) -> String {
        format!("{key}/")
    }
}

/// Waits until `done` returns true. Returns `false` on timeout.
async fn wait_until(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = tokio::time::Instant::now() + patience;
    // The event happens on reactors, normally within a turn or two.
    let mut pause = Duration::from_micros(200);
    while !done() {
        if tokio::time::Instant::now() >= end {
            return false;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(5));
    }
    true
}

#[cfg(test)]
mod tests;

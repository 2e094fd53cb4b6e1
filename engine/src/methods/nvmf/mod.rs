//! `nvmf_*`: what the NVMe-oF target serves, to whom, and where.
//!
//! ```text
//!   target      the one target, its start-up options
//!   transport   nvmf_create_transport, nvmf_get_transports
//!   subsystem   subsystems          host       who may use them
//!   listener(s) where they are      namespace  what is in them, and what becomes of it
//!   discovery   its name, referrals connected  controllers, queue pairs, statistics
//!   reservation where those are kept that persist through power loss
//! ```
//!
//! Codes and messages are SPDK's; what is wrong and what to do about it stands beside them in
//! `data`. Journal keys name the object by its place, NQNs escaped so that a name with a slash in
//! it cannot pass for another object:
//!
//! ```text
//!   nvmf/transport/TCP                 nvmf/referral/TCP/192.0.2.1:8009/<nqn>
//!   nvmf/discovery_nqn
//!   nvmf/subsystem/<nqn>               and below it /host/<nqn>, /listener/TCP/192.0.2.1:4420,
//!                                      /listener/TCP/192.0.2.1:4420/ana, /ns/<nsid>, /ns/<nsid>/host/<nqn>,
//!                                      /ns/<nsid>/reservation
//! ```
//!
//! What is set about an object is in its record. About one that the configuration file declares it is a record of its
//! own below it, /allow_any_host and /ns/<nsid>/ana_group: the object stays the file's.

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

use crate::engine::Engine;
use crate::plane::Plane;
use crate::rpc::error::{Errno, INVALID_PARAMS};
use crate::rpc::{Registry, RpcError};
use crate::store::{Change, Edit};

pub use discovery::configured_nqn;
pub use listener::{ADD_LISTENER, AnaWord, is_stored_listener, withhold};
pub use namespace::{bdev_gone, forget_namespaces_of};
pub use reservation::{Keeping, keep as keep_reservations};
pub use subsystem::{CREATE_SUBSYSTEM, derived_serial_number};
pub use target::{DiscoveryFilter, config};

/// An address as answers have it.
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

/// The name of the one target.
pub const TARGET: &str = "nvmf_tgt";

/// How long a removal waits for the hosts' connections to be closed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Refuses the name of another target: there is one. For methods that act on the target itself.
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

/// The same for methods that act on a subsystem. SPDK refuses these with another code and text.
fn check_target_of_subsystem(tgt_name: Option<&str>) -> Result<(), RpcError> {
    check_target(tgt_name).map_err(|refused| RpcError {
        code: INVALID_PARAMS,
        message: format!("NVMf target '{}' not found", tgt_name.unwrap_or_default()),
        ..refused
    })
}

/// A subsystem by name, the discovery subsystem too.
fn any_subsystem(
    plane: &Plane,
    tgt_name: Option<&str>,
    nqn: &str,
) -> Result<Arc<Subsystem>, RpcError> {
    check_target_of_subsystem(tgt_name)?;
    match Nqn::new(nqn) {
        Ok(name) => Ok(plane.target.subsystem(&name)?),
        Err(error) => Err(refusal::no_subsystem(nqn).cause(error.to_string())),
    }
}

/// A subsystem with namespaces. The discovery subsystem shows every host what it may use, and has
/// nothing of its own to allow or to hide.
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

/// Edits that give up what could not be made again, and all that is in it: made anew by somebody, it is not to get that.
pub fn forget_lost(key: &str) -> Vec<Edit> {
    let own = Edit::Remove(key.to_owned());
    if key.starts_with("nvmf/") {
        vec![Edit::RemoveAll(key::below(key)), own]
    } else {
        vec![own]
    }
}

/// Forgets a subsystem and everything of it.
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

    /// What was set about a subsystem of the file's.
    pub fn allow_any_host(nqn: &Nqn) -> String {
        format!("{}/allow_any_host", subsystem(nqn))
    }

    pub fn host(nqn: &Nqn, host: &Nqn) -> String {
        format!("{}/host/{}", subsystem(nqn), part(host))
    }

    pub fn listener(nqn: &Nqn, kind: TransportType, address: &impl Display) -> String {
        format!("{}/listener/{kind}/{address}", subsystem(nqn))
    }

    /// States set on a listener: of all groups, and below that of single ones.
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

    /// What was set about a namespace of the file's.
    pub fn ana_group(nqn: &Nqn, nsid: u32) -> String {
        format!("{}/ana_group", namespace(nqn, nsid))
    }

    /// What its hosts agreed, if it persists through power loss.
    pub fn reservation(nqn: &Nqn, nsid: u32) -> String {
        format!("{}/reservation", namespace(nqn, nsid))
    }

    pub fn namespace_host(nqn: &Nqn, nsid: u32, host: &Nqn) -> String {
        format!("{}/host/{}", namespace(nqn, nsid), part(host))
    }

    /// All that is below an object.
    pub fn below(key: &str) -> String {
        format!("{key}/")
    }
}

/// Waits until `done` says so; `false` when it did not in time.
async fn wait_until(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = tokio::time::Instant::now() + patience;
    // What is waited for happens on reactors, in a turn or two.
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

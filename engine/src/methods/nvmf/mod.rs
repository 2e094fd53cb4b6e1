//! `nvmf_*`: subsystems, namespaces, listeners and hosts of the NVMe-oF target.
//!
//! ```text
//!   target      the target and its start-up options
//!   transport   nvmf_create_transport, nvmf_get_transports
//!   subsystem   subsystems
//!   host        hosts that may use a subsystem
//!   rotate      new keys of hosts, while the former ones are accepted for a time
//!   auth        authentication of hosts
//!   listener    listeners of one subsystem
//!   listeners   all listeners with their states
//!   namespace   namespaces of a subsystem
//!   discovery   name of the discovery subsystem, referrals
//!   connected   controllers, queue pairs, statistics
//!   failover    makes a listener inaccessible for a time
//!   reservation reservations of a namespace, and restoring stored ones
//! ```
//!
//! Error codes and messages are SPDK's; `data` adds the cause and the remedy.

pub mod address;
pub mod auth;
pub mod connected;
mod discovery;
pub mod failover;
pub mod host;
pub mod listener;
pub mod listeners;
pub mod namespace;
mod refusal;
pub mod reservation;
pub mod rotate;
pub mod subsystem;
mod target;
pub mod transport;

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf::subsystems::{Subsystem, SubsystemKind};
use nacre_nvmf_wire::Nqn;

use crate::config::names::host_nqn;
use crate::plane::Plane;
use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INVALID_PARAMS};
use crate::rpc::{Registry, RpcError};
use crate::services::Engine;
use crate::services::subsystems::key;
use crate::store::{Change, Edit};

pub use subsystem::derived_serial_number;
pub use target::config;

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
    rotate::register(registry);
    auth::register(registry);
    discovery::register(registry);
    connected::register(registry);
    failover::register(registry);
}

/// Name of the only target.
pub const TARGET: &str = "nvmf_tgt";

/// Time limit for connections of hosts to close after a removal.
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

/// True for a parameter that need not be sent.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
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

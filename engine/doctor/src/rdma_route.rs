//! Checks whether the route to a target leaves this machine through an interface with RDMA.

use std::net::{IpAddr, SocketAddr};

use super::{System, rdma_path};

/// Follows the route to `target`. `Err`: the reason why RDMA is not possible on it.
pub fn check_rdma_route(system: &System, target: IpAddr) -> Result<(), String> {
    let source = system
        .probe
        .source_for(SocketAddr::new(target, 0))
        .map_err(|error| format!("no route to {target}: {error}"))?;
    let interface = system
        .interface_of(source)
        .ok_or_else(|| format!("{source} is on no interface that is known"))?;
    match rdma_path(system, &interface.name, source) {
        Ok(_) => Ok(()),
        Err(reason) => Err(format!("{}: {reason}", reason.word())),
    }
}

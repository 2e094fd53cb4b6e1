//! Creates the soft-RoCE devices that the configuration requests (`rdma.rxe`), for machines where
//! no administrator runs `rdma link add`.

use std::thread;
use std::time::{Duration, Instant};

use nacre_transport_rdma_link::netlink::{self, LinkError};
use nacre_transport_rdma_link::{Fabric, Roots};
use tracing::{info, warn};

/// Time limit for the GID table, which the kernel fills after `rdma link add` has returned.
const SETTLE: Duration = Duration::from_secs(2);

/// Creates a soft-RoCE device on each interface without an RDMA device. A failure is logged: a
/// listener that requires RDMA reports the reason.
pub async fn make(interfaces: Vec<String>) {
    if interfaces.is_empty() {
        return;
    }
    // Files and the kernel may be slow.
    let made = tokio::task::spawn_blocking(move || {
        let roots = Roots::real();
        for netdev in interfaces {
            match ensure(&roots, &netdev) {
                Ok(Some(name)) => info!(device = name, netdev, "soft-RoCE device added"),
                Ok(None) => {}
                Err(error) => warn!(netdev, "no soft-RoCE device: {error}"),
            }
        }
    });
    if let Err(error) = made.await {
        warn!(%error, "soft-RoCE devices were not made");
    }
}

/// Creates a device if the interface has none, and returns its name.
fn ensure(roots: &Roots, netdev: &str) -> Result<Option<String>, LinkError> {
    let fabric = Fabric::read(&roots.sys);
    let on_it = |port: &nacre_transport_rdma_link::Port| port.netdev.as_deref() == Some(netdev);
    if fabric.ports().any(|(_, port)| on_it(port)) {
        return Ok(None);
    }
    let name = free_name(&fabric);
    netlink::rxe_add(roots, &name, netdev)?;
    wait_for_gids(roots, &name);
    Ok(Some(name))
}

fn free_name(fabric: &Fabric) -> String {
    (0..)
        .map(|number| format!("rxe{number}"))
        .find(|name| fabric.device(name).is_none())
        .expect("there are more numbers than devices")
}

/// The RDMA devices, once the new one has its GIDs or [`SETTLE`] has passed.
pub fn wait_for_gids(roots: &Roots, name: &str) -> Fabric {
    let deadline = Instant::now() + SETTLE;
    loop {
        let fabric = Fabric::read(&roots.sys);
        let filled = fabric.device(name).is_some_and(|device| {
            device
                .ports
                .iter()
                .any(|port| port.is_active() && !port.gids.is_empty())
        });
        if filled || Instant::now() >= deadline {
            return fabric;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[cfg(test)]
mod tests {
    use nacre_transport_rdma_link::testing;

    use super::*;

    #[test]
    fn an_interface_with_a_device_needs_none() {
        let tree = testing::rxe_on_eth();
        assert_eq!(ensure(&tree.roots(), "eth0").unwrap(), None);
        let tree = testing::mlx5_dual_port();
        assert_eq!(ensure(&tree.roots(), "ens1f1").unwrap(), None);
    }

    #[test]
    fn an_unknown_interface_is_refused_by_name() {
        let tree = testing::rxe_on_eth();
        let refused = ensure(&tree.roots(), "eth9").unwrap_err();
        assert!(matches!(&refused, LinkError::NoNetdev { netdev, .. } if netdev == "eth9"));
        assert!(refused.to_string().contains("eth0"), "{refused}");
    }

    #[test]
    fn taken_names_are_skipped() {
        let name = |tree: testing::Tree| free_name(&Fabric::read(&tree.roots().sys));
        assert_eq!(name(testing::empty()), "rxe0");
        assert_eq!(name(testing::rxe_on_eth()), "rxe1");
    }
}

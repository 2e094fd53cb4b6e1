//! `nacre rdma rxe`: creates and deletes soft-RoCE devices, without iproute2.

use clap::Subcommand;
use nacre_transport_rdma_link::{Roots, netlink};
use serde_json::json;

use crate::{Failure, output};
use nacre_engine::services::rdma::soft;

#[derive(Debug, Subcommand)]
pub(super) enum RxeCommand {
    /// Add a soft-RoCE device on an Ethernet interface, as `rdma link add NAME type rxe netdev DEV`
    /// does
    #[command(after_help = "Example: nacre rdma rxe add rxe0 --netdev eth0")]
    Add {
        /// Name of the new device, such as rxe0
        name: String,
        /// The Ethernet interface that it uses
        #[arg(long, value_name = "DEV")]
        netdev: String,
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
    /// Delete a soft-RoCE device; its users are disconnected
    #[command(visible_alias = "delete")]
    Del {
        /// Name of the soft-RoCE device
        name: String,
        /// Print JSON for programs
        #[arg(long)]
        json: bool,
    },
}

pub(super) fn run(roots: &Roots, command: RxeCommand) -> Result<(), Failure> {
    match command {
        RxeCommand::Add { name, netdev, json } => {
            netlink::rxe_add(roots, &name, &netdev).map_err(anyhow::Error::from)?;
            let fabric = soft::wait_for_gids(roots, &name);
            let port = fabric.device(&name).and_then(|device| device.ports.first());
            if json {
                return output::json(&json!({
                    "name": name,
                    "netdev": netdev,
                    "state": port.map(|port| port.state.to_string()),
                    "addresses": port.map(|port| {
                        port.gids.iter().filter_map(|gid| gid.ip).collect::<Vec<_>>()
                    }),
                }));
            }
            let Some(port) = port else {
                return output::line(&format!("{name} added on {netdev}"));
            };
            let ips: Vec<String> = port
                .gids
                .iter()
                .filter_map(|gid| Some(gid.ip?.to_string()))
                .collect();
            output::line(&format!(
                "{name} added on {netdev}: {}, addresses {}",
                port.state,
                ips.join(", ")
            ))
        }
        RxeCommand::Del { name, json } => {
            netlink::rxe_del(roots, &name).map_err(anyhow::Error::from)?;
            if json {
                output::json(&json!({ "name": name, "deleted": true }))
            } else {
                output::line(&format!("{name} deleted"))
            }
        }
    }
}

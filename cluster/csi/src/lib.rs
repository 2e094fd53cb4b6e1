//! The CSI driver: gives volumes of Nacre to Kubernetes, and to other systems that speak the
//! Container Storage Interface. `nacre csi` runs it.
//!
//! ```text
//!   messages    the interface's messages                            parse
//!   capability  access modes, sizes, names, parameters              decide
//!   route       gRPC paths -> calls; bounds, one thread per call    perform
//!   server      the socket, start and end                           perform
//!   pending     one operation at a time per volume                  decide
//!   daemon      volumes and publications, by JSON-RPC               perform
//!   identity    csi.v1.Identity
//!   controller  csi.v1.Controller: no state, everything is asked of the daemon
//!   node        csi.v1.Node: connects, formats and mounts on this machine
//! ```
//!
//! The driver moves no data and makes no decision about volumes: the host's kernel reaches them by
//! NVMe-oF, and the daemons decide. A call runs on a thread of its own, because it waits for the
//! daemon, for programs and for the kernel.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod capability;
pub mod controller;
pub mod daemon;
pub mod identity;
pub mod messages;
pub mod node;
mod pending;
mod route;
pub mod server;

pub use controller::Controller;
pub use daemon::Daemon;
pub use identity::Identity;
pub use node::Node;
pub use route::{Driver, Router};
pub use server::{Endpoint, ServeError, serve};

/// The name of the driver, of its `CSIDriver` object, and the `provisioner` of storage classes.
pub const DRIVER_NAME: &str = "csi.nacre.io";

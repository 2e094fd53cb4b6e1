//! What the kernel says about RDMA devices, without libibverbs.
//!
//! Devices, ports, GIDs and the network interfaces behind them come from sysfs ([`Fabric::read`]);
//! soft-RoCE links are added and deleted over RDMA netlink ([`netlink`]). Whether an address can be
//! listened on over RDMA, and if not why, is [`capability`]'s answer. Nothing here opens a device,
//! allocates DMA memory or speaks verbs: this works, and explains, where those do not.
//!
//! Every function that reads the system takes the root of what it reads ([`Roots`]), so that a test
//! can put any machine in a folder.
#![forbid(unsafe_code)]

mod capability;
mod counters;
mod driver;
mod environment;
mod fabric;
mod firmware;
mod gid;
mod modules;
pub mod netlink;

mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use capability::{Chosen, Reason, Want, capability};
pub use counters::{Counter, CounterGroup, counters};
pub use driver::{DriverKind, Quirk, quirk};
pub use environment::{Access, Environment, Memlock, Uverbs};
pub use fabric::{Device, Fabric, LinkLayer, NodeType, PhysState, Port, PortState};
pub use firmware::{BadFirmware, Firmware, firmware};
pub use gid::{Gid, GidKind};
pub use modules::{ModuleState, Modules};
pub use sysfs::Roots;

#[cfg(test)]
mod tests;

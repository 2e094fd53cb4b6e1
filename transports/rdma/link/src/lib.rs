//! The kernel's facts about RDMA devices, without libibverbs.
//!
//! Devices, ports, GIDs and the network interfaces behind them come from sysfs ([`Fabric::read`]).
//! Soft-RoCE links are added and deleted over RDMA netlink ([`netlink`]). What makes an Ethernet
//! lossless is in [`dcb`] (the card's settings), [`ethtool`] (pause and counters) and [`lldp`] (the
//! switch's settings). [`capability`] answers
//! whether an address can have an RDMA listener, and if not, why. Nothing here opens a device,
//! allocates DMA memory or speaks verbs: this crate works, and explains, where those do not.
//!
//! Every function that reads the system takes the root of its files ([`Roots`]), so that a test can
//! put any machine in a folder.
#![forbid(unsafe_code)]

mod absence;
mod capability;
mod counters;
pub mod dcb;
mod driver;
mod environment;
pub mod ethtool;
mod fabric;
mod firmware;
pub mod fuzzing;
mod gid;
pub mod lldp;
mod modules;
pub mod netlink;
mod nlmsg;
pub mod plan;
pub mod qos;

mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use absence::{NoDevice, in_container};
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

//! RDMA devices and the settings of their network cards, read from the kernel without libibverbs.
//!
//! Devices, ports, GIDs and their network interfaces come from sysfs ([`Fabric::read`]). Soft-RoCE
//! links are added and deleted over RDMA netlink ([`netlink`]). The settings for a lossless
//! Ethernet are in [`dcb`] (the card), [`ethtool`] (pause and counters) and [`lldp`] (the switch);
//! [`plan`] computes the changes to the settings that [`qos`] describes. [`icmp`] has the bytes of
//! echo messages.
//! [`capability`] reports whether an address can have an RDMA listener, and if not, why. This crate
//! opens no device, allocates no DMA memory and uses no verbs: it works where those do not, and
//! reports why.
//!
//! Functions that read sysfs and procfs take the folder of these files ([`Roots`]), so that a test
//! can simulate a machine in a folder.
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
pub mod icmp;
pub mod lldp;
mod modules;
pub mod netlink;
mod nlmsg;
pub mod plan;
pub mod qos;
mod sysfs;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tuning;

pub use absence::{NoDevice, in_container};
pub use capability::{CapabilityRequest, Chosen, NoUverbs, Reason, Unsupported, capability};
pub use counters::{Counter, CounterGroup, Symptom, counters};
pub use driver::{DriverKind, Quirk, quirk};
pub use environment::{Access, Environment, Memlock, Uverbs};
pub use fabric::{Device, Fabric, LinkLayer, NodeType, PhysState, Port, PortState};
pub use firmware::{BadFirmware, Firmware, firmware};
pub use gid::{Gid, GidKind};
pub use modules::{ModuleState, Modules};
pub use sysfs::Roots;
pub use tuning::{Setting, Verdict, tuning};

#[cfg(test)]
mod tests;

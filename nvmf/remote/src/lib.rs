//! Remote bdevs: namespaces of another NVMe-oF target as block devices, for example as replicas of
//! a volume.
//!
//! ```text
//!   Attachment   one controller: its devices and state                   (attachment, status)
//!     ├ ControllerPoller   its admin queue, polled by one reactor         (poller.rs)
//!     └ RemoteBdev         a namespace: a nacre_bdev::Bdev                (device.rs)
//!         └ RemoteQueue      an I/O queue of the controller per core      (channel.rs)
//! ```
//!
//! A [`nacre_nvmf::host::Connector`] makes the connections, over any transport.
//!
//! A namespace keeps its identity while it is attached: its identity, block size and size are
//! compared after every reconnect, and when the target reports a change. A namespace with another
//! identity is never written to; a larger size is a resize. The layer above decides on lost
//! connections: [`nacre_bdev::Bdev::losses`] counts each, before the first completion over the next
//! one.

#![forbid(unsafe_code)]

mod attachment;
mod channel;
mod device;
mod namespace;
mod poller;
mod qids;
mod shared;
mod status;

pub use attachment::{Attachment, Changes};
pub use device::{NoQueue, RemoteBdev};
pub use poller::ControllerPoller;
pub use shared::Config;
pub use status::{ControllerInfo, State, Status};

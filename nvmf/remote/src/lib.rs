//! Remote bdevs: namespaces of another NVMe-oF target as block devices, for example as replicas of
//! a volume.
//!
//! ```text
//!   Attachment   a subsystem: its paths and devices              (attachment, status)
//!     ├ Path         one controller                              (path, shared)
//!     │  └ ControllerPoller   its admin queue, on one reactor    (poller)
//!     └ RemoteBdev   a namespace: a nacre_bdev::Bdev             (device, namespace, paths)
//!         └ RemoteQueue    one core's queue                      (channel)
//!             └ PathQueues     an I/O queue per path             (path_queues, select)
//! ```
//!
//! A [`nacre_nvmf::host::Connector`] makes the connections, over any transport. The paths of an
//! attachment are controllers of one subsystem. They may use different transports.
//!
//! Invariants:
//!
//! - A device sends I/O only on paths that show its namespace: the same identifiers and block size,
//!   not smaller, with at least the limits that were announced. The comparison repeats at every
//!   connection and every change that a target reports.
//! - With several paths, a device sends no I/O on a path where the namespace is inaccessible. It
//!   sends none on a non-optimized path while an optimized one works.
//! - An I/O is on one path at a time. It changes the path if it was not sent, or if the target did
//!   not execute it (an ANA status). It also does so if the target asks for a retry elsewhere (a
//!   path-related status without DNR), or if the association that it was sent in has ended. It
//!   changes the path in no other case.
//!
//! A namespace keeps its identity while it is attached: its identifiers, block size and size are
//! compared after every reconnect, and when the target reports a change. A namespace with another
//! identity is never written to; a larger size is a resize. [`nacre_bdev::Bdev::losses`] counts
//! lost connections, each before the first completion on the next connection, and each shrink of
//! the namespace; the layer above decides about unflushed writes.

#![forbid(unsafe_code)]

mod attachment;
mod channel;
mod device;
mod namespace;
mod open;
mod path;
mod path_queues;
mod paths;
mod poller;
mod qids;
mod select;
mod shared;
mod status;

pub use attachment::{Attachment, Changes};
pub use device::{PathInfo, RemoteBdev};
pub use open::NoQueue;
pub use path::Path;
pub use paths::{MAX_PATHS, PathIo, PathQueue};
pub use poller::ControllerPoller;
pub use select::{Policy, Selector};
pub use shared::Config;
pub use status::{ControllerInfo, State, Status};

//! The host side, sans-IO: what `nvme connect` does, as objects that are polled.
//!
//! ```text
//!   Controller   the admin queue: connect, enable, identify, keep-alive, events, reconnect
//!     │ Link         what I/O queues on other cores need to know of it: ids, limits, generation
//!     └ IoQueue      one I/O queue: a nacre_bdev::Queue whose device is a remote namespace
//!         └ CommandQueue   identifiers and outstanding commands over a HostTransport
//! ```
//!
//! A transport is dialled through [`Dial`], again after every loss, with a delay between attempts
//! and a limit on the whole ([`HostOptions`]). I/O that was under way when a connection was lost is
//! sent again on the next one, in the order in which it was submitted; it fails only when the limit
//! is reached or the target says so.

mod controller;
mod discovery;
mod io;
mod link;
mod namespace;
mod options;
mod pending;
mod queue;
mod step;

pub use controller::{AdminResult, Controller, ControllerState};
pub use discovery::fetch_discovery_log;
pub use io::{IoQueue, IoStats};
pub use link::{Link, LinkState};
pub use namespace::NamespaceInfo;
pub use options::{Dial, HostError, HostOptions};
pub use queue::{CommandQueue, Finished};

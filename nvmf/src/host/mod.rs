//! The host side, sans-IO: the work of `nvme connect`, as objects that are polled.
//!
//! ```text
//! Controller   the admin queue: connect, enable, identify, keep-alive, events, reconnect
//!   │ Link         its state for the I/O queues on other cores: ids, limits, generation
//!   ├ Paths        the choice of two transports, and when to try the better one again
//!   └ IoQueue      one I/O queue: a nacre_bdev::Queue whose device is a remote namespace
//!       └ CommandQueue   identifiers and outstanding commands over a HostTransport
//! ```
//!
//! A transport is dialled through [`Dial`], again after every loss, with a delay between attempts
//! and a limit on the whole ([`HostOptions`]). I/O in flight on a lost connection is sent again on
//! the next one, in the order of its submission. It fails only when the limit is reached or the
//! target fails it.
//!
//! A controller with two transports ([`PathOptions`]) connects by the preferred one, by the other
//! when that fails, and then probes the preferred one now and then with a controller of its own.
//! When a probe succeeds, every queue completes its I/O in flight, and all queues move: nothing is
//! lost and nothing is sent twice.

mod authentication;
mod controller;
mod discovery;
mod io;
mod link;
mod namespace;
mod options;
mod paths;
mod pending;
mod queue;
mod step;

pub use authentication::HostAuth;
pub use controller::{AdminResult, Controller, ControllerState};
pub use discovery::fetch_discovery_log;
pub use io::{IoQueue, IoStats};
pub use link::{Link, LinkState};
pub use namespace::NamespaceInfo;
pub use options::{Connector, ControllerId, Dial, HostError, HostOptions, Wanted};
pub use paths::{PathCounts, PathOptions, Paths};
pub use queue::{CommandQueue, Finished};

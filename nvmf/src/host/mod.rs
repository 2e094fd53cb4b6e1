//! The NVMe-oF host (`nvme connect`): associations, I/O queues and reconnection, without sockets or
//! threads. Remote bdevs, `nacre perf` and the command line's host commands use it.
//!
//! ```text
//! HostController  the admin queue: connect, enable, identify, keep-alive, events, reconnect
//!   │ Link         its state for the I/O queues on other cores: ids, limits, generation
//!   ├ Paths        chooses between two transports, and when to probe the preferred one
//!   └ IoQueue      one I/O queue: a nacre_bdev::Queue whose device is a remote namespace
//!       └ CommandQueue   identifiers and outstanding commands over a HostTransport
//! ```
//!
//! [`Dial`] opens transport connections. After a loss the host reconnects, with a delay between
//! attempts and a time limit ([`HostOptions`]). I/O in flight on a lost connection is sent again on
//! the next one, in the order of submission. It fails at the time limit, if the target fails it, or
//! if its repetition could give another result.
//!
//! A controller with two transports ([`PathOptions`]) connects over the preferred one, and over the
//! fallback if that fails. It then probes the preferred transport from time to time, with a second
//! controller. When a probe succeeds, all queues complete their I/O in flight and move to the
//! preferred transport: no command is lost or sent twice.

mod concatenation;
mod controller;
mod discovery;
mod error;
mod injection;
mod io;
mod link;
mod namespace;
mod options;
mod paths;
mod pending;
mod queue;
mod stats;
mod step;

pub use concatenation::GeneratedPsk;
pub use controller::{AdminResult, ControllerState, HostController};
pub use discovery::{DiscoveryLog, DiscoveryWatch, MAX_DISCOVERY_RECORDS, fetch_discovery_log};
pub use error::HostError;
pub use injection::InjectionQueues;
pub use io::{IoQueue, Returned, Standing};
pub use link::{Link, LinkState};
pub use namespace::NamespaceInfo;
pub use options::{Connector, ControllerId, Dial, HostAuth, HostOptions, WantedQueue};
pub use paths::{PathCounts, PathOptions, Paths};
pub use queue::{CommandQueue, Finished, Proof};
pub use stats::{Activity, IoStats};

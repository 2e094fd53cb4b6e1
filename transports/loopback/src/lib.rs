//! The loopback transport: connects NVMe-oF hosts and targets of one process in memory, for tests
//! in virtual time without a network.
//!
//! ```text
//!   LoopbackPlug   named listeners                                   (shared by all cores)
//!     └ LoopbackTransport   the target's end of a core's connections
//!            ▲  Link: capsules one way, fetched data and completions the other
//!            ▼
//!       LoopbackHost        the host's end, on the same thread
//! ```
//!
//! A host is served by the core that it runs on: nothing crosses a thread, and data is copied once,
//! from one side's buffer into the other's. Everything else behaves as on a wire: data beyond the
//! capsule is fetched, buffers come from the core's pools, back-pressure holds when the pools are
//! empty, and connections close drained or at once. [`Faults`] breaks and stalls connections.

#![forbid(unsafe_code)]

mod error;
mod host;
mod link;
mod plug;
mod transport;

#[cfg(test)]
mod tests;

pub use error::ConnectError;
pub use host::LoopbackHost;
pub use link::Faults;
pub use plug::{LoopbackConfig, LoopbackPlug};
pub use transport::LoopbackTransport;

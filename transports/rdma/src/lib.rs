//! NVMe/RDMA: the target's plug and the host's queue pairs, over verbs of any provider.
//!
//! ```text
//!   RdmaPlug      listeners and connections: a management thread, the choice of a core    (shared)
//!     └ inbox + wake ─▶ RdmaTransport   all connections of one core               (one per core)
//!                         └ per device: completion queue, shared receive queue
//!                             └ Conn: a queue pair, requests that wait for room, READs in flight
//!   RdmaHosts     the host side: one management thread, memory per core
//!     └ RdmaHost  one queue pair of a host
//! ```
//!
//! A command arrives in a receive buffer: its entry in one place, its in-capsule data in another,
//! which is aligned as buffers are and passed on without a copy. RDMA READ fetches data beyond the
//! capsule, and RDMA WRITE returns data. A response and its preceding writes form one chain, and
//! all requests of a turn go with one doorbell per connection.
//!
//! A ring of `nacre_transport_rdma_verbs` owns every buffer that a device may still touch. A
//! connection that ends is drained to its last completion first.

#![forbid(unsafe_code)]

mod accept;
mod config;
mod conn;
mod control;
mod core_memory;
mod host;
mod incident;
mod need;
mod plug;
mod sgl;
mod shared;
mod stats;
mod transport;

#[cfg(test)]
mod tests;

pub use config::{ConfigError, MAX_SRQ_SIZE, RdmaConfig};
pub use core_memory::bytes_per_core;
pub use host::{HostOptions, RdmaDialer, RdmaHost, RdmaHosts};
pub use incident::Incident;
pub use need::{QueueNeed, shared_receives};
pub use plug::RdmaPlug;
pub use shared::{CompletionQueueInfo, DomainInfo, QueuePairInfo, QueuePairState, RegionInfo};
pub use stats::{
    BATCH_CLASSES, ControlCounts, Latency, LatencySnapshot, Stats, StatsSnapshot, Timed,
};
pub use transport::RdmaTransport;

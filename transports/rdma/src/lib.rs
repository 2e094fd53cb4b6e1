//! The NVMe/RDMA transport: the target's plug and the host's queue pairs, over RDMA verbs. The
//! verbs provider is a device or a simulation.
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
//! A receive request has an SGE for the submission queue entry and, if in-capsule data is
//! enabled, an SGE for that data. In-capsule data lands in an aligned buffer and is passed on
//! without a copy. RDMA READ fetches data beyond the capsule, and RDMA WRITE returns data. A
//! response and its preceding RDMA WRITEs are posted in one batch. All send requests of a turn
//! usually share one doorbell per connection.
//!
//! A ring of `nacre_transport_rdma_verbs` owns every buffer that a device may still access by
//! DMA. A connection that ends is drained to its last completion first.

#![forbid(unsafe_code)]

mod accept;
mod config;
mod conn;
mod control;
mod core_memory;
mod host;
mod incident;
mod plug;
mod queue_needs;
mod sgl;
mod shared;
mod stats;
mod transport;

#[cfg(test)]
mod tests;

pub use config::{
    ConfigError, IO_SIZES, MAX_SRQ_SIZE, MIN_MR_SIZE, POLL_BATCHES, RdmaConfig, RdmaSettings,
    SGL_DESCRIPTORS,
};
pub use core_memory::bytes_per_core;
pub use host::{RdmaDialer, RdmaHost, RdmaHostOptions, RdmaHosts};
pub use incident::Incident;
pub use plug::RdmaPlug;
pub use queue_needs::{QueueNeed, shared_receives};
pub use shared::{CompletionQueueInfo, DomainInfo, QueuePairInfo, QueuePairState, RegionInfo};
pub use stats::{
    BATCH_CLASSES, ControlCounts, Latency, LatencySnapshot, Stats, StatsSnapshot, Timed,
};
pub use transport::RdmaTransport;

//! Replicated volumes: a block device with one to five replicas on local or remote bdevs.
//!
//! ```text
//!   Volume ── open(pool) ──▶ Lane       one per core: the data path, a Queue
//!     │                        │ reads Shared: atomics, and a versioned View
//!     └─ Shared ◀─ publishes ─ Control  one per open volume: membership, log, resync, verify
//!                                ├─ VolumeStore    compare-and-swap, the authority
//!                                └─ the replicas' reserved areas: labels, dirty-region log
//! ```

#![forbid(unsafe_code)]

pub mod answers;
pub mod control;
pub mod format;
pub mod handle;
pub mod lane;
pub mod missing_regions;
pub mod model;
pub mod mutation;
pub mod prepared;
pub mod regions;
mod settings;
pub mod shared;
mod shortage;
pub mod store;
pub mod stripes;
pub mod view;
pub mod volume;

//! The one source of DMA memory: arenas of the best pages to be had, and fixed buffer pools on them.
//!
//! ```text
//!   Arena   one mapping (1 GiB, 2 MiB, transparent or plain locked pages) on one NUMA node
//!     └ Pool    fixed buffer classes carved from an arena, owned by one core, no atomics
//!         └ Buf     a counted handle on one buffer (or a part of it); the last one gives it back
//!   Shared  memory that several cores and the kernel read and write at once (RAM disks)
//! ```
//!
//! Everything else in Nacre that needs memory a device may touch gets it from here.

mod pool;

pub use pool::{Buf, ClassSpec, ClassStats, Pool};

//! Storage pools: thin and thick logical volumes, snapshots and clones on block devices.
//!
//! ```text
//!   Lvol ── open(memory) ──▶ Lane       one per core: the data path, a Queue on the base
//!     │ LvolMap, atomics      │  ▲ reads; writes in place
//!     └───────────────────────┼──┘
//!                     inbox   ▼  first writes, unmaps
//!   PoolHandle ── commands ─▶ Keeper    one per pool, on the pool's home reactor
//!                               ├─ core::Pool    every decision, no I/O
//!                               └─ Disk          log, metadata, and copies of inflations
//! ```
//!
//! A *lane* is one core's queue to a volume. The *keeper* is the poller that alone changes the
//! pool's metadata. A lane writes data itself: the keeper gets the range and its checksums, and
//! answers with the position on the disk. A write in place and a read never leave their core.
//!
//! `nacre-bdev-pool-core` defines the terms of the map. A *version* is a volume or snapshot. A
//! *unit* is 64 KiB of a disk, a *place* is 64 KiB of a version, and a *granule* is 4 KiB of
//! either. The *generation* of a unit says which versions may share it.
//!
//! A volume may show a device outside of the pool where it has no data of its own. The pool has a
//! read-only claim on such a device. While it is missing, I/O that needs it ends with
//! [`nacre_bdev::Status::Gone`]; all other I/O goes on. A read that the device does not answer in
//! time ends in the same way.
//!
//! # Limits
//!
//! Blocks have 4 KiB. Lanes and keeper exchange messages under a lock that is held for a few
//! instructions.

#![forbid(unsafe_code)]

mod fit;
mod grace;
mod handle;
mod identify;
mod keeper;
mod lane;
pub mod listing;
mod loss;
pub mod lvol;
mod map;
mod model;
pub mod open;
mod overdue;
mod port;
#[cfg(test)]
mod tests;

pub use handle::PoolHandle;
pub use identify::{Label, identify};
pub use lvol::Lvol;
pub use model::{
    Command, Departed, DiskStatus, ExternalParent, ExternalStatus, LeavingDisk, LvolInfo,
    NotErased, Outcome, PoolError, PoolState, PoolStatus,
};
pub use nacre_bdev_pool_core::check::{CheckReport, Extent, Finding};
pub use nacre_bdev_pool_core::geometry::MAX_UNITS;
pub use nacre_bdev_pool_core::import::{ImportError, ImportReport};
pub use nacre_bdev_pool_core::interface::Refusal;
pub use open::{Create, Import, create, import};

/// Bytes at each end of a disk that have superblocks only.
const EDGE: u64 = 1 << 20;

/// Bytes of a block of a volume: a granule of the map.
pub const BLOCK: u32 = nacre_bdev_pool_core::geometry::PAGE as u32;

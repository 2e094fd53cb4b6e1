//! The one source of DMA memory: arenas on the largest available pages, and pools of fixed buffers
//! on them.
//!
//! ```text
//! Arena   one mapping (1 GiB, 2 MiB, transparent or plain locked pages) on one NUMA node
//! ├ region    at most 1 GiB of it; each device registers it once, whole or in pieces, by slot
//! └ ArenaSlice  carved once, moved to the core that owns it
//!    └ Pool    fixed buffer classes on a slice, owned by one core, no atomics
//!       └ Buf     a counted handle on one buffer (or a part of it); the last one gives it back
//! Shared  memory that several cores and the kernel read and write at once (RAM disks)
//! └ MemoryView  a part of it, to send it without a copy
//! ```
//!
//! All other crates get memory that a device may touch from here.
//!
//! The pages of an arena are chosen from [`ArenaOptions`] and the system's state (its huge page
//! pools, limits and NUMA nodes), before memory is mapped. So each failure is an [`ArenaError`]
//! with numbers and a remedy, and [`Arena::report`] names the pages, and the command for larger
//! ones, in one line.
//!
//! ```
//! use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, Pool};
//!
//! let classes = [ClassSpec { size: 4096, count: 64 }, ClassSpec { size: 128 << 10, count: 8 }];
//! let per_core = Pool::bytes_for(&classes);
//! let arena = Arena::allocate(ArenaOptions::new(2 * per_core as u64))?;
//! println!("memory: {}", arena.report());
//! for _core in 0..2 {
//!     let slice = arena.carve(per_core)?;
//!     std::thread::spawn(move || {
//!         let pool = Pool::on_slice(slice, &classes).expect("carved to measure");
//!         let mut buf = pool.acquire(512).expect("the first one is there");
//!         buf.bytes_mut().expect("not shared yet").fill(7);
//!     })
//!     .join()
//!     .expect("no panic");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod copy;
mod error;
mod heap_memory;
mod mapping;
mod pages;
mod plan;
mod pool;
mod register;
mod shared;
mod system;
mod written;

pub use arena::{Arena, ArenaReport, ArenaSlice, CarveError, register_all, register_all_in};
pub use error::{ArenaError, ReserveError};
pub use pages::{HugepagePolicy, PageKind};
pub use plan::ArenaOptions;
pub use pool::{Buf, ClassSpec, ClassStats, Pool};
pub use register::{
    DEVICE_SLOTS, GRAIN, HookError, Piece, REGION_MAX, RegionId, RegionInfo, RegisterError,
    RegisterHook,
};
pub use shared::{CoreShared, MemoryView, Shared};
pub use system::{NodePages, machine_memory, reserve, show};

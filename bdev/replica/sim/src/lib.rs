//! The simulator of replicated volumes. It runs the shipped code in one thread and in virtual time,
//! on failing disks. A *holder* is one run of a daemon that serves the volume, and may stop at any
//! step. A checker verifies every completion of the hosts' I/O.
//!
//! ```text
//!   World ── seed ──▶ faults and their times      everything below runs in virtual time
//!     ├ Holder           a reactor in virtual time    crash, open again, several at once
//!     │    └ Lane        a queue of the volume        I/O and completions ──▶ Checker
//!     ├ Leases           when holders are stopped or cut off, and may be succeeded
//!     ├ MemoryStore      the volume's record; late, lost and ambiguous replies
//!     └ SimDisk (2..5)   a medium, and a cache that is lost with the power
//! ```
//!
//! A run is determined by its seed: [`run`] with the same number repeats it.

#![forbid(unsafe_code)]

mod agenda;
mod checker;
mod device;
mod disk;
mod ending;
mod faults;
mod gate;
mod holder;
mod holding;
mod holds;
mod inject;
mod leases;
mod load;
mod media;
mod offers;
mod report;
mod setup;
mod troubles;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use holds::HoldCounts;
pub use leases::{LEASES_EVERY, has_leases};
#[cfg(feature = "mutations")]
pub use nacre_bdev_replica::mutation::Mutation;
pub use report::{LeaseCounts, Options, Report};

use crate::ending::Ending;
use crate::world::World;

/// Runs one simulation. The error describes an impossible result, a lack of progress or a panic.
pub fn run(seed: u64, options: &Options) -> Result<Report, String> {
    let run = || {
        let mut world = World::new(seed, options.clone());
        let outcome = world.live().and_then(|()| Ending::new(&mut world).run());
        world.report(outcome)
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(outcome) => outcome,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(format!("panicked: {}", text.unwrap_or_default()))
        }
    }
}

/// The command that repeats a run.
pub fn replay(seed: u64) -> String {
    format!("cargo xtask simulate --seed {seed} --runs 1 --trace")
}

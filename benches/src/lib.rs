//! The reference loads of `cargo xtask bench tcp`.
//!
//! [`limit`] measures bare sockets that move the same bytes as Nacre. [`idle`] opens idle
//! connections, whose cost in the daemon xtask measures. [`limit_target`] is the fastest target
//! that a given host can have.

#![forbid(unsafe_code)]

pub mod idle;
pub mod limit;
pub mod limit_target;

use anyhow::{Context, Result, ensure};

/// Pins the calling thread.
fn pin(core: usize) -> Result<()> {
    let mut cores = rustix::thread::CpuSet::new();
    ensure!(
        core < rustix::thread::CpuSet::MAX_CPU,
        "there is no core {core}"
    );
    cores.set(core);
    rustix::thread::sched_setaffinity(None, &cores)
        .with_context(|| format!("pinning a thread to core {core}"))
}

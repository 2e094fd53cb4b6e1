//! Reference programs of `cargo xtask bench`.
//!
//! [`limit`] measures bare sockets that move the same bytes as NVMe/TCP. [`idle`] opens idle
//! connections, whose cost in the daemon xtask measures. [`limit_target`] is a target that only
//! counts bytes, which shows how fast a host can be.

#![forbid(unsafe_code)]

pub mod idle;
pub mod limit;
pub mod limit_target;

use anyhow::{Context, Result, ensure};

/// Pins the calling thread to a core.
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

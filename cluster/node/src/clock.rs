//! The clock of leases: `CLOCK_BOOTTIME`, which goes on during a suspend. Beside it the time of
//! day, for people only.

use std::time::{SystemTime, UNIX_EPOCH};

use nacre_cluster_core::BootTime;
use rustix::time::{ClockId, clock_gettime};

pub fn now() -> BootTime {
    let time = clock_gettime(ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    BootTime(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}

/// The time of day, in seconds since 1970.
pub fn seconds() -> u64 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.unwrap_or_default().as_secs()
}

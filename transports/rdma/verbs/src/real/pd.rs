//! [`Pd`]: an `ibv_pd` with its memory regions. The arenas of `nacre_hugepages` register themselves
//! through [`RegisterHook`].

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_hugepages::{HookError, RegionId, RegionInfo, RegisterHook};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Resource, getrlimit};

use super::context::OpenDevice;
use super::non_null;
use crate::sys::verbs::*;
use crate::types::{Access, MrKey, Registrations, VerbsError, Wire};

/// The `ibv_pd` with its memory regions. Arenas, shared receive queues and queue pairs have
/// references to it.
pub(super) struct Pd {
    pub(super) device: Arc<OpenDevice>,
    pub(super) raw: *mut ibv_pd,
    pub(super) access: Access,
    regions: Mutex<HashMap<RegionId, Mr>>,
    registered_total: AtomicU64,
}

// SAFETY: domains may be used by any thread: verbs are thread-safe.
unsafe impl Send for Pd {}
// SAFETY: as above; our own fields are atomic or behind a lock.
unsafe impl Sync for Pd {}

struct Mr {
    raw: *mut ibv_mr,
    len: u64,
}

// SAFETY: a pointer that only the domain's calls use, under its lock.
unsafe impl Send for Mr {}

impl Pd {
    pub(super) fn new(device: Arc<OpenDevice>, access: Access) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let raw = non_null("ibv_alloc_pd", unsafe {
            (device.api.ibv_alloc_pd)(device.context.raw)
        })?;
        Ok(Self {
            device,
            raw,
            access,
            regions: Mutex::default(),
            registered_total: AtomicU64::new(0),
        })
    }

    /// The registered memory regions.
    pub(super) fn registrations(&self) -> Registrations {
        let regions = self.regions();
        Registrations {
            regions: regions.len() as u64,
            bytes: regions.values().map(|mr| mr.len).sum(),
            registered_total: self.registered_total.load(Ordering::Relaxed),
        }
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<RegionId, Mr>> {
        self.regions.lock()
    }

    /// The `access` argument of `ibv_reg_mr`.
    fn flags(&self) -> i32 {
        match (self.access, self.device.attributes.wire) {
            (Access::Remote, _) => {
                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
            }
            // On iWARP the data of a READ arrives as an RDMA Write of the peer, so the destination
            // of a READ needs remote write access.
            (Access::Local, Wire::Iwarp) => IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
            (Access::Local, _) => IBV_ACCESS_LOCAL_WRITE,
        }
    }
}

impl RegisterHook for Pd {
    fn register(&self, region: &RegionInfo) -> Result<u64, HookError> {
        let len = region.len();
        let attributes = &self.device.attributes;
        if len as u64 > attributes.max_mr_size {
            return Err(VerbsError::Limit {
                what: "the size of a memory region",
                asked: len as u64,
                limit: attributes.max_mr_size,
                device: attributes.name.clone(),
            }
            .into());
        }
        // SAFETY: the domain is alive. The arena guarantees that the region stays mapped until
        // `unregister`. Devices write only to bytes that the arena's buffers own.
        let raw = unsafe {
            (self.device.api.ibv_reg_mr)(self.raw, region.as_ptr().cast(), len, self.flags())
        };
        if raw.is_null() {
            let source = io::Error::last_os_error();
            return Err(RegisterMemoryError::new(len as u64, source).into());
        }
        // SAFETY: the region was created above, and no other thread has it yet.
        let key = unsafe {
            MrKey {
                lkey: (*raw).lkey,
                rkey: (*raw).rkey,
            }
        };
        let len = len as u64;
        let before = self.regions().insert(region.id, Mr { raw, len });
        debug_assert!(before.is_none(), "an arena registers a region once");
        self.registered_total.fetch_add(1, Ordering::Relaxed);
        Ok(key.to_bits())
    }

    fn unregister(&self, region: &RegionInfo, _key: u64) {
        if let Some(mr) = self.regions().remove(&region.id) {
            // A failure needs no handling: the device and its registrations are gone.
            // SAFETY: registered in `register`, and removed from the map, so used once.
            unsafe { (self.device.api.ibv_dereg_mr)(mr.raw) };
        }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        let regions = std::mem::take(&mut *self.regions());
        for mr in regions.into_values() {
            // SAFETY: as in `unregister`.
            unsafe { (self.device.api.ibv_dereg_mr)(mr.raw) };
        }
        // SAFETY: every object of the domain has a reference to it, so none exists any more.
        unsafe { (self.device.api.ibv_dealloc_pd)(self.raw) };
    }
}

/// The failure of `ibv_reg_mr`: the kernel could not pin the memory.
#[derive(Debug, thiserror::Error)]
pub enum RegisterMemoryError {
    /// RLIMIT_MEMLOCK is too low, the usual cause. Sizes in bytes. The text starts with the words
    /// that users search for.
    #[error(
        "ibv_reg_mr failed: Cannot allocate memory: {asked} bytes asked, RLIMIT_MEMLOCK is {limit} bytes with \
         {pinned} registered already, {needed} are needed so far (`nacre doctor --rdma` gives the sum); in a shell \
         `ulimit -l unlimited`, in /etc/security/limits.conf `* soft memlock unlimited` and `* hard memlock unlimited`, in a systemd unit \
         `LimitMEMLOCK=infinity`, for a container `--ulimit memlock=-1` or `--cap-add=IPC_LOCK`"
    )]
    Memlock {
        asked: u64,
        limit: u64,
        pinned: u64,
        needed: u64,
    },
    /// Another cause, or no limit is set. `asked` in bytes.
    #[error("ibv_reg_mr failed: {source}: {asked} bytes asked")]
    Other { asked: u64, source: io::Error },
}

impl RegisterMemoryError {
    fn new(asked: u64, source: io::Error) -> Self {
        let limit = getrlimit(Resource::Memlock).current;
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self::of(asked, source, limit, pinned(&status))
    }

    fn of(asked: u64, source: io::Error, limit: Option<u64>, pinned: u64) -> Self {
        let needed = asked.saturating_add(pinned);
        match limit {
            Some(limit) if source.raw_os_error() == Some(libc::ENOMEM) && needed > limit => {
                Self::Memlock {
                    asked,
                    limit,
                    pinned,
                    needed,
                }
            }
            _ => Self::Other { asked, source },
        }
    }
}

/// Bytes that this process has pinned for devices: `VmPin` of `/proc/self/status`.
fn pinned(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nomem() -> io::Error {
        io::Error::from_raw_os_error(libc::ENOMEM)
    }

    /// Goal: the text has the words that users search for, every number and every remedy. Method:
    /// a limit that is too low.
    #[test]
    fn a_low_limit_is_named() {
        let pinned = pinned("VmLck:\t0 kB\nVmPin:\t      64 kB\n");
        let text = RegisterMemoryError::of(1 << 30, nomem(), Some(8 << 20), pinned).to_string();
        for part in [
            "ibv_reg_mr failed: Cannot allocate memory: 1073741824 bytes asked",
            "RLIMIT_MEMLOCK is 8388608 bytes with 65536 registered already",
            "1073807360 are needed so far (`nacre doctor --rdma` gives the sum)",
            "`ulimit -l unlimited`",
            "limits.conf",
            "`LimitMEMLOCK=infinity`",
            "`--ulimit memlock=-1`",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    /// Goal: the limit is not blamed for other failures.
    #[test]
    fn other_failures_are_not_blamed_on_the_limit() {
        let no_limit = RegisterMemoryError::of(4096, nomem(), None, 0).to_string();
        assert!(
            no_limit.starts_with("ibv_reg_mr failed: Cannot allocate memory"),
            "{no_limit}"
        );
        assert!(!no_limit.contains("MEMLOCK"), "{no_limit}");
        let refused = io::Error::from_raw_os_error(libc::EINVAL);
        let invalid = RegisterMemoryError::of(4096, refused, Some(0), 0).to_string();
        assert!(
            invalid.starts_with("ibv_reg_mr failed: Invalid argument"),
            "{invalid}"
        );
    }
}

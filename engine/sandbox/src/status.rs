//! Reads the capabilities and the seccomp state of a thread from `/proc`, and finds out whether the
//! kernel supports the daemon's filter.

use std::io;
use std::path::Path;

use rustix::thread::CapabilitySet;

use crate::SandboxError;

/// The lines about capabilities and seccomp of `/proc/PID/status`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub no_new_privs: bool,
    /// Number of seccomp programs; a container runtime may have installed one of its own. Before
    /// Linux 5.9, 1 stands for any number.
    pub filters: u32,
    pub effective: CapabilitySet,
    pub permitted: CapabilitySet,
    pub bounding: CapabilitySet,
    pub ambient: CapabilitySet,
}

impl Status {
    /// The status of the calling thread; all threads of a daemon are equal after its start.
    pub fn read() -> Result<Self, SandboxError> {
        Self::of("/proc/thread-self/status".as_ref())
    }

    /// The status in `/proc/PID/status` (the main thread) or `/proc/PID/task/TID/status`.
    pub fn of(file: &Path) -> Result<Self, SandboxError> {
        let text = std::fs::read_to_string(file).map_err(|source| SandboxError::System {
            what: "reading the status of a process",
            source,
        })?;
        Self::parse(&text).ok_or_else(|| SandboxError::System {
            what: "reading the status of a process",
            source: io::ErrorKind::InvalidData.into(),
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.strip_prefix(':')?.trim())
        };
        let set = |name: &str| {
            let bits = u64::from_str_radix(value(name)?, 16).ok()?;
            Some(CapabilitySet::from_bits_retain(bits))
        };
        // The count is missing before Linux 5.9, and both lines are in a kernel without seccomp.
        let filtered = value("Seccomp") == Some("2");
        let filters = value("Seccomp_filters").and_then(|count| count.parse().ok());
        Some(Self {
            no_new_privs: value("NoNewPrivs") == Some("1"),
            filters: filters.unwrap_or_else(|| u32::from(filtered)),
            effective: set("CapEff")?,
            permitted: set("CapPrm")?,
            bounding: set("CapBnd")?,
            ambient: set("CapAmb")?,
        })
    }
}

/// True if this kernel supports seccomp filters that log the system calls they do not allow.
pub fn kernel_has_filters() -> bool {
    let actions = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail");
    actions.is_ok_and(|actions| actions.split_whitespace().any(|action| action == "log"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_new_and_old_kernels() {
        let capabilities = "CapPrm:\t0000000000004400\nCapEff:\t0000000000000400\nCapBnd:\t000001ffffffffff\nCapAmb:\t0\n";
        let new = format!("{capabilities}NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n");
        let status = Status::parse(&new).unwrap();
        assert!(status.no_new_privs);
        assert_eq!(status.filters, 3);
        assert_eq!(status.effective, CapabilitySet::NET_BIND_SERVICE);
        assert_eq!(
            status.permitted,
            CapabilitySet::NET_BIND_SERVICE | CapabilitySet::IPC_LOCK
        );
        assert!(status.bounding.contains(CapabilitySet::SYS_ADMIN));
        let old = format!("{capabilities}NoNewPrivs:\t0\nSeccomp:\t2\n");
        assert_eq!(Status::parse(&old).unwrap().filters, 1);
        assert_eq!(Status::parse(capabilities).unwrap().filters, 0);
        assert_eq!(Status::parse("Name:\tx\n"), None);
    }

    #[test]
    fn this_process_has_a_status() {
        assert!(Status::read().is_ok());
    }
}

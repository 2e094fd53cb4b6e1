//! Linux capabilities: selects those that the configured features need, and drops the others.
//!
//! | feature | needs |
//! |---|---|
//! | files, NVMe/TCP on ports from 1024 | none |
//! | listeners and metrics on ports below 1024, which a client may add later | NET_BIND_SERVICE |
//! | DMA memory for RDMA devices and drives, with a limit on locked memory | IPC_LOCK |
//! | the socket for a group with a role, which a reload may name | CHOWN |
//! | soft-RoCE devices of `[rdma] rxe`, priority 7 in `[qos]` | NET_ADMIN |
//!
//! The table is complete. Drives behind VFIO need their group's device node; the daemon refuses
//! drives without an IOMMU, so RAWIO and SYS_ADMIN (physical addresses) are never needed. Binding
//! drives, reserving pages at run time, LLDP and QoS are work of commands, which keep the rights of
//! their user. Reactors pin themselves and helpers lower their own priority, which needs no
//! SYS_NICE.
//!
//! A daemon of root without DAC_OVERRIDE reaches files as their owner or with their mode: those of
//! other users that are closed to root's groups need it, by `[security] capabilities`.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{self, CapabilitySet, CapabilitySets};

use crate::SandboxError;

/// Configured features that need a capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// The daemon makes soft-RoCE devices or uses the highest priority.
    pub network_changes: bool,
    /// Capabilities that an administrator added.
    pub added: CapabilitySet,
}

impl Needs {
    /// The capabilities that these features need in this process, with its limit on locked memory.
    pub fn set(self) -> CapabilitySet {
        self.set_with(getrlimit(Resource::Memlock).current)
    }

    /// `memlock`: the limit on locked memory; `None`: no limit.
    fn set_with(self, memlock: Option<u64>) -> CapabilitySet {
        let mut set = CapabilitySet::NET_BIND_SERVICE | CapabilitySet::CHOWN;
        set.set(CapabilitySet::IPC_LOCK, memlock.is_some());
        set.set(CapabilitySet::NET_ADMIN, self.network_changes);
        set | self.added
    }
}

/// Gives up all capabilities outside `keep`, for this process and its future threads and children,
/// and sets no_new_privs. Fails without a change if there is a second thread, which would keep its
/// own.
///
/// Returns the capabilities that remain: those of `keep` that the process had.
pub fn restrict(keep: CapabilitySet) -> Result<CapabilitySet, SandboxError> {
    let system = |what| {
        move |errno: Errno| SandboxError::System {
            what,
            source: errno.into(),
        }
    };
    let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
    match threads.map_err(|source| SandboxError::System {
        what: "counting threads",
        source,
    })? {
        1 => {}
        threads => return Err(SandboxError::Threads(threads)),
    }
    thread::set_no_new_privs(true).map_err(system("no_new_privs"))?;
    let have = thread::capabilities(None).map_err(system("capget(2)"))?;
    let kept = keep & have.permitted;
    // A process without SETPCAP cannot lower its bounding set, and gains nothing by one:
    // no_new_privs keeps it from what files and set-user-id programs would add.
    if have.effective.contains(CapabilitySet::SETPCAP) {
        lower_bounding_set(kept).map_err(system("PR_CAPBSET_DROP"))?;
    }
    thread::clear_ambient_capability_set().map_err(system("PR_CAP_AMBIENT"))?;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    thread::set_capabilities(None, sets).map_err(system("capset(2)"))?;
    Ok(kept)
}

fn lower_bounding_set(keep: CapabilitySet) -> Result<(), Errno> {
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match thread::capability_is_in_bounding_set(one) {
            Ok(true) if !keep.contains(one) => thread::remove_capability_from_bounding_set(one)?,
            Ok(_) => {}
            // Beyond the kernel's last one.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The names as in capabilities(7); numbers for those newer than this program.
pub fn names(set: CapabilitySet) -> Vec<String> {
    let known = set.iter_names().map(|(name, _)| format!("CAP_{name}"));
    let every = CapabilitySet::from_bits_retain(u64::MAX);
    let named = every.iter_names();
    let named = named.fold(CapabilitySet::empty(), |all, (_, one)| all | one);
    let rest = set.bits() & !named.bits();
    let unknown = (0..u64::BITS).filter(|bit| rest >> bit & 1 == 1);
    known
        .chain(unknown.map(|bit| format!("CAP_{bit}")))
        .collect()
}

/// Reads `CAP_DAC_OVERRIDE`, also without the prefix or in small letters.
pub fn parse(name: &str) -> Result<CapabilitySet, io::Error> {
    let upper = name.trim().to_uppercase();
    let short = upper.strip_prefix("CAP_").unwrap_or(&upper);
    CapabilitySet::from_name(short).ok_or_else(|| {
        let cause = format!("\"{name}\" is no capability, such as CAP_DAC_OVERRIDE");
        io::Error::new(io::ErrorKind::InvalidInput, cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_feature_adds_what_it_needs() {
        let plain = Needs {
            network_changes: false,
            added: CapabilitySet::empty(),
        };
        let of = |needs: Needs, memlock| names(needs.set_with(memlock)).join(" ");
        assert_eq!(of(plain, None), "CAP_CHOWN CAP_NET_BIND_SERVICE");
        assert_eq!(
            of(plain, Some(8 << 20)),
            "CAP_CHOWN CAP_NET_BIND_SERVICE CAP_IPC_LOCK"
        );
        let all = Needs {
            network_changes: true,
            added: CapabilitySet::DAC_OVERRIDE | CapabilitySet::IPC_LOCK,
        };
        assert_eq!(
            of(all, None),
            "CAP_CHOWN CAP_DAC_OVERRIDE CAP_NET_BIND_SERVICE CAP_NET_ADMIN CAP_IPC_LOCK"
        );
    }

    #[test]
    fn names_are_read_back() {
        for text in ["CAP_SYS_ADMIN", "sys_admin", "cap_sys_admin", " SYS_ADMIN "] {
            assert_eq!(parse(text).unwrap(), CapabilitySet::SYS_ADMIN, "{text}");
        }
        let error = parse("CAP_FLY").unwrap_err().to_string();
        assert!(error.contains("\"CAP_FLY\" is no capability"), "{error}");
        let newer = CapabilitySet::from_bits_retain(1 << 60 | 1);
        assert_eq!(names(newer), ["CAP_CHOWN", "CAP_60"]);
    }

    /// Goal: no claim is made about threads that keep their capabilities. Method: the test runner
    /// has threads.
    #[test]
    fn a_process_with_threads_keeps_its_capabilities() {
        let before = thread::capabilities(None).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let refused = restrict(CapabilitySet::empty());
                assert!(matches!(refused, Err(SandboxError::Threads(2..))));
            });
        });
        assert_eq!(thread::capabilities(None).unwrap(), before);
    }
}

//! The requirements of RDMA besides a device, as this process finds them: access to the device
//! nodes and the connection manager, and locked memory.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use crate::absence::NoDevice;
use crate::sysfs::{self, Roots};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Environment {
    /// The verbs devices that the kernel has, one per RDMA device.
    pub uverbs: Vec<Uverbs>,
    /// `/dev/infiniband/rdma_cm`.
    pub rdma_cm: Access,
    /// The error of loading libibverbs or librdmacm. The caller sets it after trying.
    pub library: Option<String>,
    pub memlock: Memlock,
    /// Bytes that the caller will register; 0: the limit is not checked.
    pub memory_needed: u64,
    /// The reason why there is no RDMA device; `None` if there is one.
    pub no_device: Option<NoDevice>,
}

/// A verbs device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Uverbs {
    /// The RDMA device, such as `mlx5_0`.
    pub device: String,
    /// `/dev/infiniband/uverbs0`.
    pub node: PathBuf,
    pub access: Access,
}

/// The state of a device node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    Granted,
    /// The node exists, and this process may not read and write it.
    Denied,
    #[default]
    Absent,
}

/// RLIMIT_MEMLOCK of this process, and its registered memory. The kernel compares registered memory
/// alone with the limit, apart from mlock(2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Memlock {
    /// The hard limit in bytes, to which the soft one is raised without privilege. None: no limit,
    /// or CAP_IPC_LOCK.
    pub limit: Option<u64>,
    /// Registered already, in bytes (VmPin).
    pub pinned: u64,
}

impl Environment {
    pub fn read(roots: &Roots) -> Self {
        let class = roots.sys.join("class/infiniband_verbs");
        let nodes = roots.dev.join("infiniband");
        let uverbs = sysfs::names(&class).into_iter().filter_map(|name| {
            let device = sysfs::filled(&class.join(&name).join("ibdev"))?;
            let node = nodes.join(&name);
            let access = access(&node);
            Some(Uverbs {
                device,
                node,
                access,
            })
        });
        Self {
            uverbs: uverbs.collect(),
            rdma_cm: access(&nodes.join("rdma_cm")),
            library: None,
            memlock: Memlock::read(roots),
            memory_needed: 0,
            no_device: NoDevice::of(roots),
        }
    }

    pub fn uverbs_of(&self, device: &str) -> Option<&Uverbs> {
        self.uverbs.iter().find(|uverbs| uverbs.device == device)
    }
}

impl Memlock {
    /// Reads the state of this process: the limit by getrlimit(2), capabilities and use from
    /// `/proc/self/status`.
    pub fn read(roots: &Roots) -> Self {
        /// CAP_IPC_LOCK in capability masks (linux/capability.h).
        const CAP_IPC_LOCK: u32 = 14;
        let status = sysfs::text(&roots.proc.join("self/status")).unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()
        };
        let capabilities = field("CapEff:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
        let privileged = capabilities.is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1);
        let kib = field("VmPin:").and_then(|kib| kib.parse::<u64>().ok());
        let limit = getrlimit(Resource::Memlock).maximum;
        Self {
            limit: limit.filter(|_| !privileged),
            pinned: kib.unwrap_or(0).saturating_mul(1024),
        }
    }

    /// True if `bytes` more can be registered.
    pub fn admits(&self, bytes: u64) -> bool {
        self.limit
            .is_none_or(|limit| self.pinned.saturating_add(bytes) <= limit)
    }
}

fn access(node: &Path) -> Access {
    use rustix::fs;
    match fs::access(node, fs::Access::READ_OK | fs::Access::WRITE_OK) {
        Ok(()) => Access::Granted,
        Err(_) if node.exists() => Access::Denied,
        Err(_) => Access::Absent,
    }
}

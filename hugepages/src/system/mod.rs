//! Reads the state of the system's memory: huge page pools, limits, NUMA nodes.
//!
//! All files are read below one root, so that a test can simulate a machine with a folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::ReserveError;
use crate::pages::{GIB, KIB, MIB};

/// One of the kernel's pools of huge pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodePages {
    /// The NUMA node, or `None` on a machine without named nodes.
    pub node: Option<u32>,
    /// Bytes per page.
    pub size: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Unused pages, some of which may be reserved already.
    pub free: u64,
    /// Free pages that are promised to existing mappings. The kernel counts them for the whole
    /// machine, so with several nodes this is 0 on each.
    pub reserved: u64,
    /// Pages above the configured number, taken from ordinary memory.
    pub surplus: u64,
    /// Number of surplus pages allowed. Also counted for the whole machine only.
    pub overcommit: u64,
}

impl NodePages {
    /// Pages that a new mapping can count on.
    pub fn available(&self) -> u64 {
        let beyond = self.overcommit.saturating_sub(self.surplus);
        self.free.saturating_sub(self.reserved) + beyond
    }
}

/// The huge page pools, node by node, each with the smallest pages first. Those of the whole
/// machine if the kernel names no NUMA nodes.
pub fn show() -> Vec<NodePages> {
    System::real().show()
}

/// Bytes of memory of this machine; `None` if the kernel does not say.
pub fn machine_memory() -> Option<u64> {
    System::real().meminfo("MemTotal")
}

/// Sets a pool of huge pages, of one node or of the whole machine, to `pages` pages of `size`
/// bytes. Needs root. Returns the number of pages in the pool afterwards, never less than
/// requested; if the kernel provides fewer, restores the former number and fails.
pub fn reserve(size: u64, pages: u64, node: Option<u32>) -> Result<u64, ReserveError> {
    System::real().reserve(size, pages, node)
}

/// The tightest control group limit on huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CgroupLimit {
    pub size: u64,
    pub used: u64,
    pub limit: u64,
    pub file: PathBuf,
}

/// The tightest control group limit on memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// Excludes memory that the kernel reclaims under pressure.
    pub used: u64,
    pub limit: u64,
    pub file: PathBuf,
}

/// How much memory this process may lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memlock {
    /// The hard limit, in bytes: the soft limit can be raised to it without privilege. `None` if
    /// there is no limit, or if the process may ignore it (CAP_IPC_LOCK).
    pub limit: Option<u64>,
    /// Bytes already locked.
    pub locked: u64,
}

/// The limit on the address space of this process (RLIMIT_AS), and its current size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressSpace {
    pub used: u64,
    pub limit: u64,
}

/// All facts that decide which pages an arena gets.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// Pools of the whole machine.
    pub pools: Vec<NodePages>,
    /// Pools per node.
    pub node_pools: Vec<NodePages>,
    pub nodes: Vec<u32>,
    /// The page size that `vm.nr_hugepages` refers to.
    pub default_size: Option<u64>,
    pub cgroup: Vec<CgroupLimit>,
    pub cgroup_memory: Option<MemoryLimit>,
    /// Transparent huge pages are allowed on request (madvise).
    pub transparent: bool,
    pub memlock: Memlock,
    /// `None` without an RLIMIT_AS.
    pub address_space: Option<AddressSpace>,
    /// Strict overcommit: the kernel commits no more memory than it has.
    pub strict_commit: bool,
    pub available: u64,
}

/// The files of a machine.
pub(crate) struct System {
    root: PathBuf,
}

pub(crate) const TRANSPARENT_FILE: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const POOLS: &str = "/sys/kernel/mm/hugepages";
const NODES: &str = "/sys/devices/system/node";
/// The caches of CPU 0; the others are assumed to be alike.
const CACHES: &str = "/sys/devices/system/cpu/cpu0/cache";
/// CAP_IPC_LOCK in capability masks (linux/capability.h).
const CAP_IPC_LOCK: u32 = 14;

impl System {
    pub(crate) fn real() -> Self {
        Self::at("/")
    }

    pub(crate) fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub(crate) fn show(&self) -> Vec<NodePages> {
        let global = self.pools(None);
        let nodes = self.nodes();
        let mut all: Vec<NodePages> = nodes.iter().flat_map(|&n| self.pools(Some(n))).collect();
        if all.is_empty() {
            return global;
        }
        if let [_] = nodes[..] {
            for pool in &mut all {
                if let Some(whole) = global.iter().find(|g| g.size == pool.size) {
                    pool.reserved = whole.reserved;
                    pool.overcommit = whole.overcommit;
                }
            }
        }
        all
    }

    pub(crate) fn reserve(
        &self,
        size: u64,
        pages: u64,
        node: Option<u32>,
    ) -> Result<u64, ReserveError> {
        let nodes = self.nodes();
        if let Some(node) = node.filter(|n| !nodes.contains(n)) {
            return Err(ReserveError::NoSuchNode { node, nodes });
        }
        let pools = self.pools(node);
        let Some(pool) = pools.iter().find(|p| p.size == size) else {
            return Err(ReserveError::NoSuchPageSize {
                size,
                there: pools.iter().map(|p| p.size).collect(),
            });
        };
        // The pool's pages are unavailable to other programs: never take the last memory.
        let more = pages.saturating_sub(pool.total).saturating_mul(size);
        let available = self.meminfo("MemAvailable").unwrap_or(u64::MAX);
        if more > available {
            return Err(ReserveError::NotEnoughMemory {
                asked: more,
                available,
            });
        }
        let there = self.set_pool(size, pages, node, pool.total)?;
        granted(size, pages, there).inspect_err(|_| {
            // A partial pool is useless, so restore the previous size. If this fails too, the first
            // error still describes the cause.
            let _ = self.set_pool(size, pool.total, node, there);
        })
    }

    /// Sets the number of pages of a pool that held `before`. Returns the number afterwards.
    fn set_pool(
        &self,
        size: u64,
        pages: u64,
        node: Option<u32>,
        before: u64,
    ) -> Result<u64, ReserveError> {
        let name = pool_file(size, node);
        let file = self.path(&name);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                let remedy = format!("echo {pages} | sudo tee {name}");
                ReserveError::NotPermitted {
                    asked: pages,
                    there: before,
                    remedy,
                }
            }
            _ => ReserveError::Io {
                file: file.clone(),
                source,
            },
        };
        fs::write(&file, pages.to_string()).map_err(failed)?;
        // The kernel allocates as many as it finds and reports no error: read the number back.
        let text = fs::read_to_string(&file).map_err(failed)?;
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, text.trim().to_owned());
        text.trim().parse().map_err(|_| failed(invalid()))
    }

    pub(crate) fn facts(&self) -> Facts {
        let nodes = self.nodes();
        let pools = self.pools(None);
        Facts {
            node_pools: nodes.iter().flat_map(|&n| self.pools(Some(n))).collect(),
            nodes,
            default_size: self.meminfo("Hugepagesize"),
            cgroup: pools
                .iter()
                .filter_map(|p| self.cgroup_limit(p.size))
                .collect(),
            cgroup_memory: self.cgroup_memory(),
            pools,
            transparent: self
                .text(TRANSPARENT_FILE)
                .is_some_and(|t| !t.contains("[never]")),
            memlock: self.memlock(),
            address_space: self.address_space(),
            strict_commit: self
                .number("/proc/sys/vm/overcommit_memory")
                .is_some_and(|mode| mode == 2),
            available: self.meminfo("MemAvailable").unwrap_or(0),
        }
    }

    /// Bytes in the last-level cache. `None` if the system does not report it, as on some boards.
    pub(crate) fn last_level_cache(&self) -> Option<u64> {
        let caches = self
            .entries(CACHES)
            .filter(|name| name.starts_with("index"));
        let levels = caches.filter_map(|name| {
            let level = self.number(&format!("{CACHES}/{name}/level"))?;
            let size = self.text(&format!("{CACHES}/{name}/size"))?;
            // Always in KiB (Documentation/ABI/testing/sysfs-devices-system-cpu).
            let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
            Some((level, kib.checked_mul(KIB)?))
        });
        let (_, bytes) = levels.max()?;
        Some(bytes).filter(|&bytes| bytes > 0)
    }

    /// Pools of a node, or of the whole machine, by size.
    fn pools(&self, node: Option<u32>) -> Vec<NodePages> {
        let dir = pool_dir(node);
        let mut found: Vec<NodePages> = self
            .entries(&dir)
            .filter_map(|name| {
                let kib: u64 = name
                    .strip_prefix("hugepages-")?
                    .strip_suffix("kB")?
                    .parse()
                    .ok()?;
                let read = |file: &str| self.number(&format!("{dir}/{name}/{file}"));
                Some(NodePages {
                    node,
                    size: kib.checked_mul(KIB)?,
                    total: read("nr_hugepages")?,
                    free: read("free_hugepages")?,
                    reserved: read("resv_hugepages").unwrap_or(0),
                    surplus: read("surplus_hugepages").unwrap_or(0),
                    overcommit: read("nr_overcommit_hugepages").unwrap_or(0),
                })
            })
            .collect();
        found.sort_by_key(|p| p.size);
        found
    }

    fn nodes(&self) -> Vec<u32> {
        let mut nodes: Vec<u32> = self
            .entries(NODES)
            .filter_map(|name| name.strip_prefix("node")?.parse().ok())
            .collect();
        nodes.sort_unstable();
        nodes
    }

    /// The folders of the control groups that limit `controller` for this process: its own and its
    /// ancestors'. The flag is true for cgroup v2.
    fn cgroups(&self, controller: &str) -> Vec<(String, bool)> {
        let membership = self.text("/proc/self/cgroup").unwrap_or_default();
        let mut found = Vec::new();
        let mut walk = |mount: &str, path: &str, second| {
            for group in Path::new(path).ancestors() {
                let group = group.to_string_lossy();
                found.push((format!("{mount}{}", group.trim_end_matches('/')), second));
            }
        };
        for line in membership.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            // Version 2 is the line without controllers (cgroups(7)).
            if controllers.is_empty() {
                walk("/sys/fs/cgroup", path, true);
                walk("/sys/fs/cgroup/unified", path, true);
            } else if controllers.split(',').any(|c| c == controller) {
                walk(&format!("/sys/fs/cgroup/{controller}"), path, false);
            }
        }
        found
    }

    /// The tightest hugetlb limit of this process's control group and its ancestors.
    fn cgroup_limit(&self, size: u64) -> Option<CgroupLimit> {
        let mut found: Vec<CgroupLimit> = Vec::new();
        for (dir, second) in self.cgroups("hugetlb") {
            let names = if second {
                ["max", "current"]
            } else {
                ["limit_in_bytes", "usage_in_bytes"]
            };
            // Used pages and reserved pages have separate limits; either can refuse the allocation.
            for kind in ["", "rsvd."] {
                let stem = format!("{dir}/hugetlb.{}.{kind}", cgroup_size(size));
                let file = format!("{stem}{}", names[0]);
                // "max" does not parse: no limit.
                let Some(limit) = self.number(&file) else {
                    continue;
                };
                let used = self.number(&format!("{stem}{}", names[1])).unwrap_or(0);
                found.push(CgroupLimit {
                    size,
                    used,
                    limit,
                    file: file.into(),
                });
            }
        }
        found
            .into_iter()
            .min_by_key(|l| l.limit.saturating_sub(l.used))
    }

    /// The tightest limit on memory of this process's control group and its ancestors.
    fn cgroup_memory(&self) -> Option<MemoryLimit> {
        let limit = |(dir, second): (String, bool)| {
            let [most, now, total] = if second {
                ["memory.max", "memory.current", ""]
            } else {
                ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_"]
            };
            let file = format!("{dir}/{most}");
            // "max" does not parse: no limit. Version 1 reports a number that no machine has.
            let limit = self.number(&file)?;
            let used = self.number(&format!("{dir}/{now}")).unwrap_or(0);
            // Page cache counts as used, but is reclaimed first.
            let stat = self.text(&format!("{dir}/memory.stat")).unwrap_or_default();
            let field = |name: &str| {
                let name = format!("{total}{name} ");
                let value = stat.lines().find_map(|l| l.strip_prefix(name.as_str()));
                value.and_then(|v| v.trim().parse().ok()).unwrap_or(0u64)
            };
            let files = field("inactive_file").saturating_add(field("active_file"));
            Some(MemoryLimit {
                used: used.saturating_sub(files),
                limit,
                file: file.into(),
            })
        };
        let limits = self.cgroups("memory").into_iter().filter_map(limit);
        limits.min_by_key(|l| l.limit.saturating_sub(l.used))
    }

    fn memlock(&self) -> Memlock {
        let capable = self
            .status("CapEff")
            .and_then(|v| u64::from_str_radix(&v, 16).ok())
            .is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1);
        let [_, hard] = self.limits("Max locked memory");
        Memlock {
            limit: hard.filter(|_| !capable),
            locked: self.status_bytes("VmLck"),
        }
    }

    fn address_space(&self) -> Option<AddressSpace> {
        let [soft, _] = self.limits("Max address space");
        Some(AddressSpace {
            limit: soft?,
            used: self.status_bytes("VmSize"),
        })
    }

    /// The soft and the hard limit of this process, from "Max locked memory  <soft>  <hard>
    /// bytes". "unlimited" does not parse: no limit.
    fn limits(&self, name: &str) -> [Option<u64>; 2] {
        let limits = self.text("/proc/self/limits").unwrap_or_default();
        let line = limits.lines().find_map(|l| l.strip_prefix(name));
        let mut values = line.unwrap_or_default().split_whitespace();
        [(); 2].map(|()| values.next().and_then(|value| value.parse().ok()))
    }

    /// The first word of a field of /proc/self/status.
    fn status(&self, name: &str) -> Option<String> {
        let status = self.text("/proc/self/status")?;
        let mut lines = status.lines();
        let line = lines.find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next().map(str::to_owned)
    }

    fn status_bytes(&self, name: &str) -> u64 {
        let kib = self.status(name).and_then(|v| v.parse::<u64>().ok());
        kib.unwrap_or(0) * KIB
    }

    /// A field of /proc/meminfo, in bytes.
    fn meminfo(&self, field: &str) -> Option<u64> {
        let text = self.text("/proc/meminfo")?;
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
        line.split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()?
            .checked_mul(KIB)
    }

    fn entries(&self, dir: &str) -> impl Iterator<Item = String> {
        let entries = fs::read_dir(self.path(dir)).into_iter().flatten().flatten();
        entries.filter_map(|e| e.file_name().into_string().ok())
    }

    fn number(&self, file: &str) -> Option<u64> {
        self.text(file)?.trim().parse().ok()
    }

    fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.path(file)).ok()
    }

    fn path(&self, file: &str) -> PathBuf {
        self.root.join(file.trim_start_matches('/'))
    }
}

impl Facts {
    /// The command that sets a pool to `pages` pages.
    pub(crate) fn reserve_command(&self, size: u64, node: Option<u32>, pages: u64) -> String {
        if node.is_none() && self.default_size == Some(size) {
            return format!("sudo sysctl -w vm.nr_hugepages={pages}");
        }
        format!("echo {pages} | sudo tee {}", pool_file(size, node))
    }
}

/// Checks the number of pages that the kernel granted of `asked` pages.
fn granted(size: u64, asked: u64, there: u64) -> Result<u64, ReserveError> {
    if there >= asked {
        return Ok(there);
    }
    let remedy = format!(
        "`echo 1 | sudo tee /proc/sys/vm/compact_memory` and again, or boot with `hugepagesz={} hugepages={asked}`",
        boot_size(size)
    );
    Err(ReserveError::Short {
        size,
        asked,
        there,
        remedy,
    })
}

fn pool_dir(node: Option<u32>) -> String {
    node.map_or_else(
        || POOLS.to_owned(),
        |n| format!("{NODES}/node{n}/hugepages"),
    )
}

fn pool_file(size: u64, node: Option<u32>) -> String {
    format!("{}/hugepages-{}kB/nr_hugepages", pool_dir(node), size / KIB)
}

/// A page size as control group files spell it (Documentation/admin-guide/cgroup-v2.rst, HugeTLB).
fn cgroup_size(size: u64) -> String {
    match size {
        s if s >= GIB => format!("{}GB", s / GIB),
        s if s >= MIB => format!("{}MB", s / MIB),
        s => format!("{}KB", s / KIB),
    }
}

/// A page size as the kernel command line spells it.
fn boot_size(size: u64) -> String {
    cgroup_size(size).replace('B', "")
}

#[cfg(test)]
mod tests;

//! Decides which kinds of pages an arena tries, in which order, and the reason why larger ones are
//! not available. Pure functions.

use std::io;

use rustix::io::Errno;

use crate::error::ArenaError;
use crate::pages::{HugepagePolicy, MIB, PageKind};
use crate::system::{AddressSpace, Facts, TRANSPARENT_FILE};

/// The requirements for an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaOptions {
    /// Minimum size in bytes; rounded up to whole pages.
    pub bytes: u64,
    pub hugepages: HugepagePolicy,
    /// The NUMA node for the memory: strict for hugetlb pages, preferred for others. `None`: any
    /// node.
    pub numa_node: Option<u32>,
    /// Fail instead of using memory that may be swapped out. If false, an [`crate::Arena`] tries to
    /// lock its memory, and its report says whether it succeeded; [`crate::Shared`] does not try.
    pub require_lock: bool,
    /// Populate every page now, so that none is missing later.
    pub populate: bool,
    /// Bytes that this process is going to allocate in addition. The commands in errors ask for
    /// enough for both.
    pub beside: u64,
}

impl ArenaOptions {
    /// `bytes` on the best available pages, populated now, locked if allowed.
    pub fn new(bytes: u64) -> Self {
        let hugepages = HugepagePolicy::Auto;
        Self {
            bytes,
            hugepages,
            numa_node: None,
            require_lock: false,
            populate: true,
            beside: 0,
        }
    }
}

/// How the memory will be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Buffers in constant use by devices: hugetlb pages, and a lock if allowed.
    Dma,
    /// RAM disks: large, sparse, and released in parts. They use hugetlb pages or a lock only on
    /// explicit request.
    RamDisk,
}

/// The kinds to try, and those ruled out.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Kinds worth trying, best first. Never empty.
    pub tries: Vec<PageKind>,
    /// Kinds that were ruled out, and why.
    pub shortages: Vec<(PageKind, ArenaError)>,
}

/// The kinds of pages to try for `options` on a machine described by `facts`.
pub(crate) fn plan(
    options: &ArenaOptions,
    purpose: Purpose,
    facts: &Facts,
) -> Result<Plan, ArenaError> {
    if options.bytes == 0 {
        return Err(ArenaError::Empty);
    }
    if let Some(node) = options.numa_node.filter(|n| !facts.has_node(*n)) {
        return Err(ArenaError::NoSuchNode {
            node,
            nodes: facts.nodes.clone(),
        });
    }
    let mut plan = Plan {
        tries: Vec::new(),
        shortages: Vec::new(),
    };
    for kind in candidates(options, purpose) {
        match check(kind, options, purpose, facts) {
            Ok(()) => plan.tries.push(kind),
            Err(shortage) => plan.shortages.push((kind, shortage)),
        }
    }
    match (plan.tries.is_empty(), plan.shortages.pop()) {
        (true, Some((_, shortage))) => Err(shortage),
        (_, last) => {
            plan.shortages.extend(last);
            Ok(plan)
        }
    }
}

/// The kinds that the policy and the size allow, best first.
fn candidates(options: &ArenaOptions, purpose: Purpose) -> Vec<PageKind> {
    match options.hugepages {
        HugepagePolicy::OneGiB => vec![PageKind::OneGiB],
        HugepagePolicy::TwoMiB => vec![PageKind::TwoMiB],
        HugepagePolicy::Off => vec![PageKind::Plain],
        HugepagePolicy::Auto => [
            PageKind::OneGiB,
            PageKind::TwoMiB,
            PageKind::Transparent,
            PageKind::Plain,
        ]
        .into_iter()
        .filter(|&kind| worthwhile(kind, options.bytes))
        .filter(|&kind| purpose == Purpose::Dma || !kind.is_hugetlb())
        .collect(),
    }
}

/// True if rounding up to this page size wastes little: at most an eighth of the request, or at
/// most 2 MiB.
fn worthwhile(kind: PageKind, bytes: u64) -> bool {
    kind.round_up(bytes)
        .is_none_or(|rounded| rounded - bytes <= (bytes / 8).max(2 * MIB))
}

/// Checks as far as possible in advance whether the machine can provide `options` on this kind of
/// pages.
fn check(
    kind: PageKind,
    options: &ArenaOptions,
    purpose: Purpose,
    facts: &Facts,
) -> Result<(), ArenaError> {
    let asked = kind.round_up(options.bytes).ok_or(ArenaError::TooLarge {
        asked: options.bytes,
    })?;
    // Populating memory that is not available invokes the OOM killer. (Locking populates too.)
    let taken = options.populate || options.require_lock || purpose == Purpose::Dma;
    let short = facts.memory_short(asked).filter(|_| taken);
    match kind {
        PageKind::Plain | PageKind::Transparent if short.is_some() => short.map_or(Ok(()), Err),
        PageKind::Plain => Ok(()),
        PageKind::Transparent if facts.transparent => Ok(()),
        PageKind::Transparent => Err(ArenaError::TransparentOff {
            file: TRANSPARENT_FILE.into(),
        }),
        PageKind::OneGiB | PageKind::TwoMiB => {
            let size = kind.size();
            let Some(pool) = facts.pools.iter().find(|p| p.size == size) else {
                return Err(ArenaError::NoSuchPageSize {
                    size,
                    there: facts.pools.iter().map(|p| p.size).collect(),
                });
            };
            if facts
                .pages_available(size, options.numa_node)
                .unwrap_or_else(|| pool.available())
                < asked / size
            {
                return Err(facts.pages_short(size, options, asked));
            }
            match facts.cgroup_short(size, asked) {
                Some(short) => Err(short),
                None => Ok(()),
            }
        }
    }
}

/// Checks whether `bytes` more may be locked in memory.
pub(crate) fn check_lock(
    kind: PageKind,
    (bytes, beside): (u64, u64),
    facts: &Facts,
) -> Result<(), ArenaError> {
    let memlock = facts.memlock;
    match memlock.limit {
        Some(limit) if !kind.is_hugetlb() && memlock.locked.saturating_add(bytes) > limit => {
            Err(ArenaError::Memlock {
                asked: bytes,
                locked: memlock.locked,
                limit,
                beside,
            })
        }
        _ => Ok(()),
    }
}

/// Translates an errno of the kernel for memory of `kind` into the error that names the cause.
/// `facts` were read after the failure.
pub(crate) fn explain(
    step: &'static str,
    errno: Errno,
    kind: PageKind,
    options: &ArenaOptions,
    facts: &Facts,
) -> ArenaError {
    let asked = kind.round_up(options.bytes).unwrap_or(options.bytes);
    // mmap returns ENOMEM. Populating returns ENOMEM, EFAULT in place of a SIGBUS, or EHWPOISON.
    // mlock returns ENOMEM, EAGAIN or EPERM (manual pages).
    let memory = matches!(
        errno,
        Errno::NOMEM | Errno::FAULT | Errno::AGAIN | Errno::PERM | Errno::HWPOISON
    );
    match (memory, step) {
        (true, "mlock") => {
            if let Err(short) = check_lock(kind, (asked, options.beside), facts) {
                return short;
            }
        }
        (true, _) if kind.is_hugetlb() => {
            // Another program may have released pages since, so the counts can look sufficient now.
            let short = facts.cgroup_short(kind.size(), asked);
            return short.unwrap_or_else(|| facts.pages_short(kind.size(), options, asked));
        }
        (true, "mmap" | "populate") => return facts.refused(kind, asked),
        _ => {}
    }
    ArenaError::System {
        step,
        asked,
        pages: kind,
        source: io::Error::from(errno),
    }
}

impl Facts {
    /// True if the machine has `node`. Without named nodes, the whole machine is node 0.
    fn has_node(&self, node: u32) -> bool {
        self.nodes.contains(&node) || (self.nodes.is_empty() && node == 0)
    }

    /// Pages of `size` that a new mapping can count on; `None` if the kernel has no such pages.
    fn pages_available(&self, size: u64, node: Option<u32>) -> Option<u64> {
        let whole = self.pools.iter().find(|p| p.size == size)?.available();
        let Some(node) = node.filter(|_| !self.nodes.is_empty()) else {
            return Some(whole);
        };
        // Reservations are not tied to a node, so both counts must suffice.
        let there = self
            .node_pools
            .iter()
            .find(|p| p.node == Some(node) && p.size == size)?;
        Some(there.available().min(whole))
    }

    fn pages_short(&self, size: u64, options: &ArenaOptions, bytes: u64) -> ArenaError {
        let node = options.numa_node.filter(|_| !self.nodes.is_empty());
        let asked = bytes / size;
        let free = self.pages_available(size, node).unwrap_or(0);
        let mut pools = self.pools.iter().chain(&self.node_pools);
        let total = pools
            .find(|p| p.node == node && p.size == size)
            .map_or(0, |p| p.total);
        // If enough pages are free by now, another process took them meanwhile: ask for one more
        // arena.
        let missing = if asked > free { asked - free } else { asked };
        let beside = options.beside.div_ceil(size);
        let remedy = self.reserve_command(size, node, total + missing + beside);
        ArenaError::NotEnoughPages {
            size,
            node,
            asked,
            free,
            total,
            remedy,
        }
    }

    /// An error if `asked` bytes of ordinary memory exceed the available memory.
    fn memory_short(&self, asked: u64) -> Option<ArenaError> {
        if let Some(group) = &self.cgroup_memory
            && asked > group.limit.saturating_sub(group.used)
        {
            return Some(ArenaError::CgroupMemory {
                asked,
                used: group.used,
                limit: group.limit,
                file: group.file.clone(),
            });
        }
        let available = self.available;
        // 0: the kernel does not report it.
        let short = available > 0 && asked > available;
        short.then_some(ArenaError::NotEnoughMemory { asked, available })
    }

    /// Why the kernel refuses to map `asked` bytes.
    fn refused(&self, kind: PageKind, asked: u64) -> ArenaError {
        let available = self.available;
        if let Some(AddressSpace { used, limit }) = self.address_space
            // An aligned mapping is first made larger by one page.
            && used.saturating_add(asked).saturating_add(kind.size()) > limit
        {
            return ArenaError::AddressSpace { asked, used, limit };
        }
        if self.strict_commit && available >= asked {
            ArenaError::Committed { asked, available }
        } else {
            ArenaError::NotEnoughMemory { asked, available }
        }
    }

    fn cgroup_short(&self, size: u64, asked: u64) -> Option<ArenaError> {
        let short = self
            .cgroup
            .iter()
            .find(|l| l.size == size && asked > l.limit.saturating_sub(l.used))?;
        Some(ArenaError::CgroupHugetlb {
            size,
            asked,
            used: short.used,
            limit: short.limit,
            file: short.file.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::GIB;
    use crate::system::{CgroupLimit, Memlock, MemoryLimit, NodePages};
    use PageKind::*;

    fn plan(options: &ArenaOptions, facts: &Facts) -> Result<Plan, ArenaError> {
        super::plan(options, Purpose::Dma, facts)
    }

    fn pool(node: Option<u32>, size: u64, total: u64, free: u64) -> NodePages {
        NodePages {
            node,
            size,
            total,
            free,
            reserved: 0,
            surplus: 0,
            overcommit: 0,
        }
    }

    /// Two nodes; 1024 free pages of 2 MiB (24 of them on node 1) and 4 of 1 GiB (all on node 0).
    fn rich() -> Facts {
        Facts {
            pools: vec![pool(None, 2 * MIB, 2000, 1024), pool(None, GIB, 4, 4)],
            node_pools: vec![
                pool(Some(0), 2 * MIB, 1000, 1000),
                pool(Some(0), GIB, 4, 4),
                pool(Some(1), 2 * MIB, 1000, 24),
                pool(Some(1), GIB, 0, 0),
            ],
            nodes: vec![0, 1],
            default_size: Some(2 * MIB),
            cgroup: Vec::new(),
            cgroup_memory: None,
            transparent: true,
            memlock: Memlock {
                limit: None,
                locked: 0,
            },
            address_space: None,
            strict_commit: false,
            available: 64 * GIB,
        }
    }

    fn poor() -> Facts {
        let pools = vec![pool(None, 2 * MIB, 0, 0), pool(None, GIB, 0, 0)];
        Facts {
            pools,
            node_pools: Vec::new(),
            nodes: Vec::new(),
            ..rich()
        }
    }

    fn tries(options: ArenaOptions, facts: &Facts) -> Vec<PageKind> {
        plan(&options, facts).unwrap().tries
    }

    /// Goal: all four kinds are tried, best first, if the machine has them.
    #[test]
    fn the_order_is_best_first() {
        assert_eq!(
            tries(ArenaOptions::new(2 * GIB), &rich()),
            [OneGiB, TwoMiB, Transparent, Plain]
        );
    }

    /// Goal: RAM disks leave hugetlb pages to arenas unless the caller requires them.
    #[test]
    fn ram_disks_leave_the_pool_alone() {
        let tries = |hugepages| {
            let options = ArenaOptions {
                hugepages,
                ..ArenaOptions::new(2 * GIB)
            };
            super::plan(&options, Purpose::RamDisk, &rich())
                .unwrap()
                .tries
        };
        assert_eq!(tries(HugepagePolicy::Auto), [Transparent, Plain]);
        assert_eq!(tries(HugepagePolicy::OneGiB), [OneGiB]);
    }

    /// Goal: 1 GiB pages are not wasted on small arenas. Method: both sides of the one-eighth
    /// limit.
    #[test]
    fn large_pages_only_where_little_is_wasted() {
        assert_eq!(tries(ArenaOptions::new(GIB / 2), &rich())[0], TwoMiB);
        assert_eq!(
            tries(ArenaOptions::new(GIB * 8 / 9 - MIB), &rich())[0],
            TwoMiB
        );
        assert_eq!(
            tries(ArenaOptions::new(GIB * 8 / 9 + MIB), &rich())[0],
            OneGiB
        );
        assert_eq!(tries(ArenaOptions::new(4096), &rich())[0], TwoMiB);
        let forced = ArenaOptions {
            hugepages: HugepagePolicy::OneGiB,
            ..ArenaOptions::new(4096)
        };
        assert_eq!(
            tries(forced, &rich()),
            [OneGiB],
            "an explicit request gets them"
        );
    }

    /// Goal: without huge pages the plan continues, with a reason and a command for each missing
    /// kind.
    #[test]
    fn a_poor_machine_gets_ordinary_pages_and_commands() {
        let got = plan(&ArenaOptions::new(GIB), &poor()).unwrap();
        assert_eq!(got.tries, [Transparent, Plain]);
        let texts: Vec<String> = got.shortages.iter().map(|(_, s)| s.to_string()).collect();
        assert_eq!(
            texts,
            [
                "not enough 1 GiB pages: 1 asked, 0 free of 0; \
                 remedy: `echo 1 | sudo tee /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages`",
                "not enough 2 MiB pages: 512 asked, 0 free of 0; remedy: `sudo sysctl -w vm.nr_hugepages=512`",
            ]
        );
        let off = Facts {
            transparent: false,
            ..poor()
        };
        assert_eq!(tries(ArenaOptions::new(GIB), &off), [Plain]);
    }

    /// Goal: with a requested node, that node's pool counts, and the command names the node.
    #[test]
    fn the_pool_of_the_node_counts() {
        let options = ArenaOptions {
            numa_node: Some(1),
            ..ArenaOptions::new(GIB)
        };
        let got = plan(&options, &rich()).unwrap();
        assert_eq!(got.tries, [Transparent, Plain]);
        match &got.shortages[1].1 {
            ArenaError::NotEnoughPages {
                node,
                asked,
                free,
                total,
                remedy,
                ..
            } => {
                assert_eq!((*node, *asked, *free, *total), (Some(1), 512, 24, 1000));
                assert_eq!(
                    remedy,
                    "echo 1488 | sudo tee /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"
                );
            }
            other => panic!("{other}"),
        }
        let options = ArenaOptions {
            numa_node: Some(2),
            ..options
        };
        assert!(matches!(
            plan(&options, &rich()),
            Err(ArenaError::NoSuchNode { node: 2, .. })
        ));
    }

    /// Goal: reserved pages do not count as free.
    #[test]
    fn reserved_pages_do_not_count() {
        let mut facts = rich();
        facts.pools[1].reserved = 3;
        assert_eq!(tries(ArenaOptions::new(2 * GIB), &facts)[0], TwoMiB);
    }

    /// Goal: a strict policy fails with the named error. Method: each of the three.
    #[test]
    fn a_strict_policy_fails_with_the_named_error() {
        let insist = |hugepages| ArenaOptions {
            hugepages,
            ..ArenaOptions::new(GIB)
        };
        let pages = plan(&insist(HugepagePolicy::TwoMiB), &poor()).unwrap_err();
        assert!(
            matches!(
                pages,
                ArenaError::NotEnoughPages {
                    asked: 512,
                    free: 0,
                    ..
                }
            ),
            "{pages}"
        );

        let file = std::path::PathBuf::from("/f");
        let limit = CgroupLimit {
            size: GIB,
            used: 0,
            limit: MIB,
            file,
        };
        let facts = Facts {
            cgroup: vec![limit],
            ..rich()
        };
        let cgroup = plan(&insist(HugepagePolicy::OneGiB), &facts).unwrap_err();
        assert!(
            matches!(
                cgroup,
                ArenaError::CgroupHugetlb {
                    asked: GIB,
                    limit: MIB,
                    ..
                }
            ),
            "{cgroup}"
        );
        assert_eq!(
            tries(insist(HugepagePolicy::TwoMiB), &facts),
            [TwoMiB],
            "the limit of another size does not apply"
        );

        let facts = Facts {
            pools: vec![pool(None, 2 * MIB, 1, 1)],
            ..poor()
        };
        let size = plan(&insist(HugepagePolicy::OneGiB), &facts).unwrap_err();
        assert!(
            matches!(size, ArenaError::NoSuchPageSize { size: GIB, .. }),
            "{size}"
        );
    }

    /// Goal: an impossible size is refused before any system call.
    #[test]
    fn impossible_sizes_are_refused() {
        assert!(matches!(
            plan(&ArenaOptions::new(0), &rich()),
            Err(ArenaError::Empty)
        ));
        assert!(matches!(
            plan(&ArenaOptions::new(u64::MAX), &rich()),
            Err(ArenaError::TooLarge { .. })
        ));
    }

    /// Goal: the lock limit counts memory that is already locked, and ignores memory that needs no
    /// lock.
    #[test]
    fn lock_limit() {
        let facts = Facts {
            memlock: Memlock {
                limit: Some(8 * MIB),
                locked: MIB,
            },
            ..rich()
        };
        assert!(check_lock(Plain, (7 * MIB, 0), &facts).is_ok());
        let short = check_lock(Plain, (8 * MIB, 0), &facts).unwrap_err();
        assert!(
            matches!(short, ArenaError::Memlock { asked, locked: MIB, .. } if asked == 8 * MIB)
        );
        assert!(check_lock(TwoMiB, (GIB, 0), &facts).is_ok());
        assert!(check_lock(Plain, (u64::MAX, 0), &rich()).is_ok());
    }

    /// Goal: memory that is populated at once and is not available is refused with numbers; the
    /// process survives. Memory populated on demand, or already in a hugetlb pool, is not refused.
    /// Method: a tight control group, a tight machine.
    #[test]
    fn unavailable_memory_is_not_populated() {
        let group = Facts {
            cgroup_memory: Some(MemoryLimit {
                used: 30 * MIB,
                limit: 100 * MIB,
                file: "/cg/memory.max".into(),
            }),
            ..poor()
        };
        let options = |bytes| ArenaOptions::new(bytes);
        assert_eq!(tries(options(70 * MIB), &group), [Transparent, Plain]);
        let error = plan(&options(71 * MIB), &group).unwrap_err();
        assert_eq!(
            error.to_string(),
            "cgroup memory limit: 71 MiB asked, 70 MiB left of 100 MiB (/cg/memory.max); remedy: `echo 105906176 | \
             sudo tee /cg/memory.max` (of a container: give it more memory), or ask for less"
        );
        let pool = Facts {
            cgroup_memory: group.cgroup_memory.clone(),
            ..rich()
        };
        assert_eq!(tries(options(72 * MIB), &pool), [TwoMiB]);
        let lazy = ArenaOptions {
            populate: false,
            ..options(GIB)
        };
        assert!(super::plan(&lazy, Purpose::RamDisk, &group).is_ok());
        let full = Facts {
            available: GIB,
            ..poor()
        };
        assert!(plan(&options(GIB), &full).is_ok());
        let error = plan(&options(2 * GIB), &full).unwrap_err();
        assert!(
            matches!(error, ArenaError::NotEnoughMemory { available: GIB, .. }),
            "{error}"
        );
        let silent = Facts {
            available: 0,
            ..poor()
        };
        assert!(plan(&options(2 * GIB), &silent).is_ok());
    }

    /// Goal: an errno becomes the error that names the cause. Method: a table of steps and errnos.
    #[test]
    fn errnos_become_named_errors() {
        let options = ArenaOptions::new(GIB);
        let lock = Facts {
            memlock: Memlock {
                limit: Some(MIB),
                locked: 0,
            },
            ..rich()
        };
        let file = std::path::PathBuf::from("/f");
        let cgroup = Facts {
            cgroup: vec![CgroupLimit {
                size: GIB,
                used: 0,
                limit: MIB,
                file,
            }],
            ..rich()
        };
        let name =
            |step, errno, kind, facts: &Facts| match explain(step, errno, kind, &options, facts) {
                ArenaError::NotEnoughPages { .. } => "pages",
                ArenaError::CgroupHugetlb { .. } => "cgroup",
                ArenaError::Memlock { .. } => "memlock",
                ArenaError::NotEnoughMemory { .. } => "memory",
                ArenaError::AddressSpace { .. } => "address space",
                ArenaError::Committed { .. } => "committed",
                ArenaError::System { .. } => "system",
                _ => "?",
            };
        assert_eq!(name("mmap", Errno::NOMEM, OneGiB, &rich()), "pages");
        assert_eq!(name("populate", Errno::FAULT, OneGiB, &cgroup), "cgroup");
        assert_eq!(name("mlock", Errno::NOMEM, Plain, &lock), "memlock");
        assert_eq!(name("mlock", Errno::NOMEM, Plain, &rich()), "system");
        assert_eq!(name("mmap", Errno::NOMEM, Plain, &rich()), "memory");
        let bounded = |limit| Facts {
            address_space: Some(AddressSpace { used: MIB, limit }),
            ..rich()
        };
        assert_eq!(
            name("mmap", Errno::NOMEM, Plain, &bounded(GIB)),
            "address space"
        );
        assert_eq!(
            name("mmap", Errno::NOMEM, Plain, &bounded(2 * GIB)),
            "memory"
        );
        let strict = Facts {
            strict_commit: true,
            ..rich()
        };
        assert_eq!(name("mmap", Errno::NOMEM, Plain, &strict), "committed");
        assert_eq!(name("mbind", Errno::INVAL, TwoMiB, &rich()), "system");
    }
}

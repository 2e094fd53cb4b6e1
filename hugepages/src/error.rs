//! Errors of memory allocation, each with the requested amount, the available amount and the
//! remedy.

use std::io;
use std::path::PathBuf;

use crate::pages::{KIB, human};

/// The reason why an arena or shared memory could not be allocated as requested.
///
/// [`crate::ArenaReport`] uses the same values to explain why the pages are not better.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error("an arena of no bytes was asked for")]
    Empty,

    #[error("an arena of {asked} bytes is more than the address space holds")]
    TooLarge { asked: u64 },

    #[error("there is no NUMA node {node}; this machine has {}", list(.nodes))]
    NoSuchNode { node: u32, nodes: Vec<u32> },

    #[error("this kernel has no {} pages; it has {}", human(*size), sizes(.there))]
    NoSuchPageSize { size: u64, there: Vec<u64> },

    /// The kernel's hugetlb pool holds too few unclaimed pages.
    #[error(
        "not enough {} pages{}: {asked} asked, {free} free of {total}; remedy: `{remedy}`",
        human(*size), on_node(*node)
    )]
    NotEnoughPages {
        size: u64,
        node: Option<u32>,
        asked: u64,
        free: u64,
        total: u64,
        remedy: String,
    },

    /// The control group of this process limits huge pages.
    #[error(
        "cgroup hugetlb limit on {} pages: {} asked, {} left of {} ({}); remedy: `echo {} | sudo tee {}`",
        human(*size), human(*asked), human(limit.saturating_sub(*used)), human(*limit),
        file.display(), used + asked, file.display()
    )]
    CgroupHugetlb {
        size: u64,
        asked: u64,
        used: u64,
        limit: u64,
        file: PathBuf,
    },

    /// RLIMIT_MEMLOCK is too low for this allocation.
    #[error(
        "RLIMIT_MEMLOCK too low: {} asked, {} allowed and {} of it in use; \
         remedy: `ulimit -l {}` as root, or `LimitMEMLOCK={}` in the systemd unit",
        human(*asked), human(*limit), human(*locked), memlock_kib(&[*asked, *locked, *beside]),
        memlock_kib(&[*asked, *locked, *beside]) * KIB
    )]
    Memlock {
        asked: u64,
        locked: u64,
        limit: u64,
        /// Bytes that the process is going to lock in addition.
        beside: u64,
    },

    /// The administrator turned transparent huge pages off.
    #[error("transparent huge pages are off; remedy: `echo madvise | sudo tee {}`", file.display())]
    TransparentOff { file: PathBuf },

    #[error("not enough memory: {} asked, {} available; remedy: ask for less or free some", human(*asked), human(*available))]
    NotEnoughMemory { asked: u64, available: u64 },

    /// RLIMIT_AS bounds the address space of this process.
    #[error(
        "RLIMIT_AS too low: {} asked, {} allowed and {} of it in use; \
         remedy: `ulimit -v unlimited`, or `LimitAS=infinity` in the systemd unit",
        human(*asked), human(*limit), human(*used)
    )]
    AddressSpace { asked: u64, used: u64, limit: u64 },

    /// Strict overcommit: the kernel commits no more memory than it has, used or not.
    #[error(
        "the kernel commits no more memory (vm.overcommit_memory is 2): {} asked, {} available; \
         remedy: `sudo sysctl vm.overcommit_memory=0`, or ask for less",
        human(*asked), human(*available)
    )]
    Committed { asked: u64, available: u64 },

    /// The control group of this process limits memory; exceeding the limit would kill the process.
    #[error(
        "cgroup memory limit: {} asked, {} left of {} ({}); \
         remedy: `echo {} | sudo tee {}` (of a container: give it more memory), or ask for less",
        human(*asked), human(limit.saturating_sub(*used)), human(*limit), file.display(), used + asked, file.display()
    )]
    CgroupMemory {
        asked: u64,
        /// Excludes memory that the kernel reclaims under pressure.
        used: u64,
        limit: u64,
        file: PathBuf,
    },

    /// The system call failed for none of the reasons above.
    #[error("{step} of {} on {pages} failed", human(*asked))]
    System {
        step: &'static str,
        asked: u64,
        pages: crate::PageKind,
        source: io::Error,
    },
}

/// The reason why the kernel's pool of huge pages could not be resized.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    #[error("this kernel has no {} pages; it has {}", human(*size), sizes(.there))]
    NoSuchPageSize { size: u64, there: Vec<u64> },

    #[error("there is no NUMA node {node}; this machine has {}", list(.nodes))]
    NoSuchNode { node: u32, nodes: Vec<u32> },

    #[error("reserving {asked} pages needs root, {there} are reserved; remedy: `{remedy}`")]
    NotPermitted {
        asked: u64,
        there: u64,
        remedy: String,
    },

    #[error(
        "reserving {} more for huge pages would leave nothing: {} available; remedy: ask for less or free some",
        human(*asked), human(*available)
    )]
    NotEnoughMemory { asked: u64, available: u64 },

    /// The kernel found too little free contiguous memory. The pool keeps its previous size.
    #[error("{asked} pages of {} asked, {there} to be had; remedy: {remedy}", human(*size))]
    Short {
        size: u64,
        asked: u64,
        there: u64,
        remedy: String,
    },

    #[error("cannot use {}", file.display())]
    Io { file: PathBuf, source: io::Error },
}

/// The value for `ulimit -l`, in KiB, that allows all of these bytes.
fn memlock_kib(parts: &[u64]) -> u64 {
    let sum = parts
        .iter()
        .fold(0u64, |sum, part| sum.saturating_add(*part));
    sum.div_ceil(KIB)
}

fn on_node(node: Option<u32>) -> String {
    node.map_or(String::new(), |n| format!(" on node {n}"))
}

fn list(nodes: &[u32]) -> String {
    join(nodes.iter().map(u32::to_string), "none")
}

fn sizes(there: &[u64]) -> String {
    join(there.iter().map(|&s| human(s)), "none")
}

fn join(parts: impl Iterator<Item = String>, empty: &str) -> String {
    let all: Vec<String> = parts.collect();
    if all.is_empty() {
        empty.to_owned()
    } else {
        all.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::{GIB, MIB};

    /// Goal: each error contains the requested amount, the available amount and the remedy. Method:
    /// the whole text.
    #[test]
    fn texts_have_numbers_and_remedy() {
        let memlock = ArenaError::Memlock {
            asked: 60 * MIB,
            locked: MIB,
            limit: 8 * MIB,
            beside: 4 * MIB,
        };
        assert_eq!(
            memlock.to_string(),
            "RLIMIT_MEMLOCK too low: 60 MiB asked, 8 MiB allowed and 1 MiB of it in use; \
             remedy: `ulimit -l 66560` as root, or `LimitMEMLOCK=68157440` in the systemd unit"
        );
        let cgroup = ArenaError::CgroupHugetlb {
            size: 2 * MIB,
            asked: GIB,
            used: 2 * MIB,
            limit: 10 * MIB,
            file: "/cg/hugetlb.2MB.max".into(),
        };
        assert_eq!(
            cgroup.to_string(),
            "cgroup hugetlb limit on 2 MiB pages: 1 GiB asked, 8 MiB left of 10 MiB (/cg/hugetlb.2MB.max); \
             remedy: `echo 1075838976 | sudo tee /cg/hugetlb.2MB.max`"
        );
        let pages = ArenaError::NotEnoughPages {
            size: 2 * MIB,
            node: Some(1),
            asked: 512,
            free: 3,
            total: 4,
            remedy: "do it".into(),
        };
        assert_eq!(
            pages.to_string(),
            "not enough 2 MiB pages on node 1: 512 asked, 3 free of 4; remedy: `do it`"
        );
        let node = ArenaError::NoSuchNode {
            node: 7,
            nodes: vec![0, 1],
        };
        assert_eq!(
            node.to_string(),
            "there is no NUMA node 7; this machine has 0, 1"
        );
    }
}

//! Tests of reading and writing the system's memory state; the machine is a folder of files.

use std::fs;
use std::path::Path;

use super::*;

pub(crate) struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    pub(super) fn new(files: &[(&str, &str)]) -> Self {
        let machine = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        for (name, text) in files {
            machine.write(name, text);
        }
        machine
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        let file = self.dir.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    pub(super) fn system(&self) -> System {
        System::at(self.dir.path())
    }

    pub(super) fn root(&self) -> &Path {
        self.dir.path()
    }
}

const TWO_NODES: &[(&str, &str)] = &[
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
        "300\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
        "200\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages",
        "50\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages",
        "1\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages",
        "11\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages",
        "2\n",
    ),
    (
        "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages",
        "1\n",
    ),
    (
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages",
        "100\n",
    ),
    (
        "sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages",
        "10\n",
    ),
    (
        "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages",
        "200\n",
    ),
    (
        "sys/devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages",
        "190\n",
    ),
    ("sys/devices/system/node/online", "0-1\n"),
    (
        "sys/kernel/mm/transparent_hugepage/enabled",
        "always [madvise] never\n",
    ),
    (
        "proc/meminfo",
        "MemTotal: 100 kB\nMemAvailable:   2097152 kB\nHugepagesize:    2048 kB\n",
    ),
    (
        "proc/self/status",
        "Name:\tx\nVmSize:\t   2048 kB\nVmLck:\t     12 kB\nCapEff:\t0000000000000000\n",
    ),
    (
        "proc/self/limits",
        "Limit Soft Hard Units\nMax locked memory         8388608              16777216             bytes     \nMax address space         204800000            unlimited            bytes     \n",
    ),
    ("proc/self/cgroup", "0::/system.slice/nacre.service\n"),
];

/// Goal: every fact is read from the kernel's file for it. Method: a machine of two nodes.
#[test]
fn facts_of_a_machine_with_two_nodes() {
    let facts = Machine::new(TWO_NODES).system().facts();
    assert_eq!(facts.nodes, [0, 1]);
    assert_eq!(facts.default_size, Some(2 * MIB));
    assert_eq!(facts.available, 2 * GIB);
    assert!(facts.transparent);
    assert_eq!(
        facts.memlock,
        Memlock {
            limit: Some(16 << 20),
            locked: 12 << 10
        }
    );
    let (used, limit) = (2 * MIB, 204_800_000);
    assert_eq!(facts.address_space, Some(AddressSpace { used, limit }));
    assert!(facts.cgroup.is_empty());
    let sizes: Vec<_> = facts
        .pools
        .iter()
        .map(|p| (p.size, p.total, p.available()))
        .collect();
    assert_eq!(sizes, [(2 * MIB, 300, 200 - 50 + 10), (GIB, 2, 1)]);
    let nodes: Vec<_> = facts.node_pools.iter().map(|p| (p.node, p.free)).collect();
    assert_eq!(nodes, [(Some(0), 10), (Some(1), 190)]);
}

/// Goal: the last-level cache is found among all caches. Method: machines with several levels, one
/// that does not report its size, and one without a cache.
#[test]
fn the_last_level_cache_is_found() {
    let of = |caches: &[(&str, &str, &str)]| {
        let machine = Machine::new(&[("sys/devices/system/cpu/cpu0/cache/uevent", "")]);
        for (index, level, size) in caches {
            let dir = format!("sys/devices/system/cpu/cpu0/cache/{index}");
            machine.write(&format!("{dir}/level"), level);
            machine.write(&format!("{dir}/size"), size);
        }
        machine.system().last_level_cache()
    };
    let levels = [
        ("index0", "1\n", "32K\n"),
        ("index3", "3\n", "32768K\n"),
        ("index2", "2\n", "1024K\n"),
    ];
    assert_eq!(of(&levels), Some(32 * MIB));
    let nameless = [("index0", "1\n", "32K\n"), ("index1", "2\n", "\n")];
    assert_eq!(of(&nameless), Some(32 * KIB));
    for size in [
        "0K\n",
        "K\n",
        "-1K\n",
        "32\n",
        "99999999999999999999K\n",
        "18446744073709551615K\n",
    ] {
        assert_eq!(of(&[("index0", "1\n", size)]), None, "{size:?}");
    }
    assert_eq!(of(&[]), None);
}

/// Goal: an empty or malformed machine yields no facts rather than a panic.
#[test]
fn facts_of_a_bare_machine() {
    let facts = Machine::new(&[("proc/self/cgroup", "rubbish\n\n:::\n")])
        .system()
        .facts();
    assert!(facts.pools.is_empty() && facts.nodes.is_empty() && facts.cgroup.is_empty());
    assert!(!facts.transparent);
    assert_eq!(
        facts.memlock,
        Memlock {
            limit: None,
            locked: 0
        }
    );
}

/// Goal: privilege and "unlimited" both remove the lock limit. Method: one at a time.
#[test]
fn memlock_is_lifted_by_privilege_or_no_limit() {
    let machine = Machine::new(TWO_NODES);
    machine.write(
        "proc/self/status",
        "VmLck: 0 kB\nCapEff:\t0000000000004000\n",
    );
    assert_eq!(machine.system().facts().memlock.limit, None);
    let machine = Machine::new(TWO_NODES);
    machine.write(
        "proc/self/limits",
        "Max locked memory  unlimited  unlimited  bytes\n",
    );
    assert_eq!(machine.system().facts().memlock.limit, None);
}

/// Goal: the tightest limit of all ancestors counts, in both versions of control groups.
#[test]
fn the_tightest_cgroup_limit_wins() {
    let machine = Machine::new(TWO_NODES);
    let group = "sys/fs/cgroup/system.slice";
    machine.write(&format!("{group}/nacre.service/hugetlb.2MB.max"), "max\n");
    machine.write(&format!("{group}/nacre.service/hugetlb.2MB.current"), "0\n");
    machine.write(&format!("{group}/hugetlb.2MB.max"), "10485760\n");
    machine.write(&format!("{group}/hugetlb.2MB.current"), "2097152\n");
    machine.write(&format!("{group}/hugetlb.2MB.rsvd.max"), "8388608\n");
    machine.write(&format!("{group}/hugetlb.2MB.rsvd.current"), "2097152\n");
    let limits = machine.system().facts().cgroup;
    let file = "/sys/fs/cgroup/system.slice/hugetlb.2MB.rsvd.max".into();
    assert_eq!(
        limits,
        [CgroupLimit {
            size: 2 * MIB,
            used: 2 << 20,
            limit: 8 << 20,
            file
        }]
    );

    let machine = Machine::new(TWO_NODES);
    machine.write("proc/self/cgroup", "4:memory:/a\n3:hugetlb,misc:/a\n0::/\n");
    machine.write(
        "sys/fs/cgroup/hugetlb/a/hugetlb.1GB.limit_in_bytes",
        "1073741824\n",
    );
    machine.write("sys/fs/cgroup/hugetlb/a/hugetlb.1GB.usage_in_bytes", "0\n");
    machine.write(
        "sys/fs/cgroup/hugetlb/hugetlb.1GB.limit_in_bytes",
        "9223372036854771712\n",
    );
    let limits = machine.system().facts().cgroup;
    assert_eq!(limits.len(), 1);
    assert_eq!((limits[0].size, limits[0].limit), (GIB, GIB));
}

/// Goal: `show` lists pools per node, and the machine's pools where there are no nodes.
#[test]
fn show_lists_pools_per_node() {
    let machine = Machine::new(TWO_NODES);
    let rows: Vec<_> = machine
        .system()
        .show()
        .iter()
        .map(|p| (p.node, p.size, p.total))
        .collect();
    assert_eq!(rows, [(Some(0), 2 * MIB, 100), (Some(1), 2 * MIB, 200)]);

    fs::remove_dir_all(machine.root().join("sys/devices/system/node/node1")).unwrap();
    assert_eq!(
        machine.system().show()[0].reserved,
        50,
        "one node: the machine's reservations are its own"
    );

    fs::remove_dir_all(machine.root().join("sys/devices")).unwrap();
    let rows: Vec<_> = machine
        .system()
        .show()
        .iter()
        .map(|p| (p.node, p.size, p.total))
        .collect();
    assert_eq!(rows, [(None, 2 * MIB, 300), (None, GIB, 2)]);
}

/// Goal: `reserve` writes the right file and trusts only the value read back.
#[test]
fn reserve_writes_the_pool_of_the_node() {
    let machine = Machine::new(TWO_NODES);
    assert_eq!(
        machine.system().reserve(2 * MIB, 128, Some(1)).unwrap(),
        128
    );
    let written = "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
    assert_eq!(
        fs::read_to_string(machine.root().join(written)).unwrap(),
        "128"
    );
    assert_eq!(machine.system().reserve(GIB, 3, None).unwrap(), 3);

    let error = machine.system().reserve(2 * MIB, 1, Some(9)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no NUMA node 9; this machine has 0, 1"
    );
    match machine.system().reserve(GIB, 6, None).unwrap_err() {
        ReserveError::NotEnoughMemory { asked, available } => {
            assert_eq!(
                (asked, available),
                (3 * GIB, 2 * GIB),
                "3 GiB of the 6 exist already"
            );
        }
        other => panic!("{other}"),
    }
    let error = machine.system().reserve(64 << 10, 1, None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "this kernel has no 64 KiB pages; it has 2 MiB, 1 GiB"
    );
}

/// Goal: a refusal is a named error with numbers and a remedy. Method: a pool whose file the kernel
/// never lets anyone write, not even root.
#[test]
fn reserve_without_permission_has_a_remedy() {
    let machine = Machine::new(TWO_NODES);
    let file = machine
        .root()
        .join("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages");
    fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", &file).unwrap();
    let there: u64 = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
    match machine
        .system()
        .reserve(2 * MIB, there + 1, None)
        .unwrap_err()
    {
        ReserveError::NotPermitted {
            asked,
            there: now,
            remedy,
        } => {
            assert_eq!((asked, now), (there + 1, there));
            assert!(
                remedy
                    .ends_with("| sudo tee /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
            );
        }
        other => panic!("{other}"),
    }
}

/// Goal: a partially filled pool is a named error with a remedy.
#[test]
fn a_pool_filled_in_part_is_an_error() {
    assert_eq!(granted(2 * MIB, 4, 4).unwrap(), 4);
    assert_eq!(
        granted(GIB, 4, 1).unwrap_err().to_string(),
        "4 pages of 1 GiB asked, 1 to be had; remedy: `echo 1 | sudo tee /proc/sys/vm/compact_memory` and again, \
         or boot with `hugepagesz=1G hugepages=4`"
    );
}

/// Goal: the command uses `sysctl` only for the default size without a node.
#[test]
fn commands_are_exact() {
    let facts = Machine::new(TWO_NODES).system().facts();
    assert_eq!(
        facts.reserve_command(2 * MIB, None, 7),
        "sudo sysctl -w vm.nr_hugepages=7"
    );
    assert_eq!(
        facts.reserve_command(GIB, None, 7),
        "echo 7 | sudo tee /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
    );
    assert_eq!(
        facts.reserve_command(2 * MIB, Some(1), 7),
        "echo 7 | sudo tee /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages"
    );
    assert_eq!(
        (boot_size(GIB), boot_size(2 * MIB)),
        ("1G".to_owned(), "2M".to_owned())
    );
}

/// Goal: of all limits on this process's memory the tightest counts, and reclaimable memory does
/// not. Method: both versions of control groups.
#[test]
fn the_tightest_memory_limit_wins() {
    let machine = Machine::new(TWO_NODES);
    assert_eq!(machine.system().facts().cgroup_memory, None);
    let slice = "sys/fs/cgroup/system.slice";
    let write = |path: String, text: &str| machine.write(&path, text);
    write(format!("{slice}/nacre.service/memory.max"), "max\n");
    write(format!("{slice}/memory.max"), "104857600\n");
    write(format!("{slice}/memory.current"), "62914560\n");
    let stat = "anon 1\ninactive_file 10485760\nactive_file 1048576\nfile_dirty 7\n";
    write(format!("{slice}/memory.stat"), stat);
    write("sys/fs/cgroup/memory.max".into(), "1099511627776\n");
    let limit = machine.system().facts().cgroup_memory;
    let file = "/sys/fs/cgroup/system.slice/memory.max".into();
    let used = 49 * MIB;
    assert_eq!(
        limit,
        Some(MemoryLimit {
            used,
            limit: 100 * MIB,
            file
        })
    );

    machine.write("proc/self/cgroup", "4:memory:/a\n0::/\n");
    let group = "sys/fs/cgroup/memory/a";
    write(format!("{group}/memory.limit_in_bytes"), "2097152\n");
    write(format!("{group}/memory.usage_in_bytes"), "1048576\n");
    let stat = "inactive_file 1\ntotal_inactive_file 4096\n";
    write(format!("{group}/memory.stat"), stat);
    let limit = machine.system().facts().cgroup_memory.expect("one");
    assert_eq!((limit.limit, limit.used), (2 * MIB, MIB - 4096));
}

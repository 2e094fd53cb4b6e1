//! Checks of memory: the limit on locked memory, the effect of a fork, huge pages, TLS connections.

use super::{Finding, Scope, System};
use nacre_engine_values::size::bytes;

pub(crate) fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    findings.push(memlock(system, scope));
    findings.push(fork(system));
    hugepages(system, scope, findings);
    if scope.tls_memory > 0 {
        findings.push(tls(system, scope));
    }
}

/// Connections over TLS have buffers on the heap while they move data.
fn tls(system: &System, scope: &Scope) -> Finding {
    const ID: &str = "mem.tls";
    let text = system.text(system.roots.proc.join("meminfo"));
    let line = text.as_deref().unwrap_or_default().lines();
    let available = line
        .filter_map(|line| line.strip_prefix("MemAvailable:"))
        .next();
    let kib = available.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    let Some(available) = kib.map(|kib| kib * 1024) else {
        return Finding::skip(ID, "the available memory cannot be read");
    };
    let evidence = format!(
        "TLS connections may need {} if all move data at the same time; {} available",
        bytes(scope.tls_memory),
        bytes(available)
    );
    if scope.tls_memory <= available {
        return Finding::pass(ID, evidence);
    }
    Finding::warn(
        ID,
        evidence,
        "lower [nvmf] max_connections to the number of queues that hosts will connect",
    )
}

fn memlock(system: &System, scope: &Scope) -> Finding {
    const ID: &str = "mem.memlock";
    let memlock = system.environment.memlock;
    let Some(limit) = memlock.limit else {
        return Finding::pass(ID, "no limit on locked memory");
    };
    let evidence = format!(
        "RLIMIT_MEMLOCK {}, {} registered, {} needed",
        bytes(limit),
        bytes(memlock.pinned),
        bytes(scope.memory)
    );
    if memlock.admits(scope.memory) {
        return Finding::pass(ID, evidence);
    }
    let kib = memlock.pinned.saturating_add(scope.memory).div_ceil(1024);
    let remedy = format!(
        "`ulimit -l {kib}` before starting; /etc/security/limits.conf: `* soft memlock unlimited` and \
         `* hard memlock unlimited`; systemd: `LimitMEMLOCK=infinity`; container: `--ulimit memlock=-1`"
    );
    if scope.rdma || !system.fabric.devices.is_empty() {
        Finding::fail(
            ID,
            format!("{evidence}: ibv_reg_mr failed: Cannot allocate memory"),
            remedy,
        )
    } else {
        Finding::warn(ID, evidence, remedy)
    }
}

/// After a fork, parent and child share pages until one side writes; then one of them gets a copy,
/// and the device may keep the child's page. Therefore DMA memory is excluded from children.
/// Whether other memory registered by a library, such as the rings of its queues, is safe depends
/// on the kernel.
fn fork(system: &System) -> Finding {
    const ID: &str = "mem.fork";
    let release = system.text(system.roots.proc.join("sys/kernel/osrelease"));
    let Some(release) = release.filter(|release| !release.is_empty()) else {
        return Finding::skip(ID, "the kernel's release cannot be read");
    };
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse::<u32>().unwrap_or(0));
    match (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) {
        // Pinned huge pages are copied at fork since 5.12, ordinary pages before that.
        (5, 12..) | (6.., _) => Finding::pass(
            ID,
            format!("DMA memory is left out of forks, and kernel {release} copies pinned pages"),
        ),
        _ => Finding::warn(
            ID,
            format!(
                "DMA memory is left out of forks, but kernel {release} shares a library's pinned pages with a child"
            ),
            "use Linux 5.12 or later, or RDMAV_FORK_SAFE=1 in the daemon's environment",
        ),
    }
}

fn hugepages(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "mem.hugepages";
    if !scope.memory_had.is_empty() {
        let evidence = scope.memory_had.join("; ");
        findings.push(if !scope.memory_is_short {
            Finding::pass(ID, evidence)
        } else {
            Finding::warn(
                ID,
                evidence,
                format!("{}; then restart the daemon", reserve(scope)),
            )
        });
        return;
    }
    if system.hugepages.is_empty() {
        findings.push(Finding::warn(
            ID,
            "this kernel has no huge pages",
            "ordinary pages serve, slower; use a kernel with CONFIG_HUGETLBFS",
        ));
        return;
    }
    let pools: Vec<String> = system
        .hugepages
        .iter()
        .map(|pool| {
            let node = pool
                .node
                .map(|node| format!("node {node}: "))
                .unwrap_or_default();
            let page = bytes(pool.size);
            format!(
                "{node}{} of {} pages of {page} free",
                pool.available(),
                pool.total
            )
        })
        .collect();
    let evidence = format!(
        "{}; {} wanted",
        pools.join(", "),
        bytes(scope.pages() * (2 << 20))
    );
    let free: u64 = system
        .hugepages
        .iter()
        .map(|pool| pool.available().saturating_mul(pool.size))
        .sum();
    findings.push(if free >= scope.pages() * (2 << 20) {
        Finding::pass(ID, evidence)
    } else {
        Finding::warn(
            ID,
            evidence,
            format!(
                "{}; without them ordinary pages serve, slower",
                reserve(scope)
            ),
        )
    });
}

/// The command that reserves the huge pages that a daemon needs.
pub(super) fn reserve(scope: &Scope) -> String {
    let pages = scope.pages();
    format!("`nacre hugepages reserve 2MiB {pages}`, or `sysctl vm.nr_hugepages={pages}`")
}

//! The checks of `nacre doctor` of RDMA port counters, of packet drops, and of io_uring.

use nacre_transport_rdma_link::{CounterGroup, counters};

use super::net::rdma_netdevs;
use super::rdma::in_container;
use super::select::select_all;
use super::{Finding, Scope, System};

pub(crate) fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    port_counters(system, findings);
    drops(system, scope, findings);
    findings.push(io_uring(system));
}

/// File and kernel block device bdevs use io_uring, which most containers forbid.
fn io_uring(system: &System) -> Finding {
    const ID: &str = "disk.io_uring";
    match system.probe.io_uring() {
        Ok(mode) => Finding::pass(ID, format!("io_uring can be used ({mode})")),
        Err(why) => Finding::warn(
            ID,
            format!("devices on files and block devices cannot be made: {why}"),
            if in_container(system) {
                "start the container with `--security-opt seccomp=unconfined`, or with a profile that allows io_uring"
            } else {
                "`sysctl kernel.io_uring_disabled=0`; io_uring needs Linux 5.11 or newer"
            },
        ),
    }
}

/// Drivers provide the counters of errors and retransmissions; without them this machine cannot
/// detect loss.
fn port_counters(system: &System, findings: &mut Vec<Finding>) {
    const ID: &str = "rdma.counters";
    for (device, port) in system.fabric.ports() {
        let all = counters(&system.roots.sys, &device.name, port.num, None);
        let count = |group| all.iter().filter(|counter| counter.group == group).count();
        let (ports, driver) = (count(CounterGroup::Port), count(CounterGroup::Hardware));
        let finding = match ports + driver {
            0 => Finding::skip(
                ID,
                format!(
                    "the driver {} (firmware {}) shows no counters: a newer driver and kernel may",
                    device.driver.as_deref().unwrap_or("unknown"),
                    device.fw.as_deref().unwrap_or("unknown")
                ),
            ),
            _ => Finding::pass(ID, format!("{ports} of the port, {driver} of the driver")),
        };
        findings.push(finding.of(format!("{}/{}", device.name, port.num)));
    }
}

/// The network interfaces used for storage, as far as known.
pub(crate) fn storage_netdevs(system: &System, scope: &Scope) -> Vec<String> {
    let mut names = if scope.listeners.is_empty() {
        rdma_netdevs(&system.fabric)
    } else {
        select_all(system, scope)
            .into_iter()
            .map(|selected| selected.netdev)
            .collect()
    };
    names.sort();
    names.dedup();
    names.retain(|name| name != "lo");
    names
}

/// Checks the dropped packets since the interface came up. Warns above one in ten thousand.
pub(crate) fn drops(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    const ID: &str = "net.drops";
    const ONE_IN: u64 = 10_000;
    const COUNTERS: [&str; 7] = [
        "rx_dropped",
        "tx_dropped",
        "rx_missed_errors",
        "rx_fifo_errors",
        "rx_crc_errors",
        "rx_errors",
        "tx_errors",
    ];
    for netdev in storage_netdevs(system, scope) {
        let folder = system
            .roots
            .sys
            .join("class/net")
            .join(&netdev)
            .join("statistics");
        let value = |name: &str| system.text(folder.join(name))?.parse::<u64>().ok();
        let (Some(rx), Some(tx)) = (value("rx_packets"), value("tx_packets")) else {
            findings.push(Finding::skip(ID, "the interface's counters cannot be read").of(netdev));
            continue;
        };
        let lost: Vec<(&str, u64)> = COUNTERS
            .into_iter()
            .filter_map(|name| Some((name, value(name)?)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let packets = rx.saturating_add(tx);
        let worst = lost.iter().map(|(_, count)| *count).max().unwrap_or(0);
        let lost: Vec<String> = lost
            .iter()
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        let finding = match (lost.is_empty(), worst.saturating_mul(ONE_IN) > packets) {
            (true, _) => Finding::pass(ID, format!("nothing lost of {packets} packets")),
            (false, false) => {
                Finding::pass(ID, format!("{} of {packets} packets", lost.join(", ")))
            }
            (false, true) => Finding::warn(
                ID,
                format!("{} of {packets} packets", lost.join(", ")),
                "look whether they grow (`nacre rdma counters --all --watch 1`, `ip -s link`); check cable and switch port, \
                 raise the rings (`ethtool -G`), and use flow control or less load",
            ),
        };
        findings.push(finding.of(netdev));
    }
}

//! Tests of each check on simulated machines: the status and text of its finding.

use std::collections::HashMap;
use std::net::IpAddr;

use nacre_hugepages::NodePages;
use nacre_transport_rdma_link::testing::{self, Tree};
use nacre_transport_rdma_link::{Access, Memlock};

use super::testing::{ScriptedProbe, system};
use super::*;

mod live;
mod loss;
mod network;
mod nvme;
mod peer;
mod roce;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn rdma_scope(listeners: &[&str]) -> Scope {
    Scope {
        rdma: true,
        listeners: listeners.iter().map(|l| (*l).to_owned()).collect(),
        memory: 64 << 20,
        ..Scope::default()
    }
}

/// The one finding of this id.
fn the<'a>(report: &'a Report, id: &str) -> &'a Finding {
    let found: Vec<&Finding> = report.findings.iter().filter(|f| f.id == id).collect();
    match found[..] {
        [finding] => finding,
        _ => panic!("{id}: {found:#?} in {report:#?}"),
    }
}

fn expect(report: &Report, id: &str, status: Status, evidence: &str) {
    is_judged(the(report, id), status, evidence);
}

fn is_judged(finding: &Finding, status: Status, evidence: &str) {
    assert_eq!(finding.status, status, "{finding:?}");
    assert!(finding.evidence.contains(evidence), "{finding:?}");
    // Every problem has a remedy.
    assert_eq!(
        finding.remedy.is_some(),
        status >= Status::Warn,
        "{finding:?}"
    );
}

#[test]
fn a_machine_with_soft_roce() {
    let tree = testing::rxe_on_eth();
    tree.modules(&["ib_core", "ib_uverbs", "rdma_ucm", "rdma_rxe"], &[]);
    tree.file(
        "proc/net/route",
        "Iface Destination Gateway Flags\neth0 00000000 0100000A 3 0 0 0 00000000",
    );
    let system = system(&tree, &[("eth0", "10.0.0.4")], ScriptedProbe::default());
    let report = examine(&system, &rdma_scope(&["name:eth0"]));
    expect(&report, "rdma.modules", Status::Pass, "ib_uverbs loaded");
    expect(&report, "rdma.devices", Status::Pass, "rxe0 (rxe)");
    expect(&report, "rdma.driver", Status::Pass, "soft-RoCE");
    expect(
        &report,
        "rdma.software",
        Status::Warn,
        "rxe: functional, not fast",
    );
    expect(&report, "rdma.fw", Status::Skip, "no firmware");
    expect(&report, "rdma.gid.type", Status::Pass, "RoCE v2");
    expect(
        &report,
        "rdma.capable",
        Status::Pass,
        "rxe0/1 with GID 1 (RoCE v2)",
    );
    expect(
        &report,
        "rdma.gid.ip",
        Status::Pass,
        "GID 1, the first of RoCE v2 with this address",
    );
    assert!(
        the(&report, "rdma.gid.ip")
            .evidence
            .contains("rxe0/1 2 RoCE v2 eth0 fd00::4")
    );
    expect(&report, "net.iface.exists", Status::Pass, "eth0 10.0.0.4");
    expect(
        &report,
        "net.mtu",
        Status::Warn,
        "interface 1500, RDMA 1024",
    );
    expect(&report, "net.shared", Status::Warn, "default route");
    expect(&report, "container", Status::Skip, "not a container");
    assert_eq!(report.failed, 0, "{report:#?}");
}

#[test]
fn missing_rdma_fails_only_when_required() {
    let tree = testing::empty();
    tree.file("sys/class/net/eth0/mtu", "1500");
    tree.modules(
        &[],
        &[
            "kernel/drivers/infiniband/core/ib_core.ko",
            "kernel/drivers/infiniband/core/ib_uverbs.ko",
            "kernel/drivers/infiniband/core/rdma_ucm.ko",
            "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko",
        ],
    );
    let system = system(&tree, &[("eth0", "10.0.0.4")], ScriptedProbe::default());
    let report = examine(&system, &Scope::default());
    expect(&report, "rdma.modules", Status::Skip, "not asked for");
    expect(&report, "rdma.devices", Status::Skip, "TCP needs none");
    assert_eq!(report.failed, 0);

    let report = examine(&system, &rdma_scope(&[]));
    expect(
        &report,
        "rdma.modules",
        Status::Fail,
        "ib_uverbs not loaded",
    );
    assert_eq!(
        the(&report, "rdma.modules").remedy.as_deref(),
        Some("`modprobe -a ib_core ib_uverbs rdma_ucm`")
    );
    expect(
        &report,
        "rdma.devices",
        Status::Fail,
        "No RDMA devices found: no PCI device",
    );
    let remedy = the(&report, "rdma.devices").remedy.as_deref().unwrap();
    assert!(
        remedy.contains("rdma link add rxe0 type rxe netdev eth0"),
        "{remedy}"
    );
}

#[test]
fn missing_devices_have_a_reason() {
    // A card whose RDMA module is not loaded.
    let tree = testing::empty();
    tree.modules(&["ib_core", "ib_uverbs", "rdma_ucm"], &[]);
    tree.link(
        "sys/bus/pci/devices/0000:3b:00.0/driver",
        "../../drivers/mlx5_core",
    );
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(
        &report,
        "rdma.devices",
        Status::Fail,
        "0000:3b:00.0 needs the module mlx5_ib",
    );
    let remedy = |report: &Report| the(report, "rdma.devices").remedy.clone().unwrap();
    assert!(remedy(&report).starts_with("`modprobe mlx5_ib`"));
    // Loaded, but still no device.
    tree.modules(&["ib_core", "ib_uverbs", "rdma_ucm", "mlx5_ib"], &[]);
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(&report, "rdma.devices", Status::Fail, "mlx5_ib are there");
    // In a container without the device nodes.
    tree.file(".dockerenv", "");
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(&report, "rdma.devices", Status::Fail, "mlx5_ib are there");
    assert!(remedy(&report).contains("--network host --device"));
    // A kernel without RDMA.
    let tree = testing::empty();
    tree.modules(&[], &["kernel/fs/ext4/ext4.ko"]);
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(&report, "rdma.modules", Status::Fail, "ib_core missing");
    // The same cause in a container: device nodes would not help.
    tree.file(".dockerenv", "");
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(
        &report,
        "rdma.devices",
        Status::Fail,
        "this kernel has no RDMA",
    );
    assert!(!remedy(&report).contains("--device"));
    assert!(
        the(&report, "rdma.modules")
            .remedy
            .as_deref()
            .unwrap()
            .contains("linux-modules-extra")
    );
}

#[test]
fn unsuitable_links_are_reported() {
    let tree = testing::mlx5_dual_port();
    let probe = ScriptedProbe::default();
    let addresses = [("ens1f0", "10.0.1.4"), ("ens1f1", "10.0.2.4")];
    let machine = system(&tree, &addresses, probe);
    let report = examine(&machine, &rdma_scope(&["name:ens1f1"]));
    expect(
        &report,
        "rdma.capable",
        Status::Fail,
        "port_down: port 2 of RDMA device mlx5_0",
    );
    expect(&report, "rdma.gid.ip", Status::Skip, "port_down");
    expect(&report, "rdma.fw", Status::Pass, "firmware 16.35.2000");
    expect(&report, "rdma.driver", Status::Pass, "ConnectX");

    let report = examine(&machine, &rdma_scope(&["ip:10.0.1.4", "name:eth9"]));
    let exists: Vec<Status> = report
        .findings
        .iter()
        .filter(|f| f.id == "net.iface.exists")
        .map(|f| f.status)
        .collect();
    assert_eq!(exists, [Status::Pass, Status::Fail]);
    assert!(report.findings.iter().any(|f| f.evidence
        == "no interface matches \"name:eth9\"; have: ens1f0 10.0.1.4, ens1f1 10.0.2.4"));

    // A port whose connection manager uses the other RoCE version.
    let mode = "sys/kernel/config/rdma_cm/mlx5_0/ports/2/default_roce_mode";
    tree.file(mode, "IB/RoCE v1");
    let machine = system(&tree, &[("ens1f0", "10.0.1.4")], ScriptedProbe::default());
    let report = examine(&machine, &rdma_scope(&[]));
    let types = report.findings.iter().filter(|f| f.id == "rdma.gid.type");
    let types: Vec<_> = types.map(|f| (f.status, f.remedy.as_deref())).collect();
    let remedy = "`cma_roce_mode -d mlx5_0 -p 2 -m 2`";
    assert_eq!(types, [(Status::Pass, None), (Status::Warn, Some(remedy))]);
    tree.remove(mode);

    // An address missing from the table, and one that only v1 has.
    let machine = system(&tree, &[("ens1f0", "10.0.9.9")], ScriptedProbe::default());
    let report = examine(&machine, &rdma_scope(&["10.0.9.9"]));
    expect(
        &report,
        "rdma.gid.ip",
        Status::Fail,
        "has no GID of 10.0.9.9; have: mlx5_0/1 0 RoCE v1",
    );
    for port in [1, 2] {
        tree.remove(&format!("sys/class/infiniband/mlx5_0/ports/{port}/gids/1"));
    }
    let machine = system(&tree, &[("ens1f0", "10.0.1.4")], ScriptedProbe::default());
    let report = examine(&machine, &rdma_scope(&["rdma:mlx5_0"]));
    expect(&report, "rdma.capable", Status::Fail, "unsupported_link");
    let types = report.findings.iter().filter(|f| f.id == "rdma.gid.type");
    assert!(types.clone().count() == 2 && types.clone().all(|f| f.status == Status::Fail));
}

#[test]
fn infiniband_needs_its_subnet_manager() {
    let tree = testing::infiniband();
    let report = examine(
        &system(&tree, &[("ib0", "10.9.0.1")], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(
        &report,
        "ib.sm",
        Status::Pass,
        "subnet manager at LID 1, IPoIB interface ib0",
    );
    expect(&report, "rdma.capable", Status::Pass, "(IB)");
    expect(&report, "net.mtu", Status::Pass, "interface 2044");
    tree.file("sys/class/infiniband/mlx5_2/ports/1/sm_lid", "0x0");
    let report = examine(
        &system(&tree, &[], ScriptedProbe::default()),
        &rdma_scope(&[]),
    );
    expect(&report, "ib.sm", Status::Fail, "LID 0");
}

#[test]
fn drivers() {
    let tree = testing::mlx5_dual_port();
    for (driver, status, evidence) in [
        ("efa", Status::Fail, "reliable-connected"),
        ("hfi1", Status::Warn, "Omni-Path"),
        ("ice", Status::Pass, "Intel E810"),
        ("bnxt_en", Status::Pass, "Broadcom"),
        ("strange", Status::Warn, "not one that is known"),
    ] {
        tree.remove("sys/devices/pci0/0000:3b:00.0/driver");
        tree.link(
            "sys/devices/pci0/0000:3b:00.0/driver",
            &format!("../../drivers/{driver}"),
        );
        let report = examine(
            &system(&tree, &[], ScriptedProbe::default()),
            &Scope::default(),
        );
        expect(&report, "rdma.driver", status, evidence);
    }
    let report = examine(
        &system(&testing::siw(), &[], ScriptedProbe::default()),
        &Scope::default(),
    );
    expect(&report, "rdma.driver", Status::Pass, "PFC not required");
    expect(
        &report,
        "net.firewall",
        Status::Skip,
        "TCP 4420 (NVMe/RDMA over iWARP)",
    );
}

/// Goal: concerns about an address cover only the device behind it, and only problems.
#[test]
fn concerns_at_an_address() {
    let ids = |tree: &Tree, addresses: &[(&str, &str)], at: &str| {
        let machine = system(tree, addresses, ScriptedProbe::default());
        let all = concerns(&machine, &[ip(at)], Marking::default());
        let ids = all.into_iter().map(|finding| finding.id);
        ids.collect::<Vec<_>>()
    };
    let tree = testing::rxe_on_eth();
    let addresses = [("eth0", "10.0.0.4"), ("eth1", "10.0.1.4")];
    tree.file(
        "proc/net/route",
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
         eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0",
    );
    let found = ids(&tree, &addresses, "10.0.0.4");
    assert!(
        found.contains(&"rdma.software") && found.contains(&"net.shared"),
        "{found:?}"
    );
    assert_eq!(ids(&tree, &addresses, "10.0.1.4"), [] as [&str; 0]);
    let tree = testing::mlx5_dual_port();
    let addresses = [("ens1f0", "10.0.1.4")];
    assert_eq!(ids(&tree, &addresses, "10.0.1.4"), [] as [&str; 0]);
    tree.file("sys/class/infiniband/mlx5_0/fw_ver", "16.34.1002");
    assert_eq!(ids(&tree, &addresses, "10.0.1.4"), ["rdma.fw"]);
}

/// Goal: firmware with a known defect is reported with the defect, its source, and the fixed
/// version.
#[test]
fn defective_firmware_is_reported() {
    let tree = testing::mlx5_dual_port();
    let fw = |version| {
        tree.file("sys/class/infiniband/mlx5_0/fw_ver", version);
        examine(
            &system(&tree, &[], ScriptedProbe::default()),
            &Scope::default(),
        )
    };
    let report = fw("32.39.2048");
    expect(
        &report,
        "rdma.fw",
        Status::Warn,
        "congestion control may malfunction",
    );
    let found = the(&report, "rdma.fw");
    assert!(
        found.evidence.contains("(https://docs.nvidia.com/"),
        "{found:?}"
    );
    let remedy = found.remedy.as_deref();
    assert_eq!(remedy, Some("update it to 32.41.1000 or later"));
    expect(
        &fw("32.41.1000"),
        "rdma.fw",
        Status::Pass,
        "none of the versions",
    );
    expect(
        &fw("99.1.1"),
        "rdma.fw",
        Status::Skip,
        "compare it with the vendor's",
    );
}

#[test]
fn memory_of_tls() {
    let tree = testing::rxe_on_eth();
    let machine = system(&tree, &[], ScriptedProbe::default());
    let mut scope = rdma_scope(&[]);
    let report = examine(&machine, &scope);
    assert!(
        report
            .findings
            .iter()
            .all(|finding| finding.id != "mem.tls")
    );
    scope.tls_memory = 3 << 30;
    let report = examine(&machine, &scope);
    expect(&report, "mem.tls", Status::Skip, "cannot be read");
    let meminfo = machine.roots.proc.join("meminfo");
    for (kib, status) in [(4 << 20, Status::Pass), (2 << 20, Status::Warn)] {
        std::fs::create_dir_all(meminfo.parent().unwrap()).unwrap();
        std::fs::write(
            &meminfo,
            format!("MemTotal: 1 kB\nMemAvailable: {kib} kB\n"),
        )
        .unwrap();
        let report = examine(&machine, &scope);
        expect(&report, "mem.tls", status, "3.0 GiB");
    }
}

#[test]
fn locked_memory_and_huge_pages() {
    let tree = testing::rxe_on_eth();
    let mut machine = system(&tree, &[], ScriptedProbe::default());
    let report = examine(&machine, &rdma_scope(&[]));
    expect(&report, "mem.memlock", Status::Pass, "no limit");
    expect(&report, "mem.hugepages", Status::Warn, "no huge pages");
    expect(&report, "mem.fork", Status::Skip, "cannot be read");

    machine.environment.memlock = Memlock {
        limit: Some(8 << 20),
        pinned: 0,
    };
    let pool = NodePages {
        node: Some(0),
        size: 2 << 20,
        total: 64,
        free: 31,
        reserved: 0,
        surplus: 0,
        overcommit: 0,
    };
    machine.hugepages = vec![pool];
    let report = examine(&machine, &rdma_scope(&[]));
    expect(
        &report,
        "mem.memlock",
        Status::Fail,
        "ibv_reg_mr failed: Cannot allocate memory",
    );
    assert!(
        the(&report, "mem.memlock")
            .remedy
            .as_deref()
            .unwrap()
            .starts_with("`ulimit -l 65536`")
    );
    expect(
        &report,
        "mem.hugepages",
        Status::Warn,
        "node 0: 31 of 64 pages of 2.0 MiB free",
    );
    machine.hugepages[0].free = 32;
    let report = examine(&machine, &rdma_scope(&[]));
    expect(&report, "mem.hugepages", Status::Pass, "32 of 64");

    for (release, status) in [
        ("5.10.0-8", Status::Warn),
        ("5.12.1", Status::Pass),
        ("6.1.0", Status::Pass),
    ] {
        tree.file("proc/sys/kernel/osrelease", release);
        expect(
            &examine(&machine, &rdma_scope(&[])),
            "mem.fork",
            status,
            release,
        );
    }
}

/// Goal: multi-line messages of other programs do not break the table.
#[test]
fn evidence_is_one_line() {
    let finding = Finding::skip("x", "cannot be read (first\n  second\n)");
    assert_eq!(finding.evidence, "cannot be read (first; second; )");
}

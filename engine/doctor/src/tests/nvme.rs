//! Tests of the checks of NVMe drives, on simulated machines.

use nacre_bdev_nvme_vfio::pci::Options;
use nacre_bdev_nvme_vfio::pci::testing::Machine;
use nacre_transport_rdma_link::Memlock;

use super::*;

fn examined(machine: &Machine, memlock: Memlock) -> Report {
    let tree = testing::rxe_on_eth();
    let mut system = system(&tree, &[], ScriptedProbe::default());
    system.pci = machine.system();
    system.environment.memlock = memlock;
    let mut findings = Vec::new();
    let scope = Scope {
        memory: 64 << 20,
        ..Scope::default()
    };
    crate::nvme::checks(&system, &scope, &mut findings);
    Report::of(findings)
}

fn tight() -> Memlock {
    Memlock {
        limit: Some(8 << 20),
        ..Memlock::default()
    }
}

fn of_drive<'a>(report: &'a Report, address: &str) -> &'a Finding {
    let subject = Some(address.to_owned());
    report
        .findings
        .iter()
        .find(|f| f.subject == subject)
        .unwrap()
}

/// Goal: the narrowest IOMMU counts, one that does not report its width is ignored, and memory
/// beyond that width is reported.
#[test]
fn the_narrowest_iommu_counts() {
    let machine = Machine::usual();
    let cap = |name: &str, text: &str| {
        machine.file(&format!("sys/class/iommu/{name}/intel-iommu/cap"), text);
    };
    cap("dmar0", "d2008c40660462\n");
    cap("dmar1", "unknown\n");
    machine.file("sys/class/iommu/ivhd0/amd-iommu/cap", "40\n");
    let report = examined(&machine, Memlock::default());
    expect(
        &report,
        "nvme.iommu",
        Status::Pass,
        "is on, with 39 bits of address",
    );
    // 16 bits are too few for the drives' memory.
    cap("dmar1", "d2008c400f0462\n");
    let report = examined(&machine, Memlock::default());
    expect(
        &report,
        "nvme.iommu",
        Status::Fail,
        "with 16 bits of address, which are 64.0 KiB",
    );
}

#[test]
fn drives_are_listed_with_their_driver() {
    let machine = Machine::usual();
    let report = examined(&machine, Memlock::default());
    expect(&report, "nvme.iommu", Status::Pass, "is on");
    expect(&report, "nvme.vfio", Status::Pass, "is there");
    expect(&report, "nvme.memlock", Status::Pass, "no limit");
    let first = of_drive(&report, "0000:01:00.0");
    assert_eq!(first.status, Status::Pass);
    assert!(first.evidence.contains("serial S1"), "{first:?}");
    assert!(first.evidence.contains("not in use"), "{first:?}");

    let address = "0000:01:00.0".parse().unwrap();
    machine.system().bind(address, &Options::default()).unwrap();
    machine.file("proc/swaps", "Filename\n/dev/nvme1n1 partition\n");
    let report = examined(&machine, tight());
    expect(&report, "nvme.memlock", Status::Fail, "8.0 MiB");
    let first = of_drive(&report, "0000:01:00.0");
    assert!(
        first.evidence.contains("vfio-pci, IOMMU group 14"),
        "{first:?}"
    );
    let second = of_drive(&report, "0000:02:00.0");
    assert!(
        second.evidence.contains("nvme1n1 is swap space"),
        "{second:?}"
    );

    machine.function("0000:01:00.1", "0x020000", Some("e1000e"), 14);
    let report = examined(&machine, tight());
    let first = of_drive(&report, "0000:01:00.0");
    assert_eq!(first.status, Status::Fail);
    assert!(first.evidence.contains("e1000e") && first.remedy.is_some());
}

#[test]
fn missing_parts_are_reported_if_there_are_drives() {
    let machine = Machine::usual();
    std::fs::remove_dir_all(machine.path("sys/kernel/iommu_groups")).unwrap();
    machine.without_driver("vfio-pci");
    machine.function("0000:05:00.0", "0x010802", None, 30);
    std::fs::remove_dir_all(machine.path("sys/kernel/iommu_groups")).unwrap();
    let report = examined(&machine, tight());
    expect(&report, "nvme.iommu", Status::Warn, "is off");
    expect(&report, "nvme.vfio", Status::Warn, "is not there");
    expect(&report, "nvme.memlock", Status::Warn, "8.0 MiB");
    let idle = of_drive(&report, "0000:05:00.0");
    assert_eq!(idle.status, Status::Warn);

    let tree = testing::rxe_on_eth();
    let none = system(&tree, &[], ScriptedProbe::default());
    let mut findings = Vec::new();
    crate::nvme::checks(&none, &Scope::default(), &mut findings);
    let report = Report::of(findings);
    expect(&report, "nvme.drives", Status::Skip, "no NVMe drive");
    assert_eq!(report.findings.len(), 1);
}

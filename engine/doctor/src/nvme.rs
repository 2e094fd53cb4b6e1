//! The checks of `nacre doctor` of NVMe drives: the drives of this machine, and the requirements of
//! the user-space driver (IOMMU, vfio-pci, locked memory).

use nacre_bdev_nvme_vfio::pci::{Drive, Driver, Iommu};

use super::{Finding, Scope, System};
use nacre_engine_values::size::bytes;

pub(crate) fn checks(system: &System, scope: &Scope, findings: &mut Vec<Finding>) {
    let drives = system.pci.drives();
    if drives.is_empty() {
        findings.push(Finding::skip("nvme.drives", "no NVMe drive on a PCI bus"));
        return;
    }
    findings.push(iommu(system, scope));
    findings.push(vfio(system));
    findings.push(memlock(system, scope, &drives));
    findings.extend(drives.iter().map(|drive| {
        let finding = check_drive(system, drive);
        finding.of(drive.address.to_string())
    }));
}

fn iommu(system: &System, scope: &Scope) -> Finding {
    const ID: &str = "nvme.iommu";
    if !system.pci.has_iommu() {
        return Finding::warn(
            ID,
            "the IOMMU is off: drives can be driven by the kernel only",
            "switch it on in the firmware (VT-d, AMD-Vi) and start Linux with `intel_iommu=on` (Intel) or `iommu=pt` (AMD)",
        );
    }
    let Some(bits) = system.pci.address_bits() else {
        return Finding::pass(ID, "the IOMMU is on");
    };
    let reach = 1u64.checked_shl(bits).unwrap_or(u64::MAX);
    let evidence = format!("the IOMMU is on, with {bits} bits of address");
    if scope.memory < reach {
        Finding::pass(ID, evidence)
    } else {
        Finding::fail(
            ID,
            format!(
                "{evidence}, which are {}: {} are for drives to reach",
                bytes(reach),
                bytes(scope.memory)
            ),
            "give Nacre less memory",
        )
    }
}

fn vfio(system: &System) -> Finding {
    const ID: &str = "nvme.vfio";
    if system.pci.has_vfio_pci() {
        Finding::pass(ID, "the module vfio-pci is there")
    } else {
        Finding::warn(
            ID,
            "the module vfio-pci is not there: drives can be driven by the kernel only",
            "install this kernel's modules (`modprobe vfio-pci` has to succeed), or look from outside the container",
        )
    }
}

/// VFIO pins all memory that a drive may access, including huge pages, and counts it as locked.
fn memlock(system: &System, scope: &Scope, drives: &[Drive]) -> Finding {
    const ID: &str = "nvme.memlock";
    let memlock = system.environment.memlock;
    let Some(limit) = memlock.limit else {
        return Finding::pass(ID, "no limit on memory that drives may reach");
    };
    let evidence = format!(
        "RLIMIT_MEMLOCK {}, {} for drives to reach",
        bytes(limit),
        bytes(scope.memory)
    );
    if memlock.admits(scope.memory) {
        return Finding::pass(ID, evidence);
    }
    let kib = memlock.pinned.saturating_add(scope.memory).div_ceil(1024);
    let remedy = format!(
        "`ulimit -l {kib}` before starting; systemd: `LimitMEMLOCK=infinity`; container: `--ulimit memlock=-1`; or \
         CAP_IPC_LOCK"
    );
    if drives.iter().any(|drive| drive.driver == Driver::VfioPci) {
        Finding::fail(ID, evidence, remedy)
    } else {
        Finding::warn(ID, evidence, remedy)
    }
}

fn check_drive(system: &System, drive: &Drive) -> Finding {
    const ID: &str = "nvme.drives";
    let address = drive.address;
    let in_the_way: Vec<String> = drive
        .group_members
        .iter()
        .filter(|member| member.is_in_the_way())
        .map(ToString::to_string)
        .collect();
    match &drive.driver {
        Driver::VfioPci if !in_the_way.is_empty() => Finding::fail(
            ID,
            format!(
                "driver vfio-pci, but its IOMMU group has others with kernel drivers: {}",
                in_the_way.join(", ")
            ),
            "unbind these from their drivers, or move the drive to another slot",
        ),
        Driver::VfioPci => match drive.iommu {
            Iommu::Group(group) => {
                Finding::pass(ID, format!("driver vfio-pci, IOMMU group {group}"))
            }
            Iommu::None | Iommu::NoIommu(_) => Finding::warn(
                ID,
                "driver vfio-pci without an IOMMU: the drive can reach all memory of the machine",
                "switch the IOMMU on",
            ),
        },
        Driver::Nvme => {
            let serial = drive.serial().unwrap_or("not known yet");
            let uses = system.pci.uses(drive);
            let used = match uses.first() {
                None => format!("not in use; `nacre nvme bind {address}` takes it"),
                Some(first) => first.to_string(),
            };
            Finding::pass(
                ID,
                format!("driven by the kernel (serial {serial}), {used}"),
            )
        }
        Driver::None => Finding::warn(
            ID,
            "no driver has it",
            format!(
                "`nacre nvme bind {address}` for this engine, `nacre nvme unbind {address}` for the kernel"
            ),
        ),
        Driver::Other(name) => Finding::skip(ID, format!("its driver is {name}")),
    }
}

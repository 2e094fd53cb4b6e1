//! Binding drives to vfio-pci and returning them, on simulated machines.

use std::io;
use std::time::Duration;

use super::testing::Machine;

use super::*;

fn at(text: &str) -> Address {
    text.parse().unwrap()
}

const FIRST: &str = "0000:01:00.0";
const SECOND: &str = "0000:02:00.0";

fn bind(machine: &Machine, address: &str) -> Result<Bound, PciError> {
    machine.system().bind(at(address), &Options::default())
}

fn force(machine: &Machine, address: &str, serial: &str) -> Result<Bound, PciError> {
    let options = Options {
        force: Some(serial.into()),
        ..Options::default()
    };
    machine.system().bind(at(address), &options)
}

/// The refusal of a drive in use, whose text must contain `text`. Returns its users.
fn in_use(machine: &Machine, address: &str, text: &str) -> Vec<Use> {
    let error = bind(machine, address).unwrap_err();
    assert!(error.to_string().contains(text), "{text}: {error}");
    let PciError::InUse { uses, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(machine.writes_to(""), [""; 0], "no file was written");
    uses
}

#[test]
fn drives_are_listed_with_the_facts_of_the_kernel() {
    let machine = Machine::usual();
    let drives = machine.system().drives();
    let addresses: Vec<String> = drives.iter().map(|d| d.address.to_string()).collect();
    assert_eq!(addresses, [FIRST, SECOND]);
    let first = &drives[0];
    assert_eq!(
        (first.driver.clone(), first.iommu),
        (Driver::Nvme, Iommu::Group(14))
    );
    assert_eq!((first.numa_node, first.serial()), (Some(0), Some("S1")));
    let namespace = |disk: &Disk| (disk.nsid, disk.name.clone());
    assert_eq!(
        first.disks.iter().map(namespace).collect::<Vec<_>>(),
        [
            (Some(1), "nvme0n2".to_owned()),
            (Some(2), "nvme0n1".to_owned())
        ],
        "by namespace, not in the order in which the kernel found them"
    );
    assert_eq!(
        (first.disks[0].bytes, first.disks[0].block_size),
        (1 << 20, 512)
    );
    assert_eq!(machine.system().uses(first), []);
    let json = serde_json::to_value(first).unwrap();
    assert_eq!(json["driver"], "nvme");
    assert_eq!(json["iommu"]["group"], 14);
    assert_eq!(json["address"], FIRST);
}

#[test]
fn drives_are_found_by_serial() {
    let machine = Machine::usual();
    assert_eq!(
        machine.system().by_serial("S2").unwrap().address,
        at(SECOND)
    );
    bind(&machine, FIRST).unwrap();
    let error = machine.system().by_serial("S1").unwrap_err().to_string();
    assert!(error.contains("those known are: S2"), "{error}");
    assert!(error.contains(FIRST), "{error}");
    let error = bind(&machine, "0000:09:00.0").unwrap_err();
    assert!(
        matches!(&error, PciError::NotThere { have, .. } if have.len() == 2),
        "{error}"
    );
    let error = bind(&machine, "0000:00:02.0").unwrap_err();
    assert!(
        matches!(&error, PciError::NotNvme { class, .. } if class == "0x030000"),
        "{error}"
    );
}

/// Goal: a drive is bound to vfio-pci and returned, and no change remains.
#[test]
fn a_drive_is_bound_and_returned() {
    let machine = Machine::usual();
    let bound = bind(&machine, FIRST).unwrap();
    assert_eq!(
        (bound.node.as_str(), bound.already),
        ("/dev/vfio/14", false)
    );
    assert_eq!(bound.warning, None);
    let drive = machine.system().drive(at(FIRST)).unwrap();
    assert_eq!((drive.driver, drive.controller), (Driver::VfioPci, None));
    assert!(bind(&machine, FIRST).unwrap().already);
    let unbound = machine.system().unbind(at(FIRST)).unwrap();
    assert_eq!(
        (unbound.controller.as_deref(), unbound.already),
        (Some("nvme0"), false)
    );
    let unbound = machine.system().unbind(at(FIRST)).unwrap();
    assert_eq!(
        (unbound.controller.as_deref(), unbound.already),
        (Some("nvme0"), true)
    );
    assert_eq!(machine.writes_to("driver_override"), ["vfio-pci", "\n"]);
}

#[test]
fn mounted_drives_are_refused() {
    let machine = Machine::usual();
    // In another mount namespace, like a container's, below a folder with a space in its name.
    let mounts = "30 1 259:9 / /mnt/my\\040data rw - xfs /dev/whatever rw";
    machine.process(77, "sh", "4026532000", mounts);
    let uses = in_use(
        &machine,
        SECOND,
        "nvme1n1p1 is mounted at /mnt/my data (xfs)",
    );
    assert_eq!(uses.len(), 1);
    // A file system with its own device number.
    let mounts = "30 1 0:45 / /pool rw shared:1 - btrfs /dev/nvme0n2 rw";
    machine.process(78, "sh", "4026532001", mounts);
    in_use(&machine, FIRST, "nvme0n2 is mounted at /pool (btrfs)");
    // The mount is listed once, however many processes have it.
    machine.process(79, "sh", "4026532001", mounts);
    assert_eq!(in_use(&machine, FIRST, "--force S1").len(), 1);
}

#[test]
fn swap_raid_lvm_and_others_are_refused() {
    let machine = Machine::usual();
    machine.file(
        "proc/swaps",
        "Filename Type\n/dev/nvme0n1 partition 1 0 -2\n",
    );
    assert_eq!(in_use(&machine, FIRST, "nvme0n1 is swap space").len(), 1);

    let machine = Machine::usual();
    let holder = "sys/class/block/nvme0n1/holders";
    machine.file(&format!("{holder}/md127/md/level"), "raid1\n");
    in_use(&machine, FIRST, "nvme0n1 is part of md127 (md RAID)");
    machine.file(&format!("{holder}/dm-0/dm/uuid"), "LVM-abc\n");
    machine.file(&format!("{holder}/dm-0/dm/name"), "vg-data\n");
    in_use(&machine, FIRST, "nvme0n1 is part of vg-data (LVM)");
    machine.file(&format!("{holder}/dm-1/dm/uuid"), "CRYPT-LUKS2-abc\n");
    in_use(&machine, FIRST, "dm-1 (encryption)");
    machine.file(&format!("{holder}/bcache0/x"), "");
    assert_eq!(
        in_use(&machine, FIRST, "bcache0 (another block device)").len(),
        4
    );
}

/// Goal: a disk that belongs to an inactive array is in use too. Method: the mark of each tool, on
/// a disk of zeroes.
#[test]
fn marks_of_inactive_volumes_are_refused() {
    const MD: [u8; 4] = [0xfc, 0x4e, 0x2b, 0xa9];
    let end = 1 << 20;
    for (offset, mark, kind) in [
        (4096, &MD[..], "md RAID"),
        (0, &MD, "md RAID"),
        (end - 8192, &MD, "md RAID"),
        (end - 65_536, &MD, "md RAID"),
        (512, b"LABELONE", "LVM volume group"),
        (4086, b"SWAPSPACE2", "swap space"),
    ] {
        let machine = Machine::usual();
        let mut disk = vec![0; end];
        disk[offset..][..mark.len()].copy_from_slice(mark);
        machine.file("dev/nvme0n2", disk);
        let text = format!("nvme0n2 is marked as part of an inactive {kind}");
        assert_eq!(in_use(&machine, FIRST, &text).len(), 1);
    }
}

#[test]
fn open_drives_are_refused() {
    let machine = Machine::usual();
    machine.process(50, "fio", "4026531840", "");
    machine.link("proc/50/fd/3", "/dev/nvme1n1");
    machine.link("proc/50/fd/4", "/dev/nvme1n1");
    let uses = in_use(&machine, SECOND, "nvme1n1 is open in fio (process 50)");
    assert_eq!(uses.len(), 1);
    // A user inside the kernel has no visible open file.
    let busy = machine.path("dev/nvme0n1");
    machine.kernel.busy.lock().push(busy);
    in_use(&machine, FIRST, "nvme0n1 is in exclusive use");
}

/// udev reads a disk after each writer closes it, so binding waits for udev and is not refused.
#[test]
fn binding_waits_for_udev_only() {
    let machine = Machine::usual();
    machine.process(50, "(udev-worker)", "4026531840", "");
    machine.link("proc/50/fd/3", "/dev/nvme1n1");
    machine.kernel.ends.lock().push(50);
    assert!(!bind(&machine, SECOND).unwrap().already);

    let machine = Machine::usual();
    machine.process(50, "(udev-worker)", "4026531840", "");
    machine.link("proc/50/fd/3", "/dev/nvme1n1");
    machine.process(51, "fio", "4026531840", "");
    machine.link("proc/51/fd/3", "/dev/nvme1n1");
    let uses = in_use(&machine, SECOND, "nvme1n1 is open in fio (process 51)");
    assert_eq!(uses.len(), 2);
    assert_eq!(*machine.kernel.paused.lock(), Duration::ZERO);

    // A udev worker that does not finish is named.
    let machine = Machine::usual();
    machine.process(50, "(udev-worker)", "4026531840", "");
    machine.link("proc/50/fd/3", "/dev/nvme1n1");
    in_use(
        &machine,
        SECOND,
        "nvme1n1 is open in (udev-worker) (process 50)",
    );
}

/// Goal: `force` requires the drive's serial number.
#[test]
fn force_takes_the_right_serial() {
    let machine = Machine::usual();
    machine.process(50, "fio", "4026531840", "");
    machine.link("proc/50/fd/3", "/dev/nvme1n1");
    let error = force(&machine, SECOND, "S1").unwrap_err();
    assert!(matches!(error, PciError::OtherSerial { .. }), "{error}");
    assert_eq!(machine.writes_to(""), [""; 0]);
    assert!(!force(&machine, SECOND, "S2").unwrap().already);
}

#[test]
fn groups_with_others_are_refused_by_name() {
    let machine = Machine::usual();
    machine.function("0000:01:00.1", "0x020000", Some("e1000e"), 14);
    machine.function("0000:00:1c.0", "0x060400", Some("pcieport"), 14);
    machine.function("0000:01:00.2", "0x020000", None, 14);
    let error = bind(&machine, FIRST).unwrap_err();
    let PciError::SharedGroup {
        members, group: 14, ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!(members.len(), 1, "{error}");
    assert!(
        error.to_string().contains("0000:01:00.1 (driver e1000e)"),
        "{error}"
    );
    assert_eq!(machine.writes_to(""), [""; 0]);
}

/// Goal: without an IOMMU a drive is bound only on explicit request, with the privilege for it, and
/// with a warning.
#[test]
fn without_an_iommu() {
    let machine = Machine::usual();
    fs::remove_file(machine.path("sys/bus/pci/devices/0000:01:00.0/iommu_group")).unwrap();
    let error = bind(&machine, FIRST).unwrap_err().to_string();
    assert!(
        error.contains("intel_iommu=on") && error.contains("though others have"),
        "{error}"
    );
    let wish = Options {
        no_iommu: true,
        ..Options::default()
    };
    let attempt = || machine.system().bind(at(FIRST), &wish);
    let error = attempt().unwrap_err().to_string();
    assert!(
        error.contains("this kernel was built without it"),
        "{error}"
    );
    machine.file("proc/self/status", "CapEff:\t0000000000000000");
    let error = attempt().unwrap_err().to_string();
    assert!(error.contains("CAP_SYS_RAWIO"), "{error}");
    machine.file("proc/self/status", "CapEff:\t0000000000020000");
    let parameter = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
    machine.file(parameter, "N\n");
    let bound = attempt().unwrap();
    assert_eq!(bound.node, "/dev/vfio/noiommu-0");
    assert!(bound.warning.unwrap().contains("all memory of the machine"));
    assert_eq!(machine.writes_to(parameter), ["Y"]);
}

#[test]
fn modules_are_loaded_or_their_absence_is_reported() {
    let machine = Machine::usual();
    machine.without_driver("vfio-pci");
    assert!(!machine.system().has_vfio_pci());
    let error = bind(&machine, FIRST).unwrap_err().to_string();
    assert!(
        error.contains("vfio-pci is not there: modprobe: FATAL"),
        "{error}"
    );
    assert_eq!(machine.writes_to(""), [""; 0]);
    machine.file("proc/sys/kernel/osrelease", "6.12.1\n");
    let index = "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/vfio.ko.xz\n";
    machine.file("lib/modules/6.12.1/modules.dep", index);
    assert!(machine.system().has_vfio_pci());
    let loads = ("vfio-pci".to_owned(), Ok(()));
    machine.kernel.modprobe.lock().extend([loads]);
    bind(&machine, FIRST).unwrap();
}

/// Goal: a failed step is undone, and its reason is reported.
#[test]
fn a_failed_step_is_undone() {
    let is_back = |machine: &Machine| {
        let drive = machine.system().drive(at(FIRST)).unwrap();
        assert_eq!(
            (drive.driver.clone(), drive.serial()),
            (Driver::Nvme, Some("S1"))
        );
        assert_eq!(machine.writes_to("driver_override").last().unwrap(), "\n");
        let paused = *machine.kernel.paused.lock();
        assert!(paused >= Duration::from_secs(30) && paused < Duration::from_secs(90));
    };
    let machine = Machine::usual();
    *machine.kernel.vfio_is_broken.lock() = true;
    let error = bind(&machine, FIRST).unwrap_err();
    assert!(
        matches!(
            error,
            PciError::Late {
                wanted: "vfio-pci",
                now: Driver::None,
                ..
            }
        ),
        "{error}"
    );
    is_back(&machine);

    let machine = Machine::usual();
    *machine.kernel.no_nodes.lock() = true;
    let error = bind(&machine, FIRST).unwrap_err();
    assert!(
        matches!(&error, PciError::NoNode { node, .. } if node == "14"),
        "{error}"
    );
    is_back(&machine);

    for (file, kind, text) in [
        (
            "driver_override",
            io::ErrorKind::PermissionDenied,
            "run this as root",
        ),
        (
            "driver_override",
            io::ErrorKind::ReadOnlyFilesystem,
            "outside a container",
        ),
        (
            "driver/unbind",
            io::ErrorKind::NotFound,
            "writing \"0000:01:00.0\" to",
        ),
        (
            "drivers_probe",
            io::ErrorKind::InvalidInput,
            "drivers_probe failed",
        ),
    ] {
        let machine = Machine::usual();
        machine.kernel.refuse.lock().insert(file.into(), kind);
        let error = bind(&machine, FIRST).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

/// Goal: a drive is not returned while a process drives it: the kernel would wait forever.
#[test]
fn drives_in_use_are_not_returned() {
    let machine = Machine::usual();
    bind(&machine, FIRST).unwrap();
    let node = machine.path("dev/vfio/14");
    machine.kernel.busy.lock().push(node);
    let error = machine.system().unbind(at(FIRST)).unwrap_err().to_string();
    assert!(error.contains("is driven by a program"), "{error}");
    machine.process(60, "nacre", "4026531840", "");
    machine.link("proc/60/fd/9", "/dev/vfio/14");
    let error = machine.system().unbind(at(FIRST)).unwrap_err().to_string();
    assert!(error.contains("is driven by nacre (process 60)"), "{error}");
    assert_eq!(
        machine.writes_to("unbind").len(),
        1,
        "a refused unbind writes nothing; this write is from the bind"
    );
    machine.kernel.busy.lock().clear();
    fs::remove_file(machine.path("proc/60/fd/9")).unwrap();
    machine.system().unbind(at(FIRST)).unwrap();
}

#[test]
fn drives_of_other_drivers_are_unchanged() {
    let machine = Machine::usual();
    machine.function("0000:03:00.0", "0x010802", Some("uio_pci_generic"), 20);
    for error in [
        bind(&machine, "0000:03:00.0").unwrap_err(),
        machine.system().unbind(at("0000:03:00.0")).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(text.contains("uio_pci_generic"), "{text}");
    }
    // A drive without a driver can be bound, and is returned to the kernel's driver.
    machine.function("0000:04:00.0", "0x010802", None, 21);
    assert!(!bind(&machine, "0000:04:00.0").unwrap().already);
    machine.system().unbind(at("0000:04:00.0")).unwrap();
}

/// Goal: added and removed drives are reported once. Method: a machine whose files change.
#[test]
fn a_watch_reports_changes() {
    use crate::{Change, Watch};
    let machine = Machine::usual();
    let mut watch = Watch::new(std::sync::Arc::new(machine.system()));
    assert_eq!(watch.changes(), []);
    machine.drive("0000:05:00.0", 22, 5, "S5", &[]);
    bind(&machine, FIRST).unwrap();
    let added = Change::Added(at("0000:05:00.0"), Driver::Nvme);
    let taken = Change::Driver(at(FIRST), Driver::VfioPci);
    assert_eq!(watch.changes(), [taken, added]);
    fs::remove_dir_all(machine.path("sys/bus/pci/devices/0000:05:00.0")).unwrap();
    assert_eq!(watch.changes(), [Change::Removed(at("0000:05:00.0"))]);
    assert_eq!(watch.changes(), []);
}

/// Goal: a check refuses what binding refuses, and changes nothing.
#[test]
fn a_check_changes_nothing() {
    let machine = Machine::usual();
    let system = machine.system();
    let check = |address| system.check(at(address), &Options::default());
    assert_eq!(check(FIRST).unwrap().serial(), Some("S1"));
    machine.file("proc/swaps", "Filename\n/dev/nvme0n2 partition\n");
    let refused = check(FIRST).unwrap_err();
    assert!(matches!(refused, PciError::InUse { .. }), "{refused}");
    machine.function("0000:03:00.0", "0x020000", Some("igb"), 15);
    let refused = check(SECOND).unwrap_err();
    assert!(matches!(refused, PciError::SharedGroup { .. }), "{refused}");
    assert!(matches!(check("9:0.0"), Err(PciError::NotThere { .. })));
    assert_eq!(machine.writes_to(""), [""; 0]);
}

/// Goal: a caller waits for drives that the kernel still identifies, and for no longer than needed.
#[test]
fn drives_are_awaited_until_they_are_identified() {
    let machine = Machine::usual();
    let state = "sys/bus/pci/devices/0000:02:00.0/nvme/nvme1/state";
    let is_live = |drives: &[Drive]| !drives.iter().any(Drive::is_coming_up);
    let system = machine.system();
    assert_eq!(system.identified_drives(|_| false).len(), 2);
    assert_eq!(*machine.kernel.paused.lock(), Duration::ZERO);
    machine.file(state, "connecting\n");
    assert_eq!(system.identified_drives(|_| true).len(), 2);
    assert_eq!(*machine.kernel.paused.lock(), Duration::ZERO);
    let change = (state.to_owned(), "live\n".to_owned());
    machine.kernel.changes.lock().push(change);
    assert!(is_live(&system.identified_drives(|_| false)));
    let paused = *machine.kernel.paused.lock();
    assert!(
        paused > Duration::ZERO && paused < Duration::from_secs(1),
        "{paused:?}"
    );
    machine.file(state, "connecting\n");
    assert!(!is_live(&system.identified_drives(|_| false)));
    assert!(*machine.kernel.paused.lock() >= Duration::from_secs(30));
    machine.file(state, "dead\n");
    assert!(is_live(&system.identified_drives(|_| false)));
}

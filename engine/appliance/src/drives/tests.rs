use std::cell::Cell;
use std::io::ErrorKind;

use nacre_bdev_nvme_vfio::pci::testing::Machine;

use super::*;

const FIRST: &str = "0000:01:00.0";
const SECOND: &str = "0000:02:00.0";

fn at(text: &str) -> Address {
    text.parse().unwrap()
}

fn appliance() -> (tempfile::TempDir, Places) {
    let root = tempfile::tempdir().unwrap();
    let places = Places::below(root.path());
    fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
    fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
    (root, places)
}

fn take(places: &Places, machine: &Machine, address: &str) -> Result<Taken, DriveError> {
    bind(places, &machine.system(), at(address), None)
}

fn by_serial(serial: &str) -> DriveId {
    DriveId {
        address: None,
        serial: Some(serial.into()),
    }
}

fn by_address(address: &str) -> DriveId {
    DriveId {
        address: Some(at(address)),
        serial: None,
    }
}

/// Serial number, address and state of each drive of the list.
fn listed(places: &Places, machine: &Machine) -> Vec<(String, Option<String>, DriveState)> {
    let all = status(places, &machine.system()).unwrap().into_iter();
    all.map(|one| {
        let address = one.drive.address.map(|address| address.to_string());
        (one.drive.serial, address, one.state)
    })
    .collect()
}

fn entry(serial: &str, address: &str, state: DriveState) -> (String, Option<String>, DriveState) {
    (serial.into(), Some(address.into()), state)
}

/// The addresses that a start of this machine binds, and the messages for other drives.
fn start(places: &Places, machine: &Machine) -> (Vec<String>, Vec<String>) {
    let done = restore(places, &machine.system()).unwrap();
    done.list.unwrap();
    let (mut bound, mut skipped) = (Vec::new(), Vec::new());
    for one in done.drives {
        match one.outcome {
            Ok(address) => bound.push(address.to_string()),
            Err(error) => skipped.push(error.to_string()),
        }
    }
    (bound, skipped)
}

/// Writes a list of drives with these serial numbers and addresses.
fn keep(places: &Places, drives: &[(&str, Option<&str>)]) {
    let drives = drives.iter().map(|(serial, address)| TakenDrive {
        serial: (*serial).into(),
        model: "QEMU NVMe Ctrl".into(),
        address: address.map(at),
    });
    let drives = drives.collect();
    List { drives }.write(places).unwrap();
}

fn drivers(machine: &Machine) -> Vec<Driver> {
    let drives = machine.system().drives();
    drives.into_iter().map(|drive| drive.driver).collect()
}

/// Goal: a bound drive is bound again by each start, and a drive that was given back by none.
#[test]
fn a_drive_is_bound_until_it_is_given_back() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    assert_eq!(start(&places, &machine), (vec![], vec![]));
    let taken = take(&places, &machine, FIRST).unwrap();
    assert_eq!((taken.drive.serial.as_str(), taken.already), ("S1", false));
    assert_eq!(taken.drive.to_string(), "QEMU NVMe Ctrl (serial number S1)");
    assert!(take(&places, &machine, FIRST).unwrap().already);
    assert_eq!(drivers(&machine), [Driver::VfioPci, Driver::Nvme]);
    let bound = entry("S1", FIRST, DriveState::Bound);
    assert_eq!(listed(&places, &machine), std::slice::from_ref(&bound));
    // A start begins with the kernel's driver for each drive.
    let restarted = Machine::usual();
    let of_kernel = entry("S1", FIRST, DriveState::Kernel);
    assert_eq!(listed(&places, &restarted), [of_kernel]);
    assert_eq!(start(&places, &restarted), (vec![FIRST.into()], vec![]));
    assert_eq!(listed(&places, &restarted), [bound]);
    // A second run of the unit finds the drive bound.
    assert_eq!(start(&places, &restarted), (vec![FIRST.into()], vec![]));
    let back = unbind(&places, &restarted.system(), &by_serial("S1")).unwrap();
    assert_eq!(back.controller.as_deref(), Some("nvme0"));
    assert!(back.was_bound);
    assert_eq!(drivers(&restarted), [Driver::Nvme, Driver::Nvme]);
    assert_eq!(listed(&places, &restarted), []);
    assert_eq!(start(&places, &Machine::usual()), (vec![], vec![]));
}

/// Goal: a drive is found at another address, and never exchanged for the drive that has its former
/// address now. Method: a start with the two drives in each other's place, then one without it.
#[test]
fn a_drive_is_known_by_its_serial_number() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    take(&places, &machine, FIRST).unwrap();
    let swapped = Machine::bare();
    swapped.drive(FIRST, 14, 0, "S2", &["nvme0n1"]);
    swapped.drive(SECOND, 15, 1, "S1", &["nvme1n1"]);
    assert_eq!(start(&places, &swapped), (vec![SECOND.into()], vec![]));
    assert_eq!(drivers(&swapped), [Driver::Nvme, Driver::VfioPci]);
    let moved = entry("S1", SECOND, DriveState::Bound);
    assert_eq!(listed(&places, &swapped), [moved]);

    let replaced = Machine::bare();
    replaced.drive(SECOND, 15, 1, "S3", &["nvme1n1"]);
    let (bound, skipped) = start(&places, &replaced);
    assert_eq!(bound, [""; 0]);
    assert_eq!(skipped.len(), 1);
    for part in [
        "serial number S1",
        "no live NVMe drive",
        SECOND,
        "is QEMU NVMe Ctrl (serial number S3)",
    ] {
        assert!(skipped[0].contains(part), "{part}: {skipped:?}");
    }
    assert_eq!(drivers(&replaced), [Driver::Nvme]);
    let missing = entry("S1", SECOND, DriveState::Missing);
    assert_eq!(listed(&places, &replaced), [missing]);
    // The drive at the address is taken too: the missing one loses its address, and leaves by name.
    take(&places, &replaced, SECOND).unwrap();
    let found = listed(&places, &replaced);
    let other = entry("S3", SECOND, DriveState::Bound);
    assert_eq!(found, [("S1".into(), None, DriveState::Missing), other]);
    let back = unbind(&places, &replaced.system(), &by_serial("S1")).unwrap();
    assert!(!back.was_bound);
    assert_eq!(drivers(&replaced), [Driver::VfioPci]);

    // Another model with the same serial number is another drive.
    let model = Machine::bare();
    model.drive(SECOND, 15, 1, "S3", &["nvme1n1"]);
    let file = format!("sys/bus/pci/devices/{SECOND}/nvme/nvme1/model");
    model.file(&file, "OTHER\n");
    assert_eq!(start(&places, &model).1.len(), 1);
    assert_eq!(drivers(&model), [Driver::Nvme]);
}

const PORTS: [&str; 3] = ["0000:03:00.0", "0000:04:00.0", "0000:05:00.0"];

/// A machine with drives of one serial number at these addresses.
fn twins(addresses: &[&str]) -> Machine {
    let machine = Machine::bare();
    for (number, address) in (3..).zip(addresses) {
        machine.drive(address, 20 + number, number, "TWIN", &[]);
    }
    machine
}

/// Goal: a drive that a later start could confuse with another one is not taken. Method: the other
/// one is live, not live, and bound.
#[test]
fn a_drive_that_shares_its_serial_number_is_refused() {
    let (_root, places) = appliance();
    let [a, b, _] = PORTS;
    let machine = twins(&[a, b]);
    let others = |machine: &Machine, address| {
        let refused = [
            check(&places, &machine.system(), at(address), None).map(drop),
            take(&places, machine, address).map(drop),
        ];
        refused.map(|refused| match refused {
            Err(DriveError::SharedSerial { others, .. }) => others,
            other => panic!("{other:?}"),
        })
    };
    assert_eq!(others(&machine, a), [[at(b)], [at(b)]]);
    let state = format!("sys/bus/pci/devices/{b}/nvme/nvme4/state");
    machine.file(&state, "dead\n");
    assert_eq!(others(&machine, a), [[at(b)], [at(b)]]);
    assert_eq!(drivers(&machine), [Driver::Nvme, Driver::Nvme]);
    assert_eq!(listed(&places, &machine), []);

    let alone = twins(&[a]);
    take(&places, &alone, a).unwrap();
    alone.drive(b, 24, 4, "TWIN", &[]);
    assert_eq!(others(&alone, b), [[at(a)], [at(a)]]);
    assert!(take(&places, &alone, a).unwrap().already);
    // Another model is another drive.
    let file = format!("sys/bus/pci/devices/{b}/nvme/nvme4/model");
    alone.file(&file, "OTHER\n");
    take(&places, &alone, b).unwrap();
}

/// Goal: drives with one serial number are distinguished by their addresses, and not guessed.
#[test]
fn drives_with_one_serial_number() {
    let (_root, places) = appliance();
    let [a, b, c] = PORTS;
    keep(&places, &[("TWIN", Some(a))]);
    let machine = twins(&[a, b]);
    // The second run of the unit, too: a bound drive shows no serial number.
    for _ in 0..2 {
        assert_eq!(start(&places, &machine), (vec![a.into()], vec![]));
        assert_eq!(drivers(&machine), [Driver::VfioPci, Driver::Nvme]);
    }
    let moved = twins(&[b, c]);
    let (bound, skipped) = start(&places, &moved);
    assert_eq!(bound, [""; 0]);
    assert!(skipped[0].contains("at 0000:04:00.0, 0000:05:00.0"));
    assert_eq!(drivers(&moved), [Driver::Nvme, Driver::Nvme]);
    let unclear = entry("TWIN", a, DriveState::Missing);
    assert_eq!(listed(&places, &moved), [unclear]);

    keep(&places, &[("TWIN", Some(a)), ("TWIN", Some(b))]);
    // The drive at its own address is preferred, and no address is used twice.
    let kernel = |address| entry("TWIN", address, DriveState::Kernel);
    assert_eq!(listed(&places, &moved), [kernel(c), kernel(b)]);
    let both = twins(&[a, b]);
    let started = start(&places, &both);
    assert_eq!(started, (vec![a.into(), b.into()], vec![]));
    let several = unbind(&places, &both.system(), &by_serial("TWIN")).unwrap_err();
    assert!(matches!(several, DriveError::Several { .. }), "{several}");
    unbind(&places, &both.system(), &by_address(b)).unwrap();
    assert_eq!(drivers(&both), [Driver::VfioPci, Driver::Nvme]);
}

/// Goal: each drive of the list leaves it by the values that the list shows. Method: a drive at
/// another address, then drives that have no address, one beside a bound drive of its serial
/// number.
#[test]
fn each_listed_drive_can_be_given_back() {
    let (_root, places) = appliance();
    take(&places, &Machine::usual(), FIRST).unwrap();
    let moved = Machine::bare();
    moved.drive(FIRST, 14, 0, "S2", &["nvme0n1"]);
    moved.drive(SECOND, 15, 1, "S1", &["nvme1n1"]);
    let give_back_all = |machine: &Machine| {
        let mut was_bound = Vec::new();
        for one in status(&places, &machine.system()).unwrap() {
            let id = DriveId {
                address: one.drive.address,
                serial: Some(one.drive.serial),
            };
            check_listed(&places, &machine.system(), &id).unwrap();
            was_bound.push(unbind(&places, &machine.system(), &id).unwrap().was_bound);
        }
        assert_eq!(listed(&places, machine), []);
        was_bound
    };
    let now = entry("S1", SECOND, DriveState::Kernel);
    assert_eq!(listed(&places, &moved), [now]);
    assert_eq!(give_back_all(&moved), [false]);

    keep(&places, &[("S1", None), ("S1", None)]);
    assert_eq!(give_back_all(&Machine::bare()), [false, false]);
    let [a, ..] = PORTS;
    keep(&places, &[("TWIN", Some(a)), ("TWIN", None)]);
    let machine = twins(&[a]);
    assert_eq!(start(&places, &machine).0, [a]);
    assert_eq!(give_back_all(&machine), [true, false]);
    assert_eq!(drivers(&machine), [Driver::Nvme]);
}

/// Goal: a start that takes too long names the drives that it left, and does not lose the present
/// addresses when it is ended. Method: two drives in each other's place; the clock jumps after the
/// first one.
#[test]
fn a_start_has_an_end() {
    let (_root, places) = appliance();
    keep(&places, &[("S1", Some(SECOND)), ("S2", Some(FIRST))]);
    let machine = Machine::usual();
    let calls = Cell::new(0);
    let spent = || {
        calls.set(calls.get() + 1);
        BINDING * (calls.get() - 1)
    };
    let write = |list: &List, places: &Places| {
        assert_eq!(drivers(&machine), [Driver::Nvme, Driver::Nvme]);
        list.write(places)
    };
    let done = restore_and(&places, &machine.system(), spent, write).unwrap();
    done.list.unwrap();
    let [first, second] = &done.drives[..] else {
        panic!("{:?}", done.drives);
    };
    assert_eq!(first.outcome.as_ref().unwrap(), &at(FIRST));
    let late = second.outcome.as_ref().unwrap_err().to_string();
    let text = "no time: QEMU NVMe Ctrl (serial number S2) is not bound, since the drives before it took 120 s; take it again";
    assert_eq!(late, text);
    assert_eq!(drivers(&machine), [Driver::VfioPci, Driver::Nvme]);
    let stored = List::read(&places).unwrap().drives;
    let stored: Vec<_> = stored.iter().map(|one| one.address).collect();
    assert_eq!(stored, [Some(at(FIRST)), Some(at(SECOND))]);
    // A list that cannot be written keeps no drive from the daemon.
    keep(&places, &[("S1", Some(SECOND))]);
    let full = |_: &List, places: &Places| {
        Err(DriveError::Io {
            path: places.drives(),
            source: ErrorKind::StorageFull.into(),
        })
    };
    let machine = Machine::usual();
    let done = restore_and(&places, &machine.system(), || Duration::ZERO, full).unwrap();
    assert!(matches!(done.list, Err(DriveError::Io { .. })));
    assert_eq!(drivers(&machine), [Driver::VfioPci, Driver::Nvme]);
}

/// Goal: a drive in use is neither bound by a call nor by a start, and its users are named without
/// the remedies of a shell. One refused drive delays no other one.
#[test]
fn a_drive_in_use_is_refused() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    take(&places, &machine, FIRST).unwrap();
    take(&places, &machine, SECOND).unwrap();
    let restarted = Machine::usual();
    restarted.file("proc/swaps", "Filename\n/dev/nvme0n2 partition\n");
    let (bound, skipped) = start(&places, &restarted);
    assert_eq!(bound, [SECOND]);
    assert_eq!(
        skipped,
        ["drive 0000:01:00.0 is in use: nvme0n2 is swap space; end that first"]
    );
    let (_root, places) = appliance();
    for refused in [
        check(&places, &restarted.system(), at(FIRST), None).unwrap_err(),
        take(&places, &restarted, FIRST).unwrap_err(),
    ] {
        assert!(matches!(refused, DriveError::InUse { .. }), "{refused}");
    }
    assert_eq!(listed(&places, &restarted), []);
}

/// Goal: a call that fails leaves the drive with its driver, and the list as it was.
#[test]
fn failed_calls_change_nothing() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    let system = machine.system();
    let refused = bind(&places, &system, at(FIRST), Some("S9")).unwrap_err();
    let text =
        "drive 0000:01:00.0 has the serial number \"S1\", and not \"S9\"; look at the disks again";
    assert_eq!(refused.to_string(), text);
    let refused = bind(&places, &system, at("9:0.0"), None).unwrap_err();
    let is_gone = matches!(refused, DriveError::Pci(PciError::NotThere { .. }));
    assert!(is_gone, "{refused}");
    let state = format!("sys/bus/pci/devices/{FIRST}/nvme/nvme0/state");
    machine.file(&state, "connecting\n");
    let refused = take(&places, &machine, FIRST).unwrap_err();
    let is_early = matches!(refused, DriveError::NotIdentified { .. });
    assert!(is_early, "{refused}");
    machine.file(&state, "live\n");
    machine.function("0000:06:00.0", "0x010802", Some("uio_pci_generic"), 26);
    let refused = take(&places, &machine, "0000:06:00.0").unwrap_err();
    assert!(refused.to_string().contains("uio_pci_generic"), "{refused}");

    *machine.kernel.vfio_is_broken.lock() = true;
    let refused = take(&places, &machine, FIRST).unwrap_err();
    let is_late = matches!(refused, DriveError::Pci(PciError::Late { .. }));
    assert!(is_late, "{refused}");
    *machine.kernel.vfio_is_broken.lock() = false;
    assert!(!places.drives().exists());

    // A list that cannot be read.
    fs::create_dir_all(places.drives()).unwrap();
    let refused = take(&places, &machine, FIRST).unwrap_err();
    assert!(matches!(refused, DriveError::Io { .. }), "{refused}");
    fs::remove_dir(places.drives()).unwrap();
    assert_eq!(drivers(&machine)[..2], [Driver::Nvme, Driver::Nvme]);
    assert_eq!(machine.writes_to("unbind").len(), 1, "of the broken driver");

    // The daemon still has the drive.
    take(&places, &machine, FIRST).unwrap();
    let node = machine.path("dev/vfio/14");
    machine.kernel.busy.lock().push(node);
    let refused = unbind(&places, &system, &by_address(FIRST)).unwrap_err();
    let is_driven = matches!(refused, DriveError::Pci(PciError::Driven { .. }));
    assert!(is_driven, "{refused}");
    let bound = entry("S1", FIRST, DriveState::Bound);
    assert_eq!(listed(&places, &machine), [bound]);
    machine.kernel.busy.lock().clear();
    for id in [
        DriveId::default(),
        by_address(SECOND),
        by_serial("S2"),
        DriveId {
            address: Some(at(FIRST)),
            serial: Some("S2".into()),
        },
    ] {
        let refused = unbind(&places, &system, &id).unwrap_err();
        assert!(matches!(refused, DriveError::NotTaken { .. }), "{refused}");
        assert!(refused.to_string().contains("serial number S1"));
    }
    assert_eq!(drivers(&machine)[0], Driver::VfioPci);
}

/// Goal: a drive whose binding or return cannot be kept over a restart has its former driver again.
#[test]
fn a_list_that_cannot_be_written() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    let system = machine.system();
    let full = |_: &List, places: &Places| {
        Err(DriveError::Io {
            path: places.drives(),
            source: ErrorKind::StorageFull.into(),
        })
    };
    let refused = bind_and(&places, &system, at(FIRST), None, full).unwrap_err();
    assert!(matches!(refused, DriveError::Io { .. }), "{refused}");
    assert_eq!(drivers(&machine), [Driver::Nvme, Driver::Nvme]);
    assert_eq!(machine.writes_to("unbind").len(), 2);
    assert_eq!(listed(&places, &machine), []);
    take(&places, &machine, FIRST).unwrap();
    let refused = unbind_and(&places, &system, &by_serial("S1"), full).unwrap_err();
    assert!(matches!(refused, DriveError::Io { .. }), "{refused}");
    assert_eq!(drivers(&machine), [Driver::VfioPci, Driver::Nvme]);
    let bound = entry("S1", FIRST, DriveState::Bound);
    assert_eq!(listed(&places, &machine), [bound]);
}

/// Goal: a drive that `nacre nvme bind` bound can be given back, and is not taken for one of the
/// list.
#[test]
fn a_drive_that_another_command_bound() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    let system = machine.system();
    system.bind(at(FIRST), &Options::default()).unwrap();
    let refused = take(&places, &machine, FIRST).unwrap_err();
    let is_others = matches!(refused, DriveError::BoundByOthers { .. });
    assert!(is_others, "{refused}");
    let back = unbind(&places, &system, &by_address(FIRST)).unwrap();
    assert_eq!((back.was_bound, back.id.serial), (true, None));
    assert_eq!(drivers(&machine), [Driver::Nvme, Driver::Nvme]);
    // The list has the drive, and a shell gave it back.
    take(&places, &machine, SECOND).unwrap();
    system.unbind(at(SECOND)).unwrap();
    assert!(
        !unbind(&places, &system, &by_serial("S2"))
            .unwrap()
            .was_bound
    );
    assert_eq!(listed(&places, &machine), []);
}

/// Goal: without an IOMMU the remedy is the firmware's, not an option of a command.
#[test]
fn a_machine_without_an_iommu() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    fs::remove_dir_all(machine.path("sys/kernel/iommu_groups")).unwrap();
    fs::remove_file(machine.path(&format!("sys/bus/pci/devices/{FIRST}/iommu_group"))).unwrap();
    let refused = take(&places, &machine, FIRST).unwrap_err().to_string();
    assert!(refused.contains("firmware"), "{refused}");
    assert!(!refused.contains("--no-iommu"), "{refused}");
}

/// Goal: a damaged list binds no drive and is reported; taking a drive makes a new list. The list
/// is bounded, and a machine that is no appliance has none.
#[test]
fn the_file_of_the_list() {
    let (_root, places) = appliance();
    let machine = Machine::usual();
    create_folder(&places.notes(), 0o700).unwrap();
    fs::write(places.drives(), "{").unwrap();
    for refused in [
        restore(&places, &machine.system()).unwrap_err(),
        status(&places, &machine.system()).unwrap_err(),
    ] {
        let is_damaged = matches!(refused, DriveError::Malformed { .. });
        assert!(is_damaged, "{refused}");
    }
    take(&places, &machine, FIRST).unwrap();
    assert_eq!(listed(&places, &machine).len(), 1);

    let many = (0..MOST).map(|n| TakenDrive {
        serial: format!("T{n}"),
        model: "M".into(),
        address: None,
    });
    let full = List {
        drives: many.collect(),
    };
    full.write(&places).unwrap();
    let refused = take(&places, &machine, SECOND).unwrap_err();
    assert!(matches!(refused, DriveError::Full), "{refused}");
    assert_eq!(drivers(&machine), [Driver::VfioPci, Driver::Nvme]);

    fs::remove_file(places.os_release()).unwrap();
    for refused in [
        take(&places, &machine, SECOND).unwrap_err(),
        unbind(&places, &machine.system(), &by_address(FIRST)).unwrap_err(),
        restore(&places, &machine.system()).unwrap_err(),
    ] {
        assert!(matches!(refused, DriveError::Status(_)), "{refused}");
    }
}

/// Goal: a drive that cannot be bound at a start is reported with its cause, and its new address is
/// kept.
#[test]
fn a_start_reports_a_drive_that_cannot_be_bound() {
    let (_root, places) = appliance();
    take(&places, &Machine::usual(), FIRST).unwrap();
    let moved = Machine::bare();
    moved.drive(SECOND, 15, 1, "S1", &["nvme1n1"]);
    let refuse = ErrorKind::ReadOnlyFilesystem;
    moved.kernel.refuse.lock().insert("bind".into(), refuse);
    let (bound, skipped) = start(&places, &moved);
    assert_eq!(bound, [""; 0]);
    assert!(skipped[0].contains("cannot be written"), "{skipped:?}");
    let moved_now = entry("S1", SECOND, DriveState::Kernel);
    assert_eq!(listed(&places, &moved), [moved_now]);
    assert_eq!(
        List::read(&places).unwrap().drives[0].address,
        Some(at(SECOND))
    );
}

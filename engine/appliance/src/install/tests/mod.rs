mod rig;

use std::fs;

use gpt::disk::LogicalBlockSize;
use serde_json::json;

use self::rig::{Boots, HASH, MIB, Rig, TARGET, whole};
use super::*;

/// Goal: a target has the parts of the image, the installer not, and identifiers of its own.
/// Method: both sizes of sectors; the target is read as firmware reads it.
#[test]
fn an_empty_disk_gets_the_system() {
    for (bytes, sector) in [
        (512, LogicalBlockSize::Lb512),
        (4096, LogicalBlockSize::Lb4096),
    ] {
        let rig = Rig::new();
        rig.target("new", json!({ "log-sec": bytes }));
        let mut steps = Vec::new();
        let done = rig.with(|installer| {
            installer.install("NEW", false, &mut |progress| {
                assert!(progress.done <= progress.total, "{progress:?}");
                if steps.last() != Some(&progress.step) {
                    steps.push(progress.step);
                }
            })
        });
        let done = done.unwrap();
        assert_eq!(done.path, rig.path("new"));
        assert!(done.bytes > 3 * MIB);
        assert_eq!(rig.boots("new", sector), whole(), "{bytes}");
        use Step::*;
        assert_eq!(steps, [Check, Erase, Copy, Verify, Finish]);
        let lines = rig.lines.borrow().join("\n");
        assert!(lines.contains(&format!("stick3 {HASH}")), "{lines}");
    }
}

/// Goal: a power failure leaves a disk that does not boot, or a whole one; a repeat succeeds.
/// Method: a cut at each kind of write, with and without the writes that no sync has followed. The
/// disk had a system before.
#[test]
fn a_power_failure_leaves_no_half_of_a_system() {
    let rig = Rig::new();
    rig.target("new", json!({}));
    rig.install("NEW", false).unwrap();
    let all = rig.faults.0.writes.replace(0);
    // Each of the first and last writes, and some in between.
    let cuts = (0..6).chain((6..all).step_by(211)).chain(all - 12..all);
    for (number, cut) in cuts.enumerate() {
        rig.faults.0.writes.set(0);
        rig.faults.0.unsynced.borrow_mut().clear();
        rig.faults.0.cut_at.set(Some(cut));
        let cut_off = rig.install("NEW", true).unwrap_err();
        assert!(matches!(cut_off, InstallError::Target { .. }), "{cut_off}");
        if number % 2 == 1 {
            let mut file = OpenOptions::new()
                .write(true)
                .open(rig.path("new"))
                .unwrap();
            for (at, before) in rig.faults.0.unsynced.take().into_iter().rev() {
                file.seek(SeekFrom::Start(at)).unwrap();
                file.write_all(&before).unwrap();
            }
        }
        let found = rig.boots("new", LogicalBlockSize::Lb512);
        // Before the first sync the former system is there, whole. The last write makes the disk
        // bootable.
        assert!(
            found == Boots::Not || (cut < 6 && found == whole()),
            "cut {cut}: {found:?}"
        );
        rig.faults.0.cut_at.set(None);
        rig.install("NEW", true).unwrap();
        assert_eq!(rig.boots("new", LogicalBlockSize::Lb512), whole());
    }
}

/// Goal: a disk that changes its path while the boot disk is checked is the one that is written.
/// Method: two disks exchange their paths.
#[test]
fn a_path_that_another_disk_takes_is_not_written() {
    let rig = Rig::new();
    rig.target("new", json!({}));
    rig.target("other", json!({}));
    rig.swaps.set(true);
    let done = rig.install("NEW", false).unwrap();
    assert_eq!(done.path, rig.path("other"));
    assert_eq!(rig.boots("new", LogicalBlockSize::Lb512), Boots::Not);
}

/// Goal: each disk that must not be overwritten is refused with its reason, whatever the operator
/// confirms, and not one byte of it changes. Method: a disk of each kind.
#[test]
fn disks_that_cannot_be_chosen() {
    let rig = Rig::new();
    rig.target("mounted", json!({ "mountpoints": ["/mnt"] }));
    let held = json!([{ "name": "held1", "type": "part", "children": [{ "name": "md0", "type": "raid1" }] }]);
    rig.target("held", json!({ "children": held }));
    let part = json!([{ "name": "p1", "type": "part", "mountpoints": ["[SWAP]"] }]);
    rig.target("swap", json!({ "children": part }));
    rig.target("ro", json!({ "ro": true }));
    rig.target("small", json!({ "size": 500 * MIB }));
    rig.target("odd", json!({ "log-sec": 520 }));
    rig.target("twin", json!({ "serial": "SAME" }));
    rig.target("twin2", json!({ "serial": " SAME" }));
    rig.target("nameless", json!({ "serial": null }));
    rig.target("blank", json!({ "serial": "  " }));
    rig.add(json!({ "name": "unreadable", "serial": "UNREADABLE" }));
    for (serial, said) in [
        ("STICK", "started from it"),
        ("MOUNTED", "mounted (/mnt)"),
        ("HELD", "md0 (raid1)"),
        ("SWAP", "p1 ([SWAP])"),
        ("RO", "read-only"),
        ("SMALL", "use a larger disk"),
        ("ODD", "nvme format"),
        ("SAME", "same serial number"),
        ("UNREADABLE", "cannot be read"),
        ("", "no disk has this serial number"),
        ("  ", "no disk has this serial number"),
        ("mounted", "no disk has this serial number"),
    ] {
        let refusal = rig.refusal(serial);
        assert!(refusal.contains(said), "{serial}: {refusal}");
    }
    let disks = rig.with(|installer| installer.disks()).unwrap();
    let nameless = disks.iter().filter(|disk| disk.serial.is_empty());
    assert!(
        nameless
            .clone()
            .all(|disk| disk.refusal == Some(Refusal::NoSerial))
    );
    assert_eq!(nameless.count(), 2);
    assert_eq!(rig.faults.0.writes.get(), 0);
}

/// Goal: data on a disk is named, and needs the operator's word. Method: data of each kind.
#[test]
fn data_is_overwritten_only_on_demand() {
    for (fields, bytes, said) in [
        (
            json!({ "fstype": "xfs", "label": "home" }),
            &b""[..],
            "home (xfs)",
        ),
        (json!({ "pttype": "dos" }), b"", "dos partition table"),
        (
            json!({ "children": [{ "name": "n1", "type": "part", "partlabel": "win\u{1b}" }] }),
            b"",
            "win?",
        ),
        (json!({}), b"NACREPOL", "part of a Nacre pool"),
        (json!({}), b"NACREVOL", "replica of a Nacre volume"),
        (json!({}), b"?", "data of an unknown kind"),
    ] {
        let rig = Rig::new();
        rig.target("new", fields);
        let mut file = OpenOptions::new()
            .write(true)
            .open(rig.path("new"))
            .unwrap();
        file.seek(SeekFrom::Start(4096)).unwrap();
        file.write_all(bytes).unwrap();
        let refused = rig.install("NEW", false).unwrap_err();
        assert!(
            matches!(refused, InstallError::HoldsData { .. }),
            "{refused}"
        );
        let text = refused.to_string();
        assert!(text.contains(said) && text.contains("--force"), "{text}");
        assert_eq!(rig.faults.0.writes.get(), 0);
        rig.install("NEW", true).unwrap();
        assert_eq!(rig.boots("new", LogicalBlockSize::Lb512), whole());
    }
}

/// Goal: a disk that vanishes, a write error, a short disk and a disk that lies are each named, and
/// do not boot. Method: faults of the target.
#[test]
fn faults_of_the_target() {
    let rig = Rig::new();
    rig.target("new", json!({}));
    rig.faults.0.gone.set(true);
    let gone = rig.install("NEW", false).unwrap_err();
    assert!(matches!(gone, InstallError::Open { .. }), "{gone}");
    rig.faults.0.gone.set(false);

    rig.install("NEW", false).unwrap();
    let all = rig.faults.0.writes.get();
    // While it is erased, at the first file, at the partition table.
    for (kind, cut) in [
        (io::ErrorKind::StorageFull, 70),
        (io::ErrorKind::NotFound, 2100),
        (io::ErrorKind::StorageFull, all - 100),
    ] {
        rig.faults.0.writes.set(0);
        rig.faults.0.cut_at.set(Some(cut));
        rig.faults.0.error.set(Some(kind));
        let failed = rig.install("NEW", true).unwrap_err();
        assert!(matches!(failed, InstallError::Target { .. }), "{failed}");
        assert!(failed.to_string().contains("does not boot"), "{failed}");
        assert_eq!(rig.boots("new", LogicalBlockSize::Lb512), Boots::Not);
    }
    rig.faults.0.cut_at.set(None);

    // In the root file system, and in the verity data.
    for flip in [10 * MIB, 11 * MIB + 5] {
        rig.faults.0.flip_at.set(Some(flip));
        let differs = rig.install("NEW", true).unwrap_err();
        assert!(matches!(differs, InstallError::Differs { .. }), "{differs}");
        assert_eq!(rig.boots("new", LogicalBlockSize::Lb512), Boots::Not);
    }
    rig.faults.0.flip_at.set(None);

    let file = OpenOptions::new()
        .write(true)
        .open(rig.path("new"))
        .unwrap();
    file.set_len(TARGET - 512).unwrap();
    let short = rig.install("NEW", true).unwrap_err();
    assert!(matches!(short, InstallError::Short { .. }), "{short}");
    file.set_len(TARGET).unwrap();
    rig.install("NEW", true).unwrap();
}

/// Goal: a boot partition that reads back differently is refused. Method: a flipped bit in the one
/// file whose place is found by its contents.
#[test]
fn a_changed_file_of_the_boot_partition_is_found() {
    let rig = Rig::new();
    rig.target("new", json!({}));
    rig.install("NEW", false).unwrap();
    let mut start = vec![0; 9 << 20];
    File::open(rig.path("new"))
        .unwrap()
        .read_exact(&mut start)
        .unwrap();
    let wanted = b"kernel of 0.2.0";
    let at = start
        .windows(wanted.len())
        .position(|bytes| bytes == wanted);
    rig.faults.0.flip_at.set(Some(at.unwrap() as u64));
    let differs = rig.install("NEW", true).unwrap_err();
    let InstallError::Differs { part, .. } = &differs else {
        panic!("{differs}");
    };
    assert_eq!(*part, "boot partition");
}

/// Goal: only a start of the installer installs, and only from a whole image. Method: faults of the
/// boot disk and of its start.
#[test]
fn faults_of_the_boot_disk() {
    let rig = Rig::new();
    rig.target("new", json!({}));
    let line = rig.places().command_line();
    let started = fs::read_to_string(&line).unwrap();
    let refusal = |text: &str| {
        fs::write(&line, text).unwrap();
        let refused = rig.install("NEW", true).unwrap_err();
        fs::write(&line, &started).unwrap();
        refused
    };
    for text in ["", "nacre.installed=ask", "x.nacre.install=ask"] {
        let refused = refusal(text);
        assert!(matches!(refused, InstallError::NotInstaller), "{refused}");
    }
    for (text, said) in [
        ("nacre.install=ask", "roothash"),
        ("nacre.install roothash=0123", "roothash"),
        (&started.replace("0011", "ffff"), "partition root"),
    ] {
        let refused = refusal(text).to_string();
        assert!(refused.contains(said), "{text}: {refused}");
    }
    rig.damaged.set(true);
    assert!(
        rig.refusal("NEW")
            .contains("write the image to the USB disk again")
    );
    rig.damaged.set(false);

    let variable = rig.loader_variable();
    let bytes = fs::read(&variable).unwrap();
    fs::remove_file(&variable).unwrap();
    assert!(rig.refusal("NEW").contains("LoaderDevicePartUUID"));
    fs::write(&variable, bytes).unwrap();
    // Two USB disks with one image.
    let mut copy = rig.disks.borrow()[0].clone();
    copy["path"] = json!("/dev/other");
    rig.disks.borrow_mut().push(copy);
    assert!(rig.refusal("NEW").contains("copies of one image"));
    rig.disks.borrow_mut().pop();
    let stick = rig.disks.borrow_mut().remove(0);
    assert!(rig.refusal("NEW").contains("no disk has the partition"));
    rig.disks.borrow_mut().insert(0, stick);
    // The image was cut off when it was written.
    OpenOptions::new()
        .write(true)
        .open(rig.path("stick"))
        .unwrap()
        .set_len(10 * MIB)
        .unwrap();
    let cut = rig.install("NEW", true).unwrap_err();
    assert!(matches!(cut, InstallError::Source { .. }), "{cut}");
    assert_eq!(rig.boots("new", LogicalBlockSize::Lb512), Boots::Not);
}

/// Goal: a list that `lsblk` cannot give is an error, not an empty list. Method: broken answers.
#[test]
fn a_broken_list_of_disks() {
    let rig = Rig::new();
    rig.disks.borrow_mut().push(json!({ "name": 7 }));
    let broken = rig.with(|installer| installer.disks()).unwrap_err();
    assert!(matches!(broken, InstallError::Listing(_)), "{broken}");
}

/// Goal: the kernel refuses a disk that is in use. Method: the flag of the real opener, on a file.
#[test]
fn the_kernels_disks_are_read_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    assert!(Kernel.alone(&path).is_err());
    fs::write(&path, "before").unwrap();
    let mut disk = Kernel.alone(&path).unwrap();
    disk.write_all(b"after!").unwrap();
    disk.sync_and_drop_cache().unwrap();
    let mut text = String::new();
    Kernel
        .read(&path)
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "after!");
    assert!(Kernel.read(&path).unwrap().write_all(b"x").is_err());
}

//! Installs an update bundle in the slot (partitions and boot entry of one version) that is not
//! running. systemd-sysupdate writes the slot.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::acts::Watched;
use crate::bundle::{self, BundleError, KeyError, Keys, TargetMachine, Unpacked};
use crate::lock::{Lock, LockError};
use crate::place::Places;
use crate::run::{Run, RunError};
use crate::slots::{self, BootEntry, RollbackError};
use crate::status::{self, SpaceError, StatusError};
use crate::version::Version;

/// The program that writes the slot and its boot entry, as the image's transfer files define.
pub const SYSUPDATE: &str = "/usr/lib/systemd/systemd-sysupdate";

#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Keys(#[from] KeyError),
    #[error("{path}: {source}", path = path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error("the boot partition is too full: {0}; remove other files, such as refused bundles")]
    BootPartition(#[source] SpaceError),
    #[error("the other slot: {0}")]
    Install(#[source] RunError),
    #[error("the older version is installed, but does not start next: {0}")]
    Older(#[from] RollbackError),
}

/// A part of an update, for its progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateStep {
    /// Checking and unpacking the bundle; this percentage of it is read.
    Unpack { percent: u8 },
    /// Writing the slot.
    Write,
}

/// Checks the bundle in `file`, unpacks it, and writes the other slot. The next restart boots the
/// new version. An older version than the running one is refused unless `allow_older`. `report`
/// gets the progress.
pub fn update(
    places: &Places,
    run: &impl Run,
    file: &Path,
    allow_older: bool,
    report: &mut dyn FnMut(UpdateStep),
) -> Result<Unpacked, UpdateError> {
    let image = status::image(places)?;
    let _lock = Lock::of_system(places)?;
    let slots = slots::remove_empty(&places.entries())
        .and_then(|()| slots::slots(places, &image.version))
        .map_err(|source| UpdateError::Open {
            path: places.entries(),
            source,
        })?;
    let keys = Keys::read(&places.keys())?;
    let opened = File::open(file).and_then(|bundle| {
        let length = bundle.metadata()?.len();
        Ok((bundle, length))
    });
    let (bundle, length) = opened.map_err(|source| UpdateError::Open {
        path: file.to_owned(),
        source,
    })?;
    let wanted = TargetMachine {
        image: image.id,
        architecture: status::architecture().to_owned(),
        running: image.version.clone(),
        allow_older,
        slots,
    };
    let updates = places.updates();
    // A power failure during an update leaves its files, in the space that this one needs.
    bundle::discard(&updates).map_err(|source| UpdateError::Open {
        path: updates.clone(),
        source,
    })?;
    report(UpdateStep::Unpack { percent: 0 });
    let mut on_read = |percent| report(UpdateStep::Unpack { percent });
    let watched = Watched::new(bundle, length, &mut on_read);
    let unpacked = bundle::unpack(watched, &keys, &wanted, &updates)?;
    report(UpdateStep::Write);
    let version = unpacked.version.to_string();
    let installed = check_entries(places, &image.version, &unpacked).and_then(|()| {
        let written = run.run(SYSUPDATE, &["--verify=no", "update", &version]);
        written.map_err(UpdateError::Install)
    });
    // The slot has it now, or the next attempt unpacks it again. The next boot removes leftovers.
    let _ = bundle::discard(&updates);
    installed?;
    // The boot menu has the newer version first.
    if unpacked.version < image.version {
        slots::roll_back(places, &image.version, false)?;
    }
    Ok(unpacked)
}

/// Checks that the boot partition has room for the new entry. Without the check, systemd-sysupdate
/// would fail after it has removed the former version of the slot.
fn check_entries(places: &Places, running: &Version, new: &Unpacked) -> Result<(), UpdateError> {
    let folder = places.entries();
    let sizes = || {
        // The entries of the slot that is written go first.
        let mut free = status::free_bytes(&folder)?;
        for name in slots::names(&folder)? {
            if BootEntry::parse(&name).is_some_and(|entry| entry.version != *running) {
                free = free.saturating_add(fs::metadata(folder.join(name))?.len());
            }
        }
        let kernel = places.updates().join(format!("nacre_{}.efi", new.version));
        Ok((free, fs::metadata(kernel)?.len()))
    };
    let checked = sizes()
        .map_err(|source| SpaceError::Io {
            path: folder.clone(),
            source,
        })
        .and_then(|(free, needed)| status::check_free(&folder, free, needed));
    checked.map_err(UpdateError::BootPartition)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::BundleError::Installed;
    use crate::bundle::tests::{Signer, archive, entries};
    use crate::run::testing::{Cuts, Recorder};

    /// Goal: systemd-sysupdate is called for a good bundle only, and no attempt leaves files.
    #[test]
    fn an_update_installs_the_version_of_its_bundle() {
        let signer = Signer::new(1);
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        fs::create_dir_all(places.entries()).unwrap();
        let file = root.path().join("bundle");
        let mut parts = entries(&signer, "0.2.0");
        let run = Recorder::default();
        let attempt =
            |run: &Recorder, allow_older| update(&places, run, &file, allow_older, &mut |_| {});

        fs::write(&file, archive(&parts)).unwrap();
        assert!(matches!(attempt(&run, false), Err(UpdateError::Keys(_))));
        signer.put(&places.keys());
        if status::architecture() != "x86-64" {
            eprintln!("SKIPPED: an_update_installs_the_version_of_its_bundle: made for x86-64");
            return;
        }
        assert_eq!(attempt(&run, false).unwrap().version.to_string(), "0.2.0");
        assert_eq!(
            run.taken(),
            [format!("{SYSUPDATE} --verify=no update 0.2.0")]
        );
        assert!(!places.updates().exists());

        let lock = Lock::of_system(&places).unwrap();
        assert!(matches!(attempt(&run, false), Err(UpdateError::Lock(_))));
        drop(lock);

        let failing = Recorder {
            failing: Some("sysupdate"),
            ..Recorder::default()
        };
        assert!(matches!(
            attempt(&failing, false),
            Err(UpdateError::Install(_))
        ));
        assert!(!places.updates().exists());

        parts[3].1[7] ^= 1;
        fs::write(&file, archive(&parts)).unwrap();
        // A power failure ended the update before this one.
        fs::create_dir_all(places.updates()).unwrap();
        assert!(matches!(attempt(&run, true), Err(UpdateError::Bundle(_))));
        assert!(!places.updates().exists());
        fs::remove_file(&file).unwrap();
        assert!(matches!(attempt(&run, true), Err(UpdateError::Open { .. })));
        assert!(run.taken().is_empty());
    }

    /// Goal: an entry without room in the boot partition is refused before the other slot changes.
    /// Method: a kernel of 512 GiB without disk space; an entry of 1 TiB of one slot or the other.
    #[test]
    fn an_entry_needs_room_in_the_boot_partition() {
        for (large, is_refused) in [("nacre_0.1.0.efi", true), ("nacre_0.0.9+0-3.efi", false)] {
            let entries = ["nacre_0.1.0.efi", "nacre_0.0.9+0-3.efi"];
            let (_root, places) = slots::tests::disk(&entries, &["0.1.0", "0.0.9"]);
            fs::create_dir_all(places.updates()).unwrap();
            for (path, size) in [
                (places.entries().join(large), 1 << 40),
                (places.updates().join("nacre_0.2.0.efi"), 1 << 39),
            ] {
                File::create(path).unwrap().set_len(size).unwrap();
            }
            let new = Unpacked {
                version: "0.2.0".parse().unwrap(),
                key: "maker".into(),
                bytes: 0,
            };
            let checked = check_entries(&places, &"0.1.0".parse().unwrap(), &new);
            let refused = matches!(
                checked,
                Err(UpdateError::BootPartition(SpaceError::NoSpace { .. }))
            );
            assert_eq!((checked.is_err(), refused), (is_refused, is_refused));
        }
    }

    /// Goal: a power failure before or while the slot is written changes no boot entry, and the
    /// next attempt installs the version. Method: the disk at the call of systemd-sysupdate, and
    /// with the partitions that it may leave.
    #[test]
    fn an_update_begins_again_after_a_power_failure() {
        if status::architecture() != "x86-64" {
            eprintln!("SKIPPED: an_update_begins_again_after_a_power_failure: made for x86-64");
            return;
        }
        let signer = Signer::new(1);
        let (root, places) = slots::tests::disk(&["nacre_0.1.0.efi"], &["0.1.0"]);
        fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        signer.put(&places.keys());
        let bundle = archive(&entries(&signer, "0.2.0"));
        fs::write(root.path().join("bundle"), &bundle).unwrap();
        for labels in [
            &[][..],
            &["nacre_0.2.0"],
            &["nacre_0.2.0", "nacre_0.2.0_verity"],
        ] {
            let cuts = Cuts::of(root.path());
            let mut steps = Vec::new();
            let file = root.path().join("bundle");
            update(&places, &cuts, &file, false, &mut |step| steps.push(step)).unwrap();
            assert_eq!(steps.first(), Some(&UpdateStep::Unpack { percent: 0 }));
            assert_eq!(steps.last(), Some(&UpdateStep::Write));
            let [(line, disk)] = &cuts.taken()[..] else {
                panic!("one command");
            };
            assert!(line.ends_with("update 0.2.0"), "{line}");
            let left = Places::below(disk.path());
            let names = slots::names(&left.entries()).unwrap();
            assert_eq!(names, ["nacre_0.1.0.efi"]);
            assert_eq!(slots::names(&left.updates()).unwrap().len(), 3);
            fs::create_dir_all(left.state().join(".update-cut")).unwrap();
            for label in labels {
                fs::write(left.labels().join(label), "").unwrap();
            }
            update(
                &left,
                &Recorder::default(),
                &disk.path().join("bundle"),
                false,
                &mut |_| {},
            )
            .unwrap();
            assert!(slots::names(&left.state()).unwrap().is_empty());
        }
    }

    /// Goal: an older version starts next, too. Method: a systemd-sysupdate that writes the slot.
    #[test]
    fn an_older_version_comes_first_in_the_boot_menu() {
        struct Writes<'a>(&'a Places, &'a str);
        impl Run for Writes<'_> {
            fn run(&self, _: &str, _: &[&str]) -> Result<String, RunError> {
                let Self(places, version) = self;
                for label in ["", "_verity"] {
                    let label = format!("nacre_{version}{label}");
                    fs::write(places.labels().join(label), "").unwrap();
                }
                let entry = format!("nacre_{version}+3-0.efi");
                fs::write(places.entries().join(entry), "kernel").unwrap();
                Ok(String::new())
            }
        }
        if status::architecture() != "x86-64" {
            eprintln!("SKIPPED: an_older_version_comes_first_in_the_boot_menu: made for x86-64");
            return;
        }
        let signer = Signer::new(1);
        for (new, mark) in [("0.0.9", "+0-1"), ("0.2.0", "")] {
            let (root, places) = slots::tests::disk(&["nacre_0.1.0.efi"], &["0.1.0"]);
            fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
            fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
            signer.put(&places.keys());
            let file = root.path().join("bundle");
            fs::write(&file, archive(&entries(&signer, new))).unwrap();
            update(&places, &Writes(&places, new), &file, true, &mut |_| {}).unwrap();
            let mut expected = [
                format!("nacre_{new}+3-0.efi"),
                format!("nacre_0.1.0{mark}.efi"),
            ];
            expected.sort();
            assert_eq!(slots::names(&places.entries()).unwrap(), expected);
        }
    }

    /// Goal: a version that failed is not reported as installed: systemd-sysupdate would skip it.
    /// A slot that a power failure left incomplete takes the version again.
    #[test]
    fn a_version_of_the_other_slot_is_not_installed_again() {
        if status::architecture() != "x86-64" {
            eprintln!(
                "SKIPPED: a_version_of_the_other_slot_is_not_installed_again: made for x86-64"
            );
            return;
        }
        let signer = Signer::new(1);
        for (entry, versions, is_refused) in [
            ("nacre_0.2.0+0-3.efi", &["0.1.0", "0.2.0"][..], true),
            ("nacre_0.2.0+3-0.efi", &["0.1.0", "0.2.0"], true),
            ("other.efi", &["0.1.0", "0.2.0"], false),
            ("nacre_0.2.0+0-3.efi", &["0.1.0"], false),
            ("empty", &["0.1.0", "0.2.0"], false),
        ] {
            let (root, places) = slots::tests::disk(&["nacre_0.1.0.efi", entry], versions);
            let empty = places.entries().join("nacre_0.2.0+3-0.efi");
            if entry == "empty" {
                fs::write(&empty, "").unwrap();
            }
            fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
            fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
            signer.put(&places.keys());
            let file = root.path().join("bundle");
            fs::write(&file, archive(&entries(&signer, "0.2.0"))).unwrap();
            let run = Recorder::default();
            match update(&places, &run, &file, false, &mut |_| {}) {
                Ok(_) => assert!(!is_refused, "{entry}"),
                Err(UpdateError::Bundle(Installed { .. })) => assert!(is_refused, "{entry}"),
                Err(error) => panic!("{entry}: {error}"),
            }
            assert_eq!(run.taken().is_empty(), is_refused, "{entry}");
            assert!(entry != "empty" || !empty.exists());
        }
    }
}

//! Paths of the appliance below one root: `/`, or a folder in tests.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nacre_engine_values::files;

#[derive(Debug, Clone)]
pub struct Places {
    root: PathBuf,
}

impl Places {
    /// The running machine.
    pub fn system() -> Self {
        Self::below("/")
    }

    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The daemon's state and configuration.
    pub fn state(&self) -> PathBuf {
        self.at("var/lib/nacre")
    }

    /// The unpacked update bundle, which the transfer files of systemd-sysupdate name.
    pub fn updates(&self) -> PathBuf {
        self.at("var/lib/nacre/updates")
    }

    /// The state before the last restore.
    pub fn former_state(&self) -> PathBuf {
        self.at("var/lib/nacre.before-restore")
    }

    /// The appliance's own notes. Not part of an export.
    pub fn notes(&self) -> PathBuf {
        self.at("var/lib/nacre-appliance")
    }

    /// The request of the administration page for `nacre appliance obey`.
    pub fn request(&self) -> PathBuf {
        self.at("var/lib/nacre-appliance/request.json")
    }

    /// The history of changes of this machine ([`crate::acts`]).
    pub fn history(&self) -> PathBuf {
        self.at("var/lib/nacre-appliance/history.json")
    }

    /// The list of NVMe drives for vfio-pci ([`crate::drives`]).
    pub fn drives(&self) -> PathBuf {
        self.at("var/lib/nacre-appliance/drives.json")
    }

    /// The folder of the bundle that the administration page uploaded.
    pub fn uploads(&self) -> PathBuf {
        self.at("var/lib/nacre-appliance/upload")
    }

    /// The kernel's identifier of this boot.
    pub fn boot_id(&self) -> PathBuf {
        self.at("proc/sys/kernel/random/boot_id")
    }

    /// The folder of a process, which exists while it runs.
    pub fn process(&self, id: u32) -> PathBuf {
        self.at("proc").join(id.to_string())
    }

    /// Lines for the screen: why the daemon of this boot did not get ready. The image's script
    /// `restart` writes them.
    pub fn trouble(&self) -> PathBuf {
        self.at("run/nacre-trouble")
    }

    /// Public keys of bundles.
    pub fn keys(&self) -> PathBuf {
        self.at("usr/lib/nacre/keys")
    }

    /// Boot entries: one unified kernel image per version.
    pub fn entries(&self) -> PathBuf {
        self.at("boot/EFI/Linux")
    }

    /// Links of udev to partitions, by label.
    pub fn labels(&self) -> PathBuf {
        self.at("dev/disk/by-partlabel")
    }

    pub fn os_release(&self) -> PathBuf {
        self.at("usr/lib/os-release")
    }

    /// Network files of the operator.
    pub fn networks(&self) -> PathBuf {
        self.at("etc/systemd/network")
    }

    pub fn interfaces(&self) -> PathBuf {
        self.at("sys/class/net")
    }

    /// An EFI variable by name and vendor.
    pub fn efi_variable(&self, name: &str, vendor: &str) -> PathBuf {
        self.efi_variables().join(format!("{name}-{vendor}"))
    }

    pub fn efi_variables(&self) -> PathBuf {
        self.at("sys/firmware/efi/efivars")
    }

    /// The kernel's command line.
    pub fn command_line(&self) -> PathBuf {
        self.at("proc/cmdline")
    }

    /// The name that each start gives the machine.
    pub fn host_name_file(&self) -> PathBuf {
        self.at("etc/hostname")
    }

    /// The kernel's name of the machine.
    pub fn host_name(&self) -> PathBuf {
        self.at("proc/sys/kernel/hostname")
    }
}

/// Most bytes of a small text file.
const MOST_TEXT: u64 = 64 * 1024;

/// The contents of a small text file, trimmed; none if it is absent, large or not text.
pub(crate) fn small_text(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    let length = file.take(MOST_TEXT + 1).read_to_string(&mut text).ok()?;
    (length as u64 <= MOST_TEXT).then(|| text.trim().to_owned())
}

/// Text of a file from outside for a terminal, which would obey its control characters.
pub(crate) fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// Removes files and folders whose names begin with `prefix`: attempts that a power failure ended.
pub(crate) fn remove_abandoned(parent: &Path, prefix: &str) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(prefix) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Creates a folder and its parents, and keeps them through a power failure. A synced file in a
/// folder without a name on the disk would be lost with it.
pub(crate) fn create_folder(folder: &Path, mode: u32) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        create_folder(parent, mode)?;
    }
    match DirBuilder::new().mode(mode).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => {}
        other => other?,
    }
    files::sync_folder(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_is_no_small_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        for (length, is_small) in [(MOST_TEXT, true), (MOST_TEXT + 1, false)] {
            fs::write(&path, "x".repeat(length as usize)).unwrap();
            assert_eq!(small_text(&path).is_some(), is_small);
        }
    }

    #[test]
    fn only_abandoned_names_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        create_folder(&at(".new-a/b/c"), 0o700).unwrap();
        create_folder(&at("kept"), 0o700).unwrap();
        fs::write(at(".new-file"), "secret").unwrap();
        std::os::unix::fs::symlink(at("kept"), at(".new-link")).unwrap();
        remove_abandoned(folder.path(), ".new-").unwrap();
        assert_eq!(crate::slots::names(folder.path()).unwrap(), ["kept"]);
    }

    #[test]
    fn a_folder_is_created_once() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        for _ in 0..2 {
            create_folder(&folder, 0o700).unwrap();
        }
        fs::write(root.path().join("file"), "").unwrap();
        for bad in ["file", "file/x"] {
            assert!(
                create_folder(&root.path().join(bad), 0o700).is_err(),
                "{bad}"
            );
        }
    }
}

//! Paths of the appliance below one root: `/`, or a folder in tests.

use std::path::{Path, PathBuf};

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

    pub fn host_name(&self) -> PathBuf {
        self.at("proc/sys/kernel/hostname")
    }
}

/// The contents of a small text file, trimmed; none if it is absent, large or not text.
pub(crate) fn small_text(path: &Path) -> Option<String> {
    const MOST: u64 = 64 * 1024;
    let mut text = String::new();
    let file = std::fs::File::open(path).ok()?;
    let length = std::io::Read::read_to_string(&mut std::io::Read::take(file, MOST), &mut text);
    length.ok().map(|_| text.trim().to_owned())
}

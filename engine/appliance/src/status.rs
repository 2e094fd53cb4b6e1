//! The state of the appliance for people and programs: image, slots, free space.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use uuid::Uuid;

use crate::host::HostName;
use crate::place::{Places, printable, small_text};
use crate::slots::{Slot, slots};
use crate::version::Version;

/// EFI vendor of systemd-boot's variables.
const LOADER: &str = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";

#[derive(Debug, Serialize)]
pub struct Status {
    pub host: String,
    pub image: String,
    pub version: Version,
    pub slots: Vec<Slot>,
    /// The boot entry that the boot menu starts regardless of tries; set with its key `d`.
    pub pinned_entry: Option<String>,
    /// Free bytes of the partition for state.
    pub free_bytes: u64,
}

/// The identity of the running image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub id: String,
    pub version: Version,
}

#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error("{path}: no IMAGE_ID and IMAGE_VERSION; this machine is no appliance", path = path.display())]
    NoAppliance { path: PathBuf },
    #[error("{path}: IMAGE_VERSION: {source}", path = path.display())]
    Version {
        path: PathBuf,
        source: crate::version::VersionError,
    },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

pub fn image(places: &Places) -> Result<Image, StatusError> {
    let path = places.os_release();
    let text = small_text(&path).unwrap_or_default();
    let value = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.split_once('='));
        let found = lines.find(|(field, _)| *field == name);
        found.map(|(_, value)| value.trim_matches('"').to_owned())
    };
    match (value("IMAGE_ID"), value("IMAGE_VERSION")) {
        (Some(id), Some(version)) => match version.parse() {
            Ok(version) => Ok(Image { id, version }),
            Err(source) => Err(StatusError::Version { path, source }),
        },
        _ => Err(StatusError::NoAppliance { path }),
    }
}

pub fn status(places: &Places) -> Result<Status, StatusError> {
    let image = image(places)?;
    let failed = |path: PathBuf| move |source| StatusError::Io { path, source };
    Ok(Status {
        host: host_name(places),
        slots: slots(places, &image.version).map_err(failed(places.entries()))?,
        image: image.id,
        version: image.version,
        pinned_entry: pinned_entry(places),
        free_bytes: free_bytes(&places.state()).map_err(failed(places.state()))?,
    })
}

/// The cause and the consequences of a boot in which the daemon did not get ready, one text a line.
/// Empty: it got ready.
pub fn trouble(places: &Places) -> Vec<String> {
    let text = small_text(&places.trouble()).unwrap_or_default();
    text.lines().map(printable).collect()
}

/// The present name of the machine. The daemon's unit has its own copy of the kernel's name, as of
/// the daemon's start: on an appliance the file counts.
pub fn host_name(places: &Places) -> String {
    let stored = image(places)
        .ok()
        .and_then(|_| small_text(&places.host_name_file()))
        .and_then(|text| text.parse::<HostName>().ok());
    match stored {
        Some(name) => name.into(),
        None => small_text(&places.host_name()).unwrap_or_default(),
    }
}

pub fn pinned_entry(places: &Places) -> Option<String> {
    loader_text(places, "LoaderEntryDefault")
}

/// The identifier of the boot partition that systemd-boot was started from.
pub fn boot_partition(places: &Places) -> Option<Uuid> {
    loader_text(places, "LoaderDevicePartUUID")?.parse().ok()
}

/// A text variable of systemd-boot.
fn loader_text(places: &Places, name: &str) -> Option<String> {
    let bytes = std::fs::read(places.efi_variable(name, LOADER)).ok()?;
    // Four bytes of attributes, then UTF-16 with a final zero.
    let units: Vec<u16> = bytes
        .get(4..)?
        .chunks_exact(2)
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
        .take_while(|unit| *unit != 0)
        .collect();
    (!units.is_empty()).then(|| String::from_utf16_lossy(&units))
}

/// Free bytes of a folder's file system.
pub fn free_bytes(folder: &Path) -> io::Result<u64> {
    let facts = rustix::fs::statvfs(folder)?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}

/// Space that stays free beside unpacked files, for the daemon's state.
const RESERVE: u64 = 64 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    #[error("{path}: {free} bytes are free, {needed} are needed", path = path.display())]
    NoSpace {
        path: PathBuf,
        free: u64,
        needed: u64,
    },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Checks that a folder's file system has room for these bytes and the daemon.
pub(crate) fn check_space(folder: &Path, bytes: u64) -> Result<(), SpaceError> {
    let free = free_bytes(folder).map_err(|source| SpaceError::Io {
        path: folder.to_owned(),
        source,
    })?;
    check_free(folder, free, bytes.saturating_add(RESERVE))
}

pub(crate) fn check_free(folder: &Path, free: u64, needed: u64) -> Result<(), SpaceError> {
    if free >= needed {
        return Ok(());
    }
    Err(SpaceError::NoSpace {
        path: folder.to_owned(),
        free,
        needed,
    })
}

/// The machine's architecture, as systemd names it.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "x86-64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn space_is_counted_with_a_reserve() {
        let folder = tempfile::tempdir().unwrap();
        let free = free_bytes(folder.path()).unwrap();
        assert!(check_space(folder.path(), 0).is_ok());
        for bytes in [free, u64::MAX] {
            let refused = check_space(folder.path(), bytes);
            assert!(
                matches!(refused, Err(SpaceError::NoSpace { .. })),
                "{bytes}"
            );
        }
    }

    #[test]
    fn the_state_of_a_disk() {
        let (_root, places) = crate::slots::tests::disk(&["nacre_0.2.0.efi"], &["0.2.0"]);
        assert!(matches!(
            status(&places),
            Err(StatusError::NoAppliance { .. })
        ));
        fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
        fs::write(
            places.os_release(),
            "ID=debian\nIMAGE_ID=nacre\nIMAGE_VERSION=x\n",
        )
        .unwrap();
        assert!(matches!(status(&places), Err(StatusError::Version { .. })));
        let text = "ID=debian\nIMAGE_ID=\"nacre\"\nIMAGE_VERSION=0.2.0\n";
        fs::write(places.os_release(), text).unwrap();
        assert!(matches!(status(&places), Err(StatusError::Io { .. })));
        fs::create_dir_all(places.state()).unwrap();
        let found = status(&places).unwrap();
        assert_eq!((found.image.as_str(), found.slots.len()), ("nacre", 1));
        assert_eq!(found.pinned_entry, None);
        fs::create_dir_all(places.efi_variables()).unwrap();
        let mut variable = vec![7, 0, 0, 0];
        variable.extend("a.efi\0".encode_utf16().flat_map(u16::to_le_bytes));
        fs::write(places.efi_variable("LoaderEntryDefault", LOADER), variable).unwrap();
        assert_eq!(pinned_entry(&places).as_deref(), Some("a.efi"));
        assert!(trouble(&places).is_empty());
        fs::create_dir_all(places.trouble().parent().unwrap()).unwrap();
        fs::write(places.trouble(), "a \x1b[2J\nb\n").unwrap();
        assert_eq!(trouble(&places), ["a ?[2J", "b"]);
    }
}

//! Factory reset: the next boot erases the partition for state, and makes a new one.
//!
//! The request is an EFI variable that systemd-repart reads in the initrd and removes when it has
//! erased the partitions with `FactoryReset=yes`. Drives of volumes are not touched.

use std::fs;
use std::io;
use std::path::PathBuf;

use crate::lock::{Lock, LockError};
use crate::place::Places;
use crate::status;

/// EFI vendor of systemd's variables.
const SYSTEMD: &str = "8cf2644b-4b0b-428f-9387-6d876050dc67";
/// Non-volatile, accessible at boot and at run time (UEFI Specification 2.10, section 8.2).
const ATTRIBUTES: u32 = 0x7;

#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    #[error(
        "the name {typed:?} is not this machine's: type {host:?} to erase its configuration and state"
    )]
    Name { typed: String, host: String },
    #[error("{path}: this machine has no EFI variables; write the image to its disk again instead", path = path.display())]
    NoVariables { path: PathBuf },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Asks the next boot to erase the state. `typed` must be the machine's name.
pub fn request(places: &Places, typed: &str) -> Result<(), ResetError> {
    let host = status::host_name(places);
    if host.is_empty() || typed != host {
        return Err(ResetError::Name {
            typed: typed.to_owned(),
            host,
        });
    }
    let _lock = Lock::of_system(places)?;
    let folder = places.efi_variables();
    if !folder.is_dir() {
        return Err(ResetError::NoVariables { path: folder });
    }
    let path = places.efi_variable("FactoryReset", SYSTEMD);
    let mut variable = ATTRIBUTES.to_le_bytes().to_vec();
    variable.extend("1\0".encode_utf16().flat_map(u16::to_le_bytes));
    // A variable cannot be opened for writing again.
    if fs::read(&path).is_ok_and(|present| present == variable) {
        return Ok(());
    }
    // One write: the file system of variables takes a variable as a whole.
    fs::write(&path, variable).map_err(|source| ResetError::Io { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_needs_the_name_of_the_machine() {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        assert!(matches!(request(&places, ""), Err(ResetError::Name { .. })));
        fs::create_dir_all(places.host_name().parent().unwrap()).unwrap();
        fs::write(places.host_name(), "storage1\n").unwrap();
        for typed in ["", "storage", "Storage1", "storage1\n"] {
            assert!(matches!(
                request(&places, typed),
                Err(ResetError::Name { .. })
            ));
        }
        assert!(matches!(
            request(&places, "storage1"),
            Err(ResetError::NoVariables { .. })
        ));
        fs::create_dir_all(places.efi_variables()).unwrap();
        request(&places, "storage1").unwrap();
        let variable = fs::read(places.efi_variable("FactoryReset", SYSTEMD)).unwrap();
        assert_eq!(variable, [7, 0, 0, 0, b'1', 0, 0, 0]);
        request(&places, "storage1").unwrap();
    }
}

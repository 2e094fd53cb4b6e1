//! The host name of the machine. It is in `/etc/hostname`, which restarts and updates keep, and in
//! the kernel.

use std::fmt;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::lock::{Lock, LockError};
use crate::network::replace;
use crate::place::Places;

/// Most bytes of a label (RFC 1123, section 2.1), and of the whole name: the kernel takes 64.
const MAX_NAME_BYTES: usize = 63;

/// Labels of letters, digits and hyphens, in small letters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct HostName(String);

impl HostName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<HostName> for String {
    fn from(name: HostName) -> Self {
        name.0
    }
}

impl TryFrom<String> for HostName {
    type Error = HostNameError;

    fn try_from(text: String) -> Result<Self, HostNameError> {
        text.parse()
    }
}

/// The reason why a host name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct HostNameError {
    pub cause: String,
}

impl FromStr for HostName {
    type Err = HostNameError;

    fn from_str(text: &str) -> Result<Self, HostNameError> {
        let refuse = |cause: String| Err(HostNameError { cause });
        if text.is_empty() || text.len() > MAX_NAME_BYTES {
            return refuse(format!("a name has from 1 to {MAX_NAME_BYTES} characters"));
        }
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        let is_label = |label: &str| {
            let edges = [label.bytes().next(), label.bytes().last()];
            label.bytes().all(is_allowed)
                && edges.iter().all(|edge| edge.is_some_and(|b| b != b'-'))
        };
        if let Some(label) = text.split('.').find(|label| !is_label(label)) {
            return refuse(format!(
                "the label {label:?} needs letters, digits and '-', and no '-' at its ends"
            ));
        }
        let text = text.to_ascii_lowercase();
        let last = text.rsplit('.').next().unwrap_or_default();
        // Browsers take such a name for an IPv4 address.
        if last.bytes().all(|b| b.is_ascii_digit()) {
            return refuse(format!("the last label, {last:?}, needs a letter"));
        }
        // Each machine means itself by it (RFC 6761, section 6.3).
        if last == "localhost" {
            return refuse("`localhost` names every machine; choose another name".into());
        }
        Ok(Self(text))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SetNameError {
    #[error(
        "{path}: {source}; the page shows the name already, and the kernel takes it at the next start",
        path = path.display()
    )]
    Kernel { path: PathBuf, source: io::Error },
    #[error("the former name stays: {path}: {source}", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Sets the name of the machine, now and for each boot.
pub fn set(places: &Places, name: &HostName) -> Result<(), SetNameError> {
    let _lock = Lock::of_network(places)?;
    let path = places.host_name_file();
    replace(&path, &format!("{name}\n")).map_err(|source| SetNameError::File { path, source })?;
    let path = places.host_name();
    fs::write(&path, name.as_str()).map_err(|source| SetNameError::Kernel { path, source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::status::host_name as name;

    /// Goal: only names that RFC 1123 allows and that other programs take for a name. Method: a
    /// table.
    #[test]
    fn names_are_checked() {
        let longest = "a".repeat(MAX_NAME_BYTES);
        for good in [
            "nacre",
            "n",
            "storage-1",
            "3com",
            "1a.example",
            "a.b.c",
            &longest,
        ] {
            assert_eq!(good.parse::<HostName>().unwrap().as_str(), good);
        }
        assert_eq!("Storage1".parse::<HostName>().unwrap().as_str(), "storage1");
        let too_long = "a".repeat(MAX_NAME_BYTES + 1);
        for bad in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "-a",
            "a-",
            "a.-b",
            "a_b",
            "a b",
            "a\n",
            "a\0",
            "é",
            "a/b",
            "12",
            "192.0.2.7",
            "a.7",
            "localhost",
            "a.LOCALHOST",
            &too_long,
        ] {
            assert!(bad.parse::<HostName>().is_err(), "{bad:?}");
            let json = serde_json::to_string(bad).unwrap();
            assert!(serde_json::from_str::<HostName>(&json).is_err(), "{bad:?}");
        }
    }

    fn machine() -> (tempfile::TempDir, Places) {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        for path in [
            places.host_name(),
            places.host_name_file(),
            places.os_release(),
        ] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        fs::write(places.host_name(), "nacre\n").unwrap();
        fs::write(places.host_name_file(), "nacre\n").unwrap();
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        (root, places)
    }

    /// Goal: the name is in the file for the next start and in the kernel. A daemon with the former
    /// kernel's name sees the new one.
    #[test]
    fn a_name_counts_now_and_at_the_next_start() {
        let (_root, places) = machine();
        let wanted: HostName = "storage-7".parse().unwrap();
        set(&places, &wanted).unwrap();
        let stored = fs::read_to_string(places.host_name_file()).unwrap();
        assert_eq!(stored, "storage-7\n");
        let mode = fs::metadata(places.host_name_file()).unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o644);
        assert_eq!(fs::read_to_string(places.host_name()).unwrap(), "storage-7");
        fs::write(places.host_name(), "nacre").unwrap();
        assert_eq!(name(&places), "storage-7");
        // Not by files of this program: the kernel's name counts.
        fs::write(places.host_name_file(), "not a name!\n").unwrap();
        assert_eq!(name(&places), "nacre");
        fs::write(places.host_name_file(), "storage-7\n").unwrap();
        fs::remove_file(places.os_release()).unwrap();
        assert_eq!(name(&places), "nacre");
    }

    /// Goal: a failure says which name counts. Method: a folder instead of each file.
    #[test]
    fn a_failure_says_which_name_counts() {
        let wanted: HostName = "storage-7".parse().unwrap();
        let (_root, places) = machine();
        fs::remove_file(places.host_name_file()).unwrap();
        fs::create_dir_all(places.host_name_file().join("x")).unwrap();
        let error = set(&places, &wanted).unwrap_err();
        assert!(matches!(error, SetNameError::File { .. }), "{error}");
        assert_eq!(name(&places), "nacre");
        let (_root, places) = machine();
        fs::remove_file(places.host_name()).unwrap();
        fs::create_dir_all(places.host_name()).unwrap();
        let error = set(&places, &wanted).unwrap_err();
        assert!(matches!(error, SetNameError::Kernel { .. }), "{error}");
        assert_eq!(name(&places), "storage-7");
    }
}

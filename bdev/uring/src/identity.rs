//! Identifies the file or block device behind a bdev. The bdev refuses another file or disk that
//! later appears at the same path.
//!
//! An identity survives restarts, renames and other names of a block device. A copy of a file has
//! a different identity, unless its file system reports neither lasting inode numbers nor creation
//! times. The identity does not depend on the file's contents.

use std::fs::{self, File, Metadata};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The lasting attributes of a file or disk. `None` means that the system does not report the
/// attribute, or that it is not lasting (inode numbers of some file systems); a comparison skips
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    File {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        inode: Option<u64>,
        /// Creation time (`stx_btime`): seconds and nanoseconds. The inode number alone is not
        /// unique: a file system reuses it after a deletion, and other file systems use it too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        born: Option<(i64, u32)>,
    },
    Disk {
        /// The sysfs attribute that identifies the disk (`wwid`, `serial`, …), and its value. The
        /// value has the form `VALUE:PARTITION`; `PARTITION` is empty for a whole disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<(String, String)>,
    },
}

impl Identity {
    pub(crate) fn of(file: &File, metadata: &Metadata) -> Self {
        if metadata.file_type().is_block_device() {
            let id = disk_id(metadata.rdev()).map(|(attribute, id)| (attribute.to_owned(), id));
            return Self::Disk { id };
        }
        let lasting =
            rustix::fs::fstatfs(file).is_ok_and(|fs| has_lasting_inodes(fs.f_type as u64));
        Self::File {
            inode: lasting.then_some(metadata.ino()),
            born: born(file),
        }
    }

    /// Describes the difference between `found` and this identity; `None` if there is none.
    pub(crate) fn difference(&self, found: &Self) -> Option<String> {
        use Identity::{Disk, File};
        match (self, found) {
            (File { .. }, Disk { .. }) => Some("a block device, which was a file".to_owned()),
            (Disk { .. }, File { .. }) => Some("a file, which was a block device".to_owned()),
            (File { inode, born }, File { inode: i, born: b }) => match (inode, i) {
                (Some(was), Some(is)) if was != is => {
                    Some(format!("another file (inode {is}, which was {was})"))
                }
                _ if born.is_some() && b.is_some() && born != b => {
                    Some("another file (made at another time)".to_owned())
                }
                _ => None,
            },
            (Disk { id: Some(was) }, Disk { id: Some(is) }) if was.0 == is.0 && was.1 != is.1 => {
                Some(format!("another disk ({}, which was {})", is.1, was.1))
            }
            (Disk { .. }, Disk { .. }) => None,
        }
    }
}

/// False for file systems that assign new inode numbers at each mount. `kind` is the `f_type` of
/// `statfs` (linux/magic.h).
fn has_lasting_inodes(kind: u64) -> bool {
    const FUSE: u64 = 0x6573_5546;
    const FAT: u64 = 0x4d44;
    const EXFAT: u64 = 0x2011_bab0;
    const PLAN9: u64 = 0x0102_1997;
    const SMB: u64 = 0xfe53_4d42;
    const CIFS: u64 = 0xff53_4d42;
    const OVERLAY: u64 = 0x794c_7630;
    ![FUSE, FAT, EXFAT, PLAN9, SMB, CIFS, OVERLAY].contains(&(kind & 0xffff_ffff))
}

fn born(file: &File) -> Option<(i64, u32)> {
    let wanted = StatxFlags::BTIME;
    let facts = rustix::fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, wanted).ok()?;
    let known = facts.stx_mask & wanted.bits() != 0;
    known.then_some((facts.stx_btime.tv_sec, facts.stx_btime.tv_nsec))
}

/// The UUID of a bdev without a configured one. A disk's derives from its identifying sysfs
/// attribute and partition, so it is the same under any name in /dev and after restarts. A disk
/// without such an attribute has one by its path, and a file one by path and inode number.
pub(crate) fn uuid(path: &Path, metadata: &Metadata) -> Uuid {
    // Version 5 in the URL name space of RFC 9562, appendix A.
    let name = |text: String| Uuid::new_v5(&Uuid::NAMESPACE_URL, text.as_bytes());
    if !metadata.file_type().is_block_device() {
        return name(format!("nacre:file:{}:{}", path.display(), metadata.ino()));
    }
    match disk_id(metadata.rdev()) {
        Some((_, id)) => name(format!("nacre:disk:{id}")),
        None => name(format!("nacre:disk-path:{}", path.display())),
    }
}

/// The sysfs attribute that identifies the disk, and its value with the partition number. `None`:
/// the disk has none of the known attributes.
fn disk_id(rdev: u64) -> Option<(&'static str, String)> {
    /// Attributes in order of preference. Paths with `..` belong to the disk that contains a
    /// partition.
    const ATTRIBUTES: [&str; 11] = [
        "wwid",
        "device/wwid",
        "serial",
        "device/serial",
        "../wwid",
        "../device/wwid",
        "../serial",
        "../device/serial",
        "loop/backing_file",
        "dm/uuid",
        "md/uuid",
    ];
    let dir = sys_dir(rdev);
    let read = |file: &str| {
        let text = fs::read_to_string(dir.join(file)).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    };
    let mut found = ATTRIBUTES.iter().filter_map(|a| Some((*a, read(a)?)));
    let (attribute, id) = found.next()?;
    let partition = read("partition").unwrap_or_default();
    Some((attribute, format!("{id}:{partition}")))
}

/// The device's folder in sysfs.
pub(crate) fn sys_dir(rdev: u64) -> PathBuf {
    let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    fs::canonicalize(&dir).unwrap_or(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(inode: Option<u64>, born: Option<(i64, u32)>) -> Identity {
        Identity::File { inode, born }
    }

    fn disk(attribute: &str, id: &str) -> Identity {
        let id = Some((attribute.to_owned(), id.to_owned()));
        Identity::Disk { id }
    }

    /// Only what both have is compared.
    #[test]
    fn differing_fields() {
        let was = file(Some(12), Some((5, 1)));
        for same in [
            was.clone(),
            file(None, None),
            file(Some(12), None),
            file(None, Some((5, 1))),
        ] {
            assert_eq!(was.difference(&same), None, "{same:?}");
        }
        let disks = disk("wwid", "naa.1:");
        for (was, other) in [
            (&was, file(Some(13), Some((5, 1)))),
            (&was, file(Some(12), Some((5, 2)))),
            (&was, disks.clone()),
            (&disks, was.clone()),
            (&disks, disk("wwid", "naa.2:")),
            (&disks, disk("wwid", "naa.1:1")),
        ] {
            assert!(was.difference(&other).is_some(), "{was:?} {other:?}");
        }
        // Another kernel may have another attribute first.
        assert_eq!(disks.difference(&disk("serial", "1:")), None);
        assert_eq!(disks.difference(&Identity::Disk { id: None }), None);
    }

    /// The daemon's state has these texts.
    #[test]
    fn stored_text_round_trip() {
        for (identity, text) in [
            (
                file(Some(12), Some((5, 1))),
                r#"{"file":{"inode":12,"born":[5,1]}}"#,
            ),
            (file(None, None), r#"{"file":{}}"#),
            (
                disk("wwid", "naa.1:"),
                r#"{"disk":{"id":["wwid","naa.1:"]}}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&identity).unwrap(), text);
            assert_eq!(serde_json::from_str::<Identity>(text).unwrap(), identity);
        }
    }
}

//! The disks of the machine, and the reasons not to overwrite one.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use nacre_engine_values::size;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{ALIGNMENT, InstallError, Open};
use crate::place::printable;
use crate::run::Run;

const COLUMNS: &str = "NAME,PATH,TYPE,SIZE,LOG-SEC,RO,MODEL,SERIAL,FSTYPE,LABEL,PTTYPE,PARTLABEL,\
                       PARTUUID,MOUNTPOINTS";
/// Labels of Nacre's own formats: the first bytes of a block.
const LABELS: [(&[u8; 8], &str); 2] = [
    (b"NACREPOL", "part of a Nacre pool"),
    (b"NACREVOL", "replica of a Nacre volume"),
];
const BLOCK: usize = 4096;
/// Most contents of one disk that are named.
const MOST_CONTENTS: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    pub path: PathBuf,
    pub model: String,
    /// Empty: the disk reports none.
    pub serial: String,
    pub bytes: u64,
    /// Bytes of a logical sector.
    pub sector_bytes: u64,
    /// Partitions, file systems and labels on it. Empty: its first MiB is zero.
    pub contents: Vec<String>,
    /// The reason why it cannot be overwritten even with a confirmation; `None`: it can.
    pub refusal: Option<Refusal>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "reason")]
pub enum Refusal {
    #[error("this machine was started from it")]
    BootDisk,
    #[error("it is in use by {by}; unmount or stop that first")]
    InUse { by: String },
    #[error("it is read-only; remove its write protection")]
    ReadOnly,
    #[error(
        "it has {}, and the appliance needs {}; use a larger disk",
        size::bytes(*bytes),
        size::bytes(*needed)
    )]
    TooSmall { bytes: u64, needed: u64 },
    #[error(
        "its sectors have {bytes} bytes; 512 and 4096 are supported: choose another format with \
         `nvme format`, or another disk"
    )]
    Sectors { bytes: u64 },
    #[error("it reports no serial number, so it cannot be named; use another disk or adapter")]
    NoSerial,
    #[error("{other} has the same serial number; detach one of them", other = other.display())]
    SameSerial { other: PathBuf },
    #[error("it cannot be read: {cause}; check its cable, or use another disk")]
    Unreadable { cause: String },
}

#[derive(Debug)]
pub(super) struct Inventory {
    nodes: Vec<Node>,
    /// The boot partition that the firmware started from.
    esp: Uuid,
}

#[derive(Debug, Deserialize)]
struct Listing {
    blockdevices: Vec<Node>,
}

/// A line of `lsblk`: a disk, a partition, or a device that holds one.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Node {
    name: String,
    path: PathBuf,
    #[serde(rename = "type")]
    kind: String,
    size: u64,
    log_sec: u64,
    ro: bool,
    model: Option<String>,
    serial: Option<String>,
    fstype: Option<String>,
    label: Option<String>,
    pttype: Option<String>,
    partlabel: Option<String>,
    partuuid: Option<String>,
    mountpoints: Vec<Option<String>>,
    children: Vec<Self>,
}

impl Inventory {
    pub(super) fn read(run: &impl Run, esp: Uuid) -> Result<Self, InstallError> {
        let arguments = ["--json", "--bytes", "--tree", "--output", COLUMNS];
        let text = run.run("lsblk", &arguments).map_err(InstallError::List)?;
        let listing: Listing = serde_json::from_str(&text)?;
        let is_disk = |node: &Node| node.kind == "disk" && !node.name.starts_with("zram");
        Ok(Self {
            nodes: listing.blockdevices.into_iter().filter(is_disk).collect(),
            esp,
        })
    }

    fn is_boot_disk(&self, disk: &Node) -> bool {
        disk.children.iter().any(|part| part.has_id(self.esp))
    }

    /// The disk that the firmware started from.
    pub(super) fn boot_disk(&self) -> Result<&Path, InstallError> {
        let mut found = self.nodes.iter().filter(|disk| self.is_boot_disk(disk));
        let failed = |cause, remedy| InstallError::BootDisk { cause, remedy };
        let disk = found.next().ok_or_else(|| {
            let cause = format!("no disk has the partition {}", self.esp);
            failed(cause, "plug the USB disk in again, and start from it")
        })?;
        match found.next() {
            None => Ok(&disk.path),
            Some(other) => {
                let (one, two) = (disk.path.display(), other.path.display());
                let cause = format!("{one} and {two} are copies of one image");
                Err(failed(cause, "detach one of them, and start again"))
            }
        }
    }

    pub(super) fn identifier_of_boot_partition(&self) -> Uuid {
        self.esp
    }

    /// A partition of the boot disk by its identifier.
    pub(super) fn boot_partition(&self, id: Uuid) -> Option<&Path> {
        let disk = self.nodes.iter().find(|disk| self.is_boot_disk(disk))?;
        let part = disk.children.iter().find(|part| part.has_id(id))?;
        Some(&part.path)
    }

    /// All disks; one with fewer than `needed` bytes cannot be overwritten.
    pub(super) fn disks(&self, open: &impl Open, needed: u64) -> Vec<Disk> {
        let disks = self.nodes.iter();
        disks.map(|node| self.disk(node, open, needed)).collect()
    }

    fn disk(&self, node: &Node, open: &impl Open, needed: u64) -> Disk {
        let mut refusal = self.refusal(node, needed);
        let mut contents = Vec::new();
        node.describe(&mut contents);
        if refusal.is_none() {
            match first_bytes(open, &node.path) {
                Ok(bytes) => contents.extend(unlisted(&bytes, contents.is_empty())),
                Err(error) => {
                    let cause = error.to_string();
                    refusal = Some(Refusal::Unreadable { cause });
                }
            }
        }
        let more = contents.len().saturating_sub(MOST_CONTENTS);
        if more > 0 {
            contents.truncate(MOST_CONTENTS);
            contents.push(format!("and {more} more"));
        }
        Disk {
            path: node.path.clone(),
            model: text(node.model.as_deref()),
            serial: text(node.serial.as_deref()),
            bytes: node.size,
            sector_bytes: node.log_sec,
            contents,
            refusal,
        }
    }

    fn refusal(&self, node: &Node, needed: u64) -> Option<Refusal> {
        if self.is_boot_disk(node) {
            return Some(Refusal::BootDisk);
        }
        if let Some(by) = node.user() {
            return Some(Refusal::InUse { by });
        }
        if node.ro {
            return Some(Refusal::ReadOnly);
        }
        if node.size < needed {
            let bytes = node.size;
            return Some(Refusal::TooSmall { bytes, needed });
        }
        if ![512, 4096].contains(&node.log_sec) {
            let bytes = node.log_sec;
            return Some(Refusal::Sectors { bytes });
        }
        let serial = text(node.serial.as_deref());
        if serial.is_empty() {
            return Some(Refusal::NoSerial);
        }
        let is_other =
            |other: &&Node| other.path != node.path && text(other.serial.as_deref()) == serial;
        self.nodes.iter().find(is_other).map(|other| {
            let other = other.path.clone();
            Refusal::SameSerial { other }
        })
    }
}

impl Node {
    fn has_id(&self, id: Uuid) -> bool {
        let own = self.partuuid.as_deref().and_then(|own| own.parse().ok());
        own == Some(id)
    }

    /// The user of this disk or partition: a mount, or a device on top of it.
    fn user(&self) -> Option<String> {
        if let Some(mount) = self.mountpoints.iter().flatten().next() {
            return Some(format!("{} ({})", self.name, printable(mount)));
        }
        let held = |child: &Self| match child.kind.as_str() {
            "part" => child.user(),
            kind => Some(format!("{} ({kind})", child.name)),
        };
        self.children.iter().find_map(held)
    }

    /// Appends a text for each thing on this disk that the kernel's tools know.
    fn describe(&self, contents: &mut Vec<String>) {
        if let Some(table) = &self.pttype {
            contents.push(format!("{} partition table", text(Some(table))));
        }
        if let Some(kind) = &self.fstype {
            let labels = [self.partlabel.as_deref(), self.label.as_deref()];
            let label = text(labels.into_iter().flatten().next());
            let name = if label.is_empty() { &self.name } else { &label };
            contents.push(format!("{name} ({})", text(Some(kind))));
        } else if self.kind == "part" {
            let label = text(self.partlabel.as_deref());
            let name = if label.is_empty() { &self.name } else { &label };
            contents.push(name.clone());
        }
        for part in self.children.iter().filter(|child| child.kind == "part") {
            part.describe(contents);
        }
    }
}

/// A value of a device, for a terminal and for a comparison with a typed text.
fn text(value: Option<&str>) -> String {
    printable(value.unwrap_or_default().trim())
}

fn first_bytes(open: &impl Open, path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open.read(path)?.take(ALIGNMENT).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Contents of the first MiB that `lsblk` does not know.
fn unlisted(bytes: &[u8], is_empty: bool) -> Vec<String> {
    let mut found: Vec<String> = LABELS
        .iter()
        .filter(|(label, _)| bytes.chunks(BLOCK).any(|block| block.starts_with(*label)))
        .map(|(_, name)| (*name).to_owned())
        .collect();
    if is_empty && found.is_empty() && bytes.iter().any(|byte| *byte != 0) {
        found.push("data of an unknown kind".into());
    }
    found
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        write!(f, "{name}, ")?;
        if !self.model.is_empty() {
            write!(f, "{}, ", self.model)?;
        }
        f.write_str(&size::bytes(self.bytes))
    }
}

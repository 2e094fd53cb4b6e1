//! Detects users of a drive (mounts, swap, device mapper and others), so that a drive in use is
//! never bound to vfio-pci.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;

use serde::Serialize;

use super::{Drive, System};

/// One use of a disk or partition (`device`, by its kernel name). A drive with one is not bound to
/// vfio-pci.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "use", rename_all = "snake_case")]
pub enum Use {
    Mounted {
        device: String,
        at: String,
        filesystem: String,
    },
    Swap {
        device: String,
    },
    /// Another kernel device uses it: RAID, LVM, encryption.
    Holder {
        device: String,
        holder: String,
        kind: &'static str,
    },
    /// It has the marks of an inactive RAID, LVM volume group or swap space (`kind`).
    PartOf {
        device: String,
        kind: &'static str,
    },
    /// A process or a part of the kernel has opened it exclusively.
    Exclusive {
        device: String,
    },
    Open {
        device: String,
        pid: u32,
        program: String,
    },
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted {
                device,
                at,
                filesystem,
            } => write!(f, "{device} is mounted at {at} ({filesystem})"),
            Self::Swap { device } => write!(f, "{device} is swap space"),
            Self::Holder {
                device,
                holder,
                kind,
            } => write!(f, "{device} is part of {holder} ({kind})"),
            Self::PartOf { device, kind } => {
                write!(f, "{device} is marked as part of an inactive {kind}")
            }
            Self::Exclusive { device } => write!(f, "{device} is in exclusive use"),
            Self::Open {
                device,
                pid,
                program,
            } => write!(f, "{device} is open in {program} (process {pid})"),
        }
    }
}

/// Most processes to search. On a machine with more, the search is incomplete; exclusive users of a
/// disk are detected in another way.
const PROCESSES_MAX: usize = 65_536;

impl System {
    /// All users of the drive's disks.
    pub fn uses(&self, drive: &Drive) -> Vec<Use> {
        let disks = drive.disks.iter();
        let devices: Vec<String> = disks
            .flat_map(|disk| self.with_partitions(&disk.name))
            .collect();
        self.uses_of(&devices, true)
    }

    /// All users of these block devices, by their names. `exclusive`: also those that only an
    /// exclusive open finds, which keeps others out for a moment.
    pub(super) fn uses_of(&self, devices: &[String], exclusive: bool) -> Vec<Use> {
        if devices.is_empty() {
            return Vec::new();
        }
        let mut uses = self.mounts(devices);
        uses.extend(self.swaps(devices));
        for device in devices {
            let holders = self.holders(device);
            let is_held = !holders.is_empty();
            uses.extend(holders);
            if let (false, Some(kind)) = (is_held, self.signature(device)) {
                uses.push(Use::PartOf {
                    device: device.clone(),
                    kind,
                });
            }
        }
        uses.extend(self.openers(devices));
        for device in devices {
            let known = uses.iter().any(|known| known.device() == device);
            if exclusive && !known && self.is_exclusive(device) {
                uses.push(Use::Exclusive {
                    device: device.clone(),
                });
            }
        }
        uses
    }

    pub(super) fn with_partitions(&self, disk: &str) -> Vec<String> {
        let mut devices = vec![disk.to_owned()];
        devices.extend(self.partitions(disk));
        devices
    }

    pub(super) fn partitions(&self, disk: &str) -> Vec<String> {
        let at = format!("sys/class/block/{disk}");
        let is_partition = |name: &String| self.path(&format!("{at}/{name}/partition")).exists();
        let mut names = self.entries(&at);
        names.retain(is_partition);
        names
    }

    /// Lists the mounts of devices in every mount namespace: a container's mounts are visible
    /// only in its own namespace.
    fn mounts(&self, devices: &[String]) -> Vec<Use> {
        let numbers: Vec<Option<String>> = devices
            .iter()
            .map(|device| self.text(&format!("sys/class/block/{device}/dev")))
            .collect();
        let mut namespaces = HashSet::new();
        let mut uses: Vec<Use> = Vec::new();
        for pid in self.processes() {
            let namespace = fs::read_link(self.path(&format!("proc/{pid}/ns/mnt"))).ok();
            if namespace.is_some_and(|namespace| !namespaces.insert(namespace)) {
                continue;
            }
            let table = self
                .text(&format!("proc/{pid}/mountinfo"))
                .unwrap_or_default();
            for line in table.lines() {
                let Some(mount) = Mount::parse(line) else {
                    continue;
                };
                // A file system on several devices has its own device number, and one of the
                // devices as its source.
                let at = (0..devices.len()).find(|&at| {
                    numbers[at].as_deref() == Some(mount.number)
                        || mount.source.strip_prefix("/dev/") == Some(&devices[at])
                });
                if let Some(at) = at {
                    let found = Use::Mounted {
                        device: devices[at].clone(),
                        at: unescaped(mount.at),
                        filesystem: mount.filesystem.to_owned(),
                    };
                    if !uses.contains(&found) {
                        uses.push(found);
                    }
                }
            }
        }
        uses
    }

    fn swaps(&self, devices: &[String]) -> Vec<Use> {
        let table = self.text("proc/swaps").unwrap_or_default();
        let is_ours = |line: &str| {
            let name = line.split_whitespace().next()?.strip_prefix("/dev/")?;
            devices.iter().find(|device| *device == name)
        };
        table
            .lines()
            .skip(1)
            .filter_map(is_ours)
            .map(|device| Use::Swap {
                device: device.clone(),
            })
            .collect()
    }

    fn holders(&self, device: &str) -> Vec<Use> {
        let describe = |name: String| {
            let attribute =
                |file: &str| self.text(&format!("sys/class/block/{device}/holders/{name}/{file}"));
            let (holder, kind) = match (attribute("md/level"), attribute("dm/uuid")) {
                (Some(_), _) => (name, "md RAID"),
                (None, Some(uuid)) => {
                    let kind = match uuid.split('-').next() {
                        Some("LVM") => "LVM",
                        Some("CRYPT") => "encryption",
                        Some("mpath") => "multipath",
                        _ => "device mapper",
                    };
                    (attribute("dm/name").unwrap_or(name), kind)
                }
                (None, None) if name.starts_with("md") => (name, "md RAID"),
                (None, None) => (name, "another block device"),
            };
            Use::Holder {
                device: device.to_owned(),
                holder,
                kind,
            }
        };
        self.entries(&format!("sys/class/block/{device}/holders"))
            .into_iter()
            .map(describe)
            .collect()
    }

    /// Finds the marks of tools on a disk. An inactive RAID, volume group or swap space has no
    /// holder, and its disk is in use nevertheless.
    fn signature(&self, device: &str) -> Option<&'static str> {
        let file = fs::File::open(self.path(&format!("dev/{device}"))).ok()?;
        let has = |offset: u64, mark: &[u8]| {
            let mut bytes = vec![0; mark.len()];
            file.read_exact_at(&mut bytes, offset).is_ok() && bytes == mark
        };
        const MD: [u8; 4] = 0xa92b_4efc_u32.to_le_bytes();
        let sectors: Option<u64> = self
            .text(&format!("sys/class/block/{device}/size"))
            .and_then(|text| text.parse().ok());
        let bytes = sectors.unwrap_or(0).saturating_mul(512);
        // Versions 1.1 and 1.2 are at the start, 1.0 and 0.90 at the end.
        let mut raid = vec![0, 4096];
        raid.extend(bytes.checked_sub(8192).map(|at| at / 4096 * 4096));
        raid.extend(bytes.checked_sub(65_536).map(|at| at / 65_536 * 65_536));
        if raid.into_iter().any(|at| has(at, &MD)) {
            return Some("md RAID");
        }
        if (0..4).any(|sector| has(sector * 512, b"LABELONE")) {
            return Some("LVM volume group");
        }
        // At the end of the first page; the page size is unknown.
        let pages = [4096, 16_384, 65_536];
        pages
            .into_iter()
            .any(|page| has(page - 10, b"SWAPSPACE2"))
            .then_some("swap space")
    }

    pub(super) fn openers(&self, devices: &[String]) -> Vec<Use> {
        let mut uses: Vec<Use> = Vec::new();
        for pid in self.processes() {
            for target in self.open_files(pid) {
                let Some(name) = target.strip_prefix("/dev/") else {
                    continue;
                };
                if !devices.iter().any(|device| device == name) {
                    continue;
                }
                let found = Use::Open {
                    device: name.to_owned(),
                    pid,
                    program: self.program(pid),
                };
                if !uses.contains(&found) {
                    uses.push(found);
                }
            }
        }
        uses
    }

    /// The process that has a VFIO group open, as text.
    pub(crate) fn group_user(&self, node: &str) -> Option<String> {
        let path = format!("/dev/vfio/{node}");
        let pid = self
            .processes()
            .into_iter()
            .find(|&pid| self.open_files(pid).contains(&path))?;
        Some(format!("{} (process {pid})", self.program(pid)))
    }

    fn is_exclusive(&self, device: &str) -> bool {
        let opened = self
            .kernel
            .open_exclusively(&self.path(&format!("dev/{device}")));
        opened.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    }

    fn processes(&self) -> Vec<u32> {
        self.entries("proc")
            .iter()
            .filter_map(|name| name.parse().ok())
            .take(PROCESSES_MAX)
            .collect()
    }

    fn open_files(&self, pid: u32) -> Vec<String> {
        let entries = fs::read_dir(self.path(&format!("proc/{pid}/fd")));
        entries
            .into_iter()
            .flatten()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .filter_map(|target| target.into_os_string().into_string().ok())
            .collect()
    }

    fn program(&self, pid: u32) -> String {
        self.text(&format!("proc/{pid}/comm"))
            .unwrap_or_else(|| "a program".into())
    }
}

impl Use {
    /// True if udev has the disk open. udev closes a disk within a second, and changes nothing on
    /// it.
    pub(super) fn is_by_udev(&self) -> bool {
        let Self::Open { program, .. } = self else {
            return false;
        };
        matches!(
            program.as_str(),
            "(udev-worker)" | "systemd-udevd" | "udevd"
        )
    }

    pub(super) fn device(&self) -> &str {
        match self {
            Self::Mounted { device, .. }
            | Self::Swap { device }
            | Self::Holder { device, .. }
            | Self::PartOf { device, .. }
            | Self::Exclusive { device }
            | Self::Open { device, .. } => device,
        }
    }
}

/// A line of mountinfo (proc(5)).
struct Mount<'a> {
    number: &'a str,
    at: &'a str,
    filesystem: &'a str,
    source: &'a str,
}

impl Mount<'_> {
    fn parse(line: &str) -> Option<Mount<'_>> {
        let (mount, rest) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(2);
        let number = words.next()?;
        let at = words.nth(1)?;
        let mut rest = rest.split(' ');
        Some(Mount {
            number,
            at,
            filesystem: rest.next()?,
            source: rest.next()?,
        })
    }
}

/// The kernel writes white space in names as `\040`.
fn unescaped(text: &str) -> String {
    text.replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}

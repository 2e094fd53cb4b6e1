//! The bay of a disk, and its locate light, by one of three interfaces of the kernel:
//!
//! ```text
//!   sys/class/leds/FUNCTION:enclosure:locate/brightness    native PCIe enclosure management
//!   sys/bus/pci/slots/SLOT/attention                       attention indicator of a hot-plug slot
//!   sys/class/enclosure/ENCLOSURE/BAY/locate               an enclosure of SCSI (SES)
//! ```
//!
//! The first one belongs to a PCI function, or to the port that the function is plugged into. A
//! slot names the device in it. The third one belongs to a disk or a function. The lights of
//! bridges further up do not count: several drives may be below a switch.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Serialize;

use super::{Address, DEVICES, System};

const SLOTS: &str = "sys/bus/pci/slots";
const LEDS: &str = "sys/class/leds";
const ENCLOSURES: &str = "sys/class/enclosure";
const BLOCK: &str = "sys/class/block";

/// A disk by its PCI address, or by its name as a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskName {
    Pci(Address),
    Block(String),
}

impl fmt::Display for DiskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pci(address) => address.fmt(f),
            Self::Block(name) => f.write_str(name),
        }
    }
}

impl DiskName {
    /// The disk of a device node, also by a link such as those of /dev/disk/by-id. `dev` is the
    /// folder of the nodes. `None`: `node` is elsewhere, or names no disk.
    pub fn of_node(dev: &Path, node: &Path) -> io::Result<Option<Self>> {
        if !node.starts_with(dev) {
            return Ok(None);
        }
        let (dev, node) = (dev.canonicalize()?, node.canonicalize()?);
        let name = node.strip_prefix(dev).ok().and_then(Path::to_str);
        Ok(name.and_then(|name| name.parse().ok()))
    }
}

/// The text is neither a PCI address nor the name of a block device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is neither a PCI address (0000:5e:00.0) nor a block device (/dev/sda)")]
pub struct DiskNameError(String);

impl FromStr for DiskName {
    type Err = DiskNameError;

    fn from_str(text: &str) -> Result<Self, DiskNameError> {
        if let Ok(address) = text.parse() {
            return Ok(Self::Pci(address));
        }
        let name = text.strip_prefix("/dev/").unwrap_or(text);
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if name.is_empty() || name.len() > 32 || !name.bytes().all(is_allowed) {
            return Err(DiskNameError(text.to_owned()));
        }
        Ok(Self::Block(name.to_owned()))
    }
}

/// The interface of a locate light.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BayKind {
    Npem,
    Slot,
    Enclosure,
}

/// A bay with a locate light.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bay {
    pub kind: BayKind,
    /// The kernel's name of the bay: a slot's number, or enclosure and bay.
    pub name: String,
    /// True if the light is on.
    pub lit: bool,
    #[serde(skip)]
    file: String,
}

#[derive(Debug, thiserror::Error)]
pub enum BayError {
    #[error("this machine has no disk {0}; `nacre nvme list` and `lsblk` show the disks")]
    NoDisk(DiskName),
    #[error(
        "the kernel shows no light of the bay of {0}: no PCIe enclosure management, no slot with an attention \
         indicator, no enclosure; look for its serial number on the disks"
    )]
    NoLight(DiskName),
    #[error("{path}: this process may not switch the light: {source}", path = path.display())]
    NotPermitted { path: PathBuf, source: io::Error },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl System {
    /// The bay of a disk.
    pub fn bay(&self, disk: &DiskName) -> Result<Bay, BayError> {
        let (folder, address) = self.device(disk)?;
        let of_function = address.and_then(|address| self.bay_of_function(address, &folder));
        of_function
            .or_else(|| self.bay_of_enclosure(&folder))
            .ok_or_else(|| BayError::NoLight(disk.clone()))
    }

    /// Switches the light of a disk's bay; returns the bay.
    pub fn locate(&self, disk: &DiskName, on: bool) -> Result<Bay, BayError> {
        let bay = self.bay(disk)?;
        let path = self.path(&bay.file);
        let text = if on { "1" } else { "0" };
        match self.kernel.write(&path, text) {
            Ok(()) => Ok(Bay { lit: on, ..bay }),
            Err(source)
                if matches!(
                    source.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                Err(BayError::NotPermitted { path, source })
            }
            Err(source) => Err(BayError::Io { path, source }),
        }
    }

    /// The folder of the device below a disk, and its address if it is a PCI function.
    fn device(&self, disk: &DiskName) -> Result<(PathBuf, Option<Address>), BayError> {
        let none = |_| BayError::NoDisk(disk.clone());
        let name = match disk {
            DiskName::Pci(address) => {
                let folder = self.path(&format!("{DEVICES}/{address}"));
                return Ok((folder.canonicalize().map_err(none)?, Some(*address)));
            }
            DiskName::Block(name) => name,
        };
        let mut folder = self.path(&format!("{BLOCK}/{name}")).canonicalize();
        if let Ok(partition) = &folder
            && partition.join("partition").exists()
            && let Some(whole) = partition.parent()
        {
            folder = Ok(whole.to_owned());
        }
        let folder = folder.map_err(none)?;
        let whole = folder.file_name().unwrap_or_default().to_string_lossy();
        // A disk of NVMe with several paths does not lead to its function.
        let mut drives = self.drives().into_iter();
        if let Some(drive) = drives.find(|drive| drive.disks.iter().any(|d| d.name == *whole)) {
            return self.device(&DiskName::Pci(drive.address));
        }
        // A virtual disk has no device.
        let device = folder.join("device").canonicalize();
        Ok((device.unwrap_or(folder), None))
    }

    /// By the function, or by its port.
    fn bay_of_function(&self, address: Address, folder: &Path) -> Option<Bay> {
        let port = folder.parent().and_then(Path::file_name);
        let port = port.and_then(|port| port.to_str()?.parse::<Address>().ok());
        let npem = [Some(address), port].into_iter().flatten().map(|function| {
            let led = format!("{function}:enclosure:locate");
            (
                BayKind::Npem,
                function.to_string(),
                format!("{LEDS}/{led}/brightness"),
            )
        });
        // A slot holds a device with all its functions.
        let function = address.to_string();
        let device = function.rsplit_once('.').map_or("", |(device, _)| device);
        let slots = self.entries(SLOTS).into_iter().filter(|slot| {
            let held = self.text(&format!("{SLOTS}/{slot}/address"));
            held.as_deref() == Some(device)
        });
        let slots = slots.map(|slot| {
            let attention = format!("{SLOTS}/{slot}/attention");
            (BayKind::Slot, slot, attention)
        });
        npem.chain(slots).find_map(|light| self.light(light))
    }

    fn bay_of_enclosure(&self, folder: &Path) -> Option<Bay> {
        self.entries(ENCLOSURES).iter().find_map(|enclosure| {
            let bays = self.entries(&format!("{ENCLOSURES}/{enclosure}"));
            bays.iter().find_map(|bay| {
                let at = format!("{ENCLOSURES}/{enclosure}/{bay}");
                let device = self.path(&format!("{at}/device")).canonicalize().ok()?;
                let name = format!("{enclosure} {bay}");
                (device == folder)
                    .then(|| self.light((BayKind::Enclosure, name, format!("{at}/locate"))))?
            })
        })
    }

    /// A light that exists, with its state.
    fn light(&self, (kind, name, file): (BayKind, String, String)) -> Option<Bay> {
        let state = self.text(&file)?;
        Some(Bay {
            kind,
            name,
            // An attention indicator blinks with 2.
            lit: state != "0",
            file,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::testing::Machine;
    use super::*;

    const DRIVE: &str = "0000:01:00.0";
    const BRIDGE: &str = "0000:00:1c.0";
    /// The ports of a switch, upstream and downstream.
    const SWITCH: [&str; 2] = ["0000:04:00.0", "0000:05:00.0"];

    /// The usual machine, whose first drive is behind a bridge as the kernel shows it.
    fn machine() -> Machine {
        machine_behind(BRIDGE)
    }

    /// `bridges`: from the root port down.
    fn machine_behind(bridges: &str) -> Machine {
        let machine = Machine::usual();
        let real = format!("sys/devices/pci0000:00/{bridges}/{DRIVE}");
        let path = machine.path(&real);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::rename(machine.path(&format!("{DEVICES}/{DRIVE}")), &path).unwrap();
        machine.link(
            &format!("{DEVICES}/{DRIVE}"),
            &format!("../../../../{real}"),
        );
        machine
    }

    fn name(text: &str) -> DiskName {
        text.parse().unwrap()
    }

    fn found(machine: &Machine, disk: &str) -> Option<(BayKind, String, bool)> {
        match machine.system().bay(&name(disk)) {
            Ok(bay) => Some((bay.kind, bay.name, bay.lit)),
            Err(BayError::NoLight(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn disks_have_names() {
        assert_eq!(name("5e:00.0").to_string(), "0000:5e:00.0");
        for good in ["sda", "/dev/sda", "nvme0n1", "dm-0"] {
            assert!(matches!(name(good), DiskName::Block(_)), "{good}");
        }
        for bad in [
            "",
            "/dev/",
            "../x",
            "/dev/disk/by-id/x",
            "a b",
            &"a".repeat(33),
        ] {
            assert!(bad.parse::<DiskName>().is_err(), "{bad:?}");
        }
    }

    /// Goal: the light of a drive is found by each interface, and the function's comes first.
    /// Method: a machine without lights gets one after the other.
    #[test]
    fn a_drive_has_a_light() {
        let machine = machine();
        assert_eq!(found(&machine, DRIVE), None);
        let bridge_led = format!("{LEDS}/{BRIDGE}:enclosure:locate/brightness");
        machine.file(&format!("{SLOTS}/7/address"), "0000:02:00\n");
        machine.file(&format!("{SLOTS}/7/attention"), "0\n");
        machine.file(&format!("{SLOTS}/3/address"), "0000:01:00\n");
        // A slot without an indicator.
        assert_eq!(found(&machine, DRIVE), None);
        machine.file(&format!("{SLOTS}/3/attention"), "2\n");
        assert_eq!(
            found(&machine, DRIVE),
            Some((BayKind::Slot, "3".into(), true))
        );
        for disk in ["nvme0n1", "/dev/nvme0n2"] {
            assert_eq!(found(&machine, disk), found(&machine, DRIVE), "{disk}");
        }
        let other = Some((BayKind::Slot, "7".into(), false));
        assert_eq!(found(&machine, "0000:02:00.0"), other);
        assert_eq!(found(&machine, "nvme1n1"), other);
        machine.file(&bridge_led, "0\n");
        let npem = |of: &str| Some((BayKind::Npem, of.to_owned(), false));
        assert_eq!(found(&machine, DRIVE), npem(BRIDGE));
        machine.file(
            &format!("{LEDS}/{DRIVE}:enclosure:locate/brightness"),
            "0\n",
        );
        assert_eq!(found(&machine, DRIVE), npem(DRIVE));
        assert_eq!(found(&machine, "0000:02:00.0"), other);
    }

    /// Goal: the bay of a switch is no bay of the drives below it. Method: lights of the root port,
    /// of the switch and of its slot, then one of the drive's own port.
    #[test]
    fn the_light_of_a_switch_is_not_that_of_a_drive() {
        let [upstream, downstream] = SWITCH;
        let machine = machine_behind(&format!("{BRIDGE}/{upstream}/{downstream}"));
        for bridge in [BRIDGE, upstream] {
            let led = format!("{LEDS}/{bridge}:enclosure:locate/brightness");
            machine.file(&led, "0\n");
        }
        machine.file(&format!("{SLOTS}/4/address"), "0000:04:00\n");
        machine.file(&format!("{SLOTS}/4/attention"), "0\n");
        let refused = machine.system().locate(&name(DRIVE), true).unwrap_err();
        assert!(matches!(refused, BayError::NoLight(_)), "{refused}");
        assert_eq!(machine.writes_to(""), [""; 0]);
        let led = format!("{LEDS}/{downstream}:enclosure:locate/brightness");
        machine.file(&led, "0\n");
        let own = Some((BayKind::Npem, downstream.to_owned(), false));
        assert_eq!(found(&machine, DRIVE), own);
    }

    /// Goal: a disk of an enclosure has the light of its bay, its partitions too; another one has
    /// none.
    #[test]
    fn a_disk_of_an_enclosure_has_a_light() {
        let machine = Machine::usual();
        for (disk, target) in [("sda", "0:0:1:0"), ("sdb", "0:0:2:0")] {
            let at = format!("sys/devices/{target}");
            machine.file(&format!("{at}/block/{disk}/size"), "8\n");
            machine.link(&format!("{at}/block/{disk}/device"), "../..");
            machine.link(
                &format!("{BLOCK}/{disk}"),
                &format!("../../devices/{target}/block/{disk}"),
            );
        }
        machine.file("sys/devices/0:0:1:0/block/sda/sda1/partition", "1\n");
        machine.link(
            &format!("{BLOCK}/sda1"),
            "../../devices/0:0:1:0/block/sda/sda1",
        );
        machine.file("sys/devices/virtual/block/dm-0/size", "8\n");
        machine.link(&format!("{BLOCK}/dm-0"), "../../devices/virtual/block/dm-0");
        let bay = format!("{ENCLOSURES}/0:0:0:0/Slot 01");
        machine.file(&format!("{bay}/locate"), "0\n");
        machine.file(&format!("{ENCLOSURES}/0:0:0:0/Slot 02/locate"), "0\n");
        machine.link(&format!("{bay}/device"), "../../../../devices/0:0:1:0");
        let expected = Some((BayKind::Enclosure, "0:0:0:0 Slot 01".to_owned(), false));
        assert_eq!(found(&machine, "sda"), expected);
        assert_eq!(found(&machine, "/dev/sda1"), expected);
        assert_eq!(found(&machine, "sdb"), None);
        assert_eq!(found(&machine, "dm-0"), None);
        let system = machine.system();
        assert!(system.locate(&name("sda"), true).unwrap().lit);
        assert!(system.bay(&name("sda")).unwrap().lit);
        assert!(!system.locate(&name("sda1"), false).unwrap().lit);
        assert!(!system.bay(&name("sda")).unwrap().lit);
        assert_eq!(machine.writes_to("Slot 01/locate"), ["1", "0"]);
    }

    /// Goal: each failure has its own error, and says what to do. Method: no disk, no light, and a
    /// kernel that refuses.
    #[test]
    fn failures_have_a_cause() {
        let machine = machine();
        let system = machine.system();
        for unknown in ["sdz", "0000:09:00.0"] {
            let error = system.locate(&name(unknown), true).unwrap_err();
            assert!(matches!(error, BayError::NoDisk(_)), "{error}");
        }
        let error = system.locate(&name("nvme0n1"), true).unwrap_err();
        assert!(matches!(error, BayError::NoLight(_)), "{error}");
        assert!(error.to_string().contains("serial number"), "{error}");
        machine.file(&format!("{SLOTS}/3/address"), "0000:01:00\n");
        machine.file(&format!("{SLOTS}/3/attention"), "0\n");
        for (kind, is_right) in [
            (io::ErrorKind::PermissionDenied, true),
            (io::ErrorKind::ReadOnlyFilesystem, true),
            (io::ErrorKind::TimedOut, false),
        ] {
            machine
                .kernel
                .refuse
                .lock()
                .insert("attention".into(), kind);
            let error = system.locate(&name(DRIVE), true).unwrap_err();
            let is_permission = matches!(error, BayError::NotPermitted { .. });
            assert_eq!(is_permission, is_right, "{error}");
        }
        assert!(!system.bay(&name(DRIVE)).unwrap().lit);
    }
}

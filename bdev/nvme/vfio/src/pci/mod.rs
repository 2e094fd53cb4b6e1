//! The NVMe PCI functions of this machine and their kernel drivers, read from sysfs and /proc.
//!
//! Everything is read from files below one root, and every change of the machine goes through
//! [`Kernel`], so that a test can simulate a machine in a folder.

mod address;
mod bay;
mod bind;
mod disks;
mod drive;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod usage;

use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

pub use address::{Address, AddressError};
pub use bay::{Bay, BayError, BayKind, DiskName, DiskNameError};
pub use bind::{Bound, Options, Unbound};
pub use disks::MachineDisk;
pub use drive::{Controller, Disk, Drive, Driver, Iommu, Member};
pub use error::PciError;
pub use usage::Use;

/// NVM Express I/O controllers: base class 01h, sub-class 08h, interface 02h.
const NVME_CLASS: &str = "0x010802";
const DEVICES: &str = "sys/bus/pci/devices";
const DRIVERS: &str = "sys/bus/pci/drivers";
pub(crate) const VFIO_PCI: &str = "vfio-pci";

/// Changes of a machine, and queries that its files do not answer.
pub trait Kernel: Send + Sync {
    fn write(&self, file: &Path, text: &str) -> io::Result<()>;
    /// Loads a module; the error is the output of modprobe.
    fn modprobe(&self, module: &str) -> Result<(), String>;
    /// Opens a block device exclusively; fails with `ResourceBusy` if it has a user.
    fn open_exclusively(&self, device: &Path) -> io::Result<()>;
    /// Opens a VFIO group, which only one process may have open.
    fn open_group(&self, group: &Path) -> io::Result<()>;
    fn pause(&self, time: Duration);
}

/// The real machine.
struct Real;

impl Kernel for Real {
    fn write(&self, file: &Path, text: &str) -> io::Result<()> {
        // One write without truncation: a sysfs attribute takes each write as a whole.
        let mut file = fs::OpenOptions::new().write(true).open(file)?;
        io::Write::write_all(&mut file, text.as_bytes())
    }

    fn modprobe(&self, module: &str) -> Result<(), String> {
        let done = Command::new("modprobe")
            .arg(module)
            .stdin(Stdio::null())
            .output();
        match done {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("modprobe cannot be started: {error}")),
        }
    }

    fn open_exclusively(&self, device: &Path) -> io::Result<()> {
        fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_EXCL | libc::O_NONBLOCK)
            .open(device)
            .map(drop)
    }

    fn open_group(&self, group: &Path) -> io::Result<()> {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(group)
            .map(drop)
    }

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// A machine's PCI functions.
pub struct System {
    root: PathBuf,
    kernel: Box<dyn Kernel>,
}

impl System {
    pub fn real() -> Self {
        Self::below("/")
    }

    /// A machine whose files are below `root`, for example a host's files in a container.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self::at(root, Box::new(Real))
    }

    /// Like [`System::below`], with the given kernel interface.
    pub fn at(root: impl Into<PathBuf>, kernel: Box<dyn Kernel>) -> Self {
        Self {
            root: root.into(),
            kernel,
        }
    }

    /// All NVMe drives on this machine's PCI buses, in the order of their addresses.
    pub fn drives(&self) -> Vec<Drive> {
        self.addresses()
            .into_iter()
            .map(|address| self.read_drive(address))
            .collect()
    }

    /// Addresses of the NVMe drives, in order.
    pub fn addresses(&self) -> Vec<Address> {
        let is_nvme = |address: &Address| {
            let class = self.text(&format!("{DEVICES}/{address}/class"));
            class.as_deref() == Some(NVME_CLASS)
        };
        let mut found: Vec<Address> = self
            .entries(DEVICES)
            .iter()
            .filter_map(|name| name.parse().ok())
            .filter(is_nvme)
            .collect();
        found.sort_unstable();
        found
    }

    /// The NVMe drive at an address.
    pub fn drive(&self, address: Address) -> Result<Drive, PciError> {
        match self.text(&format!("{DEVICES}/{address}/class")) {
            None => Err(PciError::NotThere {
                address,
                have: self.addresses(),
            }),
            Some(class) if class != NVME_CLASS => Err(PciError::NotNvme { address, class }),
            Some(_) => Ok(self.read_drive(address)),
        }
    }

    /// True if a function exists at the address.
    pub fn is_there(&self, address: Address) -> bool {
        self.path(&format!("{DEVICES}/{address}")).exists()
    }

    /// Finds the drive whose kernel driver reports this serial number.
    pub fn by_serial(&self, serial: &str) -> Result<Drive, PciError> {
        let mut drives = self.drives();
        let has_serial = |drive: &Drive| drive.serial().is_some_and(|found| found == serial.trim());
        match drives.iter().position(has_serial) {
            Some(at) => Ok(drives.swap_remove(at)),
            None => Err(PciError::NoSuchSerial {
                serial: serial.to_owned(),
                have: drives
                    .iter()
                    .filter_map(|drive| drive.serial().map(str::to_owned))
                    .collect(),
                silent: drives
                    .iter()
                    .filter(|drive| drive.serial().is_none())
                    .map(|drive| drive.address)
                    .collect(),
            }),
        }
    }

    /// True if this machine has IOMMU groups. Without an IOMMU there are none, except those that
    /// VFIO makes in its no-IOMMU mode.
    pub fn has_iommu(&self) -> bool {
        !self.entries("sys/kernel/iommu_groups").is_empty()
    }

    /// Address bits of the machine's narrowest IOMMU, if IOMMUs report it (Intel's do): MGAW of the
    /// capability register (VT-d 11.4.2).
    pub fn address_bits(&self) -> Option<u32> {
        let iommus = self.entries("sys/class/iommu").into_iter();
        let bits = iommus.filter_map(|iommu| {
            let text = self.text(&format!("sys/class/iommu/{iommu}/intel-iommu/cap"))?;
            let register = u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()?;
            Some((register >> 16 & 0x3f) as u32 + 1)
        });
        bits.min()
    }

    /// True if the vfio-pci module is loaded or can be loaded.
    pub fn has_vfio_pci(&self) -> bool {
        self.path(&format!("{DRIVERS}/{VFIO_PCI}")).is_dir() || self.is_loadable("vfio-pci")
    }

    fn is_loadable(&self, module: &str) -> bool {
        let Some(release) = self.text("proc/sys/kernel/osrelease") else {
            return false;
        };
        // The index lists file names, which may have a suffix for compression.
        ["modules.dep", "modules.builtin"].iter().any(|index| {
            self.text(&format!("lib/modules/{release}/{index}"))
                .is_some_and(|text| {
                    text.lines()
                        .any(|line| line.contains(&format!("/{module}.ko")))
                })
        })
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// The text of a file without surrounding white space.
    pub(crate) fn text(&self, below: &str) -> Option<String> {
        let text = fs::read(self.path(below)).ok()?;
        Some(String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// The last component of a link's target.
    pub(crate) fn link(&self, below: &str) -> Option<String> {
        let target = fs::read_link(self.path(below)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// The names in a folder, in order; empty if the folder does not exist.
    pub(crate) fn entries(&self, below: &str) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.path(below))
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }
}

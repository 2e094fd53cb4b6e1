//! Binds a function to vfio-pci in place of the kernel's driver, and back.
//!
//! ```text
//!   bind     driver_override = vfio-pci ─▶ unbind ─▶ drivers_probe ─▶ /dev/vfio/<group>
//!   unbind   unbind ─▶ driver_override = (none) ─▶ drivers_probe ─▶ nvme
//! ```
//!
//! The override applies to one function, so no other device changes its driver, and it ends with a
//! restart of the machine. If a step of a bind fails, the drive is returned to the kernel's driver.

use std::io;
use std::time::Duration;

use serde::Serialize;

use super::{Address, DEVICES, DRIVERS, Drive, Driver, Iommu, Member, PciError, System, VFIO_PCI};

/// Permissions beyond binding an unused drive.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Bind the drive although it is in use, if this is its serial number.
    pub force: Option<String>,
    /// Bind the drive although no IOMMU restricts its memory accesses.
    pub no_iommu: bool,
}

/// A drive that is bound to vfio-pci.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bound {
    pub address: Address,
    /// The device node for access to the drive.
    pub node: String,
    /// The drive was bound before the call.
    pub already: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// A drive that was returned to the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unbound {
    pub address: Address,
    /// Name of the kernel's controller, such as `nvme0`. `None`: the driver has not brought it up
    /// in time.
    pub controller: Option<String>,
    pub already: bool,
}

/// Longest wait for each of these: a driver takes or leaves a function, its device node appears,
/// udev closes it, or the kernel's driver has identified the drives.
const PATIENCE: Duration = Duration::from_secs(30);
const STEP: Duration = Duration::from_millis(50);

/// CAP_SYS_RAWIO in capability masks (linux/capability.h): VFIO requires it to open a group without
/// an IOMMU.
const CAP_SYS_RAWIO: u32 = 17;
const NOIOMMU_PARAMETER: &str = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
const NOIOMMU_WARNING: &str = "there is no IOMMU: this drive and the program that drives it can reach all memory of the machine";

impl System {
    /// Binds a drive to vfio-pci.
    pub fn bind(&self, address: Address, options: &Options) -> Result<Bound, PciError> {
        let drive = self.check(address, options)?;
        if drive.driver == Driver::VfioPci {
            return self.bound(&drive, true);
        }
        self.load(VFIO_PCI, "vfio-pci")?;
        if drive.iommu == Iommu::None {
            self.switch_noiommu_on(address)?;
        }
        let taken = self
            .hand_over(&drive, VFIO_PCI, Driver::VfioPci)
            .and_then(|()| self.bound(&drive, false));
        if taken.is_err() {
            // Report the first error; this call only returns the drive to the kernel.
            let _ = self.hand_over(&drive, "\n", Driver::Nvme);
        }
        taken
    }

    /// Refuses a drive that [`System::bind`] would refuse, and changes nothing.
    pub fn check(&self, address: Address, options: &Options) -> Result<Drive, PciError> {
        let drive = self.drive(address)?;
        if let Driver::Other(_) = drive.driver {
            return Err(PciError::OtherDriver {
                address,
                driver: drive.driver,
            });
        }
        self.check_unused(&drive, options)?;
        self.check_group(&drive, options)?;
        Ok(drive)
    }

    /// Returns all drives. At a start of the machine, the kernel's driver may still be identifying
    /// some: waits until `enough` accepts the drives or until all are identified, 30 s at most.
    pub fn identified_drives(&self, enough: impl Fn(&[Drive]) -> bool) -> Vec<Drive> {
        let mut drives = self.drives();
        self.wait(|| {
            let is_done = enough(&drives) || !drives.iter().any(Drive::is_coming_up);
            if !is_done {
                drives = self.drives();
            }
            is_done
        });
        drives
    }

    /// Returns a drive to the kernel's driver.
    pub fn unbind(&self, address: Address) -> Result<Unbound, PciError> {
        let drive = self.drive(address)?;
        match &drive.driver {
            Driver::Nvme => {
                return Ok(Unbound {
                    address,
                    controller: drive.controller.map(|controller| controller.name),
                    already: true,
                });
            }
            Driver::Other(_) => {
                return Err(PciError::OtherDriver {
                    address,
                    driver: drive.driver,
                });
            }
            // The kernel waits forever for a process that drives the device, so check first.
            Driver::VfioPci => self.check_not_driven(&drive)?,
            Driver::None => {}
        }
        self.load("nvme", "nvme")?;
        self.hand_over(&drive, "\n", Driver::Nvme)?;
        let controller = || self.drive(address).ok()?.controller;
        let up = self.wait(|| controller().is_some_and(|c| c.state.as_deref() == Some("live")));
        // A controller that does not come up is a fault of the drive, which was returned
        // nevertheless.
        let controller = controller().filter(|_| up);
        Ok(Unbound {
            address,
            controller: controller.map(|controller| controller.name),
            already: false,
        })
    }

    fn check_unused(&self, drive: &Drive, options: &Options) -> Result<(), PciError> {
        let address = drive.address;
        let mut uses = self.uses(drive);
        // udev reads a disk briefly after each process that wrote to it has closed it.
        self.wait(|| {
            if uses.iter().any(|found| !found.is_by_udev()) {
                return true;
            }
            uses = self.uses(drive);
            uses.is_empty()
        });
        let serial = drive.serial().map(str::to_owned);
        match &options.force {
            _ if uses.is_empty() => Ok(()),
            None => Err(PciError::InUse {
                address,
                serial,
                uses,
            }),
            Some(given) if serial.as_deref() == Some(given.trim()) => Ok(()),
            Some(given) => Err(PciError::OtherSerial {
                address,
                given: given.clone(),
            }),
        }
    }

    fn check_group(&self, drive: &Drive, options: &Options) -> Result<(), PciError> {
        let address = drive.address;
        let members = || {
            let in_the_way = |member: &&Member| member.is_in_the_way();
            drive.group_members.iter().filter(in_the_way).cloned()
        };
        match drive.iommu {
            Iommu::Group(group) if members().next().is_some() => Err(PciError::SharedGroup {
                address,
                group,
                members: members().collect(),
            }),
            Iommu::Group(_) => Ok(()),
            Iommu::None | Iommu::NoIommu(_) if !options.no_iommu => Err(PciError::NoIommu {
                address,
                has_groups: self.has_iommu(),
            }),
            Iommu::None | Iommu::NoIommu(_) if !self.has_capability(CAP_SYS_RAWIO) => {
                Err(PciError::NoIommuMode {
                    address,
                    why: "it takes the capability CAP_SYS_RAWIO, which this process has not".into(),
                })
            }
            Iommu::None | Iommu::NoIommu(_) => Ok(()),
        }
    }

    fn check_not_driven(&self, drive: &Drive) -> Result<(), PciError> {
        let Some(node) = drive.iommu.node() else {
            return Ok(());
        };
        let by = self.group_user(&node);
        let opened = self
            .kernel
            .open_group(&self.path(&format!("dev/vfio/{node}")));
        let busy = opened.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy);
        match (by, busy) {
            (None, false) => Ok(()),
            (by, _) => Err(PciError::Driven {
                address: drive.address,
                by: by.unwrap_or_else(|| "a program".into()),
            }),
        }
    }

    fn has_capability(&self, number: u32) -> bool {
        let status = self.text("proc/self/status").unwrap_or_default();
        let mask = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        mask.is_some_and(|mask| mask >> number & 1 == 1)
    }

    fn load(&self, driver: &str, module: &'static str) -> Result<(), PciError> {
        let is_there = || self.path(&format!("{DRIVERS}/{driver}")).is_dir();
        if is_there() {
            return Ok(());
        }
        let no_module = |said| PciError::NoModule { module, said };
        self.kernel.modprobe(module).map_err(no_module)?;
        if is_there() {
            Ok(())
        } else {
            Err(no_module(
                "modprobe succeeded, and the driver is not there".into(),
            ))
        }
    }

    fn switch_noiommu_on(&self, address: Address) -> Result<(), PciError> {
        if self.text(NOIOMMU_PARAMETER).as_deref() == Some("Y") {
            return Ok(());
        }
        let file = self.path(NOIOMMU_PARAMETER);
        self.kernel
            .write(&file, "Y")
            .map_err(|error| PciError::NoIommuMode {
                address,
                why: match error.kind() {
                    io::ErrorKind::NotFound => "this kernel was built without it".into(),
                    _ => format!("{} cannot be written: {error}", file.display()),
                },
            })
    }

    /// Unbinds the present driver, and makes the kernel probe for a driver again.
    fn hand_over(&self, drive: &Drive, to: &str, wanted: Driver) -> Result<(), PciError> {
        let address = drive.address;
        let device = format!("{DEVICES}/{address}");
        self.write(address, &format!("{device}/driver_override"), to)?;
        let now = self.driver_of(address);
        if now != wanted {
            if now != Driver::None {
                self.write(
                    address,
                    &format!("{device}/driver/unbind"),
                    &address.to_string(),
                )?;
            }
            self.write(address, "sys/bus/pci/drivers_probe", &address.to_string())?;
        }
        if self.wait(|| self.driver_of(address) == wanted) {
            Ok(())
        } else {
            Err(PciError::Late {
                address,
                wanted: if wanted == Driver::Nvme {
                    "nvme"
                } else {
                    VFIO_PCI
                },
                now: self.driver_of(address),
                seconds: PATIENCE.as_secs(),
            })
        }
    }

    fn bound(&self, drive: &Drive, already: bool) -> Result<Bound, PciError> {
        let address = drive.address;
        // The group without an IOMMU is created when the driver binds the function.
        let iommu = || self.drive(address).map(|drive| drive.iommu);
        let node = || iommu().ok()?.node();
        let appeared = self
            .wait(|| node().is_some_and(|node| self.path(&format!("dev/vfio/{node}")).exists()));
        if !appeared {
            return Err(PciError::NoNode {
                address,
                node: node().unwrap_or_else(|| "*".into()),
                seconds: PATIENCE.as_secs(),
            });
        }
        let iommu = iommu()?;
        let warning = matches!(iommu, Iommu::NoIommu(_)).then(|| NOIOMMU_WARNING.to_owned());
        if let Some(warning) = &warning {
            tracing::warn!(%address, "{warning}");
        }
        Ok(Bound {
            address,
            node: format!("/dev/vfio/{}", iommu.node().unwrap_or_default()),
            already,
            warning,
        })
    }

    fn write(&self, address: Address, below: &str, text: &str) -> Result<(), PciError> {
        let file = self.path(below);
        self.kernel
            .write(&file, text)
            .map_err(|source| match source.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                    PciError::NotPermitted { file, source }
                }
                _ => PciError::Write {
                    address,
                    file,
                    text: text.trim().to_owned(),
                    source,
                },
            })
    }

    /// Waits up to [`PATIENCE`] for a condition. Returns true if it was met in time.
    fn wait(&self, mut is_so: impl FnMut() -> bool) -> bool {
        for _ in 0..PATIENCE.as_millis() / STEP.as_millis() {
            if is_so() {
                return true;
            }
            self.kernel.pause(STEP);
        }
        is_so()
    }
}

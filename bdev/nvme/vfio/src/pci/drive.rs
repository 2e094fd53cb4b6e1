//! The properties of one NVMe PCI function, read from sysfs.

use std::fmt;

use serde::Serialize;

use super::{Address, DEVICES, System, VFIO_PCI};

/// An NVMe drive on a PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Drive {
    pub address: Address,
    /// PCI ids, as the kernel writes them: `0x144d`.
    pub vendor: String,
    pub device: String,
    pub driver: Driver,
    pub iommu: Iommu,
    /// Other functions of its IOMMU group. VFIO opens the group only if none of them is in the way:
    /// see [`Member::is_in_the_way`].
    pub group_members: Vec<Member>,
    pub numa_node: Option<u32>,
    /// The controller device of the kernel's NVMe driver. `None` with another driver or without
    /// one, and until the NVMe driver has created the device.
    pub controller: Option<Controller>,
    /// The namespaces of `controller`, as block devices of the kernel.
    pub disks: Vec<Disk>,
}

/// The driver of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Driver {
    /// No driver.
    None,
    /// The kernel's NVMe driver: the namespaces of the drive are block devices.
    Nvme,
    /// vfio-pci: a process may drive the function.
    VfioPci,
    Other(String),
}

impl Driver {
    fn named(name: Option<String>) -> Self {
        match name.as_deref() {
            None => Self::None,
            Some("nvme") => Self::Nvme,
            Some(VFIO_PCI) => Self::VfioPci,
            Some(other) => Self::Other(other.to_owned()),
        }
    }

    pub fn name(&self) -> Option<&str> {
        match self {
            Self::None => None,
            Self::Nvme => Some("nvme"),
            Self::VfioPci => Some(VFIO_PCI),
            Self::Other(name) => Some(name),
        }
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().unwrap_or("none"))
    }
}

/// The drive's IOMMU group, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Iommu {
    None,
    /// The IOMMU translates and checks the drive's memory accesses.
    Group(u32),
    /// A group of VFIO's no-IOMMU mode: accesses are not checked.
    NoIommu(u32),
}

impl Iommu {
    /// The name of the group's node in `/dev/vfio`.
    pub fn node(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Group(number) => Some(number.to_string()),
            Self::NoIommu(number) => Some(format!("noiommu-{number}")),
        }
    }
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.node().unwrap_or_default())
    }
}

/// Another function of an IOMMU group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    pub address: Address,
    pub class: String,
    pub driver: Driver,
}

impl Member {
    /// True if VFIO refuses the group because of this function's driver. It accepts a bridge with
    /// its port driver, because bridges only forward memory accesses and make none of their own.
    pub fn is_in_the_way(&self) -> bool {
        let is_bridge = self.class.starts_with("0x06");
        match &self.driver {
            Driver::None | Driver::VfioPci => false,
            Driver::Other(name) => !(is_bridge && name == "pcieport") && name != "pci-stub",
            Driver::Nvme => true,
        }
    }
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (driver {})", self.address, self.driver)
    }
}

/// A controller device of the kernel's NVMe driver, with its attributes in sysfs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Controller {
    /// Name of the controller, such as `nvme0`.
    pub name: String,
    pub serial: String,
    pub model: String,
    pub firmware: String,
    pub state: Option<String>,
}

/// A namespace as the kernel's block device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Name of the disk, such as `nvme0n1`. The kernel numbers disks in order of discovery: the
    /// number is not the namespace's.
    pub name: String,
    /// Namespace identifier; `None` if the kernel does not report it.
    pub nsid: Option<u32>,
    pub bytes: u64,
    pub block_size: u32,
}

impl Drive {
    pub fn serial(&self) -> Option<&str> {
        Some(&self.controller.as_ref()?.serial)
    }

    /// True while the kernel's driver may still identify the drive. Also true for a drive without a
    /// driver: the kernel has not probed it yet, or its driver has failed.
    pub fn is_coming_up(&self) -> bool {
        let state = self.controller.as_ref().map(|found| found.state.as_deref());
        match (&self.driver, state) {
            (Driver::None, _) => true,
            (Driver::Nvme, Some(state)) => !matches!(state, Some("live" | "dead")),
            (Driver::Nvme, None) => true,
            (Driver::VfioPci | Driver::Other(_), _) => false,
        }
    }
}

impl System {
    pub(super) fn read_drive(&self, address: Address) -> Drive {
        let at = format!("{DEVICES}/{address}");
        let attribute = |name: &str| self.text(&format!("{at}/{name}"));
        let controller = self.controller(&at);
        let disks = match &controller {
            Some(controller) => self.disks(&at, &controller.name),
            None => Vec::new(),
        };
        Drive {
            address,
            vendor: attribute("vendor").unwrap_or_default(),
            device: attribute("device").unwrap_or_default(),
            driver: self.driver_of(address),
            iommu: self.iommu(&at),
            group_members: self.group_members(&at, address),
            // -1: the node is unknown.
            numa_node: attribute("numa_node").and_then(|node| node.parse().ok()),
            controller,
            disks,
        }
    }

    pub(crate) fn driver_of(&self, address: Address) -> Driver {
        Driver::named(self.link(&format!("{DEVICES}/{address}/driver")))
    }

    fn iommu(&self, at: &str) -> Iommu {
        let number = self
            .link(&format!("{at}/iommu_group"))
            .and_then(|number| number.parse().ok());
        let Some(number) = number else {
            return Iommu::None;
        };
        let name = self.text(&format!("sys/kernel/iommu_groups/{number}/name"));
        match name.as_deref() {
            Some("vfio-noiommu") => Iommu::NoIommu(number),
            _ => Iommu::Group(number),
        }
    }

    fn group_members(&self, at: &str, address: Address) -> Vec<Member> {
        let member = |name: &String| {
            let address: Address = name.parse().ok()?;
            Some(Member {
                address,
                class: self
                    .text(&format!("{DEVICES}/{address}/class"))
                    .unwrap_or_default(),
                driver: self.driver_of(address),
            })
        };
        self.entries(&format!("{at}/iommu_group/devices"))
            .iter()
            .filter_map(member)
            .filter(|member| member.address != address)
            .collect()
    }

    fn controller(&self, at: &str) -> Option<Controller> {
        let name = self.entries(&format!("{at}/nvme")).into_iter().next()?;
        let attribute = |attribute: &str| self.text(&format!("{at}/nvme/{name}/{attribute}"));
        Some(Controller {
            serial: attribute("serial").unwrap_or_default(),
            model: attribute("model").unwrap_or_default(),
            firmware: attribute("firmware_rev").unwrap_or_default(),
            state: attribute("state"),
            name,
        })
    }

    fn disks(&self, at: &str, controller: &str) -> Vec<Disk> {
        let mut names: Vec<String> = self
            .entries(&format!("{at}/nvme/{controller}"))
            .iter()
            .filter_map(|name| disk_of_path(name))
            .collect();
        names.sort();
        names.dedup();
        let disk = |name: String| {
            let number = |file: &str| -> Option<u64> {
                self.text(&format!("sys/class/block/{name}/{file}"))?
                    .parse()
                    .ok()
            };
            Disk {
                nsid: number("nsid").and_then(|nsid| nsid.try_into().ok()),
                // The kernel counts in units of 512 bytes here, whatever the block size.
                bytes: number("size").unwrap_or(0).saturating_mul(512),
                block_size: number("queue/logical_block_size").unwrap_or(0) as u32,
                name,
            }
        };
        let mut disks: Vec<Disk> = names.into_iter().map(disk).collect();
        disks.sort_by_key(|disk| disk.nsid);
        disks
    }
}

/// The disk of a block device name: `nvme0n1` itself. With several paths, `nvme0c1n1` is the path
/// of controller 1 to the disk `nvme0n1`.
fn disk_of_path(name: &str) -> Option<String> {
    let rest = name.strip_prefix("nvme")?;
    let (head, namespace) = rest.split_once('n')?;
    let (subsystem, path) = match head.split_once('c') {
        Some((subsystem, path)) => (subsystem, Some(path)),
        None => (head, None),
    };
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_one = number(subsystem) && number(namespace) && path.is_none_or(number);
    is_one.then(|| format!("nvme{subsystem}n{namespace}"))
}

#[cfg(test)]
mod tests {
    use super::disk_of_path;

    #[test]
    fn names_of_disks_and_of_paths() {
        assert_eq!(disk_of_path("nvme0n1").as_deref(), Some("nvme0n1"));
        assert_eq!(disk_of_path("nvme2c1n13").as_deref(), Some("nvme2n13"));
        for name in [
            "nvme0",
            "ng0n1",
            "hwmon2",
            "nvme0n1p1",
            "nvmen1",
            "nvme0cn1",
            "power",
        ] {
            assert_eq!(disk_of_path(name), None, "{name}");
        }
    }
}

//! Tuning profiles of RDMA cards: settings of the machine and of the card that cost throughput or
//! latency if they are wrong, as found, beside the recommended ones.
//!
//! A profile has the settings of all PCI cards, and those of the card's driver. Nothing here
//! changes a setting.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::fabric::{Device, LinkLayer};
use crate::gid::GidKind;
use crate::sysfs::{filled, names};
use crate::{DriverKind, Roots};

/// A setting as found, and as the profile recommends it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Setting {
    pub name: &'static str,
    /// The device, interface or CPUs that have it.
    pub of: String,
    /// `None`: it cannot be read, for example without root.
    pub found: Option<String>,
    pub recommended: String,
    pub verdict: Verdict,
    /// The command that sets it; `None`: no command can.
    pub command: Option<String>,
    pub reason: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Recommended,
    Differs,
    Unknown,
}

/// Drivers whose makers recommend the largest Max_Read_Request_Size, 4096 bytes.
const LARGE_READ_REQUESTS: &[&str] = &["mlx5_core", "mlx4_core", "bnxt_re", "bnxt_en"];

/// The settings of a device and of its machine. Empty for software devices.
pub fn tuning(roots: &Roots, device: &Device) -> Vec<Setting> {
    if device.kind != DriverKind::Hardware {
        return Vec::new();
    }
    let mut settings = Vec::new();
    if let Some(bus) = &device.bus {
        let folder = roots
            .sys
            .join("class/infiniband")
            .join(&device.name)
            .join("device");
        settings.extend(pcie_link(&folder, bus));
        settings.extend(iommu(&folder, bus));
        let driver = device.driver.as_deref().unwrap_or_default();
        settings.extend(read_request(&folder, driver, bus));
    }
    settings.extend(device.ports.iter().filter_map(|port| {
        (port.link_layer == LinkLayer::Ethernet).then_some(())?;
        mtu(port.netdev.as_deref()?, port.mtu)
    }));
    settings.extend(protocol(device));
    settings.extend(governor(roots));
    settings.extend(numa(roots, device));
    settings
}

/// Compares a value that was read with the recommended one.
fn setting(
    name: &'static str,
    of: impl Into<String>,
    found: Option<String>,
    recommended: impl Into<String>,
) -> Setting {
    let recommended = recommended.into();
    let verdict = match &found {
        None => Verdict::Unknown,
        Some(found) if *found == recommended => Verdict::Recommended,
        Some(_) => Verdict::Differs,
    };
    Setting {
        name,
        of: of.into(),
        found,
        recommended,
        verdict,
        command: None,
        reason: "",
    }
}

/// Speed and width of the PCI Express link, beside the card's largest ones.
fn pcie_link(folder: &Path, bus: &str) -> Option<Setting> {
    let link = |kind: &str| {
        let speed = filled(&folder.join(format!("{kind}_link_speed")))?;
        let width = filled(&folder.join(format!("{kind}_link_width")))?;
        Some(format!("{} x{width}", speed.trim_end_matches(" PCIe")))
    };
    Some(Setting {
        reason: "the slot has fewer or slower lanes than the card: use another slot, or the BIOS's setting of the slot",
        ..setting("pcie.link", bus, link("current"), link("max")?)
    })
}

/// The IOMMU's mode for the card: `identity` passes addresses through.
fn iommu(folder: &Path, bus: &str) -> Option<Setting> {
    let found = filled(&folder.join("iommu_group/type"))?;
    Some(Setting {
        command: Some("add iommu=pt to the kernel's command line, and restart".to_owned()),
        reason: "with translation, each access of the card can miss the IOMMU's cache",
        ..setting("pcie.iommu", bus, Some(found), "identity")
    })
}

/// PCI Express Max_Read_Request_Size, for the drivers of [`LARGE_READ_REQUESTS`].
fn read_request(folder: &Path, driver: &str, bus: &str) -> Option<Setting> {
    LARGE_READ_REQUESTS.contains(&driver).then_some(())?;
    let config = fs::read(folder.join("config")).unwrap_or_default();
    let found = max_read_request(&config).map(|bytes| bytes.to_string());
    Some(Setting {
        command: Some(format!("setpci -s {bus} CAP_EXP+8.w=5000:7000")),
        reason: "the card reads the data that it sends: larger requests are fewer",
        ..setting("pcie.max_read_request", bus, found, "4096")
    })
}

/// Max_Read_Request_Size in bytes: bits 14 to 12 of Device Control in the PCI Express capability
/// (id 10h). `None`: the part of the configuration space that only root reads is missing.
fn max_read_request(config: &[u8]) -> Option<u32> {
    const CAPABILITIES: usize = 0x34;
    const PCI_EXPRESS: u8 = 0x10;
    const DEVICE_CONTROL: usize = 8;
    let mut at = usize::from(*config.get(CAPABILITIES)? & !3);
    // A list of 48 capabilities fills the space; a longer one is a loop.
    for _ in 0..48 {
        // The list ends with 0; the header before 40h is no capability.
        if at < 0x40 {
            return None;
        }
        let [id, next] = *config.get(at..at + 2)?.first_chunk()?;
        if id == PCI_EXPRESS {
            let control = config.get(at + DEVICE_CONTROL..)?.first_chunk()?;
            return Some(128 << (u16::from_le_bytes(*control) >> 12 & 7));
        }
        at = usize::from(next & !3);
    }
    None
}

fn mtu(netdev: &str, path_mtu: Option<u32>) -> Option<Setting> {
    Some(Setting {
        command: Some(format!("ip link set dev {netdev} mtu 9000")),
        reason: "a path MTU of 4096 needs a quarter of the packets of 1024; switches and peers must have it, too",
        ..setting(
            "ethernet.path_mtu",
            netdev,
            Some(path_mtu?.to_string()),
            "4096",
        )
    })
}

/// The protocol of a card that has two, of which both ends must use the same.
fn protocol(device: &Device) -> Option<Setting> {
    let driver = device.driver.as_deref()?;
    if !["irdma", "ice"].contains(&driver) {
        return None;
    }
    let bus = device.bus.as_deref()?;
    let kinds = || device.ports.iter().flat_map(|port| &port.gids);
    let found = if kinds().any(|gid| gid.kind == GidKind::RoceV2) {
        Some("RoCE v2")
    } else if kinds().any(|gid| gid.kind == GidKind::Iwarp) {
        Some("iWARP")
    } else {
        None
    };
    Some(Setting {
        command: Some(format!(
            "devlink dev param set pci/{bus} name enable_iwarp value false cmode runtime; \
             devlink dev param set pci/{bus} name enable_roce value true cmode runtime"
        )),
        reason: "the card speaks RoCE v2 or iWARP, and connects only to ends that speak the same",
        ..setting("card.protocol", bus, found.map(str::to_owned), "RoCE v2")
    })
}

/// The CPUs' frequency governors.
fn governor(roots: &Roots) -> Option<Setting> {
    let folder = roots.sys.join("devices/system/cpu");
    let mut found: Vec<String> = names(&folder)
        .iter()
        .filter_map(|cpu| filled(&folder.join(cpu).join("cpufreq/scaling_governor")))
        .collect();
    found.sort();
    found.dedup();
    if found.is_empty() {
        return None;
    }
    Some(Setting {
        command: Some("cpupower frequency-set -g performance".to_owned()),
        reason: "a CPU that first has to raise its clock adds latency",
        ..setting(
            "cpu.governor",
            "all CPUs",
            Some(found.join(", ")),
            "performance",
        )
    })
}

/// On a machine of several NUMA nodes: reactors on the card's node.
fn numa(roots: &Roots, device: &Device) -> Option<Setting> {
    let nodes = names(&roots.sys.join("devices/system/node"));
    let is_node = |name: &&String| {
        name.strip_prefix("node")
            .is_some_and(|number| number.parse::<u32>().is_ok())
    };
    if nodes.iter().filter(is_node).count() < 2 {
        return None;
    }
    Some(Setting {
        verdict: Verdict::Unknown,
        command: Some("[reactor] cores = \"auto-numa\" in /etc/nacre/nacre.toml".to_owned()),
        reason: "memory and cores of another node add latency to each access of the card",
        ..setting(
            "nacre.cores",
            device.name.clone(),
            None,
            format!("cores of NUMA node {}", device.numa?),
        )
    })
}

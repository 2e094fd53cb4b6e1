//! Reads the RDMA devices of this machine and their ports from `/sys/class/infiniband`.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::driver::{self, DriverKind, Quirk};
use crate::gid::{self, Gid, GidKind, TableKind};
use crate::sysfs;

/// All RDMA devices of the kernel at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Fabric {
    pub devices: Vec<Device>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    pub name: String,
    /// Such as `0c42:a103:0065:4b6e`.
    pub node_guid: String,
    pub sys_image_guid: String,
    /// The firmware's version. Software devices have none.
    pub fw: Option<String>,
    /// The driver of the bus device (`mlx5_core`), or of the software device (`rxe`).
    pub driver: Option<String>,
    pub kind: DriverKind,
    /// The address on its bus, such as `0000:3b:00.0`.
    pub bus: Option<String>,
    pub numa: Option<u32>,
    pub node_type: NodeType,
    pub ports: Vec<Port>,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Port {
    pub num: u8,
    pub state: PortState,
    pub phys_state: PhysState,
    pub link_layer: LinkLayer,
    /// Rate in the kernel's words: `100 Gb/sec (4X EDR)`.
    pub rate: Option<String>,
    /// The path MTU, in bytes, that the interface's MTU allows. Only for RoCE ports: an InfiniBand
    /// port reports its MTU only through verbs.
    pub mtu: Option<u32>,
    /// The kind of GID that the connection manager uses for an address, for listeners and outgoing
    /// connections (`default_roce_mode`). `None` if the port is not a RoCE port, or has no GIDs.
    pub roce_mode: Option<GidKind>,
    pub lid: u16,
    pub sm_lid: u16,
    /// The network interface of this port.
    pub netdev: Option<String>,
    pub gids: Vec<Gid>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeType {
    /// A channel adapter: InfiniBand or RoCE.
    Ca,
    /// iWARP.
    Rnic,
    /// Something else: a switch, usNIC, or unknown.
    Other,
}

/// IBA's logical state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PortState {
    Down,
    Init,
    Armed,
    Active,
    ActiveDefer,
    Unknown,
}

/// IBA's physical state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PhysState {
    Sleep,
    Polling,
    Disabled,
    PortConfigurationTraining,
    LinkUp,
    LinkErrorRecovery,
    PhyTest,
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkLayer {
    InfiniBand,
    Ethernet,
    Unknown,
}

impl Fabric {
    /// All devices below `sysfs_root` (`/sys`). A machine without RDMA has none. A device that
    /// disappears during the reading is omitted or incomplete.
    pub fn read(sysfs_root: impl AsRef<Path>) -> Self {
        let root = sysfs_root.as_ref();
        let class = root.join("class/infiniband");
        let devices = sysfs::names(&class)
            .into_iter()
            .filter_map(|name| Device::read(root, &class.join(&name), name))
            .collect();
        Self { devices }
    }

    pub fn device(&self, name: &str) -> Option<&Device> {
        self.devices.iter().find(|device| device.name == name)
    }

    /// The ports of `netdev`: its own ports, or those with a GID of it, as for a VLAN.
    pub fn ports_of(&self, netdev: &str) -> impl Iterator<Item = (&Device, &Port)> {
        self.ports().filter(move |(_, port)| port.carries(netdev))
    }

    pub fn ports(&self) -> impl Iterator<Item = (&Device, &Port)> {
        self.devices
            .iter()
            .flat_map(|device| device.ports.iter().map(move |port| (device, port)))
    }
}

impl Device {
    fn read(root: &Path, path: &Path, name: String) -> Option<Self> {
        let node_guid = sysfs::text(&path.join("node_guid"))?;
        let node_type = node_type(&sysfs::text(&path.join("node_type")).unwrap_or_default());
        let bus_driver = sysfs::link_name(&path.join("device/driver"));
        let kind = kind(path, node_type, bus_driver.as_deref());
        let driver = match kind {
            DriverKind::Hardware => bus_driver,
            software => Some(software.to_string()),
        };
        let numa = sysfs::number(&path.join("device/numa_node"));
        let mut device = Self {
            node_guid,
            sys_image_guid: sysfs::text(&path.join("sys_image_guid")).unwrap_or_default(),
            fw: sysfs::filled(&path.join("fw_ver")).filter(|_| !kind.is_software()),
            driver,
            kind,
            bus: sysfs::link_name(&path.join("device")).filter(|_| !kind.is_software()),
            // -1: the node is unknown.
            numa: numa.and_then(|node| u32::try_from(node).ok()),
            node_type,
            ports: Vec::new(),
            name,
        };
        let folder = path.join("ports");
        device.ports = sysfs::names(&folder)
            .iter()
            .filter_map(|num| Port::read(root, path, &folder.join(num), num, &device))
            .collect();
        Some(device)
    }

    pub fn is_software(&self) -> bool {
        self.kind.is_software()
    }

    /// Known properties of the device's driver.
    pub fn quirk(&self) -> Option<&'static Quirk> {
        driver::quirk(self.driver.as_deref()?)
    }

    pub fn port(&self, num: u8) -> Option<&Port> {
        self.ports.iter().find(|port| port.num == num)
    }
}

impl Port {
    fn read(root: &Path, device: &Path, path: &Path, num: &str, of: &Device) -> Option<Self> {
        let num = num.parse().ok()?;
        let attribute = |name: &str| sysfs::text(&path.join(name)).unwrap_or_default();
        let lid = |name: &str| {
            let lid = sysfs::number(&path.join(name)).unwrap_or(0);
            u16::try_from(lid).unwrap_or(0)
        };
        let link_layer = match attribute("link_layer").as_str() {
            "InfiniBand" => LinkLayer::InfiniBand,
            "Ethernet" => LinkLayer::Ethernet,
            _ => LinkLayer::Unknown,
        };
        let table = match (of.node_type, link_layer) {
            (NodeType::Rnic, _) => TableKind::Iwarp,
            (_, LinkLayer::Ethernet) => TableKind::Roce,
            _ => TableKind::InfiniBand,
        };
        let gids = gid::read(path, table);
        let netdev = netdev(root, device, num, table, &gids);
        let mtu = netdev.as_deref().filter(|_| table == TableKind::Roce);
        let mtu = mtu.and_then(|netdev| {
            let of_interface = sysfs::number(&root.join("class/net").join(netdev).join("mtu"))?;
            path_mtu(u32::try_from(of_interface).ok()?)
        });
        Some(Self {
            num,
            state: port_state(&attribute("state")),
            phys_state: phys_state(&attribute("phys_state")),
            link_layer,
            rate: sysfs::filled(&path.join("rate")),
            mtu,
            roce_mode: roce_mode(root, &of.name, num, &gids),
            lid: lid("lid"),
            sm_lid: lid("sm_lid"),
            netdev,
            gids,
        })
    }

    pub fn is_active(&self) -> bool {
        self.state == PortState::Active
    }

    /// True if a listener on the address of `gid` would use this entry. Of several entries with the
    /// address, the connection manager uses the first of the type `roce_mode`.
    pub fn uses(&self, gid: &Gid) -> bool {
        let first = self.gids.iter().find(|other| {
            self.roce_mode.is_none_or(|mode| other.kind == mode)
                && other.ip == gid.ip
                && other.ndev == gid.ndev
        });
        first.is_some_and(|first| first.index == gid.index)
    }

    /// True if `netdev` is the interface of this port, or of one of its GIDs (a VLAN).
    pub fn carries(&self, netdev: &str) -> bool {
        let of = |gid: &Gid| gid.ndev.as_deref() == Some(netdev);
        self.netdev.as_deref() == Some(netdev) || self.gids.iter().any(of)
    }
}

/// Returns the value that `cma_roce_mode` shows and sets, for ports that it has made known below
/// configfs. All other ports have the kernel's default since 4.13: v2, if the device has it.
fn roce_mode(root: &Path, device: &str, port: u8, gids: &[Gid]) -> Option<GidKind> {
    let has = |kind| gids.iter().any(|gid| gid.kind == kind);
    let (v1, v2) = (has(GidKind::RoceV1), has(GidKind::RoceV2));
    let known = root.join("kernel/config/rdma_cm").join(device);
    let known = known.join(format!("ports/{port}/default_roce_mode"));
    match sysfs::text(&known).as_deref() {
        Some("IB/RoCE v1") if v1 || v2 => Some(GidKind::RoceV1),
        Some("RoCE v2") if v1 || v2 => Some(GidKind::RoceV2),
        _ if v2 => Some(GidKind::RoceV2),
        _ => v1.then_some(GidKind::RoceV1),
    }
}

/// The largest path MTU of RDMA over an Ethernet interface whose MTU is `of_interface`: the
/// kernel's own rule (iboe_get_mtu), which subtracts all possible headers of a packet.
pub(crate) fn path_mtu(of_interface: u32) -> Option<u32> {
    /// GRH 40, UDP 8, BTH 12, XRC extension 4, atomic extension 28, ICRC 4.
    const HEADERS: u32 = 96;
    let payload = of_interface.checked_sub(HEADERS)?;
    [4096, 2048, 1024, 512, 256]
        .into_iter()
        .find(|mtu| *mtu <= payload)
}

/// A soft-RoCE device has an attribute `parent`; a soft-iWARP device is a virtual device that is an
/// RNIC. Neither has a driver of its own on a bus: old kernels showed their NIC's there.
fn kind(path: &Path, node_type: NodeType, bus_driver: Option<&str>) -> DriverKind {
    let description = sysfs::text(&path.join("node_desc")).unwrap_or_default();
    let is_virtual = fs::canonicalize(path)
        .is_ok_and(|real| real.to_string_lossy().contains("/devices/virtual/"));
    let known = bus_driver.is_some_and(|driver| driver::quirk(driver).is_some());
    if path.join("parent").exists() || (!known && description == "rxe") {
        DriverKind::Rxe
    } else if !known && (is_virtual || description.starts_with("Software iWARP")) {
        match node_type {
            NodeType::Rnic => DriverKind::Siw,
            _ => DriverKind::Rxe,
        }
    } else {
        DriverKind::Hardware
    }
}

/// The interface of a port. Most ports name it with their GIDs. The others are found by a common
/// bus device or hardware address.
fn netdev(root: &Path, device: &Path, num: u8, table: TableKind, gids: &[Gid]) -> Option<String> {
    let named = gids.iter().find_map(|gid| gid.ndev.clone());
    if named.is_some() {
        return named;
    }
    if let Some(parent) = sysfs::filled(&device.join("parent")) {
        return Some(parent);
    }
    let net = root.join("class/net");
    let by_address = sysfs::names(&net).into_iter().find(|name| {
        let address = sysfs::text(&net.join(name).join("address")).unwrap_or_default();
        let Some(address) = hardware_address(&address) else {
            return false;
        };
        gids.iter().any(|gid| match table {
            // An IPoIB interface's address: 4 bytes of queue pair, then the port's GID.
            TableKind::InfiniBand => address.get(4..) == Some(&gid.gid.octets()[..]),
            TableKind::Iwarp => address == gid.gid.octets()[..6] && address != [0; 6],
            TableKind::Roce => false,
        })
    });
    by_address.or_else(|| on_same_bus(&device.join("device/net"), num))
}

/// Finds the interface of this port among those of the bus device. Ports count from 1 here, and
/// from 0 in `dev_port`.
fn on_same_bus(folder: &Path, num: u8) -> Option<String> {
    let names = sysfs::names(folder);
    let of_port = |name: &&String| {
        let port = sysfs::number(&PathBuf::from(folder).join(name).join("dev_port"));
        port.is_none_or(|port| port + 1 == u64::from(num))
    };
    names.iter().find(of_port).cloned()
}

fn hardware_address(text: &str) -> Option<Vec<u8>> {
    text.split(':')
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect()
}

/// `4: ACTIVE` is 4.
fn code(text: &str) -> Option<u8> {
    let (number, _) = text.split_once(':')?;
    number.trim().parse().ok()
}

fn node_type(text: &str) -> NodeType {
    match code(text) {
        Some(1) => NodeType::Ca,
        Some(4) => NodeType::Rnic,
        _ => NodeType::Other,
    }
}

fn port_state(text: &str) -> PortState {
    match code(text) {
        Some(1) => PortState::Down,
        Some(2) => PortState::Init,
        Some(3) => PortState::Armed,
        Some(4) => PortState::Active,
        Some(5) => PortState::ActiveDefer,
        _ => PortState::Unknown,
    }
}

fn phys_state(text: &str) -> PhysState {
    match code(text) {
        Some(1) => PhysState::Sleep,
        Some(2) => PhysState::Polling,
        Some(3) => PhysState::Disabled,
        Some(4) => PhysState::PortConfigurationTraining,
        Some(5) => PhysState::LinkUp,
        Some(6) => PhysState::LinkErrorRecovery,
        Some(7) => PhysState::PhyTest,
        _ => PhysState::Unknown,
    }
}

impl fmt::Display for NodeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ca => "CA",
            Self::Rnic => "RNIC",
            Self::Other => "other",
        })
    }
}

impl fmt::Display for PortState {
    /// Writes the state in iproute2's words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Down => "DOWN",
            Self::Init => "INIT",
            Self::Armed => "ARMED",
            Self::Active => "ACTIVE",
            Self::ActiveDefer => "ACTIVE_DEFER",
            Self::Unknown => "UNKNOWN",
        })
    }
}

impl fmt::Display for PhysState {
    /// Writes the state in iproute2's words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sleep => "SLEEP",
            Self::Polling => "POLLING",
            Self::Disabled => "DISABLED",
            Self::PortConfigurationTraining => "PORT_CONFIGURATION_TRAINING",
            Self::LinkUp => "LINK_UP",
            Self::LinkErrorRecovery => "LINK_ERROR_RECOVER",
            Self::PhyTest => "PHY_TEST",
            Self::Unknown => "UNKNOWN",
        })
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Unknown => "unknown",
        })
    }
}

//! Determines whether a listener can use an address over RDMA: the device, port and GID, or the
//! reason why it cannot.

use std::fmt;
use std::net::IpAddr;

use serde::Serialize;

use crate::absence::NoDevice;
use crate::environment::{Access, Environment};
use crate::fabric::{Device, Fabric, LinkLayer, NodeType, PhysState, Port, PortState};
use crate::gid::{Gid, GidKind};

/// An address of an interface, and the constraints of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilityRequest {
    pub netdev: String,
    pub ip: IpAddr,
    /// Use only this device, if set.
    pub device: Option<String>,
    pub port: Option<u8>,
    /// Use this GID index instead of the first entry of the address that is not RoCE v1. A named
    /// index may also be RoCE v1.
    pub gid_index: Option<u16>,
    /// Permit soft-RoCE and soft-iWARP.
    pub allow_software: bool,
}

impl CapabilityRequest {
    pub fn new(netdev: impl Into<String>, ip: IpAddr) -> Self {
        Self {
            netdev: netdev.into(),
            ip: ip.to_canonical(),
            device: None,
            port: None,
            gid_index: None,
            allow_software: true,
        }
    }
}

/// The device, port and GID to listen with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Chosen {
    pub device: String,
    pub port: u8,
    pub gid_index: u16,
    pub gid_kind: GidKind,
    pub software: bool,
}

/// The reason why RDMA is unavailable for an address. RPC, log, event and metric all use the text
/// of [`Reason::word`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Reason {
    /// No RDMA device belongs to the interface.
    NoRdmaDev {
        netdev: String,
        /// Ports of the existing devices with their interfaces, such as `mlx5_0/1 (eth0)`.
        have: Vec<String>,
        /// The device or port named in the configuration, if any: `mlx5_0`, `mlx5_0/2`, `*/2`.
        pinned: Option<String>,
        /// Why the machine has no RDMA device at all.
        machine: Option<Box<NoDevice>>,
    },
    PortDown {
        device: String,
        port: u8,
        netdev: String,
        state: PortState,
        phys_state: PhysState,
    },
    NoGidForIp {
        device: String,
        port: u8,
        netdev: String,
        ip: IpAddr,
        /// The entries of the GID table.
        have: Vec<Gid>,
        /// The GID index named in the configuration, if any.
        pinned: Option<u16>,
    },
    UnsupportedLink {
        device: String,
        port: u8,
        why: Unsupported,
    },
    NoUverbs {
        device: String,
        why: NoUverbs,
    },
    /// The connection manager's node `/dev/infiniband/rdma_cm` is missing or not accessible.
    NoRdmaCm {
        access: Access,
    },
    /// RLIMIT_MEMLOCK is too low: bytes to register, bytes registered already, and the limit.
    Memlock {
        needed: u64,
        pinned: u64,
        limit: u64,
    },
}

/// The reason why a link cannot carry NVMe/RDMA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unsupported {
    /// The driver does not support reliable-connected queue pairs.
    NoReliableConnected { driver: String },
    /// Software devices are not allowed by the configuration.
    Software { driver: String },
    /// The address has only an entry of RoCE v1.
    OnlyRoceV1 { ip: IpAddr, gid_index: u16 },
    /// The link layer is neither InfiniBand nor Ethernet.
    LinkLayer,
}

/// The reason why verbs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoUverbs {
    /// The kernel offers no verbs device: ib_uverbs is not loaded.
    NoModule,
    /// The kernel has the device and /dev does not: a container without device nodes.
    NoNode {
        node: String,
    },
    Denied {
        node: String,
    },
    /// A library could not be loaded.
    Library {
        error: String,
    },
}

/// Finds the device, port and GID for a listener on `want`, or the reason why it cannot use RDMA.
///
/// The checks go from the wire to the process: link, port, GID, kernel, limits. The first failure
/// is the reason. The caller binds the address through the connection manager.
pub fn capability(
    fabric: &Fabric,
    want: &CapabilityRequest,
    environment: &Environment,
) -> Result<Chosen, Reason> {
    let (device, port) = find_port(fabric, want, environment)?;
    check_link(device, port, want)?;
    if !port.is_active() {
        return Err(Reason::PortDown {
            device: device.name.clone(),
            port: port.num,
            netdev: want.netdev.clone(),
            state: port.state,
            phys_state: port.phys_state,
        });
    }
    let gid = find_gid(device, port, want)?;
    check_environment(device, environment)?;
    Ok(Chosen {
        device: device.name.clone(),
        port: port.num,
        gid_index: gid.index,
        gid_kind: gid.kind,
        software: device.is_software(),
    })
}

/// Finds the port of the interface. Active ports are preferred to inactive ones, then hardware to
/// software.
fn find_port<'a>(
    fabric: &'a Fabric,
    want: &CapabilityRequest,
    environment: &Environment,
) -> Result<(&'a Device, &'a Port), Reason> {
    let pinned = |device: &Device, port: &Port| {
        want.device.as_ref().is_none_or(|name| *name == device.name)
            && want.port.is_none_or(|num| num == port.num)
    };
    let found = fabric
        .ports_of(&want.netdev)
        .filter(|(device, port)| pinned(device, port))
        .min_by_key(|(device, port)| (!port.is_active(), device.is_software()));
    found.ok_or_else(|| Reason::NoRdmaDev {
        netdev: want.netdev.clone(),
        have: fabric.ports().map(describe_port).collect(),
        pinned: match (&want.device, want.port) {
            (Some(device), Some(port)) => Some(format!("{device}/{port}")),
            (Some(device), None) => Some(device.clone()),
            (None, Some(port)) => Some(format!("*/{port}")),
            (None, None) => None,
        },
        machine: environment
            .no_device
            .clone()
            .filter(|_| fabric.devices.is_empty())
            .map(Box::new),
    })
}

fn describe_port((device, port): (&Device, &Port)) -> String {
    let netdev = port.netdev.as_deref().unwrap_or("no interface");
    format!("{}/{} ({netdev})", device.name, port.num)
}

fn check_link(device: &Device, port: &Port, want: &CapabilityRequest) -> Result<(), Reason> {
    let refuse = |why| {
        Err(Reason::UnsupportedLink {
            device: device.name.clone(),
            port: port.num,
            why,
        })
    };
    let driver = || device.driver.clone().unwrap_or_default();
    if device
        .quirk()
        .is_some_and(|quirk| !quirk.reliable_connected)
    {
        return refuse(Unsupported::NoReliableConnected { driver: driver() });
    }
    if device.is_software() && !want.allow_software {
        return refuse(Unsupported::Software { driver: driver() });
    }
    if port.link_layer == LinkLayer::Unknown && device.node_type != NodeType::Rnic {
        return refuse(Unsupported::LinkLayer);
    }
    Ok(())
}

fn find_gid<'a>(
    device: &Device,
    port: &'a Port,
    want: &CapabilityRequest,
) -> Result<&'a Gid, Reason> {
    let is_roce = |gid: &Gid| matches!(gid.kind, GidKind::RoceV1 | GidKind::RoceV2);
    // The connection manager selects by address and interface. An entry of another VLAN with the
    // same address belongs to another network.
    let fits = |gid: &Gid| {
        !is_roce(gid)
            || (gid.ip == Some(want.ip)
                && gid.ndev.as_ref().is_none_or(|ndev| *ndev == want.netdev))
    };
    let candidates = || port.gids.iter().filter(|gid| fits(gid));
    let found = match want.gid_index {
        Some(index) => candidates().find(|gid| gid.index == index),
        None => candidates().find(|gid| gid.kind != GidKind::RoceV1),
    };
    if let Some(gid) = found {
        return Ok(gid);
    }
    if let (None, Some(v1)) = (want.gid_index, candidates().next()) {
        return Err(Reason::UnsupportedLink {
            device: device.name.clone(),
            port: port.num,
            why: Unsupported::OnlyRoceV1 {
                ip: want.ip,
                gid_index: v1.index,
            },
        });
    }
    Err(Reason::NoGidForIp {
        device: device.name.clone(),
        port: port.num,
        netdev: want.netdev.clone(),
        ip: want.ip,
        have: port.gids.clone(),
        pinned: want.gid_index,
    })
}

fn check_environment(device: &Device, environment: &Environment) -> Result<(), Reason> {
    let no_uverbs = |why| {
        Err(Reason::NoUverbs {
            device: device.name.clone(),
            why,
        })
    };
    let node = |uverbs: &crate::Uverbs| uverbs.node.display().to_string();
    match environment.uverbs_of(&device.name) {
        None => return no_uverbs(NoUverbs::NoModule),
        Some(uverbs) => match uverbs.access {
            Access::Granted => {}
            Access::Denied => return no_uverbs(NoUverbs::Denied { node: node(uverbs) }),
            Access::Absent => return no_uverbs(NoUverbs::NoNode { node: node(uverbs) }),
        },
    }
    if let Some(error) = &environment.library {
        return no_uverbs(NoUverbs::Library {
            error: error.clone(),
        });
    }
    if environment.rdma_cm != Access::Granted {
        return Err(Reason::NoRdmaCm {
            access: environment.rdma_cm,
        });
    }
    let memlock = environment.memlock;
    match memlock.limit {
        Some(limit) if !memlock.admits(environment.memory_needed) => Err(Reason::Memlock {
            needed: environment.memory_needed,
            pinned: memlock.pinned,
            limit,
        }),
        _ => Ok(()),
    }
}

impl Reason {
    /// The reason as one word, for example `no_rdma_dev` or `port_down`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::NoRdmaDev { .. } => "no_rdma_dev",
            Self::PortDown { .. } => "port_down",
            Self::NoGidForIp { .. } => "no_gid_for_ip",
            Self::UnsupportedLink { .. } => "unsupported_link",
            Self::NoUverbs { .. } => "no_uverbs",
            Self::NoRdmaCm { .. } => "no_rdma_cm",
            Self::Memlock { .. } => "memlock",
        }
    }

    /// All results of [`Reason::word`].
    pub const WORDS: [&'static str; 7] = [
        "no_rdma_dev",
        "port_down",
        "no_gid_for_ip",
        "unsupported_link",
        "no_uverbs",
        "no_rdma_cm",
        "memlock",
    ];

    /// The facts that show the reason, for operators.
    pub fn evidence(&self) -> String {
        match self {
            Self::NoRdmaDev {
                machine: Some(machine),
                ..
            } => machine.to_string(),
            Self::NoRdmaDev { have, .. } if have.is_empty() => {
                "/sys/class/infiniband has no devices".into()
            }
            Self::NoRdmaDev { have, .. } => format!("have: {}", have.join(", ")),
            Self::PortDown {
                state, phys_state, ..
            } => format!("state {state}, physical state {phys_state}"),
            Self::NoGidForIp { have, .. } if have.is_empty() => "the GID table is empty".into(),
            Self::NoGidForIp { have, .. } => format!("have: {}", table(have)),
            Self::UnsupportedLink { why, .. } => match why {
                Unsupported::NoReliableConnected { driver } | Unsupported::Software { driver } => {
                    format!("driver {driver}")
                }
                Unsupported::OnlyRoceV1 { ip, gid_index } => {
                    format!("{ip} has GID {gid_index}, RoCE v1, and none of RoCE v2")
                }
                Unsupported::LinkLayer => "link layer unknown".into(),
            },
            Self::NoUverbs { device, why } => match why {
                NoUverbs::NoModule => {
                    format!("/sys/class/infiniband_verbs has nothing for {device}")
                }
                NoUverbs::NoNode { node } => format!("{node} is not there"),
                NoUverbs::Denied { node } => format!("{node} may not be opened by this user"),
                NoUverbs::Library { error } => error.clone(),
            },
            Self::NoRdmaCm { access } => match access {
                Access::Denied => "/dev/infiniband/rdma_cm may not be opened by this user".into(),
                _ => "/dev/infiniband/rdma_cm is not there".into(),
            },
            Self::Memlock {
                needed,
                pinned,
                limit,
            } => format!("{needed} bytes asked, {pinned} registered, limit {limit}"),
        }
    }

    /// The command or the change that removes the reason.
    pub fn remedy(&self) -> String {
        match self {
            Self::NoRdmaDev {
                machine: Some(machine),
                ..
            } => machine.remedy(),
            Self::NoRdmaDev {
                netdev,
                pinned: None,
                ..
            } => format!(
                "load the driver of the network card, or add soft-RoCE: \
                 `nacre rdma rxe add rxe0 --netdev {netdev}` (`rdma link add rxe0 type rxe netdev {netdev}`)"
            ),
            Self::NoRdmaDev { netdev, .. } => format!(
                "name the device that belongs to {netdev}, or leave device and port out"
            ),
            Self::PortDown {
                netdev, phys_state, ..
            } => match phys_state {
                PhysState::LinkUp => {
                    format!("`ip link set {netdev} up`; on InfiniBand a subnet manager must run")
                }
                _ => format!("`ip link set {netdev} up`; look at cable and switch port"),
            },
            Self::NoGidForIp {
                netdev,
                ip,
                pinned: None,
                ..
            } => format!(
                "give the interface the address: `ip address add {ip}/PREFIX dev {netdev}`"
            ),
            Self::NoGidForIp { ip, .. } => format!(
                "leave the GID index out, or set it to an entry of {ip}; `nacre rdma gids` lists them"
            ),
            Self::UnsupportedLink { device, port, why } => match why {
                Unsupported::NoReliableConnected { .. } => "use TCP on this interface".into(),
                Unsupported::Software { .. } => {
                    "set allow_software = true in [rdma] and in the [[nvmf.listener]] (both count), or use TCP on this \
                     interface"
                        .into()
                }
                Unsupported::OnlyRoceV1 { gid_index, .. } => format!(
                    "turn RoCE v2 on: `cma_roce_mode -d {device} -p {port} -m 2`; \
                     or accept v1, which is not routed: gid_index = {gid_index}"
                ),
                Unsupported::LinkLayer => "use TCP on this interface".into(),
            },
            Self::NoUverbs { why, .. } => match why {
                NoUverbs::NoModule => "`modprobe ib_uverbs`".into(),
                NoUverbs::NoNode { .. } => {
                    "give the container the device nodes: `--device=/dev/infiniband`".into()
                }
                NoUverbs::Denied { node } => format!(
                    "`chmod 0666 {node}`, or rdma-core's udev rules, or run as root"
                ),
                NoUverbs::Library { .. } => {
                    "install libibverbs1, librdmacm1 and ibverbs-providers (rdma-core)".into()
                }
            },
            Self::NoRdmaCm { access } => match access {
                Access::Denied => {
                    "`chmod 0666 /dev/infiniband/rdma_cm`, or rdma-core's udev rules, or run as root"
                        .into()
                }
                _ => "`modprobe rdma_ucm`; in a container `--device=/dev/infiniband`".into(),
            },
            Self::Memlock { needed, pinned, .. } => {
                let kib = needed.saturating_add(*pinned).div_ceil(1024);
                format!(
                    "`ulimit -l {kib}`; /etc/security/limits.conf: `* soft memlock unlimited`, \
                     `* hard memlock unlimited`; systemd: LimitMEMLOCK=infinity; \
                     container: `--ulimit memlock=-1`"
                )
            }
        }
    }
}

/// The GIDs as one line.
fn table(gids: &[Gid]) -> String {
    let entry = |gid: &Gid| {
        let address = gid.ip.unwrap_or(IpAddr::V6(gid.gid));
        format!("{} {} {address}", gid.index, gid.kind)
    };
    gids.iter().map(entry).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Reason {
    /// Writes one sentence, without evidence and remedy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRdmaDev {
                netdev,
                pinned: None,
                ..
            } => write!(f, "no RDMA device belongs to interface {netdev}"),
            Self::NoRdmaDev {
                netdev,
                pinned: Some(pinned),
                ..
            } => match pinned.strip_prefix("*/") {
                Some(port) => write!(
                    f,
                    "no RDMA device has interface {netdev} on its port {port}"
                ),
                None => write!(
                    f,
                    "RDMA device {pinned} does not belong to interface {netdev}"
                ),
            },
            Self::PortDown { device, port, .. } => {
                write!(f, "port {port} of RDMA device {device} is not active")
            }
            Self::NoGidForIp {
                device,
                port,
                ip,
                pinned: None,
                ..
            } => write!(f, "port {port} of RDMA device {device} has no GID of {ip}"),
            Self::NoGidForIp {
                device,
                port,
                ip,
                pinned: Some(index),
                ..
            } => write!(
                f,
                "GID {index} of port {port} of RDMA device {device} is not one of {ip}"
            ),
            Self::UnsupportedLink { device, port, why } => match why {
                Unsupported::NoReliableConnected { driver } => write!(
                    f,
                    "RDMA device {device} ({driver}) has no reliable-connected queue pairs"
                ),
                Unsupported::Software { .. } => {
                    write!(f, "RDMA device {device} is software, which is not allowed")
                }
                Unsupported::OnlyRoceV1 { ip, .. } => write!(
                    f,
                    "port {port} of RDMA device {device} has only RoCE v1 for {ip}"
                ),
                Unsupported::LinkLayer => write!(
                    f,
                    "port {port} of RDMA device {device} is of an unknown link layer"
                ),
            },
            Self::NoUverbs { device, why } => match why {
                NoUverbs::Library { .. } => write!(f, "the verbs libraries cannot be loaded"),
                _ => write!(f, "RDMA device {device} has no usable verbs device"),
            },
            Self::NoRdmaCm { .. } => write!(f, "the RDMA connection manager cannot be used"),
            Self::Memlock { .. } => {
                write!(
                    f,
                    "the limit on locked memory is too low to register memory"
                )
            }
        }
    }
}

impl std::error::Error for Reason {}

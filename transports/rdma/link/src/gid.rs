//! GIDs: the addresses of an RDMA port. On Ethernet each belongs to a network interface and one of
//! its IP addresses.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use serde::Serialize;

use crate::sysfs;

/// One used entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gid {
    pub index: u16,
    /// The 128 bits, written as an IPv6 address is.
    pub gid: Ipv6Addr,
    pub kind: GidKind,
    /// The network interface of the GID.
    pub ndev: Option<String>,
    /// The IP address of a RoCE GID; an IPv4-mapped GID gives the IPv4 address. `None` for other
    /// types.
    pub ip: Option<IpAddr>,
}

/// The type of an entry of a GID table, as the kernel of this machine shows it. The RDMA Provider
/// Type of a listener in the discovery log (TSAS) follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GidKind {
    /// InfiniBand: subnet prefix and GUID.
    InfiniBand,
    /// RoCE v1, Ethertype 8915h: not routed.
    RoceV1,
    /// RoCE v2, UDP port 4791: routed.
    RoceV2,
    /// An iWARP port has no GIDs; the kernel shows the MAC address.
    Iwarp,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "IB",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
            Self::Iwarp => "iWARP",
        })
    }
}

/// The kind of a port's table, apart from the types of its entries: the kernel writes `IB/RoCE v1`
/// for three different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableKind {
    InfiniBand,
    Roce,
    Iwarp,
}

/// The used entries of the table below `port`, a folder `ports/N`.
pub(crate) fn read(port: &Path, table: TableKind) -> Vec<Gid> {
    let entries = sysfs::names(&port.join("gids"));
    entries
        .iter()
        .filter_map(|index| entry(port, index, table))
        .collect()
}

fn entry(port: &Path, index: &str, table: TableKind) -> Option<Gid> {
    let gid: Ipv6Addr = sysfs::text(&port.join("gids").join(index))?.parse().ok()?;
    if gid.is_unspecified() {
        return None;
    }
    let attribute = |name: &str| sysfs::filled(&port.join("gid_attrs").join(name).join(index));
    let kind = match table {
        TableKind::InfiniBand => GidKind::InfiniBand,
        TableKind::Iwarp => GidKind::Iwarp,
        TableKind::Roce => match attribute("types")?.as_str() {
            "RoCE v2" => GidKind::RoceV2,
            _ => GidKind::RoceV1,
        },
    };
    Some(Gid {
        index: index.parse().ok()?,
        gid,
        kind,
        ndev: attribute("ndevs"),
        ip: (table == TableKind::Roce).then(|| gid.to_canonical()),
    })
}

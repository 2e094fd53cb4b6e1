//! The kernel's NVMe host: connections to a volume, and its block device, as sysfs shows them.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::context::Portal;
use super::host::Host;

/// The settings with which a move of a volume costs hosts least: a silent path is noticed within
/// 2 s, and no path is given up for good. See docs/operate/cluster.md.
const SETTINGS: &str = "keep_alive_tmo=1,reconnect_delay=1,ctrl_loss_tmo=-1";

/// The identity of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostId {
    pub nqn: String,
    pub id: Uuid,
}

/// A controller: one path to a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPath {
    pub controller: String,
    pub portal: Option<Portal>,
    pub is_live: bool,
}

/// The block device of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    /// `MAJOR:MINOR`.
    pub number: String,
}

pub(crate) fn read(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// The paths of this host to a subsystem.
pub(crate) fn paths(host: &dyn Host, me: &HostId, nqn: &str) -> Vec<HostPath> {
    let dir = host.sys().join("class/nvme");
    let path = |controller: String| {
        let at = dir.join(&controller);
        let is_ours = read(&at.join("subsysnqn"))? == nqn
            && read(&at.join("hostnqn")).is_none_or(|found| found == me.nqn);
        is_ours.then(|| HostPath {
            portal: portal(&at),
            is_live: read(&at.join("state")).as_deref() == Some("live"),
            controller,
        })
    };
    names(&dir).into_iter().filter_map(path).collect()
}

fn portal(controller: &Path) -> Option<Portal> {
    let address = read(&controller.join("address"))?;
    let of = |key: &str| {
        let mut parts = address.split(',').map(str::trim);
        parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
    };
    let ip: IpAddr = of("traddr")?.parse().ok()?;
    Some(Portal {
        transport: read(&controller.join("transport"))?,
        address: SocketAddr::new(ip, of("trsvcid")?.parse().ok()?),
    })
}

/// Portals without a controller. One that has lost its connection has one: the kernel restores it.
pub(crate) fn missing(host: &dyn Host, me: &HostId, nqn: &str, all: &[Portal]) -> Vec<Portal> {
    let there: BTreeSet<Portal> = paths(host, me, nqn)
        .into_iter()
        .filter_map(|path| path.portal)
        .collect();
    all.iter()
        .filter(|one| !there.contains(one))
        .cloned()
        .collect()
}

pub(crate) fn connect(host: &dyn Host, me: &HostId, nqn: &str, portal: &Portal) -> io::Result<()> {
    let options = format!(
        "transport={},traddr={},trsvcid={},nqn={nqn},hostnqn={},hostid={},{SETTINGS}",
        portal.transport,
        portal.address.ip(),
        portal.address.port(),
        me.nqn,
        me.id,
    );
    match host.connect(&options) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::ALREADY.raw_os_error()) => {
            Ok(())
        }
        outcome => outcome,
    }
}

/// Deletes all controllers of the subsystem.
pub(crate) fn disconnect(host: &dyn Host, me: &HostId, nqn: &str) -> io::Result<()> {
    for path in paths(host, me, nqn) {
        match host.disconnect(&path.controller) {
            // It went by itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            outcome => outcome?,
        }
    }
    Ok(())
}

/// The device with this UUID. With native multipath there is one; without, one per path: then one
/// whose path is optimized, else one that is live.
pub(crate) fn device(host: &dyn Host, uuid: Uuid) -> Option<Device> {
    let dir = host.sys().join("class/block");
    let fits = |name: &String| {
        is_namespace(name)
            && read(&dir.join(name).join("uuid"))
                .and_then(|text| Uuid::parse_str(&text).ok())
                .is_some_and(|found| found == uuid)
    };
    let rank = |name: &String| {
        let at = dir.join(name);
        let is_optimized = read(&at.join("ana_state")).as_deref() == Some("optimized");
        let is_live = read(&at.join("device/state")).as_deref() == Some("live");
        (!is_optimized, !is_live)
    };
    let found = names(&dir).into_iter().filter(fits).min_by_key(rank)?;
    let at = dir.join(&found);
    let sectors: u64 = read(&at.join("size"))?.parse().ok()?;
    Some(Device {
        path: host.dev().join(&found),
        bytes: sectors.checked_mul(512)?,
        number: read(&at.join("dev"))?,
        name: found,
    })
}

/// The subsystem that a volume's device belongs to.
pub(crate) fn subsystem_of(host: &dyn Host, uuid: Uuid) -> Option<String> {
    let name = device(host, uuid)?.name;
    let at = host.sys().join("class/block").join(name).join("device");
    read(&at.join("subsysnqn"))
}

/// `nvme0n1`, not a partition (`nvme0n1p1`) and not a hidden path (`nvme0c1n1`).
fn is_namespace(name: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let split = name
        .strip_prefix("nvme")
        .and_then(|rest| rest.split_once('n'));
    split.is_some_and(|(controller, namespace)| digits(controller) && digits(namespace))
}

#[cfg(test)]
mod tests {
    use super::is_namespace;

    #[test]
    fn hidden_paths_and_partitions_are_no_devices() {
        assert!(is_namespace("nvme0n1") && is_namespace("nvme12n3"));
        for other in ["nvme0c1n1", "nvme0n1p1", "nvme0", "sda", "nvmen1", "nvme0n"] {
            assert!(!is_namespace(other), "{other}");
        }
    }
}

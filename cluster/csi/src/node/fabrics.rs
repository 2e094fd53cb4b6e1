//! The kernel's NVMe host as sysfs shows it: the paths to a subsystem, and the block device of a
//! volume.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use tonic::Status;
use uuid::Uuid;

use super::context::Address;
use super::host::Host;

/// A controller of the kernel's host: one path to a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPath {
    /// Its name in `/sys/class/nvme`, such as `nvme0`.
    pub controller: String,
    /// `None`: not an IP address with a port.
    pub address: Option<Address>,
    pub is_live: bool,
}

/// The block device of a volume: a namespace of the kernel's host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// Such as `nvme0n1`.
    pub name: String,
    /// Its file in `/dev`.
    pub path: PathBuf,
    pub bytes: u64,
    /// `MAJOR:MINOR`.
    pub number: String,
    /// The NQN of its subsystem.
    pub nqn: String,
    pub is_read_only: bool,
}

/// Longest value in sysfs: one page.
const MOST: u64 = 4096;

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = File::open(path).ok()?;
    file.take(MOST).read_to_string(&mut text).ok()?;
    Some(text.trim().to_owned())
}

/// The sorted names in a directory. Empty if it does not exist: the kernel's module is not loaded.
fn names(dir: &Path) -> Result<Vec<String>, Status> {
    let list = || {
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            found => found?,
        };
        let name = |entry: io::Result<std::fs::DirEntry>| {
            let name = entry.map(|entry| entry.file_name().into_string().ok());
            name.transpose()
        };
        entries.filter_map(name).collect::<io::Result<Vec<_>>>()
    };
    let mut names = list().map_err(|error| {
        Status::unavailable(format!("{} cannot be read: {error}", dir.display()))
    })?;
    names.sort();
    Ok(names)
}

/// The paths of the host `host_nqn` to a subsystem. A controller without the attribute `hostnqn`
/// counts as one of this host.
pub(crate) fn paths(host: &dyn Host, host_nqn: &str, nqn: &str) -> Result<Vec<HostPath>, Status> {
    let dir = host.sys().join("class/nvme");
    let path = |controller: String| {
        let at = dir.join(&controller);
        let is_ours = read(&at.join("subsysnqn"))? == nqn
            && read(&at.join("hostnqn")).is_none_or(|found| found == host_nqn);
        is_ours.then(|| HostPath {
            address: address(&at),
            is_live: read(&at.join("state")).as_deref() == Some("live"),
            controller,
        })
    };
    Ok(names(&dir)?.into_iter().filter_map(path).collect())
}

fn address(controller: &Path) -> Option<Address> {
    let address = read(&controller.join("address"))?;
    let of = |key: &str| {
        let mut parts = address.split(',').map(str::trim);
        parts.find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
    };
    let ip: IpAddr = of("traddr")?.parse().ok()?;
    Some(Address {
        transport: read(&controller.join("transport"))?,
        socket: SocketAddr::new(ip, of("trsvcid")?.parse().ok()?),
    })
}

/// The device of the namespace with this UUID, if any. With native multipath there is one for all
/// paths. With several, the error is `FAILED_PRECONDITION`. Either native multipath is off, so each
/// path has a device with a page cache of its own. Or another target has a copy of the volume.
pub(crate) fn device(host: &dyn Host, uuid: Uuid) -> Result<Option<Device>, Status> {
    let mut found = devices(host, uuid)?;
    if found.len() < 2 {
        return Ok(found.pop());
    }
    let names: Vec<String> = found.into_iter().map(|device| device.name).collect();
    Err(Status::failed_precondition(format!(
        "volume {uuid} has several devices here ({}): turn on native multipath \
         (nvme_core.multipath=Y), and disconnect other targets with a copy of the volume",
        names.join(", ")
    )))
}

/// All devices whose namespace has this UUID.
pub(crate) fn devices(host: &dyn Host, uuid: Uuid) -> Result<Vec<Device>, Status> {
    all_devices(host, |at| {
        let found = read(&at.join("uuid")).and_then(|text| Uuid::parse_str(&text).ok());
        found == Some(uuid)
    })
}

/// All devices of a subsystem.
pub(crate) fn devices_of(host: &dyn Host, nqn: &str) -> Result<Vec<Device>, Status> {
    all_devices(host, |at| {
        read(&at.join("device/subsysnqn")).is_some_and(|found| found == nqn)
    })
}

/// The NQNs of hosts with paths from this machine to a subsystem.
pub(crate) fn host_nqns(host: &dyn Host, nqn: &str) -> Result<BTreeSet<String>, Status> {
    let dir = host.sys().join("class/nvme");
    let of = |controller: String| {
        let at = dir.join(controller);
        (read(&at.join("subsysnqn"))? == nqn).then(|| read(&at.join("hostnqn")))?
    };
    Ok(names(&dir)?.into_iter().filter_map(of).collect())
}

/// The namespaces whose directory in `/sys/class/block` fits. `UNAVAILABLE` if one of them appears
/// or disappears meanwhile.
fn all_devices(host: &dyn Host, fits: impl Fn(&Path) -> bool) -> Result<Vec<Device>, Status> {
    let dir = host.sys().join("class/block");
    let fits = |name: &String| is_namespace(name) && fits(&dir.join(name));
    let device = |name: String| {
        let at = dir.join(&name);
        let of = || {
            let sectors: u64 = read(&at.join("size"))?.parse().ok()?;
            Some(Device {
                path: host.dev().join(&name),
                bytes: sectors.checked_mul(512)?,
                number: read(&at.join("dev"))?,
                nqn: read(&at.join("device/subsysnqn"))?,
                is_read_only: read(&at.join("ro")).as_deref() == Some("1"),
                name: name.clone(),
            })
        };
        of().ok_or_else(|| {
            let text = format!("device {name} is just coming or going: try again");
            Status::unavailable(text)
        })
    };
    names(&dir)?.into_iter().filter(fits).map(device).collect()
}

/// True while the kernel has the block device `MAJOR:MINOR`. File systems without a block device of
/// their own have the major number 0: tmpfs, overlay, btrfs, NFS. They are present while mounted.
pub(crate) fn is_present(host: &dyn Host, number: &str) -> bool {
    number.starts_with("0:") || host.sys().join("dev/block").join(number).exists()
}

/// True for `nvme0n1`, not for a partition (`nvme0n1p1`) or a hidden path (`nvme0c1n1`).
pub(crate) fn is_namespace(name: &str) -> bool {
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

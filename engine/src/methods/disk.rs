//! `disk_*`, Nacre extensions: the bay of a disk and its locate light.
//!
//! The daemon switches the light itself if it may write to sysfs. The unit of the package may not:
//! on an appliance the daemon leaves a request, as for other acts on the machine.

use std::io::ErrorKind;
use std::path::Path;
use std::rc::Rc;

use nacre_bdev::registry::Registry as Bdevs;
use nacre_bdev::{Bdev, Layer};
use nacre_bdev_nvme_vfio::pci::{Bay, BayError, BayKind, DiskName, System};
use nacre_engine_appliance::acts::{self, Request, RequestError};
use nacre_engine_appliance::place::Places;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bdev_modules;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::drives::Drive;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetBay>().add::<Locate>();
}

struct GetBay;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetBayParams {
    /// A controller of a drive, a bdev on a disk, a PCI address, or a block device of the kernel.
    name: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct BayReply {
    /// The disk: its PCI address, or its name as a block device.
    disk: String,
    /// `npem` (native PCIe enclosure management), `slot` (attention indicator of a hot-plug slot),
    /// or `enclosure` (SCSI enclosure services).
    kind: &'static str,
    /// The kernel's name of the bay.
    bay: String,
    /// True if the light is on.
    lit: bool,
    /// True if the appliance's service switches the light later.
    requested: bool,
}

impl BayReply {
    fn new(disk: &DiskName, bay: Bay) -> Self {
        Self {
            disk: disk.to_string(),
            kind: match bay.kind {
                BayKind::Npem => "npem",
                BayKind::Slot => "slot",
                BayKind::Enclosure => "enclosure",
            },
            bay: bay.name,
            lit: bay.lit,
            requested: false,
        }
    }
}

/// Most machines have no lights: that is an answer.
#[derive(Debug, Serialize, JsonSchema)]
struct GetBayReply {
    /// None: the kernel shows no light.
    bay: Option<BayReply>,
    /// Why there is no bay.
    problem: Option<String>,
}

impl Method<Engine> for GetBay {
    const NAME: &'static str = "disk_get_bay";
    const ABOUT: &'static str = "Shows the bay of a disk and whether its locate light is on.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = GetBayParams;
    type Reply = GetBayReply;

    async fn apply(params: GetBayParams, engine: Rc<Engine>) -> Result<GetBayReply, RpcError> {
        let named = Named::find(&engine, params.name)?;
        blocking(move || {
            let disk = named.disk(Path::new(DEV))?;
            bay(&System::real(), &disk)
        })
        .await
    }
}

fn bay(system: &System, disk: &DiskName) -> Result<GetBayReply, RpcError> {
    match system.bay(disk) {
        Ok(bay) => Ok(GetBayReply {
            bay: Some(BayReply::new(disk, bay)),
            problem: None,
        }),
        Err(error @ BayError::NoLight(_)) => Ok(GetBayReply {
            bay: None,
            problem: Some(error.to_string()),
        }),
        Err(error) => Err(refusal(error)),
    }
}

struct Locate;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct LocateParams {
    /// A controller of a drive, a bdev on a disk, a PCI address, or a block device of the kernel.
    name: String,
    /// Whether the light is on.
    on: bool,
}

impl Method<Engine> for Locate {
    const NAME: &'static str = "disk_locate";
    const ABOUT: &'static str = "Switches the locate light of a disk's bay on or off.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = LocateParams;
    type Reply = BayReply;

    async fn apply(params: LocateParams, engine: Rc<Engine>) -> Result<BayReply, RpcError> {
        let named = Named::find(&engine, params.name)?;
        blocking(move || {
            let disk = named.disk(Path::new(DEV))?;
            locate(&System::real(), &Places::system(), &disk, params.on)
        })
        .await
    }
}

fn locate(
    system: &System,
    places: &Places,
    disk: &DiskName,
    on: bool,
) -> Result<BayReply, RpcError> {
    let refused = match system.locate(disk, on) {
        Ok(bay) => return Ok(BayReply::new(disk, bay)),
        Err(error @ BayError::NotPermitted { .. }) => error,
        Err(error) => return Err(refusal(error)),
    };
    let request = Request::Locate {
        disk: disk.to_string(),
        on,
    };
    match acts::ask(places, &request) {
        Ok(()) => Ok(BayReply {
            requested: true,
            ..BayReply::new(disk, system.bay(disk).map_err(refusal)?)
        }),
        Err(RequestError::Status(_)) => {
            let word = if on { "on" } else { "off" };
            let remedy = format!("`nacre nvme locate {disk} {word}` as root on that machine");
            Err(refusal(refused).remedy(remedy))
        }
        Err(error @ (RequestError::Waiting | RequestError::Running { .. })) => {
            Err(RpcError::errno(Errno::EBUSY, error.to_string()))
        }
        Err(error) => Err(RpcError::errno(Errno::EIO, error.to_string())),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// The folder of device nodes.
const DEV: &str = "/dev";

/// The object that a call names, with its parts. Device nodes are resolved later, because that may
/// block.
#[derive(Debug)]
struct Named {
    name: String,
    below: Vec<Below>,
}

/// A part of the named object.
#[derive(Debug, PartialEq, Eq)]
enum Below {
    Disk(DiskName),
    /// The file of a bdev, or a device node.
    File(String),
    /// The name of a bdev that the daemon does not have.
    Missing(String),
}

/// The reason that a name does not lead to exactly one disk.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum DiskError {
    #[error("\"{0}\" is no controller, no bdev and no disk of this machine")]
    Unknown(String),
    #[error("\"{0}\" is on no disk of this machine")]
    NoDisk(String),
    #[error("\"{name}\" is on {}", join(.disks))]
    Several { name: String, disks: Vec<DiskName> },
    #[error("\"{name}\" is on \"{missing}\", which this machine does not have now")]
    Missing {
        name: String,
        missing: String,
        /// The other disks.
        disks: Vec<DiskName>,
    },
    #[error("{path}: {kind}")]
    Node { path: String, kind: ErrorKind },
}

fn join(disks: &[DiskName]) -> String {
    let disks: Vec<String> = disks.iter().map(DiskName::to_string).collect();
    disks.join(", ")
}

impl From<DiskError> for RpcError {
    fn from(error: DiskError) -> Self {
        let errno = match &error {
            DiskError::Unknown(_) | DiskError::Missing { .. } => Errno::ENODEV,
            DiskError::NoDisk(_) => Errno::ENOTSUP,
            DiskError::Several { .. } => Errno::EINVAL,
            DiskError::Node { .. } => Errno::EIO,
        };
        let refused = Self::errno(errno, error.to_string()).field("name");
        match error {
            DiskError::Unknown(_) => {
                refused.remedy("`nacre nvme list` and `nacre bdev list` show them")
            }
            DiskError::Several { .. } => refused.remedy("name one of these disks"),
            DiskError::Missing { disks, .. } if !disks.is_empty() => {
                refused.remedy(format!("to locate another disk, name it: {}", join(&disks)))
            }
            _ => refused,
        }
    }
}

impl Named {
    fn find(engine: &Engine, name: String) -> Result<Self, DiskError> {
        if let Some(drive) = engine.drives.find(&name)
            && let Ok(disk) = drive.address.parse()
        {
            let below = vec![Below::Disk(disk)];
            return Ok(Self { name, below });
        }
        let bdevs = engine.plane().ok().map(|plane| plane.bdevs.clone());
        if let Some(bdevs) = bdevs
            && let Some(layer) = bdevs.lookup(&name)
        {
            let mut below = Vec::new();
            add_below(engine, &bdevs, &layer, &mut below);
            return Ok(Self { name, below });
        }
        let below = match name.parse() {
            Ok(disk) => Below::Disk(disk),
            Err(_) if Path::new(&name).starts_with(DEV) => Below::File(name.clone()),
            Err(_) => return Err(DiskError::Unknown(name)),
        };
        let below = vec![below];
        Ok(Self { name, below })
    }

    /// The one disk of the object. Follows links in `dev`, the folder of device nodes.
    fn disk(self, dev: &Path) -> Result<DiskName, DiskError> {
        let Self { name, below } = self;
        let mut disks = Vec::new();
        let mut first_missing = None;
        for part in below {
            let disk = match part {
                Below::Disk(disk) => Some(disk),
                Below::File(file) => match DiskName::of_node(dev, Path::new(&file)) {
                    Ok(disk) => disk,
                    Err(error) if error.kind() == ErrorKind::NotFound => {
                        first_missing.get_or_insert(file);
                        None
                    }
                    Err(error) => {
                        let kind = error.kind();
                        return Err(DiskError::Node { path: file, kind });
                    }
                },
                Below::Missing(bdev) => {
                    first_missing.get_or_insert(bdev);
                    None
                }
            };
            if let Some(disk) = disk
                && !disks.contains(&disk)
            {
                disks.push(disk);
            }
        }
        if let Some(missing) = first_missing {
            if missing == name {
                return Err(DiskError::Unknown(name));
            }
            return Err(DiskError::Missing {
                name,
                missing,
                disks,
            });
        }
        match disks.len() {
            0 => Err(DiskError::NoDisk(name)),
            1 => Ok(disks.remove(0)),
            _ => Err(DiskError::Several { name, disks }),
        }
    }
}

/// Adds the disks, device nodes and missing bdevs below a bdev.
fn add_below(engine: &Engine, bdevs: &Bdevs, layer: &Layer, below: &mut Vec<Below>) {
    let is_of = |drive: &Drive| drive.devices().iter().any(|one| one.name() == layer.name());
    let mut drives = engine.drives.list().into_iter();
    if let Some((_, drive)) = drives.find(|(_, drive)| is_of(drive)) {
        below.extend(drive.address.parse().ok().map(Below::Disk));
        return;
    }
    let module = layer.module();
    let facts = module.driver_specific();
    if let Some(file) = bdev_modules::file_of(&facts) {
        below.push(Below::File(file.to_owned()));
        return;
    }
    for base in bases(engine, layer) {
        match bdevs.lookup(&base) {
            Some(base) => add_below(engine, bdevs, &base, below),
            None => below.push(Below::Missing(base)),
        }
    }
}

/// The bdevs directly below one; for a volume also those of replicas that are not in use now.
fn bases(engine: &Engine, layer: &Layer) -> Vec<String> {
    let mut volumes = engine.volumes.list().into_iter();
    let volume = volumes.find(|volume| volume.bdev() == Some(layer.name()));
    match volume.and_then(|volume| volume.status()) {
        Some(status) => {
            let replicas = status.replicas.into_iter();
            replicas.map(|replica| replica.device).collect()
        }
        None => layer.module().bases(),
    }
}

fn refusal(error: BayError) -> RpcError {
    let errno = match &error {
        BayError::NoDisk(_) => Errno::ENODEV,
        BayError::NoLight(_) => Errno::ENOTSUP,
        BayError::NotPermitted { .. } => Errno::EPERM,
        BayError::Io { .. } => Errno::EIO,
    };
    let is_name = matches!(error, BayError::NoDisk(_) | BayError::NoLight(_));
    let refused = RpcError::errno(errno, error.to_string());
    if is_name {
        refused.field("name")
    } else {
        refused
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nacre_bdev_nvme_vfio::pci::testing::Machine;
    use serde_json::json;

    use super::*;
    use crate::methods::testing::test_daemon;

    /// Goal: a daemon that may not write to sysfs has the appliance switch the light, and names the
    /// command on another machine.
    #[test]
    fn a_daemon_without_rights_asks_the_appliance() {
        let machine = Machine::usual();
        machine.file("sys/bus/pci/slots/3/address", "0000:01:00\n");
        machine.file("sys/bus/pci/slots/3/attention", "0\n");
        let system = machine.system();
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        let disk: DiskName = "nvme0n1".parse().unwrap();
        let other: DiskName = "nvme1n1".parse().unwrap();
        let without = bay(&system, &other).unwrap();
        assert!(without.bay.is_none() && without.problem.unwrap().contains("no light"));
        assert!(bay(&system, &disk).unwrap().bay.is_some_and(|bay| !bay.lit));
        let done = locate(&system, &places, &disk, true).unwrap();
        assert_eq!(
            (done.kind, done.bay.as_str(), done.lit),
            ("slot", "3", true)
        );
        assert!(!done.requested);
        let refuse = ErrorKind::ReadOnlyFilesystem;
        machine
            .kernel
            .refuse
            .lock()
            .insert("attention".into(), refuse);
        let refused = locate(&system, &places, &disk, false).unwrap_err();
        let text = serde_json::to_string(&refused).unwrap();
        assert!(text.contains("nacre nvme locate nvme0n1 off"), "{text}");
        for path in [places.os_release(), places.boot_id()] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        let asked = locate(&system, &places, &disk, false).unwrap();
        assert!(asked.requested && asked.lit);
        let off = Request::Locate {
            disk: "nvme0n1".into(),
            on: false,
        };
        assert_eq!(acts::waiting(&places), Some(off));
        let refused = locate(&system, &places, &disk, true).unwrap_err();
        let text = serde_json::to_string(&refused).unwrap();
        assert!(text.contains("waits for its turn"), "{text}");
    }

    /// Goal: a name stands for one disk, or is refused with the disks that it stands for. Method:
    /// device nodes with links as udev makes them; objects on none, one and several of them.
    #[test]
    fn a_name_stands_for_one_disk() {
        let root = tempfile::tempdir().unwrap();
        let dev = root.path().join("dev");
        fs::create_dir_all(dev.join("disk/by-id")).unwrap();
        for node in ["sda", "sdb"] {
            fs::write(dev.join(node), "").unwrap();
        }
        let at = |node: &str| dev.join(node).to_str().unwrap().to_owned();
        for (link, node) in [("ata-A", "sda"), ("wwn-A", "sda"), ("gone", "sdz")] {
            let target = format!("../../{node}");
            std::os::unix::fs::symlink(target, dev.join("disk/by-id").join(link)).unwrap();
        }
        let file = |node: &str| Below::File(at(node));
        let disk = |below: Vec<Below>| {
            let name = "v0".to_owned();
            Named { name, below }.disk(&dev)
        };
        let name = |disk: &str| disk.parse::<DiskName>().unwrap();
        let (a, b) = (name("sda"), name("sdb"));
        let image = root.path().join("disk.img").to_str().unwrap().to_owned();
        for one in [
            vec![file("sda")],
            vec![file("disk/by-id/ata-A")],
            vec![file("disk/by-id/ata-A"), file("disk/by-id/wwn-A")],
            vec![
                Below::Disk(a.clone()),
                file("sda"),
                Below::File(image.clone()),
            ],
        ] {
            let text = format!("{one:?}");
            assert_eq!(disk(one), Ok(a.clone()), "{text}");
        }
        for none in [vec![], vec![Below::File(image)]] {
            assert_eq!(disk(none), Err(DiskError::NoDisk("v0".into())));
        }
        let several = disk(vec![file("disk/by-id/wwn-A"), file("sdb")]).unwrap_err();
        assert_eq!(several.to_string(), "\"v0\" is on sda, sdb");
        let expected = DiskError::Several {
            name: "v0".into(),
            disks: vec![a.clone(), b],
        };
        assert_eq!(several, expected);
        for (part, missing) in [
            (Below::Missing("m1".into()), "m1".to_owned()),
            (file("disk/by-id/gone"), at("disk/by-id/gone")),
        ] {
            let expected = DiskError::Missing {
                name: "v0".into(),
                missing,
                disks: vec![a.clone()],
            };
            assert_eq!(disk(vec![file("sda"), part]), Err(expected));
        }
    }

    /// Goal: a bdev names its disk through the bdevs below it; one in memory has none.
    #[test]
    fn a_bdev_names_its_disk() {
        let daemon = test_daemon();
        let malloc = json!({ "name": "m0", "num_blocks": 64, "block_size": 512 });
        daemon.call("bdev_malloc_create", malloc);
        for method in ["disk_get_bay", "disk_locate"] {
            for (name, part) in [
                ("m0", "on no disk"),
                ("no-such-disk", "has no disk no-such-disk"),
                ("a/b", "no controller, no bdev"),
                ("/dev/disk/by-id/no-such-disk", "no controller, no bdev"),
            ] {
                let mut params = json!({ "name": name });
                if method == "disk_locate" {
                    params["on"] = json!(true);
                }
                let refused = daemon.refused(method, params);
                let text = serde_json::to_value(&refused).unwrap();
                assert_eq!(text["data"]["field"], "name", "{text}");
                assert!(text.to_string().contains(part), "{text}");
            }
        }
    }
}

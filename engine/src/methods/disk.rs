//! `disk_*`, Nacre extensions: the bay of a disk and its locate light.
//!
//! The daemon switches the light itself if it may write to sysfs. The unit of the package may not:
//! on an appliance the daemon leaves a request, as for other acts on the machine.

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
    /// True if the light follows in a moment, by the machine's own service.
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
        let disk = disk(&engine, &params.name)?;
        blocking(move || bay(&System::real(), &disk)).await
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
        let disk = disk(&engine, &params.name)?;
        blocking(move || locate(&System::real(), &Places::system(), &disk, params.on)).await
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

/// The disk of a name.
fn disk(engine: &Engine, name: &str) -> Result<DiskName, RpcError> {
    if let Some(drive) = engine.drives.find(name)
        && let Ok(disk) = drive.address.parse()
    {
        return Ok(disk);
    }
    let bdevs = engine.plane().ok().map(|plane| plane.bdevs.clone());
    if let Some(bdevs) = bdevs
        && let Some(layer) = bdevs.lookup(name)
    {
        return disk_below(engine, &bdevs, &layer).ok_or_else(|| {
            let cause = format!("bdev \"{name}\" is on no disk of this machine");
            RpcError::errno(Errno::ENOTSUP, cause).field("name")
        });
    }
    name.parse().map_err(|_| {
        let cause = format!("\"{name}\" is no controller, no bdev and no disk of this machine");
        RpcError::errno(Errno::ENODEV, cause)
            .field("name")
            .remedy("`nacre nvme list` and `nacre bdev list` show them")
    })
}

/// The disk of the lowest bdev, the first one if there are several.
fn disk_below(engine: &Engine, bdevs: &Bdevs, layer: &Layer) -> Option<DiskName> {
    let is_of = |drive: &Drive| drive.devices().iter().any(|one| one.name() == layer.name());
    let mut drives = engine.drives.list().into_iter();
    if let Some((_, drive)) = drives.find(|(_, drive)| is_of(drive)) {
        return drive.address.parse().ok();
    }
    let module = layer.module();
    let facts = module.driver_specific();
    let file = bdev_modules::file_of(&facts);
    if let Some(disk) = file.and_then(|file| file.strip_prefix("/dev/")?.parse().ok()) {
        return Some(disk);
    }
    let bases = module.bases();
    let below = bases.iter().find_map(|base| bdevs.lookup(base))?;
    disk_below(engine, bdevs, &below)
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
    use std::io::ErrorKind;

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

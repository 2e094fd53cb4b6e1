//! `disk_list`, a Nacre extension: the disks of this machine, for a person who chooses one for a
//! bdev without a shell.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_nvme_vfio::pci::{DiskName, MachineDisk, System};
use nacre_engine_appliance::drives::{self, DriveState, DriveStatus};
use nacre_engine_appliance::place::Places;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::bdev_modules;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;

/// A disk that does not answer may block a read for minutes.
pub(super) const LIMIT: Duration = Duration::from_secs(10);

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<List>();
}

struct List;

#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct DiskReply {
    /// The disk in other calls: its name as a block device, or its PCI address.
    name: String,
    /// A path that stays the same over restarts, for `bdev_aio_create`. Absent: vfio-pci has the
    /// drive, for `bdev_nvme_attach_controller`.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// PCI address of an NVMe drive.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// Absent: the kernel does not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    /// Bytes; 0 if it is unknown.
    size: u64,
    /// Bytes; 0 if it is unknown.
    block_size: u32,
    read_only: bool,
    /// Number of partitions: data of another system.
    partitions: u32,
    /// Users of the disk and of its partitions, in words.
    uses: Vec<String>,
    /// Bdevs of this daemon on it.
    bdevs: Vec<String>,
}

impl Method<Engine> for List {
    const NAME: &'static str = "disk_list";
    const ABOUT: &'static str =
        "Lists the disks of this machine, with serial numbers, lasting paths and users.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = Vec<DiskReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<DiskReply>, RpcError> {
        let own = Own::of(&engine);
        within(LIMIT, move || {
            let system = System::real();
            let taken = drives::status(&Places::system(), &system);
            own.described(system.machine_disks(), &taken.unwrap_or_default())
        })
        .await
    }
}

/// One survey at a time: a disk that does not answer holds one thread, not one for each call.
static SURVEY: Semaphore = Semaphore::const_new(1);

pub(super) async fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RpcError> {
    let survey = async {
        let permit = SURVEY.acquire().await;
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        })
        .await
    };
    match timeout(limit, survey).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
        Err(_) => {
            let cause = format!("a disk has not answered within {} s", limit.as_secs());
            let refused = RpcError::errno(Errno::ETIMEDOUT, cause);
            Err(refused.remedy("the kernel's log (`dmesg`) names it"))
        }
    }
}

/// What this daemon has on disks.
#[derive(Debug, Default)]
struct Own {
    /// Device nodes of bdevs, with the bdevs' names.
    nodes: Vec<(String, String)>,
    /// PCI addresses of attached drives, with the bdevs of each.
    drives: Vec<(String, Vec<String>)>,
}

impl Own {
    fn of(engine: &Engine) -> Self {
        let bdevs = engine.plane().ok().map(|plane| plane.bdevs.list());
        let nodes = bdevs.into_iter().flatten().filter_map(|bdev| {
            let facts = bdev.layer.module().driver_specific();
            let node = bdev_modules::file_of(&facts)?.to_owned();
            Some((node, bdev.layer.name().to_owned()))
        });
        let drives = engine.drives.list().into_iter().map(|(_, drive)| {
            let devices = drive.devices();
            let names = devices.iter().map(|device| device.name().to_owned());
            (drive.address.clone(), names.collect())
        });
        Self {
            nodes: nodes.collect(),
            drives: drives.collect(),
        }
    }

    /// A drive of vfio-pci shows no serial number: `taken` has it from the time before.
    fn described(&self, disks: Vec<MachineDisk>, taken: &[DriveStatus]) -> Vec<DiskReply> {
        let on = self.nodes.iter().filter_map(|(node, bdev)| {
            let disk = DiskName::of_node(Path::new("/dev"), Path::new(node));
            Some((disk.ok()??.to_string(), bdev))
        });
        let on: Vec<(String, &String)> = on.collect();
        let named = |mut disk: MachineDisk| {
            let is_it = |one: &&DriveStatus| {
                one.state == DriveState::Bound && one.drive.address == disk.address
            };
            if let Some(known) = taken.iter().find(is_it)
                && disk.name.is_none()
            {
                disk.serial = Some(known.drive.serial.clone());
                disk.model = Some(known.drive.model.clone());
            }
            disk
        };
        disks
            .into_iter()
            .map(|disk| self.reply(named(disk), &on))
            .collect()
    }

    fn reply(&self, disk: MachineDisk, on: &[(String, &String)]) -> DiskReply {
        let address = disk.address.map(|address| address.to_string());
        let is_on = |node: &str| disk.devices.iter().any(|device| device == node);
        let bdevs = on.iter().filter(|(node, _)| is_on(node));
        let mut bdevs: Vec<String> = bdevs.map(|(_, bdev)| (*bdev).clone()).collect();
        if disk.name.is_none() {
            let of = self
                .drives
                .iter()
                .filter(|(at, _)| Some(at) == address.as_ref());
            bdevs.extend(of.flat_map(|(_, names)| names.clone()));
        }
        DiskReply {
            name: disk.name.or_else(|| address.clone()).unwrap_or_default(),
            path: disk.path,
            address,
            serial: disk.serial,
            model: disk.model,
            size: disk.bytes,
            block_size: disk.block_size,
            read_only: disk.is_read_only,
            partitions: disk.devices.len().saturating_sub(1) as u32,
            uses: disk.uses.iter().map(ToString::to_string).collect(),
            bdevs,
        }
    }
}

#[cfg(test)]
mod tests {
    use nacre_bdev_nvme_vfio::pci::testing::Machine;
    use nacre_engine_appliance::drives::TakenDrive;
    use serde_json::json;

    use super::*;
    use crate::methods::testing::test_daemon;

    /// Goal: a disk is shown with its users, and with the bdevs that this daemon has on it.
    #[test]
    fn disks_with_their_users() {
        let machine = Machine::usual();
        let at = "sys/class/block/nvme0n1";
        machine.file(&format!("{at}/device/serial"), "S1\n");
        machine.file("proc/swaps", "Filename Type\n/dev/nvme0n1 partition");
        let own = Own::default();
        let shown = own.described(machine.system().machine_disks(), &[]);
        let expected = json!([{
            "name": "nvme0n1", "path": "/dev/nvme0n1", "address": "0000:01:00.0", "serial": "S1",
            "model": "QEMU NVMe Ctrl", "size": 1 << 20, "block_size": 512, "read_only": false,
            "partitions": 0, "uses": ["nvme0n1 is swap space"], "bdevs": [],
        }]);
        assert_eq!(serde_json::to_value(shown).unwrap(), expected);

        let address = "0000:02:00.0";
        machine
            .system()
            .bind(address.parse().unwrap(), &Default::default())
            .unwrap();
        let own = Own {
            nodes: Vec::new(),
            drives: vec![(address.to_owned(), vec!["Nvme0n1".to_owned()])],
        };
        let shown = own.described(machine.system().machine_disks(), &[]);
        let taken = &shown[1];
        assert_eq!((taken.name.as_str(), &taken.path), (address, &None));
        assert_eq!(taken.bdevs, ["Nvme0n1"]);
        assert_eq!((&taken.serial, &taken.model), (&None, &None));
        let known = |state| DriveStatus {
            drive: TakenDrive {
                serial: "S2".into(),
                model: "M".into(),
                address: address.parse().ok(),
            },
            state,
        };
        for (state, serial) in [(DriveState::Bound, Some("S2")), (DriveState::Missing, None)] {
            let shown = own.described(machine.system().machine_disks(), &[known(state)]);
            assert_eq!(shown[0].serial.as_deref(), Some("S1"));
            assert_eq!(shown[1].serial.as_deref(), serial);
        }
        for (node, expected) in [("nvme0n1", 1), ("nvme9n1", 0)] {
            let bdev = "disk0".to_owned();
            let disk = machine.system().machine_disks().remove(0);
            let reply = own.reply(disk, &[(node.to_owned(), &bdev)]);
            assert_eq!(reply.bdevs.len(), expected, "{node}");
        }
    }

    /// Goal: the disks of the machine of this test are an answer, whatever they are; a disk that
    /// does not answer costs one thread, and each call ends.
    #[test]
    fn a_disk_that_does_not_answer() {
        let daemon = test_daemon();
        assert!(daemon.call("disk_list", json!(null)).is_array());
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let short = Duration::from_millis(50);
        let stuck = daemon.run(within(short, move || wait.recv().is_ok()));
        let late = |refused: RpcError| refused.to_string().contains("has not answered");
        assert!(late(stuck.unwrap_err()));
        assert!(late(daemon.run(within(short, || true)).unwrap_err()));
        release.send(()).unwrap();
        assert_eq!(daemon.run(within(LIMIT, || true)), Ok(true));
    }
}

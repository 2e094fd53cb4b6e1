//! `disk_list`, a Nacre extension: the disks of this machine, for choosing one for a bdev without a
//! shell.

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
        let survey = move || {
            let system = System::real();
            let taken = drives::status(&Places::system(), &system);
            own.described(system.machine_disks(), &taken.unwrap_or_default())
        };
        SURVEY.run(survey).await
    }
}

/// Runs work on disks that may block for minutes, on a helper thread, one at a time. So a disk that
/// does not answer holds one thread, not one for each call.
pub(super) struct Slow {
    turn: Semaphore,
    limit: Duration,
    /// The cause and the remedy after the limit.
    late: &'static str,
    remedy: &'static str,
}

static SURVEY: Slow = Slow::new(
    Duration::from_secs(10),
    "a disk has not answered",
    "the kernel's log (`dmesg`) names it",
);

impl Slow {
    pub(super) const fn new(limit: Duration, late: &'static str, remedy: &'static str) -> Self {
        Self {
            turn: Semaphore::const_new(1),
            limit,
            late,
            remedy,
        }
    }

    pub(super) async fn run<T: Send + 'static>(
        &'static self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RpcError> {
        self.within(self.limit, work).await
    }

    async fn within<T: Send + 'static>(
        &'static self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RpcError> {
        let done = async {
            let permit = self.turn.acquire().await;
            tokio::task::spawn_blocking(move || {
                let _permit = permit;
                work()
            })
            .await
        };
        match timeout(limit, done).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
            Err(_) => {
                let cause = format!("{} within {} s", self.late, limit.as_secs());
                let refused = RpcError::errno(Errno::ETIMEDOUT, cause);
                Err(refused.remedy(self.remedy))
            }
        }
    }
}

/// Use of a disk whose drive the next start of an appliance binds for the daemon.
const LISTED: &str =
    "the next start takes its drive for the daemon: give the drive back first, or take it now";

/// The disks that this daemon uses.
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

    /// Describes disks. vfio-pci does not show serial number and model of a drive, so they are from
    /// `taken`, the list of drives for the daemon. A listed drive that the kernel has now gets the
    /// use [`LISTED`].
    fn described(&self, disks: Vec<MachineDisk>, taken: &[DriveStatus]) -> Vec<DiskReply> {
        let on = self.nodes.iter().filter_map(|(node, bdev)| {
            let disk = DiskName::of_node(Path::new("/dev"), Path::new(node));
            Some((disk.ok()??.to_string(), bdev))
        });
        let on: Vec<(String, &String)> = on.collect();
        let reply = |disk: MachineDisk| {
            let is_block_device = disk.name.is_some();
            let mut reply = self.reply(disk, &on);
            let is_it = |one: &&DriveStatus| {
                let address = one.drive.address.map(|address| address.to_string());
                address.is_some() && address == reply.address
            };
            let known = taken.iter().find(is_it);
            match known.map(|known| (known.state, is_block_device)) {
                Some((DriveState::Bound, false)) => {
                    reply.serial = known.map(|known| known.drive.serial.clone());
                    reply.model = known.map(|known| known.drive.model.clone());
                }
                Some((DriveState::Kernel, true)) => reply.uses.push(LISTED.to_owned()),
                _ => {}
            }
            reply
        };
        disks.into_iter().map(reply).collect()
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
        // A drive that was pulled and put back: its disks are not free.
        let back = DriveStatus {
            drive: TakenDrive {
                serial: "S1".into(),
                model: "M".into(),
                address: "0000:01:00.0".parse().ok(),
            },
            state: DriveState::Kernel,
        };
        let shown = own.described(machine.system().machine_disks(), &[back]);
        assert_eq!(shown[0].uses, ["nvme0n1 is swap space", LISTED]);
        assert_eq!(shown[1].uses, [""; 0]);
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
        let stuck = daemon.run(SURVEY.within(short, move || wait.recv().is_ok()));
        let late = |refused: RpcError| refused.to_string().contains("has not answered");
        assert!(late(stuck.unwrap_err()));
        assert!(late(daemon.run(SURVEY.within(short, || true)).unwrap_err()));
        // Other work has its own turn, limit and text.
        static OTHER: Slow = Slow::new(Duration::from_secs(60), "the check has not ended", "wait");
        assert_eq!(daemon.run(OTHER.run(|| true)), Ok(true));
        let (_keep, wait) = std::sync::mpsc::channel::<()>();
        let stuck =
            daemon.run(OTHER.within(Duration::ZERO, move || wait.recv_timeout(short).is_ok()));
        let text = serde_json::to_value(stuck.unwrap_err()).unwrap();
        assert_eq!(text["data"]["cause"], "the check has not ended within 0 s");
        assert_eq!(text["data"]["remedy"], "wait");
        release.send(()).unwrap();
        assert_eq!(daemon.run(SURVEY.run(|| true)), Ok(true));
    }
}

//! `appliance_bind_drive` and `appliance_unbind_drive`, Nacre extensions: move NVMe drives between
//! the kernel and the daemon, on a machine without a shell.
//!
//! The daemon may not change the driver of a device. It checks the drive and leaves a request, as
//! for other changes of the machine. `nacre appliance obey` checks again, and binds the drive.

use std::rc::Rc;
use std::time::Duration;

use nacre_bdev_nvme_vfio::pci::{Address, PciError, System};
use nacre_engine_appliance::acts::{self, Request};
use nacre_engine_appliance::drives::{self, DriveError, DriveId, DriveState, TakenDrive};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::status::StatusError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{blocking, parse, refusal};
use crate::methods::disk_list::Slow;
use crate::rpc::error::{Errno, causes};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<BindDrive>().add::<UnbindDrive>();
}

/// A drive of the list, in the answer of `appliance_get`.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct TakenDriveReply {
    serial: String,
    model: String,
    /// Present PCI address, or the last one of a missing drive; none: another drive of the list
    /// has that.
    address: Option<String>,
    /// `bound`: the daemon can attach it by its address; `kernel`: the kernel has it;
    /// `missing`: the machine does not show it, or shows several drives that may be it.
    state: &'static str,
}

/// The list of drives for the daemon, or the error of reading it.
pub(super) fn listed(places: &Places, system: &System) -> (Vec<TakenDriveReply>, Option<String>) {
    let all = match drives::status(places, system) {
        Ok(all) => all,
        Err(error) => return (Vec::new(), Some(causes(&error.into()))),
    };
    let reply = |one: drives::DriveStatus| TakenDriveReply {
        address: one.drive.address.map(|address| address.to_string()),
        serial: one.drive.serial,
        model: one.drive.model,
        state: match one.state {
            DriveState::Bound => "bound",
            DriveState::Kernel => "kernel",
            DriveState::Missing => "missing",
        },
    };
    (all.into_iter().map(reply).collect(), None)
}

/// Runs the check of a drive, which waits up to 30 s for udev.
static CHECK: Slow = Slow::new(
    Duration::from_secs(45),
    "the check of the drive has not ended",
    "try again in a minute: udev may still read its disks; if a disk does not answer, the kernel's log (`dmesg`) names it",
);

struct BindDrive;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BindDriveParams {
    /// PCI address of the drive, such as `0000:5e:00.0`.
    address: String,
    /// Refuse a drive with another serial number.
    serial: Option<String>,
}

impl Method<Engine> for BindDrive {
    const NAME: &'static str = "appliance_bind_drive";
    const ABOUT: &'static str = "Has the appliance bind an NVMe drive to vfio-pci, now and at each start, so that `bdev_nvme_attach_controller` attaches it by its PCI address. The kernel does not show the drive any more. Refused for a drive in use, and for one whose model and serial number another drive of the machine has, too. The call checks the drive, and returns before it is bound: `appliance_get` shows the result.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = BindDriveParams;
    type Reply = bool;

    async fn apply(params: BindDriveParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let address: Address = parse("address", &params.address)?;
        let check = move || {
            let serial = params.serial.as_deref();
            check(&Places::system(), &System::real(), address, serial)
        };
        let drive = CHECK.run(check).await??;
        let serial = Some(drive.serial);
        ask(Request::BindDrive { address, serial }).await
    }
}

fn check(
    places: &Places,
    system: &System,
    address: Address,
    serial: Option<&str>,
) -> Result<TakenDrive, RpcError> {
    drives::check(places, system, address, serial)
        .map_err(|error| drive_refusal(error, &format!("nacre nvme bind {address}")))
}

struct UnbindDrive;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UnbindDriveParams {
    /// PCI address of the drive.
    address: Option<String>,
    /// Serial number of the drive: also for one that the machine does not show.
    serial: Option<String>,
}

impl UnbindDriveParams {
    fn drive(self) -> Result<DriveId, RpcError> {
        if self.address.is_none() && self.serial.is_none() {
            let cause = "name the drive by `address`, `serial`, or both";
            return Err(RpcError::invalid_params(cause).field("address"));
        }
        let address = self.address.map(|text| parse("address", &text));
        Ok(DriveId {
            address: address.transpose()?,
            serial: self.serial,
        })
    }
}

impl Method<Engine> for UnbindDrive {
    const NAME: &'static str = "appliance_unbind_drive";
    const ABOUT: &'static str = "Has the appliance give an NVMe drive back to the kernel, also at later starts. Refused while the daemon has the drive attached. A drive that the machine does not show is forgotten. The call returns at once: `appliance_get` shows the result.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = UnbindDriveParams;
    type Reply = bool;

    async fn apply(params: UnbindDriveParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let drive = params.drive()?;
        let attached = engine.drives.list().into_iter();
        let attached = attached.map(|(name, drive)| (drive.address.clone(), name));
        let attached: Vec<(String, String)> = attached.collect();
        let request = blocking(move || {
            let (places, system) = (Places::system(), System::real());
            check_unattached(&places, &system, &drive, &attached)?;
            Ok(Request::UnbindDrive { drive })
        })
        .await?;
        ask(request).await
    }
}

/// Refuses a drive that is not in the list, and one that is attached. `attached`: PCI addresses and
/// controller names.
fn check_unattached(
    places: &Places,
    system: &System,
    id: &DriveId,
    attached: &[(String, String)],
) -> Result<(), RpcError> {
    let of_shell = match id.address {
        Some(address) => format!("nacre nvme unbind {address}"),
        None => "nacre nvme unbind ADDRESS".into(),
    };
    let address = drives::check_listed(places, system, id);
    let address = address.map_err(|error| drive_refusal(error, &of_shell))?;
    let address = address.map(|address| address.to_string());
    let mut attached = attached.iter();
    match attached.find(|(at, _)| Some(at) == address.as_ref()) {
        Some((at, name)) => {
            let cause = format!("drive {at} is attached as {name}");
            let refused = RpcError::errno(Errno::EBUSY, cause).field("address");
            Err(refused.remedy(format!("`nacre bdev detach {name}` first")))
        }
        None => Ok(()),
    }
}

async fn ask(request: Request) -> Result<bool, RpcError> {
    blocking(move || {
        acts::ask(&Places::system(), &request).map_err(refusal)?;
        Ok(true)
    })
    .await
}

/// The RPC error of an operation on a drive. `of_shell`: the command for a machine that is not an
/// appliance.
fn drive_refusal(error: DriveError, of_shell: &str) -> RpcError {
    let (errno, field, remedy) = facts_of(&error);
    let remedy = match error {
        DriveError::Status(StatusError::NoAppliance { .. }) => {
            format!("`{of_shell}` as root on that machine")
        }
        _ => remedy.to_owned(),
    };
    let refused = RpcError::errno(errno, causes(&error.into())).remedy(remedy);
    match field {
        Some(field) => refused.field(field),
        None => refused,
    }
}

/// The errno, the field and the remedy of an error.
fn facts_of(error: &DriveError) -> (Errno, Option<&'static str>, &'static str) {
    let address = Some("address");
    match error {
        DriveError::Status(StatusError::NoAppliance { .. }) => (
            Errno::ENOTSUP,
            None,
            "use a machine that runs from the image",
        ),
        DriveError::InUse { .. } => (
            Errno::EBUSY,
            address,
            "delete the bdev, pool or volume on it, or choose another drive",
        ),
        DriveError::NoIommu { .. } => (
            Errno::ENOTSUP,
            address,
            "switch the IOMMU on in the firmware, and restart; until then, create a file bdev on its disk",
        ),
        DriveError::OtherSerial { .. } => (
            Errno::EINVAL,
            Some("serial"),
            "`disk_list` shows the drives of this machine with their serial numbers",
        ),
        DriveError::NotIdentified { .. } => (
            Errno::EAGAIN,
            address,
            "wait until its controller is live, or replace the drive",
        ),
        DriveError::BoundByOthers { .. } => (
            Errno::EBUSY,
            address,
            "restart the machine, which gives the drive to the kernel, or give it back by `appliance_unbind_drive` \
             with its address",
        ),
        DriveError::SharedSerial { .. } => (
            Errno::EBUSY,
            address,
            "take the other function out of the machine, or create a file bdev on the disk",
        ),
        DriveError::NotTaken { .. } | DriveError::Missing { .. } => (
            Errno::ENODEV,
            address,
            "`appliance_get` shows the drives of the list",
        ),
        DriveError::Several { .. } | DriveError::Ambiguous { .. } => (
            Errno::EINVAL,
            Some("serial"),
            "name the drive by `address` and `serial`, as `appliance_get` shows them",
        ),
        DriveError::Full => (
            Errno::ENOSPC,
            None,
            "give a drive back by `appliance_unbind_drive`",
        ),
        DriveError::NoTime { .. } => (Errno::ETIMEDOUT, None, "take the drive again"),
        DriveError::Lock(_) => (Errno::EAGAIN, None, "try again in a minute"),
        DriveError::Malformed { .. } => (
            Errno::EIO,
            None,
            "take the drives again, which makes a new list",
        ),
        DriveError::Status(_) | DriveError::Io { .. } => (
            Errno::EIO,
            None,
            "restart the machine; the kernel's log (`dmesg`) has faults of the disk that it starts from",
        ),
        DriveError::Pci(error) => {
            let (errno, remedy) = facts_of_pci(error);
            (errno, address, remedy)
        }
    }
}

fn facts_of_pci(error: &PciError) -> (Errno, &'static str) {
    match error {
        PciError::NotThere { .. } | PciError::NotNvme { .. } | PciError::NoSuchSerial { .. } => (
            Errno::ENODEV,
            "`disk_list` shows the drives of this machine",
        ),
        PciError::SharedGroup { .. } => (Errno::EBUSY, "move the drive to another slot"),
        PciError::OtherDriver { .. } => (
            Errno::EBUSY,
            "restart the machine, which gives the drive to the kernel",
        ),
        PciError::Driven { .. } => (
            Errno::EBUSY,
            "`bdev_nvme_detach_controller`, or end the program that drives it",
        ),
        _ => (
            Errno::EIO,
            "restart the machine, and try again; the kernel's log (`dmesg`) has faults of the drive",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nacre_bdev_nvme_vfio::pci::testing::Machine;
    use serde_json::{Value, json};

    use super::*;
    use crate::methods::testing::test_daemon;

    fn appliance() -> (tempfile::TempDir, Places) {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        fs::create_dir_all(places.os_release().parent().unwrap()).unwrap();
        fs::write(places.os_release(), "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n").unwrap();
        (root, places)
    }

    const FIRST: &str = "0000:01:00.0";
    const SECOND: &str = "0000:02:00.0";

    fn at(text: &str) -> Address {
        text.parse().unwrap()
    }

    fn facts(refused: &RpcError) -> (i64, Value, Value) {
        let text = serde_json::to_value(refused).unwrap();
        let data = &text["data"];
        let code = text["code"].as_i64().unwrap();
        (code, data["field"].clone(), data["remedy"].clone())
    }

    /// Goal: a call that could not succeed is refused before a request waits, with field and
    /// remedy.
    #[test]
    fn a_drive_is_checked_before_the_request() {
        let (root, places) = appliance();
        let machine = Machine::usual();
        let refused = |address, serial| {
            facts(&check(&places, &machine.system(), at(address), serial).unwrap_err())
        };
        let free = check(&places, &machine.system(), at(FIRST), Some("S1")).unwrap();
        assert_eq!(free.serial, "S1");
        let (code, field, remedy) = refused(FIRST, Some("S2"));
        assert_eq!((code, field), (-22, json!("serial")));
        assert!(remedy.to_string().contains("disk_list"));
        let (code, field, remedy) = refused("0000:09:00.0", None);
        assert_eq!((code, field), (-19, json!("address")));
        assert!(remedy.to_string().contains("disk_list"));
        machine.file("proc/swaps", "Filename\n/dev/nvme0n2 partition\n");
        let (code, field, remedy) = refused(FIRST, None);
        assert_eq!((code, field), (-16, json!("address")));
        assert!(remedy.to_string().contains("choose another drive"));
        machine.function("0000:03:00.0", "0x020000", Some("igb"), 15);
        let (code, field, remedy) = refused(SECOND, None);
        assert_eq!((code, field), (-16, json!("address")));
        assert_eq!(remedy, "move the drive to another slot");
        fs::remove_file(root.path().join("usr/lib/os-release")).unwrap();
        let (code, _, remedy) = refused(FIRST, None);
        let of_shell = format!("`nacre nvme bind {FIRST}` as root on that machine");
        assert_eq!((code, remedy), (-95, json!(of_shell)));
    }

    /// Goal: a refusal has the cause of the kernel, and a remedy; a drive that another command
    /// bound has a remedy without a shell.
    #[test]
    fn a_refusal_has_its_cause() {
        let write = PciError::Write {
            address: at(FIRST),
            file: "sys/bind".into(),
            text: "1".into(),
            source: std::io::ErrorKind::ResourceBusy.into(),
        };
        let refused = drive_refusal(DriveError::Pci(write), "");
        let text = serde_json::to_value(&refused).unwrap();
        let cause = "drive 0000:01:00.0: writing \"1\" to sys/bind failed: resource busy";
        assert_eq!(text["data"]["cause"], cause);
        let (code, field, remedy) = facts(&refused);
        assert_eq!((code, field), (-5, json!("address")));
        assert!(remedy.to_string().contains("restart the machine"));

        let (_root, places) = appliance();
        let machine = Machine::usual();
        let system = machine.system();
        system.bind(at(FIRST), &Default::default()).unwrap();
        let refused = check(&places, &system, at(FIRST), None).unwrap_err();
        let (code, _, remedy) = facts(&refused);
        assert_eq!(code, -16);
        assert!(remedy.to_string().contains("restart the machine"));
        machine.drive("0000:03:00.0", 16, 2, "S2", &[]);
        let refused = check(&places, &system, at(SECOND), None).unwrap_err();
        let (code, field, remedy) = facts(&refused);
        assert_eq!((code, field), (-16, json!("address")));
        assert!(remedy.to_string().contains("create a file bdev"));
    }

    /// Goal: an attached drive is not given back, nor one that the list does not have; the list
    /// shows drives with their states.
    #[test]
    fn an_attached_drive_is_not_given_back() {
        let (_root, places) = appliance();
        let machine = Machine::usual();
        let system = machine.system();
        let id = |address: Option<&str>, serial: Option<&str>| {
            let (address, serial) = (address.map(str::to_owned), serial.map(str::to_owned));
            UnbindDriveParams { address, serial }.drive().unwrap()
        };
        let attached = [(FIRST.to_owned(), "Nvme0".to_owned())];
        drives::bind(&places, &system, at(FIRST), None).unwrap();
        for drive in [id(Some(FIRST), None), id(None, Some("S1"))] {
            let refused = check_unattached(&places, &system, &drive, &attached).unwrap_err();
            assert!(
                refused.to_string().contains("attached as Nvme0"),
                "{refused}"
            );
            let (code, _, remedy) = facts(&refused);
            let expected = json!("`nacre bdev detach Nvme0` first");
            assert_eq!((code, remedy), (-16, expected));
            check_unattached(&places, &system, &drive, &[]).unwrap();
        }
        let other = id(Some(SECOND), None);
        let refused = check_unattached(&places, &system, &other, &attached).unwrap_err();
        assert_eq!(facts(&refused).0, -19);
        let shown = serde_json::to_value(listed(&places, &system).0).unwrap();
        let expected = json!([{ "serial": "S1", "model": "QEMU NVMe Ctrl", "address": FIRST, "state": "bound" }]);
        assert_eq!(shown, expected);
        fs::write(places.drives(), "{").unwrap();
        let (none, problem) = listed(&places, &system);
        assert!(none.is_empty());
        assert!(problem.unwrap().contains("drives.json"));
    }

    /// Goal: a call without a drive, or with a bad address, is refused with its field.
    #[test]
    fn names_of_drives_are_checked() {
        let daemon = test_daemon();
        for (method, params) in [
            ("appliance_bind_drive", json!({ "address": "nvme0" })),
            ("appliance_unbind_drive", json!({ "address": "nvme0" })),
            ("appliance_unbind_drive", json!({})),
        ] {
            let refused = daemon.refused(method, params);
            assert_eq!(facts(&refused).1, "address", "{method}");
        }
    }
}

//! `bdev_nvme_*` calls for local drives: `trtype` is PCIe, `traddr` the PCI address.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::Bdev;
use nacre_bdev_nvme::{ActionOnTimeout, DriveOptions};
use tokio::sync::RwLockWriteGuard;
use tokio::time::timeout;

use crate::rpc::RpcError;
use crate::rpc::error::{Errno, causes};
use crate::services::Engine;
use crate::services::bus;
use crate::services::drives::Drive;
use crate::services::nvme::AttachParams;
use crate::services::nvme::options::Options;
use crate::services::nvme::{ATTACH, key};
use crate::store::Change;

/// Number of I/O queues to request unless the call names one: enough for one per core.
const IO_QUEUES: u16 = 128;
/// Most bdevs per controller unless the call names a number, as in SPDK.
const MAX_DEVICES: u32 = 128;

impl AttachParams {
    /// Checks the parameters that do not depend on the drive.
    fn check_drive(&self, engine: &Engine) -> Result<(String, DriveOptions, usize), RpcError> {
        let only_fabrics = [
            (self.adrfam.is_some(), "adrfam"),
            (self.trsvcid.is_some(), "trsvcid"),
            (self.subnqn.is_some(), "subnqn"),
            (self.hostnqn.is_some(), "hostnqn"),
            (self.hostaddr.is_some(), "hostaddr"),
            (self.hdgst == Some(true), "hdgst"),
            (self.ddgst == Some(true), "ddgst"),
            (self.nsid.is_some(), "nsid"),
            (self.uuid.is_some(), "uuid"),
            (self.fallback.is_some(), "fallback"),
            (self.cntlid.is_some(), "cntlid"),
        ];
        if let Some((_, field)) = only_fabrics.iter().find(|(given, _)| *given) {
            let cause = "it says nothing about a drive of this machine";
            return Err(RpcError::invalid_params(cause)
                .field(*field)
                .remedy("leave it out"));
        }
        let address = bus::address(&self.traddr).ok_or_else(|| {
            let cause = format!("\"{}\" is not a place on the PCI bus", self.traddr);
            RpcError::invalid_params(cause)
                .field("traddr")
                .remedy("give it as 0000:5e:00.0: `nacre nvme list` shows the drives")
        })?;
        let set = Options::of(engine);
        let micros = |given: Option<u64>, otherwise: Duration| {
            let given = given.filter(|us| *us > 0).map(Duration::from_micros);
            given.unwrap_or(otherwise)
        };
        let base = DriveOptions::new(self.name.clone());
        let options = DriveOptions {
            io_queue_depth: set.queue_entries().unwrap_or(base.io_queue_depth),
            io_queues: self.num_io_queues.filter(|n| *n > 0).unwrap_or(IO_QUEUES),
            timeout: micros(set.timeout_us, base.timeout),
            admin_timeout: micros(set.timeout_admin_us, base.admin_timeout),
            action_on_timeout: match set.action_on_timeout.as_deref() {
                Some("none") => ActionOnTimeout::None,
                Some("reset") => ActionOnTimeout::Reset,
                _ => ActionOnTimeout::Abort,
            },
            ..base
        };
        let most = self.max_bdevs.filter(|n| *n > 0).unwrap_or(MAX_DEVICES);
        Ok((address, options, most as usize))
    }
}

/// Attaches the drive, stores the call's record with the drive's serial number, and returns the
/// bdevs. `again`: the record exists already.
pub(super) async fn attach(
    params: &AttachParams,
    engine: &Rc<Engine>,
    mut gate: RwLockWriteGuard<'_, ()>,
    again: bool,
) -> Result<Vec<String>, RpcError> {
    params.check_name()?;
    params.refuse_unsupported()?;
    let (address, options, most) = params.check_drive(engine)?;
    let _coming = engine.drives.coming(engine, &params.name, &address)?;
    let mut coming = pin!(bring_up(engine, &address, options, most));
    let drive = match timeout(super::LOCKED_WAIT, &mut coming).await {
        Ok(drive) => drive?,
        Err(_) => {
            drop(gate);
            let drive = coming.await?;
            gate = engine.changing().await;
            let here = engine.drives.find(&params.name);
            let is_kept = !again || engine.journal.find(&key(&params.name)).is_some();
            if !is_kept || !here.is_some_and(|here| Rc::ptr_eq(&here, &drive)) {
                undo(engine, &params.name).await;
                let cause = format!("\"{}\" was detached before it was there", params.name);
                return Err(RpcError::errno(Errno::ENODEV, cause).field("name"));
            }
            drive
        }
    };
    let found = &drive.controller.info().drive.serial;
    if let Some(serial) = params.serial.as_ref().filter(|serial| *serial != found) {
        undo(engine, &params.name).await;
        return Err(other_serial(&address, found, serial));
    }
    let record = AttachParams {
        serial: Some(found.clone()),
        ..params.clone()
    };
    let record = serde_json::to_value(&record).expect("parameters are plain data");
    let change = Change::put(key(&params.name), ATTACH, record);
    let made = devices(params, engine, &drive, again);
    let outcome = match made {
        Ok(names) => engine.journal.commit(change).await.map(|()| names),
        refused => refused,
    };
    if outcome.is_err() && !again {
        undo(engine, &params.name).await;
    }
    drop(gate);
    outcome
}

/// The error for a drive with another serial number than the record's. Its namespaces would be
/// served under the identities of the recorded drive's.
fn other_serial(address: &str, found: &str, serial: &str) -> RpcError {
    let cause =
        format!("the drive at {address} has the serial number \"{found}\", and not \"{serial}\"");
    RpcError::errno(Errno::ENODEV, cause)
        .field("serial")
        .remedy(
            "detach it, and attach the drive at its present address; `nacre nvme list` shows both",
        )
}

async fn bring_up(
    engine: &Rc<Engine>,
    address: &str,
    options: DriveOptions,
    most: usize,
) -> Result<Rc<Drive>, RpcError> {
    let function = engine.drives.open(engine, address).await?;
    engine.drives.attach(engine, function, options, most).await
}

/// Creates the drive's bdevs. If an error left none, detaches the drive and returns the error.
fn devices(
    params: &AttachParams,
    engine: &Rc<Engine>,
    drive: &Drive,
    again: bool,
) -> Result<Vec<String>, RpcError> {
    let plane = engine.plane()?;
    drive.sync(engine, &plane, &params.name);
    let devices = drive.devices();
    let names: Vec<String> = devices.iter().map(|d| d.name().to_owned()).collect();
    match drive.refused().into_iter().next() {
        Some((nsid, why)) if names.is_empty() && !again => {
            let cause = format!("namespace {nsid}: {why}");
            Err(RpcError::errno(Errno::EEXIST, cause).field("name"))
        }
        _ => Ok(names),
    }
}

/// Detaches the drive: removes its devices and shuts the controller down.
pub(super) async fn undo(engine: &Rc<Engine>, name: &str) {
    let Some(drive) = engine.drives.take(name) else {
        return;
    };
    if let Ok(plane) = engine.plane() {
        super::wait_until_gone(engine, name, drive.remove_devices(&plane)).await;
    }
    drive.shut_down().await;
}

/// Checks that the optional parameters of a detach call match the attached drive.
pub(super) fn fits(
    name: &str,
    drive: &Drive,
    trtype: Option<&str>,
    traddr: Option<&str>,
) -> Result<(), RpcError> {
    if trtype.is_some_and(|asked| !asked.eq_ignore_ascii_case("pcie")) {
        let cause = format!("\"{name}\" is attached with \"PCIe\" for trtype");
        return Err(RpcError::errno(Errno::ENODEV, cause).field("trtype"));
    }
    if traddr.is_some_and(|asked| bus::address(asked).as_ref() != Some(&drive.address)) {
        let cause = format!("\"{name}\" is attached at {}", drive.address);
        return Err(RpcError::errno(Errno::ENODEV, cause).field("traddr"));
    }
    Ok(())
}

/// Resets the controller. I/O waits meanwhile and is not lost.
pub(super) async fn reset(
    drive: &Drive,
    cntlid: Option<u16>,
    name: &str,
) -> Result<bool, RpcError> {
    let is = drive.controller.info().cntlid;
    if cntlid.is_some_and(|asked| asked != is) {
        let cause = format!("\"{name}\" is controller {is} there");
        return Err(RpcError::errno(Errno::ENODEV, cause).field("cntlid"));
    }
    let reset = drive.controller.reset().await;
    reset.map(|()| true).map_err(failed)
}

/// The RPC error of a controller command.
pub(super) fn failed(error: nacre_bdev_nvme::ControlError) -> RpcError {
    RpcError::errno(Errno::EIO, causes(&anyhow::Error::new(error)))
}

//! Commands of users to a local drive: `bdev_nvme_send_cmd` and `bdev_nvme_apply_firmware`.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::rc::Rc;
use std::sync::Arc;

use base64ct::{Base64Url, Encoding};
use nacre_bdev::Bdev;
use nacre_bdev_nvme::{AdminData, ControlError, FirmwareError, IMAGE_MAX};
use nacre_nvmf_wire::zerocopy::{FromBytes, IntoBytes};
use nacre_nvmf_wire::{Cqe, Sqe};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::drive::failed;
use super::health;
use crate::rpc::error::{Errno, causes};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::drives::Drive;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<SendCommand>().add::<ApplyFirmware>();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum CommandType {
    Admin,
    Io,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum DataDirection {
    H2c,
    C2h,
}

struct SendCommand;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SendCommandParams {
    /// Name of the controller.
    name: String,
    /// `io` is refused: only devices send I/O.
    cmd_type: CommandType,
    /// `h2c`, from the host to the controller, is refused: commands that only read have no such
    /// data.
    data_direction: DataDirection,
    /// The submission queue entry, 64 bytes as base64url. The daemon sets its command identifier
    /// and data pointer.
    cmdbuf: String,
    /// Bytes to read from the controller, at most 131,072; default 0.
    #[serde(default)]
    data_len: u32,
    /// Accepted for SPDK; the time limit is that of `bdev_nvme_set_options`.
    #[expect(dead_code, reason = "SPDK ignores it as well")]
    timeout_ms: Option<u32>,
}

/// A completion and its data, as base64url.
#[derive(Debug, Serialize, JsonSchema)]
struct SendCommandReply {
    /// The completion queue entry, 16 bytes.
    cpl: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<String>,
}

impl SendCommandParams {
    fn command(&self) -> Result<Sqe, RpcError> {
        if self.cmd_type == CommandType::Io {
            let cause = "I/O commands are sent by the devices of the controller only";
            return Err(RpcError::errno(Errno::ENOTSUP, cause).field("cmd_type"));
        }
        if self.data_direction == DataDirection::H2c {
            let cause = "the commands that only read have no data from the host";
            return Err(RpcError::errno(Errno::ENOTSUP, cause).field("data_direction"));
        }
        let mut bytes = [0; Sqe::SIZE];
        match Base64Url::decode(&self.cmdbuf, &mut bytes) {
            Ok(entry) if entry.len() == Sqe::SIZE => {}
            _ => {
                let cause = format!(
                    "a submission queue entry is {} bytes as base64url",
                    Sqe::SIZE
                );
                return Err(RpcError::invalid_params(cause).field("cmdbuf"));
            }
        }
        Ok(Sqe::read_from_bytes(&bytes).expect("the length is that of an entry"))
    }
}

impl Method<Engine> for SendCommand {
    const NAME: &'static str = "bdev_nvme_send_cmd";
    const ABOUT: &'static str = "Sends an Identify, Get Log Page or Get Features command to a drive and returns its completion.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = SendCommandParams;
    type Reply = SendCommandReply;

    async fn apply(
        params: SendCommandParams,
        engine: Rc<Engine>,
    ) -> Result<SendCommandReply, RpcError> {
        let drive = health::drive(&engine, &params.name)?;
        let sqe = params.command()?;
        let data = match params.data_len as usize {
            0 => AdminData::None,
            bytes => AdminData::Read(bytes),
        };
        let (cqe, data) = match drive.controller.admin(sqe, data).await {
            Ok(reply) => {
                let data = (!reply.data.is_empty()).then_some(reply.data);
                (Cqe::success(sqe.cid()).with_dword0(reply.dword0), data)
            }
            Err(ControlError::Status { status, .. }) => (Cqe::new(sqe.cid(), status), None),
            Err(error @ ControlError::NotAllowed { .. }) => {
                return Err(RpcError::errno(Errno::EPERM, error.to_string()).field("cmdbuf"));
            }
            Err(error @ ControlError::DataLength { .. }) => {
                return Err(RpcError::invalid_params(error.to_string()).field("data_len"));
            }
            Err(error) => return Err(failed(error)),
        };
        Ok(SendCommandReply {
            cpl: Base64Url::encode_string(cqe.as_bytes()),
            data: data.map(|bytes| Base64Url::encode_string(&bytes)),
        })
    }
}

pub struct ApplyFirmware;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApplyFirmwareParams {
    /// The image: a regular file that the daemon can read, of a multiple of 4 bytes and at most 64
    /// MiB.
    pub filename: String,
    /// A device of the drive, or its controller.
    pub bdev_name: String,
}

/// Finds the drive of a device or controller.
fn drive_of(engine: &Engine, bdev: &str) -> Result<Rc<Drive>, RpcError> {
    if let Some(drive) = engine.drives.find(bdev) {
        return Ok(drive);
    }
    let mut drives = engine.drives.list().into_iter();
    let found = drives.find(|(_, drive)| drive.devices().iter().any(|one| one.name() == bdev));
    found.map(|(_, drive)| drive).ok_or_else(|| {
        let cause = format!("\"{bdev}\" is not a drive of this machine, nor a device of one");
        RpcError::errno(Errno::ENODEV, cause)
            .field("bdev_name")
            .remedy("`nacre nvme show` lists them")
    })
}

fn read_image(path: &str) -> Result<Vec<u8>, RpcError> {
    let unreadable = |error: std::io::Error| {
        RpcError::errno(Errno::EIO, format!("\"{path}\": {error}")).field("filename")
    };
    // Without NONBLOCK the open of a pipe would wait for a writer.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        let cause = format!("\"{path}\" is not a regular file");
        return Err(RpcError::invalid_params(cause).field("filename"));
    }
    let mut image = Vec::new();
    // One byte more than allowed, so that the controller's check sees a longer file.
    file.take(IMAGE_MAX as u64 + 1)
        .read_to_end(&mut image)
        .map_err(unreadable)?;
    Ok(image)
}

fn not_updated(error: FirmwareError) -> RpcError {
    let errno = match &error {
        FirmwareError::Size { .. } => Errno::EINVAL,
        FirmwareError::Unsupported
        | FirmwareError::ReadOnly
        | FirmwareError::Granularity { .. } => Errno::ENOTSUP,
        FirmwareError::Running => Errno::EBUSY,
        _ => Errno::EIO,
    };
    let is_size = matches!(error, FirmwareError::Size { .. });
    let refusal = RpcError::errno(errno, causes(&anyhow::Error::new(error)));
    if is_size {
        refusal.field("filename")
    } else {
        refusal
    }
}

impl Method<Engine> for ApplyFirmware {
    const NAME: &'static str = "bdev_nvme_apply_firmware";
    const ABOUT: &'static str =
        "Updates the firmware of a drive and resets its controller; I/O waits.";
    const CLASS: Class = Class::Admin;
    /// May take minutes, and changes nothing that other calls could change.
    const ORDER: Order = Order::Free;
    type Params = ApplyFirmwareParams;
    type Reply = String;

    async fn apply(params: ApplyFirmwareParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        let drive = drive_of(&engine, &params.bdev_name)?;
        let path = params.filename;
        let read = tokio::task::spawn_blocking(move || read_image(&path));
        let image: Arc<[u8]> = match read.await {
            Ok(image) => image?.into(),
            Err(error) => return Err(RpcError::errno(Errno::EIO, error.to_string())),
        };
        let update = drive.controller.update_firmware(image).await;
        let update = update.map_err(not_updated)?;
        Ok(match update.needs {
            None if update.after == update.before => format!(
                "firmware {} runs, as before: the image has this revision, or the drive went back to it",
                update.after
            ),
            None => format!("firmware {} runs; it was {}", update.after, update.before),
            Some(reset) => format!(
                "the image is stored; firmware {} runs until {reset}",
                update.after
            ),
        })
    }
}

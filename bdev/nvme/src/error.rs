//! The errors of attaching a controller and of its admin commands.

use std::time::Duration;

use nacre_nvmf_wire::{StatusCode, opcode};

use crate::function::FunctionError;
use crate::memory::MemoryError;

/// The error of attaching a controller.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("NVMe drive {address}: no device answers on the bus (registers read as all ones)")]
    Gone { address: String },
    #[error(
        "NVMe drive {address}: {bytes} bytes of registers are fewer than the {needed} that it needs"
    )]
    Registers {
        address: String,
        bytes: u32,
        needed: u32,
    },
    #[error("NVMe drive {address} does not speak the NVM command set (CAP.CSS {css:#x})")]
    CommandSet { address: String, css: u64 },
    #[error(
        "NVMe drive {address} wants memory pages of at least {minimum} bytes, this driver has at most {maximum}"
    )]
    PageSize {
        address: String,
        minimum: u64,
        maximum: u64,
    },
    #[error("NVMe drive {address} takes queues of {entries} entries only, {needed} are needed")]
    QueueSize {
        address: String,
        entries: u32,
        needed: u32,
    },
    #[error("NVMe drive {address} is no I/O controller (type {cntrltype})")]
    ControllerType { address: String, cntrltype: u8 },
    #[error(
        "NVMe drive {address}: CSTS.RDY did not become {ready} within {limit:?} (CSTS {csts:#x})"
    )]
    NotReady {
        address: String,
        ready: u8,
        limit: Duration,
        csts: u32,
    },
    #[error("NVMe drive {address} reports a fatal error (CSTS.CFS) while it is enabled")]
    Fatal { address: String },
    #[error("NVMe drive {address} grants no I/O queue")]
    NoQueues { address: String },
    #[error("NVMe drive {address} has serial number \"{found}\", not \"{expected}\"")]
    OtherDrive {
        address: String,
        expected: String,
        found: String,
    },
    #[error("the controller \"{name}\" is not waiting for its drive to return")]
    NotRemoved { name: String },
    #[error(transparent)]
    Function(#[from] FunctionError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Control(#[from] ControlError),
}

/// The error of an admin command or of another request to an attached controller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    #[error("{} is not on the list of admin commands that only read", admin_name(*opcode))]
    NotAllowed { opcode: u8 },
    #[error("{} asks for {bytes} bytes of data; at most {maximum} are possible", admin_name(*opcode))]
    DataLength {
        opcode: u8,
        bytes: usize,
        maximum: usize,
    },
    #[error("{} was refused: {status}", admin_name(*opcode))]
    Status { opcode: u8, status: StatusCode },
    #[error("{} was not answered within {limit:?}", admin_name(*opcode))]
    Timeout { opcode: u8, limit: Duration },
    #[error("the controller was reset before {} was answered", admin_name(*opcode))]
    Reset { opcode: u8 },
    #[error("too many admin commands wait")]
    Busy,
    #[error("the drive is gone")]
    Gone,
    #[error("the controller reports a fatal error (CSTS.CFS), or has stopped by itself (CSTS.RDY)")]
    Fatal,
    #[error("the controller failed: {reason}")]
    Failed { reason: String },
    #[error("the controller is detached")]
    Detached,
    #[error("the reactor that drives the controller has stopped")]
    Stopped,
}

/// The error of a firmware update. Unless it says otherwise, the drive keeps its firmware.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FirmwareError {
    #[error("a firmware image has a multiple of 4 bytes, at most {maximum}; this one has {bytes}")]
    Size { bytes: usize, maximum: usize },
    #[error("the drive has no commands that update its firmware (OACS bit 2)")]
    Unsupported,
    #[error("the only firmware slot of the drive is read-only (FRMW)")]
    ReadOnly,
    #[error("the drive takes pieces of {bytes} bytes (FWUG); at most {maximum} are possible")]
    Granularity { bytes: usize, maximum: usize },
    #[error("another firmware update of the drive is running")]
    Running,
    #[error("the drive took {taken} of {bytes} bytes of the image")]
    Download {
        taken: usize,
        bytes: usize,
        #[source]
        source: ControlError,
    },
    #[error("the drive refuses the image")]
    Commit(#[source] ControlError),
    #[error("the drive did not say whether it stored the image; look at its firmware slots")]
    Unknown(#[source] ControlError),
    #[error("the drive has stored the image, which runs after the next reset: this one failed")]
    NotReset(#[source] ControlError),
    #[error("the firmware update did not run")]
    Control(#[from] ControlError),
}

/// The text of an error and of its sources, in one line. The sources have the numbers and the
/// remedy.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

fn admin_name(opcode: u8) -> String {
    match opcode::admin::name(opcode) {
        Some(name) => name.to_owned(),
        None => format!("admin command {opcode:#04x}"),
    }
}

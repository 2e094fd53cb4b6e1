//! Describes why a device is not used, for people.

use nacre_bdev::{OpenError, Status};

use crate::handle::{NoDevice, VolumeError};
use crate::shared::Failure;
use crate::shortage::is_shortage;

pub(super) fn describe(why: Failure) -> String {
    match why {
        Failure::Fenced => "another holder of the volume has it".into(),
        Failure::Status(status) if status.is_reservation_conflict() => {
            "it is reserved, and this holder may not write to it".into()
        }
        Failure::Reserved => "it is reserved by another host".into(),
        Failure::OtherReplica => {
            "its device was reused for another replica: its label says so".into()
        }
        Failure::Status(status) => words(status),
        Failure::Deadline => "it did not complete an I/O in time".into(),
        Failure::Loss => "its connection was lost, and perhaps writes that were not flushed".into(),
        Failure::Open => "no queue to it could be opened".into(),
        Failure::Shortage => "no buffer was free".into(),
    }
}

/// The text for a status of a device.
pub(super) fn words(status: Status) -> String {
    match status {
        Status::Gone => "it cannot be reached",
        Status::OutOfRange => "its device ends before the volume does",
        Status::ReadError => "an I/O failed: it cannot read a block",
        Status::WriteError => "an I/O failed: it cannot write a block",
        Status::Integrity => "an I/O failed: a block does not match its checksum",
        Status::NoSpace => "an I/O failed: no space is left behind it",
        Status::WriteProtected => "an I/O failed: it is write-protected",
        Status::Unsupported => "an I/O failed: it does not support the operation",
        Status::Retry => "an I/O failed: it lacked resources for too long",
        Status::Nvme { sct, sc, .. } => {
            return format!("an I/O failed: NVMe status type {sct:X}h, code {sc:02X}h");
        }
        Status::DeviceError | Status::Aborted | Status::Miscompare | Status::Ok => {
            "an I/O failed on the device"
        }
    }
    .into()
}

/// The error for a device whose queue could not be opened.
pub(super) fn unopened(name: &str, error: &OpenError) -> VolumeError {
    let (device, what) = (name.to_owned(), error.to_string());
    if is_shortage(&error.source) {
        VolumeError::Short { device, what }
    } else {
        VolumeError::Device(NoDevice {
            name: device,
            why: what,
        })
    }
}

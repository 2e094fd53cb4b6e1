//! Firmware Image Download and Firmware Commit of the simulated controller (Base 5.11, 5.12).

use nacre_nvmf_wire::commands::admin::{FirmwareCommit, FirmwareImageDownload};
use nacre_nvmf_wire::{Sqe, StatusCode};

use crate::executor::Executor;

/// The first bytes of an image; 8 bytes of revision follow.
pub const IMAGE_MARK: &[u8; 8] = b"SIMFIRMW";
/// Bytes of the drive's memory for an image.
const IMAGE_MAX: usize = 1 << 20;

#[derive(Default)]
pub(crate) struct Firmware {
    /// The pieces received since the last commit.
    image: Vec<u8>,
    /// The revision that a reset activates.
    next: Option<String>,
}

impl Executor {
    /// Takes pieces in order only.
    pub(crate) fn firmware_download(&mut self, sqe: &Sqe, unit: u8) -> StatusCode {
        let piece = FirmwareImageDownload::parse(sqe);
        let unit = match unit {
            0 | 0xff => 4,
            unit => u64::from(unit) * 4096,
        };
        let bytes = piece.bytes as usize;
        if !piece.offset.is_multiple_of(unit) || bytes > IMAGE_MAX {
            return StatusCode::INVALID_FIELD.with_dnr();
        }
        if piece.offset == 0 {
            self.firmware.image.clear();
        }
        let taken = self.firmware.image.len();
        if piece.offset != taken as u64 {
            return StatusCode::OVERLAPPING_RANGE.with_dnr();
        }
        if taken + bytes > IMAGE_MAX {
            return StatusCode::INVALID_FIELD.with_dnr();
        }
        let mut data = vec![0; bytes];
        if let Err(status) = self.take_data(sqe, &mut data) {
            return status;
        }
        self.firmware.image.extend(data);
        StatusCode::SUCCESS
    }

    pub(crate) fn firmware_commit(&mut self, sqe: &Sqe) -> StatusCode {
        let commit = FirmwareCommit::parse(sqe);
        let image = std::mem::take(&mut self.firmware.image);
        if commit.slot > 1 {
            return StatusCode::INVALID_FIRMWARE_SLOT.with_dnr();
        }
        if commit.action != FirmwareCommit::ACTION_REPLACE_AND_ACTIVATE_AT_RESET {
            return StatusCode::INVALID_FIELD.with_dnr();
        }
        let revision = image
            .strip_prefix(IMAGE_MARK)
            .and_then(|rest| rest.get(..8));
        let Some(revision) = revision else {
            return StatusCode::INVALID_FIRMWARE_IMAGE.with_dnr();
        };
        let revision = String::from_utf8_lossy(revision);
        self.firmware.next = Some(revision.trim_end().to_owned());
        StatusCode::SUCCESS
    }

    /// A Controller Level Reset runs the committed image.
    pub(crate) fn firmware_reset(&mut self) {
        self.firmware.image.clear();
        if let Some(revision) = self.firmware.next.take() {
            self.config.identity.firmware = revision;
        }
    }
}

//! Firmware Image Download and Firmware Commit of the simulated controller (Base 5.13, 5.12).

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::admin::{FirmwareCommit, FirmwareImageDownload};

/// The first bytes of a firmware image; 8 bytes of revision (FR) follow.
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

impl Firmware {
    /// Checks a piece before its data is read: pieces come in order, at multiples of FWUG (`unit`).
    /// Returns the bytes of the piece.
    pub(crate) fn check(
        &mut self,
        piece: FirmwareImageDownload,
        unit: u8,
    ) -> Result<usize, StatusCode> {
        let unit = match unit {
            0 | 0xff => 4,
            unit => u64::from(unit) * 4096,
        };
        if piece.offset == 0 {
            self.image.clear();
        }
        let (taken, bytes) = (self.image.len(), piece.bytes as usize);
        if !piece.offset.is_multiple_of(unit) || bytes > IMAGE_MAX - taken {
            return Err(StatusCode::INVALID_FIELD.with_dnr());
        }
        if piece.offset != taken as u64 {
            return Err(StatusCode::OVERLAPPING_RANGE.with_dnr());
        }
        Ok(bytes)
    }

    pub(crate) fn add(&mut self, data: &[u8]) {
        self.image.extend(data);
    }

    pub(crate) fn commit(&mut self, commit: FirmwareCommit) -> StatusCode {
        let image = std::mem::take(&mut self.image);
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
        self.next = Some(revision.trim_end().to_owned());
        StatusCode::SUCCESS
    }

    /// A Controller Level Reset runs the committed image.
    pub(crate) fn reset(&mut self, revision: &mut String) {
        self.image.clear();
        if let Some(next) = self.next.take() {
            *revision = next;
        }
    }
}

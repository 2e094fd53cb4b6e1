//! Updates the firmware of a drive (Base 3.11, 5.12, 5.13).

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::commands::admin::{FirmwareCommit, FirmwareImageDownload, Identify};
use nacre_nvmf_wire::identify::controller::Oacs;
use nacre_nvmf_wire::identify::{self, IdentifyController, cns};
use nacre_nvmf_wire::{StatusCode, zerocopy::IntoBytes};
use nacre_reactor::CoreHandle;

use super::Controller;
use super::commands::Commands;
use crate::admin::DATA_MAX;
use crate::data::PAGE;
use crate::error::{ControlError, FirmwareError};
use crate::event::ResetReason;

/// Most bytes of an image.
pub const IMAGE_MAX: usize = 64 << 20;
/// Minimum limit of Firmware Commit: drives write and check the image meanwhile.
const COMMIT_LIMIT: Duration = Duration::from_secs(120);
/// FWUG: the drive has no granularity (FFh), or reports none (0).
const NO_GRANULARITY: [u8; 2] = [0, 0xff];

/// The outcome of a firmware update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirmwareUpdate {
    /// Firmware revisions (FR) that ran before, and that run now.
    pub before: String,
    pub after: String,
    /// The reset that the drive needs before it runs the image; `None`: the image runs.
    pub needs: Option<&'static str>,
}

/// What the drive said to Firmware Commit.
enum Committed {
    /// A Controller Level Reset activates the image.
    ControllerReset,
    /// Only this reset, which the driver cannot do, activates it.
    Other(&'static str),
}

impl Controller {
    /// Sends an image to the drive, which stores it in a slot of its choice, and resets the
    /// controller as [`Controller::reset`] does to activate it. Only one update runs at a time.
    pub async fn update_firmware(&self, image: Arc<[u8]>) -> Result<FirmwareUpdate, FirmwareError> {
        let updated = self.at_home(move |this, core| async move {
            let Ok(_only) = this.firmware.try_lock() else {
                return Ok(Err(FirmwareError::Running));
            };
            let before = this.info().drive.firmware;
            Ok(this.send_and_activate(&core, &image, before).await)
        });
        updated.await?
    }

    async fn send_and_activate(
        self: &Arc<Self>,
        core: &CoreHandle,
        image: &[u8],
        before: String,
    ) -> Result<FirmwareUpdate, FirmwareError> {
        self.commands(core).send_firmware(image).await?;
        let committed = {
            // I/O and log pages may be late while the drive writes the image. A reset because of
            // them waits: it would cut the commit off.
            let _no_reset = self.lifecycle.lock().await;
            self.commands(core).commit().await?
        };
        let needs = match committed {
            Committed::ControllerReset => {
                let reset = self.reset_for(core, ResetReason::UserRequest).await;
                reset.map_err(FirmwareError::NotReset)?;
                None
            }
            Committed::Other(needs) => Some(needs),
        };
        let page = self.commands(core).identify().await;
        let after = identify::read_ascii(&page.map_err(FirmwareError::NotReset)?.fr);
        Ok(FirmwareUpdate {
            before,
            after,
            needs,
        })
    }
}

impl Commands<'_> {
    async fn identify(self) -> Result<Box<IdentifyController>, ControlError> {
        let mut page = Box::new(IdentifyController::zeroed());
        let sqe = Identify::new(cns::CONTROLLER).to_sqe(0, 0);
        self.ask(sqe, &[], page.as_mut().as_mut_bytes()).await?;
        Ok(page)
    }

    /// Sends an image, which has no effect before the commit.
    async fn send_firmware(self, image: &[u8]) -> Result<(), FirmwareError> {
        let bytes = image.len();
        if bytes == 0 || !bytes.is_multiple_of(4) || bytes > IMAGE_MAX {
            let maximum = IMAGE_MAX;
            return Err(FirmwareError::Size { bytes, maximum });
        }
        let drive = self.identify().await?;
        let piece = self.check_firmware_support(&drive)?;
        for (index, part) in image.chunks(piece).enumerate() {
            let taken = index * piece;
            let download = FirmwareImageDownload {
                bytes: part.len() as u64,
                offset: taken as u64,
            };
            let sent = self.ask(download.to_sqe(0), part, &mut []).await;
            sent.map_err(|source| FirmwareError::Download {
                taken,
                bytes,
                source,
            })?;
        }
        Ok(())
    }

    /// Returns the bytes per Firmware Image Download.
    fn check_firmware_support(self, drive: &IdentifyController) -> Result<usize, FirmwareError> {
        if !Oacs::from_bits_retain(drive.oacs.get()).contains(Oacs::FIRMWARE) {
            return Err(FirmwareError::Unsupported);
        }
        let (slots, is_first_read_only) = (drive.frmw >> 1 & 7, drive.frmw & 1 != 0);
        if slots <= 1 && is_first_read_only {
            return Err(FirmwareError::ReadOnly);
        }
        let bytes = match drive.fwug {
            fwug if NO_GRANULARITY.contains(&fwug) => PAGE,
            fwug => usize::from(fwug) * PAGE,
        };
        let mdts = self.shared.properties().info.mdts_bytes;
        let maximum = mdts.map_or(DATA_MAX, |mdts| DATA_MAX.min(mdts as usize));
        if bytes > maximum {
            return Err(FirmwareError::Granularity { bytes, maximum });
        }
        Ok(bytes)
    }

    async fn commit(self) -> Result<Committed, FirmwareError> {
        let commit = FirmwareCommit {
            slot: 0,
            action: FirmwareCommit::ACTION_REPLACE_AND_ACTIVATE_AT_RESET,
        };
        let limit = self.timeout().max(COMMIT_LIMIT);
        match self.ask_within(commit.to_sqe(0), limit, &[], &mut []).await {
            Ok(_) => Ok(Committed::ControllerReset),
            Err(ControlError::Status { opcode, status }) => match status.code() {
                StatusCode::FIRMWARE_NEEDS_CONTROLLER_RESET => Ok(Committed::ControllerReset),
                StatusCode::FIRMWARE_NEEDS_CONVENTIONAL_RESET => {
                    Ok(Committed::Other("a conventional reset of its PCI function"))
                }
                StatusCode::FIRMWARE_NEEDS_SUBSYSTEM_RESET => {
                    Ok(Committed::Other("an NVM subsystem reset or a power cycle"))
                }
                _ => Err(FirmwareError::Commit(ControlError::Status {
                    opcode,
                    status,
                })),
            },
            Err(error) => Err(FirmwareError::Unknown(error)),
        }
    }
}

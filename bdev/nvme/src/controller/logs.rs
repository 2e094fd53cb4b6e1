//! Reads the Error Information and Firmware Slot logs, and executes read-only admin commands of
//! users.

use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::log::{ErrorInformation, FirmwareSlots, lid};
use nacre_nvmf_wire::opcode::admin as opcode;
use nacre_nvmf_wire::{Fuse, Sqe};
use zerocopy::FromBytes;

use super::commands::Commands;
use super::{AdminData, AdminReply};
use crate::admin::DATA_MAX;
use crate::data::PAGE;
use crate::error::ControlError;
use crate::info::{ErrorEntry, FirmwareInfo};

/// Admin commands that only read.
const ALLOWED: [u8; 3] = [opcode::IDENTIFY, opcode::GET_LOG_PAGE, opcode::GET_FEATURES];

impl Commands<'_> {
    pub(super) async fn read_errors(self, entries: usize) -> Result<Vec<ErrorEntry>, ControlError> {
        let there = usize::from(self.shared.properties().elpe) + 1;
        let entries = entries.min(there).min(PAGE / ErrorInformation::SIZE);
        if entries == 0 {
            return Ok(Vec::new());
        }
        let mut page = vec![0; entries * ErrorInformation::SIZE];
        let sqe = GetLogPage::new(lid::ERROR_INFORMATION, page.len() as u32, 0);
        self.ask(sqe.to_sqe(0, nsid::BROADCAST), &[], &mut page)
            .await?;
        let list = <[ErrorInformation]>::ref_from_bytes(&page).unwrap_or(&[]);
        let used = list.iter().filter(|entry| entry.error_count.get() != 0);
        Ok(used.map(ErrorEntry::from).collect())
    }

    pub(super) async fn read_firmware(self) -> Result<FirmwareInfo, ControlError> {
        let mut page = [0; FirmwareSlots::SIZE];
        let sqe = GetLogPage::new(lid::FIRMWARE_SLOT, page.len() as u32, 0);
        self.ask(sqe.to_sqe(0, nsid::BROADCAST), &[], &mut page)
            .await?;
        let log = FirmwareSlots::read_from_bytes(&page).map_err(|_| ControlError::Busy)?;
        Ok(FirmwareInfo::from(&log))
    }

    pub(super) async fn pass_through(
        self,
        mut sqe: Sqe,
        data: AdminData,
    ) -> Result<AdminReply, ControlError> {
        let opcode = sqe.opcode;
        if !ALLOWED.contains(&opcode) {
            return Err(ControlError::NotAllowed { opcode });
        }
        let room = match data {
            AdminData::None => 0,
            AdminData::Read(bytes) => bytes,
        };
        // Check the length in the command: the controller would write beyond a shorter buffer.
        let writes = match opcode {
            opcode::IDENTIFY => PAGE,
            opcode::GET_LOG_PAGE => {
                let command = GetLogPage::parse(&sqe).map_err(|error| ControlError::Status {
                    opcode,
                    status: error.status(),
                })?;
                usize::try_from(command.bytes()).unwrap_or(usize::MAX)
            }
            _ => room,
        };
        let mdts = self.shared.properties().info.mdts_bytes.unwrap_or(u64::MAX);
        let maximum = usize::try_from(mdts).map_or(DATA_MAX, |mdts| mdts.min(DATA_MAX));
        let bytes = room.max(writes);
        if bytes > maximum {
            return Err(ControlError::DataLength {
                opcode,
                bytes,
                maximum,
            });
        }
        sqe.set_fuse(Fuse::Normal);
        // Always read into a whole page, and return the requested part.
        let mut page = vec![0; bytes.max(PAGE)];
        let answer = self.ask(sqe, &[], &mut page).await?;
        page.truncate(room);
        Ok(AdminReply {
            dword0: answer.dword0,
            data: page,
        })
    }
}

//! Typed views of the admin commands (Base 5).

use zerocopy::little_endian::U32;

use super::lba_status::GetLbaStatus;
use super::{CommandError, bit, bits};
use crate::opcode::admin;
use crate::sqe::Sqe;

/// An admin command that a fabrics controller may know, by its opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminCommand {
    Identify(Identify),
    GetLogPage(GetLogPage),
    GetFeatures(GetFeatures),
    SetFeatures(SetFeatures),
    GetLbaStatus(GetLbaStatus),
    Abort(Abort),
    AsyncEventRequest,
    KeepAlive,
}

impl AdminCommand {
    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        Ok(match sqe.opcode {
            admin::IDENTIFY => Self::Identify(Identify::parse(sqe)),
            admin::GET_LOG_PAGE => Self::GetLogPage(GetLogPage::parse(sqe)?),
            admin::GET_FEATURES => Self::GetFeatures(GetFeatures::parse(sqe)?),
            admin::SET_FEATURES => Self::SetFeatures(SetFeatures::parse(sqe)),
            admin::GET_LBA_STATUS => Self::GetLbaStatus(GetLbaStatus::parse(sqe)),
            admin::ABORT => Self::Abort(Abort::parse(sqe)),
            admin::ASYNC_EVENT_REQUEST => Self::AsyncEventRequest,
            admin::KEEP_ALIVE => Self::KeepAlive,
            opcode => return Err(CommandError::Opcode { opcode }),
        })
    }
}

/// Keep Alive: has no parameters.
pub fn keep_alive(cid: u16) -> Sqe {
    Sqe::new(admin::KEEP_ALIVE, cid)
}

/// Asynchronous Event Request: has no parameters.
pub fn async_event_request(cid: u16) -> Sqe {
    Sqe::new(admin::ASYNC_EVENT_REQUEST, cid)
}

/// Identify: reads the 4096-byte data structure that `cns` selects (see [`crate::identify::cns`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identify {
    pub cns: u8,
    /// The controller, for structures about one controller.
    pub cntid: u16,
    /// CNS specific identifier: NVM set, domain, endurance group...
    pub cnssid: u16,
    /// Command set identifier; see [`crate::identify::csi`].
    pub csi: u8,
    pub uuid_index: u8,
}

impl Identify {
    pub fn new(cns: u8) -> Self {
        Self {
            cns,
            ..Self::default()
        }
    }

    pub fn parse(sqe: &Sqe) -> Self {
        let (cdw10, cdw11) = (sqe.cdw10.get(), sqe.cdw11.get());
        Self {
            cns: bits(cdw10, 0, 8) as u8,
            cntid: bits(cdw10, 16, 16) as u16,
            cnssid: bits(cdw11, 0, 16) as u16,
            csi: bits(cdw11, 24, 8) as u8,
            uuid_index: bits(sqe.cdw14.get(), 0, 7) as u8,
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(admin::IDENTIFY, cid, nsid);
        sqe.cdw10 = U32::new(u32::from(self.cns) | u32::from(self.cntid) << 16);
        sqe.cdw11 = U32::new(u32::from(self.cnssid) | u32::from(self.csi) << 24);
        sqe.cdw14 = U32::new(u32::from(self.uuid_index & 0x7f));
        sqe
    }
}

/// Get Log Page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetLogPage {
    /// See [`crate::log::lid`].
    pub lid: u8,
    /// Log specific parameter (7 bits).
    pub lsp: u8,
    /// RAE: reading does not clear the asynchronous event.
    pub retain_event: bool,
    /// Dwords to transfer (NUMD + 1).
    pub dwords: u64,
    /// Log specific identifier.
    pub lsi: u16,
    /// Offset in bytes, or the index of an entry if `index_offset` is set.
    pub offset: u64,
    pub index_offset: bool,
    pub csi: u8,
    pub uuid_index: u8,
}

impl GetLogPage {
    pub fn new(lid: u8, bytes: u32, offset: u64) -> Self {
        Self {
            lid,
            dwords: u64::from(bytes / 4),
            offset,
            ..Self::default()
        }
    }

    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        let (cdw10, cdw11, cdw14) = (sqe.cdw10.get(), sqe.cdw11.get(), sqe.cdw14.get());
        let offset = u64::from(sqe.cdw12.get()) | u64::from(sqe.cdw13.get()) << 32;
        let index_offset = bit(cdw14, 23);
        if !index_offset && !offset.is_multiple_of(4) {
            return Err(CommandError::LogOffset { offset });
        }
        let numd = bits(cdw10, 16, 16) | bits(cdw11, 0, 16) << 16;
        Ok(Self {
            lid: bits(cdw10, 0, 8) as u8,
            lsp: bits(cdw10, 8, 7) as u8,
            retain_event: bit(cdw10, 15),
            dwords: u64::from(numd) + 1,
            lsi: bits(cdw11, 16, 16) as u16,
            offset,
            index_offset,
            csi: bits(cdw14, 24, 8) as u8,
            uuid_index: bits(cdw14, 0, 7) as u8,
        })
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(admin::GET_LOG_PAGE, cid, nsid);
        let numd = self.dwords.saturating_sub(1) as u32;
        sqe.cdw10 = U32::new(
            u32::from(self.lid)
                | u32::from(self.lsp & 0x7f) << 8
                | u32::from(self.retain_event) << 15
                | numd << 16,
        );
        sqe.cdw11 = U32::new(numd >> 16 | u32::from(self.lsi) << 16);
        sqe.cdw12 = U32::new(self.offset as u32);
        sqe.cdw13 = U32::new((self.offset >> 32) as u32);
        sqe.cdw14 = U32::new(
            u32::from(self.uuid_index & 0x7f)
                | u32::from(self.index_offset) << 23
                | u32::from(self.csi) << 24,
        );
        sqe
    }

    /// Bytes to transfer.
    pub fn bytes(&self) -> u64 {
        self.dwords * 4
    }
}

/// SEL: the value that Get Features reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Select {
    #[default]
    Current,
    Default,
    Saved,
    SupportedCapabilities,
}

/// Get Features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetFeatures {
    /// See [`crate::features::fid`].
    pub fid: u8,
    pub select: Select,
    pub cdw11: u32,
    pub uuid_index: u8,
}

impl GetFeatures {
    pub fn new(fid: u8) -> Self {
        Self {
            fid,
            ..Self::default()
        }
    }

    pub fn parse(sqe: &Sqe) -> Result<Self, CommandError> {
        let cdw10 = sqe.cdw10.get();
        Ok(Self {
            fid: bits(cdw10, 0, 8) as u8,
            select: match bits(cdw10, 8, 3) {
                0 => Select::Current,
                1 => Select::Default,
                2 => Select::Saved,
                3 => Select::SupportedCapabilities,
                value => {
                    return Err(CommandError::Reserved {
                        command: "Get Features",
                        field: "SEL",
                        value: value.into(),
                    });
                }
            },
            cdw11: sqe.cdw11.get(),
            uuid_index: bits(sqe.cdw14.get(), 0, 7) as u8,
        })
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(admin::GET_FEATURES, cid, nsid);
        sqe.cdw10 = U32::new(u32::from(self.fid) | (self.select as u32) << 8);
        sqe.cdw11 = U32::new(self.cdw11);
        sqe.cdw14 = U32::new(u32::from(self.uuid_index & 0x7f));
        sqe
    }
}

/// Set Features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SetFeatures {
    pub fid: u8,
    /// SV: keep the value across power cycles and resets.
    pub save: bool,
    /// The value, of most features; see [`crate::features`].
    pub cdw11: u32,
    pub cdw12: u32,
    pub cdw13: u32,
    pub cdw15: u32,
    pub uuid_index: u8,
}

impl SetFeatures {
    pub fn new(fid: u8, cdw11: u32) -> Self {
        Self {
            fid,
            cdw11,
            ..Self::default()
        }
    }

    pub fn parse(sqe: &Sqe) -> Self {
        Self {
            fid: bits(sqe.cdw10.get(), 0, 8) as u8,
            save: bit(sqe.cdw10.get(), 31),
            cdw11: sqe.cdw11.get(),
            cdw12: sqe.cdw12.get(),
            cdw13: sqe.cdw13.get(),
            cdw15: sqe.cdw15.get(),
            uuid_index: bits(sqe.cdw14.get(), 0, 7) as u8,
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(admin::SET_FEATURES, cid, nsid);
        sqe.cdw10 = U32::new(u32::from(self.fid) | u32::from(self.save) << 31);
        sqe.cdw11 = U32::new(self.cdw11);
        sqe.cdw12 = U32::new(self.cdw12);
        sqe.cdw13 = U32::new(self.cdw13);
        sqe.cdw14 = U32::new(u32::from(self.uuid_index & 0x7f));
        sqe.cdw15 = U32::new(self.cdw15);
        sqe
    }
}

/// Abort: names a command by its queue and identifier. Bit 0 of dword 0 of the response is clear if
/// the command was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Abort {
    pub sqid: u16,
    pub cid: u16,
}

impl Abort {
    pub fn parse(sqe: &Sqe) -> Self {
        let cdw10 = sqe.cdw10.get();
        Self {
            sqid: bits(cdw10, 0, 16) as u16,
            cid: bits(cdw10, 16, 16) as u16,
        }
    }

    /// `cid`: the identifier of the Abort itself.
    pub fn to_sqe(&self, cid: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::ABORT, cid);
        sqe.cdw10 = U32::new(u32::from(self.sqid) | u32::from(self.cid) << 16);
        sqe
    }
}

/// Firmware Image Download (Base 5.13): a piece of an image. Offset and length are multiples of 4
/// bytes; a controller may need a larger granularity (FWUG).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirmwareImageDownload {
    /// Bytes, at least 4.
    pub bytes: u64,
    /// Bytes from the start of the image.
    pub offset: u64,
}

impl FirmwareImageDownload {
    pub fn parse(sqe: &Sqe) -> Self {
        Self {
            bytes: (u64::from(sqe.cdw10.get()) + 1) * 4,
            offset: u64::from(sqe.cdw11.get()) * 4,
        }
    }

    pub fn to_sqe(&self, cid: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::FIRMWARE_IMAGE_DOWNLOAD, cid);
        sqe.cdw10 = U32::new((self.bytes / 4).saturating_sub(1) as u32);
        sqe.cdw11 = U32::new((self.offset / 4) as u32);
        sqe
    }
}

/// Firmware Commit (Base 5.12): stores the downloaded image in a slot, and selects when it is
/// activated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FirmwareCommit {
    /// 1 to 7; 0: the controller chooses.
    pub slot: u8,
    /// One of the `ACTION_` constants; values up to 7.
    pub action: u8,
}

impl FirmwareCommit {
    /// The downloaded image replaces that of the slot, and runs after the next reset.
    pub const ACTION_REPLACE_AND_ACTIVATE_AT_RESET: u8 = 0b001;

    pub fn parse(sqe: &Sqe) -> Self {
        let cdw10 = sqe.cdw10.get();
        Self {
            slot: bits(cdw10, 0, 3) as u8,
            action: bits(cdw10, 3, 3) as u8,
        }
    }

    pub fn to_sqe(&self, cid: u16) -> Sqe {
        let mut sqe = Sqe::new(admin::FIRMWARE_COMMIT, cid);
        sqe.cdw10 = U32::new(u32::from(self.slot & 7) | u32::from(self.action & 7) << 3);
        sqe
    }
}

/// Creation and deletion of I/O queues in memory: PCIe controllers only.
pub mod queues {
    use super::*;
    use crate::sqe::Psdt;

    /// Create I/O Completion Queue, physically contiguous at `prp1`. `entries` is a count.
    pub fn create_cq(cid: u16, qid: u16, entries: u32, prp1: u64, vector: Option<u16>) -> Sqe {
        let mut sqe = create(admin::CREATE_IO_CQ, cid, qid, entries, prp1);
        let interrupts = vector.map_or(0, |vector| u32::from(vector) << 16 | 1 << 1);
        sqe.cdw11 = U32::new(interrupts | 1);
        sqe
    }

    /// Create I/O Submission Queue, physically contiguous at `prp1`, of medium priority.
    pub fn create_sq(cid: u16, qid: u16, entries: u32, prp1: u64, cqid: u16) -> Sqe {
        let mut sqe = create(admin::CREATE_IO_SQ, cid, qid, entries, prp1);
        sqe.cdw11 = U32::new(u32::from(cqid) << 16 | 2 << 1 | 1);
        sqe
    }

    pub fn delete_cq(cid: u16, qid: u16) -> Sqe {
        delete(admin::DELETE_IO_CQ, cid, qid)
    }

    pub fn delete_sq(cid: u16, qid: u16) -> Sqe {
        delete(admin::DELETE_IO_SQ, cid, qid)
    }

    fn create(opcode: u8, cid: u16, qid: u16, entries: u32, prp1: u64) -> Sqe {
        let mut sqe = delete(opcode, cid, qid);
        sqe.dptr[..8].copy_from_slice(&prp1.to_le_bytes());
        sqe.cdw10 = U32::new(u32::from(qid) | entries.saturating_sub(1) << 16);
        sqe
    }

    fn delete(opcode: u8, cid: u16, qid: u16) -> Sqe {
        let mut sqe = Sqe::new(opcode, cid);
        sqe.set_psdt(Psdt::Prp);
        sqe.cdw10 = U32::new(qid.into());
        sqe
    }
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use proptest::prelude::*;
    use zerocopy::{FromBytes, IntoBytes};

    use super::*;

    /// Dwords 10 to 15 as nvme-cli produces them.
    #[test]
    fn dwords() {
        let identify = Identify {
            cns: 0x05,
            csi: 0x02,
            ..Identify::default()
        };
        assert_eq!(
            identify.to_sqe(1, 7).as_bytes()[40..48],
            hex!("05000000 00000002")
        );

        // The discovery log, 4 KiB at 1024, event retained.
        let log = GetLogPage {
            retain_event: true,
            ..GetLogPage::new(0x70, 4096, 1024)
        };
        let sqe = log.to_sqe(1, 0);
        assert_eq!(
            sqe.as_bytes()[40..64],
            hex!("7080ff03 00000000 00040000 00000000 00000000 00000000")
        );
        assert_eq!(AdminCommand::parse(&sqe), Ok(AdminCommand::GetLogPage(log)));
        assert_eq!(log.bytes(), 4096);

        let features = GetFeatures {
            select: Select::Saved,
            ..GetFeatures::new(6)
        };
        assert_eq!(features.to_sqe(1, 0).as_bytes()[40..44], hex!("06020000"));
        let features = SetFeatures {
            save: true,
            ..SetFeatures::new(7, 0x0003_0003)
        };
        assert_eq!(
            features.to_sqe(1, 0).as_bytes()[40..48],
            hex!("07000080 03000300")
        );
        let abort = Abort {
            sqid: 3,
            cid: 0x1234,
        };
        assert_eq!(abort.to_sqe(9).as_bytes()[40..44], hex!("03003412"));
        assert_eq!(
            AdminCommand::parse(&keep_alive(1)),
            Ok(AdminCommand::KeepAlive)
        );
        assert_eq!(
            AdminCommand::parse(&async_event_request(1)),
            Ok(AdminCommand::AsyncEventRequest)
        );

        let cq = queues::create_cq(1, 2, 256, 0x1000, Some(5));
        assert_eq!(cq.as_bytes()[24..32], hex!("0010000000000000"));
        assert_eq!(cq.as_bytes()[40..48], hex!("0200ff00 03000500"));
        let sq = queues::create_sq(1, 2, 256, 0x2000, 2);
        assert_eq!(sq.as_bytes()[40..48], hex!("0200ff00 05000200"));
        assert_eq!(sq.flags, 0);
    }

    #[test]
    fn refusals() {
        let mut log = GetLogPage::new(2, 512, 2);
        let sqe = log.to_sqe(1, 0);
        assert_eq!(
            AdminCommand::parse(&sqe),
            Err(CommandError::LogOffset { offset: 2 })
        );
        log.index_offset = true;
        assert_eq!(
            AdminCommand::parse(&log.to_sqe(1, 0)),
            Ok(AdminCommand::GetLogPage(log))
        );

        let mut sqe = GetFeatures::new(1).to_sqe(1, 0);
        sqe.cdw10 = U32::new(0x401);
        assert!(matches!(
            AdminCommand::parse(&sqe),
            Err(CommandError::Reserved {
                field: "SEL",
                value: 4,
                ..
            })
        ));
        assert_eq!(
            AdminCommand::parse(&Sqe::new(0xc1, 1)),
            Err(CommandError::Opcode { opcode: 0xc1 })
        );
    }

    proptest! {
        /// Every accepted command builds an entry that parses to the same command; nothing panics.
        #[test]
        fn any_entry(
            bytes in any::<[u8; 64]>(),
            opcode in proptest::option::of(proptest::sample::select(admin::ALL)),
        ) {
            let mut sqe = Sqe::read_from_bytes(&bytes).unwrap();
            sqe.opcode = opcode.unwrap_or(sqe.opcode);
            let Ok(command) = AdminCommand::parse(&sqe) else { return Ok(()) };
            let again = match command {
                AdminCommand::Identify(c) => c.to_sqe(1, 1),
                AdminCommand::GetLogPage(c) => c.to_sqe(1, 1),
                AdminCommand::GetFeatures(c) => c.to_sqe(1, 1),
                AdminCommand::SetFeatures(c) => c.to_sqe(1, 1),
                AdminCommand::GetLbaStatus(c) => c.to_sqe(1, 1),
                AdminCommand::Abort(c) => c.to_sqe(1),
                AdminCommand::AsyncEventRequest => async_event_request(1),
                AdminCommand::KeepAlive => keep_alive(1),
            };
            prop_assert_eq!(AdminCommand::parse(&again), Ok(command));
        }
    }
}

//! Get LBA Status (NVM Command Set 4.2.1) and its data.

use zerocopy::little_endian::{U32, U64};

use super::bits;
use crate::layout::sized;
use crate::opcode::admin;
use crate::sqe::Sqe;

/// Action types (ATYPE).
pub mod action {
    /// Allocated logical blocks (TP4165).
    pub const ALLOCATED: u8 = 0x02;
    pub const SCAN: u8 = 0x10;
    pub const TRACKED: u8 = 0x11;
}

/// Completion conditions (CMPC).
pub mod condition {
    /// The data had no room for all descriptors.
    pub const NO_ROOM: u8 = 1;
    /// The whole range is reported.
    pub const COMPLETE: u8 = 2;
}

/// The status of a descriptor (LBARS) for [`action::ALLOCATED`]: at least one of its blocks is
/// allocated.
pub const ALLOCATED_BLOCKS: u8 = 0b010;

/// Most blocks of one descriptor.
pub const DESCRIPTOR_BLOCKS: u64 = 1 << 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GetLbaStatus {
    pub slba: u64,
    /// Dwords to transfer (MNDW + 1).
    pub dwords: u64,
    /// See [`action`].
    pub action: u8,
    /// Blocks from SLBA on; 0: up to the last block of the namespace.
    pub range_length: u16,
}

impl GetLbaStatus {
    pub fn parse(sqe: &Sqe) -> Self {
        let cdw13 = sqe.cdw13.get();
        Self {
            slba: u64::from(sqe.cdw10.get()) | u64::from(sqe.cdw11.get()) << 32,
            dwords: u64::from(sqe.cdw12.get()) + 1,
            action: bits(cdw13, 24, 8) as u8,
            range_length: bits(cdw13, 0, 16) as u16,
        }
    }

    pub fn to_sqe(&self, cid: u16, nsid: u32) -> Sqe {
        let mut sqe = Sqe::for_namespace(admin::GET_LBA_STATUS, cid, nsid);
        sqe.cdw10 = U32::new(self.slba as u32);
        sqe.cdw11 = U32::new((self.slba >> 32) as u32);
        sqe.cdw12 = U32::new(self.dwords.saturating_sub(1) as u32);
        sqe.cdw13 = U32::new(u32::from(self.range_length) | u32::from(self.action) << 24);
        sqe
    }

    /// Bytes to transfer.
    pub fn bytes(&self) -> u64 {
        self.dwords * 4
    }
}

sized! {
    /// The header of the LBA Status Descriptor List.
    8 pub struct LbaStatusHeader {
        /// NLSD: descriptors that follow.
        pub count: U32,
        /// CMPC; see [`condition`].
        pub condition: u8,
        pub reserved5: [u8; 3],
    }
}

sized! {
    /// LBA Status Descriptor.
    16 pub struct LbaStatusDescriptor {
        pub dslba: U64,
        /// NLB, 0's based.
        pub blocks: U32,
        pub reserved12: u8,
        /// Bits 2:0: LBARS.
        pub status: u8,
        pub reserved14: [u8; 2],
    }
}

impl LbaStatusDescriptor {
    /// `blocks`: 1 to [`DESCRIPTOR_BLOCKS`].
    pub fn allocated(dslba: u64, blocks: u64) -> Self {
        Self {
            dslba: U64::new(dslba),
            blocks: U32::new(blocks.saturating_sub(1) as u32),
            reserved12: 0,
            status: ALLOCATED_BLOCKS,
            reserved14: [0; 2],
        }
    }
}

#[cfg(test)]
mod tests {
    use hex_literal::hex;
    use zerocopy::IntoBytes;

    use super::*;

    /// The dwords are those of libnvme's test of this command.
    #[test]
    fn bytes_of_command_and_data() {
        let command = GetLbaStatus {
            slba: 0x1_2345_6789,
            dwords: 14,
            action: action::TRACKED,
            range_length: 0x42,
        };
        let sqe = command.to_sqe(1, 7);
        assert_eq!(
            sqe.as_bytes()[40..56],
            hex!("89674523 01000000 0d000000 42000011")
        );
        assert_eq!(GetLbaStatus::parse(&sqe), command);
        assert_eq!(command.bytes(), 56);
        let descriptor = LbaStatusDescriptor::allocated(0x1000, DESCRIPTOR_BLOCKS);
        assert_eq!(
            descriptor.as_bytes(),
            hex!("0010000000000000 ffffffff 00 02 0000")
        );
    }
}

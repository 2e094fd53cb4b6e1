//! Typed views of a command's dwords, both ways: `parse` for a controller, `to_sqe` for a host.
//!
//! A view checks only the encoding. The controller checks the request against the namespace and its
//! features.

pub mod admin;
pub mod io;
pub mod lba_status;
pub mod reservation;

pub use admin::AdminCommand;
pub use io::IoCommand;

use crate::status::StatusCode;

/// Why a command's dwords were refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    #[error("opcode {opcode:#04x} is not known")]
    Opcode { opcode: u8 },
    #[error("{command}: {field} has the reserved value {value:#x}")]
    Reserved {
        command: &'static str,
        field: &'static str,
        value: u64,
    },
    #[error("Copy: source range descriptor format {format:#x} is not supported, only 0h and 1h")]
    CopyFormat { format: u8 },
    #[error("Get Log Page: offset {offset} is not a multiple of 4")]
    LogOffset { offset: u64 },
}

impl CommandError {
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Opcode { .. } => StatusCode::INVALID_OPCODE,
            Self::Reserved { .. } | Self::CopyFormat { .. } | Self::LogOffset { .. } => {
                StatusCode::INVALID_FIELD
            }
        }
    }
}

impl From<CommandError> for StatusCode {
    fn from(error: CommandError) -> Self {
        error.status()
    }
}

/// `count` bits of `dword` from bit `first` up.
const fn bits(dword: u32, first: u32, count: u32) -> u32 {
    dword >> first & ((1 << count) - 1)
}

const fn bit(dword: u32, at: u32) -> bool {
    dword >> at & 1 != 0
}

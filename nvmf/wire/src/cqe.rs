//! The completion queue entry (Base 3.3.3.2).

use core::fmt;

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::status::StatusCode;

/// The completion of one command: 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Cqe {
    /// Dwords 0 and 1: the command-specific result.
    pub result: U64,
    /// Submission queue head: the position up to which the controller has fetched commands.
    /// Reserved on a fabrics queue without flow control, but see [`Cqe::SQHD_NO_FLOW_CONTROL`].
    pub sqhd: U16,
    /// Submission queue identifier; reserved over fabrics.
    pub sqid: U16,
    pub cid: U16,
    /// Bit 0 is the phase tag (memory-based queues only), bits 15:1 the status field.
    pub status_phase: U16,
}

const _: () = assert!(size_of::<Cqe>() == Cqe::SIZE);

impl Cqe {
    pub const SIZE: usize = 16;
    /// SQHD in the response to a Connect by which the controller agrees to disable submission queue
    /// flow control (Base 6.3).
    pub const SQHD_NO_FLOW_CONTROL: u16 = 0xffff;

    pub fn new(cid: u16, status: StatusCode) -> Self {
        Self {
            result: U64::ZERO,
            sqhd: U16::ZERO,
            sqid: U16::ZERO,
            cid: U16::new(cid),
            status_phase: U16::new(status.field() << 1),
        }
    }

    pub fn success(cid: u16) -> Self {
        Self::new(cid, StatusCode::SUCCESS)
    }

    pub fn with_result(mut self, result: u64) -> Self {
        self.result = U64::new(result);
        self
    }

    pub fn with_dword0(self, dword0: u32) -> Self {
        self.with_result(u64::from(dword0))
    }

    pub fn with_sqhd(mut self, sqhd: u16) -> Self {
        self.sqhd = U16::new(sqhd);
        self
    }

    pub fn cid(&self) -> u16 {
        self.cid.get()
    }

    pub fn sqhd(&self) -> u16 {
        self.sqhd.get()
    }

    pub fn result(&self) -> u64 {
        self.result.get()
    }

    pub fn dword0(&self) -> u32 {
        self.result.get() as u32
    }

    pub fn status(&self) -> StatusCode {
        StatusCode::from_field(self.status_phase.get() >> 1)
    }

    pub fn set_status(&mut self, status: StatusCode) {
        self.status_phase = U16::new(status.field() << 1 | self.status_phase.get() & 1);
    }

    /// Inverts each time a memory-based queue wraps around; meaningless in a capsule.
    pub fn phase(&self) -> bool {
        self.status_phase.get() & 1 != 0
    }

    pub fn set_phase(&mut self, phase: bool) {
        self.status_phase = U16::new(self.status_phase.get() & !1 | u16::from(phase));
    }
}

impl fmt::Debug for Cqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("cid", &self.cid.get())
            .field("status", &format_args!("{}", self.status()))
            .field("result", &format_args!("{:#x}", self.result.get()))
            .field("sqhd", &self.sqhd.get())
            .field("sqid", &self.sqid.get())
            .field("phase", &self.phase())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use core::mem::offset_of;

    use hex_literal::hex;
    use proptest::prelude::*;

    use super::*;

    /// Each field is where Base figure 91 puts it, and a failed write reads as such.
    #[test]
    fn layout() {
        assert_eq!(offset_of!(Cqe, result), 0);
        assert_eq!(offset_of!(Cqe, sqhd), 8);
        assert_eq!(offset_of!(Cqe, sqid), 10);
        assert_eq!(offset_of!(Cqe, cid), 12);
        assert_eq!(offset_of!(Cqe, status_phase), 14);

        // Media error, write fault, do not retry, phase 1.
        let cqe = Cqe::read_from_bytes(&hex!("44332211 00000000 0500 0100 2a00 0185")).unwrap();
        assert_eq!(cqe.dword0(), 0x1122_3344);
        assert_eq!(cqe.sqhd(), 5);
        assert_eq!(cqe.sqid.get(), 1);
        assert_eq!(cqe.cid(), 42);
        assert!(cqe.phase());
        assert_eq!(cqe.status(), StatusCode::WRITE_FAULT.with_dnr());
    }

    proptest! {
        /// Status and phase share a word without touching each other.
        #[test]
        fn status_and_phase(field in 0u16..1 << 15, phase in any::<bool>()) {
            let mut cqe = Cqe::success(1);
            cqe.set_phase(phase);
            cqe.set_status(StatusCode::from_field(field));
            prop_assert_eq!(cqe.phase(), phase);
            prop_assert_eq!(cqe.status().field(), field);
        }
    }
}

//! Builds PDU headers. A header is a plain struct; `as_bytes()` (of `zerocopy::IntoBytes`) is its
//! wire form, to be followed by the digest, the padding up to PDO, the data and its digest.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

use super::*;

/// The common header of a PDU with `data_len` bytes of data, aligned as the receiver requests.
fn common(
    pdu_type: PduType,
    flags: PduFlags,
    digests: Digests,
    align: DataAlignment,
    data_len: u32,
) -> CommonHeader {
    let hlen = pdu_type.hlen();
    let mut flags = flags;
    flags.set(PduFlags::HDGSTF, digests.header);
    let header_end = u32::from(hlen) + digests.header_bytes();
    let (pdo, plen) = if data_len == 0 {
        (0, header_end)
    } else {
        flags.set(PduFlags::DDGSTF, digests.data);
        // At most 128, so it fits its byte.
        let pdo = align.align(header_end);
        (pdo as u8, pdo + data_len + digests.data_bytes())
    };
    CommonHeader {
        pdu_type: pdu_type as u8,
        flags: flags.bits(),
        hlen,
        pdo,
        plen: U32::new(plen),
    }
}

/// A header without data or digests.
fn bare(pdu_type: PduType) -> CommonHeader {
    common(
        pdu_type,
        PduFlags::empty(),
        Digests::NONE,
        DataAlignment::DWORD,
        0,
    )
}

impl IcReq {
    /// `max_r2t` is a count; 0 becomes 1, the least that the field can express.
    pub fn new(hpda: DataAlignment, digests: Digests, max_r2t: u32) -> Self {
        Self {
            ch: bare(PduType::IcReq),
            pfv: U16::new(Self::PFV),
            hpda: hpda.field(),
            dgst: digests.bits(),
            maxr2t: U32::new(max_r2t.saturating_sub(1)),
            reserved16: [0; 112],
        }
    }
}

impl IcResp {
    /// `max_h2c_data` in bytes: a multiple of 4, at least [`MIN_MAXH2CDATA`].
    pub fn new(cpda: DataAlignment, digests: Digests, max_h2c_data: u32) -> Self {
        debug_assert!(max_h2c_data >= MIN_MAXH2CDATA && max_h2c_data.is_multiple_of(4));
        Self {
            ch: bare(PduType::IcResp),
            pfv: U16::new(IcReq::PFV),
            cpda: cpda.field(),
            dgst: digests.bits(),
            maxh2cdata: U32::new(max_h2c_data),
            reserved16: [0; 112],
        }
    }
}

impl CapsuleCmd {
    /// A command with `in_capsule_len` bytes of data in the capsule, 0 for none.
    pub fn new(sqe: Sqe, in_capsule_len: u32, digests: Digests, cpda: DataAlignment) -> Self {
        let flags = PduFlags::empty();
        let ch = common(PduType::CapsuleCmd, flags, digests, cpda, in_capsule_len);
        Self { ch, sqe }
    }
}

impl CapsuleResp {
    pub fn new(cqe: Cqe, digests: Digests) -> Self {
        let flags = PduFlags::empty();
        let ch = common(
            PduType::CapsuleResp,
            flags,
            digests,
            DataAlignment::DWORD,
            0,
        );
        Self { ch, cqe }
    }
}

impl DataPdu {
    /// A part of the data that an R2T requests. `datal` must not be 0.
    pub fn h2c(
        cccid: u16,
        ttag: u16,
        datao: u32,
        datal: u32,
        last: bool,
        digests: Digests,
        cpda: DataAlignment,
    ) -> Self {
        let mut flags = PduFlags::empty();
        flags.set(PduFlags::LAST_PDU, last);
        let ch = common(PduType::H2cData, flags, digests, cpda, datal);
        Self::with(ch, cccid, ttag, datao, datal)
    }

    /// A part of a command's read data. `flags` may have [`PduFlags::LAST_PDU`] and, with it,
    /// [`PduFlags::SUCCESS`]; `datal` must not be 0.
    pub fn c2h(
        cccid: u16,
        datao: u32,
        datal: u32,
        flags: PduFlags,
        digests: Digests,
        hpda: DataAlignment,
    ) -> Self {
        let ch = common(PduType::C2hData, flags, digests, hpda, datal);
        Self::with(ch, cccid, 0, datao, datal)
    }

    fn with(ch: CommonHeader, cccid: u16, ttag: u16, datao: u32, datal: u32) -> Self {
        debug_assert!(datal != 0, "a data PDU carries data");
        Self {
            ch,
            cccid: U16::new(cccid),
            ttag: U16::new(ttag),
            datao: U32::new(datao),
            datal: U32::new(datal),
            reserved20: [0; 4],
        }
    }
}

impl R2t {
    pub fn new(cccid: u16, ttag: u16, r2to: u32, r2tl: u32, digests: Digests) -> Self {
        debug_assert!(r2tl != 0, "an R2T asks for data");
        Self {
            ch: common(
                PduType::R2t,
                PduFlags::empty(),
                digests,
                DataAlignment::DWORD,
                0,
            ),
            cccid: U16::new(cccid),
            ttag: U16::new(ttag),
            r2to: U32::new(r2to),
            r2tl: U32::new(r2tl),
            reserved20: [0; 4],
        }
    }
}

/// A whole termination request: its header, and the beginning of the offending PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, Immutable, Unaligned, KnownLayout)]
#[repr(C)]
pub struct TermPdu {
    header: TermReq,
    offending: [u8; MAX_TERM_DATA_BYTES as usize],
}

impl TermPdu {
    /// The request of `sender`. Quotes the first 128 bytes of `offending`.
    pub fn new(sender: Side, status: FatalErrorStatus, fei: u32, offending: &[u8]) -> Self {
        let quoted = offending.len().min(MAX_TERM_DATA_BYTES as usize);
        let mut data = [0; MAX_TERM_DATA_BYTES as usize];
        data[..quoted].copy_from_slice(&offending[..quoted]);
        let mut ch = bare(match sender {
            Side::Host => PduType::H2cTermReq,
            Side::Controller => PduType::C2hTermReq,
        });
        ch.plen = U32::new((TermReq::SIZE + quoted) as u32);
        let header = TermReq {
            ch,
            fes: U16::new(status as u16),
            fei: U32::new(fei),
            reserved14: [0; 10],
        };
        Self {
            header,
            offending: data,
        }
    }

    /// The request of the `receiver` of an invalid PDU.
    pub fn for_error(receiver: Side, error: &PduError, offending: &[u8]) -> Self {
        Self::new(receiver, error.status, error.fei(), offending)
    }

    /// Returns the bytes of the PDU as they go on the wire.
    pub fn bytes(&self) -> &[u8] {
        &self.as_bytes()[..self.header.ch.plen.get() as usize]
    }
}

//! Reads received PDUs, queues PDUs to send with their digests and padding, and maps a peer's
//! protocol violations to termination requests (H2CTermReq, C2HTermReq). `nvmf/wire` has the PDU
//! headers and their checks.

use std::fmt;

use nacre_bdev::Extents;
use nacre_nvmf_wire::tcp::{
    CommonHeader, DataAlignment, Digests, FatalErrorStatus, Field, Frame, Pdu, PduError, Reason,
    Rules, Side, TermPdu, TermReq,
};
use zerocopy::{Immutable, IntoBytes};

use super::tx::Tx;

/// A protocol violation of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// A field of a PDU header.
    Pdu(PduError),
    /// More commands outstanding than the queue has entries.
    QueueOverrun { entries: usize },
    /// LAST_PDU is set on a data PDU that does not end its transfer (`left` bytes remain), or is
    /// clear on the one that does.
    LastPdu { last: bool, left: u32 },
    /// Data for a command that has received all its data, or transfers none in this direction.
    UnexpectedData { cid: u16 },
}

impl Violation {
    pub fn field(field: Field, reason: Reason, status: FatalErrorStatus) -> Self {
        Self::Pdu(PduError {
            field,
            reason,
            status,
        })
    }

    fn term_pdu(&self, receiver: Side, offending: &[u8]) -> TermPdu {
        let flags = Field::Flags.offset().unwrap_or(0);
        match self {
            Self::Pdu(error) => TermPdu::for_error(receiver, error, offending),
            Self::QueueOverrun { .. } => {
                TermPdu::new(receiver, FatalErrorStatus::SequenceError, 0, offending)
            }
            Self::LastPdu { .. } => TermPdu::new(
                receiver,
                FatalErrorStatus::InvalidHeaderField,
                flags,
                offending,
            ),
            Self::UnexpectedData { .. } => {
                TermPdu::new(receiver, FatalErrorStatus::DataOutOfRange, 0, offending)
            }
        }
    }

    /// Queues the termination request that `receiver` sends. `offending`: the received PDU from its
    /// start.
    #[cold]
    pub fn put(&self, tx: &mut Tx, receiver: Side, offending: &[u8]) {
        tx.push(self.term_pdu(receiver, offending).bytes());
    }
}

impl From<PduError> for Violation {
    fn from(error: PduError) -> Self {
        Self::Pdu(error)
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pdu(error) => error.fmt(f),
            Self::QueueOverrun { entries } => {
                write!(
                    f,
                    "SQ: a command beyond the {entries} that the queue has room for"
                )
            }
            Self::LastPdu { last: true, left } => {
                write!(
                    f,
                    "FLAGS: LAST_PDU is set with {left} bytes of the transfer still to come"
                )
            }
            Self::LastPdu { last: false, .. } => {
                f.write_str("FLAGS: LAST_PDU is clear in the PDU that ends the transfer")
            }
            Self::UnexpectedData { cid } => {
                write!(f, "CCCID: data for command {cid}, which expects none")
            }
        }
    }
}

/// Parses PDUs under the current rules. It caches the result for the latest common header, because
/// most headers begin like an earlier one.
pub struct Reader {
    rules: Rules,
    known: Option<([u8; CommonHeader::SIZE], Frame)>,
}

impl Reader {
    pub fn new(rules: Rules) -> Self {
        Self { rules, known: None }
    }

    #[inline]
    pub fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Changes the rules for the PDUs that follow.
    pub fn change(&mut self, change: impl FnOnce(&mut Rules)) {
        change(&mut self.rules);
        self.known = None;
    }

    /// Parses the PDU at the beginning of `bytes`. `None`: its header, digest and padding are not
    /// complete. Checks the common header first, then the header digest, then the other fields. The
    /// payload need not have arrived.
    #[inline]
    pub fn read<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<(Frame, Pdu<'a>)>, PduError> {
        let Some(common) = bytes.first_chunk() else {
            return Ok(None);
        };
        let frame = match &self.known {
            Some((known, frame)) if known == common => *frame,
            _ => self.parse_header(common)?,
        };
        // PDO is a byte, so this much always fits the receive buffer, and can be carried over.
        if bytes.len() < frame.data_offset as usize {
            return Ok(None);
        }
        if frame.header_digest {
            check_digest(&frame, bytes)?;
        }
        Ok(Some((frame, Pdu::parse(&frame, bytes)?)))
    }

    #[inline(never)]
    fn parse_header(&mut self, common: &[u8; CommonHeader::SIZE]) -> Result<Frame, PduError> {
        let frame = Frame::parse(common, &self.rules)?;
        self.known = Some((*common, frame));
        Ok(frame)
    }
}

fn check_digest(frame: &Frame, bytes: &[u8]) -> Result<(), PduError> {
    let (header, rest) = bytes.split_at(frame.hlen as usize);
    let digest = rest.first_chunk();
    let actual = u32::from_le_bytes(*digest.expect("the data offset is behind the digest"));
    let expected = crc_fast::crc32_iscsi(header);
    if expected != actual {
        return Err(PduError::header_digest(expected, actual));
    }
    Ok(())
}

/// Queues a header, and its digest if `digests` has one.
#[inline]
pub fn put<H: IntoBytes + Immutable>(tx: &mut Tx, header: &H, digests: Digests) {
    let bytes = header.as_bytes();
    tx.push(bytes);
    if digests.header {
        tx.push(&crc_fast::crc32_iscsi(bytes).to_le_bytes());
    }
}

/// Queues a header, with the padding before the payload that the receiver requested (HPDA, CPDA).
#[inline]
pub fn put_before_data<H: IntoBytes + Immutable>(
    tx: &mut Tx,
    header: &H,
    digests: Digests,
    align: DataAlignment,
) {
    put(tx, header, digests);
    let end = size_of::<H>() as u32 + digests.header_bytes();
    let padding = align.align(end) - end;
    if padding > 0 {
        tx.push(&[0; 128][..padding as usize]);
    }
}

/// Queues payload and its digest.
#[inline]
pub fn put_data(tx: &mut Tx, digests: Digests, data: Extents) {
    let digest = digests.data.then(|| match &data[..] {
        [data] => crc_fast::crc32_iscsi(data),
        pieces => {
            let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
            pieces.iter().for_each(|piece| digest.update(piece));
            digest.finalize() as u32
        }
    });
    data.into_iter().for_each(|piece| tx.push_data(piece));
    if let Some(digest) = digest {
        tx.push(&digest.to_le_bytes());
    }
}

/// True if the data does not match its data digest.
#[inline]
pub fn is_damaged(data: &[u8], digest: Option<u32>) -> bool {
    digest.is_some_and(|digest| crc_fast::crc32_iscsi(data) != digest)
}

/// The reason in the peer's termination request, as text.
pub fn reason_of(request: &TermReq) -> String {
    let fei = request.fei.get();
    match request.status() {
        Ok(status) => format!("{status}, information {fei:#x}"),
        Err(code) => format!("fatal error status {code:#x}, information {fei:#x}"),
    }
}

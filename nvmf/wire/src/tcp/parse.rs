//! Parses and checks a PDU header by all rules of TCP 3.6 that depend only on the header.

use zerocopy::FromBytes;

use super::*;

/// The receiver's state that decides which PDUs are valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    pub receiver: Side,
    /// True once ICReq and ICResp were exchanged. Before, only they and termination requests are
    /// valid; afterwards ICReq and ICResp are not.
    pub initialized: bool,
    /// Digests that host and controller negotiated.
    pub digests: Digests,
    /// The alignment that this receiver has requested (CPDA of a controller, HPDA of a host).
    pub alignment: DataAlignment,
    /// Most in-capsule data of a CapsuleCmd, in bytes.
    pub max_in_capsule_bytes: u32,
    /// Most data of one H2CData (MAXH2CDATA, for a controller) or C2HData (for a host; the protocol
    /// sets no limit), in bytes.
    pub max_data_bytes: u32,
}

impl Rules {
    /// A controller that waits for ICReq.
    pub const fn controller() -> Self {
        Self {
            receiver: Side::Controller,
            initialized: false,
            digests: Digests::NONE,
            alignment: DataAlignment::DWORD,
            max_in_capsule_bytes: ADMIN_IN_CAPSULE_BYTES,
            max_data_bytes: MIN_MAXH2CDATA,
        }
    }

    /// A host that waits for ICResp.
    pub const fn host() -> Self {
        Self {
            receiver: Side::Host,
            max_data_bytes: u32::MAX,
            ..Self::controller()
        }
    }
}

/// A parsed common header: the layout of the rest of its PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    pub pdu_type: PduType,
    pub flags: PduFlags,
    /// Bytes of the header, without its digest.
    pub hlen: u32,
    /// Whether a digest follows the header.
    pub header_digest: bool,
    /// Whether a digest follows the data.
    pub data_digest: bool,
    /// Offset of the data; without data, of the end of the header and its digest.
    pub data_offset: u32,
    pub data_len: u32,
    /// Bytes of the whole PDU.
    pub plen: u32,
}

impl Frame {
    /// Checks and parses a common header.
    pub fn parse(bytes: &[u8; CommonHeader::SIZE], rules: &Rules) -> Result<Self, PduError> {
        let ch = CommonHeader {
            pdu_type: bytes[0],
            flags: bytes[1],
            hlen: bytes[2],
            pdo: bytes[3],
            plen: U32::from_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        };
        let pdu_type = expected_type(&ch, rules)?;
        let flags = PduFlags::from_bits_retain(ch.flags);
        let forbidden = flags.bits() & !pdu_type.flags().bits();
        if forbidden != 0 {
            return Err(invalid(
                Field::Flags,
                Reason::FlagsReserved { bits: forbidden },
            ));
        }
        if ch.hlen != pdu_type.hlen() {
            let (expected, actual) = (u32::from(pdu_type.hlen()), u32::from(ch.hlen));
            return Err(invalid(Field::Hlen, Reason::NotEqual { expected, actual }));
        }
        let header_digest = pdu_type.may_have_digests() && rules.digests.header;
        if flags.contains(PduFlags::HDGSTF) != header_digest {
            let reason = Reason::DigestFlag {
                negotiated: rules.digests.header,
            };
            return Err(invalid(Field::Flags, reason));
        }
        let digest_bytes = if header_digest { DIGEST_BYTES } else { 0 };
        let mut frame = Self {
            pdu_type,
            flags,
            hlen: u32::from(ch.hlen),
            header_digest,
            data_digest: false,
            data_offset: u32::from(ch.hlen) + digest_bytes,
            data_len: 0,
            plen: ch.plen.get(),
        };
        match pdu_type {
            PduType::H2cTermReq | PduType::C2hTermReq => frame.place_term_data()?,
            PduType::CapsuleCmd if frame.plen != frame.data_offset => {
                frame.place_data(ch.pdo, rules)?;
                frame.at_most(
                    rules.max_in_capsule_bytes,
                    FatalErrorStatus::InvalidHeaderField,
                )?;
            }
            PduType::H2cData | PduType::C2hData => {
                frame.place_data(ch.pdo, rules)?;
                frame.at_most(rules.max_data_bytes, FatalErrorStatus::LimitExceeded)?;
            }
            _ => frame.without_data(ch.pdo)?,
        }
        Ok(frame)
    }

    /// Bytes of the header and its digest, which [`Pdu::parse`] needs.
    pub fn header_bytes(&self) -> u32 {
        self.hlen + if self.header_digest { DIGEST_BYTES } else { 0 }
    }

    /// Bytes between the header (with its digest) and the data.
    pub fn padding_bytes(&self) -> u32 {
        self.data_offset - self.header_bytes()
    }

    fn without_data(&self, pdo: u8) -> Result<(), PduError> {
        let end = self.data_offset;
        if self.plen != end {
            let reason = Reason::NotEqual {
                expected: end,
                actual: self.plen,
            };
            return Err(invalid(Field::Plen, reason));
        }
        // Reserved, so zero; one that points at the end of the PDU says "no data" as well.
        if pdo != 0 && u32::from(pdo) != end {
            let reason = Reason::NotEqual {
                expected: 0,
                actual: u32::from(pdo),
            };
            return Err(invalid(Field::Pdo, reason));
        }
        Ok(())
    }

    /// The quoted header of a termination request has no PDO: it follows at once.
    fn place_term_data(&mut self) -> Result<(), PduError> {
        self.data_len = bounded(
            Field::Plen,
            self.plen,
            self.hlen,
            self.hlen + MAX_TERM_DATA_BYTES,
        )? - self.hlen;
        Ok(())
    }

    fn place_data(&mut self, pdo: u8, rules: &Rules) -> Result<(), PduError> {
        let header_end = self.data_offset;
        let pdo = u32::from(pdo);
        // A PDU too short for its own header is wrong in PLEN whatever PDO says.
        bounded(Field::Plen, self.plen, header_end, u32::MAX)?;
        bounded(Field::Pdo, pdo, header_end, u32::MAX)?;
        let alignment = rules.alignment.bytes();
        if !pdo.is_multiple_of(alignment) {
            return Err(invalid(
                Field::Pdo,
                Reason::Misaligned {
                    alignment,
                    actual: pdo,
                },
            ));
        }
        self.data_digest = rules.digests.data;
        if self.flags.contains(PduFlags::DDGSTF) != self.data_digest {
            let reason = Reason::DigestFlag {
                negotiated: self.data_digest,
            };
            return Err(invalid(Field::Flags, reason));
        }
        let overhead = pdo + if self.data_digest { DIGEST_BYTES } else { 0 };
        // At least one byte: an empty data PDU would be a way to keep us busy with nothing.
        self.data_len = bounded(Field::Plen, self.plen, overhead + 1, u32::MAX)? - overhead;
        self.data_offset = pdo;
        Ok(())
    }

    fn at_most(&self, maximum: u32, status: FatalErrorStatus) -> Result<(), PduError> {
        if self.data_len > maximum {
            let reason = Reason::DataTooLong {
                maximum,
                actual: self.data_len,
            };
            return Err(PduError {
                field: Field::Plen,
                reason,
                status,
            });
        }
        Ok(())
    }
}

/// The type, if this side may receive it in this state.
fn expected_type(ch: &CommonHeader, rules: &Rules) -> Result<PduType, PduError> {
    let Some(pdu_type) = PduType::from_u8(ch.pdu_type) else {
        return Err(invalid(
            Field::PduType,
            Reason::UnknownType {
                actual: ch.pdu_type,
            },
        ));
    };
    if pdu_type.receiver() != rules.receiver {
        let reason = Reason::WrongDirection {
            pdu_type,
            receiver: rules.receiver,
        };
        return Err(invalid(Field::PduType, reason));
    }
    let initializes = matches!(pdu_type, PduType::IcReq | PduType::IcResp);
    if initializes == rules.initialized && !pdu_type.is_term_req() {
        return Err(PduError {
            field: Field::PduType,
            reason: Reason::OutOfSequence {
                pdu_type,
                initialized: rules.initialized,
            },
            status: FatalErrorStatus::SequenceError,
        });
    }
    Ok(pdu_type)
}

fn bounded(field: Field, actual: u32, minimum: u32, maximum: u32) -> Result<u32, PduError> {
    if actual < minimum {
        return Err(invalid(field, Reason::TooSmall { minimum, actual }));
    }
    if actual > maximum {
        return Err(invalid(field, Reason::TooLarge { maximum, actual }));
    }
    Ok(actual)
}

fn invalid(field: Field, reason: Reason) -> PduError {
    PduError {
        field,
        reason,
        status: FatalErrorStatus::InvalidHeaderField,
    }
}

/// A checked header, borrowed from the received bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pdu<'a> {
    IcReq(&'a IcReq),
    IcResp(&'a IcResp),
    H2cTermReq(&'a TermReq),
    C2hTermReq(&'a TermReq),
    CapsuleCmd(&'a Sqe),
    CapsuleResp(&'a Cqe),
    H2cData(&'a DataPdu),
    C2hData(&'a DataPdu),
    R2t(&'a R2t),
}

impl<'a> Pdu<'a> {
    /// Checks and parses the rest of the header. `header` begins with the common header and has at
    /// least `frame.hlen` bytes.
    pub fn parse(frame: &Frame, header: &'a [u8]) -> Result<Self, PduError> {
        Ok(match frame.pdu_type {
            PduType::IcReq => Pdu::IcReq(check_ic_req(cast(header)?)?),
            PduType::IcResp => Pdu::IcResp(check_ic_resp(cast(header)?)?),
            PduType::H2cTermReq => Pdu::H2cTermReq(cast(header)?),
            PduType::C2hTermReq => Pdu::C2hTermReq(cast(header)?),
            PduType::CapsuleCmd => Pdu::CapsuleCmd(&cast::<CapsuleCmd>(header)?.sqe),
            PduType::CapsuleResp => Pdu::CapsuleResp(&cast::<CapsuleResp>(header)?.cqe),
            PduType::H2cData => Pdu::H2cData(check_data(frame, cast(header)?)?),
            PduType::C2hData => Pdu::C2hData(check_data(frame, cast(header)?)?),
            PduType::R2t => Pdu::R2t(check_r2t(cast(header)?)?),
        })
    }
}

/// The result of [`parse_header`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// Number of bytes needed, from the beginning of the PDU.
    Need(u32),
    Header(Frame, Pdu<'a>),
}

/// Checks the PDU header at the beginning of `bytes`. An invalid common header is refused as soon
/// as its eight bytes are there.
pub fn parse_header<'a>(bytes: &'a [u8], rules: &Rules) -> Result<Parsed<'a>, PduError> {
    let Some(common) = bytes.first_chunk() else {
        return Ok(Parsed::Need(CommonHeader::SIZE as u32));
    };
    let frame = Frame::parse(common, rules)?;
    if bytes.len() < frame.header_bytes() as usize {
        return Ok(Parsed::Need(frame.header_bytes()));
    }
    Ok(Parsed::Header(frame, Pdu::parse(&frame, bytes)?))
}

fn cast<T: FromBytes + KnownLayout + Immutable + Unaligned>(header: &[u8]) -> Result<&T, PduError> {
    T::ref_from_prefix(header).map(|(pdu, _)| pdu).map_err(|_| {
        let (expected, actual) = (size_of::<T>() as u32, header.len() as u32);
        invalid(Field::Hlen, Reason::Truncated { expected, actual })
    })
}

fn check_ic_req(pdu: &IcReq) -> Result<&IcReq, PduError> {
    check_initialization(pdu.pfv.get(), pdu.hpda, pdu.dgst)?;
    Ok(pdu)
}

fn check_ic_resp(pdu: &IcResp) -> Result<&IcResp, PduError> {
    check_initialization(pdu.pfv.get(), pdu.cpda, pdu.dgst)?;
    let maxh2cdata = bounded(
        Field::Maxh2cdata,
        pdu.maxh2cdata.get(),
        MIN_MAXH2CDATA,
        u32::MAX,
    )?;
    if !maxh2cdata.is_multiple_of(4) {
        let reason = Reason::Misaligned {
            alignment: 4,
            actual: maxh2cdata,
        };
        return Err(invalid(Field::Maxh2cdata, reason));
    }
    Ok(pdu)
}

/// The version comes first: it defines the meaning of the other fields.
fn check_initialization(pfv: u16, alignment: u8, dgst: u8) -> Result<(), PduError> {
    let unsupported = |field, actual| {
        let reason = Reason::Unsupported { actual };
        Err(PduError {
            field,
            reason,
            status: FatalErrorStatus::UnsupportedParameter,
        })
    };
    if pfv != IcReq::PFV {
        return unsupported(Field::Pfv, u32::from(pfv));
    }
    bounded(
        Field::DataAlignment,
        alignment.into(),
        0,
        DataAlignment::MAX.field().into(),
    )?;
    if dgst & !Digests::BOTH.bits() != 0 {
        return unsupported(Field::Dgst, u32::from(dgst));
    }
    Ok(())
}

fn check_data<'a>(frame: &Frame, pdu: &'a DataPdu) -> Result<&'a DataPdu, PduError> {
    let datal = pdu.datal.get();
    if datal != frame.data_len {
        let reason = Reason::NotEqual {
            expected: frame.data_len,
            actual: datal,
        };
        return Err(invalid(Field::Datal, reason));
    }
    check_range(Field::Datao, pdu.datao.get(), datal)?;
    if pdu.is_success() && !pdu.is_last() {
        return Err(invalid(Field::Flags, Reason::SuccessBeforeLast));
    }
    Ok(pdu)
}

fn check_r2t(pdu: &R2t) -> Result<&R2t, PduError> {
    let r2tl = bounded(Field::R2tl, pdu.r2tl.get(), 1, u32::MAX)?;
    check_range(Field::R2to, pdu.r2to.get(), r2tl)?;
    Ok(pdu)
}

/// No command has more than 2^32 - 1 bytes of data.
fn check_range(field: Field, offset: u32, length: u32) -> Result<(), PduError> {
    if offset.checked_add(length).is_none() {
        let reason = Reason::RangeOverflows { offset, length };
        return Err(PduError {
            field,
            reason,
            status: FatalErrorStatus::DataOutOfRange,
        });
    }
    Ok(())
}

/// A field of a PDU header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Field {
    PduType,
    Flags,
    Hlen,
    Pdo,
    Plen,
    Pfv,
    /// HPDA or CPDA.
    DataAlignment,
    Dgst,
    Maxh2cdata,
    Cccid,
    Ttag,
    Datao,
    Datal,
    R2to,
    R2tl,
    /// The digest that follows the header.
    HeaderDigest,
}

impl Field {
    /// The offset in the PDU; `None` for the digest, whose place depends on the type.
    pub const fn offset(self) -> Option<u32> {
        Some(match self {
            Self::PduType => 0,
            Self::Flags => 1,
            Self::Hlen => 2,
            Self::Pdo => 3,
            Self::Plen => 4,
            Self::Pfv | Self::Cccid => 8,
            Self::DataAlignment | Self::Ttag => 10,
            Self::Dgst => 11,
            Self::Maxh2cdata | Self::Datao | Self::R2to => 12,
            Self::Datal | Self::R2tl => 16,
            Self::HeaderDigest => return None,
        })
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::PduType => "PDU-Type",
            Self::Flags => "FLAGS",
            Self::Hlen => "HLEN",
            Self::Pdo => "PDO",
            Self::Plen => "PLEN",
            Self::Pfv => "PFV",
            Self::DataAlignment => "HPDA/CPDA",
            Self::Dgst => "DGST",
            Self::Maxh2cdata => "MAXH2CDATA",
            Self::Cccid => "CCCID",
            Self::Ttag => "TTAG",
            Self::Datao => "DATAO",
            Self::Datal => "DATAL",
            Self::R2to => "R2TO",
            Self::R2tl => "R2TL",
            Self::HeaderDigest => "HDGST",
        }
    }
}

/// The rule that a field breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    #[error("{actual:#04x} is no PDU type")]
    UnknownType { actual: u8 },
    #[error("a {receiver} does not receive {pdu_type}")]
    WrongDirection { pdu_type: PduType, receiver: Side },
    #[error(
        "{pdu_type} came {} the connection was initialized",
        if *initialized { "after" } else { "before" }
    )]
    OutOfSequence {
        pdu_type: PduType,
        initialized: bool,
    },
    #[error("reserved bits {bits:#04x} are set")]
    FlagsReserved { bits: u8 },
    #[error(
        "the digest flag contradicts the negotiation ({})",
        if *negotiated { "digest in use" } else { "no digest" }
    )]
    DigestFlag { negotiated: bool },
    #[error("is {actual}, but must be {expected}")]
    NotEqual { expected: u32, actual: u32 },
    #[error("is {actual}, less than {minimum}")]
    TooSmall { minimum: u32, actual: u32 },
    #[error("is {actual}, more than {maximum}")]
    TooLarge { maximum: u32, actual: u32 },
    #[error("is {actual}, not a multiple of {alignment}")]
    Misaligned { alignment: u32, actual: u32 },
    #[error("{actual} bytes of data, more than the {maximum} allowed")]
    DataTooLong { maximum: u32, actual: u32 },
    #[error("{length} bytes at {offset} reach beyond what 32 bits can address")]
    RangeOverflows { offset: u32, length: u32 },
    #[error("{actual} is not supported")]
    Unsupported { actual: u32 },
    #[error("SUCCESS is set without LAST_PDU")]
    SuccessBeforeLast,
    #[error("only {actual} of {expected} header bytes are there")]
    Truncated { expected: u32, actual: u32 },
    /// Raised by the connection, which computes digests.
    #[error("is {actual:#010x}, but the header's is {expected:#010x}")]
    DigestMismatch { expected: u32, actual: u32 },
    /// Raised by the connection, which knows the commands in flight.
    #[error("{actual} names nothing that is in flight")]
    NotInFlight { actual: u32 },
    /// Raised by the connection: not the next part of the data, or more than was requested.
    #[error("{length} bytes at {offset}, but {expected_length} at {expected_offset} come next")]
    UnexpectedRange {
        offset: u32,
        length: u32,
        expected_offset: u32,
        expected_length: u32,
    },
}

/// The error of an invalid PDU. It ends the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}: {reason} ({status})", field.name())]
pub struct PduError {
    pub field: Field,
    pub reason: Reason,
    /// The status of the termination request; see also [`PduError::fei`].
    pub status: FatalErrorStatus,
}

impl PduError {
    /// A header digest that does not match.
    pub fn header_digest(expected: u32, actual: u32) -> Self {
        Self {
            field: Field::HeaderDigest,
            reason: Reason::DigestMismatch { expected, actual },
            status: FatalErrorStatus::HeaderDigestError,
        }
    }

    /// The error of a CCCID or TTAG of no transfer in flight.
    pub fn not_in_flight(field: Field, actual: u16) -> Self {
        invalid(
            field,
            Reason::NotInFlight {
                actual: actual.into(),
            },
        )
    }

    /// Fatal error information (TCP figure 31): the offset of the field, or the digest received.
    pub fn fei(&self) -> u32 {
        match (self.status, self.reason) {
            (_, Reason::DigestMismatch { actual, .. }) => actual,
            (FatalErrorStatus::InvalidHeaderField | FatalErrorStatus::UnsupportedParameter, _) => {
                self.field.offset().unwrap_or(0)
            }
            _ => 0,
        }
    }
}

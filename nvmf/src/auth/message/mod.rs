//! The messages of DH-HMAC-CHAP (Base 8.3.4; TP8006), of both ends: bytes to a typed message and
//! back. The identifiers of hash functions and groups are left to the state machines.
//!
//! ```text
//!   0          1        2..3      4..5   6 ..
//!   AUTH_TYPE  AUTH_ID  reserved  T_ID   per message
//! ```
//!
//! Numbers are little endian, Diffie-Hellman values big endian. A message may be followed by other
//! bytes: hosts fetch with a buffer of 4096 bytes. Reserved bytes are ignored.

use std::fmt;

/// Most bytes of a message that this code sends: a Reply with SHA-512 and an 8192-bit public value.
pub const MOST_BYTES: usize = 16 + 64 + 64 + 1024;
/// Bytes of the header that all messages have.
const HEADER: usize = 6;
/// Bytes of Failure1 and Failure2.
pub const FAILURE_BYTES: usize = 8;
/// Bytes of the fixed part of Challenge, Reply and Success1.
const FIXED: usize = 16;
/// Bytes of a protocol descriptor of Negotiate, with its lists.
const DESCRIPTOR: usize = 64;
/// Most identifiers in each of its two lists, and the offsets of the lists.
const LIST: usize = 30;
const HASHES_AT: usize = 4;
const GROUPS_AT: usize = HASHES_AT + LIST;
/// AUTHID of DH-HMAC-CHAP.
const DHCHAP: u8 = 1;
/// RC of the failure messages: authentication failed.
const REASON: u8 = 1;

/// AUTH_TYPE and AUTH_ID.
mod id {
    pub(super) const NEGOTIATE: (u8, u8) = (0, 0x00);
    pub(super) const CHALLENGE: (u8, u8) = (1, 0x01);
    pub(super) const REPLY: (u8, u8) = (1, 0x02);
    pub(super) const SUCCESS1: (u8, u8) = (1, 0x03);
    pub(super) const SUCCESS2: (u8, u8) = (1, 0x04);
    pub(super) const FAILURE2: (u8, u8) = (0, 0xf0);
    pub(super) const FAILURE1: (u8, u8) = (0, 0xf1);
}

/// A message, which borrows the buffer that it is parsed from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message<'a> {
    /// T_ID: chosen by the host.
    pub transaction: u16,
    pub body: Body<'a>,
}

/// The kind of a message (AUTH_TYPE and AUTH_ID) with its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body<'a> {
    Negotiate(Negotiate<'a>),
    Challenge(Challenge<'a>),
    Reply(Reply<'a>),
    /// HL, and R2 if the controller proves that it has its key.
    Success1 {
        /// HL: bytes of the hash.
        hash_bytes: u8,
        /// R2, if the controller proves itself (RVALID).
        response: Option<&'a [u8]>,
    },
    /// From the host: the controller is authenticated.
    Success2,
    /// The controller ends the transaction.
    Failure1(Failed),
    /// The host ends the transaction.
    Failure2(Failed),
}

/// The host's offer. It may have unknown identifiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Negotiate<'a> {
    /// SC_C: secure channel concatenation; 0: none.
    pub secure_channel: u8,
    /// HashIDs and DHgIDs of DH-HMAC-CHAP; `None`: the host offers other protocols only.
    pub offer: Option<(&'a [u8], &'a [u8])>,
}

/// From the controller: its choice of the offer, and its challenge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge<'a> {
    /// HashID.
    pub hash: u8,
    /// DHgID.
    pub group: u8,
    /// S1, not 0.
    pub number: u32,
    /// C1: 32, 48 or 64 bytes (HL).
    pub challenge: &'a [u8],
    /// The controller's Diffie-Hellman public value; empty with the null group.
    pub public: &'a [u8],
}

/// From the host: its response, and its own challenge if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply<'a> {
    /// R1: 32, 48 or 64 bytes (HL).
    pub response: &'a [u8],
    /// C2 and S2. S2 is 0 if the host does not request the controller's proof; C2 is then used only
    /// for the PSK of secure channel concatenation.
    pub challenge: Option<(&'a [u8], u32)>,
    /// The host's Diffie-Hellman public value; empty with the null group.
    pub public: &'a [u8],
}

/// The reason code explanation of a failure (RCE).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    Authentication,
    ProtocolUnusable,
    ConcatenationMismatch,
    HashUnusable,
    GroupUnusable,
    IncorrectPayload,
    IncorrectMessage,
    /// Any other RCE.
    Other(u8),
}

impl Failed {
    const KNOWN: [Self; 7] = [
        Self::Authentication,
        Self::ProtocolUnusable,
        Self::ConcatenationMismatch,
        Self::HashUnusable,
        Self::GroupUnusable,
        Self::IncorrectPayload,
        Self::IncorrectMessage,
    ];

    pub fn code(self) -> u8 {
        match self {
            Self::Authentication => 1,
            Self::ProtocolUnusable => 2,
            Self::ConcatenationMismatch => 3,
            Self::HashUnusable => 4,
            Self::GroupUnusable => 5,
            Self::IncorrectPayload => 6,
            Self::IncorrectMessage => 7,
            Self::Other(code) => code,
        }
    }

    pub fn from_code(code: u8) -> Self {
        let known = Self::KNOWN.into_iter().find(|known| known.code() == code);
        known.unwrap_or(Self::Other(code))
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Authentication => "authentication failed",
            Self::ProtocolUnusable => "authentication protocol not usable",
            Self::ConcatenationMismatch => "secure channel concatenation mismatch",
            Self::HashUnusable => "hash function not usable",
            Self::GroupUnusable => "Diffie-Hellman group not usable",
            Self::IncorrectPayload => "incorrect payload",
            Self::IncorrectMessage => "incorrect message",
            Self::Other(code) => return write!(f, "reason {code:#04x}"),
        })
    }
}

/// The error of bytes that are no valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error("{got} bytes are too short for {message}, which needs {needed}")]
    Short {
        message: &'static str,
        got: usize,
        needed: usize,
    },
    #[error("message type {auth_type:#04x} with identifier {auth_id:#04x} is unknown")]
    Unknown { auth_type: u8, auth_id: u8 },
    #[error("{message}: {field} is {value}")]
    Field {
        message: &'static str,
        field: &'static str,
        value: u32,
    },
}

impl<'a> Message<'a> {
    /// Parses the message at the start of `bytes`, and ignores the bytes after it.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, MessageError> {
        let header = part("a message", bytes, 0, HEADER)?;
        let transaction = u16::from_le_bytes([header[4], header[5]]);
        let body = match (header[0], header[1]) {
            id::NEGOTIATE => Body::Negotiate(negotiate(bytes)?),
            id::CHALLENGE => Body::Challenge(challenge(bytes)?),
            id::REPLY => Body::Reply(reply(bytes)?),
            id::SUCCESS1 => success1(bytes)?,
            id::SUCCESS2 => {
                part("Success2", bytes, 0, FIXED)?;
                Body::Success2
            }
            id::FAILURE2 => Body::Failure2(failure("Failure2", bytes)?),
            id::FAILURE1 => Body::Failure1(failure("Failure1", bytes)?),
            (auth_type, auth_id) => return Err(MessageError::Unknown { auth_type, auth_id }),
        };
        Ok(Message { transaction, body })
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let id = self.body.id();
        let mut bytes = vec![id.0, id.1, 0, 0];
        bytes.extend(self.transaction.to_le_bytes());
        match &self.body {
            Body::Negotiate(negotiate) => {
                // Without an offer: one descriptor, of a protocol that does not exist.
                bytes.extend([negotiate.secure_channel, 1]);
                let mut descriptor = [0; DESCRIPTOR];
                if let Some((hashes, groups)) = negotiate.offer {
                    descriptor[0] = DHCHAP;
                    descriptor[2] = hashes.len() as u8;
                    descriptor[3] = groups.len() as u8;
                    descriptor[HASHES_AT..][..hashes.len()].copy_from_slice(hashes);
                    descriptor[GROUPS_AT..][..groups.len()].copy_from_slice(groups);
                }
                bytes.extend(descriptor);
            }
            Body::Challenge(challenge) => {
                let public_bytes = (challenge.public.len() as u16).to_le_bytes();
                bytes.extend([challenge.challenge.len() as u8, 0]);
                bytes.extend([challenge.hash, challenge.group]);
                bytes.extend(public_bytes);
                bytes.extend(challenge.number.to_le_bytes());
                bytes.extend(challenge.challenge);
                bytes.extend(challenge.public);
            }
            Body::Reply(reply) => {
                let hash_bytes = reply.response.len();
                let public_bytes = (reply.public.len() as u16).to_le_bytes();
                let (challenge, number) = reply.challenge.unwrap_or((&[], 0));
                bytes.extend([hash_bytes as u8, 0, u8::from(reply.challenge.is_some()), 0]);
                bytes.extend(public_bytes);
                bytes.extend(number.to_le_bytes());
                bytes.extend(reply.response);
                // C2 is there even where it does not count.
                bytes.extend(challenge);
                bytes.resize(FIXED + 2 * hash_bytes, 0);
                bytes.extend(reply.public);
            }
            // Linux refuses a Success1 without HL, even if there is no R2.
            Body::Success1 {
                hash_bytes,
                response,
            } => {
                bytes.extend([*hash_bytes, 0, u8::from(response.is_some())]);
                bytes.resize(FIXED, 0);
                bytes.extend(response.unwrap_or(&[]));
                bytes.resize(FIXED + usize::from(*hash_bytes), 0);
            }
            Body::Success2 => bytes.resize(FIXED, 0),
            Body::Failure1(failed) | Body::Failure2(failed) => {
                bytes.extend([REASON, failed.code()]);
            }
        }
        bytes
    }
}

impl Body<'_> {
    fn id(&self) -> (u8, u8) {
        match self {
            Body::Negotiate(_) => id::NEGOTIATE,
            Body::Challenge(_) => id::CHALLENGE,
            Body::Reply(_) => id::REPLY,
            Body::Success1 { .. } => id::SUCCESS1,
            Body::Success2 => id::SUCCESS2,
            Body::Failure1(_) => id::FAILURE1,
            Body::Failure2(_) => id::FAILURE2,
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Body::Negotiate(_) => "Negotiate",
            Body::Challenge(_) => "Challenge",
            Body::Reply(_) => "Reply",
            Body::Success1 { .. } => "Success1",
            Body::Success2 => "Success2",
            Body::Failure1(_) => "Failure1",
            Body::Failure2(_) => "Failure2",
        }
    }
}

fn negotiate(bytes: &[u8]) -> Result<Negotiate<'_>, MessageError> {
    const NAME: &str = "Negotiate";
    let fixed = part(NAME, bytes, 0, 8)?;
    let (secure_channel, count) = (fixed[6], usize::from(fixed[7]));
    if count == 0 {
        return Err(field(NAME, "the number of protocols", 0));
    }
    let descriptors = part(NAME, bytes, 8, count * DESCRIPTOR)?;
    let mut offer = None;
    for descriptor in descriptors.chunks_exact(DESCRIPTOR) {
        if descriptor[0] != DHCHAP || offer.is_some() {
            continue;
        }
        let lengths = [
            ("the number of hash functions", descriptor[2]),
            ("the number of groups", descriptor[3]),
        ];
        for (name, length) in lengths {
            if !(1..=LIST).contains(&usize::from(length)) {
                return Err(field(NAME, name, length.into()));
            }
        }
        let (hashes, groups) = (usize::from(descriptor[2]), usize::from(descriptor[3]));
        let hashes = &descriptor[HASHES_AT..][..hashes];
        offer = Some((hashes, &descriptor[GROUPS_AT..][..groups]));
    }
    Ok(Negotiate {
        secure_channel,
        offer,
    })
}

fn challenge(bytes: &[u8]) -> Result<Challenge<'_>, MessageError> {
    const NAME: &str = "Challenge";
    let fixed = part(NAME, bytes, 0, FIXED)?;
    let hash_bytes = hash_bytes(NAME, fixed[6])?;
    let public_bytes = usize::from(u16::from_le_bytes([fixed[10], fixed[11]]));
    let number = number_at(fixed);
    if number == 0 {
        return Err(field(NAME, "the sequence number", 0));
    }
    let rest = part(NAME, bytes, FIXED, hash_bytes + public_bytes)?;
    let (challenge, public) = rest.split_at(hash_bytes);
    Ok(Challenge {
        hash: fixed[8],
        group: fixed[9],
        number,
        challenge,
        public,
    })
}

fn reply(bytes: &[u8]) -> Result<Reply<'_>, MessageError> {
    const NAME: &str = "Reply";
    let fixed = part(NAME, bytes, 0, FIXED)?;
    let hash_bytes = hash_bytes(NAME, fixed[6])?;
    let public_bytes = usize::from(u16::from_le_bytes([fixed[10], fixed[11]]));
    let rest = part(NAME, bytes, FIXED, 2 * hash_bytes + public_bytes)?;
    let (response, rest) = rest.split_at(hash_bytes);
    let (challenge, public) = rest.split_at(hash_bytes);
    let challenge = match (fixed[8], number_at(fixed)) {
        // Linux hosts send a sequence number here, too.
        (0, _) => None,
        (1, number) => Some((challenge, number)),
        (valid, _) => return Err(field(NAME, "CVALID", valid.into())),
    };
    Ok(Reply {
        response,
        challenge,
        public,
    })
}

fn success1(bytes: &[u8]) -> Result<Body<'_>, MessageError> {
    const NAME: &str = "Success1";
    let fixed = part(NAME, bytes, 0, FIXED)?;
    let hash_bytes = fixed[6];
    let response = match fixed[8] {
        0 => None,
        1 => Some(part(
            NAME,
            bytes,
            FIXED,
            self::hash_bytes(NAME, hash_bytes)?,
        )?),
        valid => return Err(field(NAME, "RVALID", valid.into())),
    };
    Ok(Body::Success1 {
        hash_bytes,
        response,
    })
}

fn failure(name: &'static str, bytes: &[u8]) -> Result<Failed, MessageError> {
    let fixed = part(name, bytes, 0, FAILURE_BYTES)?;
    Ok(Failed::from_code(fixed[7]))
}

fn hash_bytes(message: &'static str, bytes: u8) -> Result<usize, MessageError> {
    match bytes {
        32 | 48 | 64 => Ok(usize::from(bytes)),
        other => Err(field(message, "the length of the hash", other.into())),
    }
}

fn number_at(fixed: &[u8]) -> u32 {
    u32::from_le_bytes([fixed[12], fixed[13], fixed[14], fixed[15]])
}

fn part<'a>(
    message: &'static str,
    bytes: &'a [u8],
    from: usize,
    len: usize,
) -> Result<&'a [u8], MessageError> {
    let needed = from + len;
    bytes.get(from..needed).ok_or(MessageError::Short {
        message,
        got: bytes.len(),
        needed,
    })
}

fn field(message: &'static str, field: &'static str, value: u32) -> MessageError {
    MessageError::Field {
        message,
        field,
        value,
    }
}

#[cfg(test)]
mod tests;

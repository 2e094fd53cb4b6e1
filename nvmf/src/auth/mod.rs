//! In-band authentication with DH-HMAC-CHAP, without I/O: both ends of a transaction (Base 8.3.4;
//! TP8006).
//!
//! ```text
//!   host                                  controller
//!   HostEnd ───── Negotiate ────────────▶ ControllerEnd
//!           ◀──── Challenge ─────────────              C1, S1, the group's public value
//!           ───── Reply ────────────────▶              R1; C2 if the host asks for R2 or a PSK
//!           ◀──── Success1 ──────────────              R2 if the host asked
//!           ───── Success2 ─────────────▶              only if the host asked
//! ```
//!
//! Either end may give up: the controller with Failure1 in place of a message, the host with
//! Failure2. The host sends its messages with Authentication Send and fetches those of the
//! controller with Authentication Receive.
//!
//! ```text
//!   message   bytes <-> a typed message              secret   the text `DHHC-1:..` and its key
//!   response  R1 and R2                              group    Diffie-Hellman in the FFDHE groups
//!   text      the form that the texts of all secrets have
//!   job       slow work: keys are read, powers are computed; the caller runs it on a helper thread
//!   controller, host   the state machines
//! ```
//!
//! Nothing here has a thread or a clock. The primitives come from `sha2`, `hmac` and
//! `crypto-bigint`. Secrets and values derived from them are zeroed when they are dropped, and
//! `Debug` does not show them.

mod controller;
pub mod fuzzing;
mod group;
mod hash;
mod host;
mod job;
pub mod message;
mod offer;
mod response;
mod secret;
#[cfg(test)]
mod tests;
pub(crate) mod text;

pub use controller::{ControllerEnd, Received};
pub use group::Group;
pub use hash::{Digest, Hash};
pub use host::{HostEnd, TransactionStep};
pub use job::{Answer, FixedKeys, Job, KeyError, KeySource, Keys};
pub use message::Failed;
pub use offer::{Offer, UnknownName};
pub use response::Names;
pub use secret::Secret;
pub use text::SecretError;

use std::fmt;

/// A source of random bytes.
pub trait Random: Send {
    /// Fills `bytes` with random bytes.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandom>;
}

/// The source of random bytes failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system's random generator failed")]
pub struct NoRandom;

/// The random generator of the system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandom> {
        getrandom::fill(bytes).map_err(|_| NoRandom)
    }
}

/// A random sequence number (S1, S2) other than zero, which has a meaning of its own.
fn sequence_number(random: &mut dyn Random) -> Result<u32, NoRandom> {
    loop {
        let mut bytes = [0; 4];
        random.fill(&mut bytes)?;
        match u32::from_le_bytes(bytes) {
            0 => continue,
            number => return Ok(number),
        }
    }
}

/// Secure channel concatenation: a transaction whose result includes a PSK for TLS (SC_C of
/// Negotiate; Base 8.3.4, TP8018).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Concatenation {
    #[default]
    None,
    /// A PSK for later connections; on an admin queue in clear.
    New,
    /// A PSK in place of that of the connection; on an admin queue over TLS.
    Replace,
}

impl Concatenation {
    pub const fn code(self) -> u8 {
        match self {
            Self::None => 0,
            Self::New => 2,
            Self::Replace => 3,
        }
    }

    /// The hash functions and groups with which a PSK can be made: TLS has no suite for SHA-512,
    /// and the null group makes no secret.
    pub(crate) fn usable(self, offer: &Offer) -> Offer {
        let mut usable = offer.clone();
        if self != Self::None {
            usable.hashes.retain(|hash| *hash != Hash::Sha512);
            usable.groups.retain(|group| *group != Group::Null);
        }
        usable
    }
}

/// The secure channel concatenation that a controller supports on a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChannelPolicy {
    /// The value of SC_C that the queue can serve.
    pub possible: Concatenation,
    /// The host must request it.
    pub required: bool,
}

/// The agreed parameters of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    pub hash: Hash,
    pub group: Group,
    /// Bidirectional: the controller proves to the host that it has its key, too.
    pub mutual: bool,
}

/// The state of a transaction, with SPDK's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    Negotiate,
    Challenge,
    Reply,
    Success1,
    Success2,
    Failure1,
    Completed,
    Error,
}

impl Progress {
    pub const ALL: [Self; 8] = [
        Self::Negotiate,
        Self::Challenge,
        Self::Reply,
        Self::Success1,
        Self::Success2,
        Self::Failure1,
        Self::Completed,
        Self::Error,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Negotiate => "negotiate",
            Self::Challenge => "challenge",
            Self::Reply => "reply",
            Self::Success1 => "success1",
            Self::Success2 => "success2",
            Self::Failure1 => "failure1",
            Self::Completed => "completed",
            Self::Error => "error",
        }
    }
}

/// The reason why a transaction failed, for logs and events. It contains no secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    #[error("the response does not match: the two ends have different keys")]
    WrongResponse,
    #[error(
        "the controller's response does not match: the two ends have different controller keys"
    )]
    WrongControllerResponse,
    #[error("this end has no key for the other")]
    NoKey,
    #[error("the host asks for the controller's proof, and the controller has no key for that")]
    NoControllerKey,
    #[error("the controller did not prove itself, and this host requires that")]
    NoControllerProof,
    #[error("the key cannot be read: {0}")]
    Key(#[from] KeyError),
    #[error("no hash function of the host is allowed here")]
    Hash,
    #[error("no Diffie-Hellman group of the host is allowed here")]
    Group,
    #[error("the controller chose hash function {id:#04x}, which this host did not offer")]
    HashNotOffered { id: u8 },
    #[error("the controller chose Diffie-Hellman group {id:#04x}, which this host did not offer")]
    GroupNotOffered { id: u8 },
    #[error("the host does not offer DH-HMAC-CHAP")]
    Protocol,
    #[error(
        "the host asks for secure channel concatenation {asked} on a queue that has none of it: 2 needs an admin queue in clear on a TCP listener with tls = \"allow\", and 3 an admin queue over TLS"
    )]
    SecureChannel { asked: u8 },
    #[error(
        "the host does not ask for secure channel concatenation, which its entry requires (nvme connect --concat)"
    )]
    SecureChannelRequired,
    #[error(
        "both ends have only the null group in common, and secure channel concatenation needs another Diffie-Hellman group"
    )]
    SecureChannelGroup,
    #[error("malformed message: {0}")]
    Malformed(#[from] message::MessageError),
    #[error("{got} arrived where {expected} was expected")]
    Unexpected {
        got: &'static str,
        expected: &'static str,
    },
    #[error("the other end's public value is not in its group")]
    PublicValue,
    #[error("the host returned the controller's own challenge")]
    Reflected,
    #[error("the other end gave up: {0}")]
    GivenUp(Failed),
    #[error("no message within {0:?}")]
    TimedOut(std::time::Duration),
    #[error(transparent)]
    NoRandom(#[from] NoRandom),
    #[error("too many computations wait: the helper thread is overloaded")]
    Overloaded,
}

impl Reason {
    /// The reason code explanation (RCE) for the other end.
    pub fn failed(&self) -> Failed {
        match self {
            Self::Hash | Self::HashNotOffered { .. } => Failed::HashUnusable,
            Self::Group | Self::GroupNotOffered { .. } | Self::PublicValue => Failed::GroupUnusable,
            Self::Protocol => Failed::ProtocolUnusable,
            Self::SecureChannel { .. } | Self::SecureChannelRequired | Self::SecureChannelGroup => {
                Failed::ConcatenationMismatch
            }
            Self::Malformed(_) => Failed::IncorrectPayload,
            Self::Unexpected { .. } => Failed::IncorrectMessage,
            _ => Failed::Authentication,
        }
    }

    /// The group of reasons for metrics.
    pub const fn kind(&self) -> ReasonKind {
        match self {
            Self::WrongResponse | Self::WrongControllerResponse | Self::Reflected => {
                ReasonKind::WrongKey
            }
            Self::NoKey | Self::NoControllerKey | Self::NoControllerProof => ReasonKind::NoKey,
            Self::Key(KeyError::Expired { .. }) => ReasonKind::ExpiredKey,
            Self::Key(_) => ReasonKind::UnreadableKey,
            Self::Hash
            | Self::Group
            | Self::HashNotOffered { .. }
            | Self::GroupNotOffered { .. }
            | Self::Protocol => ReasonKind::Unusable,
            Self::SecureChannel { .. } | Self::SecureChannelRequired | Self::SecureChannelGroup => {
                ReasonKind::Concatenation
            }
            Self::Malformed(_) | Self::Unexpected { .. } | Self::PublicValue => {
                ReasonKind::Malformed
            }
            Self::GivenUp(_) => ReasonKind::GivenUp,
            Self::TimedOut(_) => ReasonKind::Late,
            Self::NoRandom(_) | Self::Overloaded => ReasonKind::Overloaded,
        }
    }

    /// True for the failures that a guess of a key causes: a wrong response, the controller's own
    /// challenge returned, or a host without a key.
    pub fn is_guess(&self) -> bool {
        matches!(self, Self::WrongResponse | Self::NoKey | Self::Reflected)
    }
}

/// The groups of [`Reason`] for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasonKind {
    WrongKey,
    NoKey,
    ExpiredKey,
    UnreadableKey,
    /// No common protocol, hash function or group.
    Unusable,
    Concatenation,
    Malformed,
    /// The other end gave up.
    GivenUp,
    Late,
    /// This end has no capacity, or no random numbers.
    Overloaded,
}

impl ReasonKind {
    pub const ALL: [Self; 10] = [
        Self::WrongKey,
        Self::NoKey,
        Self::ExpiredKey,
        Self::UnreadableKey,
        Self::Unusable,
        Self::Concatenation,
        Self::Malformed,
        Self::GivenUp,
        Self::Late,
        Self::Overloaded,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::WrongKey => "wrong_key",
            Self::NoKey => "no_key",
            Self::ExpiredKey => "expired_key",
            Self::UnreadableKey => "unreadable_key",
            Self::Unusable => "unusable",
            Self::Concatenation => "concatenation",
            Self::Malformed => "malformed",
            Self::GivenUp => "given_up",
            Self::Late => "late",
            Self::Overloaded => "overloaded",
        }
    }
}

/// Shows the length of secret bytes, and nothing of them.
fn hidden(f: &mut fmt::Formatter<'_>, name: &str, bytes: usize) -> fmt::Result {
    write!(f, "{name}({bytes} bytes)")
}

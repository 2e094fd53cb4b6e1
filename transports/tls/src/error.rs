//! The errors of a TLS handshake or connection.

use nacre_nvmf::tls::{Alert, HelloError, Refused};

/// The reason for the end of a TLS connection, other than an orderly close (close_notify) by the
/// peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("TLS: {0}")]
    Hello(#[from] HelloError),
    #[error("TLS: {0}")]
    Refused(#[from] Refused),
    #[error("TLS: the peer ended the handshake or connection with the alert {0}")]
    Alert(Alert),
    #[error("TLS: a record of {bytes} bytes where at most {most} are possible")]
    Long { bytes: usize, most: usize },
    #[error("TLS: a record of type {kind} where type {expected} is expected")]
    Type { kind: u8, expected: u8 },
    #[error("TLS: a record cannot be opened: it was changed on its way, or the keys differ")]
    Forged,
    #[error("TLS: malformed {0}")]
    Malformed(&'static str),
    #[error("TLS: {0} where the connection cannot take it")]
    Unexpected(&'static str),
    #[error("TLS: more than {0} messages without data")]
    Flood(u32),
    #[error("TLS: the handshake is longer than {0} bytes")]
    LongHandshake(usize),
    #[error("TLS: the handshake ended with {0}, which is not of the key")]
    Suite(String),
    #[error("TLS: the handshake ended with the PSK of another identity")]
    Identity,
    #[error(
        "TLS: the peer has sealed {0} records with one key, more than AES-GCM allows, and sent no KeyUpdate"
    )]
    KeyLimit(u64),
    #[error("TLS: the handshake failed: {0}")]
    Library(String),
    #[error("TLS: the random generator or the cipher failed")]
    Crypto,
}

impl Failure {
    /// The alert to send to the peer. `None`: the peer has sent an alert itself.
    pub fn alert(&self) -> Option<Alert> {
        Some(match self {
            Self::Hello(error) => error.alert(),
            Self::Refused(refused) => refused.alert(),
            Self::Alert(_) => return None,
            Self::Long { .. } => Alert::RECORD_OVERFLOW,
            Self::Type { .. } | Self::Unexpected(_) | Self::Flood(_) | Self::KeyLimit(_) => {
                Alert::UNEXPECTED_MESSAGE
            }
            Self::Identity => Alert::ILLEGAL_PARAMETER,
            Self::Forged => Alert::BAD_RECORD_MAC,
            Self::Malformed(_) => Alert::DECODE_ERROR,
            Self::LongHandshake(_) | Self::Suite(_) | Self::Library(_) => Alert::HANDSHAKE_FAILURE,
            Self::Crypto => Alert::INTERNAL_ERROR,
        })
    }
}

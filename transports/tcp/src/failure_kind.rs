//! The kinds of failed TLS handshakes.

/// The kinds of failed handshakes. Metrics count each, and logs and events report each at most once
/// a minute per address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// The identity has no PSK.
    Unknown,
    Binder,
    /// The PSK of the identity cannot be read.
    Unreadable,
    /// Any other refusal of the ClientHello.
    Refused,
    /// The host sent an alert.
    Alert,
    Malformed,
    Late,
    /// The connection is in clear.
    Clear,
    /// The host closed the connection during its handshake.
    Left,
    /// The socket failed.
    Broken,
}

impl FailureKind {
    pub(crate) const ALL: [Self; 10] = [
        Self::Unknown,
        Self::Binder,
        Self::Unreadable,
        Self::Refused,
        Self::Alert,
        Self::Malformed,
        Self::Late,
        Self::Clear,
        Self::Left,
        Self::Broken,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Binder => "binder",
            Self::Unreadable => "unreadable",
            Self::Refused => "refused",
            Self::Alert => "alert",
            Self::Malformed => "malformed",
            Self::Late => "late",
            Self::Clear => "clear",
            Self::Left => "left",
            Self::Broken => "broken",
        }
    }
}

//! TLS alerts and their names (RFC 8446, 6).

use std::fmt;

/// The description code of an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Alert(pub u8);

impl Alert {
    pub const CLOSE_NOTIFY: Self = Self(0);
    pub const UNEXPECTED_MESSAGE: Self = Self(10);
    pub const BAD_RECORD_MAC: Self = Self(20);
    pub const RECORD_OVERFLOW: Self = Self(22);
    pub const HANDSHAKE_FAILURE: Self = Self(40);
    pub const ILLEGAL_PARAMETER: Self = Self(47);
    pub const DECODE_ERROR: Self = Self(50);
    pub const DECRYPT_ERROR: Self = Self(51);
    pub const PROTOCOL_VERSION: Self = Self(70);
    pub const INTERNAL_ERROR: Self = Self(80);
    pub const USER_CANCELED: Self = Self(90);
    pub const MISSING_EXTENSION: Self = Self(109);
    pub const UNKNOWN_PSK_IDENTITY: Self = Self(115);

    /// The name in RFC 8446; `None`: this code has none there.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            0 => "close_notify",
            10 => "unexpected_message",
            20 => "bad_record_mac",
            22 => "record_overflow",
            40 => "handshake_failure",
            42 => "bad_certificate",
            43 => "unsupported_certificate",
            44 => "certificate_revoked",
            45 => "certificate_expired",
            46 => "certificate_unknown",
            47 => "illegal_parameter",
            48 => "unknown_ca",
            49 => "access_denied",
            50 => "decode_error",
            51 => "decrypt_error",
            70 => "protocol_version",
            71 => "insufficient_security",
            80 => "internal_error",
            86 => "inappropriate_fallback",
            90 => "user_canceled",
            109 => "missing_extension",
            110 => "unsupported_extension",
            112 => "unrecognized_name",
            113 => "bad_certificate_status_response",
            115 => "unknown_psk_identity",
            116 => "certificate_required",
            120 => "no_application_protocol",
            _ => return None,
        })
    }

    /// True for the alerts that end a connection without an error (RFC 8446, 6.1).
    pub const fn is_closure(self) -> bool {
        matches!(self, Self::CLOSE_NOTIFY | Self::USER_CANCELED)
    }
}

impl fmt::Display for Alert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "alert {}", self.0),
        }
    }
}

//! The text of a key of either kind of NVMe, and other secrets of one line.

use nacre_nvmf::auth::{Hash, Secret, SecretError};
use nacre_nvmf::subsystems::SecretKind;
use nacre_nvmf::tls::Psk;
use zeroize::Zeroizing;

/// A key of either kind of NVMe.
pub enum KeyText {
    /// For DH-HMAC-CHAP.
    Dhchap(Secret),
    /// For TLS.
    Tls(Psk),
}

impl KeyText {
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        match Psk::parse(text) {
            Err(SecretError::Prefix(_)) => Secret::parse(text).map(KeyText::Dhchap),
            psk => psk.map(KeyText::Tls),
        }
    }

    /// The secret itself.
    pub fn to_text(&self) -> Zeroizing<String> {
        match self {
            Self::Dhchap(secret) => secret.to_text(),
            Self::Tls(psk) => psk.to_text(),
        }
    }

    /// The name of the hash that ties the key to its owner, or `none`.
    pub fn hash(&self) -> &'static str {
        let transform = match self {
            Self::Dhchap(secret) => secret.transform(),
            Self::Tls(psk) => psk.transform(),
        };
        transform.map_or("none", Hash::name)
    }

    pub fn fingerprint(&self) -> String {
        match self {
            Self::Dhchap(secret) => secret.fingerprint(),
            Self::Tls(psk) => psk.fingerprint(),
        }
    }

    pub fn kind(&self) -> SecretKind {
        match self {
            Self::Dhchap(_) => SecretKind::Keys,
            Self::Tls(_) => SecretKind::Psk,
        }
    }
}

/// The name of a kind, in calls and answers.
pub fn kind_name(kind: SecretKind) -> &'static str {
    match kind {
        SecretKind::Keys => "dhchap",
        SecretKind::Psk => "tls",
    }
}

/// The name of the kind of a key that is any line of text.
pub const TEXT: &str = "text";

/// Longest such text in bytes: URLs with a secret can be long.
pub const LONGEST_LINE: usize = 4096;

/// The one line of a text, without its end.
pub fn line(text: &str) -> Result<Zeroizing<String>, String> {
    let line = text.trim_matches(['\r', '\n']);
    if line.is_empty() || line.contains(char::is_control) {
        return Err("one line of text is needed".into());
    }
    if line.len() > LONGEST_LINE {
        return Err(format!("it has more than {LONGEST_LINE} bytes"));
    }
    Ok(Zeroizing::new(line.to_owned()))
}

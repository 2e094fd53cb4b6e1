//! The text forms of keys: the two of NVMe, and other secrets of one line.

use nacre_nvmf::auth::{Hash, Secret, SecretError};
use nacre_nvmf::subsystems::SecretKind;
use nacre_nvmf::tls::Psk;
use zeroize::Zeroizing;

/// A parsed key in one of NVMe's two text forms.
pub enum KeyText {
    /// For DH-HMAC-CHAP: `DHHC-1:`.
    Dhchap(Secret),
    /// For TLS-PSK: `NVMeTLSkey-1:`.
    Tls(Psk),
}

impl KeyText {
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        match Psk::parse(text) {
            Err(SecretError::Prefix(_)) => Secret::parse(text).map(KeyText::Dhchap),
            psk => psk.map(KeyText::Tls),
        }
    }

    /// The text form, which contains the secret.
    pub fn to_text(&self) -> Zeroizing<String> {
        match self {
            Self::Dhchap(secret) => secret.to_text(),
            Self::Tls(psk) => psk.to_text(),
        }
    }

    /// The hash function in the text form, or `none`.
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

/// The name of a key's kind in calls and replies.
pub fn kind_name(kind: SecretKind) -> &'static str {
    match kind {
        SecretKind::Keys => "dhchap",
        SecretKind::Psk => "tls",
    }
}

/// The name of the third kind: any line of text.
pub const TEXT: &str = "text";

/// Most bytes of a line of text. URLs that contain a secret can be long.
pub const LONGEST_LINE: usize = 4096;

/// Checks that the text is one line of at most [`LONGEST_LINE`] bytes; returns it without the line
/// end.
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

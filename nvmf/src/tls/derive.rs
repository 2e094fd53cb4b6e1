//! Derives the key of a handshake from a configured or generated PSK, and the binder that proves
//! it. A generated PSK replaces the retained one (TP8018).
//!
//! ```text
//!   retained = Expand-Label(Extract(0, configured), "HostNQN", NQNh)    HH 00: the configured PSK
//!   D        = Base64(HMAC(retained, NQNh " " NQNc " " "NVMe-over-Fabrics"))
//!   TLS PSK  = Expand-Label(Extract(0, retained), "nvme-tls-psk", context)
//!   context  = the identity (version 0), or "0h D" (version 1)
//! ```
//!
//! NVMe/TCP transport 3.6.1.3; Extract and Expand-Label are those of RFC 8446, 7.1.

use base64ct::{Base64, Encoding};
use nacre_nvmf_wire::Nqn;

use super::identity::{Identity, Version};
use super::psk::Psk;
use crate::auth::{Digest, Hash};

/// The method by which an end derives the key of a handshake from a configured PSK.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Derivation {
    /// The method of the specification.
    Standard,
    /// The method of libnvme 1.4 to 1.15: Expand-Label without the lengths of label and context,
    /// and with the length of the key in little endian.
    Libnvme,
    /// The method of libnvme 1.8 and 1.9 for version 1: as [`Derivation::Libnvme`], with the whole
    /// identity as context.
    Libnvme18,
}

impl Derivation {
    pub const ALL: [Self; 3] = [Self::Standard, Self::Libnvme, Self::Libnvme18];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Libnvme => "libnvme",
            Self::Libnvme18 => "libnvme-1.8",
        }
    }

    fn expand(self, hash: Hash, secret: &[u8], label: &[u8], context: &[u8]) -> Digest {
        match self {
            Self::Standard => expand_label(hash, secret, label, context, hash.bytes()),
            Self::Libnvme | Self::Libnvme18 => {
                let length = (hash.bytes() as u16).to_le_bytes();
                hash.hmac(secret, &[&length, b"tls13 ", label, context, &[1]])
            }
        }
    }
}

impl Psk {
    /// The retained PSK for a host.
    pub(super) fn retained(&self, host: &str, derivation: Derivation) -> Digest {
        match self.transform() {
            None => Digest::new(self.bytes()),
            Some(hash) => {
                let secret = extract(hash, self.bytes());
                derivation.expand(hash, &secret, b"HostNQN", host.as_bytes())
            }
        }
    }

    /// The identity of this PSK between a host and a subsystem.
    pub fn identity(
        &self,
        version: Version,
        host: &Nqn,
        subsystem: &Nqn,
        derivation: Derivation,
    ) -> Identity {
        let retained = self.retained(host.as_str(), derivation);
        let digest = match version {
            Version::Zero => None,
            Version::One => Some(digest_of(
                self.hash(),
                &retained,
                host.as_str(),
                subsystem.as_str(),
            )),
        };
        Identity {
            version,
            is_generated: self.is_generated(),
            hash: self.hash(),
            host: host.clone(),
            subsystem: subsystem.clone(),
            digest,
        }
    }

    /// The identity that a host offers: of version 0, which all targets know, unless the names are
    /// too long for it or the PSK is generated.
    pub fn offer(&self, host: &Nqn, subsystem: &Nqn) -> Identity {
        let derivation = Derivation::Standard;
        if self.is_generated() {
            return self.identity(Version::One, host, subsystem, derivation);
        }
        let short = self.identity(Version::Zero, host, subsystem, derivation);
        match self.tls_psk(&short, derivation) {
            Some(_) => short,
            None => self.identity(Version::One, host, subsystem, derivation),
        }
    }

    /// The key of a handshake with this identity. `None` if the identity is not of this PSK in
    /// this derivation.
    pub fn tls_psk(&self, identity: &Identity, derivation: Derivation) -> Option<Digest> {
        let hash = self.hash();
        let (host, subsystem) = (&identity.host, &identity.subsystem);
        let expected = self.identity(identity.version, host, subsystem, derivation);
        if expected != *identity {
            return None;
        }
        if self.is_generated()
            && (derivation, identity.version) != (Derivation::Standard, Version::One)
        {
            return None;
        }
        let context = match (&identity.digest, derivation) {
            (Some(digest), Derivation::Standard | Derivation::Libnvme) => {
                format!("{:02} {digest}", hash.id())
            }
            // Version 0 is the same in both.
            (None, Derivation::Libnvme18) => return None,
            _ => identity.to_string(),
        };
        // The length of a context is one byte: longer NQNs need version 1.
        let is_standard = derivation == Derivation::Standard;
        if is_standard && context.len() > usize::from(u8::MAX) {
            return None;
        }
        let secret = extract(hash, &self.retained(host.as_str(), derivation));
        Some(derivation.expand(hash, &secret, b"nvme-tls-psk", context.as_bytes()))
    }
}

pub(super) fn digest_of(hash: Hash, retained: &[u8], host: &str, subsystem: &str) -> String {
    let names = [host, " ", subsystem, " ", "NVMe-over-Fabrics"];
    Base64::encode_string(&hash.hmac(retained, &names.map(str::as_bytes)))
}

/// HKDF-Extract with a salt of zeros (RFC 5869, 2.2).
fn extract(hash: Hash, key: &[u8]) -> Digest {
    hash.hmac(&[0; 64][..hash.bytes()], &[key])
}

/// HKDF-Expand-Label to at most as many bytes as the hash has (RFC 8446, 7.1).
///
/// # Panics
/// If label or context are longer than their lengths of one byte allow, or `bytes` is more than
/// the hash has.
pub fn expand_label(
    hash: Hash,
    secret: &[u8],
    label: &[u8],
    context: &[u8],
    bytes: usize,
) -> Digest {
    let length = (bytes as u16).to_be_bytes();
    let byte = |n: usize| [u8::try_from(n).expect("a label of one byte's length")];
    let (of_label, of_context) = (byte(b"tls13 ".len() + label.len()), byte(context.len()));
    let info: [&[u8]; 7] = [
        &length,
        &of_label,
        b"tls13 ",
        label,
        &of_context,
        context,
        &[1],
    ];
    Digest::new(&hash.hmac(secret, &info)[..bytes])
}

/// The binder of an external PSK over a ClientHello without its binders (RFC 8446, 4.2.11.2).
pub fn binder(hash: Hash, psk: &[u8], truncated: &[u8]) -> Digest {
    let early = extract(hash, psk);
    let bytes = hash.bytes();
    let key = expand_label(hash, &early, b"ext binder", &hash.digest(b""), bytes);
    let finished = expand_label(hash, &key, b"finished", b"", bytes);
    hash.hmac(&finished, &[&hash.digest(truncated)])
}

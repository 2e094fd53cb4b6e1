//! The secret of a host or of a controller: `DHHC-1:HH:BASE64:` (TP8006, "Secret representation").
//!
//! BASE64 is the secret, of 32, 48 or 64 bytes, followed by its CRC-32. HH says how the secret
//! becomes the key. With 00, the key is the secret. With 01 to 03, the key is an HMAC (SHA-256,
//! SHA-384, SHA-512) over the NQN of the secret's owner. Both ends compute the same key, with the
//! same NQN.

use std::fmt;

use nacre_nvmf_wire::Nqn;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::hash::{Digest, Hash};
use super::text::{self, Form, SecretError};
use super::{NoRandom, Random};

const FORM: Form = Form {
    prefix: "DHHC-1:",
    hashes: "00 (none), 01 (SHA-256), 02 (SHA-384) or 03 (SHA-512)",
    lengths: (&[32, 48, 64], "32, 48 or 64"),
};

/// A secret, zeroed when it is dropped. `Debug` shows its fingerprint only.
#[derive(Clone)]
pub struct Secret {
    bytes: Zeroizing<Vec<u8>>,
    transform: Option<Hash>,
}

impl Secret {
    /// Most bytes of the text; the longest secret has 103: 11 characters around base64 of 68 bytes.
    pub const MAX_TEXT: usize = 128;

    /// Reads a secret. White space around it and a missing last colon are accepted.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let (hash, bytes) = FORM.read(text)?;
        let transform = match &hash[..] {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(FORM.bad_hash(hash)),
        };
        Ok(Self { bytes, transform })
    }

    /// Generates a secret of as many bytes as a digest of `transform` has; 32 without one.
    pub fn generate(transform: Option<Hash>, random: &mut dyn Random) -> Result<Self, NoRandom> {
        let len = transform.map_or(32, Hash::bytes);
        let mut bytes = Zeroizing::new(vec![0; len]);
        random.fill(&mut bytes)?;
        Ok(Self { bytes, transform })
    }

    /// The text form. It is the secret itself: write it only to a key file or to its owner.
    pub fn to_text(&self) -> Zeroizing<String> {
        FORM.write(self.transform, &self.bytes)
    }

    /// The hash function of the transformation, if there is one.
    pub fn transform(&self) -> Option<Hash> {
        self.transform
    }

    /// Eight hexadecimal digits that distinguish secrets without revealing them.
    pub fn fingerprint(&self) -> String {
        text::fingerprint(&self.to_text())
    }

    /// The key of the host or controller that owns the secret, from its NQN.
    pub(super) fn key(&self, owner: &Nqn) -> Digest {
        match self.transform {
            None => Digest::new(&self.bytes),
            Some(hash) => hash.hmac(
                &self.bytes,
                &[owner.as_str().as_bytes(), b"NVMe-over-Fabrics"],
            ),
        }
    }
}

/// Compares in constant time.
impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.transform == other.transform && bool::from(self.bytes.ct_eq(&other.bytes))
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({})", self.fingerprint())
    }
}

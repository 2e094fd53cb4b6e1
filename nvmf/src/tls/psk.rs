//! A configured PSK: `NVMeTLSkey-1:HH:BASE64:` (NVMe/TCP transport 3.6.1.2, "PSK interchange
//! format").
//!
//! HH says how the configured PSK becomes the retained one: 00 as it is, 01 and 02 with HKDF over
//! SHA-256 and SHA-384.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::auth::text::Form;
use crate::auth::{Hash, NoRandom, Random, SecretError};

pub(super) const FORM: Form = Form {
    prefix: "NVMeTLSkey-1:",
    hashes: "00 (none), 01 (SHA-256) or 02 (SHA-384)",
    lengths: (&[32, 48], "32 (SHA-256) or 48 (SHA-384)"),
};

/// A configured PSK: zeroed when it is dropped, shown by its fingerprint only.
#[derive(Clone)]
pub struct Psk {
    bytes: Zeroizing<Vec<u8>>,
    transform: Option<Hash>,
}

impl Psk {
    /// Reads a PSK. White space around it and a missing last colon are accepted.
    pub fn parse(text: &str) -> Result<Psk, SecretError> {
        let (hash, bytes) = FORM.read(text)?;
        let transform = match &hash[..] {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            _ => return Err(FORM.bad_hash(hash)),
        };
        if transform.is_some_and(|hash| bytes.len() != hash.bytes()) {
            return Err(FORM.bad_length(bytes.len()));
        }
        Ok(Psk { bytes, transform })
    }

    /// A new PSK for SHA-256: GnuTLS before 3.8.11, and so many hosts, cannot use SHA-384.
    pub fn generate(random: &mut dyn Random) -> Result<Psk, NoRandom> {
        let mut bytes = Zeroizing::new(vec![0; Hash::Sha256.bytes()]);
        random.fill(&mut bytes)?;
        let transform = Some(Hash::Sha256);
        Ok(Psk { bytes, transform })
    }

    /// The text form. It is the secret: it goes to a file or to the user who made it.
    pub fn to_text(&self) -> Zeroizing<String> {
        FORM.write(self.transform, &self.bytes)
    }

    /// The hash function of the identity and of the cipher suite.
    pub fn hash(&self) -> Hash {
        match self.bytes.len() {
            48 => Hash::Sha384,
            _ => Hash::Sha256,
        }
    }

    /// The hash of the transformation into the retained PSK, if there is one.
    pub fn transform(&self) -> Option<Hash> {
        self.transform
    }

    /// Eight hexadecimal digits that differ between PSKs and reveal none.
    pub fn fingerprint(&self) -> String {
        crate::auth::text::fingerprint(&self.to_text())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Compares in a time that does not depend on the contents.
impl PartialEq for Psk {
    fn eq(&self, other: &Psk) -> bool {
        self.transform == other.transform && bool::from(self.bytes.ct_eq(&other.bytes))
    }
}

impl Eq for Psk {}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk({})", self.fingerprint())
    }
}

//! Pre-shared keys of TLS. A configured PSK has the text `NVMeTLSkey-1:HH:BASE64:` (NVMe/TCP
//! transport 3.6.1.2, "PSK interchange format"). A generated one comes from authentication (TP8018)
//! and has no text.
//!
//! HH says how the configured PSK becomes the retained one: 00 as it is, 01 and 02 with HKDF over
//! SHA-256 and SHA-384.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::auth::text::Form;
use crate::auth::{Hash, KeyError, NoRandom, Random, SecretError};

pub(super) const FORM: Form = Form {
    prefix: "NVMeTLSkey-1:",
    hashes: "00 (none), 01 (SHA-256) or 02 (SHA-384)",
    lengths: (&[32, 48], "32 (SHA-256) or 48 (SHA-384)"),
};

/// A configured or generated PSK: zeroed when it is dropped, shown by its fingerprint only.
#[derive(Clone)]
pub struct Psk {
    bytes: Zeroizing<Vec<u8>>,
    transform: Option<Hash>,
    is_generated: bool,
}

impl Psk {
    /// Reads a PSK. White space around it and a missing last colon are accepted.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
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
        Ok(Self::configured(bytes, transform))
    }

    fn configured(bytes: Zeroizing<Vec<u8>>, transform: Option<Hash>) -> Self {
        Self {
            bytes,
            transform,
            is_generated: false,
        }
    }

    /// A PSK that authentication generated.
    pub fn generated(bytes: &[u8]) -> Self {
        Self {
            bytes: Zeroizing::new(bytes.to_vec()),
            transform: None,
            is_generated: true,
        }
    }

    /// True if authentication generated it.
    pub fn is_generated(&self) -> bool {
        self.is_generated
    }

    /// Generates a configured PSK for SHA-256. Hosts with GnuTLS before 3.8.11, which are common,
    /// cannot use SHA-384.
    pub fn generate(random: &mut dyn Random) -> Result<Self, NoRandom> {
        let mut bytes = Zeroizing::new(vec![0; Hash::Sha256.bytes()]);
        random.fill(&mut bytes)?;
        Ok(Self::configured(bytes, Some(Hash::Sha256)))
    }

    /// The text form. It is the secret itself: write it only to a key file or to its owner.
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

    /// The hash function of the transformation into the retained PSK, if there is one.
    pub fn transform(&self) -> Option<Hash> {
        self.transform
    }

    /// Eight hexadecimal digits that distinguish PSKs without revealing them.
    pub fn fingerprint(&self) -> String {
        crate::auth::text::fingerprint(&self.to_text())
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Compares in constant time.
impl PartialEq for Psk {
    fn eq(&self, other: &Self) -> bool {
        (self.transform, self.is_generated) == (other.transform, other.is_generated)
            && bool::from(self.bytes.ct_eq(&other.bytes))
    }
}

impl Eq for Psk {}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psk({})", self.fingerprint())
    }
}

/// The source of a host's PSK, such as a key file. It is read for each handshake, on a thread other
/// than the reactors.
pub trait PskKey: fmt::Debug + Send + Sync {
    fn psk(&self) -> Result<Psk, KeyError>;

    /// The name of the key, if keys have names.
    fn name(&self) -> Option<String> {
        None
    }
}

impl PskKey for Psk {
    fn psk(&self) -> Result<Psk, KeyError> {
        Ok(self.clone())
    }
}

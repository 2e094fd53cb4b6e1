//! The secret of a host or of a controller: `DHHC-1:HH:BASE64:` (TP8006, "Secret representation").
//!
//! BASE64 is the secret, of 32, 48 or 64 bytes, followed by its CRC-32. HH says how each end turns
//! the secret into its key: 00 as it is, 01 to 03 with an HMAC over the end's own NQN.

use std::fmt;

use base64ct::{Base64, Encoding};
use crc_fast::CrcAlgorithm;
use nacre_nvmf_wire::Nqn;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::hash::{Digest, Hash};
use super::{NoRandom, Random};

const PREFIX: &str = "DHHC-1:";
const CRC_BYTES: usize = 4;

/// A secret: zeroed when it is dropped, shown by its fingerprint only.
#[derive(Clone)]
pub struct Secret {
    bytes: Zeroizing<Vec<u8>>,
    transform: Option<Hash>,
}

/// Why a text is no secret. The text itself is not repeated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("the text does not begin with {PREFIX:?}")]
    Prefix,
    #[error("the text ends after its hash: `DHHC-1:HH:BASE64:` is expected")]
    Short,
    #[error("hash {0:?} is not 00 (none), 01 (SHA-256), 02 (SHA-384) or 03 (SHA-512)")]
    Hash(String),
    #[error("the part after the hash is not base64")]
    Base64,
    #[error("the secret has {0} bytes instead of 32, 48 or 64")]
    Length(usize),
    #[error("the checksum does not match: the text is damaged or incomplete")]
    Checksum,
    #[error("characters follow the last colon")]
    Trailing,
}

impl Secret {
    /// A longer text cannot be a secret: 11 characters around base64 of 68 bytes make 103.
    pub const MAX_TEXT: usize = 128;

    /// Reads a secret. White space around it and a missing last colon are accepted.
    pub fn parse(text: &str) -> Result<Secret, SecretError> {
        let rest = text
            .trim()
            .strip_prefix(PREFIX)
            .ok_or(SecretError::Prefix)?;
        let (hash, rest) = rest.split_once(':').ok_or(SecretError::Short)?;
        let transform = match hash {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            // A secret without its hash must not get into a message.
            other if other.len() > 2 => return Err(SecretError::Short),
            other => return Err(SecretError::Hash(other.to_owned())),
        };
        let encoded = match rest.split_once(':') {
            Some((encoded, "")) => encoded,
            Some(_) => return Err(SecretError::Trailing),
            None => rest,
        };
        let mut bytes =
            Zeroizing::new(Base64::decode_vec(encoded).map_err(|_| SecretError::Base64)?);
        let len = bytes.len().saturating_sub(CRC_BYTES);
        if !matches!(len, 32 | 48 | 64) {
            return Err(SecretError::Length(len));
        }
        if checksum(&bytes[..len]) != bytes[len..] {
            return Err(SecretError::Checksum);
        }
        bytes.truncate(len);
        Ok(Secret { bytes, transform })
    }

    /// A new secret of as many bytes as the hash has; 32 without one.
    pub fn generate(transform: Option<Hash>, random: &mut dyn Random) -> Result<Secret, NoRandom> {
        let len = transform.map_or(32, Hash::bytes);
        let mut bytes = Zeroizing::new(vec![0; len]);
        random.fill(&mut bytes)?;
        Ok(Secret { bytes, transform })
    }

    /// The text form. It is the secret: it goes to a file or to the user who made it.
    pub fn to_text(&self) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(self.bytes.to_vec());
        bytes.extend_from_slice(&checksum(&self.bytes));
        let encoded = Zeroizing::new(Base64::encode_string(&bytes));
        let hash = self.transform.map_or(0, Hash::id);
        Zeroizing::new(format!("{PREFIX}{hash:02}:{}:", *encoded))
    }

    /// The hash of the transformation, if there is one.
    pub fn transform(&self) -> Option<Hash> {
        self.transform
    }

    /// Eight hexadecimal digits that tell secrets apart and give nothing away.
    pub fn fingerprint(&self) -> String {
        let digest = Hash::Sha256.digest(self.to_text().as_bytes());
        digest[..4].iter().map(|b| format!("{b:02x}")).collect()
    }

    /// The key of the end that has this name.
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

fn checksum(bytes: &[u8]) -> [u8; CRC_BYTES] {
    let crc = crc_fast::checksum(CrcAlgorithm::Crc32IsoHdlc, bytes);
    (crc as u32).to_le_bytes()
}

/// Compares in a time that does not depend on the contents.
impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.transform == other.transform && bool::from(self.bytes.ct_eq(&other.bytes))
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({})", self.fingerprint())
    }
}

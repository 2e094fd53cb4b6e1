//! The text form of secrets: `PREFIX:HH:BASE64:`. BASE64 is the secret followed by its CRC-32
//! (little-endian). HH names the hash function that transforms the secret into the key in use; 00
//! means none. See [`Secret`](super::Secret) for DH-HMAC-CHAP (both ends use the NQN of the owner
//! of the secret), and [`Psk`](crate::tls::Psk) for TLS.

use base64ct::{Base64, Encoding};
use crc_fast::CrcAlgorithm;
use zeroize::Zeroizing;

use super::hash::Hash;

const CRC_BYTES: usize = 4;

/// The text form of one kind of secret: DH-HMAC-CHAP or TLS PSK.
pub(crate) struct Form {
    /// With its colon.
    pub prefix: &'static str,
    /// The possible values of HH, in words.
    pub hashes: &'static str,
    /// The possible lengths of the secret in bytes, and in words.
    pub lengths: (&'static [usize], &'static str),
}

/// The error of a text that is no secret. Of the text it repeats at most the hash HH.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("the text does not begin with {0:?}")]
    Prefix(&'static str),
    #[error("the text ends after its hash: `{0}HH:BASE64:` is expected")]
    Short(&'static str),
    #[error("hash {hash:?} is not {allowed}")]
    Hash { hash: String, allowed: &'static str },
    #[error("the part after the hash is not base64")]
    Base64,
    #[error("the secret has {bytes} bytes instead of {allowed}")]
    Length { bytes: usize, allowed: &'static str },
    #[error("the checksum does not match: the text is damaged or incomplete")]
    Checksum,
    #[error("characters follow the last colon")]
    Trailing,
}

impl Form {
    /// Reads HH and the secret. White space around the text and a missing last colon are accepted.
    /// The caller checks the value of HH.
    pub(crate) fn read(&self, text: &str) -> Result<(String, Zeroizing<Vec<u8>>), SecretError> {
        let rest = text
            .trim()
            .strip_prefix(self.prefix)
            .ok_or(SecretError::Prefix(self.prefix))?;
        let short = SecretError::Short(self.prefix);
        let (hash, rest) = match rest.split_once(':') {
            // A secret without its hash must not get into a message.
            Some((hash, rest)) if hash.len() <= 2 => (hash, rest),
            _ => return Err(short),
        };
        let encoded = match rest.split_once(':') {
            Some((encoded, "")) => encoded,
            Some(_) => return Err(SecretError::Trailing),
            None => rest,
        };
        let decoded = Base64::decode_vec(encoded).map_err(|_| SecretError::Base64)?;
        let mut bytes = Zeroizing::new(decoded);
        let len = bytes.len().saturating_sub(CRC_BYTES);
        if !self.lengths.0.contains(&len) {
            return Err(self.bad_length(len));
        }
        if checksum(&bytes[..len]) != bytes[len..] {
            return Err(SecretError::Checksum);
        }
        bytes.truncate(len);
        Ok((hash.to_owned(), bytes))
    }

    pub(crate) fn write(&self, hash: Option<Hash>, secret: &[u8]) -> Zeroizing<String> {
        let mut bytes = Zeroizing::new(Vec::with_capacity(secret.len() + CRC_BYTES));
        bytes.extend_from_slice(secret);
        bytes.extend_from_slice(&checksum(secret));
        let encoded = Zeroizing::new(Base64::encode_string(&bytes));
        let (prefix, hash) = (self.prefix, hash.map_or(0, Hash::id));
        Zeroizing::new(format!("{prefix}{hash:02}:{}:", *encoded))
    }

    pub(crate) fn bad_hash(&self, hash: String) -> SecretError {
        let allowed = self.hashes;
        SecretError::Hash { hash, allowed }
    }

    pub(crate) fn bad_length(&self, bytes: usize) -> SecretError {
        let allowed = self.lengths.1;
        SecretError::Length { bytes, allowed }
    }
}

/// Eight hexadecimal digits that distinguish secrets without revealing them.
pub(crate) fn fingerprint(text: &str) -> String {
    let digest = Hash::Sha256.digest(text.as_bytes());
    digest[..4].iter().map(|b| format!("{b:02x}")).collect()
}

fn checksum(bytes: &[u8]) -> [u8; CRC_BYTES] {
    let crc = crc_fast::checksum(CrcAlgorithm::Crc32IsoHdlc, bytes);
    (crc as u32).to_le_bytes()
}

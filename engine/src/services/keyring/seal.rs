//! Seals (encrypts) the text of a key with AES-256-GCM under a store key.
//!
//! ```text
//!   v1:ID:MADE:BASE64
//!      │  │    └ nonce, ciphertext and tag
//!      │  └ when the secret was made: Unix time in seconds
//!      │  └ when the secret was made: Unix time in seconds
//! ```
//!
//! The key's name and MADE are additional authenticated data: a sealed text does not open under
//! another name. Nonces are random; one store key seals far fewer than 2^32 texts.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::aead::{AES_256_GCM, Aad, NONCE_LEN, Nonce, RandomizedNonceKey};
use aws_lc_rs::digest::{SHA256, digest};
use base64ct::{Base64, Encoding};
use nacre_nvmf::auth::{Random, SystemRandom};
use zeroize::Zeroizing;

/// The name of the store key among the credentials of the service manager.
pub const CREDENTIAL: &str = "nacre-store-key";
/// The name of its file in the data directory, without a credential.
pub const FILE: &str = "store.key";

const VERSION: &str = "v1";
const KEY_BYTES: usize = 32;

/// The reason that a key cannot be sealed or opened.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    #[error(
        "there is no store key: neither the credential {CREDENTIAL} nor {FILE} in the data \
         directory; restore it"
    )]
    Missing,
    #[error(
        "there is no store key: the daemon has no data directory, and no credential {CREDENTIAL}"
    )]
    NoState,
    #[error("{}: {why}", path.display())]
    Unreadable { path: PathBuf, why: String },
    #[error("store key {sealed} is needed, and the daemon has {}", had.join(" and "))]
    OtherKey { sealed: String, had: Vec<String> },
    #[error("the sealed text is damaged, or of another key")]
    Damaged,
    #[error("the service manager gives the daemon no credentials")]
    NoCredentials,
    #[error(
        "all keys are sealed with the credential {CREDENTIAL}, and the daemon does not make \
         credentials"
    )]
    OnlyCredential,
    #[error("the system's random generator failed")]
    NoRandom,
}

/// The key that seals keys. Zeroed when it is dropped; its Debug text has only the ID.
pub struct StoreKey(Zeroizing<Vec<u8>>);

impl StoreKey {
    pub fn generate() -> Result<Self, SealError> {
        let mut bytes = Zeroizing::new(vec![0; KEY_BYTES]);
        let filled = SystemRandom.fill(&mut bytes);
        filled.map_err(|_| SealError::NoRandom)?;
        Ok(Self(bytes))
    }

    /// Parses 64 hexadecimal digits. `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.trim().as_bytes();
        if digits.len() != 2 * KEY_BYTES {
            return None;
        }
        let value = |digit: u8| char::from(digit).to_digit(16);
        let mut bytes = Zeroizing::new(vec![0; KEY_BYTES]);
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
            let (high, low) = value(pair[0]).zip(value(pair[1]))?;
            *byte = (high << 4 | low) as u8;
        }
        Some(Self(bytes))
    }

    /// The secret as 64 hexadecimal digits, for the file of the store key.
    pub fn to_text(&self) -> Zeroizing<String> {
        // No reallocation: that would leave a copy of the secret in freed memory.
        let mut text = Zeroizing::new(String::with_capacity(2 * KEY_BYTES));
        for byte in self.0.iter() {
            for digit in [byte >> 4, byte & 15] {
                text.push(char::from_digit(u32::from(digit), 16).expect("a digit"));
            }
        }
        text
    }

    /// Eight hexadecimal digits that identify the store key and do not reveal it.
    pub fn id(&self) -> String {
        let mut named = Zeroizing::new(Vec::with_capacity(64));
        named.extend_from_slice(b"nacre store key");
        named.extend_from_slice(&self.0);
        let digest = digest(&SHA256, &named);
        let first = digest.as_ref()[..4].iter();
        first.map(|byte| format!("{byte:02x}")).collect()
    }

    /// Seals the text of the key `name`, which was made at `made`.
    pub fn seal(&self, name: &str, text: &str, made: SystemTime) -> Result<String, SealError> {
        let made = made.duration_since(UNIX_EPOCH).unwrap_or_default();
        let made = made.as_secs();
        // Room for the tag, so that no reallocation leaves a copy behind.
        let room = text.len() + AES_256_GCM.tag_len();
        let mut bytes = Zeroizing::new(Vec::with_capacity(room));
        bytes.extend_from_slice(text.as_bytes());
        let nonce = self
            .cipher()?
            .seal_in_place_append_tag(Aad::from(context(name, made)), &mut *bytes)
            .map_err(|_| SealError::NoRandom)?;
        let mut sealed = nonce.as_ref().to_vec();
        sealed.extend_from_slice(&bytes);
        let (id, sealed) = (self.id(), Base64::encode_string(&sealed));
        Ok(format!("{VERSION}:{id}:{made}:{sealed}"))
    }

    /// Opens the sealed text of the key `name`.
    pub fn open(&self, name: &str, sealed: &Sealed) -> Result<Zeroizing<String>, SealError> {
        let bytes = Base64::decode_vec(sealed.text).map_err(|_| SealError::Damaged)?;
        let mut bytes = Zeroizing::new(bytes);
        let (nonce, rest) = bytes
            .split_first_chunk_mut::<NONCE_LEN>()
            .ok_or(SealError::Damaged)?;
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let opened = self
            .cipher()?
            .open_in_place(nonce, Aad::from(context(name, sealed.made)), rest)
            .map_err(|_| SealError::Damaged)?;
        let text = std::str::from_utf8(opened).map_err(|_| SealError::Damaged)?;
        Ok(Zeroizing::new(text.to_owned()))
    }

    fn cipher(&self) -> Result<RandomizedNonceKey, SealError> {
        RandomizedNonceKey::new(&AES_256_GCM, &self.0).map_err(|_| SealError::Damaged)
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreKey({})", self.id())
    }
}

/// The parts of a sealed text.
#[derive(Debug, Clone, Copy)]
pub struct Sealed<'a> {
    /// The ID of its store key.
    pub id: &'a str,
    made: u64,
    text: &'a str,
}

impl<'a> Sealed<'a> {
    pub fn parse(text: &'a str) -> Result<Self, SealError> {
        let mut parts = text.splitn(4, ':');
        let mut next = || parts.next().ok_or(SealError::Damaged);
        let (version, id, made, text) = (next()?, next()?, next()?, next()?);
        if version != VERSION {
            return Err(SealError::Damaged);
        }
        let made = made.parse().map_err(|_| SealError::Damaged)?;
        Ok(Sealed { id, made, text })
    }

    /// When the secret was made.
    pub fn made(&self) -> SystemTime {
        // A damaged number must not overflow.
        let made = UNIX_EPOCH.checked_add(Duration::from_secs(self.made));
        made.unwrap_or(UNIX_EPOCH)
    }
}

/// The additional authenticated data of a sealed key.
fn context(name: &str, made: u64) -> Vec<u8> {
    format!("nacre key {VERSION}\0{made}\0{name}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    /// Goal: a sealed text opens with its store key, under its name, and unchanged; it shows
    /// nothing. Method: each character of it is changed.
    #[test]
    fn seal_and_open() {
        let (key, other) = (StoreKey::generate().unwrap(), StoreKey::generate().unwrap());
        let made = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let sealed = key.seal("a", TEXT, made).unwrap();
        assert_ne!(sealed, key.seal("a", TEXT, made).unwrap(), "another nonce");
        assert!(!sealed.contains("AAECAwQF"));
        let open = |key: &StoreKey, name: &str, text: &str| {
            let sealed = Sealed::parse(text)?;
            key.open(name, &sealed).map(|text| text.to_string())
        };
        assert_eq!(open(&key, "a", &sealed), Ok(TEXT.to_owned()));
        assert_eq!(Sealed::parse(&sealed).unwrap().made(), made);
        assert_eq!(Sealed::parse(&sealed).unwrap().id, key.id());
        assert_eq!(open(&key, "b", &sealed), Err(SealError::Damaged));
        assert_eq!(open(&other, "a", &sealed), Err(SealError::Damaged));
        let id = VERSION.len() + 1..VERSION.len() + 9;
        for at in 0..sealed.len() {
            let mut bytes = sealed.clone().into_bytes();
            bytes[at] = if bytes[at] == b'1' { b'2' } else { b'1' };
            let changed = String::from_utf8(bytes).unwrap();
            // The ID only names the store key.
            let expected = if id.contains(&at) {
                Ok(TEXT.to_owned())
            } else {
                Err(SealError::Damaged)
            };
            assert_eq!(open(&key, "a", &changed), expected, "byte {at}");
        }
        for at in 0..sealed.len() {
            assert_eq!(open(&key, "a", &sealed[..at]), Err(SealError::Damaged));
        }
        for text in [
            "v1:0:99999999999999999999:AAAA",
            "v1:0:18446744073709551615:AAAA",
        ] {
            assert_eq!(open(&key, "a", text), Err(SealError::Damaged));
        }
        Sealed::parse("v1:0:18446744073709551615:AAAA")
            .unwrap()
            .made();
    }

    #[test]
    fn text_of_a_store_key() {
        let key = StoreKey::generate().unwrap();
        let text = key.to_text();
        assert_eq!(StoreKey::parse(&format!("{}\n", *text)).unwrap().0, key.0);
        assert_eq!(format!("{key:?}"), format!("StoreKey({})", key.id()));
        assert!(!text.contains(&key.id()));
        for wrong in [
            "",
            "5a",
            &"5g".repeat(32),
            &"5a".repeat(33),
            &"é".repeat(32),
        ] {
            assert!(StoreKey::parse(wrong).is_none(), "{wrong}");
        }
    }
}

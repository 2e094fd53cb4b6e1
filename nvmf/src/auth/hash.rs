//! The hash functions of DH-HMAC-CHAP, and their HMAC (RFC 2104).

use std::fmt;
use std::ops::Deref;

use hmac::digest::block_api::EagerHash;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256, Sha384, Sha512};
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, ZeroizeOnDrop};

/// A hash function; the value is its identifier in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Hash {
    Sha256 = 1,
    Sha384 = 2,
    Sha512 = 3,
}

impl Hash {
    pub const ALL: [Self; 3] = [Self::Sha256, Self::Sha384, Self::Sha512];

    pub const fn id(self) -> u8 {
        self as u8
    }

    pub fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.id() == id)
    }

    /// Bytes of a digest (HL in messages).
    pub const fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha384 => "sha384",
            Self::Sha512 => "sha512",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.name() == name)
    }

    pub fn digest(self, bytes: &[u8]) -> Digest {
        match self {
            Self::Sha256 => Digest::new(&Sha256::digest(bytes)),
            Self::Sha384 => Digest::new(&Sha384::digest(bytes)),
            Self::Sha512 => Digest::new(&Sha512::digest(bytes)),
        }
    }

    /// The HMAC of the concatenated parts.
    pub fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Digest {
        match self {
            Self::Sha256 => hmac::<Sha256>(key, parts),
            Self::Sha384 => hmac::<Sha384>(key, parts),
            Self::Sha512 => hmac::<Sha512>(key, parts),
        }
    }
}

fn hmac<H: EagerHash>(key: &[u8], parts: &[&[u8]]) -> Digest {
    let mut mac = Hmac::<H>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    Digest::new(&mac.finalize().into_bytes())
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A digest, or a key of up to 64 bytes, zeroed when it is dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Digest {
    bytes: [u8; 64],
    len: usize,
}

impl Digest {
    /// # Panics
    /// If there are more than 64 bytes.
    pub fn new(from: &[u8]) -> Self {
        let mut bytes = [0; 64];
        bytes[..from.len()].copy_from_slice(from);
        Self {
            bytes,
            len: from.len(),
        }
    }

    /// Compares in constant time.
    pub fn equals(&self, other: &[u8]) -> bool {
        self[..].ct_eq(other).into()
    }
}

impl Deref for Digest {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        super::hidden(f, "Digest", self.len)
    }
}

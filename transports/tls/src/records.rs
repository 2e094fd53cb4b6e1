//! Seals and opens one TLS record: its header, its AEAD protection, and the keys of one direction
//! (RFC 8446, 5).
//!
//! ```text
//!   17 03 03 length    data .. 17    tag[16]       the second 17: type of the data, sealed
//! ```

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use nacre_nvmf::auth::Digest;
use nacre_nvmf::tls::{Suite, expand_label};

use crate::error::Failure;

pub(crate) const HEADER: usize = 5;
/// Most data of a record.
pub(crate) const MOST_DATA: usize = 1 << 14;
/// Bytes after the data: its type and the tag.
pub(crate) const TRAILER: usize = 1 + 16;
/// Most records that AES-GCM may seal with one key: 2^24.5 of the longest (RFC 8446, 5.5).
pub(crate) const MOST_RECORDS: u64 = 23_726_566;
/// The longest protected record that a peer may send, without its header.
pub(crate) const MOST_PROTECTED: usize = MOST_DATA + 256;

/// The type of a record.
pub(crate) mod kind {
    pub(crate) const ALERT: u8 = 21;
    pub(crate) const HANDSHAKE: u8 = 22;
    pub(crate) const DATA: u8 = 23;
}

/// Type and length of a record's header, if there is a whole one.
pub(crate) fn header(bytes: &[u8]) -> Option<(u8, usize)> {
    match bytes {
        // The version is to be ignored (RFC 8446, 5.1).
        [kind, _, _, high, low, ..] => {
            Some((*kind, usize::from(u16::from_be_bytes([*high, *low]))))
        }
        _ => None,
    }
}

/// A record in clear: of a handshake, or an alert before there are keys.
pub(crate) fn plain(kind: u8, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u16).to_be_bytes();
    let mut record = vec![kind, 3, 3, length[0], length[1]];
    record.extend_from_slice(data);
    record
}

/// The keys of one direction of a connection.
pub(crate) struct Direction {
    suite: Suite,
    /// The traffic secret.
    secret: Digest,
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    /// Number of the next record.
    next: u64,
}

impl Direction {
    pub(crate) fn new(suite: Suite, secret: Digest) -> Result<Self, Failure> {
        let algorithm = match suite {
            Suite::Aes128Sha256 => &AES_128_GCM,
            Suite::Aes256Sha384 => &AES_256_GCM,
        };
        let hash = suite.hash();
        let bytes = expand_label(hash, &secret, b"key", b"", suite.key_bytes());
        let key = UnboundKey::new(algorithm, &bytes).map_err(|_| Failure::Crypto)?;
        let mut iv = [0; NONCE_LEN];
        iv.copy_from_slice(&expand_label(hash, &secret, b"iv", b"", NONCE_LEN));
        Ok(Self {
            suite,
            secret,
            key: LessSafeKey::new(key),
            iv,
            next: 0,
        })
    }

    /// The keys after a KeyUpdate.
    pub(crate) fn update(&mut self) -> Result<(), Failure> {
        let hash = self.suite.hash();
        let secret = expand_label(hash, &self.secret, b"traffic upd", b"", hash.bytes());
        *self = Self::new(self.suite, secret)?;
        Ok(())
    }

    /// Records sealed or opened with these keys.
    pub(crate) fn count(&self) -> u64 {
        self.next
    }

    /// Sets the number of records sealed or opened, for tests of the limit.
    #[cfg(test)]
    pub(crate) fn skip_to(&mut self, count: u64) {
        self.next = count;
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Seals the data at the end of `out`, which begins `at`, into a record. Its header's place is
    /// in front of it.
    pub(crate) fn seal(&mut self, kind: u8, out: &mut Vec<u8>, at: usize) -> Result<(), Failure> {
        let start = at - HEADER;
        let length = ((out.len() - at + TRAILER) as u16).to_be_bytes();
        let header = [kind::DATA, 3, 3, length[0], length[1]];
        out[start..at].copy_from_slice(&header);
        out.push(kind);
        let nonce = self.nonce();
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(header), &mut out[at..])
            .map_err(|_| Failure::Crypto)?;
        out.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens a record in its place: its type and the length of its data, which follows the header.
    pub(crate) fn open(&mut self, record: &mut [u8]) -> Result<(u8, usize), Failure> {
        let (header, sealed) = record
            .split_first_chunk_mut::<HEADER>()
            .ok_or(Failure::Malformed("record"))?;
        let nonce = self.nonce();
        let opened = self
            .key
            .open_in_place(nonce, Aad::from(*header), sealed)
            .map_err(|_| Failure::Forged)?;
        // Zeros after the type are padding.
        let end = opened.iter().rposition(|byte| *byte != 0);
        let end = end.ok_or(Failure::Unexpected("a record without a type"))?;
        if end > MOST_DATA {
            return Err(Failure::Long {
                bytes: end,
                most: MOST_DATA,
            });
        }
        Ok((opened[end], end))
    }
}

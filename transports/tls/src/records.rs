//! Encrypts (seals) and decrypts (opens) one TLS 1.3 record with the keys of one direction: header,
//! AES-GCM, nonce from the record number (RFC 8446, 5).
//!
//! ```text
//!   17 03 03 length    data .. 17 00 ..    tag[16]    hexadecimal; the second 17, encrypted, is
//!                                                     the real type of the record (here: data)
//! ```
//!
//! Every encrypted record has content type 17h (application data) in its header. The content type
//! of its data is the encrypted byte after the data. The zeros after it are padding, which peers
//! may send and this side does not.

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use nacre_nvmf::auth::Digest;
use nacre_nvmf::tls::{Suite, expand_label};

use crate::error::Failure;

/// Bytes of a record's header: content type, version, length.
pub(crate) const HEADER: usize = 5;
/// Most bytes of data in a record.
pub(crate) const MOST_DATA: usize = 1 << 14;
/// Bytes that [`Direction::seal`] adds after the data: the content type and the AEAD tag.
pub(crate) const TRAILER: usize = 1 + 16;
/// Most records that AES-GCM may encrypt with one key: 2^24.5 of the longest (RFC 8446, 5.5).
pub(crate) const MOST_RECORDS: u64 = 23_726_566;
/// Most bytes of an encrypted record that a peer may send, without its header (RFC 8446, 5.2).
pub(crate) const MOST_PROTECTED: usize = MOST_DATA + 256;

/// Content types of records (RFC 8446, 5.1).
pub(crate) mod kind {
    pub(crate) const ALERT: u8 = 21;
    pub(crate) const HANDSHAKE: u8 = 22;
    pub(crate) const DATA: u8 = 23;
}

/// The type and the length field of a record. `None`: fewer than [`HEADER`] bytes.
pub(crate) fn header(bytes: &[u8]) -> Option<(u8, usize)> {
    match bytes {
        // The version is to be ignored (RFC 8446, 5.1).
        [kind, _, _, high, low, ..] => {
            Some((*kind, usize::from(u16::from_be_bytes([*high, *low]))))
        }
        _ => None,
    }
}

/// An unencrypted record: of a handshake, or an alert before there are keys.
pub(crate) fn plain(kind: u8, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u16).to_be_bytes();
    let mut record = vec![kind, 3, 3, length[0], length[1]];
    record.extend_from_slice(data);
    record
}

/// The keys and the record number of one direction of a connection.
pub(crate) struct Direction {
    suite: Suite,
    /// The traffic secret, from which the key and the IV are derived.
    secret: Digest,
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    /// Number of the next record, counted from 0 with each key.
    next: u64,
}

impl Direction {
    /// Derives the key and the IV from a traffic secret (RFC 8446, 7.3).
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

    /// Replaces the keys by the next ones, after a KeyUpdate (RFC 8446, 7.2).
    pub(crate) fn update(&mut self) -> Result<(), Failure> {
        let hash = self.suite.hash();
        let secret = expand_label(hash, &self.secret, b"traffic upd", b"", hash.bytes());
        *self = Self::new(self.suite, secret)?;
        Ok(())
    }

    /// Number of records sealed or opened with the present keys.
    pub(crate) fn count(&self) -> u64 {
        self.next
    }

    /// Sets the number of records sealed or opened, for tests of the limit.
    #[cfg(test)]
    pub(crate) fn skip_to(&mut self, count: u64) {
        self.next = count;
    }

    /// The nonce of the next record (RFC 8446, 5.3). Increments the sequence number.
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.next.to_be_bytes()) {
            *byte ^= number;
        }
        self.next += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts `out[at..]` in place as the data of a record, and appends type and tag. The header
    /// goes into the [`HEADER`] bytes before `at`, which the caller has reserved.
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

    /// Decrypts a whole record in place. Returns its type and the length of its data, which begins
    /// after the header.
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

//! SHA-256 digests of files, and copies that compute one.

use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

/// A SHA-256 digest; as text 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Sha256([u8; 32]);

impl Sha256 {
    pub fn of(bytes: &[u8]) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(bytes);
        Self::end(context)
    }

    fn end(context: Context) -> Self {
        let mut digest = [0; 32];
        digest.copy_from_slice(context.finish().as_ref());
        Self(digest)
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Sha256 {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || {
            format!(
                "{:?} is no SHA-256 digest",
                text.chars().take(80).collect::<String>()
            )
        };
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(refuse());
        }
        let mut digest = [0; 32];
        for (at, byte) in digest.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[at * 2..at * 2 + 2], 16).map_err(|_| refuse())?;
        }
        Ok(Self(digest))
    }
}

impl TryFrom<String> for Sha256 {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Sha256> for String {
    fn from(digest: Sha256) -> Self {
        digest.to_string()
    }
}

/// Computes the digest of bytes that come in pieces.
pub(crate) struct Counter(Context);

impl Default for Counter {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Counter {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn end(self) -> Sha256 {
        Sha256::end(self.0)
    }
}

/// Copies everything; returns the number of bytes and their digest.
pub(crate) fn copy(mut from: impl Read, to: &mut impl Write) -> io::Result<(u64, Sha256)> {
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0; 256 * 1024];
    let mut length = 0;
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => return Ok((length, Sha256::end(context))),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        context.update(&buffer[..count]);
        to.write_all(&buffer[..count])?;
        length += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_read_back() {
        let digest = Sha256::of(b"abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
        let mut copied = Vec::new();
        assert_eq!(copy(&b"abc"[..], &mut copied).unwrap(), (3, digest));
        assert_eq!(copied, b"abc");
        for bad in [
            "",
            "ba78",
            &text.replace('b', "g"),
            &format!("{text}0"),
            &"é".repeat(32),
        ] {
            assert!(bad.parse::<Sha256>().is_err(), "{bad}");
        }
    }
}

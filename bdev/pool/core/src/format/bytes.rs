//! Writes and reads little-endian fields, one after the other, in a slice of bytes.

use uuid::Uuid;

/// Writes fields. The caller knows that they fit.
pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    /// Starts at the first byte of `out`, all of which becomes zero.
    pub(crate) fn zeroed(out: &'a mut [u8]) -> Self {
        out.fill(0);
        Writer { out, at: 0 }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.bytes(&[value]);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn uuid(&mut self, value: Uuid) {
        self.bytes(value.as_bytes());
    }

    /// A length byte, and the text.
    pub(crate) fn text(&mut self, text: &str) {
        self.u8(text.len() as u8);
        self.bytes(text.as_bytes());
    }

    pub(crate) fn skip_to(&mut self, at: usize) {
        debug_assert!(at >= self.at);
        self.at = at;
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }
}

/// Reads fields. `None`: the bytes end before the field does.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, at: 0 }
    }

    pub(crate) fn slice(&mut self, len: usize) -> Option<&'a [u8]> {
        let slice = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(slice)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.slice(N)?.first_chunk().copied()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn uuid(&mut self) -> Option<Uuid> {
        self.array().map(Uuid::from_bytes)
    }

    /// A length byte, and the text.
    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let len = usize::from(self.u8()?);
        std::str::from_utf8(self.slice(len)?).ok()
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }

    /// True when all bytes from here up to `end` are zero. Goes on at `end`.
    pub(crate) fn is_zero_until(&mut self, end: usize) -> bool {
        let Some(len) = end.checked_sub(self.at) else {
            return false;
        };
        self.slice(len).is_some_and(is_zero)
    }
}

/// True if all bytes are zero. Most bytes of most pages are, so that an import looks at many.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (blocks, rest) = bytes.as_chunks::<64>();
    let any = |bytes: &[u8]| bytes.iter().fold(0, |any, byte| any | byte);
    blocks.iter().all(|block| any(block) == 0) && any(rest) == 0
}

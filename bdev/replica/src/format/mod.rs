//! The byte format of the reserved area at the start of a replica's device.
//!
//! ```text
//!   0        4 KiB     8 KiB        64 KiB                         1 MiB
//!   │ label A │ label B │  (free)    │ log page 0 │ page 1 │ … │    │ the volume's blocks …
//! ```
//!
//! Blocks of 4 KiB, little-endian. The last four bytes of each block are a CRC32C over all of it,
//! so a block of which a power failure left only some sectors is never accepted. This module does
//! no I/O.

pub mod fuzzing;
pub mod label;
pub mod layout;
pub mod log;
#[cfg(test)]
mod tests;

pub use label::{
    Label, LabelCopy, LabelError, LabelReplica, LabelState, label_offset, newest, next_copy,
};
pub use layout::{BLOCK, region_shift_for};
pub use log::{Page, REGIONS_PER_PAGE, decode_page, encode_page, page_offset, pages_for};

/// Offset of the checksum in every block, in every version of the format.
const CHECKSUM: usize = BLOCK - 4;

/// Writes the checksum into a finished block.
fn seal(block: &mut [u8; BLOCK]) {
    let sum = crc_fast::crc32_iscsi(&block[..CHECKSUM]);
    block[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
}

fn is_sealed(block: &[u8; BLOCK]) -> bool {
    crc_fast::crc32_iscsi(&block[..CHECKSUM]).to_le_bytes() == block[CHECKSUM..]
}

/// The first block of `bytes`. `None`: `bytes` is shorter.
fn block_of(bytes: &[u8]) -> Option<&[u8; BLOCK]> {
    bytes.first_chunk()
}

/// Writes fields one after the other.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

struct Reader<'a> {
    bytes: &'a [u8; BLOCK],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(self.slice(N));
        out
    }

    fn slice(&mut self, len: usize) -> &'a [u8] {
        let slice = &self.bytes[self.at..self.at + len];
        self.at += len;
        slice
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    /// True when all bytes up to `end` are zero, as this version writes them.
    fn zero_until(&mut self, end: usize) -> bool {
        self.slice(end - self.at).iter().all(|byte| *byte == 0)
    }
}

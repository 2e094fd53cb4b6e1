//! The bytes of a pool on its disk. Little-endian; pages of 4 KiB. No I/O.
//!
//! | structure | checked by |
//! |---|---|
//! | [`superblock`] | its own CRC-64, four places |
//! | [`log_page`] of [`record`]s | its CRC-64, tag of the pool, import, CRC of the page before |
//! | [`leaf`], [`node`], [`chain`], [`directory`] | the CRC-64 in their [`Place`], two copies |
//!
//! A parser refuses every value that this version does not write, and never panics.

mod bytes;
pub mod chain;
pub mod directory;
mod disk_table;
pub mod fuzzing;
pub mod leaf;
pub mod log_page;
pub mod node;
pub mod record;
pub mod superblock;
#[cfg(test)]
mod tests;

use crate::geometry::PAGE;
use crate::ids::Lsn;
pub use crate::ids::Place;
use bytes::is_zero;
pub(crate) use bytes::{Reader, Writer};
use crc_fast::{CrcAlgorithm, Digest};

/// A page in memory.
pub type Page = [u8; PAGE];

/// Checksum of metadata (CRC-64/NVME).
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::crc64_nvme(bytes)
}

/// The same of bytes in several parts.
fn checksum_of_parts(parts: &[&[u8]]) -> u64 {
    let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// Checksum of a granule of data (CRC32C).
pub fn data_checksum(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

impl Place {
    const BYTES: usize = 24;

    fn write(&self, w: &mut Writer) {
        w.u64(self.a);
        w.u64(self.b);
        w.u64(self.sum);
    }

    fn read(r: &mut Reader) -> Option<Self> {
        Some(Self {
            a: r.u64()?,
            b: r.u64()?,
            sum: r.u64()?,
        })
    }
}

/// The first field of a structure that is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {structure} has a wrong {field}")]
pub struct FormatError {
    pub structure: &'static str,
    pub field: &'static str,
}

const fn wrong(structure: &'static str, field: &'static str) -> FormatError {
    FormatError { structure, field }
}

/// The contents of a metadata page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PageKind {
    Leaf = 1,
    LeafRest = 2,
    Interior = 3,
    Directory = 4,
    DirectoryIndex = 5,
    PageMap = 6,
}

/// The first 64 bytes of a metadata page.
///
/// | bytes | |
/// |---|---|
/// | 0..4 | kind, zero, number of items (u16) |
/// | 4..8 | zero |
/// | 8..16 | tag of the pool |
/// | 16..24 | LSN of the checkpoint that wrote the page |
/// | 24..32 | first leaf of the page; of a chain: position of the page in it |
/// | 32..56 | place of the next page of a chain, or of the rest of a leaf |
/// | 56..64 | zero |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageHead {
    pub kind: PageKind,
    pub items: u16,
    pub tag: u64,
    pub lsn: u64,
    pub first: u64,
    pub next: Place,
}

const HEAD_BYTES: usize = 64;

/// LSN of the checkpoint that wrote a metadata page.
pub fn lsn_of(page: &Page) -> Lsn {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[16..24]);
    u64::from_le_bytes(bytes)
}

impl PageHead {
    fn write(&self, w: &mut Writer) {
        w.u8(self.kind as u8);
        w.u8(0);
        w.u16(self.items);
        w.u32(0);
        w.u64(self.tag);
        w.u64(self.lsn);
        w.u64(self.first);
        self.next.write(w);
        w.u64(0);
    }

    /// The head, if it is one of `kind`, of the pool with `tag`.
    fn read(r: &mut Reader, kind: PageKind, tag: u64) -> Result<Self, FormatError> {
        let broken = |field| wrong("page head", field);
        let mut parse = || {
            let (found, zero, items) = (r.u8()?, r.u8()?, r.u16()?);
            let zero = u32::from(zero) | r.u32()?;
            let (found_tag, lsn, first) = (r.u64()?, r.u64()?, r.u64()?);
            let next = Place::read(r)?;
            let zero = u64::from(zero) | r.u64()?;
            Some((found, zero, items, found_tag, lsn, first, next))
        };
        let (found, zero, items, found_tag, lsn, first, next) =
            parse().ok_or_else(|| broken("length"))?;
        if found != kind as u8 {
            return Err(broken("kind"));
        }
        if found_tag != tag {
            return Err(broken("tag"));
        }
        if zero != 0 {
            return Err(broken("reserved area"));
        }
        Ok(Self {
            kind,
            items,
            tag,
            lsn,
            first,
            next,
        })
    }
}

//! A page of the dirty-region log: one bit per region.
//!
//! | bytes | |
//! |---|---|
//! | 0..8 | `NACRELOG` |
//! | 8..16 | version, number of the page |
//! | 16..40 | id of the volume, epoch |
//! | 40..64 | zero |
//! | 64..4064 | bits, region 0 of the page in bit 0 of byte 64 |
//! | 4064..4092 | zero |
//! | 4092..4096 | CRC32C of all preceding bytes |

use uuid::Uuid;

use super::layout::{BLOCK, LOG, MAX_REGIONS};
use super::{Reader, Writer, block_of, is_sealed, seal};
use crate::model::RESERVED;

const MAGIC: &[u8; 8] = b"NACRELOG";
const VERSION: u32 = 1;
const BITS: usize = 64;
const BYTES: usize = 4000;

/// Regions that one page covers.
pub const REGIONS_PER_PAGE: u64 = BYTES as u64 * 8;

/// Pages of the log of a volume with this many regions.
pub const fn pages_for(regions: u64) -> u64 {
    regions.div_ceil(REGIONS_PER_PAGE)
}

const _: () = assert!(LOG + pages_for(MAX_REGIONS) * BLOCK as u64 <= RESERVED);

/// Byte offset of a page on the device.
pub fn page_offset(page_number: u64) -> u64 {
    LOG + page_number * BLOCK as u64
}

/// Encodes the page that covers the regions from `page_number * REGIONS_PER_PAGE`, as far as the
/// volume has them. Calls `dirty` for regions below `regions` only.
pub fn encode_page(
    volume: Uuid,
    page_number: u64,
    epoch: u64,
    regions: u64,
    dirty: impl Fn(u64) -> bool,
    out: &mut [u8; BLOCK],
) {
    out.fill(0);
    let first = page_number * REGIONS_PER_PAGE;
    for region in first..regions.min(first + REGIONS_PER_PAGE) {
        let bit = (region - first) as usize;
        out[BITS + bit / 8] |= u8::from(dirty(region)) << (bit % 8);
    }
    let mut w = Writer { out, at: 0 };
    w.put(MAGIC);
    w.put(&VERSION.to_le_bytes());
    w.put(&(page_number as u32).to_le_bytes());
    w.put(volume.as_bytes());
    w.put(&epoch.to_le_bytes());
    seal(out);
}

/// The decoded bits of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    first: u64,
    /// The epoch of the write, and the bits. `None`: the page is not valid.
    content: Option<(u64, Box<[u8; BYTES]>)>,
}

impl Page {
    /// True when every region counts as dirty: the page is damaged, of another volume, or was never
    /// written.
    pub fn is_lost(&self) -> bool {
        self.content.is_none()
    }

    pub fn epoch(&self) -> Option<u64> {
        self.content.as_ref().map(|(epoch, _)| *epoch)
    }

    /// True when the log names `region`, a number within the whole volume.
    ///
    /// # Panics
    /// When this page does not cover `region`.
    pub fn is_dirty(&self, region: u64) -> bool {
        let of_page = region.checked_sub(self.first);
        let bit = of_page.filter(|bit| *bit < REGIONS_PER_PAGE);
        let bit = bit.expect("the region belongs to another page") as usize;
        match &self.content {
            Some((_, bits)) => bits[bit / 8] >> (bit % 8) & 1 == 1,
            None => true,
        }
    }
}

/// Never fails: an invalid page marks every region dirty, which costs copying and no data.
pub fn decode_page(bytes: &[u8], volume: Uuid, page_number: u64) -> Page {
    Page {
        first: page_number * REGIONS_PER_PAGE,
        content: content(bytes, volume, page_number),
    }
}

fn content(bytes: &[u8], volume: Uuid, page_number: u64) -> Option<(u64, Box<[u8; BYTES]>)> {
    let block = block_of(bytes)?;
    let mut r = Reader {
        bytes: block,
        at: 0,
    };
    let ours = r.take() == *MAGIC
        && is_sealed(block)
        && r.u32() == VERSION
        && u64::from(r.u32()) == page_number
        && r.take() == *volume.as_bytes();
    if !ours {
        return None;
    }
    let epoch = r.u64();
    r.at = BITS;
    Some((epoch, Box::new(r.take())))
}

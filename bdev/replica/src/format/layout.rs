//! Where things stand on a member's device, and how large regions are.

use crate::model::RESERVED;

use super::label::Place;

/// Bytes of a label, and of a page of the log. A device's logical block is at most this.
pub const BLOCK: usize = 4096;
/// Where the log's first page stands. What is between it and the labels is kept for later versions.
pub const LOG: u64 = 64 << 10;

/// A region has at least 1 MiB: smaller ones would make the log longer without copying less after a
/// crash, since what is in flight then is a few regions anyway.
pub const MIN_REGION_SHIFT: u8 = 20;
/// Regions of one volume at most: their log fits into the reserved area and 1 MiB of memory.
pub const MAX_REGIONS: u64 = 1 << 18;

const _: () = assert!(LOG + super::log::pages_for(MAX_REGIONS) * BLOCK as u64 <= RESERVED);

/// The byte at which a label stands.
pub fn label_offset(place: Place) -> u64 {
    match place {
        Place::A => 0,
        Place::B => BLOCK as u64,
    }
}

/// log2 of the bytes of a region of a volume of so many bytes: the smallest regions of which there are
/// not too many.
pub fn region_shift_for(bytes: u64) -> u8 {
    let mut shift = MIN_REGION_SHIFT;
    while bytes.div_ceil(1 << shift) > MAX_REGIONS {
        shift += 1;
    }
    shift
}

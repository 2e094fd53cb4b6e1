//! The layout of a replica's device: offset of the log, and the size of regions.

/// Bytes of a label, and of a page of the log. A device's logical block is no larger.
pub const BLOCK: usize = 4096;
/// Offset of the log's first page. The space between the labels and the log is reserved for later
/// versions.
pub const LOG: u64 = 64 << 10;

/// Smallest region: 1 MiB. Smaller regions would lengthen the log without less copying after a
/// crash, because the writes in flight then touch only a few regions anyway.
pub const MIN_REGION_SHIFT: u8 = 20;
/// Most regions of one volume: their log fits into the reserved area and 1 MiB of memory.
pub const MAX_REGIONS: u64 = 1 << 18;

/// log2 of the region size for a volume of `bytes`: the smallest regions that stay within
/// [`MAX_REGIONS`].
pub fn region_shift_for(bytes: u64) -> u8 {
    let mut shift = MIN_REGION_SHIFT;
    while bytes.div_ceil(1 << shift) > MAX_REGIONS {
        shift += 1;
    }
    shift
}

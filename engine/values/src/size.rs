//! Sizes with units, and sizes of block devices.

use nacre_bdev::{BLOCK_SIZES, is_block_size};

pub use nacre_units::size::*;

/// Checks that bdevs support blocks of this size.
pub fn check_block(block_size: u64) -> Result<(), String> {
    if is_block_size(block_size) {
        Ok(())
    } else {
        let (least, most) = BLOCK_SIZES.into_inner();
        Err(format!(
            "{block_size} bytes are not a block: a power of two from {least} to {most} is, such as \
             512 or 4096"
        ))
    }
}

/// Converts bytes to blocks; the error proposes a size of whole blocks.
pub fn blocks(bytes: u64, block_size: u64) -> Result<u64, String> {
    check_block(block_size)?;
    if bytes > 0 && bytes.is_multiple_of(block_size) {
        return Ok(bytes / block_size);
    }
    let above = bytes
        .max(1)
        .checked_next_multiple_of(block_size)
        .unwrap_or(u64::MAX - u64::MAX % block_size);
    Err(format!(
        "{bytes} bytes are not whole blocks of {block_size}: {above} are"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_blocks() {
        assert_eq!(blocks(4096, 512), Ok(8));
        let error = blocks(1000, 512).unwrap_err();
        assert_eq!(error, "1000 bytes are not whole blocks of 512: 1024 are");
        assert!(blocks(0, 512).is_err() && blocks(1, 0).is_err());
        assert!(blocks(u64::MAX, 4096).is_err());
    }
}

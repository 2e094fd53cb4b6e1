//! Checks and errors that the modules' configurations share.

use std::ops::RangeInclusive;

/// Bytes of a block: a power of two within this range.
pub const BLOCK_SIZES: RangeInclusive<u32> = 512..=65_536;

/// True for the size of a block that bdevs can have.
pub fn is_block_size(bytes: u64) -> bool {
    bytes.is_power_of_two() && u32::try_from(bytes).is_ok_and(|bytes| BLOCK_SIZES.contains(&bytes))
}

/// The error of an invalid configuration of a module.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "block_size {block_size} is not a power of two of at least {} and at most {}",
        BLOCK_SIZES.start(), BLOCK_SIZES.end()
    )]
    BlockSize { block_size: u32 },
    #[error(
        "physical_block_size {physical} is not a power of two of at least the block size, {block_size}"
    )]
    PhysicalBlockSize { physical: u32, block_size: u32 },
    #[error("num_blocks is 0: a device has at least one block")]
    NoBlocks,
    #[error(
        "{num_blocks} blocks of {block_size} bytes are more than a device can have (2^63 bytes)"
    )]
    TooLarge { num_blocks: u64, block_size: u32 },
    #[error("cannot get {bytes} bytes of memory for \"{name}\"")]
    Memory {
        name: String,
        bytes: u64,
        #[source]
        source: nacre_hugepages::ArenaError,
    },
    #[error("optimal_io_boundary {boundary} is larger than the device, {num_blocks} blocks")]
    Boundary { boundary: u32, num_blocks: u64 },
}

/// Checks the block sizes and size of a device. Returns its physical block size.
pub(crate) fn check_blocks(
    block_size: u32,
    physical: Option<u32>,
    num_blocks: u64,
) -> Result<u32, ConfigError> {
    if !is_block_size(block_size.into()) {
        return Err(ConfigError::BlockSize { block_size });
    }
    let physical = match physical {
        // SPDK's tools send 0 for a missing value.
        None | Some(0) => block_size,
        Some(physical) if physical.is_power_of_two() && physical >= block_size => physical,
        Some(physical) => {
            return Err(ConfigError::PhysicalBlockSize {
                physical,
                block_size,
            });
        }
    };
    if num_blocks == 0 {
        return Err(ConfigError::NoBlocks);
    }
    match num_blocks.checked_mul(u64::from(block_size)) {
        Some(bytes) if bytes < 1 << 63 => Ok(physical),
        _ => Err(ConfigError::TooLarge {
            num_blocks,
            block_size,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each shape that makes no device is refused for its own reason.
    #[test]
    fn shapes() {
        assert_eq!(check_blocks(512, None, 1).ok(), Some(512));
        assert_eq!(check_blocks(512, Some(4096), 1).ok(), Some(4096));
        assert_eq!(check_blocks(512, Some(0), 1).ok(), Some(512));
        for block_size in [0, 1, 256, 513, 1 << 17] {
            assert!(matches!(
                check_blocks(block_size, None, 1),
                Err(ConfigError::BlockSize { .. })
            ));
        }
        let physical = check_blocks(4096, Some(512), 1);
        assert!(matches!(
            physical,
            Err(ConfigError::PhysicalBlockSize { .. })
        ));
        assert!(matches!(
            check_blocks(512, None, 0),
            Err(ConfigError::NoBlocks)
        ));
        assert!(matches!(
            check_blocks(512, None, 1 << 54),
            Err(ConfigError::TooLarge { .. })
        ));
    }
}

//! Checks whether a device can become a disk of a pool, or the external parent of volumes.

use nacre_bdev::{Bdev, Claim};
use nacre_bdev_pool_core::disks::MAX_DISKS;
use nacre_bdev_pool_core::pool::Pool as CorePool;
use uuid::Uuid;

use crate::model::PoolError;
use crate::port::disk_bytes;
use crate::{BLOCK, EDGE};

pub(crate) fn size_of(claim: &Claim) -> Result<u64, PoolError> {
    let geometry = claim.layer().geometry();
    if geometry.block_size > BLOCK {
        return Err(PoolError::Unfit {
            what: "disk",
            why: format!(
                "its blocks have {} bytes, and a pool needs blocks of at most {BLOCK}",
                geometry.block_size
            ),
        });
    }
    if claim.layer().limits().read_only {
        return Err(PoolError::Unfit {
            what: "disk",
            why: "it is read-only".to_owned(),
        });
    }
    let bytes = disk_bytes(claim);
    if bytes < 4 * EDGE {
        return Err(PoolError::Unfit {
            what: "disk",
            why: format!("{bytes} bytes are too few for a pool"),
        });
    }
    Ok(bytes)
}

/// Units of a device outside of the pool that volumes may show.
pub(crate) fn external_units(claim: &Claim, unit: u64) -> Result<u64, PoolError> {
    let geometry = claim.layer().geometry();
    let unfit = |why: String| PoolError::Unfit { what: "bdev", why };
    if geometry.block_size > BLOCK {
        let size = geometry.block_size;
        return Err(unfit(format!(
            "its blocks have {size} bytes, and those of an lvol have {BLOCK}"
        )));
    }
    let present = claim.layer().present_blocks();
    if present < geometry.blocks {
        return Err(unfit(format!(
            "it has only {present} of its {} blocks left",
            geometry.blocks
        )));
    }
    let bytes = geometry.bytes();
    if bytes == 0 || !bytes.is_multiple_of(unit) {
        return Err(unfit(format!(
            "its {bytes} bytes are no multiple of the pool's unit, {unit} bytes"
        )));
    }
    Ok(bytes / unit)
}

/// Checks that a device can join the disks of an open pool.
pub(crate) fn check_disk<'a>(
    claim: &Claim,
    mut disks: impl Iterator<Item = &'a Claim>,
    pool: &CorePool,
) -> Result<(), PoolError> {
    let unfit = |why: String| PoolError::Unfit { what: "disk", why };
    let has_cache = |claim: &Claim| claim.layer().limits().volatile_cache;
    if has_cache(claim) && !disks.any(has_cache) {
        return Err(unfit(
            "it has a volatile write cache, and the pool's disks have none: hosts of the pool's \
             volumes know of no cache, and send no flushes; turn the cache off, or make another \
             pool on it"
                .to_owned(),
        ));
    }
    let root = pool.superblock();
    if root.disks.disks().len() >= MAX_DISKS {
        let why = format!("the pool has {MAX_DISKS} disks, as many as it can hold");
        return Err(unfit(why));
    }
    let (mut table, mut geometry) = (root.disks.clone(), root.geometry);
    let bytes = disk_bytes(claim);
    let added = table.add(&mut geometry, Uuid::max(), bytes);
    added.map_err(|error| unfit(format!("its {bytes} bytes do not fit the pool: {error}")))
}

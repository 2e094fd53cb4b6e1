//! The malloc module: a RAM disk. Every operation is executed in `submit` or `run_sync`; an unmap
//! releases memory.
//!
//! All cores access the same memory without locks. Two simultaneous writes to the same block leave
//! a mix, as on any disk. So the layer emulates compare-and-write, because it can exclude other
//! cores. There is no write cache: a completed write is as durable as the device permits.

mod channel;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use nacre_hugepages::{ArenaOptions, Pool, Shared};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::config::{ConfigError, check_blocks};
use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::Op;
use crate::queue::Queue;

/// I/Os in one queue. No I/O waits, so this bounds only the completions between two polls.
const QUEUE_DEPTH: u32 = 1024;
/// Most bytes of one I/O: 1 MiB takes about 50 µs, the longest time for which a core should be
/// busy.
const MAX_BYTES: u32 = 1 << 20;
/// Most bytes of one clear or deallocation, for the same reason; the layer splits larger ones.
const MAX_UNMAP_BYTES: u64 = 32 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub name: String,
    pub block_size: u32,
    pub num_blocks: u64,
    /// Default: the block size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub physical_block_size: Option<u32>,
    /// Default: a random one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// Boundary in blocks: I/Os that cross a multiple of it are split. Default: no boundary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimal_io_boundary: Option<u32>,
    /// The NUMA node to take memory from. Default: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_id: Option<u32>,
}

pub struct Malloc {
    config: Config,
    uuid: Uuid,
    geometry: Geometry,
    memory: Arc<Shared>,
}

pub fn create(config: Config) -> Result<Arc<Malloc>, ConfigError> {
    let physical = check_blocks(
        config.block_size,
        config.physical_block_size,
        config.num_blocks,
    )?;
    let geometry = Geometry {
        block_size: config.block_size,
        blocks: config.num_blocks,
        physical_block_size: physical,
    };
    if let Some(boundary) = config.optimal_io_boundary
        && u64::from(boundary) > config.num_blocks
    {
        return Err(ConfigError::Boundary {
            boundary,
            num_blocks: config.num_blocks,
        });
    }
    let options = ArenaOptions {
        numa_node: config.numa_id,
        // Pages are populated as blocks are written, and unmapped memory is released.
        populate: false,
        ..ArenaOptions::new(geometry.bytes())
    };
    let memory = Shared::allocate_with(options).map_err(|source| ConfigError::Memory {
        name: config.name.clone(),
        bytes: geometry.bytes(),
        source,
    })?;
    Ok(Arc::new(Malloc {
        uuid: config.uuid.unwrap_or_else(Uuid::new_v4),
        geometry,
        memory: Arc::new(memory),
        config,
    }))
}

impl Malloc {
    /// [`Bdev::product_name`] of these devices.
    pub const PRODUCT: &str = "Malloc disk";

    /// The configuration that recreates this device.
    pub fn config(&self) -> Config {
        Config {
            uuid: Some(self.uuid),
            ..self.config.clone()
        }
    }

    /// The memory of the disk, for registering it with DMA devices.
    pub fn memory(&self) -> &Arc<Shared> {
        &self.memory
    }
}

impl Bdev for Malloc {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn product_name(&self) -> &'static str {
        Self::PRODUCT
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn limits(&self) -> Limits {
        let block = self.geometry.block_size;
        Limits {
            max_blocks: MAX_BYTES / block,
            max_unmap_blocks: MAX_UNMAP_BYTES / u64::from(block),
            optimal_boundary_blocks: self.config.optimal_io_boundary.unwrap_or(0),
            unmap_zeroes: true,
            zero_copy_blocks: MAX_BYTES / block,
            immediate: true,
            is_sync: true,
            ..Limits::unlimited(QUEUE_DEPTH)
        }
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            Op::CompareAndWrite => Support::No,
            _ => Support::Native,
        }
    }

    fn native_fua(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(channel::Channel::new(&self)))
    }
}

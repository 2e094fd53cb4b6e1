//! The null module: a device that completes I/O at once and stores nothing, to measure the cost of
//! the code above it.
//!
//! A read returns zeroes, or the buffer unchanged (to measure without touching memory). The size is
//! configured, and can change.

mod channel;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use nacre_hugepages::Pool;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::config::{ConfigError, check_blocks};
use crate::device::{Bdev, Geometry, Limits, OpenError, Support};
use crate::io::Op;
use crate::queue::Queue;
use crate::size::Size;

/// I/Os in one queue: nothing waits, so this bounds only the completions between two polls.
const QUEUE_DEPTH: u32 = 1024;

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
    #[serde(default)]
    pub reads: Reads,
}

/// The data of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reads {
    #[default]
    Zeroes,
    /// The buffer unchanged.
    Untouched,
}

pub struct Null {
    config: Config,
    uuid: Uuid,
    physical_block_size: u32,
    size: Arc<Size>,
}

pub fn create(config: Config) -> Result<Arc<Null>, ConfigError> {
    let physical = check_blocks(
        config.block_size,
        config.physical_block_size,
        config.num_blocks,
    )?;
    Ok(Arc::new(Null {
        uuid: config.uuid.unwrap_or_else(Uuid::new_v4),
        physical_block_size: physical,
        size: Arc::new(Size::new(config.num_blocks)),
        config,
    }))
}

impl Null {
    /// [`Bdev::product_name`] of these devices.
    pub const PRODUCT: &str = "Null disk";

    /// Changes the size. The caller then calls [`crate::Registry::notify_resize`].
    pub fn resize(&self, num_blocks: u64) -> Result<(), ConfigError> {
        check_blocks(self.config.block_size, None, num_blocks)?;
        self.size.set(num_blocks);
        Ok(())
    }

    /// The configuration that recreates this device in its present state.
    pub fn config(&self) -> Config {
        Config {
            num_blocks: self.size.blocks(),
            uuid: Some(self.uuid),
            ..self.config.clone()
        }
    }
}

impl Bdev for Null {
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
        Geometry {
            block_size: self.config.block_size,
            blocks: self.size.blocks(),
            physical_block_size: self.physical_block_size,
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            unmap_zeroes: self.config.reads == Reads::Zeroes,
            immediate: true,
            is_sync: true,
            ..Limits::unlimited(QUEUE_DEPTH)
        }
    }

    fn supports(&self, op: Op) -> Support {
        match op {
            Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes | Op::Verify => {
                Support::Native
            }
            Op::Compare | Op::CompareAndWrite | Op::Copy => Support::No,
        }
    }

    fn losses(&self) -> u64 {
        self.size.cuts()
    }

    fn cuts(&self) -> u64 {
        self.size.cuts()
    }

    fn least_blocks(&self) -> u64 {
        self.size.least()
    }

    fn forget_least(&self) -> u64 {
        self.size.forget_least()
    }

    fn open(self: Arc<Self>, _pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(channel::Channel::new(&self)))
    }
}

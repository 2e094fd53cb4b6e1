//! Makes a device slower: holds every completion of a read or write for a while.
//!
//! There are two latencies per direction: one random I/O in a hundred has the `p99` latency, the
//! others the average. Both can change while I/O runs; I/O that is already held keeps its time.
//! Compares count as reads; compare-and-writes, zeroes and copies count as writes; flushes and
//! unmaps are not held.

mod channel;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_hugepages::Pool;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::device::{Bdev, Limits, OpenError};
use crate::queue::Queue;
use crate::registry::{Registry, RegistryError};
use crate::stack::{Base, derived_uuid};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub name: String,
    pub base_bdev_name: String,
    /// Microseconds, as the three below.
    pub avg_read_latency: u64,
    pub p99_read_latency: u64,
    pub avg_write_latency: u64,
    pub p99_write_latency: u64,
    /// Default: derived from the base's UUID and the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

/// Which of the four latencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Latency {
    AvgRead,
    P99Read,
    AvgWrite,
    P99Write,
}

pub struct Delay {
    config: Config,
    uuid: Uuid,
    base: Base,
    /// By [`Latency`].
    latencies_us: Arc<[AtomicU64; 4]>,
}

/// Claims the base. The caller registers the device.
pub fn create(config: Config, registry: &Registry) -> Result<Arc<Delay>, RegistryError> {
    let base = Base::claim(registry, &config.base_bdev_name, &config.name)?;
    let latencies = [
        config.avg_read_latency,
        config.p99_read_latency,
        config.avg_write_latency,
        config.p99_write_latency,
    ];
    Ok(Arc::new(Delay {
        uuid: derived_uuid(config.uuid, base.uuid(), &config.name),
        latencies_us: Arc::new(latencies.map(AtomicU64::new)),
        config,
        base,
    }))
}

impl Delay {
    pub fn update_latency(&self, which: Latency, latency_us: u64) {
        self.latencies_us[which as usize].store(latency_us, Ordering::Relaxed);
    }

    pub fn latency_us(&self, which: Latency) -> u64 {
        self.latencies_us[which as usize].load(Ordering::Relaxed)
    }

    /// The configuration that makes this device again, with its latencies as they are now.
    pub fn config(&self) -> Config {
        Config {
            avg_read_latency: self.latency_us(Latency::AvgRead),
            p99_read_latency: self.latency_us(Latency::P99Read),
            avg_write_latency: self.latency_us(Latency::AvgWrite),
            p99_write_latency: self.latency_us(Latency::P99Write),
            uuid: Some(self.uuid),
            ..self.config.clone()
        }
    }
}

impl Bdev for Delay {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn product_name(&self) -> &'static str {
        "delay"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    crate::stack::as_the_base!();

    /// The base's limits. Held I/O is kept in buffers: nothing is lent.
    fn limits(&self) -> Limits {
        self.base.limits_of_a_copy()
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(channel::Channel::new(
            &self,
            self.base.open(pool)?,
        )))
    }

    fn driver_specific(&self) -> serde_json::Value {
        let config = self.config();
        serde_json::json!({"delay": {
            "name": config.name,
            "base_bdev_name": config.base_bdev_name,
            "uuid": self.uuid(),
            "avg_read_latency": config.avg_read_latency,
            "p99_read_latency": config.p99_read_latency,
            "avg_write_latency": config.avg_write_latency,
            "p99_write_latency": config.p99_write_latency,
        }})
    }
}

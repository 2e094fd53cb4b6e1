//! The delay module: a device on a base device that delays the completions of reads and writes, for
//! tests of slow devices.
//!
//! A latency is added to the time that the base takes. There are two per direction: one random I/O
//! in a hundred has the `p99` latency, the others the average. Both can change while I/O runs; I/O
//! that is already held keeps its time. Compares and verifies count as reads; compare-and-writes,
//! write zeroes and copies count as writes; flushes and unmaps are not held.

mod channel;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_hugepages::Pool;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::device::{Bdev, Limits};
use crate::layer::ModuleQueue;
use crate::module::{MethodDoc, Single};
use crate::queue::Queue;
use crate::registry::{Registry, RegistryError};
use crate::stack::{Base, Stacked, derived_uuid};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the new bdev: 1 to 255 bytes.
    pub name: String,
    /// The bdev below, by name, alias or UUID. The delay bdev claims it.
    pub base_bdev_name: String,
    /// Latency of reads in microseconds.
    pub avg_read_latency: u64,
    /// Latency of one read in 100, in microseconds.
    pub p99_read_latency: u64,
    /// Latency of writes in microseconds.
    pub avg_write_latency: u64,
    /// Latency of one write in 100, in microseconds.
    pub p99_write_latency: u64,
    /// Default: derived from the base's UUID and the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub uuid: Option<Uuid>,
}

impl Single for Delay {
    const KIND: &'static str = "delay";
    const ABOUT: &'static str = "A slower device on top of another";
    const PRODUCT: &'static str = "delay";
    const CREATE: MethodDoc = MethodDoc {
        name: "bdev_delay_create",
        about: "Makes a slower device of another, and answers its name.",
    };
    const DELETE: MethodDoc = MethodDoc {
        name: "bdev_delay_delete",
        about: "Deletes a delay device and the devices stacked on it.",
    };
    const BASE: Option<&'static str> = Some("base_bdev_name");
    type Config = Config;
    type Created = String;
    type Error = RegistryError;

    fn name(config: &Config) -> Option<String> {
        Some(config.name.clone())
    }

    fn create(config: &mut Config, registry: &Registry) -> Result<Arc<dyn Bdev>, RegistryError> {
        let delay = create(config.clone(), registry)?;
        *config = delay.config();
        Ok(delay)
    }
}

/// Selects one of the four latencies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
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
    /// Delays in microseconds, indexed by [`Latency`].
    latencies_us: Arc<[AtomicU64; 4]>,
}

/// Creates a device and claims its base exclusively. The caller registers the device.
pub fn create(config: Config, registry: &Registry) -> Result<Arc<Delay>, RegistryError> {
    let base = Base::claim(registry, &config.base_bdev_name, [&config.name])?;
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

    /// The configuration that recreates this device, with its present latencies.
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

impl Stacked for Delay {
    fn base(&self) -> &Base {
        &self.base
    }

    fn name(&self) -> &str {
        &self.config.name
    }

    fn product_name(&self) -> &'static str {
        <Self as Single>::PRODUCT
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn limits(&self) -> Limits {
        self.base.limits_of_held_io()
    }

    fn queue(self: Arc<Self>, base: ModuleQueue, _pool: &Pool) -> Box<dyn Queue> {
        Box::new(channel::Channel::new(&self, base))
    }

    fn driver_specific(&self) -> serde_json::Value {
        serde_json::json!({"delay": self.config()})
    }
}

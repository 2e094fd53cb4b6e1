//! The fault module: a device on a base device that injects errors, delays, corruption, hangs and
//! full queues, for tests (SPDK's error bdev).
//!
//! The device has a list of [`Fault`]s, each for some operations, a range, a number of times and a
//! probability. The first fault that matches an I/O is injected. SPDK's `bdev_error_inject_error`
//! is such a list with one fault per operation ([`FaultDevice::inject_spdk`]).

mod channel;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_hugepages::Pool;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use self::rules::Rules;
pub use self::rules::{
    Action, Fault, FaultError, Injected, SpdkErrorType, SpdkInjection, SpdkIoType,
};
use crate::device::{Bdev, Limits};
use crate::layer::ModuleQueue;
use crate::module::{MethodDoc, Single};
use crate::queue::Queue;
use crate::registry::{Registry, RegistryError};
use crate::stack::{Base, Stacked, derived_uuid};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The base device; the new device is named `EE_` plus this name.
    #[cfg_attr(feature = "clap", arg(value_name = "BASE"))]
    pub base_name: String,
    /// Default: derived from the base's UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    #[cfg_attr(feature = "clap", arg(long))]
    pub uuid: Option<Uuid>,
}

impl Single for FaultDevice {
    const KIND: &'static str = "fault";
    const ABOUT: &'static str =
        "A device on top of another that fails on demand; its name is EE_ and the other's name";
    const PRODUCT: &'static str = "Error Injection Disk";
    const CREATE: MethodDoc = MethodDoc {
        name: "bdev_error_create",
        about: "Makes a fault bdev, into which errors can be injected, called EE_ and its base's name.",
    };
    const DELETE: MethodDoc = MethodDoc {
        name: "bdev_error_delete",
        about: "Deletes a fault bdev and the devices stacked on it.",
    };
    const BASE: Option<&'static str> = Some("base_name");
    const UNDECODABLE: i32 = -32602;
    type Config = Config;
    type Created = bool;
    type Error = RegistryError;

    fn name(config: &Config) -> Option<String> {
        Some(config.device_name())
    }

    fn create(config: &mut Config, registry: &Registry) -> Result<Arc<dyn Bdev>, RegistryError> {
        let device = create(config.clone(), registry)?;
        *config = device.config();
        Ok(device)
    }
}

impl Config {
    /// The name of the device on the base.
    fn device_name(&self) -> String {
        format!("EE_{}", self.base_name)
    }
}

pub struct FaultDevice {
    name: String,
    uuid: Uuid,
    base: Base,
    rules: Rules,
    /// Incremented to continue hanging I/O.
    resumes: AtomicU64,
}

/// Creates a device and claims its base exclusively. The caller registers the device.
pub fn create(config: Config, registry: &Registry) -> Result<Arc<FaultDevice>, RegistryError> {
    let name = config.device_name();
    let base = Base::claim(registry, &config.base_name, [&name])?;
    Ok(Arc::new(FaultDevice {
        uuid: derived_uuid(config.uuid, base.uuid(), &name),
        rules: Rules::default(),
        resumes: AtomicU64::new(0),
        name,
        base,
    }))
}

impl FaultDevice {
    /// Appends a fault to the list, which holds at most 256. Returns its id.
    pub fn inject(&self, fault: Fault) -> Result<u64, FaultError> {
        self.rules.add(fault)
    }

    /// Removes a fault. Returns false if no fault has this id.
    pub fn remove(&self, id: u64) -> bool {
        self.rules.remove(id)
    }

    /// Removes all faults. Hanging I/O keeps hanging.
    pub fn clear(&self) {
        self.rules.clear();
    }

    /// The faults, and the number of times each was applied.
    pub fn injected(&self) -> Vec<Injected> {
        self.rules.list()
    }

    /// Implements `bdev_error_inject_error`.
    pub fn inject_spdk(&self, injection: &SpdkInjection) -> Result<(), FaultError> {
        self.rules.inject_spdk(injection)
    }

    /// Continues all hanging I/O on the base.
    pub fn resume_pending(&self) {
        self.resumes.fetch_add(1, Ordering::Relaxed);
    }

    /// The configuration that recreates this device, without faults.
    pub fn config(&self) -> Config {
        Config {
            base_name: self.base.name().to_owned(),
            uuid: Some(self.uuid),
        }
    }
}

impl Stacked for FaultDevice {
    fn base(&self) -> &Base {
        &self.base
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        <Self as Single>::PRODUCT
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Faults change read data and delay I/O, so the device has no zero-copy reads and executes no
    /// I/O synchronously.
    fn limits(&self) -> Limits {
        self.base.limits_of_held_io()
    }

    fn queue(self: Arc<Self>, base: ModuleQueue, pool: &Pool) -> Box<dyn Queue> {
        Box::new(channel::Channel::new(self, base, pool.clone()))
    }

    fn driver_specific(&self) -> serde_json::Value {
        serde_json::json!({"error_disk": {"base_bdev": self.base.name()}})
    }
}

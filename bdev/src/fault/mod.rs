//! Makes a device fail on demand while I/O runs: errors, delays, corruption, hangs, back-pressure.
//!
//! The device has a list of [`Fault`]s, each for some operations, a range, a number of times and a
//! probability. The first fault that applies to an I/O is executed. SPDK's
//! `bdev_error_inject_error` is such a list with one fault per operation
//! ([`FaultDevice::inject_spdk`]).

mod channel;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_hugepages::Pool;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use self::rules::Rules;
pub use self::rules::{
    Action, Fault, FaultError, Injected, SpdkErrorType, SpdkInjection, SpdkIoType,
};
use crate::device::{Bdev, Limits, OpenError};
use crate::queue::Queue;
use crate::registry::{Registry, RegistryError};
use crate::stack::{Base, derived_uuid};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The device below; this one is called `EE_` and that name.
    pub base_name: String,
    /// Default: derived from the base's UUID and the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

pub struct FaultDevice {
    name: String,
    uuid: Uuid,
    base: Base,
    rules: Rules,
    /// Raised to let what hangs go on.
    resumes: AtomicU64,
}

/// Claims the base. The caller registers the device.
pub fn create(config: Config, registry: &Registry) -> Result<Arc<FaultDevice>, RegistryError> {
    let name = format!("EE_{}", config.base_name);
    let base = Base::claim(registry, &config.base_name, &name)?;
    Ok(Arc::new(FaultDevice {
        uuid: derived_uuid(config.uuid, base.uuid(), &name),
        rules: Rules::default(),
        resumes: AtomicU64::new(0),
        name,
        base,
    }))
}

impl FaultDevice {
    /// Adds a fault behind those there are. Answers its number.
    pub fn inject(&self, fault: Fault) -> Result<u64, FaultError> {
        self.rules.add(fault)
    }

    /// Ends a fault. `false`: there is none of that number.
    pub fn remove(&self, id: u64) -> bool {
        self.rules.remove(id)
    }

    /// Ends all faults. What hangs goes on hanging.
    pub fn clear(&self) {
        self.rules.clear();
    }

    /// The faults, and how often each has struck.
    pub fn injected(&self) -> Vec<Injected> {
        self.rules.list()
    }

    /// `bdev_error_inject_error`.
    pub fn inject_spdk(&self, injection: &SpdkInjection) -> Result<(), FaultError> {
        self.rules.inject_spdk(injection)
    }

    /// Lets everything that hangs go on to the base.
    pub fn resume_pending(&self) {
        self.resumes.fetch_add(1, Ordering::Relaxed);
    }

    /// The configuration that makes this device again, without faults.
    pub fn config(&self) -> Config {
        Config {
            base_name: self.base.name().to_owned(),
            uuid: Some(self.uuid),
        }
    }
}

impl Bdev for FaultDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn product_name(&self) -> &'static str {
        "Error Injection Disk"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    crate::stack::as_the_base!();

    /// The base's limits. Faults change data that was read: nothing is lent.
    fn limits(&self) -> Limits {
        self.base.limits_of_a_copy()
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        let base = self.base.open(pool)?;
        Ok(Box::new(channel::Channel::new(self, base, pool.clone())))
    }

    fn driver_specific(&self) -> serde_json::Value {
        serde_json::json!({"error_disk": {"base_bdev": self.base.name()}})
    }
}

//! Hands everything to the device below: the smallest stacked module, and the pattern for others.

mod channel;
#[cfg(test)]
mod tests;

use std::sync::Arc;

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
    /// Default: derived from the base's UUID and the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

pub struct Passthru {
    config: Config,
    uuid: Uuid,
    base: Base,
}

/// Claims the base. The caller registers the device.
pub fn create(config: Config, registry: &Registry) -> Result<Arc<Passthru>, RegistryError> {
    let base = Base::claim(registry, &config.base_bdev_name, &config.name)?;
    let uuid = derived_uuid(config.uuid, base.uuid(), &config.name);
    Ok(Arc::new(Passthru { config, uuid, base }))
}

impl Passthru {
    /// The configuration that makes this device again.
    pub fn config(&self) -> Config {
        Config {
            uuid: Some(self.uuid),
            ..self.config.clone()
        }
    }
}

impl Bdev for Passthru {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn product_name(&self) -> &'static str {
        "passthru"
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    crate::stack::as_the_base!();

    fn limits(&self) -> Limits {
        self.base.limits()
    }

    fn open(self: Arc<Self>, pool: &Pool) -> Result<Box<dyn Queue>, OpenError> {
        Ok(Box::new(channel::Channel::new(self.base.open(pool)?)))
    }

    fn reserves(&self) -> bool {
        self.base.reserves()
    }

    fn driver_specific(&self) -> serde_json::Value {
        let (name, base) = (self.name(), self.base.name());
        serde_json::json!({"passthru": {"name": name, "base_bdev_name": base}})
    }
}

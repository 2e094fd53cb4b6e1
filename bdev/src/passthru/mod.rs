//! The passthru module: a device that passes all I/O to its base device. It is the smallest stacked
//! module, and a template for others.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use nacre_hugepages::Pool;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::device::Bdev;
use crate::layer::ModuleQueue;
use crate::module::{MethodDoc, Single};
use crate::queue::Queue;
use crate::registry::{Registry, RegistryError};
use crate::stack::{Base, Stacked, derived_uuid};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of the new bdev: 1 to 255 bytes.
    #[cfg_attr(feature = "clap", arg(help = "Name of the new bdev"))]
    pub name: String,
    /// The bdev below, by name, alias or UUID. The passthru bdev claims it.
    #[cfg_attr(
        feature = "clap",
        arg(value_name = "BASE", help = "Bdev to which I/O is passed")
    )]
    pub base_bdev_name: String,
    /// Default: derived from the base's UUID and the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    #[cfg_attr(feature = "clap", arg(long))]
    pub uuid: Option<Uuid>,
}

impl Single for Passthru {
    const KIND: &'static str = "passthru";
    const ABOUT: &'static str = "A device that passes all I/O to another";
    const PRODUCT: &'static str = "passthru";
    const CREATE: MethodDoc = MethodDoc {
        name: "bdev_passthru_create",
        about: "Makes a device that hands everything to another, and answers its name.",
    };
    const DELETE: MethodDoc = MethodDoc {
        name: "bdev_passthru_delete",
        about: "Deletes a passthru device and the devices stacked on it.",
    };
    const BASE: Option<&'static str> = Some("base_bdev_name");
    type Config = Config;
    type Created = String;
    type Error = RegistryError;

    fn name(config: &Config) -> Option<String> {
        Some(config.name.clone())
    }

    fn create(config: &mut Config, registry: &Registry) -> Result<Arc<dyn Bdev>, RegistryError> {
        let device = create(config.clone(), registry)?;
        *config = device.config();
        Ok(device)
    }
}

pub struct Passthru {
    config: Config,
    uuid: Uuid,
    base: Base,
}

/// Creates a device and claims its base exclusively. The caller registers the device.
pub fn create(config: Config, registry: &Registry) -> Result<Arc<Passthru>, RegistryError> {
    let base = Base::claim(registry, &config.base_bdev_name, [&config.name])?;
    let uuid = derived_uuid(config.uuid, base.uuid(), &config.name);
    Ok(Arc::new(Passthru { config, uuid, base }))
}

impl Passthru {
    /// The configuration that recreates this device.
    pub fn config(&self) -> Config {
        Config {
            uuid: Some(self.uuid),
            ..self.config.clone()
        }
    }
}

impl Stacked for Passthru {
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

    fn queue(self: Arc<Self>, base: ModuleQueue, _pool: &Pool) -> Box<dyn Queue> {
        Box::new(base)
    }

    fn reserves(&self) -> bool {
        self.base.module().reserves()
    }

    fn driver_specific(&self) -> serde_json::Value {
        let (name, base) = (&self.config.name, self.base.name());
        serde_json::json!({"passthru": {"name": name, "base_bdev_name": base}})
    }
}

//! The trait [`Module`]: the management side of a kind of block device.
//!
//! ```text
//!   Module ──> two RPC methods: CREATE and DELETE
//!          ├─> `nacre bdev create KIND`, `nacre bdev delete`
//!          ├─> [[bdev]] with type = "KIND" in the configuration file
//!          └─> the stored record, and the reference of all of these
//! ```
//!
//! A module declares its names and its configuration with this trait. The daemon has one table of
//! modules and derives its methods and commands from it.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::device::Bdev;
use crate::registry::{Registry, RegistryError};

/// An RPC method of a module.
#[derive(Debug, Clone, Copy)]
pub struct MethodDoc {
    pub name: &'static str,
    /// One sentence for the reference.
    pub about: &'static str,
}

/// A kind of device that one call creates, usually one device per call.
pub trait Module: 'static {
    /// The word in commands and in the configuration file.
    const KIND: &'static str;
    /// Description for the help of the command.
    const ABOUT: &'static str;
    /// [`Bdev::product_name`] of its devices.
    const PRODUCT: &'static str;
    const CREATE: MethodDoc;
    const DELETE: MethodDoc;
    /// The field of the configuration that names the base device, if it has one.
    const BASE: Option<&'static str> = None;
    /// The field of the delete method that names a device, and the JSON pointer to its value in
    /// the device's entry of `bdev_get_bdevs`. Devices with the same value are deleted together.
    const DELETED_BY: (&'static str, &'static str) = ("name", "/name");
    /// SPDK's JSON-RPC code for parameters of the wrong form: -32602 in some modules.
    const UNDECODABLE: i32 = -32603;
    /// SPDK's code and message if the delete method finds no device, where it is not ENODEV.
    const NOT_FOUND: Option<(i32, &'static str)> = None;
    /// The parameters of the create method.
    type Config: Serialize + DeserializeOwned + JsonSchema;
    /// The reply of the create method.
    type Created: Serialize + JsonSchema;
    /// The parameters of the delete method.
    type Named: DeserializeOwned + JsonSchema;
    type Error;

    /// The names of the devices that the configuration creates. Empty if the module chooses the
    /// name. The first name identifies the stored record.
    fn names(config: &Self::Config) -> Vec<String>;

    /// Refuses parameters that are invalid for every base.
    fn check(config: &Self::Config) -> Result<(), Self::Error> {
        let _ = config;
        Ok(())
    }

    /// Creates the devices; the caller registers them. Writes each default value that it chose to
    /// `config`, so that the stored call creates the same devices again.
    fn create(
        config: &mut Self::Config,
        registry: &Registry,
    ) -> Result<Vec<Arc<dyn Bdev>>, Self::Error>;

    fn created(names: Vec<String>) -> Self::Created;

    /// The reply if the base does not exist yet: the devices are made when it appears.
    fn deferred(names: Vec<String>) -> Self::Created {
        Self::created(names)
    }

    /// The name of the device to delete, or of the first of several.
    fn named(named: Self::Named) -> String;

    /// SPDK's message for a refused call (with code -32602), where it is not the errno's text.
    fn refusal(config: &Self::Config, errno_text: &str) -> Option<String> {
        let _ = (config, errno_text);
        None
    }
}

/// A module whose create method creates one device.
pub trait Single: 'static {
    // As in [`Module`].
    const KIND: &'static str;
    const ABOUT: &'static str;
    const PRODUCT: &'static str;
    const CREATE: MethodDoc;
    const DELETE: MethodDoc;
    const BASE: Option<&'static str> = None;
    const UNDECODABLE: i32 = -32603;
    type Config: Serialize + DeserializeOwned + JsonSchema;
    type Created: Created;
    type Error;

    /// `None`: the module chooses it.
    fn name(config: &Self::Config) -> Option<String>;

    /// Creates the device and completes `config`, like [`Module::create`].
    fn create(config: &mut Self::Config, registry: &Registry)
    -> Result<Arc<dyn Bdev>, Self::Error>;
}

impl<T: Single> Module for T {
    const KIND: &'static str = <T as Single>::KIND;
    const ABOUT: &'static str = <T as Single>::ABOUT;
    const PRODUCT: &'static str = <T as Single>::PRODUCT;
    const CREATE: MethodDoc = <T as Single>::CREATE;
    const DELETE: MethodDoc = <T as Single>::DELETE;
    const BASE: Option<&'static str> = <T as Single>::BASE;
    const UNDECODABLE: i32 = <T as Single>::UNDECODABLE;
    type Config = <T as Single>::Config;
    type Created = <T as Single>::Created;
    type Named = ByName;
    type Error = <T as Single>::Error;

    fn names(config: &<T as Single>::Config) -> Vec<String> {
        <T as Single>::name(config).into_iter().collect()
    }

    fn create(
        config: &mut <T as Single>::Config,
        registry: &Registry,
    ) -> Result<Vec<Arc<dyn Bdev>>, <T as Single>::Error> {
        <T as Single>::create(config, registry).map(|device| vec![device])
    }

    fn created(names: Vec<String>) -> <T as Single>::Created {
        <<T as Single>::Created as Created>::of(names.into_iter().next().unwrap_or_default())
    }

    fn named(named: ByName) -> String {
        named.name
    }
}

/// The reply of a create method for one device: its name, or SPDK's `true`.
pub trait Created: Serialize + JsonSchema {
    fn of(name: String) -> Self;
}

impl Created for String {
    fn of(name: String) -> Self {
        name
    }
}

impl Created for bool {
    fn of(_name: String) -> Self {
        true
    }
}

/// Names a device, in the parameters of most delete methods.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ByName {
    /// The bdev: its name, alias or UUID.
    pub name: String,
}

/// The error of creating a stacked device.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// A parameter is invalid for this base.
    #[error("{cause}")]
    Parameter {
        field: &'static str,
        cause: String,
        remedy: &'static str,
    },
}

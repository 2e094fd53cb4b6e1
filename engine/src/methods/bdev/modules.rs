//! The table of block device modules. From it come the RPC methods that create and delete devices,
//! `nacre bdev create` and `delete`, `[[bdev]]` in the configuration file, and what a record says
//! about its devices.

use std::any::Any;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use clap::FromArgMatches;
use nacre_bdev::delay::Delay;
use nacre_bdev::fault::FaultDevice;
use nacre_bdev::module::CreateError;
use nacre_bdev::passthru::Passthru;
use nacre_bdev::split::Part;
use nacre_bdev::{Bdev, Module, RegistryError};
use serde_json::Value;

use super::{file, malloc, null};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::{Errno, INVALID_PARAMS};
use crate::rpc::{Method, Order, Registry, RpcError};
use crate::services::deferred;
use crate::services::engine::Engine;
use crate::values::read::{self, Texts};

/// All modules that management can create devices of.
pub const MODULES: &[Entry] = &[
    MALLOC,
    NULL,
    AIO,
    FILE,
    DELAY,
    derived::<FaultDevice>(),
    derived::<Passthru>(),
    derived::<Part>(),
];

pub const MALLOC: Entry = entry::<malloc::RamDisk>();
pub const NULL: Entry = null::MODULE;
pub const AIO: Entry = file::AIO;
pub const DELAY: Entry = declared::<Delay>();
/// What `type = "file"` in the configuration file makes.
pub const FILE: Entry = file::URING;

/// The create and delete methods of SPDK's modules that are missing here, and why.
pub const NOT_OFFERED: (&str, &[&str]) = (
    "There are no logical volumes: a namespace is a block device, a part of one, or a replicated volume.",
    &[
        "bdev_lvol_check_shallow_copy",
        "bdev_lvol_clone",
        "bdev_lvol_clone_bdev",
        "bdev_lvol_create",
        "bdev_lvol_create_lvstore",
        "bdev_lvol_decouple_parent",
        "bdev_lvol_delete",
        "bdev_lvol_delete_lvstore",
        "bdev_lvol_get_lvols",
        "bdev_lvol_get_lvstores",
        "bdev_lvol_grow_lvstore",
        "bdev_lvol_inflate",
        "bdev_lvol_rename",
        "bdev_lvol_rename_lvstore",
        "bdev_lvol_resize",
        "bdev_lvol_set_parent",
        "bdev_lvol_set_read_only",
        "bdev_lvol_snapshot",
        "bdev_lvol_start_shallow_copy",
    ],
);

/// A module, with its types erased.
#[derive(Clone, Copy)]
pub struct Entry {
    pub kind: &'static str,
    pub product: &'static str,
    pub create: &'static str,
    pub delete: &'static str,
    /// See [`Module::DELETED_BY`].
    pub deleted_by: (&'static str, &'static str),
    pub rescan: Option<&'static str>,
    pub resize: Option<&'static str>,
    /// Path in its `driver_specific` to the file name.
    pub filename: Option<&'static str>,
    /// The parameter that names the base device.
    pub base: Option<&'static str>,
    /// The devices that the create method makes with these parameters.
    pub names: fn(&Value) -> Vec<String>,
    pub register: fn(&mut Registry<Engine>),
    /// If the create method's parameters are the keys of a `[[bdev]]`.
    pub declared: Option<Declaration>,
    /// If the create method's parameters are the arguments of `nacre bdev create`.
    pub command: Option<Command>,
}

/// The keys of a `[[bdev]]`.
#[derive(Clone, Copy)]
pub struct Declaration {
    pub schema: fn() -> schemars::Schema,
    /// Finds the first wrong parameter.
    pub check: fn(&Value) -> Option<(read::Place, read::ValueError)>,
}

/// A subcommand of `nacre bdev create`.
#[derive(Clone, Copy)]
pub struct Command {
    pub about: &'static str,
    pub arguments: fn(clap::Command) -> clap::Command,
    /// The parameters of the create method.
    pub params: fn(&clap::ArgMatches) -> Result<Value, clap::Error>,
}

pub const fn entry<M: Module>() -> Entry
where
    M::Error: Refusal,
{
    Entry {
        kind: M::KIND,
        product: M::PRODUCT,
        create: M::CREATE.name,
        delete: M::DELETE.name,
        deleted_by: M::DELETED_BY,
        rescan: None,
        resize: None,
        filename: None,
        base: M::BASE,
        names: |params| {
            let config = serde_json::from_value::<M::Config>(params.clone());
            config.map_or(Vec::new(), |config| M::names(&config))
        },
        register: |registry| {
            registry.add::<Create<M>>().add::<Delete<M>>();
        },
        declared: None,
        command: None,
    }
}

/// A module whose configuration is also a `[[bdev]]`.
const fn declared<M: Module>() -> Entry
where
    M::Error: Refusal,
{
    Entry {
        declared: Some(Declaration {
            schema: || schemars::schema_for!(M::Config),
            check: |params| read::first::<M::Config>(params, Texts::Read).err(),
        }),
        ..entry::<M>()
    }
}

/// A module of which everything derives from its configuration.
const fn derived<M: Module<Config: clap::Args>>() -> Entry
where
    M::Error: Refusal,
{
    Entry {
        command: Some(Command {
            about: M::ABOUT,
            arguments: <M::Config as clap::Args>::augment_args,
            params: |matches| {
                let config = M::Config::from_arg_matches(matches)?;
                Ok(serde_json::to_value(config).expect("a configuration is plain data"))
            },
        }),
        ..declared::<M>()
    }
}

pub fn by_kind(kind: &str) -> Option<&'static Entry> {
    MODULES.iter().find(|module| module.kind == kind)
}

/// The module that a create method belongs to.
pub fn by_create(method: &str) -> Option<&'static Entry> {
    MODULES.iter().find(|module| module.create == method)
}

/// The devices that a create call makes.
pub fn names(method: &str, params: &Value) -> Vec<String> {
    by_create(method).map_or(Vec::new(), |module| (module.names)(params))
}

/// The base device of a create call.
pub fn base<'a>(method: &str, params: &'a Value) -> Option<&'a str> {
    params.get(by_create(method)?.base?)?.as_str()
}

/// As [`base`], to replace it.
pub fn base_mut<'a>(method: &str, params: &'a mut Value) -> Option<&'a mut Value> {
    params.get_mut(by_create(method)?.base?)
}

/// The module's own type of a device; `None` if it is of another module.
pub fn device<T: Bdev>(bdev: &Arc<dyn Bdev>) -> Option<Arc<T>> {
    let bdev: Arc<dyn Any + Send + Sync> = Arc::clone(bdev) as _;
    bdev.downcast::<T>().ok()
}

/// As [`device`], by name, alias or UUID.
pub fn find<T: Bdev>(engine: &Engine, name: &str) -> Option<Arc<T>> {
    device::<T>(engine.plane().ok()?.bdevs.lookup(name)?.module())
}

/// `bdev_…_create` of a module.
struct Create<M>(PhantomData<M>);

impl<M: Module> Method<Engine> for Create<M>
where
    M::Error: Refusal,
{
    const NAME: &'static str = M::CREATE.name;
    const UNDECODABLE: i32 = M::UNDECODABLE;
    const ABOUT: &'static str = M::CREATE.about;
    const ORDER: Order = Order::Exclusive;
    type Params = M::Config;
    type Reply = M::Created;

    async fn apply(mut config: M::Config, engine: Rc<Engine>) -> Result<M::Created, RpcError> {
        create::<M>(&mut config, &engine).await.map_err(|refused| {
            let message = M::refusal(&config, &refused.message);
            match message {
                Some(message) => RpcError {
                    code: INVALID_PARAMS,
                    message,
                    ..refused
                },
                None => refused,
            }
        })
    }
}

async fn create<M: Module>(config: &mut M::Config, engine: &Engine) -> Result<M::Created, RpcError>
where
    M::Error: Refusal,
{
    let record =
        |config: &M::Config| serde_json::to_value(config).expect("a configuration is plain data");
    M::check(config).or_refuse()?;
    let names = M::names(config);
    for name in &names {
        super::refuse_taken(engine, name)?;
    }
    let registry = &engine.plane()?.bdevs;
    let params = record(config);
    // As SPDK, the call succeeds before the base exists.
    if let Some(base) = base(M::CREATE.name, &params)
        && let Err(missing @ RegistryError::NotFound { .. }) = registry.get(base)
    {
        let name = names.first().cloned().unwrap_or_default();
        deferred::wait_for_base(engine, &name, M::CREATE.name, params, missing.refusal()).await?;
        return Ok(M::deferred(names));
    }
    let devices = M::create(config, registry).or_refuse()?;
    let names = super::create(engine, devices, M::CREATE.name, record(config)).await?;
    Ok(M::created(names))
}

/// `bdev_…_delete` of a module.
struct Delete<M>(PhantomData<M>);

impl<M: Module> Method<Engine> for Delete<M>
where
    M::Error: Refusal,
{
    const NAME: &'static str = M::DELETE.name;
    const UNDECODABLE: i32 = M::UNDECODABLE;
    const ABOUT: &'static str = M::DELETE.about;
    const ORDER: Order = Order::Exclusive;
    type Params = M::Named;
    type Reply = bool;

    async fn apply(named: M::Named, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let name = M::named(named);
        let deleted = super::delete(&engine, &name, M::PRODUCT).await;
        deleted.map_err(|refused| match M::NOT_FOUND {
            Some((code, message)) if refused.code == -(Errno::ENODEV as i32) => RpcError {
                code,
                message: message.to_owned(),
                ..refused.field(M::DELETED_BY.0)
            },
            _ => refused,
        })
    }
}

impl Refusal for CreateError {
    fn refusal(self) -> RpcError {
        match self {
            CreateError::Registry(error) => error.refusal(),
            CreateError::Parameter {
                field,
                cause,
                remedy,
            } => RpcError::errno(Errno::EINVAL, cause)
                .field(field)
                .remedy(remedy),
        }
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Entry").field(&self.kind).finish()
    }
}

#[cfg(test)]
mod split_tests;

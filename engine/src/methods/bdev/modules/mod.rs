//! The RPC methods that create and delete devices, one pair per bdev module.

use std::marker::PhantomData;
use std::rc::Rc;

use nacre_bdev::{Module, RegistryError};

use crate::bdev_modules::{self, ModuleEntry, Visitor, base};
use crate::refusal::{OrRefuse, Refusal};
use crate::rpc::error::{Errno, INVALID_PARAMS};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::deferred;

pub(super) fn register(registry: &mut Registry<Engine>) {
    bdev_modules::visit(&mut Methods(registry));
}

struct Methods<'a>(&'a mut Registry<Engine>);

impl Visitor for Methods<'_> {
    fn module<M: Module>(&mut self, _entry: ModuleEntry)
    where
        M::Error: Refusal,
    {
        self.0.add::<CreateModule<M>>().add::<DeleteModule<M>>();
    }
}

/// `bdev_…_create` of a module.
pub struct CreateModule<M>(PhantomData<M>);

impl<M: Module> Method<Engine> for CreateModule<M>
where
    M::Error: Refusal,
{
    const NAME: &'static str = M::CREATE.name;
    const UNDECODABLE: i32 = M::UNDECODABLE;
    const ABOUT: &'static str = M::CREATE.about;
    const CLASS: Class = Class::Admin;
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
pub struct DeleteModule<M>(PhantomData<M>);

impl<M: Module> Method<Engine> for DeleteModule<M>
where
    M::Error: Refusal,
{
    const NAME: &'static str = M::DELETE.name;
    const UNDECODABLE: i32 = M::UNDECODABLE;
    const ABOUT: &'static str = M::DELETE.about;
    const CLASS: Class = Class::Admin;
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

#[cfg(test)]
mod tests;

//! `bdev_delay_*`, `bdev_error_*`, `bdev_passthru_*`: devices stacked on others.

use std::rc::Rc;

use nacre_bdev::{RegistryError, delay, fault, passthru};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::malloc::NameParams;
use super::{module_of, no_device_of_kind};
use crate::devices::Module;
use crate::engine::Engine;
use crate::rpc::error::{Errno, INTERNAL_ERROR, INVALID_PARAMS};
use crate::rpc::{Method, Order, Registry, RpcError};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<DelayCreate>()
        .add::<DelayDelete>()
        .add::<DelayUpdateLatency>()
        .add::<ErrorCreate>()
        .add::<ErrorDelete>()
        .add::<ErrorInject>()
        .add::<ErrorResume>()
        .add::<PassthruCreate>()
        .add::<PassthruDelete>();
}

/// Replies with the name as SPDK does; the device is created when its base appears.
async fn defer(
    engine: &Engine,
    method: &str,
    name: String,
    config: &impl Serialize,
    missing: RegistryError,
) -> Result<String, RpcError> {
    let params = serde_json::to_value(config).expect("a configuration is plain data");
    crate::deferred::wait_for_base(engine, &name, method, params, missing.into()).await?;
    Ok(name)
}

struct DelayCreate;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DelayParams {
    name: String,
    base_bdev_name: String,
    /// Microseconds, like the other three.
    avg_read_latency: u64,
    p99_read_latency: u64,
    avg_write_latency: u64,
    p99_write_latency: u64,
    /// Default: derived from the base's UUID and the name.
    #[schemars(with = "Option<String>")]
    uuid: Option<Uuid>,
}

impl Method<Engine> for DelayCreate {
    const NAME: &'static str = "bdev_delay_create";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a slower device of another, and answers its name.";
    const ORDER: Order = Order::Exclusive;
    type Params = DelayParams;
    type Reply = String;

    async fn apply(params: DelayParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        super::refuse_taken(&engine, &params.name)?;
        let config = delay::Config {
            name: params.name,
            base_bdev_name: params.base_bdev_name,
            avg_read_latency: params.avg_read_latency,
            p99_read_latency: params.p99_read_latency,
            avg_write_latency: params.avg_write_latency,
            p99_write_latency: params.p99_write_latency,
            uuid: params.uuid,
        };
        let bdev = match delay::create(config.clone(), &engine.plane()?.bdevs) {
            Err(missing @ RegistryError::NotFound { .. }) => {
                return defer(
                    &engine,
                    DelayCreate::NAME,
                    config.name.clone(),
                    &config,
                    missing,
                )
                .await;
            }
            made => made?,
        };
        let record = serde_json::to_value(bdev.config()).expect("a configuration is plain data");
        super::create(&engine, Module::Delay(bdev), DelayCreate::NAME, record).await
    }
}

struct DelayDelete;

impl Method<Engine> for DelayDelete {
    const NAME: &'static str = "bdev_delay_delete";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Deletes a delay device and the devices stacked on it.";
    const ORDER: Order = Order::Exclusive;
    type Params = NameParams;
    type Reply = bool;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::delete(&engine, &params.name, |m| matches!(m, Module::Delay(_))).await
    }
}

struct DelayUpdateLatency;

#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LatencyType {
    AvgRead,
    P99Read,
    AvgWrite,
    P99Write,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpdateLatencyParams {
    delay_bdev_name: String,
    latency_type: LatencyType,
    latency_us: u64,
}

impl Method<Engine> for DelayUpdateLatency {
    const NAME: &'static str = "bdev_delay_update_latency";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Changes one latency of a delay device.";
    const ORDER: Order = Order::Exclusive;
    type Params = UpdateLatencyParams;
    type Reply = bool;

    async fn apply(params: UpdateLatencyParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let which = match params.latency_type {
            LatencyType::AvgRead => delay::Latency::AvgRead,
            LatencyType::P99Read => delay::Latency::P99Read,
            LatencyType::AvgWrite => delay::Latency::AvgWrite,
            LatencyType::P99Write => delay::Latency::P99Write,
        };
        let Some(Module::Delay(bdev)) = module_of(&engine, &params.delay_bdev_name) else {
            let (name, maker) = (&params.delay_bdev_name, DelayCreate::NAME);
            let refused = no_device_of_kind(&engine, name, "a delay device", maker);
            return Err(RpcError {
                code: INVALID_PARAMS,
                message: "The requested bdev does not exist.".into(),
                ..refused.field("delay_bdev_name")
            });
        };
        let before = bdev.latency_us(which);
        bdev.update_latency(which, params.latency_us);
        let record = serde_json::to_value(bdev.config()).expect("a configuration is plain data");
        let stored = super::update(&engine, nacre_bdev::Bdev::name(&*bdev), record).await;
        stored.inspect_err(|_| bdev.update_latency(which, before))?;
        Ok(true)
    }
}

struct ErrorCreate;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ErrorCreateParams {
    /// The base device; the new device is named `EE_` plus this name.
    base_name: String,
    /// Default: derived from the base's UUID.
    #[schemars(with = "Option<String>")]
    uuid: Option<Uuid>,
}

impl Method<Engine> for ErrorCreate {
    const NAME: &'static str = "bdev_error_create";
    const ABOUT: &'static str =
        "Makes a device into which errors can be injected, called EE_ and its base's name.";
    const ORDER: Order = Order::Exclusive;
    type Params = ErrorCreateParams;
    type Reply = bool;

    async fn apply(params: ErrorCreateParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::refuse_taken(&engine, &format!("EE_{}", params.base_name))?;
        let config = fault::Config {
            base_name: params.base_name,
            uuid: params.uuid,
        };
        let bdev = match fault::create(config.clone(), &engine.plane()?.bdevs) {
            Err(missing @ RegistryError::NotFound { .. }) => {
                let name = format!("EE_{}", config.base_name);
                let deferred = defer(&engine, ErrorCreate::NAME, name, &config, missing).await;
                return deferred.map(|_| true);
            }
            made => made?,
        };
        let record = serde_json::to_value(bdev.config()).expect("a configuration is plain data");
        super::create(&engine, Module::Fault(bdev), ErrorCreate::NAME, record)
            .await
            .map(|_| true)
    }
}

struct ErrorDelete;

impl Method<Engine> for ErrorDelete {
    const NAME: &'static str = "bdev_error_delete";
    const ABOUT: &'static str = "Deletes an error device and the devices stacked on it.";
    const ORDER: Order = Order::Exclusive;
    type Params = NameParams;
    type Reply = bool;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::delete(&engine, &params.name, |m| matches!(m, Module::Fault(_))).await
    }
}

/// Error for a device without faults. Hints at the stacked error device `EE_<name>` if it exists.
fn no_error_device(engine: &Engine, name: &str) -> RpcError {
    let refused = no_device_of_kind(engine, name, "an error device", ErrorCreate::NAME);
    let above = format!("EE_{name}");
    match engine.devices.module(&above) {
        Some(Module::Fault(_)) => refused.remedy(format!("the error device on it is \"{above}\"")),
        _ => refused,
    }
}

struct ErrorInject;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum IoType {
    /// Removes all errors.
    Clear,
    Read,
    Write,
    Unmap,
    Flush,
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ErrorType {
    Failure,
    /// Hangs until `bdev_error_resume_pending`.
    Pending,
    CorruptData,
    Nomem,
    NvmeFailure,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct InjectParams {
    name: String,
    io_type: IoType,
    error_type: ErrorType,
    /// Number of I/Os to fail.
    #[serde(default = "once")]
    num: u32,
    /// Affects only I/Os that find this many in flight.
    #[serde(default)]
    queue_depth: u64,
    #[serde(default)]
    corrupt_offset: u64,
    /// XOR mask for the byte; not 0.
    #[serde(default)]
    corrupt_value: u8,
    #[serde(default)]
    nvme_sct: u32,
    #[serde(default)]
    nvme_sc: u32,
}

fn once() -> u32 {
    1
}

impl Method<Engine> for ErrorInject {
    const NAME: &'static str = "bdev_error_inject_error";
    const ABOUT: &'static str = "Injects errors into an error device. They end with the daemon.";
    const ORDER: Order = Order::Exclusive;
    type Params = InjectParams;
    type Reply = bool;

    async fn apply(params: InjectParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let nvme = params.nvme_sct != 0 || params.nvme_sc != 0;
        if nvme != (params.error_type == ErrorType::NvmeFailure) {
            let mut refused = RpcError::errno(
                Errno::EINVAL,
                "nvme_sct and nvme_sc go with error_type nvme_failure, and only with it",
            )
            .field("error_type");
            refused.message =
                "nvme_sct or nvme_sc should be specified for NVMe error injection".into();
            return Err(refused);
        }
        let byte = |field, value: u32| {
            u8::try_from(value).map_err(|_| {
                RpcError::errno(Errno::EINVAL, format!("{value} is more than 255")).field(field)
            })
        };
        let injection = fault::SpdkInjection {
            io_type: match params.io_type {
                IoType::Clear => fault::SpdkIoType::Clear,
                IoType::Read => fault::SpdkIoType::Read,
                IoType::Write => fault::SpdkIoType::Write,
                IoType::Unmap => fault::SpdkIoType::Unmap,
                IoType::Flush => fault::SpdkIoType::Flush,
                IoType::All => fault::SpdkIoType::All,
            },
            error_type: match params.error_type {
                ErrorType::Failure => fault::SpdkErrorType::Failure,
                ErrorType::Pending => fault::SpdkErrorType::Pending,
                ErrorType::CorruptData => fault::SpdkErrorType::CorruptData,
                ErrorType::Nomem => fault::SpdkErrorType::Nomem,
                ErrorType::NvmeFailure => fault::SpdkErrorType::NvmeFailure,
            },
            num: params.num,
            queue_depth: params.queue_depth,
            corrupt_offset: params.corrupt_offset,
            corrupt_value: params.corrupt_value,
            nvme_sct: byte("nvme_sct", params.nvme_sct)?,
            nvme_sc: byte("nvme_sc", params.nvme_sc)?,
        };
        let Some(Module::Fault(bdev)) = module_of(&engine, &params.name) else {
            return Err(no_error_device(&engine, &params.name));
        };
        bdev.inject_spdk(&injection).map_err(|e| {
            let field = match e {
                fault::FaultError::CorruptsNothing => "corrupt_value",
                fault::FaultError::Probability { .. } | fault::FaultError::TooMany { .. } => "name",
            };
            RpcError::errno(Errno::EINVAL, e.to_string()).field(field)
        })?;
        Ok(true)
    }
}

struct ErrorResume;

impl Method<Engine> for ErrorResume {
    const NAME: &'static str = "bdev_error_resume_pending";
    const ABOUT: &'static str = "Lets every I/O go on that an error of type pending holds.";
    const ORDER: Order = Order::Exclusive;
    type Params = NameParams;
    type Reply = bool;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let Some(Module::Fault(bdev)) = module_of(&engine, &params.name) else {
            return Err(no_error_device(&engine, &params.name));
        };
        bdev.resume_pending();
        Ok(true)
    }
}

struct PassthruCreate;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct PassthruParams {
    name: String,
    base_bdev_name: String,
    /// Default: derived from the base's UUID and the name.
    #[schemars(with = "Option<String>")]
    uuid: Option<Uuid>,
}

impl Method<Engine> for PassthruCreate {
    const NAME: &'static str = "bdev_passthru_create";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Makes a device that hands everything to another, and answers its name.";
    const ORDER: Order = Order::Exclusive;
    type Params = PassthruParams;
    type Reply = String;

    async fn apply(params: PassthruParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        super::refuse_taken(&engine, &params.name)?;
        let config = passthru::Config {
            name: params.name,
            base_bdev_name: params.base_bdev_name,
            uuid: params.uuid,
        };
        let bdev = match passthru::create(config.clone(), &engine.plane()?.bdevs) {
            Err(missing @ RegistryError::NotFound { .. }) => {
                let name = config.name.clone();
                return defer(&engine, PassthruCreate::NAME, name, &config, missing).await;
            }
            made => made?,
        };
        let record = serde_json::to_value(bdev.config()).expect("a configuration is plain data");
        super::create(
            &engine,
            Module::Passthru(bdev),
            PassthruCreate::NAME,
            record,
        )
        .await
    }
}

struct PassthruDelete;

impl Method<Engine> for PassthruDelete {
    const NAME: &'static str = "bdev_passthru_delete";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Deletes a passthru device and the devices stacked on it.";
    const ORDER: Order = Order::Exclusive;
    type Params = NameParams;
    type Reply = bool;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::delete(&engine, &params.name, |m| matches!(m, Module::Passthru(_))).await
    }
}

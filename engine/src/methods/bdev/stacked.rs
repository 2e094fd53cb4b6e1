//! `bdev_delay_update_latency` and `bdev_error_*`: changes of devices stacked on others.

use std::rc::Rc;

use nacre_bdev::delay::{self, Delay};
use nacre_bdev::fault::{self, FaultDevice};
use nacre_bdev::module::ByName;
use nacre_bdev::{Bdev, Module};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::no_device_of_kind;
use crate::rpc::error::{Errno, INTERNAL_ERROR, INVALID_PARAMS};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::device_records;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<DelayUpdateLatency>()
        .add::<InjectError>()
        .add::<ResumePending>();
}

struct DelayUpdateLatency;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpdateLatencyParams {
    /// The delay bdev: its name, alias or UUID.
    delay_bdev_name: String,
    /// Which of the four latencies: of reads or writes, the usual one (`avg`) or that of one I/O in
    /// 100 (`p99`).
    latency_type: delay::Latency,
    /// The new latency in microseconds; 0: no delay.
    latency_us: u64,
}

impl Method<Engine> for DelayUpdateLatency {
    const NAME: &'static str = "bdev_delay_update_latency";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Changes one latency of a delay device.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = UpdateLatencyParams;
    type Reply = bool;

    async fn apply(params: UpdateLatencyParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let which = params.latency_type;
        let Some(bdev) = device_records::find::<Delay>(&engine, &params.delay_bdev_name) else {
            let (name, maker) = (&params.delay_bdev_name, Delay::CREATE.name);
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
        let stored = super::update(&engine, Bdev::name(&*bdev), record).await;
        stored.inspect_err(|_| bdev.update_latency(which, before))?;
        Ok(true)
    }
}

/// Error for a device without faults. Hints at the fault bdev `EE_<name>` if it exists.
fn no_error_device(engine: &Engine, name: &str) -> RpcError {
    let refused = no_device_of_kind(engine, name, "a fault bdev", FaultDevice::CREATE.name);
    let above = format!("EE_{name}");
    match device_records::find::<FaultDevice>(engine, &above) {
        Some(_) => refused.remedy(format!("the fault bdev on it is \"{above}\"")),
        None => refused,
    }
}

pub struct InjectError;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InjectErrorParams {
    /// The fault bdev: its name, alias or UUID.
    pub name: String,
    /// I/O that fails; `clear` removes all faults of the bdev.
    pub io_type: fault::SpdkIoType,
    /// `failure`: the I/O fails; `pending`: it hangs until bdev_error_resume_pending;
    /// `corrupt_data`: a byte of its data changes; `nomem`: it is retried; `nvme_failure`: it fails
    /// with nvme_sct and nvme_sc.
    pub error_type: fault::SpdkErrorType,
    /// Number of I/Os to fail.
    #[serde(default = "once")]
    pub num: u32,
    /// Affects only I/Os that find this many in flight.
    #[serde(default)]
    pub queue_depth: u64,
    /// With `corrupt_data`: offset of the changed byte in the data of an I/O; default 0.
    #[serde(default)]
    pub corrupt_offset: u64,
    /// XOR mask for the byte; not 0.
    #[serde(default)]
    pub corrupt_value: u8,
    /// With `nvme_failure`: status code type, 0 to 255; default 0.
    #[serde(default)]
    pub nvme_sct: u32,
    /// With `nvme_failure`: status code, 0 to 255; default 0.
    #[serde(default)]
    pub nvme_sc: u32,
}

fn once() -> u32 {
    1
}

impl Method<Engine> for InjectError {
    const NAME: &'static str = "bdev_error_inject_error";
    const ABOUT: &'static str = "Injects errors into a fault bdev. They end with the daemon.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = InjectErrorParams;
    type Reply = bool;

    async fn apply(params: InjectErrorParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let nvme = params.nvme_sct != 0 || params.nvme_sc != 0;
        if nvme != (params.error_type == fault::SpdkErrorType::NvmeFailure) {
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
            io_type: params.io_type,
            error_type: params.error_type,
            num: params.num,
            queue_depth: params.queue_depth,
            corrupt_offset: params.corrupt_offset,
            corrupt_value: params.corrupt_value,
            nvme_sct: byte("nvme_sct", params.nvme_sct)?,
            nvme_sc: byte("nvme_sc", params.nvme_sc)?,
        };
        let Some(bdev) = device_records::find::<FaultDevice>(&engine, &params.name) else {
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

pub struct ResumePending;

impl Method<Engine> for ResumePending {
    const NAME: &'static str = "bdev_error_resume_pending";
    const ABOUT: &'static str = "Lets every I/O go on that an error of type pending holds.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = ByName;
    type Reply = bool;

    async fn apply(params: ByName, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let Some(bdev) = device_records::find::<FaultDevice>(&engine, &params.name) else {
            return Err(no_error_device(&engine, &params.name));
        };
        bdev.resume_pending();
        Ok(true)
    }
}

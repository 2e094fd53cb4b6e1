//! `bdev_null_resize`: changes the size of a null device.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev::null::Null;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::no_device_of_kind;
use crate::bdev_modules::{NULL, NULL_RESIZE};
use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::device_records;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry.add::<Resize>();
}

pub struct Resize;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeParams {
    /// The null bdev: its name, alias or UUID.
    pub name: String,
    /// In MiB; at least the present size.
    pub new_size: u64,
}

impl Method<Engine> for Resize {
    const NAME: &'static str = NULL_RESIZE;
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a null device larger, and notifies hosts.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = ResizeParams;
    type Reply = bool;

    async fn apply(params: ResizeParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let Some(bdev) = device_records::find::<Null>(&engine, &params.name) else {
            let (name, maker) = (&params.name, NULL.create);
            let refused = no_device_of_kind(&engine, name, "a null device", maker);
            // SPDK uses a different code here if the device is of another kind.
            return Err(match plane.bdevs.lookup(name) {
                None => refused,
                Some(_) => refused.renumbered(Errno::EINVAL),
            });
        };
        let name = bdev.name();
        let before = bdev.config();
        let bytes = params
            .new_size
            .checked_mul(1 << 20)
            .filter(|b| b % u64::from(before.block_size) == 0);
        let blocks = bytes
            .map(|b| b / u64::from(before.block_size))
            .filter(|b| *b >= before.num_blocks);
        let Some(blocks) = blocks else {
            let now = before.num_blocks * u64::from(before.block_size) / (1 << 20);
            return Err(RpcError::errno(
                Errno::EINVAL,
                format!(
                    "{} MiB is less than the present {now} MiB, or too much",
                    params.new_size
                ),
            )
            .field("new_size"));
        };
        bdev.resize(blocks).or_refuse()?;
        let mut record = engine
            .journal
            .find(&super::key(name))
            .map(|e| e.record.params)
            .unwrap_or_default();
        record["num_blocks"] = blocks.into();
        if let Err(refused) = super::update(&engine, name, record).await {
            bdev.resize(before.num_blocks).or_refuse()?;
            return Err(refused);
        }
        plane.bdevs.notify_resize(name).or_refuse()?;
        Ok(true)
    }
}

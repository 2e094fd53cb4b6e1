//! `bdev_null_*`: devices that discard writes.

use std::rc::Rc;
use std::sync::Arc;

use nacre_bdev::null::{self, Null};
use nacre_bdev::{Bdev, Single, Words};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::modules::{self, Entry};
use super::{no_device_of_kind, no_metadata};
use crate::refusal::OrRefuse;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Method, Order, RpcError};
use crate::services::engine::Engine;

pub const MODULE: Entry = Entry {
    resize: Some(Resize::NAME),
    register: |registry| {
        (modules::entry::<NullDisk>().register)(registry);
        registry.add::<Resize>();
    },
    ..modules::entry::<NullDisk>()
};

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NullCreateParams {
    name: String,
    num_blocks: u64,
    /// A power of two from 512 to 65536.
    block_size: u32,
    #[serde(default)]
    physical_block_size: u32,
    /// Must be 0: metadata is not supported.
    #[serde(default)]
    md_size: u32,
    /// Must be 0.
    #[serde(default)]
    dif_type: u32,
    #[serde(default)]
    dif_is_head_of_md: bool,
    #[serde(default)]
    dif_pi_format: u32,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    uuid: Option<Uuid>,
    /// Stored for saved configurations; otherwise unused.
    #[serde(default)]
    preferred_write_granularity: u32,
    #[serde(default)]
    preferred_write_alignment: u32,
    #[serde(default)]
    optimal_write_size: u32,
    #[serde(default)]
    preferred_unmap_granularity: u32,
    #[serde(default)]
    preferred_unmap_alignment: u32,
}

/// SPDK's words for [`null::Config`].
pub struct NullDisk;

impl Single for NullDisk {
    const KIND: &'static str = "null";
    const ABOUT: &'static str = "A device that accepts every write and stores nothing";
    const PRODUCT: &'static str = Null::PRODUCT;
    const CREATE: Words = Words {
        name: "bdev_null_create",
        about: "Makes a device that takes everything and keeps nothing, and answers its name.",
    };
    const DELETE: Words = Words {
        name: "bdev_null_delete",
        about: "Deletes a null device and the devices stacked on it.",
    };
    type Config = NullCreateParams;
    type Created = String;
    type Error = RpcError;

    fn name(params: &NullCreateParams) -> Option<String> {
        Some(params.name.clone())
    }

    fn create(
        params: &mut NullCreateParams,
        _registry: &nacre_bdev::Registry,
    ) -> Result<Arc<dyn Bdev>, RpcError> {
        no_metadata(&[("md_size", params.md_size), ("dif_type", params.dif_type)])?;
        let bdev = null::create(null::Config {
            name: params.name.clone(),
            block_size: params.block_size,
            num_blocks: params.num_blocks,
            physical_block_size: (params.physical_block_size != 0)
                .then_some(params.physical_block_size),
            uuid: params.uuid,
            reads: null::Reads::default(),
        })
        .or_refuse()?;
        params.uuid = bdev.config().uuid;
        Ok(bdev)
    }
}

struct Resize;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResizeParams {
    name: String,
    /// In MiB; at least the present size.
    new_size: u64,
}

impl Method<Engine> for Resize {
    const NAME: &'static str = "bdev_null_resize";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a null device larger, and notifies hosts.";
    const ORDER: Order = Order::Exclusive;
    type Params = ResizeParams;
    type Reply = bool;

    async fn apply(params: ResizeParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        let plane = engine.plane()?;
        let Some(bdev) = modules::find::<Null>(&engine, &params.name) else {
            let (name, maker) = (&params.name, <NullDisk as Single>::CREATE.name);
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

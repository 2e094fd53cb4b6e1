//! `bdev_null_*`: devices that discard writes.

use std::sync::Arc;

use nacre_bdev::null::{self, Null};
use nacre_bdev::{Bdev, MethodDoc, Single};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::no_metadata;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NullCreateParams {
    /// Name of the new bdev: 1 to 255 bytes.
    pub name: String,
    /// Size in blocks, at least 1.
    pub num_blocks: u64,
    /// A power of two from 512 to 65536.
    pub block_size: u32,
    /// Physical block size in bytes that hosts see, a power of two and not less than block_size. 0:
    /// block_size.
    #[serde(default)]
    pub physical_block_size: u32,
    /// Must be 0: metadata is not supported.
    #[serde(default)]
    pub md_size: u32,
    /// Must be 0.
    #[serde(default)]
    pub dif_type: u32,
    /// Accepted without effect: there is no protection information.
    #[serde(default)]
    pub dif_is_head_of_md: bool,
    /// Accepted without effect: there is no protection information.
    #[serde(default)]
    pub dif_pi_format: u32,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    pub uuid: Option<Uuid>,
    /// Stored for saved configurations; otherwise unused.
    #[serde(default)]
    pub preferred_write_granularity: u32,
    /// In blocks. Stored for saved configurations; otherwise unused.
    #[serde(default)]
    pub preferred_write_alignment: u32,
    /// In blocks. Stored for saved configurations; otherwise unused.
    #[serde(default)]
    pub optimal_write_size: u32,
    /// In blocks. Stored for saved configurations; otherwise unused.
    #[serde(default)]
    pub preferred_unmap_granularity: u32,
    /// In blocks. Stored for saved configurations; otherwise unused.
    #[serde(default)]
    pub preferred_unmap_alignment: u32,
}

/// SPDK's words for [`null::Config`].
pub struct NullDisk;

impl Single for NullDisk {
    const KIND: &'static str = "null";
    const ABOUT: &'static str = "A device that accepts every write and stores nothing";
    const PRODUCT: &'static str = Null::PRODUCT;
    const CREATE: MethodDoc = MethodDoc {
        name: "bdev_null_create",
        about: "Makes a device that takes everything and keeps nothing, and answers its name.",
    };
    const DELETE: MethodDoc = MethodDoc {
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

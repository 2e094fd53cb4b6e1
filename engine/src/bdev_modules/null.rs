//! `bdev_null_*`: bdevs that discard writes.

use std::sync::Arc;

use nacre_bdev::null::{self, Null};
use nacre_bdev::{Bdev, MethodDoc, Single};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::new_bdev::NewBdevOptions;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::values::flattened;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct NullCreateParams {
    /// Name of the new bdev: 1 to 255 bytes.
    pub name: String,
    /// Size in blocks, at least 1.
    pub num_blocks: u64,
    /// A power of two from 512 to 65536.
    pub block_size: u32,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: NewBdevOptions,
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

flattened!(NullCreateParams, options);

/// The module of null bdevs, with SPDK's names for [`null::Config`].
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
        params.options.check()?;
        let bdev = null::create(null::Config {
            name: params.name.clone(),
            block_size: params.block_size,
            num_blocks: params.num_blocks,
            physical_block_size: params.options.physical_block_size(),
            uuid: params.options.uuid,
            reads: null::Reads::default(),
        })
        .or_refuse()?;
        params.options.uuid = bdev.config().uuid;
        Ok(bdev)
    }
}

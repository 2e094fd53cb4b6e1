//! `bdev_malloc_*`: RAM disks.

use std::sync::Arc;

use nacre_bdev::{Bdev, MethodDoc, Single, malloc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::new_bdev::NewBdevOptions;
use crate::refusal::OrRefuse;
use crate::rpc::RpcError;
use crate::values::flattened;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, remote = "Self")]
#[schemars(!remote)]
pub struct MallocCreateParams {
    /// Default: Malloc0, Malloc1, and so on.
    pub name: Option<String>,
    /// Size in blocks, at least 1.
    pub num_blocks: u64,
    /// A power of two from 512 to 65536.
    pub block_size: u32,
    #[serde(skip)]
    #[schemars(!skip, flatten)]
    pub options: NewBdevOptions,
    /// In blocks; 0: no boundary.
    #[serde(default)]
    pub optimal_io_boundary: u32,
    /// Accepted without effect: there is no metadata.
    #[serde(default, skip_serializing)]
    #[allow(dead_code)]
    pub md_interleave: bool,
    /// The NUMA node of the memory; -1: any.
    #[serde(default = "any_node")]
    pub numa_id: i32,
}

impl Default for MallocCreateParams {
    fn default() -> Self {
        Self {
            name: None,
            num_blocks: 0,
            block_size: 0,
            options: NewBdevOptions::default(),
            optimal_io_boundary: 0,
            md_interleave: false,
            numa_id: any_node(),
        }
    }
}

flattened!(MallocCreateParams, options);

fn any_node() -> i32 {
    -1
}

/// The module of RAM disks, with SPDK's names for [`malloc::Config`].
pub struct RamDisk;

impl Single for RamDisk {
    const KIND: &'static str = "malloc";
    const ABOUT: &'static str = "A RAM disk";
    const PRODUCT: &'static str = malloc::Malloc::PRODUCT;
    const CREATE: MethodDoc = MethodDoc {
        name: "bdev_malloc_create",
        about: "Makes a RAM disk and answers its name. Its contents end with the daemon.",
    };
    const DELETE: MethodDoc = MethodDoc {
        name: "bdev_malloc_delete",
        about: "Deletes a RAM disk and the devices stacked on it.",
    };
    type Config = MallocCreateParams;
    type Created = String;
    type Error = RpcError;

    fn name(params: &MallocCreateParams) -> Option<String> {
        params.name.clone()
    }

    fn create(
        params: &mut MallocCreateParams,
        registry: &nacre_bdev::Registry,
    ) -> Result<Arc<dyn Bdev>, RpcError> {
        params.options.check()?;
        let free = || {
            (0..)
                .map(|n| format!("Malloc{n}"))
                .find(|n| registry.lookup(n).is_none())
        };
        let name = params.name.clone().or_else(free).unwrap_or_default();
        let bdev = malloc::create(malloc::Config {
            name: name.clone(),
            block_size: params.block_size,
            num_blocks: params.num_blocks,
            physical_block_size: params.options.physical_block_size(),
            uuid: params.options.uuid,
            optimal_io_boundary: (params.optimal_io_boundary != 0)
                .then_some(params.optimal_io_boundary),
            numa_id: u32::try_from(params.numa_id).ok(),
        })
        .or_refuse()?;
        params.name = Some(name);
        params.options.uuid = bdev.config().uuid;
        Ok(bdev)
    }
}

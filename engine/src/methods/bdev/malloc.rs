//! `bdev_malloc_*`: RAM disks.

use std::rc::Rc;

use nacre_bdev::malloc;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::no_metadata;
use crate::devices::Module;
use crate::engine::Engine;
use crate::rpc::error::INTERNAL_ERROR;
use crate::rpc::{Method, Order, Registry, RpcError};

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<Create>().add::<Delete>();
}

struct Create;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateParams {
    /// Default: Malloc0, Malloc1, and so on.
    name: Option<String>,
    num_blocks: u64,
    /// A power of two from 512 to 65536.
    block_size: u32,
    #[serde(default)]
    physical_block_size: u32,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    uuid: Option<Uuid>,
    /// In blocks; 0: no boundary.
    #[serde(default)]
    optimal_io_boundary: u32,
    /// Must be 0: metadata is not supported.
    #[serde(default)]
    md_size: u32,
    #[serde(default, skip_serializing)]
    #[allow(dead_code)]
    md_interleave: bool,
    /// Must be 0.
    #[serde(default)]
    dif_type: u32,
    #[serde(default)]
    dif_is_head_of_md: bool,
    #[serde(default)]
    dif_pi_format: u32,
    /// The NUMA node of the memory; -1: any.
    #[serde(default = "any_node")]
    numa_id: i32,
}

fn any_node() -> i32 {
    -1
}

impl Method<Engine> for Create {
    const NAME: &'static str = "bdev_malloc_create";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str =
        "Makes a RAM disk and answers its name. Its contents end with the daemon.";
    const ORDER: Order = Order::Exclusive;
    type Params = CreateParams;
    type Reply = String;

    async fn apply(mut params: CreateParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        no_metadata(&[("md_size", params.md_size), ("dif_type", params.dif_type)])?;
        let plane = engine.plane()?;
        let free = || {
            (0..)
                .map(|n| format!("Malloc{n}"))
                .find(|n| plane.bdevs.lookup(n).is_none())
        };
        let name = params.name.clone().or_else(free).unwrap_or_default();
        let some = |n: u32| (n != 0).then_some(n);
        let bdev = malloc::create(malloc::Config {
            name: name.clone(),
            block_size: params.block_size,
            num_blocks: params.num_blocks,
            physical_block_size: some(params.physical_block_size),
            uuid: params.uuid,
            optimal_io_boundary: some(params.optimal_io_boundary),
            numa_id: u32::try_from(params.numa_id).ok(),
        })?;
        params.name = Some(name);
        params.uuid = bdev.config().uuid;
        let record = serde_json::to_value(&params).expect("parameters are plain data");
        super::create(&engine, Module::Malloc(bdev), Create::NAME, record).await
    }
}

struct Delete;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NameParams {
    pub name: String,
}

impl Method<Engine> for Delete {
    const NAME: &'static str = "bdev_malloc_delete";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Deletes a RAM disk and the devices stacked on it.";
    const ORDER: Order = Order::Exclusive;
    type Params = NameParams;
    type Reply = bool;

    async fn apply(params: NameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        super::delete(&engine, &params.name, |m| matches!(m, Module::Malloc(_))).await
    }
}

//! `bdev_get_bdevs`: devices and their properties.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use nacre_bdev::registry::Listed;
use nacre_bdev::{Bdev, Layer, Op, Support, Usage};
use nacre_bdev_pool::Lvol;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::qos::Assigned;
use crate::bdev_modules;
use crate::methods::replies::no_device;
use crate::methods::spdk::raid;
use crate::rpc::error::{Errno, INTERNAL_ERROR};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools;

pub fn register(registry: &mut Registry<Engine>) {
    registry.add::<GetBdevs>();
}

pub struct GetBdevs;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GetBdevsParams {
    /// A name, alias or UUID; default: all devices.
    pub name: Option<String>,
    /// How long to wait for the device to appear, in milliseconds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub timeout: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct BdevInfo {
    name: String,
    aliases: Vec<String>,
    product_name: &'static str,
    block_size: u32,
    num_blocks: u64,
    preferred_write_alignment: u32,
    preferred_write_granularity: u32,
    optimal_write_size: u32,
    preferred_unmap_alignment: u32,
    preferred_unmap_granularity: u32,
    uuid: String,
    assigned_rate_limits: Assigned,
    claimed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    claim_type: Option<&'static str>,
    zoned: bool,
    supported_io_types: IoTypes,
    driver_specific: Value,
}

/// SPDK's names, in SPDK's order.
#[derive(Debug, Default, Serialize, JsonSchema)]
struct IoTypes {
    read: bool,
    write: bool,
    unmap: bool,
    flush: bool,
    reset: bool,
    nvme_admin: bool,
    nvme_io: bool,
    nvme_io_md: bool,
    write_zeroes: bool,
    zcopy: bool,
    get_zone_info: bool,
    zone_management: bool,
    zone_append: bool,
    compare: bool,
    compare_and_write: bool,
    abort: bool,
    seek_hole: bool,
    seek_data: bool,
    copy: bool,
    nvme_iov_md: bool,
    nvme_nssr: bool,
    write_uncorrectable: bool,
}

impl Method<Engine> for GetBdevs {
    const NAME: &'static str = "bdev_get_bdevs";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Lists devices, or one of them.";
    const CLASS: Class = Class::Read;
    // May wait for a device that another call creates, so it must not block changes.
    const ORDER: Order = Order::Free;
    type Params = GetBdevsParams;
    type Reply = Vec<BdevInfo>;

    async fn apply(params: GetBdevsParams, engine: Rc<Engine>) -> Result<Vec<BdevInfo>, RpcError> {
        engine.earlier_changes().await;
        let plane = engine.plane()?;
        let Some(name) = params.name else {
            let all = plane.bdevs.list();
            let lvols = LvolNames::read(&engine).await;
            let all = all.iter().map(|listed| describe(&engine, listed, &lvols));
            return Ok(all.collect());
        };
        let appears = async {
            loop {
                let changed = engine.devices.changed.notified();
                if let Ok(listed) = plane.bdevs.get(&name) {
                    return listed;
                }
                changed.await;
            }
        };
        // The RPC deadline ends the call anyway.
        let patience = Duration::from_millis(params.timeout).min(engine.deadline());
        match tokio::time::timeout(patience, appears).await {
            Ok(listed) => {
                pools::recount(&engine, &name).await;
                let lvols = LvolNames::read(&engine).await;
                Ok(vec![describe(&engine, &listed, &lvols)])
            }
            Err(_) if params.timeout == 0 => Err(no_device(&name)),
            // Scripts recognise the timeout by this code.
            Err(_) => {
                let waited = patience.as_millis();
                let cause = format!("no bdev \"{name}\" came within {waited} ms");
                Err(RpcError::errno(Errno::ETIMEDOUT, cause).field("name"))
            }
        }
    }
}

/// Longest wait for the names of a pool's lvols.
const NAMES: Duration = Duration::from_secs(1);

/// The names by which SPDK shows the parent and the clones of an lvol.
#[derive(Default)]
struct LvolNames {
    names: HashMap<Uuid, String>,
    parents: HashMap<Uuid, Uuid>,
    clones: HashMap<Uuid, Vec<String>>,
}

impl LvolNames {
    /// Asks the open pools: the bdev of an lvol does not learn of a new parent.
    async fn read(engine: &Engine) -> Self {
        let mut all = Self::default();
        for pool in engine.devices.pools.list() {
            let lvols = tokio::time::timeout(NAMES, pool.list_names()).await;
            for info in lvols.into_iter().flatten().flatten() {
                if let Some(parent) = info.parent {
                    let clones = all.clones.entry(parent).or_default();
                    clones.push(info.name.clone());
                    all.parents.insert(info.id, parent);
                }
                all.names.insert(info.id, info.name);
            }
        }
        all.clones.values_mut().for_each(|of_one| of_one.sort());
        all
    }

    /// Adds the names to the facts of a bdev, if it is an lvol.
    fn add_to(&self, layer: &Layer, facts: &mut Value) {
        if bdev_modules::device::<Lvol>(layer.module()).is_none() {
            return;
        }
        let id = layer.uuid();
        let parent = self.parents.get(&id);
        facts["lvol"]["clone"] = json!(parent.is_some());
        if let Some(parent) = parent.and_then(|id| self.names.get(id)) {
            facts["lvol"]["base_snapshot"] = json!(parent);
        }
        if let Some(clones) = self.clones.get(&id) {
            facts["lvol"]["clones"] = json!(clones);
        }
    }
}

fn describe(engine: &Engine, listed: &Listed, lvols: &LvolNames) -> BdevInfo {
    let layer = &listed.layer;
    let mut driver_specific = layer.module().driver_specific();
    lvols.add_to(layer, &mut driver_specific);
    // A volume also has the fields of SPDK's mirror.
    if let (Value::Object(all), Some(raid)) = (&mut driver_specific, raid::of(engine, layer.name()))
    {
        all.insert("raid".to_owned(), raid);
    }
    let (geometry, limits) = (layer.geometry(), layer.limits());
    let can = |op| layer.supports(op) != Support::No;
    let uuid = layer.uuid().to_string();
    // SPDK lists the UUID among the aliases.
    let own = (uuid != layer.name()).then(|| uuid.clone());
    BdevInfo {
        name: layer.name().to_owned(),
        aliases: own
            .into_iter()
            .chain(listed.aliases.iter().cloned())
            .collect(),
        product_name: layer.product_name(),
        block_size: geometry.block_size,
        num_blocks: geometry.blocks,
        preferred_write_alignment: 0,
        preferred_write_granularity: 0,
        optimal_write_size: match limits.optimal_write_blocks {
            0 => limits.optimal_boundary_blocks,
            blocks => blocks,
        },
        preferred_unmap_alignment: limits.unmap_alignment_blocks,
        preferred_unmap_granularity: limits.unmap_granularity_blocks,
        uuid,
        assigned_rate_limits: Assigned::of(layer.qos().limits()),
        claimed: !listed.claims.is_empty(),
        claim_type: listed.claims.first().map(|(_, usage)| match usage {
            Usage::Exclusive => "exclusive_write",
            Usage::Shared => "read_many_write_shared",
            Usage::ReadOnly => "read_many_write_none",
        }),
        zoned: false,
        supported_io_types: IoTypes {
            read: can(Op::Read),
            write: can(Op::Write),
            unmap: can(Op::Unmap),
            flush: can(Op::Flush),
            write_zeroes: can(Op::WriteZeroes),
            compare: can(Op::Compare),
            compare_and_write: can(Op::CompareAndWrite),
            copy: can(Op::Copy),
            abort: true,
            ..IoTypes::default()
        },
        driver_specific,
    }
}

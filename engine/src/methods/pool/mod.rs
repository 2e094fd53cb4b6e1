//! `pool_*` and `lvol_*`, Nacre extensions: storage pools and their lvols.
//!
//! The contents of a pool are on its disks. The journal has the import of each pool, which a start
//! of the daemon repeats.

pub mod lvols;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use nacre_bdev_pool::{Command, Outcome};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::replies::refuse_nil;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, NoParams, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::{self, OpenPool};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreatePool>()
        .add::<ImportPool>()
        .add::<ExportPool>()
        .add::<DeletePool>()
        .add::<ListPools>()
        .add::<GetPool>()
        .add::<RenamePool>()
        .add::<AddDisk>()
        .add::<RemoveDisk>()
        .add::<GrowPool>()
        .add::<CheckPool>();
    lvols::register(registry);
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolParams {
    /// Name or UUID of the pool.
    pub pool: String,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct DiskReply {
    /// Name of the block device.
    pub name: String,
    /// The disk's id in its pool.
    #[schemars(with = "String")]
    pub uuid: Uuid,
    /// Bytes for data and metadata.
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// The disk is leaving the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leaving: Option<LeavingReply>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct LeavingReply {
    /// The share that has moved since the removal began, or since the last import.
    pub percent: u64,
    /// Bytes in use on the disk.
    pub left_bytes: u64,
    /// An estimate, from the speed so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct PoolReply {
    pub name: String,
    #[schemars(with = "String")]
    pub uuid: Uuid,
    /// The block device with the pool's log: its first disk.
    pub disk: String,
    /// All disks, that one first.
    pub disks: Vec<DiskReply>,
    /// `online`, or `held`: the log cannot be written, so first writes and changes fail.
    pub state: &'static str,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Free bytes that metadata and thick volumes keep.
    pub reserved_bytes: u64,
    /// Allocation unit.
    pub unit_bytes: u64,
    /// Number of volumes and snapshots.
    pub lvols: u64,
    /// Records that an import would compare with the data.
    pub unsettled_records: u64,
    /// Records that the last import applied.
    pub replayed_records: u64,
    /// Map pages of which both copies are unreadable.
    pub lost_pages: u64,
    /// Writes that wait for space in the full pool.
    pub waiting_writes: u64,
    /// The reactor that the pool's metadata is on.
    pub reactor: String,
}

fn describe(pool: &OpenPool) -> PoolReply {
    let status = pool.handle.status();
    let disks = status.disks.into_iter().map(|disk| DiskReply {
        name: disk.name,
        uuid: disk.id,
        total_bytes: disk.total_bytes,
        free_bytes: disk.free_bytes,
        leaving: disk.leaving.map(|leaving| LeavingReply {
            percent: leaving.percent(),
            left_bytes: leaving.left_bytes,
            seconds_left: leaving.seconds_left,
        }),
    });
    PoolReply {
        name: status.name,
        uuid: status.id,
        disk: status.disk,
        disks: disks.collect(),
        state: pools::state_word(status.state),
        total_bytes: status.total_bytes,
        free_bytes: status.free_bytes,
        reserved_bytes: status.reserved_bytes,
        unit_bytes: status.unit_bytes,
        lvols: status.versions,
        unsettled_records: status.unsettled_records,
        replayed_records: pool.report.replayed,
        lost_pages: pool.report.lost,
        waiting_writes: status.waiting_writes,
        reactor: pool.reactor.clone(),
    }
}

pub struct CreatePool;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreatePoolParams {
    /// Name of the new pool: 1 to 63 bytes, without `/`.
    pub name: String,
    /// The block device: its name, alias or UUID. Nothing else may use it.
    pub disk: String,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// Use a device that holds data. The data is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl Method<Engine> for CreatePool {
    const NAME: &'static str = "pool_create";
    const ABOUT: &'static str = "Makes a storage pool on a block device.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreatePoolParams;
    type Reply = PoolReply;

    async fn apply(params: CreatePoolParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        engine.earlier_changes().await;
        refuse_nil(params.uuid)?;
        let CreatePoolParams {
            name,
            disk,
            uuid,
            force,
        } = params;
        let pool = pools::create(&engine, name, &disk, uuid, force).await?;
        Ok(describe(&pool))
    }
}

pub struct ImportPool;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportPoolParams {
    /// A block device that the pool is on. Its other disks are found by their superblocks.
    pub disk: String,
    /// The pool that must be on the device. Default: any.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// The name that the pool gets. Default: its own, which no open pool may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_name: Option<String>,
    /// Import the pool although another daemon has it open. If that one still uses it, both
    /// destroy it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// The disks as they were last seen, to name one that is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_disks: Vec<pools::KnownDisk>,
}

impl Method<Engine> for ImportPool {
    const NAME: &'static str = pools::IMPORT;
    const ABOUT: &'static str = "Opens the pool on a block device. Each of its volumes and snapshots is a block device then.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ImportPoolParams;
    type Reply = PoolReply;

    async fn apply(params: ImportPoolParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        if !crate::journal::is_replaying() {
            engine.earlier_changes().await;
        }
        let wanted = pools::ImportRequest {
            id: params.uuid,
            new_name: params.new_name,
            force: params.force,
            known: params.known_disks,
        };
        let pool = pools::import(&engine, &params.disk, wanted).await?;
        Ok(describe(&pool))
    }
}

pub struct ExportPool;

impl Method<Engine> for ExportPool {
    const NAME: &'static str = "pool_export";
    const ABOUT: &'static str = "Closes a pool that is not in use, so that another machine may import it. The UUID of a pool that \
         could not be imported is forgotten.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = PoolParams;
    type Reply = bool;

    async fn apply(params: PoolParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        pools::close(&engine, &params.pool, Command::Close { export: true }).await?;
        Ok(true)
    }
}

pub struct DeletePool;

impl Method<Engine> for DeletePool {
    const NAME: &'static str = "pool_delete";
    const ABOUT: &'static str = "Deletes a pool without volumes and snapshots; its disks are free.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = PoolParams;
    type Reply = bool;

    async fn apply(params: PoolParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let pool = engine.devices.pools.find(&params.pool)?;
        let count = pool.list_names().await?.len();
        if count > 0 {
            let cause = format!("the pool has {count} volumes and snapshots");
            return Err(RpcError::errno(Errno::EBUSY, cause)
                .field("pool")
                .remedy("delete them first"));
        }
        pools::close(&engine, &params.pool, Command::Destroy).await?;
        Ok(true)
    }
}

pub struct ListPools;

impl Method<Engine> for ListPools {
    const NAME: &'static str = "pool_list";
    const ABOUT: &'static str = "Lists the open pools, with their space and state.";
    const CLASS: Class = Class::Read;
    type Params = NoParams;
    type Reply = Vec<PoolReply>;

    async fn apply(_: NoParams, engine: Rc<Engine>) -> Result<Vec<PoolReply>, RpcError> {
        let pools = engine.devices.pools.list();
        Ok(pools.iter().map(|pool| describe(pool)).collect())
    }
}

pub struct GetPool;

impl Method<Engine> for GetPool {
    const NAME: &'static str = "pool_get";
    const ABOUT: &'static str = "Shows one pool.";
    const CLASS: Class = Class::Read;
    type Params = PoolParams;
    type Reply = PoolReply;

    async fn apply(params: PoolParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        Ok(describe(&*engine.devices.pools.find(&params.pool)?))
    }
}

pub struct RenamePool;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RenamePoolParams {
    /// Name or UUID of the pool.
    pub pool: String,
    /// The new name: 1 to 63 bytes, without `/`.
    pub new_name: String,
}

impl Method<Engine> for RenamePool {
    const NAME: &'static str = "pool_rename";
    const ABOUT: &'static str = "Gives a pool another name; hosts notice nothing.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RenamePoolParams;
    type Reply = PoolReply;

    async fn apply(params: RenamePoolParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        engine.earlier_changes().await;
        let pool = engine.devices.pools.find(&params.pool)?;
        pools::rename(&engine, &pool, params.new_name).await?;
        Ok(describe(&pool))
    }
}

pub struct AddDisk;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDiskParams {
    /// Name or UUID of the pool.
    pub pool: String,
    /// The block device: its name, alias or UUID. Nothing else may use it.
    pub disk: String,
    /// Use a device that holds data. The data is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl Method<Engine> for AddDisk {
    const NAME: &'static str = "pool_add_disk";
    const ABOUT: &'static str = "Adds a block device to a pool, while hosts use the pool. A volume stays on one disk while that has \
         room. Earlier versions cannot import the pool any more.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = AddDiskParams;
    type Reply = PoolReply;

    async fn apply(params: AddDiskParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        engine.earlier_changes().await;
        let pool = engine.devices.pools.find(&params.pool)?;
        pools::add_disk(&engine, &pool, &params.disk, params.force).await?;
        Ok(describe(&pool))
    }
}

pub struct RemoveDisk;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveDiskParams {
    /// Name or UUID of the pool.
    pub pool: String,
    /// The disk: the name, alias or UUID of its device, or its id in the pool.
    pub disk: String,
    /// Keep a disk that is leaving. Data that has moved stays where it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancel: bool,
}

impl Method<Engine> for RemoveDisk {
    const NAME: &'static str = "pool_remove_disk";
    const ABOUT: &'static str = "Begins to remove a disk from a pool, while hosts use the pool: its data move to the other disks, \
         then the disk is free. The removal goes on after a restart. Earlier versions cannot import \
         the pool any more.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RemoveDiskParams;
    type Reply = PoolReply;

    async fn apply(params: RemoveDiskParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        engine.earlier_changes().await;
        let pool = engine.devices.pools.find(&params.pool)?;
        if params.cancel {
            pools::keep_disk(&engine, &pool, &params.disk).await?;
        } else {
            pools::remove_disk(&engine, &pool, &params.disk).await?;
        }
        Ok(describe(&pool))
    }
}

pub struct GrowPool;

impl Method<Engine> for GrowPool {
    const NAME: &'static str = "pool_grow";
    const ABOUT: &'static str =
        "Takes the rest of disks that have grown into their pool, while hosts use the pool.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = PoolParams;
    type Reply = PoolReply;

    async fn apply(params: PoolParams, engine: Rc<Engine>) -> Result<PoolReply, RpcError> {
        engine.earlier_changes().await;
        let pool = engine.devices.pools.find(&params.pool)?;
        pools::grow(&pool).await?;
        Ok(describe(&pool))
    }
}

pub struct CheckPool;

#[derive(Debug, Serialize, JsonSchema)]
pub struct CheckReply {
    /// Pages of metadata. The check reads two copies of each.
    pub pages: u64,
    /// Units that volumes and snapshots use.
    pub units: u64,
    /// Bad copies of pages that the check wrote again and flushed.
    pub repaired: u64,
    /// Bad copies that could not be written or flushed.
    pub not_repaired: u64,
    /// Faults that are left: contradictions between the maps and the used space, and lost
    /// metadata. A sound pool has none.
    pub findings: Vec<String>,
    /// Further findings, which are not listed.
    pub more_findings: u64,
}

impl Method<Engine> for CheckPool {
    const NAME: &'static str = "pool_check";
    const ABOUT: &'static str = "Reads both copies of a pool's metadata, repairs bad ones, and compares the use of every unit with \
         the maps, while hosts use the pool.";
    const CLASS: Class = Class::Operate;
    const ORDER: Order = Order::Free;
    type Params = PoolParams;
    type Reply = CheckReply;

    async fn apply(params: PoolParams, engine: Rc<Engine>) -> Result<CheckReply, RpcError> {
        let pool = engine.devices.pools.find(&params.pool)?;
        let Outcome::Checked(report) = pool.run(Command::Check).await? else {
            let cause = "the pool answered another command";
            return Err(RpcError::errno(Errno::EIO, cause));
        };
        let findings = report.findings.iter().map(ToString::to_string).collect();
        Ok(CheckReply {
            pages: report.pages,
            units: report.units,
            repaired: report.repaired,
            not_repaired: report.not_repaired,
            findings,
            more_findings: report.more_findings,
        })
    }
}

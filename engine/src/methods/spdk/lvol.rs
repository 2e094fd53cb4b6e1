//! `bdev_lvol_*`: SPDK's logical volumes, in Nacre's pools. An lvstore is a pool.
//!
//! A cluster is a unit of the pool, 64 KiB, whatever `cluster_sz` says; `bdev_lvol_get_lvstores`
//! returns this size. Sizes are rounded up to clusters. `clear_method` has no effect: space that
//! was never written reads as zeroes.
//!
//! The message of a refusal is the text of its errno. The codes are SPDK's:
//!
//! | refusal | code |
//! |---|---|
//! | the parameters cannot be decoded | -32603 |
//! | the bdev, lvol or lvstore does not exist | -19; of `bdev_lvol_rename_lvstore`: -2 |
//! | the name of a new lvstore or lvol is taken | -17 |
//! | the name or size of a new lvstore or lvol is invalid, or no lvstore is named | -22 |
//! | the pool refuses to delete an lvol | -32603 |
//! | the pool refuses anything else, such as a taken name of a snapshot | -32602 |
//!
//! `bdev_lvol_set_parent` needs a volume that is not in use. Parents outside of the lvstore:
//! [`super::lvol_bdev`].

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_pool::{Command, LvolInfo, MAX_UNITS};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::methods::pool::lvols;
use crate::rpc::error::{Errno, INTERNAL_ERROR, INVALID_PARAMS};
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::{self, OpenPool, check_name, find_lvol};

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreateStore>()
        .add::<DeleteStore>()
        .add::<RenameStore>()
        .add::<GrowStore>()
        .add::<GetStores>()
        .add::<BdevLvolCreate>()
        .add::<BdevLvolSnapshot>()
        .add::<BdevLvolClone>()
        .add::<BdevLvolRename>()
        .add::<BdevLvolResize>()
        .add::<BdevLvolInflate>()
        .add::<BdevLvolDecoupleParent>()
        .add::<BdevLvolSetParent>()
        .add::<BdevLvolSetReadOnly>()
        .add::<BdevLvolDelete>()
        .add::<GetLvols>();
}

/// SPDK returns errno codes where it refuses before the operation begins.
const EEXIST: i32 = -(Errno::EEXIST as i32);

/// An error of the pool, with the code for invalid parameters.
pub(super) fn coded_invalid(error: RpcError) -> RpcError {
    coded(INVALID_PARAMS)(error)
}

/// An error of the pool, with another code.
fn coded(code: i32) -> impl Fn(RpcError) -> RpcError {
    move |error| RpcError { code, ..error }
}

struct CreateStore;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct CreateStoreParams {
    /// The bdev for the lvstore, by name, alias or UUID.
    bdev_name: String,
    /// Name of the new lvstore: 1 to 63 bytes, without `/`.
    lvs_name: String,
    /// Accepted: clusters have 64 KiB.
    cluster_sz: Option<u32>,
    /// Accepted: free space never shows.
    clear_method: Option<String>,
    /// Accepted: metadata takes space as needed.
    num_md_pages_per_cluster_ratio: Option<u32>,
    /// Accepted: metadata has its own page size.
    md_page_size: Option<u32>,
}

impl Method<Engine> for CreateStore {
    const NAME: &'static str = "bdev_lvol_create_lvstore";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes an lvstore, as pool_create does, and answers its UUID.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreateStoreParams;
    type Reply = String;

    async fn apply(params: CreateStoreParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        engine.earlier_changes().await;
        let (name, disk) = (params.lvs_name, params.bdev_name);
        check_name("lvs_name", &name)?;
        if engine.plane()?.bdevs.lookup(&disk).is_none() {
            let cause = format!("there is no bdev \"{disk}\"");
            return Err(RpcError::errno(Errno::ENODEV, cause).field("bdev_name"));
        }
        let made = pools::create(&engine, name, &disk, None, false).await;
        let pool = made.map_err(|error| match error.code {
            EEXIST => error,
            _ => coded(INVALID_PARAMS)(error),
        })?;
        Ok(pool.handle.id().to_string())
    }
}

/// An lvstore: one of the two.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StoreParams {
    /// UUID of the lvstore, instead of lvs_name.
    uuid: Option<String>,
    /// Name of the lvstore, instead of uuid.
    lvs_name: Option<String>,
}

fn store(
    engine: &Engine,
    uuid: Option<String>,
    name: Option<String>,
) -> Result<Rc<OpenPool>, RpcError> {
    match (uuid, name) {
        (Some(one), None) | (None, Some(one)) => engine.devices.pools.find(&one),
        _ => Err(RpcError::errno(
            Errno::EINVAL,
            "give the lvstore's UUID or its name",
        )),
    }
}

struct DeleteStore;

impl Method<Engine> for DeleteStore {
    const NAME: &'static str = "bdev_lvol_delete_lvstore";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Deletes an lvstore that is not in use, with all its lvols.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = StoreParams;
    type Reply = bool;

    async fn apply(params: StoreParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let pool = store(&engine, params.uuid, params.lvs_name)?;
        let id = pool.handle.id().to_string();
        drop(pool);
        let closed = pools::close(&engine, &id, Command::Destroy).await;
        closed.map_err(coded(INVALID_PARAMS))?;
        Ok(true)
    }
}

struct RenameStore;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RenameStoreParams {
    /// Name or UUID of the lvstore.
    old_name: String,
    /// The new name: 1 to 63 bytes, without `/`.
    new_name: String,
}

impl Method<Engine> for RenameStore {
    const NAME: &'static str = "bdev_lvol_rename_lvstore";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Gives an lvstore another name.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RenameStoreParams;
    type Reply = bool;

    async fn apply(params: RenameStoreParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let found = engine.devices.pools.find(&params.old_name);
        let pool = found.map_err(|error| RpcError {
            message: format!("Lvol store {} not found", params.old_name),
            ..error.renumbered(Errno::ENOENT).field("old_name")
        })?;
        let renamed = pools::rename(&engine, &pool, params.new_name).await;
        renamed.map_err(coded(INVALID_PARAMS))?;
        Ok(true)
    }
}

struct GrowStore;

impl Method<Engine> for GrowStore {
    const NAME: &'static str = "bdev_lvol_grow_lvstore";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Takes the rest of a disk that has grown, as pool_grow does.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = StoreParams;
    type Reply = bool;

    async fn apply(params: StoreParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let pool = store(&engine, params.uuid, params.lvs_name)?;
        let grown = pools::grow(&pool).await;
        grown.map_err(coded(INVALID_PARAMS))?;
        Ok(true)
    }
}

struct GetStores;

#[derive(Debug, Serialize, JsonSchema)]
struct StoreReply {
    uuid: String,
    name: String,
    base_bdev: String,
    total_data_clusters: u64,
    free_clusters: u64,
    block_size: u32,
    cluster_size: u64,
    /// Bytes of the largest lvstore.
    max_growable_size: u64,
}

impl Method<Engine> for GetStores {
    const NAME: &'static str = "bdev_lvol_get_lvstores";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Lists lvstores, or one.";
    const CLASS: Class = Class::Read;
    type Params = StoreParams;
    type Reply = Vec<StoreReply>;

    async fn apply(params: StoreParams, engine: Rc<Engine>) -> Result<Vec<StoreReply>, RpcError> {
        let pools = match (&params.uuid, &params.lvs_name) {
            (None, None) => engine.devices.pools.list(),
            _ => vec![store(&engine, params.uuid, params.lvs_name)?],
        };
        let reply = |pool: &Rc<OpenPool>| {
            let status = pool.handle.status();
            let unit = status.unit_bytes.max(1);
            let free = status.free_bytes.saturating_sub(status.reserved_bytes);
            StoreReply {
                uuid: status.id.to_string(),
                name: status.name,
                base_bdev: status.disk,
                total_data_clusters: status.total_bytes / unit,
                free_clusters: free / unit,
                block_size: nacre_bdev_pool::BLOCK,
                cluster_size: unit,
                max_growable_size: MAX_UNITS * unit,
            }
        };
        Ok(pools.iter().map(reply).collect())
    }
}

struct BdevLvolCreate;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolCreateParams {
    /// Name of the new lvol: 1 to 63 bytes, without `/`.
    lvol_name: String,
    /// Size in MiB; or give size.
    size_in_mib: Option<u64>,
    /// In bytes, of older clients.
    size: Option<u64>,
    /// Take space as it is written. Default false: the lvstore keeps room for the whole size.
    #[serde(default)]
    thin_provision: bool,
    /// UUID of the lvstore, instead of lvs_name.
    uuid: Option<String>,
    /// Name of the lvstore, instead of uuid.
    lvs_name: Option<String>,
    /// Accepted: free space never shows.
    #[allow(dead_code)]
    clear_method: Option<String>,
}

/// A size in MiB as bytes.
fn bytes(mebibytes: u64) -> Result<u64, RpcError> {
    mebibytes.checked_mul(1 << 20).ok_or_else(|| {
        RpcError::errno(Errno::EINVAL, "that is more than 64 bits of bytes").field("size_in_mib")
    })
}

impl Method<Engine> for BdevLvolCreate {
    const NAME: &'static str = "bdev_lvol_create";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes an lvol, and answers its UUID, the name of its bdev.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolCreateParams;
    type Reply = String;

    async fn apply(params: BdevLvolCreateParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        engine.earlier_changes().await;
        check_name("lvol_name", &params.lvol_name)?;
        let size = match (params.size_in_mib, params.size) {
            (Some(mebibytes), None) => bytes(mebibytes)?,
            (None, Some(bytes)) => bytes,
            _ => return Err(RpcError::errno(Errno::EINVAL, "give one size").field("size_in_mib")),
        };
        let pool = store(&engine, params.uuid, params.lvs_name)?;
        let id = Uuid::new_v4();
        let create = Command::Create {
            id,
            name: params.lvol_name,
            bytes: size,
            thick: !params.thin_provision,
        };
        let created = pool.run(create).await;
        created.map_err(|error| match error.code {
            EEXIST => error,
            _ => coded(INVALID_PARAMS)(error),
        })?;
        lvols::made(&engine, &pool, id).await?;
        Ok(id.to_string())
    }
}

struct BdevLvolSnapshot;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolSnapshotParams {
    /// The lvol: its UUID, or `lvstore/name`.
    lvol_name: String,
    /// Name of the new snapshot: 1 to 63 bytes, without `/`.
    snapshot_name: String,
}

impl Method<Engine> for BdevLvolSnapshot {
    const NAME: &'static str = "bdev_lvol_snapshot";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a snapshot of an lvol, and answers its UUID.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolSnapshotParams;
    type Reply = String;

    async fn apply(params: BdevLvolSnapshotParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol_name", &params.lvol_name)?;
        let refused = coded(INVALID_PARAMS);
        check_name("snapshot_name", &params.snapshot_name).map_err(&refused)?;
        let id = Uuid::new_v4();
        let cuts = vec![(lvol.uuid(), id, params.snapshot_name)];
        let cut = pool.run(Command::Snapshot { cuts }).await;
        cut.map_err(refused)?;
        lvols::made(&engine, &pool, id).await?;
        Ok(id.to_string())
    }
}

struct BdevLvolClone;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolCloneParams {
    /// The snapshot: its UUID, or `lvstore/name`.
    snapshot_name: String,
    /// Name of the new lvol: 1 to 63 bytes, without `/`.
    clone_name: String,
}

impl Method<Engine> for BdevLvolClone {
    const NAME: &'static str = "bdev_lvol_clone";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a thin lvol from a snapshot, and answers its UUID.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolCloneParams;
    type Reply = String;

    async fn apply(params: BdevLvolCloneParams, engine: Rc<Engine>) -> Result<String, RpcError> {
        engine.earlier_changes().await;
        let (pool, source) = find_lvol(&engine, "snapshot_name", &params.snapshot_name)?;
        let refused = coded(INVALID_PARAMS);
        check_name("clone_name", &params.clone_name).map_err(&refused)?;
        let id = Uuid::new_v4();
        let clone = Command::Clone {
            source: source.uuid(),
            id,
            name: params.clone_name,
            thick: false,
        };
        pool.run(clone).await.map_err(refused)?;
        lvols::made(&engine, &pool, id).await?;
        Ok(id.to_string())
    }
}

struct BdevLvolRename;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolRenameParams {
    /// The lvol: its UUID, or `lvstore/name`.
    old_name: String,
    /// The new name: 1 to 63 bytes, without `/`.
    new_name: String,
}

impl Method<Engine> for BdevLvolRename {
    const NAME: &'static str = "bdev_lvol_rename";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Gives an lvol another name within its lvstore.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolRenameParams;
    type Reply = bool;

    async fn apply(params: BdevLvolRenameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let (field, lvol) = ("old_name", params.old_name.as_str());
        find_lvol(&engine, field, lvol)?;
        let renamed = lvols::rename(&engine, (field, lvol), params.new_name).await;
        renamed.map_err(coded(INVALID_PARAMS))?;
        Ok(true)
    }
}

struct BdevLvolResize;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolResizeParams {
    /// The lvol: its UUID, or `lvstore/name`.
    name: String,
    /// The new size in MiB.
    size_in_mib: u64,
}

impl Method<Engine> for BdevLvolResize {
    const NAME: &'static str = "bdev_lvol_resize";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Changes the size of an lvol.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolResizeParams;
    type Reply = bool;

    async fn apply(params: BdevLvolResizeParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "name", &params.name)?;
        let refused = coded(INVALID_PARAMS);
        let bytes = bytes(params.size_in_mib).map_err(&refused)?;
        let resized = pools::resize(&engine, &pool, &lvol, bytes).await;
        resized.map_err(refused)?;
        Ok(true)
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct LvolNameParams {
    /// UUID, or `lvs/lvol`.
    name: String,
}

struct BdevLvolInflate;

impl Method<Engine> for BdevLvolInflate {
    const NAME: &'static str = "bdev_lvol_inflate";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Copies the data that an lvol shares with its snapshot.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolNameParams;
    type Reply = bool;

    async fn apply(params: LvolNameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        change(&engine, &params.name, |lvol| Command::Inflate { lvol }).await
    }
}

/// Runs a command about an lvol, with SPDK's code for its errors.
async fn change(
    engine: &Rc<Engine>,
    name: &str,
    command: impl FnOnce(Uuid) -> Command,
) -> Result<bool, RpcError> {
    engine.earlier_changes().await;
    let (pool, lvol) = find_lvol(engine, "name", name)?;
    let changed = pool.run(command(lvol.uuid())).await;
    changed.map_err(coded(INVALID_PARAMS))?;
    lvols::refresh(&pool, &lvol).await?;
    Ok(true)
}

struct BdevLvolDecoupleParent;

impl Method<Engine> for BdevLvolDecoupleParent {
    const NAME: &'static str = "bdev_lvol_decouple_parent";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Copies the data that an lvol shares with its snapshot. The snapshot's own parent becomes its \
         parent.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolNameParams;
    type Reply = bool;

    async fn apply(params: LvolNameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        change(&engine, &params.name, |lvol| Command::Decouple { lvol }).await
    }
}

struct BdevLvolSetParent;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BdevLvolSetParentParams {
    /// UUID, or `lvs/lvol`.
    lvol_name: String,
    /// The snapshot: UUID, or `lvs/lvol`.
    parent_name: String,
}

impl Method<Engine> for BdevLvolSetParent {
    const NAME: &'static str = "bdev_lvol_set_parent";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Makes a thin lvol that is not in use a clone of a snapshot, with the clusters that it owns on top.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = BdevLvolSetParentParams;
    type Reply = bool;

    async fn apply(params: BdevLvolSetParentParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol_name", &params.lvol_name)?;
        let (of, parent) = find_lvol(&engine, "parent_name", &params.parent_name)?;
        let refused = coded(INVALID_PARAMS);
        pools::check_same_pool("parent_name", &pool, &of).map_err(&refused)?;
        let changed = pools::set_parent(&engine, &pool, lvol, parent.uuid()).await;
        changed.map_err(refused)?;
        Ok(true)
    }
}

struct BdevLvolSetReadOnly;

impl Method<Engine> for BdevLvolSetReadOnly {
    const NAME: &'static str = "bdev_lvol_set_read_only";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Ends all writes to an lvol, for good. Clones of it can be made.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolNameParams;
    type Reply = bool;

    async fn apply(params: LvolNameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        change(&engine, &params.name, |lvol| Command::ReadOnly { lvol }).await
    }
}

struct BdevLvolDelete;

impl Method<Engine> for BdevLvolDelete {
    const NAME: &'static str = "bdev_lvol_delete";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Deletes an lvol or snapshot. A snapshot with several clones is refused; lvol_delete takes it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolNameParams;
    type Reply = bool;

    async fn apply(params: LvolNameParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "name", &params.name)?;
        let all = pool.list_names().await?;
        let clones = all.iter().filter(|other| other.parent == Some(lvol.uuid()));
        let count = clones.count();
        if count > 1 {
            let cause = format!("the snapshot has {count} clones");
            let refused = RpcError::errno(Errno::EPERM, cause).field("name");
            return Err(coded(INTERNAL_ERROR)(refused));
        }
        let deleted = pools::delete(&engine, &pool, lvol).await;
        deleted.map_err(coded(INTERNAL_ERROR))?;
        Ok(true)
    }
}

struct GetLvols;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetLvolsParams {
    /// Only lvols of the lvstore with this UUID.
    lvs_uuid: Option<String>,
    /// Only lvols of the lvstore with this name.
    lvs_name: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct SpdkLvolReply {
    alias: String,
    uuid: String,
    name: String,
    is_thin_provisioned: bool,
    is_snapshot: bool,
    /// Its parent is a snapshot of the lvstore.
    is_clone: bool,
    /// Its parent is a bdev outside of the lvstore.
    is_esnap_clone: bool,
    /// A bdev below it, or below its snapshots, is missing.
    is_degraded: bool,
    num_allocated_clusters: u64,
    lvs: LvsReply,
}

#[derive(Debug, Serialize, JsonSchema)]
struct LvsReply {
    name: String,
    uuid: String,
}

impl Method<Engine> for GetLvols {
    const NAME: &'static str = "bdev_lvol_get_lvols";
    const UNDECODABLE: i32 = INTERNAL_ERROR;
    const ABOUT: &'static str = "Lists the lvols and snapshots of an lvstore, or of all.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = GetLvolsParams;
    type Reply = Vec<SpdkLvolReply>;

    async fn apply(
        params: GetLvolsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<SpdkLvolReply>, RpcError> {
        let pools = match (&params.lvs_uuid, &params.lvs_name) {
            (None, None) => engine.devices.pools.list(),
            _ => vec![store(&engine, params.lvs_uuid, params.lvs_name)?],
        };
        let mut all = Vec::new();
        for pool in pools {
            let status = pool.handle.status();
            let reply = |info: LvolInfo| SpdkLvolReply {
                alias: pools::alias(&status.name, &info.name),
                uuid: info.id.to_string(),
                name: info.name,
                is_thin_provisioned: !info.is_thick,
                is_snapshot: info.is_snapshot,
                is_clone: info.parent.is_some(),
                is_esnap_clone: info.external_parent.is_some(),
                is_degraded: info.is_degraded,
                num_allocated_clusters: info.used_bytes / status.unit_bytes.max(1),
                lvs: LvsReply {
                    name: status.name.clone(),
                    uuid: status.id.to_string(),
                },
            };
            let lvols = pool.lvols().await?;
            pools::take_counts(&engine, &lvols);
            all.extend(lvols.into_iter().map(reply));
        }
        Ok(all)
    }
}

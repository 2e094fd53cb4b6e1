//! `lvol_*`: lvols (volumes and snapshots) of pools.

use std::rc::Rc;

use nacre_bdev::Bdev;
use nacre_bdev_pool::{Command, Lvol, LvolInfo};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tracing::warn;
use uuid::Uuid;

use super::super::replies::refuse_nil;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::pools::{self, OpenPool, check_name, find_lvol};
use crate::values::read;

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreateLvol>()
        .add::<ListLvols>()
        .add::<GetLvol>()
        .add::<ResizeLvol>()
        .add::<SnapshotLvols>()
        .add::<CloneSnapshot>()
        .add::<RestoreLvol>()
        .add::<InflateLvol>()
        .add::<DecoupleLvol>()
        .add::<SetParent>()
        .add::<SetReadOnly>()
        .add::<RenameLvol>()
        .add::<DeleteLvol>();
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LvolParams {
    /// UUID, or `pool/name`.
    pub lvol: String,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct LvolReply {
    /// The name of the block device.
    #[schemars(with = "String")]
    pub uuid: Uuid,
    pub name: String,
    /// `pool/name`, another name of the block device.
    pub alias: String,
    pub pool: String,
    pub size_bytes: u64,
    pub snapshot: bool,
    /// A volume that takes no writes any more.
    pub read_only: bool,
    /// The pool keeps room for the whole size.
    pub thick: bool,
    /// The snapshot that it shares space with.
    #[schemars(with = "Option<String>")]
    pub parent: Option<Uuid>,
    /// The bdev outside of the pool that is its parent: the UUID, and the name that it had.
    pub external_parent: Option<ExternalParentReply>,
    /// A bdev below it, or below its snapshots, is missing: I/O that needs it fails.
    pub degraded: bool,
    /// Bytes of allocated units, and of those that nothing else uses.
    pub used_bytes: u64,
    pub exclusive_bytes: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ExternalParentReply {
    #[schemars(with = "String")]
    pub uuid: Uuid,
    pub name: String,
}

pub fn describe(pool: &str, info: LvolInfo) -> LvolReply {
    LvolReply {
        uuid: info.id,
        alias: pools::alias(pool, &info.name),
        name: info.name,
        pool: pool.to_owned(),
        size_bytes: info.bytes,
        snapshot: info.is_snapshot,
        read_only: info.is_read_only,
        thick: info.is_thick,
        parent: info.parent,
        external_parent: info.external_parent.map(|parent| ExternalParentReply {
            uuid: parent.id,
            name: parent.name,
        }),
        degraded: info.is_degraded,
        used_bytes: info.used_bytes,
        exclusive_bytes: info.exclusive_bytes,
    }
}

/// Registers a new lvol as a bdev, and describes it.
pub async fn made(engine: &Rc<Engine>, pool: &OpenPool, id: Uuid) -> Result<LvolReply, RpcError> {
    let _names = pool.names.lock().await;
    let info = pool.lvol(id).await?;
    pools::register(engine, pool, &info).await?;
    Ok(describe(&pool.name(), info))
}

pub struct CreateLvol;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateLvolParams {
    /// Name or UUID of the pool.
    pub pool: String,
    /// Name of the new volume: 1 to 63 bytes, without `/`.
    pub name: String,
    /// In bytes, or text such as "10GiB". Rounded up to the pool's unit.
    #[serde(deserialize_with = "read::bytes")]
    #[schemars(with = "u64")]
    pub size: u64,
    /// Keep room for the whole size. Default: space is taken as it is written.
    #[serde(default)]
    pub thick: bool,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

impl Method<Engine> for CreateLvol {
    const NAME: &'static str = "lvol_create";
    const ABOUT: &'static str = "Makes a volume in a pool, and a block device of its UUID.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreateLvolParams;
    type Reply = LvolReply;

    async fn apply(params: CreateLvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        engine.earlier_changes().await;
        refuse_nil(params.uuid)?;
        check_name("name", &params.name)?;
        let pool = engine.devices.pools.find(&params.pool)?;
        if params.size > pool.handle.status().max_lvol_bytes {
            let cause = format!("{} bytes are too many for one volume", params.size);
            return Err(RpcError::errno(Errno::EINVAL, cause).field("size"));
        }
        let id = params.uuid.unwrap_or_else(Uuid::new_v4);
        let create = Command::Create {
            id,
            name: params.name,
            bytes: params.size,
            thick: params.thick,
        };
        pool.run(create).await?;
        made(&engine, &pool, id).await
    }
}

pub struct ListLvols;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListLvolsParams {
    /// Only those of this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
}

impl Method<Engine> for ListLvols {
    const NAME: &'static str = "lvol_list";
    const ABOUT: &'static str = "Lists the volumes and snapshots of pools, with their space.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = ListLvolsParams;
    type Reply = Vec<LvolReply>;

    async fn apply(
        params: ListLvolsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<LvolReply>, RpcError> {
        let pools = match params.pool {
            Some(pool) => vec![engine.devices.pools.find(&pool)?],
            None => engine.devices.pools.list(),
        };
        let mut all = Vec::new();
        for pool in pools {
            let name = pool.name();
            let lvols = pool.lvols().await?;
            pools::take_counts(&engine, &lvols);
            all.extend(lvols.into_iter().map(|info| describe(&name, info)));
        }
        Ok(all)
    }
}

pub struct GetLvol;

impl Method<Engine> for GetLvol {
    const NAME: &'static str = "lvol_get";
    const ABOUT: &'static str = "Shows one volume or snapshot.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = LvolParams;
    type Reply = LvolReply;

    async fn apply(params: LvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        let (pool, lvol) = find_lvol(&engine, "lvol", &params.lvol)?;
        Ok(describe(&pool.name(), pool.lvol(lvol.uuid()).await?))
    }
}

pub struct ResizeLvol;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeLvolParams {
    /// UUID, or `pool/name`.
    pub lvol: String,
    /// In bytes, or text such as "10GiB". Data beyond a smaller size is lost.
    #[serde(deserialize_with = "read::bytes")]
    #[schemars(with = "u64")]
    pub size: u64,
}

impl Method<Engine> for ResizeLvol {
    const NAME: &'static str = "lvol_resize";
    const ABOUT: &'static str = "Changes the size of a volume, and notifies hosts. A volume does not shrink while a host uses it.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = ResizeLvolParams;
    type Reply = LvolReply;

    async fn apply(params: ResizeLvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol", &params.lvol)?;
        pools::resize(&engine, &pool, &lvol, params.size).await?;
        Ok(describe(&pool.name(), pool.lvol(lvol.uuid()).await?))
    }
}

pub struct SnapshotLvols;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotParams {
    /// Volumes of one pool, which are cut at the same moment.
    pub snapshots: Vec<NewSnapshot>,
}

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// UUID, or `pool/name`.
    pub lvol: String,
    /// Name of the snapshot.
    pub name: String,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

impl Method<Engine> for SnapshotLvols {
    const NAME: &'static str = "lvol_snapshot";
    const ABOUT: &'static str =
        "Makes snapshots of volumes while hosts use them: all of one call at the same moment.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = SnapshotParams;
    type Reply = Vec<LvolReply>;

    async fn apply(params: SnapshotParams, engine: Rc<Engine>) -> Result<Vec<LvolReply>, RpcError> {
        engine.earlier_changes().await;
        let (mut pool, mut cuts): (Option<Rc<OpenPool>>, Vec<_>) = (None, Vec::new());
        for (at, new) in params.snapshots.into_iter().enumerate() {
            let field = |name: &str| format!("snapshots[{at}].{name}");
            refuse_nil(new.uuid)?;
            check_name(&field("name"), &new.name)?;
            let (of, lvol) = find_lvol(&engine, &field("lvol"), &new.lvol)?;
            if pool.as_ref().is_some_and(|pool| !Rc::ptr_eq(pool, &of)) {
                let cause = "volumes of two pools cannot be cut at one moment";
                return Err(RpcError::errno(Errno::EINVAL, cause)
                    .field(field("lvol"))
                    .remedy("make one call for each pool"));
            }
            pool = Some(of);
            let id = new.uuid.unwrap_or_else(Uuid::new_v4);
            cuts.push((lvol.uuid(), id, new.name));
        }
        let Some(pool) = pool else {
            let cause = "no volume is named";
            return Err(RpcError::errno(Errno::EINVAL, cause).field("snapshots"));
        };
        let ids: Vec<Uuid> = cuts.iter().map(|(_, id, _)| *id).collect();
        pool.run(Command::Snapshot { cuts }).await?;
        let mut replies = Vec::new();
        for id in ids {
            replies.push(made(&engine, &pool, id).await?);
        }
        Ok(replies)
    }
}

pub struct CloneSnapshot;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CloneParams {
    /// The snapshot: UUID, or `pool/name`.
    pub snapshot: String,
    /// Name of the new volume.
    pub name: String,
    /// Keep room in the pool for the whole size; default false.
    #[serde(default)]
    pub thick: bool,
    /// Default: random.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

impl Method<Engine> for CloneSnapshot {
    const NAME: &'static str = "lvol_clone";
    const ABOUT: &'static str =
        "Makes a volume with the contents of a snapshot; they share space until one is written.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CloneParams;
    type Reply = LvolReply;

    async fn apply(params: CloneParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        engine.earlier_changes().await;
        refuse_nil(params.uuid)?;
        check_name("name", &params.name)?;
        let (pool, source) = find_lvol(&engine, "snapshot", &params.snapshot)?;
        let id = params.uuid.unwrap_or_else(Uuid::new_v4);
        let clone = Command::Clone {
            source: source.uuid(),
            id,
            name: params.name,
            thick: params.thick,
        };
        pool.run(clone).await?;
        made(&engine, &pool, id).await
    }
}

pub struct RestoreLvol;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RestoreParams {
    /// UUID, or `pool/name`.
    pub lvol: String,
    /// The snapshot whose contents the volume gets: UUID, or `pool/name`.
    pub snapshot: String,
}

impl Method<Engine> for RestoreLvol {
    const NAME: &'static str = "lvol_restore";
    const ABOUT: &'static str = "Gives a volume that is not in use the contents and size of a snapshot. Its present contents are lost.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RestoreParams;
    type Reply = LvolReply;

    async fn apply(params: RestoreParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol", &params.lvol)?;
        let (of, snapshot) = find_lvol(&engine, "snapshot", &params.snapshot)?;
        pools::check_same_pool("snapshot", &pool, &of)?;
        let id = lvol.uuid();
        drop(lvol);
        pools::withdraw(&engine, &id.to_string()).await?;
        let restored = pool.run(Command::Restore {
            lvol: id,
            snapshot: snapshot.uuid(),
        });
        let restored = restored.await;
        // Restored or not, the volume is a device again.
        let reply = made(&engine, &pool, id).await?;
        restored.map(|_| reply)
    }
}

pub struct InflateLvol;

impl Method<Engine> for InflateLvol {
    const NAME: &'static str = "lvol_inflate";
    const ABOUT: &'static str =
        "Copies the data that a volume shares with its snapshot, so that it depends on none.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolParams;
    type Reply = LvolReply;

    async fn apply(params: LvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        changed(&engine, &params.lvol, |lvol| Command::Inflate { lvol }).await
    }
}

/// Runs a command on an lvol, and describes the lvol after it.
async fn changed(
    engine: &Rc<Engine>,
    lvol: &str,
    command: impl FnOnce(Uuid) -> Command,
) -> Result<LvolReply, RpcError> {
    engine.earlier_changes().await;
    let (pool, lvol) = find_lvol(engine, "lvol", lvol)?;
    pool.run(command(lvol.uuid())).await?;
    refresh(&pool, &lvol).await
}

/// Reads the present state of an lvol, and describes it.
pub async fn refresh(pool: &OpenPool, lvol: &Lvol) -> Result<LvolReply, RpcError> {
    let info = pool.lvol(lvol.uuid()).await?;
    lvol.update(info.clone());
    Ok(describe(&pool.name(), info))
}

pub struct DecoupleLvol;

impl Method<Engine> for DecoupleLvol {
    const NAME: &'static str = "lvol_decouple";
    const ABOUT: &'static str = "Copies the data that a volume shares with its parent. The parent's own parent becomes its parent.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolParams;
    type Reply = LvolReply;

    async fn apply(params: LvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        changed(&engine, &params.lvol, |lvol| Command::Decouple { lvol }).await
    }
}

pub struct SetParent;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SetParentParams {
    /// A thin volume that is not in use: UUID, or `pool/name`.
    pub lvol: String,
    /// The new parent, a snapshot of the volume's size: UUID, or `pool/name`.
    pub snapshot: String,
}

impl Method<Engine> for SetParent {
    const NAME: &'static str = "lvol_set_parent";
    const ABOUT: &'static str = "Makes a thin volume that is not in use a clone of a snapshot. Space that only the volume has keeps \
         its contents; the rest shows the snapshot.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = SetParentParams;
    type Reply = LvolReply;

    async fn apply(params: SetParentParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol", &params.lvol)?;
        let (of, snapshot) = find_lvol(&engine, "snapshot", &params.snapshot)?;
        pools::check_same_pool("snapshot", &pool, &of)?;
        let id = lvol.uuid();
        pools::set_parent(&engine, &pool, lvol, snapshot.uuid()).await?;
        Ok(describe(&pool.name(), pool.lvol(id).await?))
    }
}

pub struct SetReadOnly;

impl Method<Engine> for SetReadOnly {
    const NAME: &'static str = "lvol_set_read_only";
    const ABOUT: &'static str = "Ends all writes to a volume, for good. Clones of it can be made.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolParams;
    type Reply = LvolReply;

    async fn apply(params: LvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        changed(&engine, &params.lvol, |lvol| Command::ReadOnly { lvol }).await
    }
}

pub struct RenameLvol;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameLvolParams {
    /// UUID, or `pool/name`.
    pub lvol: String,
    /// The new name: 1 to 63 bytes, without `/`.
    pub new_name: String,
}

impl Method<Engine> for RenameLvol {
    const NAME: &'static str = "lvol_rename";
    const ABOUT: &'static str = "Gives a volume or snapshot another name; hosts notice nothing.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = RenameLvolParams;
    type Reply = LvolReply;

    async fn apply(params: RenameLvolParams, engine: Rc<Engine>) -> Result<LvolReply, RpcError> {
        engine.earlier_changes().await;
        rename(&engine, ("lvol", &params.lvol), params.new_name).await
    }
}

/// Renames the lvol that a parameter of the call names.
pub async fn rename(
    engine: &Rc<Engine>,
    (field, lvol): (&str, &str),
    new_name: String,
) -> Result<LvolReply, RpcError> {
    check_name("new_name", &new_name)?;
    let (pool, lvol) = find_lvol(engine, field, lvol)?;
    let _names = pool.names.lock().await;
    let (id, before) = (lvol.uuid(), lvol.info().name);
    let (name, bdevs) = (pool.name(), &engine.plane()?.bdevs);
    let (old, new) = (pools::alias(&name, &before), pools::alias(&name, &new_name));
    if old != new {
        pools::check_alias(bdevs, "new_name", &new)?;
    }
    pool.run(Command::Rename {
        lvol: id,
        name: new_name,
    })
    .await?;
    // A volume that had no alias gets one.
    if old != new
        && bdevs.rename_alias(lvol.name(), &old, &new).is_err()
        && let Err(error) = bdevs.add_alias(lvol.name(), &new)
    {
        warn!(alias = new, %error, "a volume has no alias");
    }
    let info = pool.lvol(id).await?;
    lvol.update(info.clone());
    Ok(describe(&name, info))
}

pub struct DeleteLvol;

impl Method<Engine> for DeleteLvol {
    const NAME: &'static str = "lvol_delete";
    const ABOUT: &'static str = "Deletes a volume or snapshot that is not in use. Volumes and clones of a deleted snapshot keep \
         their contents.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = LvolParams;
    type Reply = bool;

    async fn apply(params: LvolParams, engine: Rc<Engine>) -> Result<bool, RpcError> {
        engine.earlier_changes().await;
        let (pool, lvol) = find_lvol(&engine, "lvol", &params.lvol)?;
        pools::delete(&engine, &pool, lvol).await?;
        Ok(true)
    }
}

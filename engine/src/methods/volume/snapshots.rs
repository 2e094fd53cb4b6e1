//! `volume_snapshot_*`: snapshots of volumes, in a cluster and outside of one.

use std::rc::Rc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::super::replies::refuse_nil;
use crate::journal;
use crate::rpc::error::Errno;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;
use crate::services::cluster;
use crate::services::pools::check_name;
use crate::services::volumes::snapshots::{
    self, RECORD, SnapshotLvol, SnapshotRecord, VolumeSnapshot, VolumeSnapshotState,
};

pub(super) fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<CreateVolumeSnapshot>()
        .add::<ListVolumeSnapshots>()
        .add::<DeleteVolumeSnapshot>()
        .add::<RecordVolumeSnapshot>();
}

/// A snapshot of a volume.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VolumeSnapshotReply {
    #[schemars(with = "String")]
    pub uuid: Uuid,
    pub name: String,
    /// UUID of the volume, which may be deleted.
    #[schemars(with = "String")]
    pub volume: Uuid,
    /// The volume's name, if it exists.
    pub volume_name: Option<String>,
    /// The size of the volume at the time of the snapshot.
    pub size_bytes: u64,
    /// Seconds since 1970. `null`: it is not made yet.
    pub created_s: Option<u64>,
    pub state: VolumeSnapshotWord,
    /// The reason of the state.
    pub why: Option<String>,
    /// Its lvols, one for each replica that was in sync. All have the same contents. The snapshot
    /// is ready while one of them is available. While it is deleted: those that are left.
    pub lvols: Vec<SnapshotLvolReply>,
}

/// An lvol of a snapshot.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SnapshotLvolReply {
    #[schemars(with = "String")]
    pub uuid: Uuid,
    /// The node that has it, by name or id. `null`: the daemon is in no cluster.
    pub node: Option<String>,
    /// UUID of the pool that has it. `null`: it is not made yet.
    #[schemars(with = "Option<String>")]
    pub pool: Option<Uuid>,
    /// Name of that pool, if it is open on this daemon.
    pub pool_name: Option<String>,
    /// The reason why it is not available.
    pub why: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeSnapshotWord {
    Making,
    Ready,
    /// It was made, and the nodes or pools of all its lvols are away, or have lost them.
    Unavailable,
    /// It was not made, and is not tried again by itself.
    Failed,
    /// It goes when its nodes have deleted its lvols.
    Deleting,
}

impl From<VolumeSnapshotState> for VolumeSnapshotWord {
    fn from(state: VolumeSnapshotState) -> Self {
        match state {
            VolumeSnapshotState::Making => Self::Making,
            VolumeSnapshotState::Ready => Self::Ready,
            VolumeSnapshotState::Unavailable => Self::Unavailable,
            VolumeSnapshotState::Failed => Self::Failed,
            VolumeSnapshotState::Deleting => Self::Deleting,
        }
    }
}

fn describe(engine: &Engine, one: VolumeSnapshot) -> VolumeSnapshotReply {
    let volume = engine.volumes.find(&one.volume.to_string()).ok();
    let lvols = one.lvols.into_iter();
    VolumeSnapshotReply {
        uuid: one.id,
        name: one.name,
        volume: one.volume,
        volume_name: volume.map(|listed| listed.name()),
        size_bytes: one.bytes,
        created_s: one.created,
        state: one.state.into(),
        why: one.why,
        lvols: lvols.map(|lvol| describe_lvol(engine, lvol)).collect(),
    }
}

fn describe_lvol(engine: &Engine, one: SnapshotLvol) -> SnapshotLvolReply {
    let name = |node: Uuid| {
        engine
            .cluster
            .name_of(node)
            .unwrap_or_else(|| node.to_string())
    };
    let open = |id: Uuid| engine.devices.pools.find(&id.to_string()).ok();
    SnapshotLvolReply {
        uuid: one.lvol,
        node: one.node.map(name),
        pool: one.pool,
        pool_name: one.pool.and_then(open).map(|pool| pool.name()),
        why: one.why,
    }
}

fn is_in_cluster(engine: &Engine) -> bool {
    engine.cluster.node().is_some()
}

pub struct CreateVolumeSnapshot;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolumeSnapshotParams {
    /// Name or UUID of the volume.
    pub volume: String,
    /// Name of the snapshot: 1 to 63 bytes, without `/`.
    pub name: String,
    /// Default: random. A snapshot of the volume with this UUID is returned as it is.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

impl Method<Engine> for CreateVolumeSnapshot {
    const NAME: &'static str = "volume_snapshot_create";
    const ABOUT: &'static str = "Makes a snapshot of a volume while hosts use it. It has every write that was acknowledged before the \
         call, in the pool of each replica in sync: on all of them with the same contents, or on none. A replica \
         that is on no pool of the daemon, or of the cluster's nodes, gets none. Writes of hosts wait meanwhile: \
         for 0.5, 1, 2, 4 and 4 s at most in up to five attempts.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = CreateVolumeSnapshotParams;
    type Reply = VolumeSnapshotReply;

    async fn apply(
        params: CreateVolumeSnapshotParams,
        engine: Rc<Engine>,
    ) -> Result<VolumeSnapshotReply, RpcError> {
        refuse_nil(params.uuid)?;
        check_name("name", &params.name)?;
        let volume = match Uuid::parse_str(&params.volume) {
            // It may be deleted, and the snapshot be there.
            Ok(id) if params.uuid.is_some() => id,
            _ => {
                let found = engine.volumes.find(&params.volume);
                found.map_err(|error| error.field("volume"))?.id()
            }
        };
        let id = params.uuid.unwrap_or_else(Uuid::new_v4);
        let made = if is_in_cluster(&engine) {
            cluster::create_snapshot(&engine, volume, id, &params.name).await?
        } else {
            snapshots::create(&engine, volume, id, &params.name).await?
        };
        Ok(describe(&engine, made))
    }
}

pub struct ListVolumeSnapshots;

#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListVolumeSnapshotsParams {
    /// Only those of this volume, by name or UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// Only the one with this UUID.
    #[schemars(with = "Option<String>")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
}

impl Method<Engine> for ListVolumeSnapshots {
    const NAME: &'static str = "volume_snapshot_list";
    const ABOUT: &'static str =
        "Lists the snapshots of volumes, with the nodes and pools that have them.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = ListVolumeSnapshotsParams;
    type Reply = Vec<VolumeSnapshotReply>;

    async fn apply(
        params: ListVolumeSnapshotsParams,
        engine: Rc<Engine>,
    ) -> Result<Vec<VolumeSnapshotReply>, RpcError> {
        let volume = match params.volume {
            None => None,
            Some(text) => match engine.volumes.find(&text) {
                Ok(listed) => Some(listed.id()),
                // A volume that is deleted may have snapshots.
                Err(error) => match Uuid::parse_str(&text) {
                    Ok(id) => Some(id),
                    Err(_) => return Err(error.field("volume")),
                },
            },
        };
        let mut found = if is_in_cluster(&engine) {
            cluster::snapshots(&engine).await?
        } else {
            snapshots::list(&engine)
        };
        found.retain(|one| {
            volume.is_none_or(|id| one.volume == id) && params.uuid.is_none_or(|id| one.id == id)
        });
        let found = found.into_iter().map(|one| describe(&engine, one));
        Ok(found.collect())
    }
}

pub struct DeleteVolumeSnapshot;

#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeleteVolumeSnapshotParams {
    /// UUID of the snapshot, or its name, if no other one has it.
    pub snapshot: String,
}

impl Method<Engine> for DeleteVolumeSnapshot {
    const NAME: &'static str = "volume_snapshot_delete";
    const ABOUT: &'static str = "Deletes a snapshot of a volume. Volumes that began with it keep their contents. A node of a cluster that \
         is away deletes it when it returns.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = DeleteVolumeSnapshotParams;
    type Reply = bool;

    async fn apply(
        params: DeleteVolumeSnapshotParams,
        engine: Rc<Engine>,
    ) -> Result<bool, RpcError> {
        if is_in_cluster(&engine) {
            let found = cluster::find_snapshot(&engine, &params.snapshot).await?;
            cluster::delete_snapshot(&engine, found.id).await?;
        } else {
            let found = snapshots::find(&engine, &params.snapshot)?;
            snapshots::delete(&engine, found.id).await?;
        }
        Ok(true)
    }
}

struct RecordVolumeSnapshot;

impl Method<Engine> for RecordVolumeSnapshot {
    const NAME: &'static str = RECORD;
    const ABOUT: &'static str = "The daemon's own record of a snapshot of a volume, outside of a cluster. A start deletes the lvols of a \
         snapshot whose creation or deletion was interrupted. Clients are refused.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Free;
    type Params = SnapshotRecord;
    type Reply = bool;

    async fn apply(params: SnapshotRecord, engine: Rc<Engine>) -> Result<bool, RpcError> {
        if !journal::is_replaying() {
            let cause = "only the daemon writes these records";
            return Err(RpcError::errno(Errno::EPERM, cause).remedy("use volume_snapshot_create"));
        }
        snapshots::replay(&engine, params).await?;
        Ok(true)
    }
}

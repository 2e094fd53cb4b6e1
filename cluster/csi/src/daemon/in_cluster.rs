//! Snapshots of volumes of a cluster: the daemon makes them, on any node. Their names have the kind
//! and the volume, as in [`super::snapshots`], so that a volume's record says what it began with.

use nacre_engine::methods::cluster::status::GetClusterStatus;
use nacre_engine::methods::volume::snapshots::{
    CreateVolumeSnapshot, CreateVolumeSnapshotParams, DeleteVolumeSnapshot,
    DeleteVolumeSnapshotParams, ListVolumeSnapshots, ListVolumeSnapshotsParams,
};
use nacre_engine_rpc::NoParams;
use tonic::Status;
use tracing::warn;
use uuid::Uuid;

use super::calls::{VolumeSnapshotAnswer, VolumeSnapshotWord};
use super::snapshots::{MadeState, Snapshot, SnapshotFacts, SnapshotKind, now};
use super::{Daemon, Volume, is_absent, status};

impl Snapshot {
    /// `None`: it is being deleted, or this driver did not make it.
    fn of_cluster(found: VolumeSnapshotAnswer) -> Option<Self> {
        let named = SnapshotFacts::read(&found.name)?;
        let state = match found.state? {
            VolumeSnapshotWord::Ready => MadeState::Ready,
            VolumeSnapshotWord::Unavailable => {
                let why = found.why.unwrap_or_else(|| "its node is away".to_owned());
                MadeState::Unavailable(why)
            }
            VolumeSnapshotWord::Making | VolumeSnapshotWord::Failed => MadeState::NotMade,
            VolumeSnapshotWord::Deleting => return None,
        };
        let created = found.created_s.and_then(|at| u32::try_from(at).ok());
        Some(Self {
            id: found.uuid,
            pool: String::new(),
            facts: SnapshotFacts {
                volume: found.volume,
                seconds: created.unwrap_or(named.seconds),
                bytes: found.size_bytes,
                ..named
            },
            state,
        })
    }
}

impl Daemon {
    /// True if volumes of this deployment have snapshots and clones: in a cluster, if each node
    /// knows them.
    pub(crate) fn has_snapshots(&self) -> Result<bool, Status> {
        if !self.deployment()?.is_cluster() {
            return Ok(true);
        }
        let found = self.ask::<GetClusterStatus>(&NoParams {})?;
        found.has_snapshots.ok_or_else(|| {
            Status::unavailable("etcd does not say whether all nodes have snapshots of volumes")
        })
    }

    /// The snapshot that this driver made under the id, or is making.
    pub(super) fn snapshot_in_cluster(&self, id: Uuid) -> Result<Option<Snapshot>, Status> {
        let params = ListVolumeSnapshotsParams {
            volume: None,
            uuid: Some(id),
        };
        let found = self.ask::<ListVolumeSnapshots>(&params)?;
        Ok(found.into_iter().find_map(Snapshot::of_cluster))
    }

    /// All snapshots that this driver made or is making, by id.
    pub(super) fn all_in_cluster(&self) -> Result<Vec<Snapshot>, Status> {
        let found = self.ask::<ListVolumeSnapshots>(&ListVolumeSnapshotsParams::default())?;
        let mut all: Vec<Snapshot> = found.into_iter().filter_map(Snapshot::of_cluster).collect();
        all.sort_by_key(|one| one.id);
        Ok(all)
    }

    pub(super) fn make_in_cluster(
        &self,
        id: Uuid,
        kind: SnapshotKind,
        volume: &Volume,
    ) -> Result<Snapshot, Status> {
        let all = self.all_in_cluster()?;
        for old in all.iter().filter(|one| one.id != id && one.is_given_up()) {
            if let Err(error) = self.delete_in_cluster(old.id) {
                let error = error.message();
                warn!(id = %old.id, error, "a copy that was given up stays");
            }
        }
        if let Some(found) = all.into_iter().find(|one| one.id == id && one.is_made()) {
            return Ok(found);
        }
        let facts = SnapshotFacts {
            kind,
            volume: volume.id,
            seconds: now(),
            bytes: volume.bytes,
            tag: id.as_fields().1,
        };
        let made = self.ask::<CreateVolumeSnapshot>(&CreateVolumeSnapshotParams {
            volume: volume.id.to_string(),
            name: facts.name(),
            uuid: Some(id),
        })?;
        Snapshot::of_cluster(made).ok_or_else(|| {
            let text = format!("snapshot {id} exists, and this driver did not make it");
            Status::already_exists(text)
        })
    }

    pub(super) fn delete_in_cluster(&self, id: Uuid) -> Result<(), Status> {
        let params = DeleteVolumeSnapshotParams {
            snapshot: id.to_string(),
        };
        match self.call::<DeleteVolumeSnapshot>(&params) {
            Err(error) if !is_absent(&error) => Err(status(&error)),
            _ => Ok(()),
        }
    }
}

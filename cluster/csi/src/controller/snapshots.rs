//! `CreateSnapshot`, `DeleteSnapshot`, `ListSnapshots`, and the sources of new volumes.
//!
//! Snapshots are offered by a daemon in no cluster, and in a cluster whose nodes all know them. The
//! id of a snapshot follows from its name.

use tonic::{Code, Status};
use uuid::Uuid;

use super::list::{after, page_size};
use super::{Controller, signed};
use crate::capability::{bounded_texts, checked_name, is_foreign, required, volume_id};
use crate::daemon::{Deployment, MadeState, Snapshot, SnapshotKind};
use crate::messages::controller::{
    CreateSnapshotRequest, CreateSnapshotResponse, DeleteSnapshotRequest, ListSnapshotsRequest,
    ListSnapshotsResponse, ListedSnapshot, SnapshotInfo, Source, VolumeContentSource,
};
use crate::messages::{Nothing, Timestamp};

/// The source of a new volume, as its description names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentSource {
    Snapshot(Uuid),
    Volume(Uuid),
}

impl ContentSource {
    /// The source of a request. An id that no source can have is one that does not exist.
    pub(super) fn read(asked: Option<&VolumeContentSource>) -> Result<Option<Self>, Status> {
        let Some(asked) = asked else { return Ok(None) };
        let (field, id) = match &asked.source {
            Some(Source::Snapshot(source)) => ("snapshot_id", &source.id),
            Some(Source::Volume(source)) => ("volume_id", &source.id),
            None => {
                let text = "volume_content_source names neither a snapshot nor a volume";
                return Err(Status::invalid_argument(text));
            }
        };
        required(&format!("volume_content_source.{field}"), id)?;
        let found = Uuid::parse_str(id)
            .ok()
            .filter(|one| one.to_string() == *id);
        let found = found.ok_or_else(|| absent(id))?;
        Ok(Some(match &asked.source {
            Some(Source::Snapshot(_)) => Self::Snapshot(found),
            _ => Self::Volume(found),
        }))
    }

    pub(super) fn message(self) -> VolumeContentSource {
        let id = |id: Uuid| crate::messages::controller::SourceId { id: id.to_string() };
        VolumeContentSource {
            source: Some(match self {
                Self::Snapshot(of) => Source::Snapshot(id(of)),
                Self::Volume(of) => Source::Volume(id(of)),
            }),
        }
    }
}

fn absent(id: &str) -> Status {
    Status::not_found(format!("volume_content_source: there is no source {id}"))
}

impl Controller {
    /// Refuses the call in a cluster with nodes that do not know snapshots.
    fn with_snapshots(&self) -> Result<Deployment, Status> {
        let deployment = self.daemon.deployment()?;
        if !self.daemon.has_snapshots()? {
            let text = "a node of the cluster runs a version without snapshots and clones of \
                        volumes: upgrade all nodes";
            return Err(Status::unimplemented(text));
        }
        Ok(deployment)
    }

    pub(crate) fn create_snapshot(
        &self,
        asked: &CreateSnapshotRequest,
    ) -> Result<CreateSnapshotResponse, Status> {
        let name = checked_name(&asked.name)?;
        required("source_volume_id", &asked.source_volume_id)?;
        let source = volume_id(&asked.source_volume_id)?;
        bounded_texts("parameters", &asked.parameters)?;
        if let Some(key) = asked.parameters.keys().find(|key| !is_foreign(key)) {
            let text = format!("parameter {key} is unknown: snapshots have none");
            return Err(Status::invalid_argument(text));
        }
        let id = self.with_snapshots()?.snapshot_id(name);
        let _one = self.pending.start(&id.to_string())?;
        let kind = SnapshotKind::Snap;
        let found = self.daemon.snapshot(id)?;
        let is_it = |found: &Snapshot| found.facts.kind == kind && found.is_made();
        let found = match found.filter(is_it) {
            Some(found) => found,
            None => {
                let volume = self.existing(source, &asked.source_volume_id)?;
                self.daemon.make_snapshot(id, kind, &volume)?
            }
        };
        if source != Some(found.facts.volume) {
            let text = format!(
                "snapshot \"{name}\" exists, and is one of volume {}",
                found.facts.volume
            );
            return Err(Status::already_exists(text));
        }
        Ok(CreateSnapshotResponse {
            snapshot: Some(described(&found)),
        })
    }

    pub(crate) fn delete_snapshot(&self, asked: &DeleteSnapshotRequest) -> Result<Nothing, Status> {
        let id = required("snapshot_id", &asked.snapshot_id)?;
        self.with_snapshots()?;
        let Some(id) = Uuid::parse_str(id).ok().filter(|one| one.to_string() == id) else {
            return Ok(Nothing {});
        };
        let _one = self.pending.start(&asked.snapshot_id)?;
        // Another lvol of this id is none of this driver's.
        if self.daemon.snapshot(id)?.is_some() {
            self.daemon.delete_snapshot(id)?;
        }
        Ok(Nothing {})
    }

    /// Snapshots in the order of their ids, as `ListVolumes` lists volumes.
    pub(crate) fn list_snapshots(
        &self,
        asked: &ListSnapshotsRequest,
    ) -> Result<ListSnapshotsResponse, Status> {
        let most = page_size(asked.max_entries)?;
        let after = after(&asked.starting_token)?;
        self.with_snapshots()?;
        let is_asked = |wanted: &str, id: Uuid| wanted.is_empty() || id.to_string() == wanted;
        let mut found = self.daemon.snapshots()?;
        found.retain(|one| {
            after.is_none_or(|after| one.id > after)
                && is_asked(&asked.snapshot_id, one.id)
                && is_asked(&asked.source_volume_id, one.facts.volume)
        });
        let is_last = found.len() <= most;
        found.truncate(most);
        let next_token = match found.last() {
            Some(last) if !is_last => last.id.to_string(),
            _ => String::new(),
        };
        let entry = |one: &Snapshot| ListedSnapshot {
            snapshot: Some(described(one)),
        };
        Ok(ListSnapshotsResponse {
            entries: found.iter().map(entry).collect(),
            next_token,
        })
    }

    /// The size of the source, which a new volume has at least. The clone of a volume is not made
    /// yet.
    pub(super) fn source_bytes(&self, source: ContentSource) -> Result<u64, Status> {
        self.with_snapshots().map_err(unsupported)?;
        match source {
            ContentSource::Snapshot(id) => Ok(self.source_snapshot(id)?.facts.bytes),
            ContentSource::Volume(id) => {
                let volume = self.daemon.volume(id)?;
                Ok(volume.ok_or_else(|| absent(&id.to_string()))?.bytes)
            }
        }
    }

    fn source_snapshot(&self, id: Uuid) -> Result<Snapshot, Status> {
        let found = self.daemon.snapshot(id)?;
        let found = found.filter(|found| found.facts.kind == SnapshotKind::Snap);
        let found = found.ok_or_else(|| absent(&id.to_string()))?;
        let why = match &found.state {
            MadeState::Ready => return Ok(found),
            MadeState::Unavailable(why) => format!("is not available: {why}"),
            MadeState::NotMade => "is not made yet".to_owned(),
        };
        let text = format!("volume_content_source: snapshot {id} {why}");
        Err(Status::unavailable(text))
    }

    /// The snapshot with the contents of a new volume. For the clone of a volume it is made.
    pub(super) fn contents(&self, source: ContentSource, new: Uuid) -> Result<Snapshot, Status> {
        match source {
            ContentSource::Snapshot(id) => self.source_snapshot(id),
            ContentSource::Volume(id) => {
                let volume = self.daemon.volume(id)?;
                let volume = volume.ok_or_else(|| absent(&id.to_string()))?;
                let make = || {
                    let daemon = &self.daemon;
                    daemon.make_snapshot(copy_id(new), SnapshotKind::Copy, &volume)
                };
                let made = match make() {
                    // Left by a call of the same name with another source.
                    Ok(found) if found.facts.volume != volume.id => {
                        self.daemon.delete_snapshot(found.id)?;
                        make()
                    }
                    made => made,
                };
                made.map_err(|refused| match refused.code() {
                    Code::FailedPrecondition => unsupported(refused),
                    _ => refused,
                })
            }
        }
    }

    /// Deletes the snapshot by which a volume was cloned. The clone keeps its contents.
    pub(super) fn end_copy(&self, source: ContentSource, new: Uuid) -> Result<(), Status> {
        match source {
            ContentSource::Volume(_) if self.daemon.snapshot(copy_id(new))?.is_some() => {
                self.daemon.delete_snapshot(copy_id(new))
            }
            _ => Ok(()),
        }
    }

    /// Deletes the snapshot by which a volume was to be cloned, if its pool is open. One in another
    /// pool is deleted with the old ones (`Daemon::end_old_copies`).
    pub(super) fn end_left_copy(&self, new: Uuid) -> Result<(), Status> {
        if !self.daemon.has_snapshots()? {
            return Ok(());
        }
        match self.daemon.snapshot_in_open_pools(copy_id(new))? {
            Some(found) => self.daemon.delete_snapshot(found.id),
            None => Ok(()),
        }
    }
}

/// The code for a source from which no volume can be made.
fn unsupported(refused: Status) -> Status {
    match refused.code() {
        Code::Unimplemented | Code::FailedPrecondition => {
            Status::invalid_argument(format!("volume_content_source: {}", refused.message()))
        }
        _ => refused,
    }
}

/// The snapshot by which a new volume gets the contents of another one.
fn copy_id(new: Uuid) -> Uuid {
    Uuid::new_v5(&new, b"copy")
}

fn described(snapshot: &Snapshot) -> SnapshotInfo {
    SnapshotInfo {
        size_bytes: signed(snapshot.facts.bytes),
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.facts.volume.to_string(),
        creation_time: Some(Timestamp {
            seconds: snapshot.facts.seconds.into(),
            nanos: 0,
        }),
        ready_to_use: snapshot.state == MadeState::Ready,
        group_snapshot_id: String::new(),
    }
}

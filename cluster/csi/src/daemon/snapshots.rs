//! Snapshots of volumes. In a cluster the daemon makes them ([`super::in_cluster`]).
//!
//! In no cluster, a snapshot of a volume is one of the lvol of a replica that is in sync. Each
//! acknowledged write is in it, and a write that was not acknowledged may be. The name of the lvol
//! has the facts:
//!
//! ```text
//!   csi-KIND-{VOLUME}{SECONDS}{SECTORS}{TAG}     hexadecimal, of 32, 8, 10 and 4 digits
//!   cut       just made: the replica may have left the volume at that moment
//!   snap      the replica was in sync all the time
//!   copy      the same, for one clone of the volume
//! ```
//!
//! The tag is of the snapshot's id: several of one second have different names.

use std::time::{SystemTime, UNIX_EPOCH};

use nacre_engine::methods::pool::lvols::{
    DeleteLvol, GetLvol, ListLvols, ListLvolsParams, LvolParams, NewSnapshot, RenameLvol,
    RenameLvolParams, SnapshotLvols, SnapshotParams,
};
use nacre_engine::methods::state::GetState;
use nacre_engine::methods::volume::list::{GetVolume, Records};
use nacre_engine_rpc::NoParams;
use tonic::Status;
use tracing::warn;
use uuid::Uuid;

use super::calls::{LvolAnswer, OriginAnswer, RecordAnswer};
use super::{Daemon, Volume, by_id, is_absent, status};

/// The smallest block of volumes.
const SECTOR: u64 = 512;
const IN_SYNC: &str = "in_sync";
/// Times that a snapshot is made, if replicas leave and return meanwhile.
const ATTEMPTS: usize = 3;
/// Age in seconds of a copy whose call was given up.
const GIVEN_UP: u32 = 3600;

/// The purpose of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnapshotKind {
    Cut,
    Snap,
    Copy,
}

impl SnapshotKind {
    fn word(self) -> &'static str {
        match self {
            Self::Cut => "cut",
            Self::Snap => "snap",
            Self::Copy => "copy",
        }
    }
}

/// A snapshot of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub id: Uuid,
    /// The pool that has it; empty in a cluster.
    pub pool: String,
    pub facts: SnapshotFacts,
    pub state: MadeState,
}

/// Whether a snapshot can be used. One of a daemon in no cluster is ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MadeState {
    Ready,
    /// It was made. The reason why it cannot be used now.
    Unavailable(String),
    /// The call that makes it has not ended, or failed.
    NotMade,
}

/// The facts in the name of the lvol. In a cluster, the daemon's answer replaces all but `kind` and
/// `tag`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SnapshotFacts {
    pub kind: SnapshotKind,
    pub volume: Uuid,
    /// The time of the snapshot in seconds since 1970.
    pub seconds: u32,
    /// The size of the volume.
    pub bytes: u64,
    /// Part of the snapshot's id.
    pub tag: u16,
}

/// The contents with which a volume began, as the daemon's record has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumeOrigin {
    Snapshot(Uuid),
    /// A copy of this volume at that time.
    Volume(Uuid),
    /// A snapshot that this driver did not make.
    Foreign,
}

impl VolumeOrigin {
    /// The name of a copy has its volume.
    pub(super) fn of(found: OriginAnswer) -> Self {
        match SnapshotFacts::read(&found.name) {
            Some(facts) if facts.kind == SnapshotKind::Copy => Self::Volume(facts.volume),
            Some(_) => Self::Snapshot(found.snapshot),
            None => Self::Foreign,
        }
    }
}

impl SnapshotFacts {
    pub(super) fn name(self) -> String {
        format!(
            "csi-{}-{}{:08x}{:010x}{:04x}",
            self.kind.word(),
            self.volume.simple(),
            self.seconds,
            self.bytes / SECTOR,
            self.tag
        )
    }

    /// `None`: it is no snapshot that this driver made.
    pub(super) fn read(name: &str) -> Option<Self> {
        let (word, facts) = name.strip_prefix("csi-")?.split_once('-')?;
        let kinds = [SnapshotKind::Cut, SnapshotKind::Snap, SnapshotKind::Copy];
        let read = Self {
            kind: kinds.into_iter().find(|kind| kind.word() == word)?,
            volume: Uuid::parse_str(facts.get(..32)?).ok()?,
            seconds: u32::from_str_radix(facts.get(32..40)?, 16).ok()?,
            bytes: u64::from_str_radix(facts.get(40..50)?, 16).ok()? * SECTOR,
            tag: u16::from_str_radix(facts.get(50..54)?, 16).ok()?,
        };
        (read.name() == name).then_some(read)
    }
}

impl Snapshot {
    fn read(lvol: LvolAnswer) -> Option<Self> {
        let facts = SnapshotFacts::read(&lvol.name).filter(|_| lvol.snapshot)?;
        Some(Self {
            id: lvol.uuid,
            pool: lvol.pool,
            facts,
            state: MadeState::Ready,
        })
    }

    /// A copy or cut that is older than [`GIVEN_UP`]: its call has ended.
    pub(super) fn is_given_up(&self) -> bool {
        let age = now().saturating_sub(self.facts.seconds);
        self.facts.kind != SnapshotKind::Snap && age > GIVEN_UP
    }

    pub(crate) fn is_made(&self) -> bool {
        self.state != MadeState::NotMade
    }
}

impl Daemon {
    /// The snapshot that this driver made under the id. `UNAVAILABLE` if a pool that is not open
    /// may have it.
    pub(crate) fn snapshot(&self, id: Uuid) -> Result<Option<Snapshot>, Status> {
        if self.deployment()?.is_cluster() {
            return self.snapshot_in_cluster(id);
        }
        match self.call::<GetLvol>(&lvol(id)) {
            Ok(found) => Ok(Snapshot::read(found)),
            Err(error) if is_absent(&error) => self.all_pools_are_open().map(|()| None),
            Err(error) => Err(status(&error)),
        }
    }

    /// Like [`Daemon::snapshot`], but `None` also if the snapshot may be in a pool that is not
    /// open.
    pub(crate) fn snapshot_in_open_pools(&self, id: Uuid) -> Result<Option<Snapshot>, Status> {
        if self.deployment()?.is_cluster() {
            return self.snapshot_in_cluster(id);
        }
        match self.call::<GetLvol>(&lvol(id)) {
            Ok(found) => Ok(Snapshot::read(found)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(status(&error)),
        }
    }

    /// Deletes copies and cuts that are older than [`GIVEN_UP`]: the call that made them has ended.
    /// A repeated call makes its copy again. A failure of one does not concern the caller.
    fn end_old_copies(&self, but: Uuid) -> Result<(), Status> {
        let found = self.ask::<ListLvols>(&ListLvolsParams::default())?;
        let is_old = |one: &Snapshot| one.id != but && one.is_given_up();
        for old in found.into_iter().filter_map(Snapshot::read).filter(is_old) {
            // By its name, which has its kind and its time. A call may have made the id's snapshot
            // anew meanwhile, under another name.
            let params = LvolParams {
                lvol: format!("{}/{}", old.pool, old.facts.name()),
            };
            match self.call::<DeleteLvol>(&params) {
                Err(error) if !is_absent(&error) => {
                    warn!(id = %old.id, %error, "a copy that was given up stays");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Refuses while a stored pool is not open: the snapshot may be in that pool.
    fn all_pools_are_open(&self) -> Result<(), Status> {
        let objects = self.ask::<GetState>(&NoParams {})?.objects;
        let mut away = objects.iter().filter(|one| one.state != "live");
        match away.find(|one| one.key.starts_with("pool/")) {
            None => Ok(()),
            Some(pool) => Err(Status::unavailable(format!(
                "{}: this pool is not open, and may have the snapshot: attach its disks, or have \
                 the daemon forget it with pool_export",
                pool.key
            ))),
        }
    }

    /// All snapshots that this driver made, by id.
    pub(crate) fn snapshots(&self) -> Result<Vec<Snapshot>, Status> {
        if self.deployment()?.is_cluster() {
            let mut found = self.all_in_cluster()?;
            found.retain(|one| one.is_made() && one.facts.kind == SnapshotKind::Snap);
            return Ok(found);
        }
        let found = self.ask::<ListLvols>(&ListLvolsParams::default())?;
        let found = found.into_iter().filter_map(Snapshot::read);
        let mut snapshots: Vec<Snapshot> = found
            .filter(|one| one.facts.kind == SnapshotKind::Snap)
            .collect();
        snapshots.sort_by_key(|one| one.id);
        Ok(snapshots)
    }

    /// Makes a snapshot of the volume under the id, or finds it. One of another volume is returned
    /// as well.
    pub(crate) fn make_snapshot(
        &self,
        id: Uuid,
        kind: SnapshotKind,
        volume: &Volume,
    ) -> Result<Snapshot, Status> {
        if self.deployment()?.is_cluster() {
            return self.make_in_cluster(id, kind, volume);
        }
        self.end_old_copies(id)?;
        for _ in 0..ATTEMPTS {
            match self.snapshot(id)? {
                // An earlier call did not end.
                Some(found) if found.facts.kind == SnapshotKind::Cut => self.delete_snapshot(id)?,
                Some(found) => return Ok(found),
                None => {}
            }
            let before = self.record(volume.id)?;
            let (replica, bytes) = self.replica_in_sync(volume, before.as_ref())?;
            let cut = SnapshotFacts {
                kind: SnapshotKind::Cut,
                volume: volume.id,
                seconds: now(),
                bytes,
                tag: id.as_fields().1,
            };
            self.ask::<SnapshotLvols>(&SnapshotParams {
                snapshots: vec![NewSnapshot {
                    lvol: replica.to_string(),
                    name: cut.name(),
                    uuid: Some(id),
                }],
            })?;
            // A replica that left before the snapshot would lack writes. Its volume would have
            // changed its record before it acknowledged them. So does a volume that grows.
            let after = self.record(volume.id)?;
            if let (Some(before), Some(after)) = (before, after)
                && before.revision == after.revision
            {
                let facts = SnapshotFacts { kind, ..cut };
                self.ask::<RenameLvol>(&RenameLvolParams {
                    lvol: id.to_string(),
                    new_name: facts.name(),
                })?;
                let made = self.snapshot(id)?;
                return made.ok_or_else(|| {
                    let text = format!("snapshot {id} was deleted at this time; try again");
                    Status::aborted(text)
                });
            }
            self.delete_snapshot(id)?;
        }
        Err(Status::unavailable(format!(
            "volume {}: its replicas leave and return at this time; try again later",
            volume.name
        )))
    }

    pub(crate) fn delete_snapshot(&self, id: Uuid) -> Result<(), Status> {
        if self.deployment()?.is_cluster() {
            return self.delete_in_cluster(id);
        }
        match self.call::<DeleteLvol>(&lvol(id)) {
            Err(error) if !is_absent(&error) => Err(status(&error)),
            _ => Ok(()),
        }
    }

    /// The lvol of a replica in sync, and the present size of the volume.
    ///
    /// The record counts, too: it changes before the volume does without a replica.
    fn replica_in_sync(
        &self,
        volume: &Volume,
        record: Option<&RecordAnswer>,
    ) -> Result<(Uuid, u64), Status> {
        let in_record = |device: &str| {
            let mut replicas = record.into_iter().flat_map(|record| &record.replicas);
            replicas.any(|one| one.device == device && one.state.state == IN_SYNC)
        };
        let found = self.ask::<GetVolume>(&by_id(volume.id))?;
        let bytes = found.num_blocks.saturating_mul(found.block_size);
        let mut has_pool = false;
        for replica in found.replicas {
            let Ok(device) = Uuid::parse_str(&replica.device) else {
                continue;
            };
            match self.call::<GetLvol>(&lvol(device)) {
                // A replica that the volume does not reach is in sync as well, if it was the last.
                // At the end of a resync, its label may not say yet that it is in sync: no volume
                // could begin with the snapshot.
                Ok(_)
                    if replica.attached
                        && replica.state == IN_SYNC
                        && replica.resync.is_none()
                        && in_record(&replica.device) =>
                {
                    return Ok((device, bytes));
                }
                Ok(_) => has_pool = true,
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(status(&error)),
            }
        }
        if !has_pool {
            self.all_pools_are_open()?;
        }
        Err(if has_pool {
            Status::unavailable(format!(
                "volume {}: no replica on a pool is in sync and reached; try again later",
                volume.name
            ))
        } else {
            Status::failed_precondition(format!(
                "volume {}: no replica is on a pool, so that it has no snapshots: make volumes on \
                 pools",
                volume.name
            ))
        })
    }

    fn record(&self, volume: Uuid) -> Result<Option<RecordAnswer>, Status> {
        let records = self.ask::<Records>(&NoParams {})?.volumes;
        Ok(records.into_iter().find(|one| one.id == volume))
    }
}

fn lvol(id: Uuid) -> LvolParams {
    LvolParams {
        lvol: id.to_string(),
    }
}

pub(super) fn now() -> u32 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    u32::try_from(now.unwrap_or_default().as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the facts of a snapshot are read as they were written, and no other name is taken for
    /// one. Method: the longest name, and names that differ in one place.
    #[test]
    fn names_have_the_facts() {
        let facts = SnapshotFacts {
            kind: SnapshotKind::Snap,
            volume: Uuid::from_u128(7 << 100),
            seconds: 1_796_000_000,
            bytes: ((1 << 40) - 1) * SECTOR,
            tag: 0xffff,
        };
        let name = facts.name();
        assert!(name.len() <= 63, "the longest name of an lvol");
        assert_eq!(SnapshotFacts::read(&name), Some(facts));
        for kind in [SnapshotKind::Cut, SnapshotKind::Copy] {
            let name = SnapshotFacts { kind, ..facts }.name();
            assert_eq!(SnapshotFacts::read(&name).map(|read| read.kind), Some(kind));
        }
        for other in [
            "csi-snap-",
            "monday",
            &name.replace("snap", "other"),
            &name.to_uppercase(),
            &format!("{name}0"),
            &name[..name.len() - 1],
        ] {
            assert_eq!(SnapshotFacts::read(other), None, "{other}");
        }
    }
}

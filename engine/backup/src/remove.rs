//! Deletes backups, and removes the objects that no manifest names (a sweep).

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::object::ObjectName;
use crate::{Failure, Progress, Store};

/// An older mark is left over from a daemon that ended.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// The result of a removal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Removed {
    /// Number of removed objects.
    pub objects: u64,
    /// Their size in the store.
    pub bytes: u64,
    /// True if another daemon backs up the volume: then a later sweep removes the objects.
    pub deferred: bool,
}

/// Deletes a backup: its manifest, then the objects that no other backup of the volume names, also
/// those of unfinished backups. `holder` is this daemon's UUID. If another manifest of the volume
/// is bad, fails after the deletion of the manifest, and removes no object.
pub async fn remove(
    store: &Store,
    volume: Uuid,
    backup: Uuid,
    holder: Uuid,
    progress: &Progress,
) -> Result<Removed, Failure> {
    if progress.is_cancelled() {
        return Err(Failure::Cancelled);
    }
    let ids = store.manifests(volume).await?;
    if !ids.contains(&backup) {
        return Err(Failure::Unknown(backup));
    }
    store.delete(&store.manifest_path(volume, backup)).await?;
    // After a cancellation, a later removal removes the rest.
    let sweep = sweep_with(store, volume, holder, progress);
    progress.unless_cancelled(sweep).await
}

pub(crate) async fn sweep(store: &Store, volume: Uuid, holder: Uuid) -> Result<Removed, Failure> {
    sweep_with(store, volume, holder, &Progress::default()).await
}

/// Removes objects that no manifest names. The order of the lists matters: see the crate.
async fn sweep_with(
    store: &Store,
    volume: Uuid,
    holder: Uuid,
    progress: &Progress,
) -> Result<Removed, Failure> {
    let mut unnamed = store.objects(volume).await?;
    let staged = store.staged(volume).await?;
    let marks = store.marks(volume).await?;
    let now = SystemTime::now();
    let is_stale = |written: SystemTime| now.duration_since(written).is_ok_and(|age| age > STALE);
    let is_live = |mark: &&crate::store::Mark| mark.holder != holder && !is_stale(mark.written);
    if marks.iter().any(|mark| is_live(&mark)) {
        return Ok(Removed {
            deferred: true,
            ..Removed::default()
        });
    }
    for backup in store.manifests(volume).await? {
        let Some(manifest) = store.manifest(volume, backup).await? else {
            continue;
        };
        for entry in &manifest.objects {
            unnamed.remove(&entry.name);
        }
    }
    progress.set_total(unnamed.len() as u64);
    store.remove_staged(volume, staged).await?;
    let mut removed = Removed::default();
    for (name, bytes) in unnamed {
        remove_object(store, volume, name).await?;
        progress.add(1, 0);
        removed.objects += 1;
        removed.bytes += bytes;
    }
    for mark in marks {
        store.unmark(volume, mark.holder, mark.backup).await?;
    }
    Ok(removed)
}

async fn remove_object(store: &Store, volume: Uuid, name: ObjectName) -> Result<(), Failure> {
    store.delete(&store.object_path(volume, name)).await
}

//! Deletes backups, and removes the objects that no manifest names (a sweep). While a daemon backs
//! up a volume, the store has its *mark*; the header of the crate has the files and their order.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::object::ObjectName;
use crate::{Failure, Progress, Store};

/// A mark of this age or younger defers a sweep by another daemon. An older one is left over from a
/// daemon that ended.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// Most bad manifests that a removal names.
const MOST_NAMED: usize = 100;

/// The result of a removal.
#[derive(Debug, Default)]
pub struct Removed {
    /// Number of removed objects.
    pub objects: u64,
    /// Their size in the store.
    pub bytes: u64,
    /// True if another daemon backs up the volume: then a later sweep removes the objects.
    pub deferred: bool,
    /// The reasons that objects without a backup are left: the volume's other backups with bad
    /// manifests, at most 100, and one failure of the store or the cancellation. A later sweep
    /// removes the objects.
    pub left: Vec<Failure>,
}

/// Deletes a backup: its manifest, then the objects that no other backup of the volume names, also
/// those of unfinished backups. `holder` is this daemon's UUID. If another manifest of the volume
/// is bad, removes no object. Succeeds once the manifest is deleted: what happens afterwards is in
/// [`Removed::left`].
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
    let mut removed = Removed::default();
    let sweep = sweep_with(store, volume, holder, progress, &mut removed);
    let swept = progress.unless_cancelled(sweep).await;
    removed.left.extend(swept.err());
    Ok(removed)
}

/// Removes the objects of a volume that no manifest names. `holder` is this daemon's UUID.
pub(crate) async fn sweep(store: &Store, volume: Uuid, holder: Uuid) -> Result<Removed, Failure> {
    let mut removed = Removed::default();
    sweep_with(store, volume, holder, &Progress::default(), &mut removed).await?;
    Ok(removed)
}

/// Removes objects that no manifest names. The order of the lists matters: see the crate.
async fn sweep_with(
    store: &Store,
    volume: Uuid,
    holder: Uuid,
    progress: &Progress,
    removed: &mut Removed,
) -> Result<(), Failure> {
    let mut unnamed = store.objects(volume).await?;
    let staged = store.staged(volume).await?;
    let marks = store.marks(volume).await?;
    let now = SystemTime::now();
    let is_stale = |written: SystemTime| now.duration_since(written).is_ok_and(|age| age > STALE);
    let is_live = |mark: &&crate::store::Mark| mark.holder != holder && !is_stale(mark.written);
    if marks.iter().any(|mark| is_live(&mark)) {
        removed.deferred = true;
        return Ok(());
    }
    let mut is_complete = true;
    for backup in store.manifests(volume).await? {
        let manifest = match store.manifest(volume, backup).await {
            Ok(Some(manifest)) => manifest,
            Ok(None) => continue,
            Err(failure @ Failure::Damaged { .. }) => {
                is_complete = false;
                if removed.left.len() < MOST_NAMED {
                    removed.left.push(failure);
                }
                continue;
            }
            Err(failure) => return Err(failure),
        };
        for entry in &manifest.objects {
            unnamed.remove(&entry.name);
        }
    }
    if !is_complete {
        // The objects of a bad manifest are not known.
        return Ok(());
    }
    progress.set_total(unnamed.len() as u64);
    store.remove_staged(volume, staged).await?;
    for (name, bytes) in unnamed {
        remove_object(store, volume, name).await?;
        progress.add(1, 0);
        removed.objects += 1;
        removed.bytes += bytes;
    }
    for mark in marks {
        store.unmark(volume, mark.holder, mark.backup).await?;
    }
    Ok(())
}

async fn remove_object(store: &Store, volume: Uuid, name: ObjectName) -> Result<(), Failure> {
    store.delete(&store.object_path(volume, name)).await
}

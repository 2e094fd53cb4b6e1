//! Creates a backup: writes the objects of a snapshot that no earlier backup has, and then its
//! manifest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use uuid::Uuid;

use crate::manifest::{Entry, Facts, LATEST, MOST_OBJECTS, Manifest};
use crate::object::ObjectName;
use crate::object::{self, Digest};
use crate::remove::sweep;
use crate::{Failure, Header, Progress, Store, Volume};

/// Objects that are written at the same time. Each needs up to 4 MiB of memory.
const WRITES: usize = 4;
/// After this time the mark is written again: sweeps ignore marks older than a day.
const REMARK: Duration = Duration::from_secs(3600);

/// Time for a failed creation to remove its objects.
const UNDO: Duration = Duration::from_secs(20);

/// The parameters of a new backup.
#[derive(Debug, Clone)]
pub struct Request {
    /// The UUID of the new backup.
    pub id: Uuid,
    /// The UUID of the daemon that creates the backup.
    pub holder: Uuid,
    /// Seconds since 1970. The backup gets a later time if its newest predecessor is not older.
    pub created: u64,
    pub volume: Volume,
    pub snapshot: Volume,
    /// Size of the volume in bytes, a multiple of 512.
    pub size_bytes: u64,
    /// Write all objects, even those that an earlier backup has.
    pub full: bool,
}

/// Reads the contents of a snapshot. Errors are texts for users.
#[allow(async_fn_in_trait)]
pub trait Source {
    /// Prepares to read. Returns the number of pieces to come.
    async fn begin(&mut self) -> Result<u64, String>;

    /// The next piece, in ascending order of the indices; `None` at the end. Pieces that are left
    /// out read as zeroes.
    async fn next(&mut self) -> Result<Option<Piece>, String>;
}

/// [`OBJECT_BYTES`](crate::OBJECT_BYTES) of a volume, from byte `index * OBJECT_BYTES` on; the last
/// piece of the volume can be shorter.
#[derive(Debug)]
pub struct Piece {
    pub index: u32,
    pub data: Vec<u8>,
}

/// A complete backup.
#[derive(Debug)]
pub struct Created {
    pub header: Header,
    /// Backups that could not be the base: their manifests are bad.
    pub bad: Vec<Failure>,
}

/// Creates a backup, and returns after its manifest is in the store. After a failure or a
/// cancellation it removes the new objects, for at most 20 s; a later sweep removes the others. If
/// the write of the manifest fails, the backup can be in the store nevertheless.
pub async fn create(
    store: &Store,
    request: &Request,
    source: &mut impl Source,
    progress: &Progress,
) -> Result<Created, Failure> {
    let (volume, holder, id) = (request.volume.id, request.holder, request.id);
    let mut is_marked = false;
    let written = async {
        let marks = store.marks(volume).await?;
        if marks.iter().any(|mark| mark.holder == holder) {
            // Objects of backups that this daemon did not complete.
            sweep(store, volume, holder).await?;
        }
        is_marked = true;
        store.mark(volume, holder, id).await?;
        let manifest = write_objects(store, request, source, progress).await?;
        store.check_mark(volume, holder, id).await?;
        Ok(manifest)
    };
    let (mut manifest, bad) = match progress.unless_cancelled(written).await {
        Ok(written) => written,
        Err(failure) => {
            if is_marked {
                let undo = undo(store, volume, holder, id);
                // A later sweep removes the rest, for which the mark stays.
                let _ = tokio::time::timeout(UNDO, undo).await;
            }
            return Err(failure);
        }
    };
    let text = manifest.write().map_err(|error| {
        let cause = crate::Damage::Malformed(error.to_string());
        Failure::damaged("the new manifest", cause)
    })?;
    // After an error, the manifest can be in the store or not: both are right, so nothing is
    // undone.
    store.put(&store.manifest_path(volume, id), text).await?;
    let _ = store.unmark(volume, holder, id).await;
    let header = manifest.header;
    Ok(Created { header, bad })
}

/// Removes the objects of a backup that has no manifest, then its mark.
async fn undo(store: &Store, volume: Uuid, holder: Uuid, id: Uuid) -> Result<(), Failure> {
    let objects = store.objects_of(volume, id).await?;
    for name in objects {
        store.delete(&store.object_path(volume, name)).await?;
    }
    store.unmark(volume, holder, id).await
}

/// The newest backup whose manifest and objects can be used, and the bad ones that are newer.
async fn newest(store: &Store, volume: Uuid) -> Result<(Option<Manifest>, Vec<Failure>), Failure> {
    let listed = store.list(Some(volume)).await?;
    let mut bad: Vec<_> = listed.bad.into_iter().map(|bad| bad.cause).collect();
    for header in listed.backups.iter().rev() {
        match store.manifest(volume, header.id).await {
            Ok(Some(manifest)) => return Ok((Some(manifest), bad)),
            Ok(None) => {}
            Err(failure @ Failure::Damaged { .. }) => bad.push(failure),
            Err(failure) => return Err(failure),
        }
    }
    Ok((None, bad))
}

async fn write_objects(
    store: &Store,
    request: &Request,
    source: &mut impl Source,
    progress: &Progress,
) -> Result<(Manifest, Vec<Failure>), Failure> {
    let volume = request.volume.id;
    let (newest, bad) = newest(store, volume).await?;
    // A clock that was set back does not make a new backup older than the last one.
    let after = newest
        .as_ref()
        .map_or(0, |newest| newest.header.created + 1);
    let created = request.created.max(after).min(LATEST);
    let base = newest.filter(|_| !request.full);
    let mut known = BTreeMap::new();
    if let Some(base) = &base {
        // An object that is gone or has another size is written again.
        let present = store.objects(volume).await?;
        let sound = base.objects.iter();
        let sound = sound.filter(|entry| present.get(&entry.name) == Some(&entry.stored.into()));
        known.extend(sound.map(|entry| (entry.name.index, *entry)));
    }
    let total = source.begin().await.map_err(Failure::Source)?;
    progress.set_total(total);
    let bytes_of = |index| crate::manifest::bytes_of(request.size_bytes, index);
    let mut objects: Vec<Entry> = Vec::new();
    let mut writes: Writes = JoinSet::new();
    let mut marked = Instant::now();
    let mut last = None;
    while let Some(piece) = source.next().await.map_err(Failure::Source)? {
        let Piece { index, data } = piece;
        if last.replace(index).is_some_and(|last| last >= index) || bytes_of(index) == 0 {
            return Err(Failure::Source("its pieces are not in order".into()));
        }
        if marked.elapsed() > REMARK {
            store.check_mark(volume, request.holder, request.id).await?;
            store.mark(volume, request.holder, request.id).await?;
            marked = Instant::now();
        }
        if data.len() != bytes_of(index) {
            return Err(Failure::Source("a piece has another size".into()));
        }
        if object::is_zero(&data) {
            progress.add(1, 0);
            continue;
        }
        let digest = Digest::of(&data);
        let is_sound = |entry: &&Entry| {
            base.as_ref()
                .is_some_and(|base| base.header.bytes_of(index) == data.len())
                && entry.digest == digest
        };
        if let Some(entry) = known.get(&index).filter(is_sound) {
            objects.push(*entry);
            progress.add(1, 0);
            continue;
        }
        if objects.len() >= MOST_OBJECTS {
            return Err(Failure::TooLarge { most: MOST_OBJECTS });
        }
        let bytes = object::encode(&data);
        drop(data);
        let name = ObjectName {
            source: request.id,
            index,
        };
        objects.push(Entry {
            name,
            stored: bytes.len() as u32,
            digest,
        });
        let (store, path) = (store.clone(), store.object_path(volume, name));
        writes.spawn(async move {
            let stored = bytes.len() as u64;
            store.put(&path, bytes).await.map(|()| stored)
        });
        while writes.len() >= WRITES {
            one_written(&mut writes, progress).await?;
        }
    }
    while !writes.is_empty() {
        one_written(&mut writes, progress).await?;
    }
    if objects.len() > MOST_OBJECTS {
        return Err(Failure::TooLarge { most: MOST_OBJECTS });
    }
    let facts = Facts {
        id: request.id,
        created,
        volume: request.volume.clone(),
        snapshot: request.snapshot.clone(),
        size_bytes: request.size_bytes,
        base: base.as_ref().map(|base| base.header.id),
    };
    Ok((Manifest::new(facts, objects), bad))
}

type Writes = JoinSet<Result<u64, Failure>>;

async fn one_written(writes: &mut Writes, progress: &Progress) -> Result<(), Failure> {
    match writes.join_next().await {
        Some(Ok(written)) => progress.add(1, written?),
        Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
        None => {}
    }
    Ok(())
}

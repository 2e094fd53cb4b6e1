//! Reads a backup: verifies all its objects, or writes its data to a device.

use futures_util::stream::{StreamExt, TryStreamExt};
use uuid::Uuid;

use crate::manifest::{Entry, Header, Manifest};
use crate::object::{self, OBJECT_BYTES};
use crate::{Damage, Failure, Progress, Store};

/// Objects that are read at the same time. Each needs up to 8 MiB of memory.
const READS: usize = 4;
/// Most damaged objects that a verification names.
const MOST_NAMED: usize = 100;
/// Bytes of a pool's unit of allocation: a unit of zeroes is not written, so takes no space.
const UNIT: usize = 64 << 10;

/// The device to restore to. It must read as zeroes. Errors are texts for users.
#[allow(async_fn_in_trait)]
pub trait Target {
    /// Writes data from byte `offset` on: a multiple of 64 KiB, or less at the end of the volume.
    async fn write(&mut self, offset: u64, data: Vec<u8>) -> Result<(), String>;

    /// Makes all written data durable.
    async fn flush(&mut self) -> Result<(), String>;
}

/// The result of a verification.
#[derive(Debug)]
pub struct Verified {
    pub header: Header,
    /// The first 100 damaged objects, with the cause.
    pub damaged: Vec<Failure>,
    /// Number of further damaged objects, which are not named.
    pub more_damaged: u64,
}

async fn load(store: &Store, volume: Uuid, backup: Uuid) -> Result<Manifest, Failure> {
    let manifest = store.manifest(volume, backup).await?;
    manifest.ok_or(Failure::Unknown(backup))
}

async fn read(store: &Store, header: &Header, entry: Entry) -> Result<Vec<u8>, Failure> {
    let path = store.object_path(header.volume.id, entry.name);
    let expected = u64::from(entry.stored);
    let object = store.get(&path, entry.stored as usize, false).await?;
    let damaged = |cause| Failure::damaged(&path, cause);
    let Some(object) = object else {
        // A store that disappears is not damaged, nor is a backup that is deleted meanwhile.
        let manifest = store.manifest_path(header.volume.id, header.id);
        if store.has(&manifest).await? {
            return Err(damaged(Damage::Missing));
        }
        return Err(Failure::Gone(manifest.to_string()));
    };
    if object.len() as u64 != expected {
        return Err(damaged(Damage::Size {
            found: object.len() as u64,
            expected,
        }));
    }
    let bytes = header.bytes_of(entry.name.index);
    object::decode(&object, bytes, entry.digest).map_err(damaged)
}

/// Reads the manifest and all objects of a backup, and checks their digests. Fails if the manifest
/// is damaged; damaged objects are in the result.
pub async fn verify(
    store: &Store,
    volume: Uuid,
    backup: Uuid,
    progress: &Progress,
) -> Result<Verified, Failure> {
    let work = async {
        let manifest = load(store, volume, backup).await?;
        let header = manifest.header;
        progress.set_total(header.objects);
        let (mut damaged, mut more_damaged) = (Vec::new(), 0);
        let reads = manifest.objects.into_iter().map(|entry| {
            let header = &header;
            async move { (entry.stored, read(store, header, entry).await.map(drop)) }
        });
        let mut reads = futures_util::stream::iter(reads).buffered(READS);
        while let Some((stored, result)) = reads.next().await {
            progress.add(1, stored.into());
            match result {
                Ok(()) => {}
                Err(failure @ Failure::Damaged { .. }) if damaged.len() < MOST_NAMED => {
                    damaged.push(failure);
                }
                Err(Failure::Damaged { .. }) => more_damaged += 1,
                // A store that does not answer says nothing about the backup.
                Err(failure) => return Err(failure),
            }
        }
        drop(reads);
        Ok(Verified {
            header,
            damaged,
            more_damaged,
        })
    };
    progress.unless_cancelled(work).await
}

/// Writes a backup to a device of at least its size, then flushes the device. Ranges of 64 KiB that
/// are all zero are not written. Fails at the first damaged object.
pub async fn restore(
    store: &Store,
    volume: Uuid,
    backup: Uuid,
    target: &mut impl Target,
    progress: &Progress,
) -> Result<Header, Failure> {
    let work = async {
        let manifest = load(store, volume, backup).await?;
        let header = manifest.header;
        progress.set_total(header.objects);
        let reads = manifest.objects.into_iter().map(|entry| {
            let header = &header;
            async move {
                let data = read(store, header, entry).await?;
                Ok::<_, Failure>((entry, data))
            }
        });
        let mut reads = futures_util::stream::iter(reads).buffered(READS);
        while let Some((entry, data)) = reads.try_next().await? {
            let first = u64::from(entry.name.index) * OBJECT_BYTES as u64;
            for (from, to) in used_parts(&data) {
                let part = data[from..to].to_vec();
                let written = target.write(first + from as u64, part).await;
                written.map_err(Failure::Target)?;
            }
            progress.add(1, entry.stored.into());
        }
        drop(reads);
        target.flush().await.map_err(Failure::Target)?;
        Ok(header)
    };
    progress.unless_cancelled(work).await
}

/// The ranges of `data`, in whole units, that are not all zero.
fn used_parts(data: &[u8]) -> Vec<(usize, usize)> {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for (at, unit) in data.chunks(UNIT).enumerate() {
        let (from, to) = (at * UNIT, at * UNIT + unit.len());
        match parts.last_mut() {
            _ if object::is_zero(unit) => {}
            Some(last) if last.1 == from => last.1 = to,
            _ => parts.push((from, to)),
        }
    }
    parts
}

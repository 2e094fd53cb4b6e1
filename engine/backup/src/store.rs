//! The store of backups: a directory or an object store such as S3. Each operation has a time
//! limit, and each list has a maximum length. This module also names the files of a store.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::{Path, PathPart};
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt};
use uuid::Uuid;

use crate::manifest::{self, Header, LONGEST_HEADER, LONGEST_MANIFEST, Manifest};
use crate::object::ObjectName;
use crate::{Damage, Failure, staged};

/// The directory of all files of Nacre, below the prefix that the user configures.
const ROOT: &str = "nacre-backup";
/// How long one operation may take, with the attempts of the client.
const PATIENCE: Duration = Duration::from_secs(240);
/// Most backups of a volume, and most volumes of a store.
pub(crate) const MOST_MANIFESTS: usize = 4096;
const MOST_VOLUMES: usize = 4096;
/// Most objects in a list of a volume's objects.
const MOST_OBJECTS: usize = 1 << 23;
/// Headers of manifests that are read at the same time.
const READS: usize = 8;

/// An open store.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<dyn ObjectStore>,
    root: Path,
    /// The directory; `None` for an object store.
    files: Option<PathBuf>,
}

/// The backups of a store.
#[derive(Debug, Default)]
pub struct Listed {
    /// Oldest first.
    pub backups: Vec<Header>,
    pub bad: Vec<BadBackup>,
}

/// A backup whose manifest cannot be used.
#[derive(Debug)]
pub struct BadBackup {
    pub id: Uuid,
    pub volume: Uuid,
    pub cause: Failure,
}

/// The mark of an unfinished backup: a file in the store that the daemon `holder` writes at its
/// begin and deletes at its end.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) holder: Uuid,
    pub(crate) backup: Uuid,
    pub(crate) written: SystemTime,
}

impl Store {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, prefix: Path) -> Self {
        let root = prefix.join(PathPart::from(ROOT));
        Self {
            inner,
            root,
            files: None,
        }
    }

    pub(crate) fn in_directory(inner: Arc<dyn ObjectStore>, directory: &str) -> Self {
        let files = Some(std::path::Path::new(directory).join(ROOT));
        Self {
            files,
            ..Self::new(inner, Path::default())
        }
    }

    fn directory(&self, volume: Uuid, kind: &'static str) -> Path {
        let volume = PathPart::from(volume.to_string());
        self.root.clone().join(volume).join(PathPart::from(kind))
    }

    pub(crate) fn manifest_path(&self, volume: Uuid, backup: Uuid) -> Path {
        let name = PathPart::from(format!("{backup}.json"));
        self.directory(volume, "manifests").join(name)
    }

    pub(crate) fn object_path(&self, volume: Uuid, name: ObjectName) -> Path {
        let source = PathPart::from(name.source.to_string());
        let index = PathPart::from(format!("{:08x}", name.index));
        self.directory(volume, "objects").join(source).join(index)
    }

    fn mark_path(&self, volume: Uuid, holder: Uuid, backup: Uuid) -> Path {
        let name = PathPart::from(format!("{holder}_{backup}"));
        self.directory(volume, "running").join(name)
    }

    /// All backups, of one volume or of all. Fails with [`Failure::TooMany`] if a volume has more
    /// than 4096, or the store has more than 16,384 backups or 4096 volumes.
    pub async fn list(&self, volume: Option<Uuid>) -> Result<Listed, Failure> {
        let volumes = match volume {
            Some(volume) => vec![volume],
            None => self.volumes().await?,
        };
        let mut listed = Listed::default();
        for volume in volumes {
            let ids = self.manifests(volume).await?;
            let reads = futures_util::stream::iter(ids).map(|id| async move {
                match self.header(volume, id).await {
                    Ok(Some(header)) => Ok(Some(header)),
                    // It was deleted meanwhile.
                    Ok(None) => Ok(None),
                    Err(cause) => Err(BadBackup { id, volume, cause }),
                }
            });
            let mut reads = reads.buffer_unordered(READS);
            while let Some(read) = reads.next().await {
                match read {
                    Ok(header) => listed.backups.extend(header),
                    Err(bad) => listed.bad.push(bad),
                }
            }
            if listed.backups.len() + listed.bad.len() > 4 * MOST_MANIFESTS {
                return Err(too_many(&self.root, 4 * MOST_MANIFESTS));
            }
        }
        listed
            .backups
            .sort_by_key(|header| (header.created, header.id));
        listed.bad.sort_by_key(|bad| bad.id);
        Ok(listed)
    }

    /// The volume of a backup; [`Failure::Unknown`] if there is no such backup.
    pub async fn volume_of(&self, backup: Uuid) -> Result<Uuid, Failure> {
        for volume in self.volumes().await? {
            if self.has(&self.manifest_path(volume, backup)).await? {
                return Ok(volume);
            }
        }
        Err(Failure::Unknown(backup))
    }

    /// The header of a backup; [`Failure::Unknown`] if there is no such backup.
    pub async fn describe(&self, volume: Uuid, backup: Uuid) -> Result<Header, Failure> {
        let found = self.header(volume, backup).await?;
        found.ok_or(Failure::Unknown(backup))
    }

    async fn volumes(&self) -> Result<Vec<Uuid>, Failure> {
        let found = self.inner.list_with_delimiter(Some(&self.root));
        let found = limited("list", &self.root, found).await?;
        if found.common_prefixes.len() > MOST_VOLUMES {
            return Err(too_many(&self.root, MOST_VOLUMES));
        }
        let names = found.common_prefixes.iter();
        let mut volumes: Vec<_> = names.filter_map(|path| uuid(path.filename()?)).collect();
        volumes.sort_unstable();
        Ok(volumes)
    }

    /// The ids of a volume's backups. Other files are ignored.
    pub(crate) async fn manifests(&self, volume: Uuid) -> Result<Vec<Uuid>, Failure> {
        let directory = self.directory(volume, "manifests");
        let mut ids = Vec::new();
        self.each(&directory, MOST_MANIFESTS, |parts, _| {
            if let [name] = parts {
                ids.extend(name.strip_suffix(".json").and_then(uuid));
            }
        })
        .await?;
        ids.sort_unstable();
        Ok(ids)
    }

    pub(crate) async fn objects(&self, volume: Uuid) -> Result<BTreeMap<ObjectName, u64>, Failure> {
        let directory = self.directory(volume, "objects");
        let mut objects = BTreeMap::new();
        self.each(&directory, MOST_OBJECTS, |parts, meta| {
            if let [source, index] = parts
                && let Some(source) = uuid(source)
                && let Some(index) = index_of(index)
            {
                objects.insert(ObjectName { source, index }, meta.size);
            }
        })
        .await?;
        Ok(objects)
    }

    /// The objects that a backup wrote.
    pub(crate) async fn objects_of(
        &self,
        volume: Uuid,
        source: Uuid,
    ) -> Result<Vec<ObjectName>, Failure> {
        let directory = self.directory(volume, "objects");
        let directory = directory.join(PathPart::from(source.to_string()));
        let mut objects = Vec::new();
        self.each(&directory, MOST_OBJECTS, |parts, _| {
            if let [index] = parts
                && let Some(index) = index_of(index)
            {
                objects.push(ObjectName { source, index });
            }
        })
        .await?;
        Ok(objects)
    }

    pub(crate) async fn marks(&self, volume: Uuid) -> Result<Vec<Mark>, Failure> {
        let directory = self.directory(volume, "running");
        let mut marks = Vec::new();
        self.each(&directory, MOST_MANIFESTS, |parts, meta| {
            if let [name] = parts
                && let Some((holder, backup)) = name.split_once('_')
                && let (Some(holder), Some(backup)) = (uuid(holder), uuid(backup))
            {
                marks.push(Mark {
                    holder,
                    backup,
                    written: meta.last_modified.into(),
                });
            }
        })
        .await?;
        Ok(marks)
    }

    /// Visits the objects below a directory, with the parts of their names.
    async fn each(
        &self,
        directory: &Path,
        most: usize,
        mut visit: impl FnMut(&[&str], &object_store::ObjectMeta),
    ) -> Result<(), Failure> {
        let mut all = self.inner.list(Some(directory));
        let mut count = 0;
        while let Some(meta) = limited("list", directory, all.try_next()).await? {
            count += 1;
            if count > most {
                return Err(too_many(directory, most));
            }
            let parts: Vec<_> = match meta.location.prefix_match(directory) {
                Some(parts) => parts.collect(),
                None => continue,
            };
            let parts: Vec<&str> = parts.iter().map(AsRef::as_ref).collect();
            visit(&parts, &meta);
        }
        Ok(())
    }

    pub(crate) async fn mark(
        &self,
        volume: Uuid,
        holder: Uuid,
        backup: Uuid,
    ) -> Result<(), Failure> {
        let path = self.mark_path(volume, holder, backup);
        self.put(&path, Vec::from(b"{}\n")).await
    }

    /// Fails if the mark is gone: then the store is another one, for example because its file
    /// system was unmounted, or another daemon has removed objects.
    pub(crate) async fn check_mark(
        &self,
        volume: Uuid,
        holder: Uuid,
        backup: Uuid,
    ) -> Result<(), Failure> {
        let path = self.mark_path(volume, holder, backup);
        if self.has(&path).await? {
            return Ok(());
        }
        Err(Failure::Gone(path.to_string()))
    }

    pub(crate) async fn unmark(
        &self,
        volume: Uuid,
        holder: Uuid,
        backup: Uuid,
    ) -> Result<(), Failure> {
        self.delete(&self.mark_path(volume, holder, backup)).await
    }

    /// The header in the first line of a manifest; `None` if there is no such manifest.
    pub(crate) async fn header(
        &self,
        volume: Uuid,
        backup: Uuid,
    ) -> Result<Option<Header>, Failure> {
        let path = self.manifest_path(volume, backup);
        let Some(start) = self.get(&path, LONGEST_HEADER, true).await? else {
            return Ok(None);
        };
        let header = manifest::parse_header(&start).and_then(|(header, _)| {
            header.check_place(volume, backup)?;
            Ok(header)
        });
        header
            .map(Some)
            .map_err(|cause| Failure::damaged(&path, cause))
    }

    pub(crate) async fn manifest(
        &self,
        volume: Uuid,
        backup: Uuid,
    ) -> Result<Option<Manifest>, Failure> {
        let path = self.manifest_path(volume, backup);
        let Some(bytes) = self.get(&path, LONGEST_MANIFEST, false).await? else {
            return Ok(None);
        };
        let manifest = manifest::parse(&bytes).and_then(|manifest| {
            manifest.header.check_place(volume, backup)?;
            Ok(manifest)
        });
        manifest
            .map(Some)
            .map_err(|cause| Failure::damaged(&path, cause))
    }

    pub(crate) async fn put(&self, path: &Path, bytes: Vec<u8>) -> Result<(), Failure> {
        let put = self.inner.put(path, Bytes::from(bytes).into());
        limited("write", path, put).await?;
        Ok(())
    }

    /// The contents of a file; a file of more than `most` bytes counts as damaged. With
    /// `only_start`, its first `most` bytes. `None`: the file does not exist.
    pub(crate) async fn get(
        &self,
        path: &Path,
        most: usize,
        only_start: bool,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let large = || Failure::damaged(path, Damage::Large { most: most as u64 });
        let options = GetOptions {
            range: only_start.then_some(GetRange::Bounded(0..most as u64)),
            ..GetOptions::default()
        };
        let found = match limited("read", path, self.inner.get_opts(path, options)).await {
            Ok(found) => found,
            Err(failure) if failure.is_missing() => return Ok(None),
            Err(failure) => return Err(failure.into()),
        };
        if !only_start && found.meta.size > most as u64 {
            return Err(large());
        }
        // The server says the size; the data may be more.
        let mut stream = found.into_stream();
        let read = async {
            let mut bytes = Vec::new();
            while let Some(part) = stream.try_next().await? {
                if part.len() > most - bytes.len() {
                    return Ok(None);
                }
                bytes.extend_from_slice(&part);
            }
            Ok(Some(bytes))
        };
        match limited("read", path, read).await? {
            Some(bytes) => Ok(Some(bytes)),
            None => Err(large()),
        }
    }

    pub(crate) async fn has(&self, path: &Path) -> Result<bool, Failure> {
        match limited("read", path, self.inner.head(path)).await {
            Ok(_) => Ok(true),
            Err(failure) if failure.is_missing() => Ok(false),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Unfinished files of a volume, if the store is a directory; an object store has none.
    pub(crate) async fn staged(&self, volume: Uuid) -> Result<Vec<PathBuf>, Failure> {
        let Some(files) = &self.files else {
            return Ok(Vec::new());
        };
        let directory = files.join(volume.to_string());
        self.on_files(volume, move || staged::find(&directory))
            .await
    }

    pub(crate) async fn remove_staged(
        &self,
        volume: Uuid,
        found: Vec<PathBuf>,
    ) -> Result<(), Failure> {
        self.on_files(volume, move || staged::remove(&found)).await
    }

    /// Runs blocking work on the files of a volume.
    async fn on_files<T: Send + 'static>(
        &self,
        volume: Uuid,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let work = async {
            let done = tokio::task::spawn_blocking(work).await;
            done.map_err(object_store::Error::from)
        };
        let path = self.directory(volume, "objects");
        Ok(limited("clean up", &path, work).await?)
    }

    /// Deletes a file, which may be gone.
    pub(crate) async fn delete(&self, path: &Path) -> Result<(), Failure> {
        match limited("delete", path, self.inner.delete(path)).await {
            Err(failure) if !failure.is_missing() => Err(failure.into()),
            _ => Ok(()),
        }
    }
}

/// The error of one operation.
struct Failed(Failure, bool);

impl Failed {
    fn is_missing(&self) -> bool {
        self.1
    }
}

impl From<Failed> for Failure {
    fn from(failed: Failed) -> Self {
        failed.0
    }
}

async fn limited<T>(
    operation: &'static str,
    path: &Path,
    work: impl Future<Output = object_store::Result<T>>,
) -> Result<T, Failed> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => {
            let is_missing = matches!(error, object_store::Error::NotFound { .. });
            Err(Failed(
                Failure::store(operation, path.as_ref(), &error),
                is_missing,
            ))
        }
        Err(_) => Err(Failed(
            Failure::Late {
                operation,
                name: path.to_string(),
                limit: PATIENCE,
            },
            false,
        )),
    }
}

fn too_many(path: &Path, most: usize) -> Failure {
    Failure::TooMany {
        name: path.to_string(),
        most,
    }
}

/// Only the text that we write: each name has one form.
fn uuid(text: &str) -> Option<Uuid> {
    let id = Uuid::parse_str(text).ok()?;
    (id.to_string() == text).then_some(id)
}

fn index_of(text: &str) -> Option<u32> {
    let index = u32::from_str_radix(text, 16).ok()?;
    (format!("{index:08x}") == text).then_some(index)
}

//! The work of a job, on a thread of its own, because the store and the compression block.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nacre_bdev::Status;
use nacre_bdev_pool::{Command, Outcome, PoolHandle};
use nacre_engine_backup::{
    Credentials, Failure, Location, OBJECT_BYTES, Piece, Progress, S3Options, Source, Store, Target,
};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::device::{ClaimedDevice, Range};
use crate::services::keyring::file;

/// Most bytes of a file with credentials, and of one with certificates.
const LONGEST_CREDENTIALS: usize = 16 << 10;
const LONGEST_CA: usize = 1 << 20;

/// A place for backups, with the files that are needed for access.
#[derive(Debug, Clone)]
pub struct BackupPlace {
    pub location: Location,
    /// The location as the caller wrote it.
    pub text: String,
    pub endpoint: Option<String>,
    pub region: Option<String>,
    pub credentials_file: Option<PathBuf>,
    pub ca: Option<PathBuf>,
}

impl BackupPlace {
    /// Reads the files, then opens the store. Blocks.
    fn open(&self) -> Result<Store, Failure> {
        let options = S3Options {
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            credentials: self
                .credentials_file
                .as_deref()
                .map(credentials)
                .transpose()?,
            authorities: self.ca.as_deref().map(authorities).transpose()?,
        };
        self.location.open(&options)
    }
}

fn credentials(path: &Path) -> Result<Credentials, Failure> {
    let refuse = |cause: String| Failure::Credentials(format!("{}: {cause}", path.display()));
    let read = file::read_at_most(path, LONGEST_CREDENTIALS);
    let (text, _) = read.map_err(|error| refuse(error.to_string()))?;
    Credentials::parse(&text).map_err(|failure| refuse(failure.to_string()))
}

fn authorities(path: &Path) -> Result<Vec<u8>, Failure> {
    let read = file::read_public(path, LONGEST_CA);
    read.map_err(|error| Failure::Location(format!("{}: {error}", path.display())))
}

/// Runs `work` with the opened store on a new thread. The work goes on if the caller stops waiting.
pub(super) async fn on_thread<T, Work>(
    name: String,
    place: BackupPlace,
    work: impl FnOnce(Store) -> Work + Send + 'static,
) -> Result<T, Failure>
where
    T: Send + 'static,
    Work: Future<Output = Result<T, Failure>>,
{
    let (sender, ended) = oneshot::channel();
    let run = move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let result = match builder.enable_all().max_blocking_threads(4).build() {
            Ok(runtime) => {
                let result = runtime.block_on(async { work(place.open()?).await });
                // A disk that does not answer holds up only its own thread.
                runtime.shutdown_background();
                result
            }
            Err(error) => Err(Failure::Source(error.to_string())),
        };
        // The caller may no longer wait.
        drop(sender.send(result));
    };
    let spawned = std::thread::Builder::new().name(name).spawn(run);
    spawned.map_err(|error| Failure::Source(format!("there is no thread: {error}")))?;
    let lost = || Failure::Source("the thread of the job ended".into());
    ended.await.unwrap_or_else(|_| Err(lost()))
}

/// The places of a snapshot that have data, read from the pool part by part.
struct Mapped {
    pool: PoolHandle,
    lvol: Uuid,
    from: Option<u64>,
    places: VecDeque<u64>,
}

impl Mapped {
    fn new(pool: PoolHandle, lvol: Uuid) -> Self {
        Self {
            pool,
            lvol,
            from: Some(0),
            places: VecDeque::new(),
        }
    }

    async fn peek(&mut self) -> Result<Option<u64>, String> {
        loop {
            if let Some(place) = self.places.front() {
                return Ok(Some(*place));
            }
            let Some(from) = self.from else {
                return Ok(None);
            };
            let lvol = self.lvol;
            match self.pool.run(Command::Mapped { lvol, from }).await {
                Ok(Outcome::Places { places, next }) => {
                    self.places = places.into();
                    self.from = next;
                }
                Ok(_) => return Err("the pool does not know its places".into()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// A snapshot, as the source of a backup.
pub(super) struct SnapshotSource {
    pool: PoolHandle,
    lvol: Uuid,
    device: ClaimedDevice,
    bytes: u64,
    unit: u64,
    mapped: Mapped,
}

impl SnapshotSource {
    pub(super) fn new(pool: PoolHandle, lvol: Uuid, device: ClaimedDevice, bytes: u64) -> Self {
        Self {
            unit: pool.status().unit_bytes,
            mapped: Mapped::new(pool.clone(), lvol),
            pool,
            lvol,
            device,
            bytes,
        }
    }

    fn index_of(&self, place: u64) -> u64 {
        place * self.unit / OBJECT_BYTES as u64
    }
}

impl Source for SnapshotSource {
    async fn begin(&mut self) -> Result<u64, String> {
        let mut mapped = Mapped::new(self.pool.clone(), self.lvol);
        let (mut count, mut last) = (0, None);
        while let Some(place) = mapped.peek().await? {
            mapped.places.pop_front();
            let index = self.index_of(place);
            count += u64::from(last.replace(index) != Some(index));
        }
        Ok(count)
    }

    async fn next(&mut self) -> Result<Option<Piece>, String> {
        let Some(place) = self.mapped.peek().await? else {
            return Ok(None);
        };
        let index = self.index_of(place);
        let first = index * OBJECT_BYTES as u64;
        let bytes = self.bytes.saturating_sub(first).min(OBJECT_BYTES as u64) as usize;
        let mut ranges: Vec<Range> = Vec::new();
        while let Some(place) = self.mapped.peek().await?
            && self.index_of(place) == index
        {
            self.mapped.places.pop_front();
            let offset = place * self.unit;
            let at = (offset - first) as usize;
            let length = (self.unit as usize).min(bytes.saturating_sub(at));
            match ranges.last_mut() {
                Some(last) if last.at + last.bytes == at => last.bytes += length,
                _ if length == 0 => {}
                _ => ranges.push(Range {
                    offset,
                    at,
                    bytes: length,
                }),
            }
        }
        let read = self.device.read(ranges, vec![0; bytes]).await;
        let data = read.map_err(|status| io_error(index, status))?;
        let index = u32::try_from(index).map_err(|_| "the volume is too large".to_owned())?;
        Ok(Some(Piece { index, data }))
    }
}

fn io_error(index: u64, status: Status) -> String {
    match status {
        Status::NoSpace => "the pool is full".to_owned(),
        _ => {
            let offset = index * OBJECT_BYTES as u64;
            format!("an I/O in the 4 MiB from byte {offset} ended with {status:?}")
        }
    }
}

/// A new lvol, as the target of a restore.
pub(super) struct Volume(pub(super) ClaimedDevice);

impl Target for Volume {
    async fn write(&mut self, offset: u64, data: Vec<u8>) -> Result<(), String> {
        let written = self.0.write(offset, data).await;
        written.map_err(|status| io_error(offset / OBJECT_BYTES as u64, status))
    }

    async fn flush(&mut self) -> Result<(), String> {
        let flushed = self.0.flush().await;
        flushed.map_err(|status| format!("a flush ended with {status:?}"))
    }
}

/// The progress of a job, shared with its thread.
pub(super) type Shared = Arc<Progress>;

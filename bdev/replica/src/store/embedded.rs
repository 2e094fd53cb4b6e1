//! The store without external services: one redb file, changed by one durable transaction per
//! call.
//!
//! A thread of its own does the work, so that no reactor waits for a disk. Records are JSON, so
//! that [`dump`] can show them even to a reader that does not know their version.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use redb::{
    Database, ReadableDatabase, ReadableTable, StorageBackend, TableDefinition, WriteTransaction,
};
use serde_json::{Value, json};
use uuid::Uuid;

use super::reply::reply;
use super::{StoreError, StoreFuture, VolumeStore};
use crate::model::{Stamp, VolumeRecord, shown};

/// Name of the file in its folder.
pub const FILE: &str = "volumes.redb";
/// Version of the stored format. A later one is refused.
const SCHEMA_VERSION: u64 = 1;
/// Most waiting requests; a control has one at a time.
const WAITING: usize = 1024;

/// Position (order of creation) → record as JSON.
const RECORDS: TableDefinition<u64, &[u8]> = TableDefinition::new("volumes");
/// Id → position, name → position.
const IDS: TableDefinition<u128, u64> = TableDefinition::new("ids");
const NAMES: TableDefinition<&str, u64> = TableDefinition::new("names");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// Keys in META: the schema version, and the next position. Positions are never reused, so that
/// the order is stable.
const SCHEMA: &str = "schema";
const NEXT: &str = "next";

pub struct EmbeddedStore {
    /// `None` during the drop.
    requests: Option<SyncSender<Job>>,
    worker: Option<JoinHandle<()>>,
}

type Job = Box<dyn FnOnce(&mut Worker) + Send>;
pub(super) type DatabaseOpener = Box<dyn FnMut() -> Result<Database, redb::DatabaseError> + Send>;

impl EmbeddedStore {
    /// Opens, or creates, the store in the folder `dir`. Blocks.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join(FILE);
        std::fs::create_dir_all(dir).map_err(|e| unavailable(dir, e))?;
        let file = path.clone();
        let store = Self::on(path, Box::new(move || Database::create(&file)))?;
        // The file's name must be as durable as its later contents.
        let synced = File::open(dir).and_then(|d| d.sync_all());
        synced.map_err(|e| unavailable(dir, e))?;
        Ok(store)
    }

    /// Uses the result of `opener`; `path` is its name.
    pub(super) fn on(path: PathBuf, opener: DatabaseOpener) -> Result<Self, StoreError> {
        let mut worker = Worker {
            path,
            opener,
            database: None,
        };
        worker.run(|_| Ok(()))?;
        let (requests, jobs): (_, Receiver<Job>) = sync_channel(WAITING);
        let path = worker.path.clone();
        let thread = std::thread::Builder::new()
            .name("volume-store".to_owned())
            .spawn(move || jobs.into_iter().for_each(|job| job(&mut worker)))
            .map_err(|e| unavailable(&path, e))?;
        Ok(Self {
            requests: Some(requests),
            worker: Some(thread),
        })
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Database) -> Result<T, DatabaseFailure> + Send + 'static,
    ) -> StoreFuture<T> {
        let (sender, receiver) = reply();
        let job: Job = Box::new(move |worker| sender.answer(worker.run(work)));
        let refused = match self.requests.as_ref().map(|r| r.try_send(job)) {
            Some(Ok(())) => return Box::pin(receiver),
            Some(Err(TrySendError::Full(_))) => format!("{WAITING} requests are waiting for it"),
            Some(Err(TrySendError::Disconnected(_))) | None => "its thread has ended".to_owned(),
        };
        Box::pin(std::future::ready(Err(StoreError::Unavailable {
            why: refused,
        })))
    }
}

impl Drop for EmbeddedStore {
    /// Accepted requests are done, and the file is free, when this returns.
    fn drop(&mut self) {
        self.requests = None;
        if let Some(worker) = self.worker.take() {
            // It catches the panics of its work.
            let _ = worker.join();
        }
    }
}

struct Worker {
    path: PathBuf,
    opener: DatabaseOpener,
    /// `None`: to be reopened, since it failed in a way after which it does not work any longer.
    database: Option<Database>,
}

/// How a request failed.
enum DatabaseFailure {
    /// A normal reply: the database is intact.
    Refused(StoreError),
    Database(redb::Error),
}

impl From<StoreError> for DatabaseFailure {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

macro_rules! database_errors {
    ($($error:ident),*) => { $(
        impl From<redb::$error> for DatabaseFailure {
            fn from(error: redb::$error) -> DatabaseFailure {
                DatabaseFailure::Database(error.into())
            }
        }
    )* };
}

database_errors!(
    CommitError,
    DatabaseError,
    SetDurabilityError,
    StorageError,
    TableError,
    TransactionError
);

impl Worker {
    fn run<T>(
        &mut self,
        work: impl FnOnce(&Database) -> Result<T, DatabaseFailure>,
    ) -> Result<T, StoreError> {
        let database = self.database.take();
        let opener = &mut self.opener;
        let path = &self.path;
        // On a maliciously damaged file, redb may panic instead of returning an error.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let database = match database {
                Some(database) => database,
                None => {
                    let database = opener()?;
                    prepare(&database, path)?;
                    database
                }
            };
            let answer = work(&database);
            Ok::<_, DatabaseFailure>((database, answer))
        }));
        match outcome {
            Ok(Ok((database, answer))) => {
                if !matches!(answer, Err(DatabaseFailure::Database(_))) {
                    self.database = Some(database);
                }
                answer
            }
            Ok(Err(failure)) => Err(failure),
            Err(_) => {
                return Err(damaged(path, "redb panicked"));
            }
        }
        .map_err(|failure| failure.into_store_error(path))
    }
}

impl DatabaseFailure {
    fn into_store_error(self, path: &Path) -> StoreError {
        use std::io::ErrorKind::{InvalidData, UnexpectedEof};
        let error = match self {
            Self::Refused(error) => return error,
            Self::Database(error) => error,
        };
        match error {
            redb::Error::DatabaseAlreadyOpen => StoreError::InUse {
                path: path.display().to_string(),
            },
            redb::Error::Io(ref io) if !matches!(io.kind(), InvalidData | UnexpectedEof) => {
                unavailable(path, error)
            }
            redb::Error::PreviousIo
            | redb::Error::DatabaseClosed
            | redb::Error::LockPoisoned(_) => unavailable(path, error),
            error => damaged(path, error),
        }
    }
}

fn unavailable(path: &Path, why: impl std::fmt::Display) -> StoreError {
    StoreError::Unavailable {
        why: format!("{}: {why}", path.display()),
    }
}

fn damaged(path: &Path, what: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged {
        what: format!(
            "{}: {what} (stop the daemon, keep a copy of the file, and restore its last backup; \
                the replicas keep data and labels, and a volume does not open with a record that \
                is older than its labels)",
            path.display()
        ),
    }
}

/// Creates the tables, and checks the version.
fn prepare(database: &Database, path: &Path) -> Result<(), DatabaseFailure> {
    let found = transact(database, |txn| {
        txn.open_table(RECORDS)?;
        txn.open_table(IDS)?;
        txn.open_table(NAMES)?;
        let mut meta = txn.open_table(META)?;
        let found = meta.get(SCHEMA)?.map(|v| v.value());
        if found.is_none() {
            meta.insert(SCHEMA, SCHEMA_VERSION)?;
        }
        Ok(found.unwrap_or(SCHEMA_VERSION))
    })?;
    if found > SCHEMA_VERSION {
        Err(DatabaseFailure::Refused(StoreError::Newer {
            path: path.display().to_string(),
            found,
        }))
    } else {
        Ok(())
    }
}

/// One transaction, on stable media when this returns. A refusal changes nothing.
fn transact<T>(
    database: &Database,
    work: impl FnOnce(&WriteTransaction) -> Result<T, DatabaseFailure>,
) -> Result<T, DatabaseFailure> {
    let mut txn = database.begin_write()?;
    txn.set_durability(redb::Durability::Immediate)?;
    match work(&txn) {
        Ok(out) => {
            txn.commit()?;
            Ok(out)
        }
        Err(failure) => {
            txn.abort()?;
            Err(failure)
        }
    }
}

fn decode(position: u64, bytes: &[u8]) -> Result<VolumeRecord, DatabaseFailure> {
    serde_json::from_slice(bytes).map_err(|error| {
        StoreError::Damaged {
            what: format!(
                "record #{position} cannot be read: {error} (look at it with the dump of the store; \
                 restore the file from its last backup)"
            ),
        }
        .into()
    })
}

/// The record of `id` in a transaction, and its position.
fn find(txn: &WriteTransaction, id: Uuid) -> Result<(u64, VolumeRecord), DatabaseFailure> {
    let ids = txn.open_table(IDS)?;
    let position = ids.get(id.as_u128())?.map(|v| v.value());
    let position = position.ok_or(StoreError::NotFound { id })?;
    let records = txn.open_table(RECORDS)?;
    let bytes = records.get(position)?.map(|v| v.value().to_vec());
    Ok((position, decode(position, &bytes.unwrap_or_default())?))
}

fn put(
    txn: &WriteTransaction,
    position: u64,
    record: &VolumeRecord,
) -> Result<(), DatabaseFailure> {
    let bytes = serde_json::to_vec(record).expect("a record is plain data");
    txn.open_table(RECORDS)?
        .insert(position, bytes.as_slice())?;
    txn.open_table(IDS)?.insert(record.id.as_u128(), position)?;
    let mut names = txn.open_table(NAMES)?;
    names.insert(record.name.as_str(), position)?;
    Ok(())
}

impl VolumeStore for EmbeddedStore {
    /// The file belongs to one process.
    fn is_shared(&self) -> bool {
        false
    }

    fn list(&self) -> StoreFuture<Vec<VolumeRecord>> {
        self.call(|database| {
            let records = database.begin_read()?.open_table(RECORDS)?;
            let mut out = Vec::new();
            for entry in records.iter()? {
                let (position, bytes) = entry?;
                out.push(decode(position.value(), bytes.value())?);
            }
            Ok(out)
        })
    }

    fn load(&self, id: Uuid) -> StoreFuture<VolumeRecord> {
        self.call(move |database| {
            let txn = database.begin_read()?;
            let position = txn.open_table(IDS)?.get(id.as_u128())?.map(|v| v.value());
            let position = position.ok_or(StoreError::NotFound { id })?;
            let bytes = txn.open_table(RECORDS)?.get(position)?;
            let bytes = bytes.map(|v| v.value().to_vec());
            decode(position, &bytes.unwrap_or_default())
        })
    }

    fn create(&self, record: VolumeRecord) -> StoreFuture<()> {
        self.call(move |database| {
            transact(database, |txn| {
                let by_name = txn.open_table(NAMES)?.get(record.name.as_str())?.is_some();
                if by_name {
                    return Err(StoreError::Exists { name: record.name }.into());
                }
                match find(txn, record.id) {
                    Err(DatabaseFailure::Refused(StoreError::NotFound { .. })) => {}
                    Err(failure) => return Err(failure),
                    Ok((_, there)) => return Err(StoreError::Exists { name: there.name }.into()),
                }
                let mut meta = txn.open_table(META)?;
                let next = meta.get(NEXT)?.map_or(0, |v| v.value());
                meta.insert(NEXT, next + 1)?;
                put(txn, next, &record)
            })
        })
    }

    fn swap(&self, expected: Stamp, next: VolumeRecord) -> StoreFuture<()> {
        super::assert_grows(expected, &next);
        self.call(move |database| {
            transact(database, |txn| {
                let (position, stored) = find(txn, next.id)?;
                super::compare(&stored, expected)?;
                if stored.name != next.name {
                    let mut names = txn.open_table(NAMES)?;
                    if names.get(next.name.as_str())?.is_some() {
                        return Err(StoreError::Exists { name: next.name }.into());
                    }
                    names.remove(stored.name.as_str())?;
                }
                put(txn, position, &next)
            })
        })
    }

    fn delete(&self, id: Uuid, expected: Stamp) -> StoreFuture<()> {
        self.call(move |database| {
            transact(database, |txn| {
                let (position, stored) = find(txn, id)?;
                super::compare(&stored, expected)?;
                txn.open_table(RECORDS)?.remove(position)?;
                txn.open_table(IDS)?.remove(id.as_u128())?;
                txn.open_table(NAMES)?.remove(stored.name.as_str())?;
                Ok(())
            })
        })
    }
}

/// Everything in the store's file, for people and scripts, as `{"file", "schema", "volumes":
/// [record…], "damaged": [{"position", "error", "text"}…]}`. Changes nothing: recovery after an
/// unclean stop happens in memory. Refused while a daemon has the file.
pub fn dump(path: &Path) -> Result<Value, StoreError> {
    let mut file = File::open(path).map_err(|e| unavailable(path, e))?;
    let lock = rustix::fs::FlockOperation::NonBlockingLockShared;
    rustix::fs::flock(&file, lock).map_err(|_| StoreError::InUse {
        path: path.display().to_string(),
    })?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut file, &mut bytes).map_err(|e| unavailable(path, e))?;
    drop(file);
    if bytes.is_empty() {
        return Err(damaged(path, "the file is empty"));
    }
    let read = || -> Result<Value, DatabaseFailure> {
        let memory = redb::backends::InMemoryBackend::new();
        let filled = memory.set_len(bytes.len() as u64);
        let filled = filled.and_then(|()| memory.write(0, &bytes));
        filled.map_err(redb::StorageError::from)?;
        let database = Database::builder().create_with_backend(memory)?;
        let txn = database.begin_read()?;
        let schema = txn.open_table(META)?.get(SCHEMA)?.map(|v| v.value());
        let (mut volumes, mut broken) = (Vec::new(), Vec::new());
        for entry in txn.open_table(RECORDS)?.iter()? {
            let (position, bytes) = entry?;
            match serde_json::from_slice::<Value>(bytes.value()) {
                Ok(record) => volumes.push(shown(record)),
                Err(error) => broken.push(json!({
                    "position": position.value(),
                    "error": error.to_string(),
                    "text": String::from_utf8_lossy(bytes.value()),
                })),
            }
        }
        Ok(json!({
            "file": path.display().to_string(),
            "schema": schema,
            "volumes": volumes,
            "damaged": broken,
        }))
    };
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|failure| failure.into_store_error(path)),
        Err(_) => Err(damaged(path, "redb panicked")),
    }
}

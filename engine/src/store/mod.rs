//! The daemon's durable state: the ordered list of calls that recreate all objects.
//!
//! Each object is one [`Record`]: its create call, with every generated identity filled in. Records
//! keep the order of their first creation. An object comes after those that it depends on, so a
//! restore replays the records in order.
//!
//! ```text
//!   RPC handler ── Change (put/remove …) ──▶ Store (helper thread) ──▶ StateStore (redb file)
//!        ◀──────────── durable, or an error, before the call returns ────────────────┘
//! ```

mod file;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

pub use file::RedbStore;

/// Version of the schema. A store with a later version is refused, one with an earlier version is
/// upgraded.
pub const SCHEMA_VERSION: u64 = 1;

/// One object, as the call that recreates it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Permanent name of the object, such as `bdev/disk0` or `nvmf/subsystem/nqn…/ns/1`.
    pub key: String,
    pub method: String,
    pub params: Value,
}

/// The changes of one call, applied atomically.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Change(pub Vec<Edit>);

#[derive(Debug, Clone, PartialEq)]
pub enum Edit {
    /// Appends the record, or replaces the record of the same key without a change of the order.
    Put(Record),
    Remove(String),
    /// Removes the records of all keys with this prefix.
    RemoveAll(String),
}

impl Change {
    pub fn put(key: impl Into<String>, method: impl Into<String>, params: Value) -> Self {
        Self(vec![Edit::Put(Record {
            key: key.into(),
            method: method.into(),
            params,
        })])
    }

    pub fn remove(key: impl Into<String>) -> Self {
        Self(vec![Edit::Remove(key.into())])
    }

    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }
}

/// Durable storage of records. A commit is atomic, and on stable media when it returns.
pub trait StateStore: Send + 'static {
    fn load(&mut self) -> Result<Vec<Record>, StoreError>;
    fn commit(&mut self, change: &Change) -> Result<(), StoreError>;
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{what} {}: {source}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{}: {source}", path.display())]
    Database {
        path: PathBuf,
        source: Box<redb::Error>,
    },
    #[error("{} was written by a later Nacre (schema {found}, this one knows {SCHEMA_VERSION}): run that version, or move the file away", path.display())]
    Newer { path: PathBuf, found: u64 },
    #[error("{}: the record \"{key}\" is damaged: {source}", path.display())]
    Damaged {
        path: PathBuf,
        key: String,
        source: serde_json::Error,
    },
    #[error("{} is damaged: keep a copy of it, and put its last backup in its place, or start without it and load what `nacre config export` saved", path.display())]
    Broken { path: PathBuf },
    #[error("another daemon (pid {}) uses {}", pid.map_or("unknown".into(), |p| p.to_string()), path.display())]
    InUse { path: PathBuf, pid: Option<u32> },
    #[error("the thread that keeps the state is gone")]
    Gone,
}

enum StoreJob {
    Load(oneshot::Sender<Result<Vec<Record>, StoreError>>),
    Commit(Change, oneshot::Sender<Result<(), StoreError>>),
}

/// The store, as the management plane uses it: a helper thread executes the blocking work, in
/// order.
#[derive(Debug)]
pub struct Store {
    /// `None` only during `drop`.
    jobs: Option<mpsc::Sender<StoreJob>>,
    thread: Option<std::thread::JoinHandle<()>>,
    path: PathBuf,
}

impl Store {
    /// Opens the store in `dir`, creating it if necessary.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let file = RedbStore::open(dir)?;
        Ok(Self::on(file, dir))
    }

    /// Uses any implementation; tests inject failing ones. `path`: the data directory.
    pub fn on(mut inner: impl StateStore, path: &Path) -> Self {
        let (jobs, mut queue) = mpsc::channel::<StoreJob>(64);
        let work = move || {
            while let Some(job) = queue.blocking_recv() {
                // A caller that stopped waiting does not undo the work.
                match job {
                    StoreJob::Load(reply) => drop(reply.send(inner.load())),
                    StoreJob::Commit(change, reply) => drop(reply.send(inner.commit(&change))),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("nacre-store".into())
            .spawn(work)
            .expect("a thread can be started");
        Self {
            jobs: Some(jobs),
            thread: Some(thread),
            path: path.to_owned(),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub async fn load(&self) -> Result<Vec<Record>, StoreError> {
        self.ask(StoreJob::Load).await
    }

    pub async fn commit(&self, change: Change) -> Result<(), StoreError> {
        self.ask(|reply| StoreJob::Commit(change, reply)).await
    }

    async fn ask<T>(
        &self,
        job: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> StoreJob,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let jobs = self.jobs.as_ref().ok_or(StoreError::Gone)?;
        jobs.send(job(reply)).await.map_err(|_| StoreError::Gone)?;
        answer.await.map_err(|_| StoreError::Gone)?
    }
}

impl Drop for Store {
    /// Waits for pending jobs, so that the file is closed and unlocked afterwards.
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends with its queue. A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;

//! [`StateStore`] in one redb file: every commit is one durable transaction.
//!
//! The intended content is in memory too. After a failed write, redb accepts no further writes
//! until the file is reopened. The reopened file may or may not contain the failed change. So each
//! later commit reopens the file if necessary, and its transaction writes the whole intended
//! content, until one succeeds.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use tracing::warn;

use super::{Change, Edit, Record, SCHEMA_VERSION, StateStore, StoreError};

/// Position (in the order of first creation) → record as JSON.
const RECORDS: TableDefinition<u64, &[u8]> = TableDefinition::new("records");
/// Key → position.
const POSITIONS: TableDefinition<&str, u64> = TableDefinition::new("positions");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// Keys in META: the schema version, and the next position. Positions are never reused, so the
/// order is permanent.
const SCHEMA: &str = "schema";
const NEXT: &str = "next";

#[derive(Debug)]
pub struct RedbStore {
    /// `None`: the last transaction failed, and the file must be reopened.
    database: Option<Database>,
    opener: Opener,
    path: PathBuf,
    /// Intended content of the file.
    rows: Rows,
    /// The content of the file may differ from `rows`.
    may_differ: bool,
    /// Held while the store is open.
    _lock: Option<File>,
}

struct Opener(Box<dyn Fn() -> Result<Database, DatabaseError> + Send>);

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opener")
    }
}

/// Name of the database in the data directory.
const FILE: &str = "state.redb";

impl RedbStore {
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Io { what, path, source }
        };
        std::fs::create_dir_all(dir).map_err(io("create the directory", dir))?;
        let lock_path = dir.join("lock");
        let lock = crate::rpc::socket::lock(&lock_path).map_err(|e| match e {
            crate::rpc::socket::LockError::InUse(pid) => StoreError::InUse {
                path: dir.to_owned(),
                pid,
            },
            crate::rpc::socket::LockError::Io(source) => io("lock", &lock_path)(source),
        })?;
        let path = dir.join(FILE);
        let file = path.clone();
        let opener = Opener(Box::new(move || Database::create(&file)));
        let store = Self::on(opener, path, Some(lock))?;
        // Make the file's directory entry durable before any commit.
        File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(io("sync", dir))?;
        Ok(store)
    }

    /// The records of a state. Reads a copy of the file, because opening a database can change it.
    /// No daemon may have it open.
    pub fn records(dir: &Path) -> Result<Vec<Record>, StoreError> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Io { what, path, source }
        };
        let path = dir.join(FILE);
        let copy = tempfile::NamedTempFile::new().map_err(io("copy", &path))?;
        std::fs::copy(&path, copy.path()).map_err(io("copy", &path))?;
        let file = copy.path().to_owned();
        let opener = Opener(Box::new(move || Database::create(&file)));
        Self::on(opener, path, None)?.load()
    }

    /// Opens the store on another storage backend, which is created at each opening: for tests of
    /// failures.
    #[cfg(test)]
    pub fn on_backend<B: redb::StorageBackend>(
        storage: impl Fn() -> B + Send + 'static,
    ) -> Result<Self, StoreError> {
        let open = move || Database::builder().create_with_backend(storage());
        Self::on(Opener(Box::new(open)), PathBuf::from("(memory)"), None)
    }

    fn on(opener: Opener, path: PathBuf, lock: Option<File>) -> Result<Self, StoreError> {
        let (database, rows) = guarded(&path, || {
            let database = opened(&opener, &path)?;
            let rows = Rows::read(&database).map_err(|source| damage(&path, source))?;
            Ok((database, rows))
        })?;
        Ok(Self {
            database: Some(database),
            opener,
            path,
            rows,
            may_differ: false,
            _lock: lock,
        })
    }

    /// Runs one transaction. It is on stable media when this returns `Ok`.
    pub(super) fn transact(
        &mut self,
        work: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), StoreError> {
        let (may_differ, rows, path) = (self.may_differ, &self.rows, &self.path);
        let (database, opener) = (self.database.take(), &self.opener);
        let outcome = guarded(path, || {
            let database = match database {
                Some(database) => database,
                None => opened(opener, path)?,
            };
            let done = transaction(&database, |txn| {
                if may_differ {
                    rows.write(txn)?;
                }
                work(txn)
            });
            done.map_err(|source| damage(path, source))?;
            Ok(database)
        });
        self.may_differ = outcome.is_err();
        self.database = Some(outcome?);
        Ok(())
    }
}

/// Converts panics of redb, which certain damaged files cause, into errors.
fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T, StoreError>) -> Result<T, StoreError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(StoreError::Broken {
            path: path.to_owned(),
        })
    })
}

/// Opens the database and its tables. Refuses an unknown schema version.
fn opened(opener: &Opener, path: &Path) -> Result<Database, StoreError> {
    let database = (opener.0)().map_err(|e| damage(path, e))?;
    let mut found = SCHEMA_VERSION;
    let prepared = transaction(&database, |txn| {
        txn.open_table(RECORDS)?;
        txn.open_table(POSITIONS)?;
        let mut meta = txn.open_table(META)?;
        let stored = meta.get(SCHEMA)?.map(|v| v.value());
        match stored {
            Some(version) => found = version,
            None => drop(meta.insert(SCHEMA, SCHEMA_VERSION)?),
        }
        Ok(())
    });
    prepared.map_err(|e| damage(path, e))?;
    if found > SCHEMA_VERSION {
        return Err(StoreError::Newer {
            path: path.to_owned(),
            found,
        });
    }
    Ok(database)
}

fn transaction(
    database: &Database,
    work: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error>,
) -> Result<(), redb::Error> {
    let mut txn = database.begin_write()?;
    txn.set_durability(redb::Durability::Immediate)?;
    work(&txn)?;
    txn.commit()?;
    Ok(())
}

impl StateStore for RedbStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let decode = |(position, bytes): (&u64, &Vec<u8>)| {
            serde_json::from_slice(bytes).map_err(|source| StoreError::Damaged {
                path: self.path.clone(),
                key: format!("#{position}"),
                source,
            })
        };
        self.rows.records.iter().map(decode).collect()
    }

    fn commit(&mut self, change: &Change) -> Result<(), StoreError> {
        let steps = self.rows.plan(change);
        let outcome = self.transact(|txn| {
            let mut records = txn.open_table(RECORDS)?;
            let mut positions = txn.open_table(POSITIONS)?;
            let mut next = None;
            for step in &steps {
                match step {
                    TableWrite::Put {
                        key,
                        position,
                        bytes,
                        is_new,
                    } => {
                        records.insert(position, bytes.as_slice())?;
                        if *is_new {
                            positions.insert(key.as_str(), position)?;
                            next = Some(position + 1);
                        }
                    }
                    TableWrite::Remove { key, position } => {
                        positions.remove(key.as_str())?;
                        records.remove(position)?;
                    }
                }
            }
            if let Some(next) = next {
                txn.open_table(META)?.insert(NEXT, next)?;
            }
            Ok(())
        });
        match outcome {
            Ok(()) => self.rows.take(steps),
            // A refused change must not appear after a crash. If the file cannot be written at all,
            // only a warning remains.
            Err(_) => {
                if let Err(error) = self.transact(|_| Ok(())) {
                    warn!(%error, "the state cannot be written");
                }
            }
        }
        outcome
    }
}

/// The contents of the tables, in memory.
#[derive(Debug, Default)]
struct Rows {
    records: BTreeMap<u64, Vec<u8>>,
    positions: BTreeMap<String, u64>,
    next: u64,
}

/// One write to the tables.
enum TableWrite {
    Put {
        key: String,
        position: u64,
        bytes: Vec<u8>,
        is_new: bool,
    },
    Remove {
        key: String,
        position: u64,
    },
}

impl Rows {
    fn read(database: &Database) -> Result<Self, redb::Error> {
        let txn = database.begin_read()?;
        let mut rows = Self::default();
        for entry in txn.open_table(RECORDS)?.iter()? {
            let (position, bytes) = entry?;
            rows.records
                .insert(position.value(), bytes.value().to_vec());
        }
        for entry in txn.open_table(POSITIONS)?.iter()? {
            let (key, position) = entry?;
            rows.positions
                .insert(key.value().to_owned(), position.value());
        }
        let next = txn.open_table(META)?.get(NEXT)?;
        rows.next = next.map_or(0, |v| v.value());
        Ok(rows)
    }

    /// Replaces the contents of the file's tables by these.
    fn write(&self, txn: &WriteTransaction) -> Result<(), redb::Error> {
        txn.delete_table(RECORDS)?;
        txn.delete_table(POSITIONS)?;
        let mut records = txn.open_table(RECORDS)?;
        for (position, bytes) in &self.records {
            records.insert(position, bytes.as_slice())?;
        }
        let mut positions = txn.open_table(POSITIONS)?;
        for (key, position) in &self.positions {
            positions.insert(key.as_str(), position)?;
        }
        txn.open_table(META)?.insert(NEXT, self.next)?;
        Ok(())
    }

    fn plan(&self, change: &Change) -> Vec<TableWrite> {
        let mut steps = Vec::new();
        // Positions of keys that the change has already touched.
        let mut now: BTreeMap<&str, Option<u64>> = BTreeMap::new();
        let mut next = self.next;
        for edit in &change.0 {
            match edit {
                Edit::Put(record) => {
                    let key = record.key.as_str();
                    let known = match now.get(key) {
                        Some(position) => *position,
                        None => self.positions.get(key).copied(),
                    };
                    let position = known.unwrap_or(next);
                    next += u64::from(known.is_none());
                    now.insert(key, Some(position));
                    steps.push(TableWrite::Put {
                        key: key.to_owned(),
                        position,
                        bytes: serde_json::to_vec(record).expect("a record is plain data"),
                        is_new: known.is_none(),
                    });
                }
                Edit::Remove(key) => {
                    let known = match now.get(key.as_str()) {
                        Some(position) => *position,
                        None => self.positions.get(key).copied(),
                    };
                    now.insert(key, None);
                    let key = key.clone();
                    steps.extend(known.map(|position| TableWrite::Remove { key, position }));
                }
                Edit::RemoveAll(prefix) => {
                    let from = (Bound::Included(prefix.as_str()), Bound::Unbounded);
                    let stored = self.positions.range::<str, _>(from);
                    let stored = stored.take_while(|(key, _)| key.starts_with(prefix.as_str()));
                    let mut going: BTreeMap<&str, Option<u64>> = stored
                        .map(|(key, position)| (key.as_str(), Some(*position)))
                        .collect();
                    let touched = now
                        .iter()
                        .filter(|(key, _)| key.starts_with(prefix.as_str()));
                    going.extend(touched.map(|(key, position)| (*key, *position)));
                    for (key, position) in going {
                        now.insert(key, None);
                        let key = key.to_owned();
                        steps.extend(position.map(|position| TableWrite::Remove { key, position }));
                    }
                }
            }
        }
        steps
    }

    fn take(&mut self, steps: Vec<TableWrite>) {
        for step in steps {
            match step {
                TableWrite::Put {
                    key,
                    position,
                    bytes,
                    is_new,
                } => {
                    self.records.insert(position, bytes);
                    if is_new {
                        self.positions.insert(key, position);
                        self.next = position + 1;
                    }
                }
                TableWrite::Remove { key, position } => {
                    self.positions.remove(&key);
                    self.records.remove(&position);
                }
            }
        }
    }
}

fn damage(path: &Path, error: impl Into<redb::Error>) -> StoreError {
    StoreError::Database {
        path: path.to_owned(),
        source: Box::new(error.into()),
    }
}

//! [`StateStore`] in one redb file: every commit is one durable transaction.

use std::fs::File;
use std::path::{Path, PathBuf};

use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Change, Edit, Record, SCHEMA_VERSION, StateStore, StoreError};

/// Position (order of first creation) → record as JSON.
const RECORDS: TableDefinition<u64, &[u8]> = TableDefinition::new("records");
/// Key → position.
const POSITIONS: TableDefinition<&str, u64> = TableDefinition::new("positions");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// In META: the schema version, and the next position (never reused, so order is for ever).
const SCHEMA: &str = "schema";
const NEXT: &str = "next";

#[derive(Debug)]
pub struct RedbStore {
    database: Database,
    path: PathBuf,
    /// Held for as long as the store is open.
    _lock: Option<File>,
}

impl RedbStore {
    pub fn open(dir: &Path) -> Result<RedbStore, StoreError> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Io { what, path, source }
        };
        std::fs::create_dir_all(dir).map_err(io("create the directory", dir))?;
        let lock_path = dir.join("lock");
        let lock = crate::rpc::server::lock(&lock_path).map_err(|e| match e {
            crate::rpc::server::LockError::Held(pid) => StoreError::InUse {
                path: dir.to_owned(),
                pid,
            },
            crate::rpc::server::LockError::Io(source) => io("lock", &lock_path)(source),
        })?;
        let path = dir.join("state.redb");
        let database = Database::create(&path).map_err(|e| damage(&path, e))?;
        let store = RedbStore {
            database,
            path,
            _lock: Some(lock),
        };
        store.prepare()?;
        // The file's name must be as durable as what will be written in it.
        File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(io("sync", dir))?;
        Ok(store)
    }

    /// On any storage: the power-cut test brings its own.
    #[cfg(test)]
    pub fn on_backend(backend: impl redb::StorageBackend) -> Result<RedbStore, StoreError> {
        let path = PathBuf::from("(memory)");
        let database = Database::builder()
            .create_with_backend(backend)
            .map_err(|e| damage(&path, e))?;
        let store = RedbStore {
            database,
            path,
            _lock: None,
        };
        store.prepare()?;
        Ok(store)
    }

    /// Makes the tables, and checks the version.
    fn prepare(&self) -> Result<(), StoreError> {
        let found = self.transact(|txn| {
            txn.open_table(RECORDS)?;
            txn.open_table(POSITIONS)?;
            let mut meta = txn.open_table(META)?;
            let found = meta.get(SCHEMA)?.map(|v| v.value());
            if found.is_none() {
                meta.insert(SCHEMA, SCHEMA_VERSION)?;
            }
            Ok(found.unwrap_or(SCHEMA_VERSION))
        })?;
        if found > SCHEMA_VERSION {
            return Err(StoreError::Newer {
                path: self.path.clone(),
                found,
            });
        }
        Ok(())
    }

    /// One transaction, on stable media when this returns.
    pub(super) fn transact<T>(
        &self,
        work: impl FnOnce(&redb::WriteTransaction) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let run = || {
            let mut txn = self.database.begin_write()?;
            txn.set_durability(redb::Durability::Immediate)?;
            let out = work(&txn)?;
            txn.commit()?;
            Ok(out)
        };
        run().map_err(|source: redb::Error| damage(&self.path, source))
    }

    fn read(&self) -> Result<Vec<(u64, Vec<u8>)>, redb::Error> {
        let table = self.database.begin_read()?.open_table(RECORDS)?;
        let mut out = Vec::new();
        for entry in table.iter()? {
            let (position, bytes) = entry?;
            out.push((position.value(), bytes.value().to_vec()));
        }
        Ok(out)
    }
}

impl StateStore for RedbStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        let rows = self.read().map_err(|source| damage(&self.path, source))?;
        let decode = |(position, bytes): (u64, Vec<u8>)| {
            serde_json::from_slice(&bytes).map_err(|source| StoreError::Damaged {
                path: self.path.clone(),
                key: format!("#{position}"),
                source,
            })
        };
        rows.into_iter().map(decode).collect()
    }

    fn commit(&mut self, change: &Change) -> Result<(), StoreError> {
        self.transact(|txn| {
            let mut records = txn.open_table(RECORDS)?;
            let mut positions = txn.open_table(POSITIONS)?;
            let mut meta = txn.open_table(META)?;
            for edit in &change.0 {
                match edit {
                    Edit::Put(record) => {
                        let known = positions.get(record.key.as_str())?.map(|v| v.value());
                        let position = match known {
                            Some(position) => position,
                            None => {
                                let next = meta.get(NEXT)?.map_or(0, |v| v.value());
                                meta.insert(NEXT, next + 1)?;
                                positions.insert(record.key.as_str(), next)?;
                                next
                            }
                        };
                        let bytes = serde_json::to_vec(record).expect("a record is plain data");
                        records.insert(position, bytes.as_slice())?;
                    }
                    Edit::Remove(key) => {
                        let position = positions.remove(key.as_str())?.map(|v| v.value());
                        if let Some(position) = position {
                            records.remove(position)?;
                        }
                    }
                    Edit::RemoveAll(prefix) => {
                        let mut gone = Vec::new();
                        for entry in positions.range(prefix.as_str()..)? {
                            let (key, position) = entry?;
                            if !key.value().starts_with(prefix.as_str()) {
                                break;
                            }
                            gone.push((key.value().to_owned(), position.value()));
                        }
                        for (key, position) in gone {
                            positions.remove(key.as_str())?;
                            records.remove(position)?;
                        }
                    }
                }
            }
            Ok(())
        })
    }
}

fn damage(path: &Path, error: impl Into<redb::Error>) -> StoreError {
    StoreError::Database {
        path: path.to_owned(),
        source: Box::new(error.into()),
    }
}

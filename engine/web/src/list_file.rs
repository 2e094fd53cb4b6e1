//! [`ListFile`]: a short list of accounts or API tokens in a private file in the data directory. It
//! is read at the start, and each change replaces the whole file.

use std::cell::RefCell;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use nacre_engine_values::files;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;

/// An entry of such a list.
pub(crate) trait Entry: Clone + Serialize + DeserializeOwned + Send + 'static {
    /// Name of the file.
    const FILE: &'static str;
    /// The list's key in the file, which also names the entries in errors.
    const KEY: &'static str;
    const MAX_ENTRIES: usize;
    /// Largest file in bytes.
    const MAX_BYTES: u64;
}

const VERSION: u32 = 1;

/// The reason that the daemon cannot start with this file.
#[derive(Debug, thiserror::Error)]
#[error("the {key} of the page in {path}: {cause}; repair the file, or move it away to start without {key}", path = path.display())]
pub struct FileError {
    path: PathBuf,
    key: &'static str,
    cause: String,
}

/// The reason that a change was not stored.
#[derive(Debug, thiserror::Error)]
#[error("the {key} cannot be stored in {path}: {source}", path = path.display())]
pub struct StoreError {
    path: PathBuf,
    key: &'static str,
    pub(crate) source: std::io::Error,
}

#[derive(Debug)]
pub(crate) struct ListFile<T> {
    /// `None`: the list is in memory only.
    path: Option<PathBuf>,
    list: RefCell<Vec<T>>,
    changing: Mutex<()>,
}

impl<T: Entry> ListFile<T> {
    /// Reads the list from `folder`, the data directory; without the file it is empty. `None`: the
    /// list is in memory only.
    pub(crate) fn open(folder: Option<&Path>) -> Result<Self, FileError> {
        let path = folder.map(|folder| folder.join(T::FILE));
        let list = match &path {
            None => Vec::new(),
            Some(path) => read(path).map_err(|cause| FileError {
                path: path.clone(),
                key: T::KEY,
                cause,
            })?,
        };
        Ok(Self {
            path,
            list: RefCell::new(list),
            changing: Mutex::default(),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.borrow().is_empty()
    }

    pub(crate) fn list(&self) -> Vec<T> {
        self.list.borrow().clone()
    }

    /// The first entry for which `is_wanted` is true.
    pub(crate) fn find(&self, is_wanted: impl Fn(&T) -> bool) -> Option<T> {
        self.list
            .borrow()
            .iter()
            .find(|one| is_wanted(one))
            .cloned()
    }

    /// Changes the list: first in the file, then in memory.
    pub(crate) async fn change<E: From<StoreError>>(
        &self,
        change: impl FnOnce(&mut Vec<T>) -> Result<(), E>,
    ) -> Result<(), E> {
        let _one = self.changing.lock().await;
        let mut list = self.list();
        change(&mut list)?;
        if let Some(path) = self.path.clone() {
            let stored = list.clone();
            let written = tokio::task::spawn_blocking(move || write(&path, &stored));
            let written = written.await.unwrap_or_else(|panic| Err(panic.into()));
            let path = self.path.clone().unwrap_or_default();
            written.map_err(|source| StoreError {
                path,
                key: T::KEY,
                source,
            })?;
        }
        self.list.replace(list);
        Ok(())
    }
}

fn write<T: Entry>(path: &Path, list: &[T]) -> std::io::Result<()> {
    let mut stored = Map::new();
    stored.insert("version".into(), json!(VERSION));
    stored.insert(T::KEY.into(), serde_json::to_value(list)?);
    files::replace_private(path, &serde_json::to_vec_pretty(&stored)?)
}

fn read<T: Entry>(path: &Path) -> Result<Vec<T>, String> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let mut text = Vec::new();
    let read = file.take(T::MAX_BYTES + 1).read_to_end(&mut text);
    read.map_err(|error| error.to_string())?;
    if text.len() as u64 > T::MAX_BYTES {
        return Err(format!("it has more than {} bytes", T::MAX_BYTES));
    }
    let stored = serde_json::from_slice(&text);
    let mut stored: Map<String, Value> = stored.map_err(|error| error.to_string())?;
    let version = stored.remove("version").unwrap_or_default();
    if version != json!(VERSION) {
        return Err(format!("its version is {version}, not {VERSION}"));
    }
    let Some(list) = stored.remove(T::KEY) else {
        return Err(format!("the field \"{}\" is missing", T::KEY));
    };
    if let Some(unknown) = stored.keys().next() {
        return Err(format!("unknown field \"{unknown}\""));
    }
    let list: Vec<T> = serde_json::from_value(list).map_err(|error| error.to_string())?;
    if list.len() > T::MAX_ENTRIES {
        return Err(format!("it has more than {} {}", T::MAX_ENTRIES, T::KEY));
    }
    Ok(list)
}

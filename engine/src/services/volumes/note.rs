//! The file `volume-store` in the data directory. It names the store of the volumes, if that is not
//! the data directory. It prevents a start with another store, which would have none of the
//! volumes.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::values::files;

const FILE: &str = "volume-store";

pub(in crate::services) fn path(dir: &Path) -> PathBuf {
    dir.join(FILE)
}

/// The content of the file. `None`: the volumes are in the data directory.
pub(in crate::services) fn read(dir: &Path) -> anyhow::Result<Option<String>> {
    let path = path(dir);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

/// Writes the file. It is durable when this returns.
pub(in crate::services) fn write(dir: &Path, text: &str) -> anyhow::Result<()> {
    let path = path(dir);
    let write = || -> std::io::Result<()> {
        let (new, mut file) = files::beside(&path)?;
        writeln!(file, "{text}")?;
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
        files::sync_folder(&path)
    };
    write().with_context(|| path.display().to_string())
}

/// Refuses a start with the volumes of the data directory, if the file names another store.
pub(super) fn must_be_absent(dir: &Path) -> anyhow::Result<()> {
    if let Some(noted) = read(dir)? {
        bail!(
            "the volumes are in {noted}, and the configuration has no [store] for them: put it \
             back; or remove {} to start without these volumes",
            path(dir).display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no start uses another store than the one that has the volumes.
    #[test]
    fn the_note_refuses_other_stores() {
        let dir = tempfile::tempdir().unwrap();
        must_be_absent(dir.path()).unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        for _ in 0..2 {
            write(dir.path(), "etcd /nacre/a/").unwrap();
        }
        assert_eq!(read(dir.path()).unwrap().as_deref(), Some("etcd /nacre/a/"));
        let refused = must_be_absent(dir.path()).unwrap_err().to_string();
        assert!(
            refused.contains("the volumes are in etcd /nacre/a/"),
            "{refused}"
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

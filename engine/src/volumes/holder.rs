//! Who this daemon is to those who share a volume store: an id made once, kept beside the state.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use uuid::Uuid;

const FILE: &str = "holder";

/// The id in `dir`; made if there is none. Blocks.
pub fn id(dir: &Path) -> std::io::Result<Uuid> {
    let path = dir.join(FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => Uuid::parse_str(text.trim()).map_err(|error| {
            std::io::Error::other(format!(
                "{} holds no UUID ({error}): restore it, or remove it if no other daemon shares volumes with this one",
                path.display()
            ))
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => make(dir, &path),
        Err(error) => Err(error),
    }
}

/// Whole or not at all, whenever the machine stops.
fn make(dir: &Path, path: &Path) -> std::io::Result<Uuid> {
    let id = Uuid::new_v4();
    let new = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(&new)?;
    writeln!(file, "{id}")?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    File::open(dir)?.sync_all()?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_id_stays() {
        let dir = tempfile::tempdir().unwrap();
        let id = super::id(dir.path()).unwrap();
        assert_eq!(super::id(dir.path()).unwrap(), id);
        std::fs::write(dir.path().join("holder"), "x").unwrap();
        let error = super::id(dir.path()).unwrap_err().to_string();
        assert!(error.contains("holds no UUID"), "{error}");
    }
}

//! The holder id: identifies this daemon to others that share the volume store. Stored beside the
//! state.

use std::path::Path;

use uuid::Uuid;

use crate::values::identity_file;

const FILE: &str = "holder";

/// The id stored in `dir`; generated if there is none. Blocks.
pub(in crate::services) fn id(dir: &Path) -> std::io::Result<Uuid> {
    let path = dir.join(FILE);
    match std::fs::read_to_string(&path) {
        Ok(text) => Uuid::parse_str(text.trim()).map_err(|error| {
            std::io::Error::other(format!(
                "{} holds no UUID ({error}): restore it, or remove it if no other daemon shares volumes with this one",
                path.display()
            ))
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let made = identity_file::read_or_create(dir, FILE, &Uuid::new_v4().to_string())?;
            Uuid::parse_str(&made).map_err(std::io::Error::other)
        }
        Err(error) => Err(error),
    }
}

/// The id stored in `dir`, if a daemon has used it.
pub(in crate::services) fn known(dir: &Path) -> Option<Uuid> {
    let line = identity_file::first_line(&dir.join(FILE))?;
    Uuid::parse_str(&line).ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_id_is_stable() {
        let dir = tempfile::tempdir().unwrap();
        let id = super::id(dir.path()).unwrap();
        assert_eq!(super::id(dir.path()).unwrap(), id);
        assert_eq!(super::known(dir.path()), Some(id));
        std::fs::write(dir.path().join("holder"), "x").unwrap();
        let error = super::id(dir.path()).unwrap_err().to_string();
        assert!(error.contains("holds no UUID"), "{error}");
    }
}

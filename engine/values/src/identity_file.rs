//! Identities that are generated once and kept in the data directory, one line in a file for each.

use std::io::Write;
use std::path::Path;

/// The line stored in file `name` of `dir`; if there is none, `made` is stored. Two processes that
/// start at the same time get the same line.
pub fn read_or_create(dir: &Path, name: &str, made: &str) -> std::io::Result<String> {
    let path = dir.join(name);
    if let Some(line) = first_line(&path) {
        return Ok(line);
    }
    std::fs::create_dir_all(dir)?;
    let (new, mut file) = crate::files::beside(&path)?;
    let written = writeln!(file, "{made}").and_then(|()| file.sync_all());
    let linked = written.and_then(|()| std::fs::hard_link(&new, &path));
    std::fs::remove_file(&new)?;
    match linked {
        // Use the line only after it is durable.
        Ok(()) => std::fs::File::open(dir)?.sync_all()?,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    first_line(&path).ok_or_else(|| std::io::Error::other(format!("{} is empty", path.display())))
}

/// The first line of a file. `None`: the file is missing, unreadable or empty.
pub fn first_line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().next()?.trim();
    (!line.is_empty()).then(|| line.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_identity_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("not/there/yet");
        assert_eq!(read_or_create(&state, "name", "first").unwrap(), "first");
        assert_eq!(read_or_create(&state, "name", "second").unwrap(), "first");
        assert_eq!(read_or_create(&state, "other", "second").unwrap(), "second");
        let files = std::fs::read_dir(&state).unwrap().count();
        assert_eq!(files, 2, "nothing but the two");
        std::fs::write(state.join("empty"), "\n").unwrap();
        let refused = read_or_create(&state, "empty", "third").unwrap_err();
        assert!(refused.to_string().contains("is empty"), "{refused}");
    }
}

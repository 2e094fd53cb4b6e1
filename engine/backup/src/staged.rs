//! Finds and removes unfinished files of a backup directory, which a killed daemon leaves.
//!
//! The crate `object_store` writes each file under the name `<name>#<number>` first, then renames
//! it. It neither lists nor deletes such names, so this module uses the file system.

use std::path::{Path, PathBuf};

/// Most unfinished files that one call finds. A killed daemon leaves at most one per write in
/// flight.
const MOST: usize = 4096;

/// The unfinished objects and manifests in a volume's directory. Blocks. A directory that cannot be
/// read counts as empty.
pub(crate) fn find(volume: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    find_in(&volume.join("manifests"), &mut found);
    for backup in entries(&volume.join("objects")) {
        find_in(&backup, &mut found);
    }
    found
}

/// Removes files, and their directories if these are empty then. Ignores errors. Blocks.
pub(crate) fn remove(files: &[PathBuf]) {
    for file in files {
        // A file can be gone, and a directory can have other files.
        let _ = std::fs::remove_file(file);
        if let Some(directory) = file.parent() {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

fn find_in(directory: &Path, found: &mut Vec<PathBuf>) {
    let room = MOST - found.len();
    found.extend(entries(directory).filter(|path| is_staged(path)).take(room));
}

/// The entries of a directory; none if it cannot be read.
fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let read = std::fs::read_dir(directory).into_iter().flatten();
    read.flatten().map(|entry| entry.path())
}

fn is_staged(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.split_once('#'))
        .is_some_and(|(_, number)| {
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        })
}

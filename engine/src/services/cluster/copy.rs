//! The copy of the cluster's keys: its file in the data directory.

use std::io::Read;
use std::path::Path;

use nacre_cluster_node::backup::LARGEST;
use nacre_cluster_node::rebuild::Copy;

/// The file of the copy in the data directory.
pub(super) const FILE: &str = "cluster-copy.json";

/// Reads the present copy; `None` without a file. The error says why the file is unusable.
pub(super) fn read(file: &Path) -> Result<Option<Copy>, String> {
    let opened = match std::fs::File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(format!("{}: {error}", file.display())),
    };
    let said = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let mut text = Vec::new();
    let read = opened.take(LARGEST + 1).read_to_end(&mut text);
    read.map_err(|error| said(&error))?;
    let copy = Copy::parse(&text).map_err(|error| said(&error))?;
    Ok(Some(copy))
}

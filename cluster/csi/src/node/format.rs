//! File systems of volumes. Only a device that reads blank is formatted: without a signature that
//! `blkid` knows, and with zeroes in its first and last MiB.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use tonic::Status;

use super::fabrics::Device;
use super::host::Host;
use super::mounts::{must, not_run};

const EDGE: u64 = 1 << 20;
/// Exit code of `blkid -p` for a device without a signature.
const NOTHING: i32 = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    Blank,
    FileSystem(String),
    /// A signature of something else.
    Other(String),
    /// Data without a signature.
    Unknown,
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Blank => f.write_str("no data"),
            Self::FileSystem(kind) => f.write_str(kind),
            Self::Other(what) => f.write_str(what),
            Self::Unknown => f.write_str("data without a signature"),
        }
    }
}

pub(crate) fn content(host: &dyn Host, device: &Device) -> Result<Content, Status> {
    let path = device.path.to_string_lossy();
    let arguments = ["-p", "-o", "export", &*path];
    let ran = host
        .run("blkid", &arguments)
        .map_err(|error| not_run("blkid", &error))?;
    match ran.code {
        Some(0) => {
            let of = |key: &str| ran.output.lines().find_map(|line| line.strip_prefix(key));
            let usage = of("USAGE=");
            Ok(match (of("TYPE="), of("PTTYPE=")) {
                (Some(kind), _) if usage.is_none_or(|usage| usage == "filesystem") => {
                    Content::FileSystem(kind.to_owned())
                }
                (Some(kind), _) => Content::Other(format!("data of {kind}")),
                (None, Some(table)) => Content::Other(format!("a partition table ({table})")),
                (None, None) => Content::Other("data that blkid does not name".to_owned()),
            })
        }
        Some(NOTHING) => {
            let edges = has_blank_edges(&device.path).map_err(|error| {
                Status::unavailable(format!("{} cannot be read: {error}", device.path.display()))
            });
            Ok(if edges? {
                Content::Blank
            } else {
                Content::Unknown
            })
        }
        _ => Err(Status::internal(format!("blkid failed: {}", ran.errors))),
    }
}

fn has_blank_edges(path: &Path) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let bytes = file.seek(SeekFrom::End(0))?;
    for start in [0, bytes.saturating_sub(EDGE)] {
        file.seek(SeekFrom::Start(start))?;
        let mut edge = Vec::new();
        file.by_ref().take(EDGE).read_to_end(&mut edge)?;
        if edge.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

pub(crate) fn make(host: &dyn Host, device: &Device, fs_type: &str) -> Result<(), Status> {
    let path = device.path.to_string_lossy();
    match fs_type {
        "xfs" => must(host, "mkfs.xfs", &["-q", "-f", &path])?,
        _ => must(host, "mkfs.ext4", &["-q", "-F", "-m", "0", &path])?,
    };
    Ok(())
}

/// Takes the rest of a device that has grown into its mounted file system.
pub(crate) fn grow(host: &dyn Host, device: &Device, mounted: &Path) -> Result<(), Status> {
    match content(host, device)? {
        Content::FileSystem(kind) if kind == "xfs" => {
            must(host, "xfs_growfs", &[&mounted.to_string_lossy()])?;
        }
        Content::FileSystem(kind) if kind == "ext4" => {
            must(host, "resize2fs", &[&device.path.to_string_lossy()])?;
        }
        other => {
            let text = format!(
                "{} has no file system that grows: it has {other}",
                device.name
            );
            return Err(Status::internal(text));
        }
    }
    Ok(())
}

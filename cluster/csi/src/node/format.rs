//! Finds, makes and grows the file systems of volumes. A *blank* device has no signature that
//! `blkid` knows, and zeroes in its first and last MiB. `stage.rs` formats blank devices, and those
//! whose format this node began and did not finish.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tonic::Status;

use super::bounded::Bounded;
use super::fabrics::Device;
use super::host::Host;
use super::mounts::{must, not_run};

const EDGE: u64 = 1 << 20;
/// Time for reading parts of a device.
const READ: Duration = Duration::from_secs(60);
/// Exit codes of `blkid -p` for a device without a signature, and for one with several.
const NOTHING: i32 = 2;
const AMBIVALENT: i32 = 8;
/// The field `sb_inprogress` of XFS's superblock: `mkfs.xfs` clears it at its end.
const XFS_IN_PROGRESS: u64 = 126;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Content {
    Blank,
    FileSystem(String),
    /// A file system whose `mkfs` did not end.
    HalfMade(String),
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
            Self::HalfMade(kind) => write!(f, "{kind} whose making did not end"),
            Self::Other(what) => f.write_str(what),
            Self::Unknown => f.write_str("data without a signature"),
        }
    }
}

pub(crate) fn content(
    host: &dyn Host,
    bounded: &Bounded<PathBuf>,
    device: &Device,
) -> Result<Content, Status> {
    let path = device.path.to_string_lossy();
    let arguments = ["-p", "-o", "export", &*path];
    let ran = host
        .run("blkid", &arguments)
        .map_err(|error| not_run("blkid", &error))?;
    match ran.code {
        Some(0) => {
            let of = |key: &str| ran.output.lines().find_map(|line| line.strip_prefix(key));
            let usage = of("USAGE=");
            match (of("TYPE="), of("PTTYPE=")) {
                (Some("xfs"), _) => {
                    let is_half_made = read(bounded, device, is_half_made_xfs)?;
                    let kind = "xfs".to_owned();
                    Ok(if is_half_made {
                        Content::HalfMade(kind)
                    } else {
                        Content::FileSystem(kind)
                    })
                }
                (Some(kind), _) if usage.is_none_or(|usage| usage == "filesystem") => {
                    Ok(Content::FileSystem(kind.to_owned()))
                }
                (Some(kind), _) => Ok(Content::Other(format!("data of {kind}"))),
                (None, Some(table)) => Ok(Content::Other(format!("a partition table ({table})"))),
                (None, None) => Ok(Content::Other("data that blkid does not name".to_owned())),
            }
        }
        Some(NOTHING) => Ok(if read(bounded, device, has_blank_edges)? {
            Content::Blank
        } else {
            Content::Unknown
        }),
        Some(AMBIVALENT) => Ok(Content::Other("signatures of several kinds".to_owned())),
        _ => Err(Status::internal(format!("blkid failed: {}", ran.errors))),
    }
}

fn read(
    bounded: &Bounded<PathBuf>,
    device: &Device,
    look: fn(&mut File) -> io::Result<bool>,
) -> Result<bool, Status> {
    let path = device.path.clone();
    let look = move || look(&mut File::open(path)?);
    bounded.run(&device.path, READ, look).map_err(|error| {
        Status::unavailable(format!("{} cannot be read: {error}", device.path.display()))
    })
}

fn has_blank_edges(device: &mut File) -> io::Result<bool> {
    let bytes = device.seek(SeekFrom::End(0))?;
    for start in [0, bytes.saturating_sub(EDGE)] {
        device.seek(SeekFrom::Start(start))?;
        let mut edge = Vec::new();
        device.by_ref().take(EDGE).read_to_end(&mut edge)?;
        if edge.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_half_made_xfs(device: &mut File) -> io::Result<bool> {
    let mut byte = [0];
    device.seek(SeekFrom::Start(XFS_IN_PROGRESS))?;
    device.read_exact(&mut byte)?;
    Ok(byte != [0])
}

/// Makes the file system, without a discard of the device, which would take minutes for a large
/// one.
pub(crate) fn make(host: &dyn Host, device: &Device, fs_type: &str) -> Result<(), Status> {
    let path = device.path.to_string_lossy();
    match fs_type {
        "xfs" => must(host, "mkfs.xfs", &["-q", "-f", "-K", &path])?,
        _ => {
            let words = ["-q", "-F", "-m", "0", "-E", "nodiscard", &*path];
            must(host, "mkfs.ext4", &words)?
        }
    };
    Ok(())
}

/// Grows the file system that is mounted at `mounted` to the size of its device.
pub(crate) fn grow(
    host: &dyn Host,
    bounded: &Bounded<PathBuf>,
    device: &Device,
    mounted: &Path,
) -> Result<(), Status> {
    match content(host, bounded, device)? {
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

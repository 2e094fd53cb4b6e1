//! The mounts of this machine, from `/proc/self/mountinfo`, and `umount` for those of a volume.

use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use tonic::Status;

use super::fabrics::{self, Device};
use super::host::{Host, Ran};

/// A line of `mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// `MAJOR:MINOR` of the file system's device.
    pub number: String,
    /// The part of the file system that is mounted.
    pub root: PathBuf,
    pub target: PathBuf,
    pub is_read_only: bool,
    /// The device, or the name of the file system, as text for people.
    pub source: String,
}

fn parse(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ');
    let number = fields.nth(2)?.to_owned();
    let (root, target, options) = (fields.next()?, fields.next()?, fields.next()?);
    Some(Mount {
        number,
        root: unescape(root),
        target: unescape(target),
        is_read_only: options.split(',').any(|option| option == "ro"),
        // After any number of optional fields: a hyphen, the type, and the source.
        source: fields
            .skip_while(|field| *field != "-")
            .nth(2)
            .map(|source| unescape(source).to_string_lossy().into_owned())
            .unwrap_or_default(),
    })
}

/// The kernel writes white space and backslashes as three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, others)) = rest.split_first() {
        let code = others.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|code| u8::from_str_radix(str::from_utf8(code).ok()?, 8).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[3..];
            }
            None => {
                bytes.push(*first);
                rest = others;
            }
        }
    }
    std::ffi::OsString::from_vec(bytes).into()
}

pub(crate) fn all(host: &dyn Host) -> Result<Vec<Mount>, Status> {
    let text = host.mounts().map_err(|error| {
        Status::internal(format!("cannot read the mounts of this machine: {error}"))
    })?;
    Ok(text.lines().filter_map(parse).collect())
}

/// The mount at this path; of several, the last one, which covers the others.
pub(crate) fn at(host: &dyn Host, target: &Path) -> Result<Option<Mount>, Status> {
    let mut found = all(host)?;
    found.retain(|mount| mount.target == target);
    Ok(found.pop())
}

/// Runs a program that must succeed.
pub(crate) fn must(host: &dyn Host, program: &str, arguments: &[&str]) -> Result<Ran, Status> {
    let ran = host
        .run(program, arguments)
        .map_err(|error| not_run(program, &error))?;
    if ran.is_success() {
        return Ok(ran);
    }
    let said = if ran.errors.is_empty() {
        &ran.output
    } else {
        &ran.errors
    };
    let said = said.lines().collect::<Vec<_>>().join("; ");
    Err(Status::internal(format!("{program} failed: {said}")))
}

pub(crate) fn not_run(program: &str, error: &io::Error) -> Status {
    match error.kind() {
        io::ErrorKind::TimedOut => Status::deadline_exceeded(error.to_string()),
        io::ErrorKind::NotFound => Status::internal(format!(
            "{program}: there is no such program here: install it in the image"
        )),
        io::ErrorKind::ResourceBusy => Status::unavailable(error.to_string()),
        _ => Status::internal(format!("{program}: {error}")),
    }
}

/// Ends all mounts of a volume at this path. A mount of another device is another owner's: it is
/// refused before any of them ends.
pub(crate) fn unmount(host: &dyn Host, target: &Path, devices: &[Device]) -> Result<(), Status> {
    let is_ours =
        |mount: &Mount| devices.iter().any(|device| is_of(mount, device)) || is_dead(host, mount);
    // Each one covers another; a bound, because other programs could add more.
    for _ in 0..16 {
        let mut there = all(host)?;
        there.retain(|mount| mount.target == target);
        if let Some(foreign) = there.iter().find(|mount| !is_ours(mount)) {
            return Err(Status::failed_precondition(format!(
                "{} has a mount of another device ({}, {}), not of this volume: unmount it first",
                target.display(),
                foreign.number,
                foreign.source,
            )));
        }
        if there.is_empty() {
            return Ok(());
        }
        let _ = must(host, "umount", &[&target.to_string_lossy()])?;
    }
    let text = format!("{}: it is mounted again and again", target.display());
    Err(Status::internal(text))
}

/// True for a mount whose device is gone: of a file system, or of a namespace's file in devtmpfs,
/// which the kernel marks with `//deleted`.
fn is_dead(host: &dyn Host, mount: &Mount) -> bool {
    if !fabrics::is_present(host, &mount.number) {
        return true;
    }
    let root = mount.root.to_string_lossy();
    let Some(name) = root.strip_prefix('/') else {
        return false;
    };
    let marked = name.strip_suffix("//deleted");
    let is_gone = marked.is_some() || !host.sys().join("class/block").join(name).exists();
    is_gone && fabrics::is_namespace(marked.unwrap_or(name))
}

/// True for a file system on the device, and for the device's file in devtmpfs, which a block
/// volume has at a pod.
pub(crate) fn is_of(mount: &Mount, device: &Device) -> bool {
    mount.number == device.number || mount.root == Path::new("/").join(&device.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mountinfo_are_read() {
        let line = r"36 35 259:3 /a\040b /mnt/c\134d ro,noatime shared:1 - ext4 /dev/nvme0n1 rw";
        let mount = parse(line).expect("it is good");
        assert_eq!(mount.number, "259:3");
        assert_eq!(mount.root, Path::new("/a b"));
        assert_eq!(mount.target, Path::new(r"/mnt/c\d"));
        assert!(mount.is_read_only);
        assert_eq!(mount.source, "/dev/nvme0n1");
        for bad in ["", "36 35", "36 35 259:3 /"] {
            assert_eq!(parse(bad), None);
        }
    }
}

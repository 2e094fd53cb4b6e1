//! Export and restore of the appliance's state: configuration and state folder in one file.
//!
//! ```text
//!   MANIFEST.json    format, host, version, and each file: path, mode, size, SHA-256
//!   files/PATH       the files, in the order of the manifest
//! ```
//!
//! An export may be made while the daemon runs: every file is read for the manifest, for the
//! export, and once more to compare it. An export whose files changed meanwhile begins again.
//! Links, files of 32 MiB and more (disk images), update bundles and unfinished files are left out.
//!
//! An export has the same secrets as the state: keys and the private key of the certificate, hashes
//! of passwords, and encrypted keys. The file of the key that encrypts them is also in the export,
//! unless the daemon gets that key as a systemd credential.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::ops::RangeInclusive;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use nacre_engine_values::files;
use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};

use crate::digest::{self, Sha256};
use crate::lock::{Lock, LockError};
use crate::place::{Places, create_folder, printable, remove_abandoned};
use crate::run::{Run, RunError};
use crate::status::{self, SpaceError, StatusError};
use crate::timer::Timer;
use crate::version::Version;

const FORMAT: u32 = 1;
const MANIFEST: &str = "MANIFEST.json";
const MOST_MANIFEST: u64 = 4 * 1024 * 1024;
const MOST_FILES: usize = 10_000;
/// Files of this size and above are disk images of volumes, which an export leaves out.
const MOST_BYTES: u64 = 32 * 1024 * 1024;
const MOST_TOTAL: u64 = 1024 * 1024 * 1024;
const MOST_DEPTH: usize = 8;
/// Attempts of an export while the daemon writes.
const ATTEMPTS: usize = 5;
/// Start of the name of an export that is unpacked. A power failure may leave its folder behind.
const STAGING: &str = ".nacre-restore-";
/// Start of the name of an export that is not finished.
const UNFINISHED: &str = ".nacre-export-";
/// Bytes of a folder, and unit of a file's bytes, on the file system of the state.
const BLOCK: u64 = 4096;
/// Most bytes of a host's name, by POSIX.
const MOST_HOST: usize = 255;
/// Unpacked update bundles, which no export has: see [`Places::updates`].
const UPDATES: &str = "updates";
const SERVICE: &str = "nacre.service";
/// Starts the daemon if the command dies while the daemon is stopped: Ctrl-C, a lost terminal.
const START: Timer = Timer {
    unit: "nacre-restore",
    seconds: 120,
};

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u32,
    host: String,
    version: String,
    files: Vec<Listed>,
    /// Files that the export leaves out. A restore keeps them as they are on the machine.
    left_out: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Listed {
    path: String,
    mode: u32,
    size: u64,
    sha256: Sha256,
}

#[derive(Debug, Serialize)]
pub struct Exported {
    pub files: usize,
    pub bytes: u64,
    pub left_out: Vec<String>,
}

/// The result of a restore.
#[derive(Debug, Serialize)]
pub struct Restored {
    pub host: String,
    pub version: Version,
    pub files: usize,
    /// Files of the machine that are not part of an export, and stay.
    pub kept: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("{path}: exists already; name another file", path = path.display())]
    Exists { path: PathBuf },
    #[error("{path}: too much for an export: {limit}", path = path.display())]
    TooMuch { path: PathBuf, limit: String },
    #[error("{path}: changed during each of {ATTEMPTS} attempts; stop the daemon (`systemctl stop nacre`), and export again", path = path.display())]
    Changing { path: PathBuf },
    #[error("the export: {0}; it is damaged, or no export")]
    Damaged(String),
    #[error(transparent)]
    Space(#[from] SpaceError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("nothing was changed: {0}")]
    Unchanged(#[source] RunError),
    #[error("the restored state is in place, but the daemon did not start (`journalctl -u nacre`): {source}; the former state is in {former}", former = former.display())]
    NotStarted { former: PathBuf, source: RunError },
    #[error("the export is of version {version}, and {running} runs; update first, or --force")]
    Newer { version: Version, running: Version },
}

impl BackupError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

/// Writes the state to a new file, which only its owner can read. The caller has the lock of the
/// system: there is no other export.
pub fn export(places: &Places, target: &Path) -> Result<Exported, BackupError> {
    let image = status::image(places)?;
    let state = places.state();
    let failed = || BackupError::at(target);
    if target.exists() {
        return Err(BackupError::Exists {
            path: target.to_owned(),
        });
    }
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty());
    let folder = folder.unwrap_or_else(|| Path::new("."));
    remove_abandoned(folder, UNFINISHED).map_err(failed())?;
    let mut file = unfinished(folder).map_err(failed())?;
    let mut changed = state.clone();
    for _ in 0..ATTEMPTS {
        let manifest = list(&state, &image.version, status::host_name(places))?;
        file.as_file().set_len(0).map_err(failed())?;
        file.rewind().map_err(failed())?;
        if let Some(path) = write(&state, &manifest, file.as_file_mut(), target)? {
            changed = path;
            continue;
        }
        file.as_file().sync_all().map_err(failed())?;
        file.persist_noclobber(target)
            .map_err(|error| match error.error.kind() {
                io::ErrorKind::AlreadyExists => BackupError::Exists {
                    path: target.to_owned(),
                },
                _ => failed()(error.error),
            })?;
        files::sync_folder(target).map_err(failed())?;
        return Ok(Exported {
            files: manifest.files.len(),
            bytes: manifest.files.iter().map(|file| file.size).sum(),
            left_out: manifest.left_out,
        });
    }
    Err(BackupError::Changing { path: changed })
}

/// A new file, private from its first moment, and removed unless it gets its name.
fn unfinished(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    tempfile::Builder::new()
        .prefix(UNFINISHED)
        .permissions(fs::Permissions::from_mode(0o600))
        .tempfile_in(folder)
}

/// Opens a file of the state. A link or a pipe that took its name meanwhile is an error.
fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::other("no file any more"))
}

/// Lists the state with digests.
fn list(state: &Path, version: &Version, host: String) -> Result<Manifest, BackupError> {
    let (found, left_out) = walk(state)?;
    let mut listed = Vec::new();
    let mut total = 0;
    for path in found {
        let full = state.join(&path);
        let file = match open(&full) {
            Ok(file) => file,
            // A temporary file of the daemon that is gone.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(BackupError::Io { path: full, source }),
        };
        let mode = file
            .metadata()
            .map_err(BackupError::at(&full))?
            .permissions()
            .mode()
            & 0o777;
        let (size, sha256) =
            digest::copy(file.take(MOST_BYTES), &mut io::sink()).map_err(BackupError::at(&full))?;
        total += size;
        if total > MOST_TOTAL {
            return Err(BackupError::TooMuch {
                path: state.to_owned(),
                limit: format!("more than {MOST_TOTAL} bytes"),
            });
        }
        listed.push(Listed {
            path,
            mode,
            size,
            sha256,
        });
    }
    Ok(Manifest {
        format: FORMAT,
        host,
        version: version.to_string(),
        files: listed,
        left_out,
    })
}

/// Paths of the state's files below its folder: files of an export, and files that it leaves out.
fn walk(state: &Path) -> Result<(Vec<String>, Vec<String>), BackupError> {
    let (mut found, mut left_out) = (Vec::new(), Vec::new());
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let full = state.join(&folder);
        for entry in fs::read_dir(&full).map_err(BackupError::at(&full))? {
            let entry = entry.map_err(BackupError::at(&full))?;
            let path = folder.join(entry.file_name());
            let is_update = path.starts_with(UPDATES) || is_temporary(&path);
            let kind = entry.file_type().map_err(BackupError::at(&full))?;
            if is_update {
                continue;
            }
            if kind.is_dir() && path.components().count() < MOST_DEPTH {
                folders.push(path);
                continue;
            }
            let size = entry.metadata().map(|facts| facts.len());
            let name = path.to_str().map(str::to_owned);
            match name {
                Some(name)
                    if kind.is_file()
                        && fits(&name)
                        && size.is_ok_and(|size| size < MOST_BYTES) =>
                {
                    found.push(name);
                }
                _ => left_out.push(path.to_string_lossy().into_owned()),
            }
            if found.len() + left_out.len() > MOST_FILES {
                return Err(BackupError::TooMuch {
                    path: state.to_owned(),
                    limit: format!("more than {MOST_FILES} files"),
                });
            }
        }
    }
    found.sort();
    left_out.sort();
    Ok((found, left_out))
}

/// Hidden files in the state's folder are unfinished: new versions of files, and of updates.
fn is_temporary(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with('.')
}

fn entry_name(path: &str) -> String {
    format!("files/{path}")
}

/// The archive has room for this path.
fn fits(path: &str) -> bool {
    tar::Header::new_ustar().set_path(entry_name(path)).is_ok()
}

/// Writes the archive. Returns a file that is not as the manifest says.
fn write(
    state: &Path,
    manifest: &Manifest,
    to: &mut File,
    target: &Path,
) -> Result<Option<PathBuf>, BackupError> {
    let failed = || BackupError::at(target);
    let text = serde_json::to_vec(manifest).expect("a manifest serialises");
    let mut builder = tar::Builder::new(to);
    let header = |path: &str, size: u64| {
        let mut header = tar::Header::new_ustar();
        header.set_path(path)?;
        header.set_size(size);
        header.set_mode(0o600);
        header.set_cksum();
        Ok(header)
    };
    let first = header(MANIFEST, text.len() as u64).map_err(failed())?;
    builder.append(&first, &text[..]).map_err(failed())?;
    for listed in &manifest.files {
        let full = state.join(&listed.path);
        let mut bytes = Vec::new();
        let read = open(&full).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes));
        let is_listed = read.is_ok() && Sha256::of(&bytes) == listed.sha256;
        if !is_listed {
            return Ok(Some(full));
        }
        let header = header(&entry_name(&listed.path), listed.size).map_err(failed())?;
        builder.append(&header, &bytes[..]).map_err(failed())?;
    }
    builder.finish().map_err(failed())?;
    // Files of one moment: none changed since the first was read.
    for listed in &manifest.files {
        let full = state.join(&listed.path);
        let digest = open(&full).and_then(|file| digest::copy(file, &mut io::sink()));
        if !digest.is_ok_and(|(_, digest)| digest == listed.sha256) {
            return Ok(Some(full));
        }
    }
    Ok(None)
}

/// Checks the export in `source`, and replaces the state by its contents. The daemon is stopped
/// meanwhile, and started again after a failure, too.
pub fn restore(
    places: &Places,
    run: &impl Run,
    source: &Path,
    force: bool,
) -> Result<Restored, BackupError> {
    let _lock = Lock::of_system(places)?;
    let checked = check(places, source, force)?;
    START
        .start(run, &["systemctl", "start", SERVICE])
        .map_err(BackupError::Unchanged)?;
    let applied = match run.run("systemctl", &["stop", SERVICE]) {
        Ok(_) => checked.apply(places),
        Err(error) => Err(BackupError::Unchanged(error)),
    };
    // After every failure too. Not `start`: a daemon that runs by now has the former state.
    let started = run.run("systemctl", &["restart", SERVICE]);
    if started.is_ok() {
        START.stop(run);
    }
    let restored = applied?;
    started.map_err(|source| BackupError::NotStarted {
        former: places.former_state(),
        source,
    })?;
    Ok(restored)
}

/// An export, unpacked and checked beside the state. Dropped, it is removed.
#[derive(Debug)]
struct Checked {
    staging: tempfile::TempDir,
    restored: Restored,
}

/// Checks a whole export and unpacks it beside the state, which does not change.
fn check(places: &Places, source: &Path, force: bool) -> Result<Checked, BackupError> {
    let image = status::image(places)?;
    let state = places.state();
    let file = File::open(source).map_err(BackupError::at(source))?;
    let damaged = |error: io::Error| BackupError::Damaged(printable(&error.to_string()));
    let mut archive = tar::Archive::new(file);
    let mut entries = archive.entries().map_err(damaged)?.raw(true);
    let mut next = |wanted: &str, sizes: RangeInclusive<u64>| {
        let entry = entries
            .next()
            .ok_or_else(|| BackupError::Damaged(format!("{wanted} is missing")))?;
        let entry = entry.map_err(damaged)?;
        let is_wanted = *entry.path_bytes() == *wanted.as_bytes()
            && entry.header().entry_type() == tar::EntryType::Regular
            && entry
                .header()
                .size()
                .is_ok_and(|size| sizes.contains(&size));
        if is_wanted {
            Ok(entry)
        } else {
            Err(BackupError::Damaged(format!("{wanted} is missing")))
        }
    };
    let mut text = Vec::new();
    next(MANIFEST, 0..=MOST_MANIFEST)?
        .read_to_end(&mut text)
        .map_err(damaged)?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| BackupError::Damaged(printable(&format!("{MANIFEST}: {error}"))))?;
    let (version, needed) = check_manifest(&manifest).map_err(BackupError::Damaged)?;
    if version > image.version && !force {
        return Err(BackupError::Newer {
            version,
            running: image.version,
        });
    }
    let parent = state.parent().unwrap_or_else(|| Path::new("/")).to_owned();
    remove_abandoned(&parent, STAGING).map_err(BackupError::at(&parent))?;
    status::check_space(&parent, needed)?;
    let staging = tempfile::Builder::new()
        .prefix(STAGING)
        .tempdir_in(&parent)
        .map_err(BackupError::at(&parent))?;
    for listed in &manifest.files {
        let entry = next(&entry_name(&listed.path), listed.size..=listed.size)?;
        let path = staging.path().join(&listed.path);
        let failed = || BackupError::at(&path);
        let folder = path.parent().unwrap_or_else(|| staging.path());
        create_private(folder).map_err(failed())?;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(listed.mode)
            .open(&path)
            .map_err(failed())?;
        let (size, sha256) = digest::copy(entry, &mut file).map_err(failed())?;
        if (size, sha256) != (listed.size, listed.sha256) {
            return Err(BackupError::Damaged(format!(
                "{} is not as listed",
                listed.path
            )));
        }
        file.flush()
            .and_then(|()| file.sync_all())
            .map_err(failed())?;
    }
    Ok(Checked {
        staging,
        restored: Restored {
            host: manifest.host,
            version,
            files: manifest.files.len(),
            kept: Vec::new(),
        },
    })
}

/// Folders of the state are the daemon's alone, as the state is.
fn create_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// The version of an export, and the bytes that its files and folders need on the disk.
fn check_manifest(manifest: &Manifest) -> Result<(Version, u64), String> {
    if manifest.format != FORMAT {
        return Err(format!("format {} instead of {FORMAT}", manifest.format));
    }
    if manifest.files.len() > MOST_FILES {
        return Err(format!("more than {MOST_FILES} files"));
    }
    let total = manifest
        .files
        .iter()
        .try_fold(0_u64, |sum, file| sum.checked_add(file.size));
    let total = total
        .filter(|total| *total <= MOST_TOTAL)
        .ok_or_else(|| format!("more than {MOST_TOTAL} bytes"))?;
    // The text goes to a terminal.
    if manifest.host.len() > MOST_HOST || manifest.host.chars().any(char::is_control) {
        return Err("no name of a host".into());
    }
    // Sorted names are unique: no file is written twice.
    if !manifest.files.is_sorted_by(|a, b| a.path < b.path) {
        return Err("its list of files is not sorted".into());
    }
    let mut folders = BTreeSet::new();
    for file in &manifest.files {
        let path = Path::new(&file.path);
        folders.extend(path.ancestors().skip(1).take(MOST_DEPTH));
        let is_plain = path
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        let depth = path.components().count();
        let is_same = path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
        let is_state = !path.starts_with(UPDATES) && !is_temporary(path);
        if !is_plain || !is_same || !(1..=MOST_DEPTH).contains(&depth) || !is_state {
            return Err(format!("{:?} is no path of a file of the state", file.path));
        }
        if file.size > MOST_BYTES {
            return Err(format!("{:?}: {} bytes", file.path, file.size));
        }
        if file.mode & !0o777 != 0 || file.mode & 0o600 != 0o600 {
            return Err(format!("{:?}: mode {:o}", file.path, file.mode));
        }
    }
    let mut paths = manifest.files.iter().map(|file| file.path.as_str());
    if let Some(path) = paths.find(|path| folders.contains(Path::new(path))) {
        return Err(format!("{path:?} is a file and a folder"));
    }
    // Small files and folders take a block each: a count of bytes alone is far too low for many.
    let blocks = (manifest.files.len() + folders.len()) as u64;
    let version = manifest.version.parse();
    let version = version.map_err(|error| printable(&format!("{error}")))?;
    Ok((version, total + blocks * BLOCK))
}

impl Checked {
    /// Exchanges the state for the export's, at once; the former state stays beside it. The daemon
    /// must not run. The export has the name of the former state before the exchange: a power
    /// failure leaves no state under a name that the next restore removes unasked.
    fn apply(mut self, places: &Places) -> Result<Restored, BackupError> {
        let (state, former) = (places.state(), places.former_state());
        create_folder(&state, 0o700).map_err(BackupError::at(&state))?;
        let mode = fs::metadata(&state)
            .map_err(BackupError::at(&state))?
            .permissions();
        let staging = self.staging.path().to_owned();
        fs::set_permissions(&staging, mode).map_err(BackupError::at(&staging))?;
        // Disk images have both names for a moment, and stay where they are.
        let (_, large) = walk(&state)?;
        for name in large {
            let (from, to) = (state.join(&name), staging.join(&name));
            if !from.symlink_metadata().is_ok_and(|facts| facts.is_file()) || to.exists() {
                continue;
            }
            let linked = create_private(to.parent().unwrap_or(&staging))
                .and_then(|()| fs::hard_link(&from, &to));
            linked.map_err(BackupError::at(&from))?;
            self.restored.kept.push(name);
        }
        match fs::remove_dir_all(&former) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(BackupError::Io {
                    path: former,
                    source: error,
                });
            }
            _ => {}
        }
        // Files and folders of any depth, before the names change.
        File::open(&staging)
            .and_then(|folder| Ok(rustix::fs::syncfs(folder)?))
            .map_err(BackupError::at(&staging))?;
        fs::rename(&staging, &former).map_err(BackupError::at(&staging))?;
        if let Err(error) = renameat_with(CWD, &former, CWD, &state, RenameFlags::EXCHANGE) {
            // The next restore removes the export as well.
            let _ = fs::remove_dir_all(&former);
            return Err(BackupError::at(&state)(error.into()));
        }
        for name in &self.restored.kept {
            // The restored folder has the other name of it.
            let _ = fs::remove_file(former.join(name));
        }
        files::sync_folder(&state).map_err(BackupError::at(&state))?;
        Ok(self.restored)
    }
}

#[cfg(test)]
mod tests;

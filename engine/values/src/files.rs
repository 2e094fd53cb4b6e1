//! Helpers for files of the daemon and its tools: atomic replacement and creation, pid files, the
//! identity of a file, absolute paths, the default data directory.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Seek, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uuid::Uuid;

/// Default data directory: `/var/lib/nacre` for root, else `nacre` in `$XDG_STATE_HOME` or in
/// `~/.local/state`. `None` if the variable in use is missing or no absolute path.
pub fn default_data_dir() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from("/var/lib/nacre"));
    }
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state")));
    state
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join("nacre"))
}

/// The identity of a file, independent of its name: device and inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            number: metadata.ino(),
        }
    }

    /// The identity of the file at `path`, without following a symbolic link. `None`: no file.
    pub fn at(path: &Path) -> Result<Option<Self>> {
        match std::fs::symlink_metadata(path) {
            Ok(metadata) => Ok(Some(Self::of(&metadata))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes the file at `path` if it has this identity. Ignores errors.
    pub fn remove(self, path: &Path) {
        if matches!(Self::at(path), Ok(Some(there)) if there == self) {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The absolute path, with symbolic links, `.` and `..` among its folders resolved if the folder
/// exists. A last component that is a name stays: names in /dev/disk/by-id are links whose targets
/// change when the machine restarts. Refuses an empty path and a result that is not UTF-8 with
/// `InvalidInput`.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    let refuse = |cause: &str| Error::new(ErrorKind::InvalidInput, cause);
    if path.as_os_str().is_empty() {
        return Err(refuse("the path is empty"));
    }
    let path = std::path::absolute(path)?;
    let parts = (path.parent(), path.file_name());
    let path = match parts {
        (Some(folder), Some(name)) => match folder.canonicalize() {
            Ok(folder) => folder.join(name),
            // Opening the file reports the missing folder.
            Err(_) => path,
        },
        _ => path.canonicalize()?,
    };
    match path.to_str() {
        Some(_) => Ok(path),
        None => Err(refuse(
            "the path is not UTF-8, and answers and state are: rename it, or make a link",
        )),
    }
}

/// Replaces or creates a file atomically: after a power failure it has the old or the new contents.
/// The new ones are durable on return. The mode becomes 0666 less the umask.
pub fn replace(path: &Path, contents: &[u8]) -> Result<()> {
    write_over(path, contents, beside(path)?)
}

/// As [`replace`]; only the daemon's user can read the file.
pub fn replace_private(path: &Path, contents: &[u8]) -> Result<()> {
    write_over(path, contents, create_beside(path, 0o600)?)
}

/// As [`replace`], with mode, owner and group of the present file, if there is one.
pub fn replace_contents(path: &Path, contents: &[u8]) -> Result<()> {
    let (new, file) = beside(path)?;
    let kept = match std::fs::metadata(path) {
        Ok(present) => keep_access(&file, &present),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = kept {
        let _ = std::fs::remove_file(&new);
        return Err(error);
    }
    write_over(path, contents, (new, file))
}

/// Creates a file that only the daemon's user can read, with all its contents at once. Refuses with
/// `AlreadyExists` if there is one.
pub fn create_private(path: &Path, contents: &[u8]) -> Result<()> {
    let (new, mut file) = create_beside(path, 0o600)?;
    let created = file
        .write_all(contents)
        .and_then(|()| file.sync_all())
        // A rename would replace a file that another thread creates meanwhile.
        .and_then(|()| std::fs::hard_link(&new, path));
    let removed = std::fs::remove_file(&new);
    created.and(removed).and_then(|()| sync_folder(path))
}

fn keep_access(file: &File, present: &Metadata) -> Result<()> {
    let new = file.metadata()?;
    if (new.uid(), new.gid()) != (present.uid(), present.gid()) {
        std::os::unix::fs::fchown(file, Some(present.uid()), Some(present.gid()))?;
    }
    file.set_permissions(present.permissions())
}

fn write_over(path: &Path, contents: &[u8], (new, mut file): (PathBuf, File)) -> Result<()> {
    let written = file
        .write_all(contents)
        .and_then(|()| file.sync_all())
        .and_then(|()| std::fs::rename(&new, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&new);
    }
    written.and_then(|()| sync_folder(path))
}

/// Creates a new file with a unique hidden name in the folder of `path`, with mode 0666 less the
/// umask. Returns its path and the file, open for writing.
pub fn beside(path: &Path) -> Result<(PathBuf, File)> {
    create_beside(path, 0o666)
}

fn create_beside(path: &Path, mode: u32) -> Result<(PathBuf, File)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = format!(".{name}.{}.{}", std::process::id(), Uuid::new_v4());
    let path = path.with_file_name(name);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&path)?;
    Ok((path, file))
}

/// Makes renames and removals in the folder of `path` durable.
pub fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    File::open(folder.unwrap_or_else(|| Path::new(".")))?.sync_all()
}

/// Longest contents of a pid file, in bytes.
const PID_BYTES: u64 = 32;

/// Opens or creates a pid file, with mode 0600. Also returns the process id in it, if any. A file
/// with other contents, a link or a special file is refused with `AlreadyExists`.
pub fn open_pid_file(path: &Path) -> Result<(File, Option<u32>)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    // A link may point to any file.
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    options.mode(0o600).custom_flags(flags.bits().cast_signed());
    let refuse = |kind: &str| {
        let cause =
            format!("it is {kind}, and holds no process id: name another file, or remove this one");
        Error::new(ErrorKind::AlreadyExists, cause)
    };
    let mut file = options
        .open(path)
        .map_err(|error| match std::fs::symlink_metadata(path) {
            Ok(there) if !there.is_file() => refuse(kind(&there)),
            _ => error,
        })?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(refuse(kind(&metadata)));
    }
    let mut text = Vec::new();
    (&mut file).take(PID_BYTES + 1).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let pid = text.trim();
    if text.len() as u64 > PID_BYTES || !pid.bytes().all(|b| b.is_ascii_digit()) {
        return Err(refuse("a file of another kind"));
    }
    Ok((file, pid.parse().ok()))
}

/// Replaces the contents of a pid file with the id of this process and a newline.
pub fn write_pid(mut file: &File) -> Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

/// The name of the running process `pid` that wrote a file at time `written`. `None` if no
/// process has this id, or if that process started later and reuses the id.
pub fn writer(pid: u32, written: SystemTime) -> Option<String> {
    let started = started(pid)?;
    // Start times have a resolution of seconds.
    if written + Duration::from_secs(1) < started {
        return None;
    }
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim().to_owned())
}

fn started(pid: u32) -> Option<SystemTime> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: u64 = fields.split_whitespace().nth(19)?.parse().ok()?;
    let boot = std::fs::read_to_string("/proc/stat").ok()?;
    let boot = boot.lines().find_map(|line| line.strip_prefix("btime "))?;
    let since_boot = ticks / rustix::param::clock_ticks_per_second().max(1);
    Some(UNIX_EPOCH + Duration::from_secs(boot.trim().parse::<u64>().ok()? + since_boot))
}

/// The type of a file with its article, for messages: `a directory`.
pub fn kind(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    match () {
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_dir() => "a directory",
        () if kind.is_file() => "a regular file",
        () if kind.is_socket() => "a socket",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_block_device() => "a block device",
        () => "a character device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: only a pid file is opened as one. Method: other files at the path.
    #[test]
    fn foreign_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let notes = path("notes");
        std::fs::write(&notes, "precious").unwrap();
        std::os::unix::fs::symlink(&notes, path("link")).unwrap();
        std::os::unix::fs::symlink(path("nothing"), path("dangling")).unwrap();
        std::fs::create_dir(path("dir")).unwrap();
        std::fs::write(path("digits"), "1".repeat(40)).unwrap();
        for name in ["notes", "link", "dangling", "dir", "digits"] {
            let refused = open_pid_file(&path(name)).unwrap_err();
            assert_eq!(
                refused.kind(),
                ErrorKind::AlreadyExists,
                "{name}: {refused}"
            );
        }
        assert_eq!(std::fs::read_to_string(&notes).unwrap(), "precious");
        assert!(!path("nothing").exists());
        std::fs::write(path("empty"), "").unwrap();
        assert_eq!(open_pid_file(&path("empty")).unwrap().1, None);
        let (file, pid) = open_pid_file(&path("pid")).unwrap();
        assert_eq!(pid, None);
        write_pid(&file).unwrap();
        let (_, pid) = open_pid_file(&path("pid")).unwrap();
        assert_eq!(pid, Some(std::process::id()));
    }

    /// Goal: of several threads that create a file, one succeeds, and the file has its contents.
    #[test]
    fn a_file_is_created_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("request");
        let contents = ["one", "two", "three"];
        let create = |text: &str| create_private(&path, text.as_bytes());
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let threads = contents.map(|text| scope.spawn(move || create(text)));
            threads.map(|thread| thread.join().unwrap()).into()
        });
        let winner = results.iter().position(std::result::Result::is_ok).unwrap();
        let refused = results.iter().filter_map(|result| result.as_ref().err());
        let kinds: Vec<ErrorKind> = refused.map(Error::kind).collect();
        assert_eq!(kinds, [ErrorKind::AlreadyExists; 2]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), contents[winner]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn paths_become_absolute_and_keep_their_last_name() {
        use std::os::unix::ffi::OsStrExt;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("v1")).unwrap();
        std::os::unix::fs::symlink("v1", root.join("now")).unwrap();
        std::os::unix::fs::symlink("v1/sda", root.join("by-id")).unwrap();
        for (given, path) in [
            ("now/disk", "v1/disk"),
            ("now/../by-id", "by-id"),
            ("./v1//disk/", "v1/disk"),
            ("now/..", ""),
            ("none/../disk", "none/../disk"),
        ] {
            assert_eq!(
                absolute(&root.join(given)).unwrap(),
                root.join(path),
                "{given}"
            );
        }
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        assert_eq!(absolute(Path::new("disk")).unwrap(), here.join("disk"));
        assert!(absolute(Path::new("")).is_err());
        let odd = std::ffi::OsStr::from_bytes(b"/tmp/\xff");
        assert!(
            absolute(Path::new(odd))
                .unwrap_err()
                .to_string()
                .contains("UTF-8")
        );
    }

    #[test]
    fn a_pid_file_belongs_to_its_running_writer() {
        let us = std::process::id();
        assert!(writer(us, SystemTime::now()).is_some());
        assert_eq!(writer(us, UNIX_EPOCH), None, "this process came later");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(writer(child.id(), SystemTime::now()), None);
    }

    #[test]
    fn only_the_same_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "ours").unwrap();
        let ours = Inode::at(&path).unwrap().unwrap();
        // Renamed rather than removed, so that its inode is not reused.
        std::fs::rename(&path, dir.path().join("moved")).unwrap();
        std::fs::write(&path, "theirs").unwrap();
        ours.remove(&path);
        assert!(path.exists());
        Inode::at(&path).unwrap().unwrap().remove(&path);
        assert!(!path.exists());
        assert_eq!(Inode::at(&path).unwrap(), None);
    }
}

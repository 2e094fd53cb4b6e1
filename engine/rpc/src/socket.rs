//! The file of the management socket, and the lock that keeps two daemons from using one socket.
//!
//! Only a socket without a listening program is replaced. Any other file at the path is left alone.

use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FlockOperation, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::net::UnixListener;

use super::access::SocketAccess;
use super::folder;
use nacre_engine_values::files::{self, Inode};

/// Attempts to get the lock or to find the old socket closed. A killed daemon takes some
/// milliseconds to exit, and so does its child before exec.
const ATTEMPTS: u32 = 25;
const PAUSE: Duration = Duration::from_millis(10);

/// The reason that the management socket could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("another daemon (pid {pid}) is serving {socket}: stop it (`kill {pid}`) or choose another socket with -r", pid = pid.map_or("unknown".to_owned(), |p| p.to_string()), socket = socket.display())]
    Running { socket: PathBuf, pid: Option<u32> },
    #[error("{path} is there and is no socket but {kind}: choose another path with -r, or remove it yourself", path = path.display())]
    NoSocket { path: PathBuf, kind: &'static str },
    #[error("another program listens on {path}: choose another path with -r", path = path.display())]
    Foreign { path: PathBuf },
    #[error("{what} {path}", path = path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: Error,
    },
}

/// A bound socket with its lock. Dropping it removes both files.
#[derive(Debug)]
pub struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    inode: Inode,
    made_folder: bool,
    lock_path: PathBuf,
    lock: File,
}

/// The reason that other users cannot reach the socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketAccessError {
    #[error("cannot give {path} to group {group}: {source}; run the daemon as a user in that group", path = path.display())]
    Group {
        path: PathBuf,
        group: u32,
        source: Error,
    },
    #[error("cannot set the mode of {path}: {source}", path = path.display())]
    Mode { path: PathBuf, source: Error },
    #[error("other users may not enter {folder}: `chmod o+x` it, or choose another socket", folder = folder.display())]
    Closed { folder: PathBuf },
}

impl Socket {
    /// Locks `<path>.lock`, removes the socket of a dead daemon, and listens; the socket has mode
    /// 0600.
    pub fn bind(path: &Path) -> Result<Self, ListenError> {
        let io = |what, path: &Path| {
            let path = path.to_owned();
            move |source| ListenError::Io { what, path, source }
        };
        let made_folder = folder::make(path).map_err(io("cannot create the directory of", path))?;
        folder::trust(path).map_err(io("cannot listen on", path))?;
        // Checked before the lock: if the path holds another kind of file, no lock file is created
        // either.
        if let Some(kind) = obstacle(path).map_err(io("cannot listen on", path))? {
            let path = path.to_owned();
            return Err(ListenError::NoSocket { path, kind });
        }
        let lock_path = with_suffix(path, ".lock");
        let lock = lock(&lock_path).map_err(|e| match e {
            LockError::InUse(pid) => ListenError::Running {
                socket: path.to_owned(),
                pid,
            },
            LockError::Io(source) => io("cannot lock", &lock_path)(source),
        })?;
        clear(path)?;
        // Bound under another name first, so that no client connects before the mode is set. The
        // name is short, because the paths of sockets have a low limit.
        let hidden = path.with_file_name(format!(".{}", std::process::id()));
        clear(&hidden)?;
        let listener = UnixListener::bind(&hidden).map_err(io("cannot listen on", path))?;
        let inode = std::fs::set_permissions(&hidden, Permissions::from_mode(0o600))
            .and_then(|()| std::fs::symlink_metadata(&hidden))
            .and_then(|metadata| rename(&hidden, path).map(|()| Inode::of(&metadata)))
            .inspect_err(|_| drop(std::fs::remove_file(&hidden)))
            .map_err(io("cannot listen on", path))?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            inode,
            made_folder,
            lock_path,
            lock,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sets group and mode of the socket. `own_folder`: its folder is used by the daemon alone, so
    /// its mode may be changed too. After [`SocketAccessError::Closed`] the socket has both, and
    /// users who may enter the folder can open it; after other errors only the daemon's user can.
    pub fn set_access(
        &self,
        socket_access: SocketAccess,
        own_folder: bool,
    ) -> Result<(), SocketAccessError> {
        let mode = |mode| {
            let (path, mode) = (self.path.clone(), Permissions::from_mode(mode));
            std::fs::set_permissions(&path, mode)
                .map_err(|source| SocketAccessError::Mode { path, source })
        };
        mode(SocketAccess::Owner.mode())?;
        if let SocketAccess::Group(group) = socket_access {
            std::os::unix::fs::chown(&self.path, None, Some(group)).map_err(|source| {
                let path = self.path.clone();
                SocketAccessError::Group {
                    path,
                    group,
                    source,
                }
            })?;
        }
        if socket_access == SocketAccess::Owner {
            return Ok(());
        }
        if own_folder || self.made_folder {
            let path = self.path.clone();
            folder::open(&self.path).map_err(|source| SocketAccessError::Mode { path, source })?;
        }
        mode(socket_access.mode())?;
        match folder::closed(&self.path) {
            Some(folder) => Err(SocketAccessError::Closed { folder }),
            None => Ok(()),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.inode.remove(&self.path);
        if let Ok(ours) = self.lock.metadata() {
            Inode::of(&ours).remove(&self.lock_path);
        }
    }
}

pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// The kind of the file at `path`; `None` for a socket or no file.
pub fn obstacle(path: &Path) -> std::io::Result<Option<&'static str>> {
    match std::fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => Ok(None),
        Ok(there) => Ok(Some(files::kind(&there))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a socket without a listening program.
fn clear(path: &Path) -> Result<(), ListenError> {
    let (path, io) = (path.to_owned(), |path: &Path, source: Error| {
        let (what, path) = ("cannot listen on", path.to_owned());
        ListenError::Io { what, path, source }
    });
    match obstacle(&path) {
        Ok(None) => {}
        Ok(Some(kind)) => return Err(ListenError::NoSocket { path, kind }),
        Err(error) => return Err(io(&path, error)),
    }
    for _ in 0..ATTEMPTS {
        match probe(&path) {
            Err(Errno::CONNREFUSED) => {
                return std::fs::remove_file(&path).map_err(|error| io(&path, error));
            }
            Err(Errno::NOENT) => return Ok(()),
            Err(error @ (Errno::ACCESS | Errno::PERM)) => return Err(io(&path, error.into())),
            Ok(()) | Err(_) => std::thread::sleep(PAUSE),
        }
    }
    Err(ListenError::Foreign { path })
}

/// True if a program listens on the socket, even if its backlog is full.
pub fn is_served(path: &Path) -> bool {
    matches!(probe(path), Ok(()) | Err(Errno::AGAIN))
}

/// Connects without waiting for a slot in the listener's backlog.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
}

/// Renames without replacing a file that was created meanwhile, if the file system supports that.
fn rename(from: &Path, to: &Path) -> std::io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => std::fs::rename(from, to),
        other => Ok(other?),
    }
}

/// The reason that a lock file could not be locked.
#[derive(Debug)]
pub enum LockError {
    /// Another process holds the lock; its process id, if the file contains one.
    InUse(Option<u32>),
    Io(Error),
}

fn take(file: &File) -> bool {
    for _ in 0..ATTEMPTS {
        if rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        std::thread::sleep(PAUSE);
    }
    false
}

/// Locks the file, and writes the pid of this process into it.
pub fn lock(path: &Path) -> Result<File, LockError> {
    loop {
        let (file, pid) = files::open_pid_file(path).map_err(LockError::Io)?;
        if !take(&file) {
            return Err(LockError::InUse(pid));
        }
        // The previous holder may have removed the file on exit, and another daemon may have
        // created a new one.
        let ours = file.metadata().map_err(LockError::Io)?;
        if Inode::at(path).map_err(LockError::Io)? == Some(Inode::of(&ours)) {
            files::write_pid(&file).map_err(LockError::Io)?;
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the daemon takes its own path and no other file. Method: real sockets and obstacles.

    use std::os::unix::net::{UnixDatagram, UnixListener as Listener};

    use super::*;

    fn bind(path: &Path) -> Result<Socket, ListenError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _in = runtime.enter();
        Socket::bind(path)
    }

    #[test]
    fn the_socket_is_private_locked_and_cleaned_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/dir/s.sock");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _in = runtime.enter();
        let socket = Socket::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let refused = Socket::bind(&path).unwrap_err();
        let expected = std::process::id();
        assert!(
            matches!(refused, ListenError::Running { pid: Some(pid), .. } if pid == expected),
            "{refused}"
        );
        drop(socket);
        assert!(!path.exists() && !with_suffix(&path, ".lock").exists());
        // The files of a killed daemon do not prevent a start.
        drop(Listener::bind(&path).unwrap());
        std::fs::write(with_suffix(&path, ".lock"), "99999").unwrap();
        Socket::bind(&path).unwrap();
    }

    /// Goal: group and mode follow the roles, and the folder that the daemon made can be entered.
    #[test]
    fn the_socket_opens_to_those_with_a_role() {
        let dir = tempfile::tempdir().unwrap();
        let all = |mode| std::fs::set_permissions(dir.path(), Permissions::from_mode(mode));
        all(0o711).unwrap();
        let path = dir.path().join("own/s.sock");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let _in = runtime.enter();
        let socket = Socket::bind(&path).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = path.parent().unwrap();
        socket.set_access(SocketAccess::Owner, false).unwrap();
        assert_eq!((mode(&path), mode(folder)), (0o600, 0o700));
        let own = rustix::process::getegid().as_raw();
        socket.set_access(SocketAccess::Group(own), false).unwrap();
        assert_eq!((mode(&path), mode(folder)), (0o660, 0o711));
        socket.set_access(SocketAccess::Everyone, false).unwrap();
        assert_eq!(mode(&path), 0o666);
        all(0o700).unwrap();
        let refused = socket.set_access(SocketAccess::Everyone, true).unwrap_err();
        let expected = dir.path();
        assert!(
            matches!(&refused, SocketAccessError::Closed { folder } if folder == expected),
            "{refused}"
        );
        if !rustix::process::geteuid().is_root() {
            let refused = socket
                .set_access(SocketAccess::Group(0), false)
                .unwrap_err();
            assert!(
                matches!(refused, SocketAccessError::Group { .. }),
                "{refused}"
            );
        }
        socket.set_access(SocketAccess::Owner, false).unwrap();
        assert_eq!(mode(&path), 0o600);
    }

    /// A file that is not a socket, a socket of another program, and a file that is not a lock
    /// file.
    #[test]
    fn foreign_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("notes"), "precious").unwrap();
        std::os::unix::fs::symlink(path("notes"), path("link")).unwrap();
        std::fs::create_dir(path("dir")).unwrap();
        for name in ["notes", "link", "dir"] {
            let refused = bind(&path(name)).unwrap_err();
            assert!(
                matches!(refused, ListenError::NoSocket { .. }),
                "{name}: {refused}"
            );
            let lock = with_suffix(&path(name), ".lock");
            assert!(!lock.exists(), "{name}");
        }
        let _stream = Listener::bind(path("stream")).unwrap();
        let _datagram = UnixDatagram::bind(path("datagram")).unwrap();
        for name in ["stream", "datagram"] {
            let refused = bind(&path(name)).unwrap_err();
            assert!(
                matches!(refused, ListenError::Foreign { .. }),
                "{name}: {refused}"
            );
            assert!(path(name).exists());
        }
        std::fs::write(path("Cargo.lock"), "version = 4\n").unwrap();
        let refused = bind(&path("Cargo")).unwrap_err();
        assert!(matches!(refused, ListenError::Io { .. }), "{refused}");
        for (name, text) in [("notes", "precious"), ("Cargo.lock", "version = 4\n")] {
            assert_eq!(std::fs::read_to_string(path(name)).unwrap(), text);
        }
    }

    /// Goal: a socket that another program created at the path survives the daemon's exit.
    #[test]
    fn a_foreign_socket_at_our_path_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        let socket = bind(&path).unwrap();
        std::fs::rename(&path, dir.path().join("moved")).unwrap();
        let _theirs = Listener::bind(&path).unwrap();
        drop(socket);
        assert!(path.exists());
    }

    /// A daemon that accepts nothing is asked without waiting for it.
    #[test]
    fn a_busy_daemon_serves_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(!is_served(&path));
        let busy = Listener::bind(&path).unwrap();
        rustix::net::listen(&busy, 0).unwrap();
        for _ in 0..4 {
            assert!(is_served(&path));
        }
        let held: Vec<_> = (0..8).map_while(|_| connected(&path)).collect();
        assert!(is_served(&path), "{} connections wait", held.len());
        drop(busy);
        assert!(!is_served(&path));
    }

    /// A connection, unless it would have to wait.
    fn connected(path: &Path) -> Option<rustix::fd::OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::STREAM;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        let address = SocketAddrUnix::new(path).unwrap();
        rustix::net::connect(&socket, &address).ok()?;
        Some(socket)
    }

    /// Goal: two daemons never hold the same lock. Method: one waits for the lock while its holder
    /// removes the file, as an exiting daemon does; then a third one comes.
    #[test]
    fn a_lock_on_a_removed_file_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path).unwrap();
        let waiting = std::thread::spawn({
            let path = path.clone();
            move || lock(&path)
        });
        std::thread::sleep(Duration::from_millis(60));
        std::fs::remove_file(&path).unwrap();
        drop(first);
        let second = waiting.join().unwrap().unwrap();
        assert!(matches!(lock(&path), Err(LockError::InUse(Some(_)))));
        drop(second);
        lock(&path).unwrap();
    }

    /// Goal: the longest possible socket path works.
    #[test]
    fn a_long_path_is_listened_on() {
        let dir = tempfile::tempdir().unwrap();
        let name = "s".repeat(107 - dir.path().as_os_str().len() - 1);
        let path = dir.path().join(name);
        let _socket = bind(&path).unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
    }
}

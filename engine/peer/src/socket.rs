//! Reads the credentials of the process at the other end of a Unix stream socket (`SO_PEERCRED`,
//! `SO_PEERGROUPS`). The RPC server decides with them which client may connect.

use std::ffi::c_int;
use std::io::{Error, Result};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// The kernel's limit of supplementary groups per process (NGROUPS_MAX).
const MAX_GROUPS: usize = 65_536;
/// The size of the first buffer for group ids: enough for nearly every process.
const FEW_GROUPS: usize = 32;

/// The credentials of a process at the time when it connected.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// The process id. `None` for a process outside this PID namespace.
    pub pid: Option<i32>,
    pub uid: u32,
    pub gid: u32,
    /// The ids of the supplementary groups.
    pub groups: Vec<u32>,
}

impl Credentials {
    /// True if `group` is the primary group or a supplementary group of the process.
    pub fn is_in(&self, group: u32) -> bool {
        self.gid == group || self.groups.contains(&group)
    }
}

/// Returns the credentials of the process that connected to this end of a Unix stream socket.
/// Fails if the socket was never connected, or if a system call fails.
pub fn credentials(socket: &impl AsFd) -> Result<Credentials> {
    let socket = socket.as_fd();
    let mut of = [libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    }];
    let read = get(socket, libc::SO_PEERCRED, &mut of)?;
    if read != size_of::<libc::ucred>() {
        return Err(Error::other("SO_PEERCRED has another size"));
    }
    let [ucred] = of;
    // The kernel returns uid -1 for a socket that was never connected.
    if ucred.uid == u32::MAX {
        return Err(Error::other("the socket has no peer"));
    }
    Ok(Credentials {
        pid: Some(ucred.pid).filter(|pid| *pid > 0),
        uid: ucred.uid,
        gid: ucred.gid,
        groups: groups(socket)?,
    })
}

fn groups(socket: BorrowedFd<'_>) -> Result<Vec<u32>> {
    let mut room = FEW_GROUPS;
    loop {
        let mut groups: Vec<libc::gid_t> = vec![0; room];
        match get(socket, libc::SO_PEERGROUPS, &mut groups) {
            Ok(bytes) => {
                groups.truncate(bytes / size_of::<libc::gid_t>());
                return Ok(groups);
            }
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && room < MAX_GROUPS => {
                room = MAX_GROUPS;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Types that are valid for every bit pattern, so the kernel may write them.
///
/// # Safety
/// Every bit pattern is a valid value, and the type has no padding.
unsafe trait Plain: Copy {}

// SAFETY: an integer.
unsafe impl Plain for libc::gid_t {}
// SAFETY: a C struct of three 32-bit integers.
unsafe impl Plain for libc::ucred {}

/// Reads a socket option into `into`. Returns the number of bytes that the kernel wrote.
fn get<T: Plain>(socket: BorrowedFd<'_>, option: c_int, into: &mut [T]) -> Result<usize> {
    let room = size_of_val(into);
    let mut length = libc::socklen_t::try_from(room).map_err(Error::other)?;
    // SAFETY: the pointer is valid for writes of `length` bytes, which the kernel does not exceed,
    // and `Plain` allows it to write any bytes. The descriptor is open: it is borrowed.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            into.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if outcome != 0 {
        return Err(Error::last_os_error());
    }
    Ok((length as usize).min(room))
}

#[cfg(test)]
mod tests {
    //! Goal: credentials are those of the connecting thread, at the time of connect.

    use std::os::unix::net::{UnixListener, UnixStream};

    use rustix::thread::{Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

    use super::*;

    #[test]
    fn our_own_credentials() {
        let (near, _far) = UnixStream::pair().unwrap();
        let found = credentials(&near).unwrap();
        let ours = std::process::id();
        assert_eq!(found.pid.map(i32::unsigned_abs), Some(ours));
        assert_eq!(found.uid, rustix::process::geteuid().as_raw());
        assert_eq!(found.gid, rustix::process::getegid().as_raw());
        assert!(found.is_in(found.gid));
        let listener = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        assert!(credentials(&listener.unwrap()).is_err(), "no peer");
    }

    /// Goal: many groups, and a thread that changes its user afterwards. Method: a thread of this
    /// process takes another identity; Linux has identities per thread.
    #[test]
    fn another_user_with_many_groups() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: another_user_with_many_groups: needs root");
            return;
        }
        let dir = std::env::temp_dir().join(format!("nacre-peer-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let of = |path: &std::path::Path, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, mode).unwrap();
        };
        of(&dir, 0o711);
        of(&path, 0o666);
        for count in [0, 1, FEW_GROUPS, FEW_GROUPS + 1, 1000] {
            let groups: Vec<u32> = (5000..5000 + count as u32).collect();
            let other = std::thread::spawn({
                let (path, groups) = (path.clone(), groups.clone());
                move || {
                    let groups: Vec<Gid> = groups.iter().map(|g| Gid::from_raw(*g)).collect();
                    let (gid, uid) = (Gid::from_raw(4001), Uid::from_raw(4000));
                    set_thread_groups(&groups).unwrap();
                    set_thread_res_gid(gid, gid, gid).unwrap();
                    set_thread_res_uid(uid, uid, uid).unwrap();
                    UnixStream::connect(path).unwrap()
                }
            });
            let (near, _) = listener.accept().unwrap();
            let _far = other.join().unwrap();
            let found = credentials(&near).unwrap();
            assert_eq!((found.uid, found.gid), (4000, 4001));
            assert_eq!(found.groups, groups);
            assert!(!found.is_in(0));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

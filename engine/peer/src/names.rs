//! Looks up the ids of users and groups by name (`getpwnam_r`, `getgrnam_r`). The RPC server uses
//! them for the users and groups in its configuration.

use std::ffi::{CStr, CString, c_char, c_int};
use std::io::{Error, Result};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// The size of the first buffer for an entry, in bytes.
const BUFFER: usize = 4096;
/// The size of the largest buffer, in bytes. The entry of a group contains the names of all its
/// members.
const LARGEST_BUFFER: usize = 4 << 20;

/// Returns the id of the user with this name, or `None` if no such user exists. Blocks: the lookup
/// may query a directory server (nsswitch.conf).
pub fn user_id(name: &str) -> Result<Option<u32>> {
    find(name, libc::getpwnam_r, |entry: &libc::passwd| entry.pw_uid)
}

/// Returns the id of the group with this name, or `None` if no such group exists. Blocks like
/// [`user_id`].
pub fn group_id(name: &str) -> Result<Option<u32>> {
    find(name, libc::getgrnam_r, |entry: &libc::group| entry.gr_gid)
}

/// `getpwnam_r` and `getgrnam_r`: name, entry, buffer, its length, result.
type Lookup<T> =
    unsafe extern "C" fn(*const c_char, *mut T, *mut c_char, usize, *mut *mut T) -> c_int;

fn find<T>(name: &str, lookup: Lookup<T>, id: impl Fn(&T) -> u32) -> Result<Option<u32>> {
    let Ok(name) = CString::new(name) else {
        return Ok(None);
    };
    let mut room = BUFFER;
    loop {
        match with_room(&name, lookup, &id, room) {
            Err(error) if error.raw_os_error() == Some(libc::ERANGE) && room < LARGEST_BUFFER => {
                room *= 4;
            }
            other => return other,
        }
    }
}

fn with_room<T>(
    name: &CStr,
    lookup: Lookup<T>,
    id: impl Fn(&T) -> u32,
    room: usize,
) -> Result<Option<u32>> {
    let mut entry = MaybeUninit::<T>::uninit();
    let mut buffer: Vec<c_char> = vec![0; room];
    let mut found: *mut T = null_mut();
    // SAFETY: `name` ends with a zero byte; `entry`, `buffer` (of `room` bytes) and `found` are
    // valid for writes during the call, and no other thread knows them.
    let outcome = unsafe {
        lookup(
            name.as_ptr(),
            entry.as_mut_ptr(),
            buffer.as_mut_ptr(),
            room,
            &raw mut found,
        )
    };
    match outcome {
        0 if found.is_null() => Ok(None),
        // SAFETY: success with a result: it points to `entry`, which the call has filled, and to
        // `buffer`; both live here.
        0 => Ok(Some(id(unsafe { &*found }))),
        // The errors that C libraries and their NSS modules return for a name that does not exist.
        libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => Ok(None),
        error => Err(Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_has_a_name_and_nonsense_has_none() {
        assert_eq!(user_id("root").unwrap(), Some(0));
        assert_eq!(group_id("root").unwrap(), Some(0));
        for name in ["no such name here", "", "a\0b"] {
            assert_eq!(user_id(name).unwrap(), None, "{name:?}");
            assert_eq!(group_id(name).unwrap(), None, "{name:?}");
        }
    }
}

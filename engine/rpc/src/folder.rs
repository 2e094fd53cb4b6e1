//! Checks the owner of the folder of the management socket. In a directory such as /tmp, another
//! user may have created the folder first, and could replace the daemon's socket.

use std::fs::Permissions;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Creates the folder of a socket, for this user only, if it is missing. Returns true if it was.
pub fn make(socket: &Path) -> Result<bool> {
    match folder(socket) {
        Some(folder) if folder.exists() => Ok(false),
        Some(folder) => std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map(|()| true),
        None => Ok(false),
    }
}

/// Lets other users reach the socket in its folder, which must be the daemon's: adds the execute
/// permission of group and others.
pub fn open(socket: &Path) -> Result<()> {
    let Some(folder) = folder(socket) else {
        return Ok(());
    };
    let mode = std::fs::metadata(folder)?.mode() & 0o7777;
    let opened = mode | 0o011;
    if mode == opened {
        return Ok(());
    }
    std::fs::set_permissions(folder, Permissions::from_mode(opened))
}

/// The first folder above the socket that other users may not enter.
pub fn closed(socket: &Path) -> Option<PathBuf> {
    let socket = std::path::absolute(socket).ok()?;
    let mut folders: Vec<&Path> = socket.ancestors().skip(1).collect();
    folders.reverse();
    let is_closed = |folder: &&Path| {
        let mode = std::fs::metadata(folder).map(|metadata| metadata.mode());
        mode.is_ok_and(|mode| mode & 0o001 == 0)
    };
    folders.into_iter().find(is_closed).map(Path::to_owned)
}

/// Where every user can create folders, refuses a folder of another user than root, and one that
/// other users can write.
pub fn trust(socket: &Path) -> Result<()> {
    let Some(folder) = folder(socket) else {
        return Ok(());
    };
    let Some(above) = folder.parent() else {
        return Ok(());
    };
    let above = if above.as_os_str().is_empty() {
        Path::new(".")
    } else {
        above
    };
    let open = std::fs::metadata(above)?.mode() & 0o002 != 0;
    let us = rustix::process::geteuid().as_raw();
    let link = std::fs::symlink_metadata(folder)?;
    let of = std::fs::metadata(folder)?;
    // The owner of a link chose its target; links themselves cannot be written.
    let made = check_owner(open, (link.uid(), 0), us);
    let judged = made.and_then(|()| check_owner(open, (of.uid(), of.mode()), us));
    judged.map_err(|why| {
        let path = folder.display();
        let remedy = "set XDG_RUNTIME_DIR, or choose a socket with -r";
        Error::new(
            ErrorKind::PermissionDenied,
            format!("{path} {why}: {remedy}"),
        )
    })
}

fn folder(socket: &Path) -> Option<&Path> {
    socket.parent().filter(|p| !p.as_os_str().is_empty())
}

/// `open`: every user can create folders beside this one. The pair is the folder's owner and mode.
fn check_owner(open: bool, (owner, mode): (u32, u32), us: u32) -> std::result::Result<(), String> {
    if !open {
        return Ok(());
    }
    if owner != us && owner != 0 {
        return Err(format!("belongs to user {owner}"));
    }
    match mode & 0o022 {
        0 => Ok(()),
        _ => Err("may be written to by other users".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_folders_are_refused() {
        // If only the parent's owner can create folders, any folder there is trusted.
        assert_eq!(check_owner(false, (1001, 0o777), 1000), Ok(()));
        assert_eq!(check_owner(true, (1000, 0o700), 1000), Ok(()));
        assert_eq!(check_owner(true, (0, 0o755), 1000), Ok(()));
        for (owner, mode) in [(1001, 0o700), (1001, 0o777), (1000, 0o770), (0, 0o1777)] {
            assert!(
                check_owner(true, (owner, mode), 1000).is_err(),
                "{owner} {mode:o}"
            );
        }
    }

    #[test]
    fn a_folder_is_made_for_this_user() {
        let dir = tempfile::tempdir().unwrap();
        let all = PermissionsExt::from_mode(0o1777);
        std::fs::set_permissions(dir.path(), all).unwrap();
        let socket = dir.path().join("nacre/nacre.sock");
        assert_eq!(trust(&socket).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(make(&socket).unwrap() && !make(&socket).unwrap());
        trust(&socket).unwrap();
        let all = PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(socket.parent().unwrap(), all).unwrap();
        let refused = trust(&socket).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert!(refused.to_string().contains("other users"), "{refused}");
        // The target of a link counts as well.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("nacre", &link).unwrap();
        assert!(trust(&link.join("nacre.sock")).is_err());
    }
}

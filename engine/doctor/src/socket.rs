//! The checks of `nacre doctor` of the management socket: its file, and the roles of its users.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use super::{Finding, Scope};

/// The configured management socket.
#[derive(Debug, Clone, Default)]
pub struct Socket {
    pub path: PathBuf,
    /// The mode that the file needs for the users and groups with a role.
    pub mode: u32,
    /// Group of the file; `None`: any.
    pub group: Option<u32>,
    /// The first folder above the socket that other users may not enter.
    pub closed: Option<PathBuf>,
    /// Users and groups of the configuration that this machine does not know, with the reason.
    pub unknown: Vec<String>,
}

pub(crate) fn checks(scope: &Scope, findings: &mut Vec<Finding>) {
    let Some(socket) = &scope.socket else {
        return;
    };
    findings.push(file(socket));
    let unknown = socket.unknown.iter();
    findings.extend(unknown.map(|unknown| {
        Finding::warn(
            "rpc.access",
            unknown.clone(),
            "create it, or remove it from [rpc.access] of the configuration",
        )
    }));
}

fn file(socket: &Socket) -> Finding {
    const ID: &str = "rpc.socket";
    const RELOAD: &str = "reload the daemon: it sets group and mode";
    let path = socket.path.display().to_string();
    let Ok(there) = std::fs::symlink_metadata(&socket.path) else {
        return Finding::skip(ID, "no daemon serves this socket").of(path);
    };
    if !there.file_type().is_socket() {
        let remedy = "remove it, or set another [rpc] socket";
        return Finding::fail(ID, "it is no socket", remedy).of(path);
    }
    let (mode, wanted) = (there.mode() & 0o777, socket.mode);
    let text = format!("mode {mode:04o}, and the roles need {wanted:04o}");
    let wrong_group = socket.group.filter(|group| *group != there.gid());
    let finding = if mode & !wanted != 0 {
        let evidence = format!("{text}: users without a role may connect, and are refused then");
        Finding::warn(ID, evidence, RELOAD)
    } else if mode != wanted {
        Finding::warn(
            ID,
            format!("{text}: users with a role may not connect"),
            RELOAD,
        )
    } else if let Some(group) = wrong_group {
        let evidence = format!("group {}, and the roles need {group}", there.gid());
        Finding::warn(ID, evidence, RELOAD)
    } else if let Some(folder) = socket.closed.as_ref().filter(|_| wanted & 0o066 != 0) {
        let folder = folder.display();
        let evidence = format!("{text}, but other users may not enter {folder}");
        let remedy = format!("`chmod o+x {folder}`, or set another [rpc] socket");
        Finding::warn(ID, evidence, remedy)
    } else {
        Finding::pass(ID, format!("mode {mode:04o}"))
    };
    finding.of(path)
}

#[cfg(test)]
mod tests {
    //! Goal: a socket that is too open or too closed is found. Method: real files.

    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::Status;

    #[test]
    fn modes_groups_and_folders() {
        let dir = std::env::temp_dir().join(format!("nacre-doctor-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("socket");
        let check = |mode, group, closed: Option<&str>| {
            file(&Socket {
                path: path.clone(),
                mode,
                group,
                closed: closed.map(Into::into),
                unknown: Vec::new(),
            })
        };
        assert_eq!(check(0o600, None, None).status, Status::Skip);
        std::fs::write(&path, "").unwrap();
        assert_eq!(check(0o600, None, None).status, Status::Fail);
        std::fs::remove_file(&path).unwrap();
        let _listener = UnixListener::bind(&path).unwrap();
        let gid = std::fs::metadata(&path).unwrap().gid();
        for (is, wanted, group, closed, says) in [
            (0o600, 0o600, None, Some("/x"), Ok("mode 0600")),
            (0o660, 0o660, Some(gid), None, Ok("mode 0660")),
            (
                0o666,
                0o600,
                None,
                None,
                Err("users without a role may connect"),
            ),
            (
                0o600,
                0o660,
                Some(gid),
                None,
                Err("users with a role may not connect"),
            ),
            (0o660, 0o660, Some(gid + 1), None, Err("the roles need")),
            (0o666, 0o666, None, Some("/x"), Err("may not enter /x")),
        ] {
            set_permissions(&path, Permissions::from_mode(is)).unwrap();
            let finding = check(wanted, group, closed);
            let (status, text) = match says {
                Ok(text) => (Status::Pass, text),
                Err(text) => (Status::Warn, text),
            };
            assert_eq!(finding.status, status, "{finding:?}");
            assert!(finding.evidence.contains(text), "{finding:?}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn unknown_names_are_reported() {
        let scope = Scope {
            socket: Some(Socket {
                unknown: vec!["group:nacre: this machine has no such name".into()],
                ..Socket::default()
            }),
            ..Scope::default()
        };
        let mut findings = Vec::new();
        checks(&scope, &mut findings);
        assert_eq!(findings[1].id, "rpc.access");
        checks(&Scope::default(), &mut findings);
        assert_eq!(findings.len(), 2);
    }
}

//! Checks the files, folders, sockets and ports that the daemon uses at its start. Those that the
//! running daemon of the same configuration uses are accepted.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use nacre_bdev_uring::{Config, Identity};
use rustix::fs::Access;

use super::Refuse;
use crate::config::Personality;
use crate::config::Settings;
use crate::config::settings::{Bdev, BdevKind};
use crate::daemon::{socket_path, state_dir};
use crate::journal::{SEEN, seen_key};
use crate::rpc::socket::{is_served, obstacle};
use crate::store::{Record, RedbStore};
use crate::values::address::ScopedIp;
use crate::values::files;

pub(super) fn check(settings: &Settings, refuse: &mut Refuse<'_>) {
    let socket = socket_path(settings, Personality::Nacre);
    let is_running = settings.rpc.enabled && is_served(&socket);
    if settings.rpc.enabled {
        match obstacle(&socket) {
            Ok(Some(kind)) => refuse(
                "rpc.socket",
                format!("{} is {kind}, not a socket", socket.display()),
                "choose another path, or remove it yourself".into(),
            ),
            Ok(None) | Err(_) => {
                if let Some(cause) = socket.parent().and_then(no_folder) {
                    refuse("rpc.socket", cause, String::new());
                }
            }
        }
    }
    let dir = state_dir(settings, Personality::Nacre);
    if let Some(cause) = dir.as_deref().and_then(no_folder) {
        let remedy = "choose another directory, or \"none\" to keep nothing".into();
        refuse("data.dir", cause, remedy);
    }
    if let Some(cause) = settings.log.file.as_deref().and_then(no_log_file) {
        refuse("log.file", cause, String::new());
    }
    if is_running {
        return;
    }
    if let Some(cause) = settings.metrics.listen.and_then(port_taken) {
        let remedy = "choose another port, or stop the program that has this one".into();
        refuse("metrics.listen", cause, remedy);
    }
    let seen = dir.map_or_else(Vec::new, |dir| seen_files(&dir));
    for (at, bdev) in settings.bdev.iter().enumerate() {
        if let Some(cause) = unusable(bdev, &seen) {
            refuse(&format!("bdev[{at}].path"), cause, String::new());
        }
    }
}

/// The reason that the folder neither exists nor can be created, if so.
fn no_folder(folder: &Path) -> Option<String> {
    let existing = folder.ancestors().find(|path| path.exists())?;
    if existing.is_dir() {
        return None;
    }
    let kind = existing
        .metadata()
        .map_or("a file", |found| files::kind(&found));
    Some(format!("{} is {kind}, not a directory", existing.display()))
}

fn no_log_file(path: &Path) -> Option<String> {
    let shown = path.display();
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Some(format!(
            "{shown} is {}, not a regular file",
            files::kind(&found)
        )),
        Ok(_) if !is_writable(path) => Some(format!("{shown} cannot be written here")),
        Ok(_) => None,
        Err(_) => {
            let folder = path.parent().filter(|folder| !folder.is_dir())?;
            Some(format!("there is no directory {}", folder.display()))
        }
    }
}

fn is_writable(path: &Path) -> bool {
    rustix::fs::access(path, Access::WRITE_OK).is_ok()
}

fn port_taken(address: SocketAddr) -> Option<String> {
    let error = TcpListener::bind(address).err()?;
    let is_taken = error.kind() == std::io::ErrorKind::AddrInUse;
    let ip = ScopedIp::from(&address);
    is_taken.then(|| format!("another program listens on port {} of {ip}", address.port()))
}

/// The stored facts about the files of bdevs. Empty without a state, or if it cannot be read:
/// `nacre serve` reports that.
fn seen_files(dir: &Path) -> Vec<Record> {
    let mut records = RedbStore::records(dir).unwrap_or_default();
    records.retain(|record| record.key.starts_with(SEEN));
    records
}

/// The reason that the bdev cannot be created on its existing file, if so. Opens the file as the
/// daemon does, but read-only.
fn unusable(bdev: &Bdev, seen: &[Record]) -> Option<String> {
    let path = bdev
        .path
        .as_deref()
        .filter(|_| bdev.kind == BdevKind::FILE)?;
    let Ok(found) = std::fs::metadata(path) else {
        // Reported as missing, or to be created.
        return None;
    };
    if found.is_dir() || (found.is_file() && found.len() == 0 && bdev.size.is_some()) {
        return None;
    }
    let config = Config {
        block_size: bdev.block_size,
        readonly: true,
        identity: known_identity(bdev, path, seen),
        ..Config::new(&bdev.name, path)
    };
    match nacre_bdev_uring::create(config) {
        Err(error) => Some(error.to_string()),
        Ok(_) if !bdev.read_only && !is_writable(path) => {
            Some(format!("{} cannot be written here", path.display()))
        }
        Ok(_) => None,
    }
}

/// The file that the state has for a bdev on this path, and with this UUID if one is given.
fn known_identity(bdev: &Bdev, path: &Path, seen: &[Record]) -> Option<Identity> {
    let is_its = |record: &&Record| {
        let at: Option<PathBuf> = serde_json::from_value(record.params["path"].clone()).ok();
        at.as_deref() == Some(path) && bdev.uuid.is_none_or(|uuid| record.key == seen_key(uuid))
    };
    let record = seen.iter().find(is_its)?;
    serde_json::from_value(record.params["identity"].clone()).ok()
}

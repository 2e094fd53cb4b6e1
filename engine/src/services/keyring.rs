//! The keys of the daemon, by name. A key is a file that holds one secret.
//!
//! The file is read at each authentication and not before, so its replacement changes the key.
//! State, logs, events and answers contain names and paths, never the secret.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{Metadata, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use nacre_nvmf::auth::{KeyError, KeySource, Keys, Secret, SecretError};
use nacre_nvmf::tls::{Psk, PskKey};
use parking_lot::Mutex;
use zeroize::Zeroizing;

use crate::config::names::RELATIVE_KEY;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::engine::Engine;

/// Prefix of the journal keys.
pub const PREFIX: &str = "keyring/";

/// Linux errno `ENOKEY`: the error code for an unknown key.
const ENOKEY: i32 = 126;

/// The keys, and removed ones that are still in use.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: RefCell<BTreeMap<String, Arc<FileKey>>>,
    removed: RefCell<Vec<Weak<FileKey>>>,
}

/// A key in a file.
#[derive(Debug, PartialEq, Eq)]
pub struct FileKey {
    pub name: String,
    pub path: PathBuf,
}

/// A key with its number of users, itself included unless it is removed.
#[derive(Debug)]
pub struct ListedKey {
    pub key: Arc<FileKey>,
    pub removed: bool,
    pub users: usize,
}

/// Why a file cannot be a key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    #[error("{}", RELATIVE_KEY)]
    Relative,
    #[error("it does not exist")]
    Missing,
    #[error("it is not a regular file")]
    NotAFile,
    #[error("other users may read or write it (mode {mode:04o}); `chmod 600` it")]
    Mode { mode: u32 },
    #[error("it belongs to user {uid}, and the daemon is user {own}")]
    Owner { uid: u32, own: u32 },
    #[error("{0}")]
    Io(String),
    #[error("it has more than {} bytes", Secret::MAX_TEXT)]
    Large,
}

impl Keyring {
    /// Adds a key. `Err`: there is one with this name.
    pub fn add(&self, key: FileKey) -> Result<(), FileKey> {
        let mut keys = self.keys.borrow_mut();
        if keys.contains_key(&key.name) {
            return Err(key);
        }
        keys.insert(key.name.clone(), Arc::new(key));
        Ok(())
    }

    /// Removes a key; it stays with its users.
    pub fn remove(&self, name: &str) -> bool {
        let Some(key) = self.keys.borrow_mut().remove(name) else {
            return false;
        };
        let mut removed = self.removed.borrow_mut();
        removed.retain(|key| key.strong_count() > 0);
        removed.push(Arc::downgrade(&key));
        true
    }

    pub fn find(&self, name: &str) -> Option<Arc<FileKey>> {
        self.keys.borrow().get(name).cloned()
    }

    /// All keys by name, then the removed ones that are in use.
    pub fn list(&self) -> Vec<ListedKey> {
        let keys = self.keys.borrow();
        let present = keys.values().map(|key| ListedKey {
            users: Arc::strong_count(key),
            removed: false,
            key: Arc::clone(key),
        });
        let mut all: Vec<ListedKey> = present.collect();
        let removed = self.removed.borrow();
        // The upgrade is no user.
        all.extend(
            removed
                .iter()
                .filter_map(Weak::upgrade)
                .map(|key| ListedKey {
                    users: Arc::strong_count(&key) - 1,
                    removed: true,
                    key,
                }),
        );
        all
    }
}

impl FileKey {
    /// Checks what SPDK checks when a key is added: the path, the mode and the owner.
    pub fn check(path: &Path) -> Result<(), FileError> {
        if !path.is_absolute() {
            return Err(FileError::Relative);
        }
        check_file(&std::fs::metadata(path).map_err(of_io)?)
    }

    /// Reads the secret.
    pub fn secret(&self) -> Result<Secret, KeyError> {
        self.parsed(Secret::parse)
    }

    fn parsed<T>(&self, parse: impl Fn(&str) -> Result<T, SecretError>) -> Result<T, KeyError> {
        let text = read(&self.path).map_err(|error| KeyError::Unreadable {
            name: self.name.clone(),
            why: format!("{}: {error}", self.path.display()),
        })?;
        parse(&text).map_err(|error| KeyError::Malformed {
            name: self.name.clone(),
            error,
        })
    }
}

impl PskKey for FileKey {
    fn psk(&self) -> Result<Psk, KeyError> {
        self.parsed(Psk::parse)
    }

    fn name(&self) -> Option<String> {
        Some(self.name.clone())
    }
}

/// The error for a key that does not exist.
pub fn no_key(field: &'static str, name: &str) -> RpcError {
    RpcError::os(ENOKEY, format!("there is no key \"{name}\""))
        .field(field)
        .remedy("`nacre key list` shows the keys, `nacre key generate` makes one")
}

/// Looks up the keys that a call names: `host` (`dhchap_key`) and `controller`
/// (`dhchap_ctrlr_key`). `None` if it names none. Refuses an unknown key and a controller key
/// without a host key. Reads each secret once, so that a damaged file fails here and not at the
/// host's next connection.
pub fn host_keys(
    engine: &Engine,
    host: Option<&str>,
    controller: Option<&str>,
) -> Result<Option<Arc<dyn KeySource>>, RpcError> {
    let named = |field, name: &str| engine.keyring.find(name).ok_or_else(|| no_key(field, name));
    let Some(host) = host else {
        let controller = controller.map(|name| named("dhchap_ctrlr_key", name));
        return match controller.transpose()? {
            None => Ok(None),
            Some(_) => Err(RpcError::errno(
                Errno::EINVAL,
                "the controller proves itself only to a host that proves itself",
            )
            .field("dhchap_ctrlr_key")
            .remedy("give dhchap_key, too")),
        };
    };
    let host = named("dhchap_key", host)?;
    let controller = controller.map(|name| named("dhchap_ctrlr_key", name));
    let keys = HostKeys {
        host,
        controller: controller.transpose()?,
    };
    // As in `keyring_file_add_key`: a missing file must not undo a restart.
    if !crate::journal::is_replaying() {
        let check = |field, key: &FileKey| {
            let refuse =
                |error: KeyError| RpcError::errno(Errno::EINVAL, error.to_string()).field(field);
            key.secret().map(drop).map_err(refuse)
        };
        check("dhchap_key", &keys.host)?;
        if let Some(key) = &keys.controller {
            check("dhchap_ctrlr_key", key)?;
        }
    }
    Ok(Some(Arc::new(keys)))
}

/// Looks up the TLS key that a call names, and reads it once, as [`host_keys`] does.
pub fn host_psk(engine: &Engine, name: Option<&str>) -> Result<Option<Arc<dyn PskKey>>, RpcError> {
    let Some(name) = name else { return Ok(None) };
    let key = engine
        .keyring
        .find(name)
        .ok_or_else(|| no_key("psk", name))?;
    if !crate::journal::is_replaying() {
        let refuse =
            |error: KeyError| RpcError::errno(Errno::EINVAL, error.to_string()).field("psk");
        key.psk().map_err(refuse)?;
    }
    Ok(Some(key))
}

/// The key of a host that is restored while its key is missing or damaged. Without an entry the
/// host would be served in clear where any host is allowed. A file that is good again later counts.
pub fn restored_key(engine: &Engine, name: &str, refused: &RpcError) -> Option<Arc<FileKey>> {
    if !crate::journal::is_replaying() && !crate::journal::is_declaring() {
        return None;
    }
    tracing::warn!(
        key = name,
        "a host is refused until its key is there: {refused}"
    );
    let lost = || {
        Arc::new(FileKey {
            name: name.to_owned(),
            path: PathBuf::from("(unknown)"),
        })
    };
    Some(engine.keyring.find(name).unwrap_or_else(lost))
}

/// Reads a key file: a regular file that no other user can read.
pub fn read(path: &Path) -> Result<Zeroizing<String>, FileError> {
    // Without NONBLOCK the open of a pipe would wait for a writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags)
        .open(path)
        .map_err(of_io)?;
    check_file(&file.metadata().map_err(of_io)?)?;
    // No reallocation: that would leave a copy of the secret in freed memory.
    let mut text = Zeroizing::new(String::with_capacity(Secret::MAX_TEXT + 1));
    let most = Secret::MAX_TEXT as u64 + 1;
    file.take(most).read_to_string(&mut text).map_err(of_io)?;
    if text.len() > Secret::MAX_TEXT {
        return Err(FileError::Large);
    }
    Ok(text)
}

fn check_file(metadata: &Metadata) -> Result<(), FileError> {
    if !metadata.is_file() {
        return Err(FileError::NotAFile);
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(FileError::Mode { mode });
    }
    let (uid, own) = (metadata.uid(), rustix::process::getuid().as_raw());
    if uid != own {
        return Err(FileError::Owner { uid, own });
    }
    Ok(())
}

fn of_io(error: std::io::Error) -> FileError {
    match error.kind() {
        ErrorKind::NotFound => FileError::Missing,
        _ => FileError::Io(error.to_string()),
    }
}

/// The keys of a host, and of the controller for it.
pub struct HostKeys {
    pub host: Arc<FileKey>,
    pub controller: Option<Arc<FileKey>>,
}

impl KeySource for HostKeys {
    fn keys(&self) -> Result<Keys, KeyError> {
        let controller = self.controller.as_ref().map(|key| key.secret());
        Ok(Keys {
            host: self.host.secret()?,
            controller: controller.transpose()?,
        })
    }

    fn has_controller_key(&self) -> bool {
        self.controller.is_some()
    }

    fn names(&self) -> (Option<String>, Option<String>) {
        let controller = self.controller.as_ref().map(|key| key.name.clone());
        (Some(self.host.name.clone()), controller)
    }
}

impl fmt::Debug for HostKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKeys({:?})", self.names())
    }
}

/// The keys for a remote controller. They can be replaced; later connections use the new ones.
#[derive(Debug, Default)]
pub struct RemoteKeys(Mutex<Option<Arc<dyn KeySource>>>);

impl RemoteKeys {
    pub fn set(&self, keys: Option<Arc<dyn KeySource>>) {
        *self.0.lock() = keys;
    }

    fn current(&self) -> Option<Arc<dyn KeySource>> {
        self.0.lock().clone()
    }
}

impl KeySource for RemoteKeys {
    fn keys(&self) -> Result<Keys, KeyError> {
        self.current().ok_or(KeyError::None)?.keys()
    }

    fn has_host_key(&self) -> bool {
        self.current().is_some()
    }

    fn has_controller_key(&self) -> bool {
        self.current().is_some_and(|keys| keys.has_controller_key())
    }

    fn names(&self) -> (Option<String>, Option<String>) {
        self.current().map_or((None, None), |keys| keys.names())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn file(folder: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    /// Goal: only a file that no other user can read is a key, at each reading.
    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let good = file(folder.path(), "good", &format!("{TEXT}\n"), 0o600);
        assert_eq!(FileKey::check(&good), Ok(()));
        let key = FileKey {
            name: "k".into(),
            path: good.clone(),
        };
        assert_eq!(*key.secret().unwrap().to_text(), TEXT);
        std::fs::set_permissions(&good, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(FileKey::check(&good), Err(FileError::Mode { mode: 0o640 }));
        let error = key.secret().unwrap_err().to_string();
        assert!(
            error.contains("mode 0640") && error.contains("chmod 600"),
            "{error}"
        );
        let relative = FileKey::check(Path::new("good"));
        assert_eq!(relative, Err(FileError::Relative));
        let missing = FileKey::check(&folder.path().join("none"));
        assert_eq!(missing, Err(FileError::Missing));
        assert_eq!(FileKey::check(folder.path()), Err(FileError::NotAFile));
        let large = file(folder.path(), "large", &"x".repeat(129), 0o600);
        assert_eq!(read(&large).unwrap_err(), FileError::Large);
        let bad = FileKey {
            name: "bad".into(),
            path: file(folder.path(), "bad", &TEXT.replace("AAEC", "AAED"), 0o400),
        };
        let error = bad.secret().unwrap_err().to_string();
        assert!(error.starts_with("key bad: the checksum"), "{error}");
    }

    /// Goal: users are counted, and a removed key is listed as long as it has users.
    #[test]
    fn users() {
        let ring = Keyring::default();
        let key = |name: &str| FileKey {
            name: name.into(),
            path: format!("/keys/{name}").into(),
        };
        ring.add(key("b")).unwrap();
        ring.add(key("a")).unwrap();
        assert_eq!(ring.add(key("a")), Err(key("a")));
        let facts = |ring: &Keyring| {
            let of = |one: &ListedKey| (one.key.name.clone(), one.removed, one.users);
            ring.list().iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(
            facts(&ring),
            [("a".into(), false, 1), ("b".into(), false, 1)]
        );
        let both = HostKeys {
            host: ring.find("a").unwrap(),
            controller: ring.find("a"),
        };
        assert_eq!(facts(&ring)[0], ("a".into(), false, 3));
        assert_eq!(both.names(), (Some("a".into()), Some("a".into())));
        assert!(ring.remove("a") && !ring.remove("a"));
        assert_eq!(
            facts(&ring),
            [("b".into(), false, 1), ("a".into(), true, 2)]
        );
        drop(both);
        assert_eq!(facts(&ring), [("b".into(), false, 1)]);
    }
}

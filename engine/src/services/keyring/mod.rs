//! The keys of the daemon, by name.
//!
//! ```text
//!   key        a key: the place of its secret, and its expiry
//!   file       reads key files
//!   text       the text forms of keys: DHHC-1, NVMeTLSkey-1, a line of text
//!   seal       encryption of the keys that the daemon stores
//!   store_key  the key with which they are sealed, and its rotation
//!   rotation   hosts with two keys during an overlap, and the expiry of keys
//! ```
//!
//! A secret is read at each use, so replacing its file replaces the key. State, logs, events and
//! replies contain names, paths and sealed texts, never the secret. The one exception is the reply
//! of `key_generate` with `reveal`.

pub mod file;
pub mod key;
pub mod rotation;
pub mod seal;
pub mod store_key;
pub mod text;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use nacre_nvmf::auth::{KeyError, KeySource, Keys};
use nacre_nvmf::tls::PskKey;
use nacre_nvmf_wire::Nqn;
use parking_lot::Mutex;

pub use file::{FileError, read};
pub use key::{KeyFacts, KeyForm, KeyPlace, NamedKey, WallClock};
pub use rotation::Rotations;
pub use text::KeyText;

use crate::config::Settings;
use crate::doctor::keys as doctor;
use crate::rpc::RpcError;
use crate::rpc::error::Errno;
use crate::services::Engine;
use crate::values::time;

/// Prefix of the journal keys.
pub const PREFIX: &str = "keyring/";

/// Longest duration that a call may give for a key: 100 years, in seconds.
pub const LONGEST_S: u64 = time::LONGEST.as_secs();

/// Linux errno `ENOKEY`: the error code for an unknown key.
const ENOKEY: i32 = 126;

/// The keys by name, and removed ones that are still in use.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: RefCell<BTreeMap<String, Arc<NamedKey>>>,
    removed: RefCell<Vec<Weak<NamedKey>>>,
    pub rotations: Rotations,
    pub clock: WallClock,
    /// The latest failed authentication, by subsystem and host.
    failures: RefCell<BTreeMap<(Nqn, Nqn), Failure>>,
    /// The directory of the service manager's credentials (systemd).
    credentials: RefCell<Option<PathBuf>>,
}

/// The reason that a key cannot be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    #[error("there is a key with this name")]
    Taken,
    #[error("there are {MAX_KEYS} keys, the greatest number")]
    Full,
}

/// Most keys in the keyring.
pub const MAX_KEYS: usize = 4096;

/// A failed authentication of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub at: SystemTime,
    pub peer: String,
    pub reason: String,
}

/// Most hosts whose failures are kept. The oldest one makes room, because unauthenticated hosts
/// choose their names.
const MAX_FAILURES: usize = 4096;

/// A key with the number of references to it; the keyring's own counts unless the key is removed.
#[derive(Debug)]
pub struct ListedKey {
    pub key: Arc<NamedKey>,
    pub removed: bool,
    pub users: usize,
}

impl Keyring {
    /// Adds a key.
    pub fn add(&self, key: NamedKey) -> Result<(), AddError> {
        self.check_room(&key.name)?;
        let mut keys = self.keys.borrow_mut();
        keys.insert(key.name.clone(), Arc::new(key));
        Ok(())
    }

    /// Checks whether a key with this name can be added.
    pub fn check_room(&self, name: &str) -> Result<(), AddError> {
        let keys = self.keys.borrow();
        if keys.contains_key(name) {
            return Err(AddError::Taken);
        }
        if keys.len() >= MAX_KEYS {
            return Err(AddError::Full);
        }
        Ok(())
    }

    /// Sets the directory of the service manager's credentials.
    pub fn use_credentials(&self, folder: Option<PathBuf>) {
        self.credentials.replace(folder);
    }

    fn credentials(&self) -> Option<PathBuf> {
        self.credentials.borrow().clone()
    }

    /// Removes a key from the keyring; hosts that use it keep it. False: there is no such key.
    pub fn remove(&self, name: &str) -> bool {
        let Some(key) = self.keys.borrow_mut().remove(name) else {
            return false;
        };
        let mut removed = self.removed.borrow_mut();
        removed.retain(|key| key.strong_count() > 0);
        removed.push(Arc::downgrade(&key));
        true
    }

    pub fn find(&self, name: &str) -> Option<Arc<NamedKey>> {
        self.keys.borrow().get(name).cloned()
    }

    /// All keys that are not removed.
    pub fn keys(&self) -> Vec<Arc<NamedKey>> {
        self.keys.borrow().values().cloned().collect()
    }

    /// Stores the failed authentication of a host to a subsystem.
    pub fn note_failure(&self, names: (Nqn, Nqn), peer: String, reason: String) {
        let mut failures = self.failures.borrow_mut();
        if failures.len() >= MAX_FAILURES && !failures.contains_key(&names) {
            let oldest = failures.iter().min_by_key(|(_, failure)| failure.at);
            let oldest = oldest.map(|(names, _)| names.clone());
            oldest.map(|names| failures.remove(&names));
        }
        let at = self.clock.now();
        failures.insert(names, Failure { at, peer, reason });
    }

    /// The latest failed authentication of a host to a subsystem.
    pub fn last_failure(&self, subsystem: &Nqn, host: &Nqn) -> Option<Failure> {
        let names = (subsystem.clone(), host.clone());
        self.failures.borrow().get(&names).cloned()
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

/// The keys for `nacre doctor`. Reads files.
pub fn for_doctor(keys: &[Arc<NamedKey>]) -> Vec<doctor::Key> {
    let of = |key: &Arc<NamedKey>| doctor::Key {
        name: key.name.clone(),
        problem: key.facts().err().map(|error| error.to_string()),
        expires_in_s: key.expires_in_s(),
    };
    keys.iter().map(of).collect()
}

/// The keys that the configuration file declares, for `nacre doctor`.
pub fn declared_for_doctor(settings: &Settings) -> Vec<doctor::Key> {
    let key = |declared: &crate::config::settings::Key| {
        let key = NamedKey::in_file(declared.name.clone(), declared.path.clone());
        let expires = declared.expires.as_deref().map(time::parse_moment);
        key.set_expiry(expires.and_then(Result::ok));
        Arc::new(key)
    };
    for_doctor(&settings.key.iter().map(key).collect::<Vec<_>>())
}

/// The error for a key that does not exist.
pub fn no_key(field: &'static str, name: &str) -> RpcError {
    RpcError::os(ENOKEY, format!("there is no key \"{name}\""))
        .field(field)
        .remedy("`nacre key list` shows the keys, `nacre key generate` makes one")
}

/// Looks up the DH-HMAC-CHAP keys that a call names: `host` (`dhchap_key`) and `controller`
/// (`dhchap_ctrlr_key`). `None` if it names none. Refuses an unknown key, and a controller key
/// without a host key. Outside of a replay, reads each secret once, so that a damaged file fails
/// here and not at the host's next connection.
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
        let check = |field, key: &NamedKey| {
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

/// Looks up the TLS pre-shared key that a call names; reads it once outside of a replay, as
/// [`host_keys`] does. `None` if `name` is.
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

/// A stand-in for the missing or damaged key of a host, in a replay or for a declared host. The
/// host is refused until the key can be read. Without a stand-in, a subsystem that allows any host
/// would serve the host without authentication. `None` in other calls.
pub fn restored_key(engine: &Engine, name: &str, refused: &RpcError) -> Option<Arc<NamedKey>> {
    if !crate::journal::is_replaying() && !crate::journal::is_declaring() {
        return None;
    }
    tracing::warn!(
        key = name,
        "a host is refused until its key is there: {refused}"
    );
    let lost = || {
        let path = PathBuf::from("(unknown)");
        Arc::new(NamedKey::in_file(name.to_owned(), path))
    };
    Some(engine.keyring.find(name).unwrap_or_else(lost))
}

/// The DH-HMAC-CHAP keys of a host, and of the controller towards it.
pub struct HostKeys {
    pub host: Arc<NamedKey>,
    pub controller: Option<Arc<NamedKey>>,
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

/// The keys for connections to a remote controller. They can be replaced; later connections use the
/// new ones.
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
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn key_file(folder: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    /// Goal: only a file that no other user can read is a key, at each reading.
    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let good = key_file(folder.path(), "good", &format!("{TEXT}\n"), 0o600);
        assert_eq!(file::check(&good), Ok(()));
        let key = NamedKey::in_file("k".into(), good.clone());
        assert_eq!(*key.secret().unwrap().to_text(), TEXT);
        std::fs::set_permissions(&good, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(file::check(&good), Err(FileError::Mode { mode: 0o640 }));
        let error = key.secret().unwrap_err().to_string();
        assert!(
            error.contains("mode 0640") && error.contains("chmod 600"),
            "{error}"
        );
        let relative = file::check(Path::new("good"));
        assert_eq!(relative, Err(FileError::Relative));
        let missing = file::check(&folder.path().join("none"));
        assert_eq!(missing, Err(FileError::Missing));
        assert_eq!(file::check(folder.path()), Err(FileError::NotAFile));
        let large = key_file(folder.path(), "large", &"x".repeat(129), 0o600);
        assert_eq!(
            read(&large).unwrap_err(),
            FileError::Large {
                most: nacre_nvmf::auth::Secret::MAX_TEXT
            }
        );
        let bad = key_file(folder.path(), "bad", &TEXT.replace("AAEC", "AAED"), 0o400);
        let bad = NamedKey::in_file("bad".into(), bad);
        let error = bad.secret().unwrap_err().to_string();
        assert!(error.starts_with("key bad: the checksum"), "{error}");
    }

    /// Goal: only a regular file of bounded size is a credential; a pipe does not hang the daemon.
    #[test]
    fn credentials_are_regular_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let read = |name: &str| {
            let (path, (done, outcome)) = (path(name), std::sync::mpsc::channel());
            std::thread::spawn(move || done.send(file::read_credential(&path, 128)));
            let outcome = outcome.recv_timeout(Duration::from_secs(10));
            outcome.unwrap_or_else(|_| panic!("reading {name} does not end"))
        };
        key_file(folder.path(), "good", TEXT, 0o440);
        assert_eq!(*read("good").unwrap(), TEXT);
        let pipe = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), pipe, mode, 0).unwrap();
        assert_eq!(read("pipe"), Err(FileError::NotAFile));
        std::fs::create_dir(path("folder")).unwrap();
        assert_eq!(read("folder"), Err(FileError::NotAFile));
        std::os::unix::fs::symlink("/dev/zero", path("zero")).unwrap();
        assert_eq!(read("zero"), Err(FileError::NotAFile));
        key_file(folder.path(), "large", &"x".repeat(129), 0o440);
        assert!(matches!(read("large"), Err(FileError::Large { .. })));
        assert_eq!(read("none"), Err(FileError::Missing));
    }

    #[test]
    fn the_number_of_keys_is_bounded() {
        let ring = Keyring::default();
        let add = |name: String| ring.add(NamedKey::in_file(name, "/k".into()));
        for number in 0..MAX_KEYS {
            add(number.to_string()).unwrap();
        }
        assert_eq!(add("0".into()), Err(AddError::Taken));
        assert_eq!(add("more".into()), Err(AddError::Full));
        ring.remove("0");
        assert_eq!(add("more".into()), Ok(()));
    }

    /// Goal: users are counted, and a removed key is listed as long as it has users.
    #[test]
    fn users() {
        let ring = Keyring::default();
        let key = |name: &str| NamedKey::in_file(name.into(), format!("/keys/{name}").into());
        ring.add(key("b")).unwrap();
        ring.add(key("a")).unwrap();
        assert!(ring.add(key("a")).is_err());
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

    /// Goal: an expired key is refused with its own reason, and described nevertheless.
    #[test]
    fn expiry() {
        let folder = tempfile::tempdir().unwrap();
        let path = key_file(folder.path(), "k", TEXT, 0o600);
        let clock = WallClock::default();
        let key = NamedKey::new("k".into(), KeyPlace::File(path), clock.clone());
        assert_eq!(key.expires_in_s(), None);
        key.set_expiry(Some(clock.now() + Duration::from_secs(3600)));
        assert!(key.secret().is_ok() && !key.take_expiry());
        let left = key.expires_in_s().unwrap();
        assert!((3500.0..=3600.0).contains(&left), "{left}");
        clock.advance(Duration::from_secs(3601));
        let error = key.secret().unwrap_err();
        assert!(matches!(error, KeyError::Expired { .. }), "{error}");
        assert!(
            error.to_string().starts_with("key k expired at 20"),
            "{error}"
        );
        assert!(matches!(key.psk(), Err(KeyError::Expired { .. })));
        assert!(key.expires_in_s().unwrap() < 0.0);
        assert!(key.take_expiry() && !key.take_expiry(), "once");
        assert_eq!(key.facts().unwrap().kind, "dhchap");
        key.set_expiry(None);
        assert!(key.secret().is_ok());
    }
}

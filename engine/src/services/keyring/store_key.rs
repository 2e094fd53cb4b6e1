//! The store key, which seals the keys that the daemon stores: its places, and its rotation.
//!
//! ```text
//!   credential nacre-store-key          seals and opens
//!   credential nacre-store-key-former   opens, until a rotation has sealed all keys again
//!   store.key in the data directory     opens; seals if there is no credential
//!   store.key.next beside it            made by a rotation: opens, becomes store.key at its end
//! ```
//!
//! A rotation writes `store.key.next`, then all sealed keys in one transaction of the state, then
//! renames the file. A crash in between leaves every key readable: both files open keys, and
//! [`StoreKeys::finish_rotation`] finishes the rename before the next key is sealed. A rotation to
//! a credential deletes both files at its end; after a crash the next rotation deletes them.
//!
//! A store key is read at each use and not cached. The methods that change keys call this module
//! one after the other.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nacre_nvmf::auth::Secret;
use tracing::{info, warn};
use zeroize::Zeroizing;

use super::file::{self, FileError};
use super::seal::{CREDENTIAL, FILE, SealError, Sealed, StoreKey};
use crate::doctor::keys as doctor;
use crate::services::Engine;

/// The name of the credential with the previous store key.
const FORMER: &str = "nacre-store-key-former";
const NEXT: &str = "store.key.next";
/// The order in which the files are read and deleted. A reader in the middle of a rename from
/// `NEXT` to `FILE` finds the new key in `FILE`.
const FILES: [&str; 2] = [NEXT, FILE];

/// The places of the store keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreKeys {
    /// The folder of the service manager's credentials.
    credentials: Option<PathBuf>,
    /// The data directory.
    state: Option<PathBuf>,
}

/// The IDs of the store keys that sealed the stored keys.
pub type InUse = BTreeSet<String>;

impl StoreKeys {
    pub fn of(engine: &Engine) -> Self {
        Self {
            credentials: engine.keyring.credentials(),
            state: engine.journal.store_path().map(Path::to_owned),
        }
    }

    /// Reads a credential of the service manager, of at most `most` bytes.
    pub fn read_credential(&self, name: &str, most: usize) -> Result<Zeroizing<String>, SealError> {
        let folder = self.credentials.as_ref().ok_or(SealError::NoCredentials)?;
        let path = folder.join(name);
        file::read_credential(&path, most).map_err(|error| unreadable(&path, &error))
    }

    /// Opens the sealed text of the key `name`. Also returns when the secret was made.
    pub fn open(
        &self,
        name: &str,
        sealed: &str,
    ) -> Result<(Zeroizing<String>, SystemTime), SealError> {
        let sealed = Sealed::parse(sealed)?;
        let (mut had, mut refused) = (Vec::new(), None);
        for found in self.all() {
            match found {
                Ok(key) if key.id() == sealed.id => {
                    return Ok((key.open(name, &sealed)?, sealed.made()));
                }
                Ok(key) => had.push(key.id()),
                // Another one may fit.
                Err(error) => drop(refused.get_or_insert(error)),
            }
        }
        Err(match refused {
            Some(error) => error,
            None if had.is_empty() => SealError::Missing,
            None => other_key(sealed.id, had),
        })
    }

    /// Seals the text of the key `name`. Creates a store key if there is none. Refused while the
    /// store key of another sealed key is missing: a new store key would hide that loss.
    pub fn seal(
        &self,
        name: &str,
        text: &str,
        made: SystemTime,
        in_use: &InUse,
    ) -> Result<String, SealError> {
        self.finish_rotation(in_use)?;
        let had = self.all().into_iter().collect::<Result<Vec<_>, _>>()?;
        let is_here = |id: &&String| had.iter().any(|key| key.id() == **id);
        if let Some(lost) = in_use.iter().find(|id| !is_here(id)) {
            let ids: Vec<String> = had.iter().map(StoreKey::id).collect();
            return Err(if ids.is_empty() {
                SealError::Missing
            } else {
                other_key(lost, ids)
            });
        }
        let own = match self.credential(CREDENTIAL)? {
            Some(key) => Some(key),
            None => self.file(FILE)?,
        };
        let own = match own {
            Some(key) => key,
            None => self.make(FILE)?,
        };
        own.seal(name, text, made)
    }

    /// Begins a rotation. Returns the store key that seals all keys from now on: the credential, or
    /// a new key whose file is durable.
    pub fn begin_rotation(&self, in_use: &InUse) -> Result<StoreKey, SealError> {
        self.finish_rotation(in_use)?;
        if let Some(key) = self.credential(CREDENTIAL)? {
            let id = key.id();
            let is_done = self.files()?.is_empty() && in_use.iter().all(|one| *one == id);
            return if is_done {
                Err(SealError::OnlyCredential)
            } else {
                Ok(key)
            };
        }
        // A rotation that failed has left one, which may have sealed keys.
        match self.file(NEXT)? {
            Some(key) => Ok(key),
            None => self.make(NEXT),
        }
    }

    /// Ends a rotation after all keys were sealed with `new`.
    pub fn end_rotation(&self, new: &StoreKey) -> Result<(), SealError> {
        let id = new.id();
        if self.file(NEXT)?.is_some_and(|next| next.id() == id) {
            return self.promote();
        }
        // A credential: the files have sealed nothing that is left.
        for name in FILES {
            let Some(path) = self.path(name) else {
                continue;
            };
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(unreadable(&path, &error));
                }
                _ => {}
            }
        }
        self.sync()
    }

    /// The store key for `nacre doctor`. `None`: there is no store key, and no key is sealed.
    pub fn for_doctor(&self, is_any_sealed: bool) -> Option<doctor::StoreKey> {
        let lost = |error: SealError| doctor::StoreKey::Missing(error.to_string());
        Some(match (self.credential(CREDENTIAL), self.files()) {
            (Err(error), _) | (_, Err(error)) => lost(error),
            (Ok(credential), Ok(_)) => match self.present() {
                Some(path) => doctor::StoreKey::File(path),
                None if credential.is_some() => doctor::StoreKey::Credential,
                None if is_any_sealed => lost(SealError::Missing),
                None => return None,
            },
        })
    }

    /// The paths that viewers must not see, each with its replacement.
    pub fn hidden_paths(&self) -> Vec<(String, String)> {
        let files = FILES.iter().filter_map(|name| self.path(name));
        let files = files.map(|path| (path, "(store key)"));
        let folder = self.credentials.clone();
        let folder = folder.map(|path| (path, "(credentials)"));
        let all = files.chain(folder);
        all.map(|(path, shown)| (path.display().to_string(), shown.to_owned()))
            .collect()
    }

    /// Finishes a rotation that a crash interrupted after the keys were sealed.
    fn finish_rotation(&self, in_use: &InUse) -> Result<(), SealError> {
        let Some(next) = self.file(NEXT)? else {
            return Ok(());
        };
        let seals = |key: &StoreKey| in_use.contains(&key.id());
        if !seals(&next) || self.file(FILE)?.as_ref().is_some_and(seals) {
            return Ok(());
        }
        info!("a rotation of the store key was interrupted; it ends now");
        self.promote()
    }

    /// All store keys, or the errors of reading them. Each can open keys.
    fn all(&self) -> Vec<Result<StoreKey, SealError>> {
        let credentials = [CREDENTIAL, FORMER].map(|name| self.credential(name));
        let files = FILES.map(|name| self.file(name));
        let all = credentials.into_iter().chain(files);
        all.filter_map(Result::transpose).collect()
    }

    fn credential(&self, name: &str) -> Result<Option<StoreKey>, SealError> {
        let path = self.credentials.as_ref().map(|folder| folder.join(name));
        found(path, |path| file::read_credential(path, Secret::MAX_TEXT))
    }

    fn file(&self, name: &str) -> Result<Option<StoreKey>, SealError> {
        found(self.path(name), file::read)
    }

    /// The store keys of the data directory.
    fn files(&self) -> Result<Vec<StoreKey>, SealError> {
        let all = FILES.iter().filter_map(|name| self.file(name).transpose());
        all.collect()
    }

    /// The first existing file of a store key in the data directory; `FILE` before `NEXT`.
    fn present(&self) -> Option<PathBuf> {
        let mut files = FILES.iter().rev().filter_map(|name| self.path(name));
        files.find(|path| path.exists())
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.state.as_ref().map(|folder| folder.join(name))
    }

    /// Creates a store key. Its file is durable when this returns.
    fn make(&self, name: &str) -> Result<StoreKey, SealError> {
        let path = self.path(name).ok_or(SealError::NoState)?;
        let key = StoreKey::generate()?;
        let new = path.with_file_name(format!("{name}.new"));
        let written = write(&new, &key.to_text()).and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|error| unreadable(&path, &error))?;
        self.sync()?;
        Ok(key)
    }

    /// Renames `NEXT` to `FILE`.
    fn promote(&self) -> Result<(), SealError> {
        let paths = self.path(NEXT).zip(self.path(FILE));
        let (next, own) = paths.ok_or(SealError::NoState)?;
        std::fs::rename(&next, &own).map_err(|error| unreadable(&next, &error))?;
        self.sync()
    }

    /// Makes the entries of the data directory durable.
    fn sync(&self) -> Result<(), SealError> {
        let Some(folder) = &self.state else {
            return Ok(());
        };
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|error| unreadable(folder, &error))
    }
}

fn found(
    path: Option<PathBuf>,
    read: impl Fn(&Path) -> Result<Zeroizing<String>, FileError>,
) -> Result<Option<StoreKey>, SealError> {
    let Some(path) = path else { return Ok(None) };
    match read(&path) {
        Err(FileError::Missing) => Ok(None),
        Err(error) => Err(unreadable(&path, &error)),
        Ok(text) => {
            let why = "it is not 64 hexadecimal digits, as `openssl rand -hex 32` makes them";
            let key = StoreKey::parse(&text);
            key.map(Some).ok_or_else(|| unreadable(&path, &why))
        }
    }
}

fn other_key(sealed: &str, had: Vec<String>) -> SealError {
    SealError::OtherKey {
        sealed: sealed.to_owned(),
        had,
    }
}

fn unreadable(path: &Path, why: &dyn std::fmt::Display) -> SealError {
    SealError::Unreadable {
        path: path.to_owned(),
        why: why.to_string(),
    }
}

/// Writes a new file that no other user can read.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    // One that a crash left behind was never used.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        Err(_) => {}
        Ok(()) => warn!(file = %path.display(), "removed a store key that was not finished"),
    }
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// The store key in a data directory for `nacre doctor`, which may not read the file.
pub fn in_folder(state: Option<PathBuf>) -> Option<doctor::StoreKey> {
    let (credentials, state) = (None, Some(state?));
    let keys = StoreKeys { credentials, state };
    keys.present().map(doctor::StoreKey::File)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    struct Rig {
        folder: tempfile::TempDir,
        keys: StoreKeys,
    }

    impl Rig {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let [credentials, state] = ["credentials", "state"].map(|name| {
                let path = folder.path().join(name);
                std::fs::create_dir(&path).unwrap();
                Some(path)
            });
            let keys = StoreKeys { credentials, state };
            Self { folder, keys }
        }

        fn state(&self, name: &str) -> PathBuf {
            self.folder.path().join("state").join(name)
        }

        fn set_credential(&self, name: &str, text: &str) {
            let path = self.folder.path().join("credentials").join(name);
            std::fs::write(path, text).unwrap();
        }

        fn seal(&self, sealed: &[&String]) -> Result<String, SealError> {
            self.keys.seal("k", TEXT, NOW, &in_use(sealed))
        }

        fn opens(&self, sealed: &str) -> bool {
            let opened = self.keys.open("k", sealed);
            opened.is_ok_and(|(text, _)| *text == TEXT)
        }
    }

    fn in_use(sealed: &[&String]) -> InUse {
        let id = |text: &&String| Sealed::parse(text).unwrap().id.to_owned();
        sealed.iter().map(id).collect()
    }

    /// Goal: the first key makes the store key, which no other user can read; a lost or foreign
    /// store key is an error, and no new one hides it.
    #[test]
    fn made_once() {
        let rig = Rig::new();
        assert_eq!(rig.keys.for_doctor(false), None);
        let first = rig.seal(&[]).unwrap();
        let file = rig.state(FILE);
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        let kept = std::fs::read(&file).unwrap();
        let second = rig.seal(&[&first]).unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), kept);
        assert!(rig.opens(&first) && rig.opens(&second));
        let doctor = doctor::StoreKey::File(file.clone());
        assert_eq!(rig.keys.for_doctor(false), Some(doctor));

        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        let open = rig.keys.open("k", &first).unwrap_err().to_string();
        assert!(open.contains("chmod 600"), "{open}");
        assert_eq!(rig.seal(&[&first]).unwrap_err().to_string(), open);
        std::fs::remove_file(&file).unwrap();
        assert_eq!(rig.keys.open("k", &first), Err(SealError::Missing));
        assert_eq!(rig.seal(&[&first]), Err(SealError::Missing));
        assert!(!file.exists());

        let other = StoreKey::generate().unwrap();
        write(&file, &other.to_text()).unwrap();
        let foreign = other_key(Sealed::parse(&first).unwrap().id, vec![other.id()]);
        assert_eq!(rig.keys.open("k", &first).unwrap_err(), foreign);
        assert_eq!(rig.seal(&[&first]).unwrap_err(), foreign);
        for damage in [&kept[..63], b"", b"\xff\xfe"] {
            std::fs::write(&file, damage).unwrap();
            let open = rig.keys.open("k", &first);
            assert!(matches!(open, Err(SealError::Unreadable { .. })));
            let seal = rig.seal(&[]);
            assert!(matches!(seal, Err(SealError::Unreadable { .. })));
        }
        std::fs::write(&file, &kept).unwrap();
        assert!(rig.opens(&first));
        let none = StoreKeys::default().seal("k", TEXT, NOW, &InUse::new());
        assert_eq!(none, Err(SealError::NoState));
    }

    /// Goal: keys of a file move to a credential, and from one credential to another.
    #[test]
    fn credentials() {
        let rig = Rig::new();
        let in_file = rig.seal(&[]).unwrap();
        rig.set_credential(CREDENTIAL, &"5a".repeat(32));
        let sealed = rig.seal(&[&in_file]).unwrap();
        assert!(rig.opens(&in_file) && rig.opens(&sealed));
        let beside = doctor::StoreKey::File(rig.state(FILE));
        assert_eq!(rig.keys.for_doctor(false), Some(beside));
        let new = rig.keys.begin_rotation(&in_use(&[&in_file])).unwrap();
        rig.keys.end_rotation(&new).unwrap();
        assert!(!rig.state(FILE).exists() && !rig.opens(&in_file));
        assert!(rig.opens(&sealed));
        let doctor = rig.keys.for_doctor(false);
        assert_eq!(doctor, Some(doctor::StoreKey::Credential));
        let done = rig.keys.begin_rotation(&in_use(&[&sealed]));
        assert_eq!(done.unwrap_err(), SealError::OnlyCredential);

        rig.set_credential(CREDENTIAL, &"a5".repeat(32));
        assert!(!rig.opens(&sealed));
        rig.set_credential(FORMER, &"5a".repeat(32));
        assert!(rig.opens(&sealed));
        let new = rig.keys.begin_rotation(&in_use(&[&sealed])).unwrap();
        assert_ne!(in_use(&[&sealed]), InUse::from([new.id()]));
        // A damaged credential is an error, not a reason to use a file.
        rig.set_credential(CREDENTIAL, "short");
        let refused = rig.seal(&[]).unwrap_err().to_string();
        assert!(refused.contains("64 hexadecimal digits"), "{refused}");
        assert!(!rig.state(FILE).exists());
    }

    /// Goal: a crash at any moment of a rotation leaves every key readable, and the next call
    /// finishes it. Method: the steps of a rotation, ended after each.
    #[test]
    fn a_rotation_is_interrupted() {
        for steps in 0..=3 {
            let rig = Rig::new();
            let old = rig.seal(&[]).unwrap();
            let temporary = rig.state("store.key.next.new");
            std::fs::write(&temporary, "half").unwrap();
            let mut current = old.clone();
            let mut made = None;
            if steps >= 1 {
                made = Some(rig.keys.begin_rotation(&in_use(&[&old])).unwrap());
                assert!(!temporary.exists());
            }
            if let Some(new) = made.as_ref().filter(|_| steps >= 2) {
                current = new.seal("k", TEXT, NOW).unwrap();
            }
            if let Some(new) = made.as_ref().filter(|_| steps >= 3) {
                rig.keys.end_rotation(new).unwrap();
                assert!(!rig.opens(&old), "its store key is gone");
            }
            assert!(rig.opens(&current), "after {steps} steps");
            let more = rig.seal(&[&current]).unwrap();
            assert!(rig.opens(&current) && rig.opens(&more));
            assert_eq!(in_use(&[&more]), in_use(&[&current]), "one store key");
            assert_eq!(rig.state(NEXT).exists(), steps == 1);
            // Another rotation works in each case; a key that was never used is used then.
            let both = in_use(&[&current, &more]);
            let new = rig.keys.begin_rotation(&both).unwrap();
            let resealed = new.seal("k", TEXT, NOW).unwrap();
            assert!(rig.opens(&current) && rig.opens(&resealed));
            rig.keys.end_rotation(&new).unwrap();
            assert!(rig.opens(&resealed) && !rig.opens(&current));
            assert!(!rig.state(NEXT).exists());
        }
    }

    /// Goal: a crash at any moment of a rotation to a credential leaves every key readable, and the
    /// next rotation deletes both files. Method: the files are put back as a crash leaves them.
    #[test]
    fn a_rotation_to_a_credential_is_interrupted() {
        for left in [&[NEXT, FILE][..], &[FILE], &[NEXT], &[]] {
            let rig = Rig::new();
            let old = rig.seal(&[]).unwrap();
            // A rotation of the file that failed has left its file.
            rig.keys.begin_rotation(&in_use(&[&old])).unwrap();
            rig.set_credential(CREDENTIAL, &"5a".repeat(32));
            let new = rig.keys.begin_rotation(&in_use(&[&old])).unwrap();
            assert!(rig.opens(&old), "before the state");
            let current = new.seal("k", TEXT, NOW).unwrap();
            for name in FILES.iter().filter(|name| !left.contains(name)) {
                std::fs::remove_file(rig.state(name)).unwrap();
            }
            assert!(rig.opens(&current), "{left:?}");
            let more = rig.seal(&[&current]).unwrap();
            assert!(rig.opens(&more), "{left:?}");
            let doctor = rig.keys.for_doctor(false).unwrap();
            let again = rig.keys.begin_rotation(&in_use(&[&current, &more]));
            let state = Some(rig.folder.path().join("state"));
            match left.last() {
                None => {
                    assert_eq!(doctor, doctor::StoreKey::Credential);
                    assert_eq!(again.unwrap_err(), SealError::OnlyCredential);
                }
                Some(file) => {
                    let expected = doctor::StoreKey::File(rig.state(file));
                    assert_eq!(in_folder(state), Some(expected.clone()));
                    assert_eq!(doctor, expected);
                    rig.keys.end_rotation(&again.unwrap()).unwrap();
                }
            }
            assert!(!rig.state(FILE).exists() && !rig.state(NEXT).exists());
            assert!(rig.opens(&current) && rig.opens(&more));
        }
    }

    /// Goal: a file that cannot be deleted is the one that the next rotation looks for.
    #[test]
    fn the_next_file_is_deleted_first() {
        let rig = Rig::new();
        let old = rig.seal(&[]).unwrap();
        rig.keys.begin_rotation(&in_use(&[&old])).unwrap();
        rig.set_credential(CREDENTIAL, &"5a".repeat(32));
        let new = rig.keys.begin_rotation(&in_use(&[&old])).unwrap();
        std::fs::remove_file(rig.state(FILE)).unwrap();
        std::fs::create_dir(rig.state(FILE)).unwrap();
        assert!(rig.keys.end_rotation(&new).is_err());
        assert!(!rig.state(NEXT).exists());
    }

    /// Goal: a crash leaves every key readable where a new file takes the place of a credential.
    /// The doctor reports that file, and no viewer sees its path.
    #[test]
    fn a_rotation_from_a_credential_is_interrupted() {
        let rig = Rig::new();
        rig.set_credential(CREDENTIAL, &"5a".repeat(32));
        let old = rig.seal(&[]).unwrap();
        let credential = rig.folder.path().join("credentials").join(CREDENTIAL);
        std::fs::rename(&credential, credential.with_file_name(FORMER)).unwrap();
        let new = rig.keys.begin_rotation(&in_use(&[&old])).unwrap();
        assert!(rig.opens(&old));
        let current = new.seal("k", TEXT, NOW).unwrap();
        assert!(rig.opens(&current));
        let next = rig.state(NEXT);
        let doctor = rig.keys.for_doctor(false);
        assert_eq!(doctor, Some(doctor::StoreKey::File(next.clone())));
        let hidden = rig.keys.hidden_paths();
        let next = next.display().to_string();
        assert!(hidden.iter().any(|(path, _)| *path == next));
        let more = rig.seal(&[&current]).unwrap();
        assert_eq!(in_use(&[&more]), in_use(&[&current]));
        assert!(rig.state(FILE).exists() && !rig.state(NEXT).exists());
        assert!(rig.opens(&current) && rig.opens(&more));
    }

    /// Goal: a reader finds the store key also while a rotation renames its file. Method: many
    /// rotations, each beside a reader.
    #[test]
    fn reading_during_a_rename() {
        let rig = Rig::new();
        let mut sealed = rig.seal(&[]).unwrap();
        for _ in 0..100 {
            let new = rig.keys.begin_rotation(&in_use(&[&sealed])).unwrap();
            sealed = new.seal("k", TEXT, NOW).unwrap();
            let is_done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let mut all = true;
                    while !is_done.load(Ordering::Relaxed) {
                        all &= rig.opens(&sealed);
                    }
                    all
                });
                rig.keys.promote().unwrap();
                is_done.store(true, Ordering::Relaxed);
                assert!(reader.join().unwrap());
            });
        }
    }
}

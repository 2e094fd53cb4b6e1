//! A key of the keyring, for DH-HMAC-CHAP or TLS-PSK: its name, the place of its secret (a file, a
//! credential of systemd, or sealed in the daemon's state), and when it expires.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nacre_nvmf::auth::{KeyError, Secret, SecretError};
use nacre_nvmf::tls::{Psk, PskKey};
use parking_lot::Mutex;
use zeroize::Zeroizing;

use super::file;
use super::store_key::StoreKeys;
use super::text::KeyText;
use crate::values::time;

/// A named key. Its secret is read from its place at each use, and not cached.
pub struct NamedKey {
    pub name: String,
    place: Mutex<KeyPlace>,
    /// Unix time in seconds; 0: never.
    expires: AtomicU64,
    /// The event about its expiry was sent.
    announced: AtomicBool,
    clock: WallClock,
}

/// The place of a key's secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyPlace {
    File(PathBuf),
    /// A credential of the service manager (systemd), by its name.
    Credential {
        name: String,
        keys: StoreKeys,
    },
    /// In the daemon's state: the encrypted text, and the store keys that decrypt it.
    Sealed {
        text: String,
        keys: StoreKeys,
    },
}

/// Facts of a key that are safe to show: they do not reveal the secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFacts {
    /// `dhchap` or `tls`.
    pub kind: &'static str,
    /// The hash in the key's text form (`DHHC-1:` or `NVMeTLSkey-1:`), or `none`.
    pub hash: &'static str,
    /// Eight hexadecimal digits.
    pub fingerprint: String,
    /// When the secret was sealed, or its file last modified; `None` for a credential.
    pub made: Option<SystemTime>,
}

/// The time of day. Tests move it.
#[derive(Debug, Clone, Default)]
pub struct WallClock(Arc<AtomicU64>);

impl WallClock {
    pub fn now(&self) -> SystemTime {
        SystemTime::now() + Duration::from_secs(self.0.load(Ordering::Relaxed))
    }

    #[cfg(test)]
    pub fn advance(&self, time: Duration) {
        self.0.fetch_add(time.as_secs(), Ordering::Relaxed);
    }
}

impl NamedKey {
    pub fn new(name: String, place: KeyPlace, clock: WallClock) -> Self {
        Self {
            name,
            place: Mutex::new(place),
            expires: AtomicU64::new(0),
            announced: AtomicBool::new(false),
            clock,
        }
    }

    /// A key in a file, not part of a keyring; it never expires.
    pub fn in_file(name: String, path: PathBuf) -> Self {
        Self::new(name, KeyPlace::File(path), WallClock::default())
    }

    pub fn place(&self) -> KeyPlace {
        self.place.lock().clone()
    }

    pub fn is_sealed(&self) -> bool {
        matches!(self.place(), KeyPlace::Sealed { .. })
    }

    /// Changes the place of the secret. Moves no secret.
    pub fn set_place(&self, place: KeyPlace) {
        *self.place.lock() = place;
    }

    /// The file of the secret; `None` if it is elsewhere.
    pub fn path(&self) -> Option<PathBuf> {
        match &*self.place.lock() {
            KeyPlace::File(path) => Some(path.clone()),
            KeyPlace::Credential { .. } | KeyPlace::Sealed { .. } => None,
        }
    }

    /// Sets when the key expires; `None`: never.
    pub fn set_expiry(&self, at: Option<SystemTime>) {
        let since = at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        // A moment before 1970 has passed all the same.
        let seconds = at.map_or(0, |_| since.map_or(1, |since| since.as_secs().max(1)));
        self.expires.store(seconds, Ordering::Relaxed);
        self.announced.store(false, Ordering::Relaxed);
    }

    pub fn expires(&self) -> Option<SystemTime> {
        match self.expires.load(Ordering::Relaxed) {
            0 => None,
            seconds => Some(UNIX_EPOCH + Duration::from_secs(seconds)),
        }
    }

    /// Seconds until the key expires, negative afterwards; `None`: never.
    pub fn expires_in_s(&self) -> Option<f64> {
        let (at, now) = (self.expires()?, self.clock.now());
        Some(match at.duration_since(now) {
            Ok(left) => left.as_secs_f64(),
            Err(passed) => -passed.duration().as_secs_f64(),
        })
    }

    pub fn is_expired(&self) -> bool {
        self.expires().is_some_and(|at| self.clock.now() >= at)
    }

    /// True on the first call after the key expired, then false until its expiry changes.
    pub fn take_expiry(&self) -> bool {
        self.is_expired() && !self.announced.swap(true, Ordering::Relaxed)
    }

    /// Reads the secret for DH-HMAC-CHAP. Fails if the key has expired, is unreadable, or is not a
    /// DH-HMAC-CHAP key.
    pub fn secret(&self) -> Result<Secret, KeyError> {
        self.in_force(Secret::parse)
    }

    /// Reads the secret to describe it; works for an expired key too.
    pub fn facts(&self) -> Result<KeyFacts, KeyError> {
        let (text, made) = self.parsed(KeyText::parse)?;
        Ok(KeyFacts {
            kind: super::text::kind_name(text.kind()),
            hash: text.hash(),
            fingerprint: text.fingerprint(),
            made,
        })
    }

    /// Reads and parses the key, for DH-HMAC-CHAP or TLS. Fails if it has expired.
    pub fn text(&self) -> Result<KeyText, KeyError> {
        self.in_force(KeyText::parse)
    }

    fn in_force<T>(&self, parse: impl Fn(&str) -> Result<T, SecretError>) -> Result<T, KeyError> {
        match self.expires() {
            Some(at) if self.is_expired() => Err(KeyError::Expired {
                name: self.name.clone(),
                at: time::moment(at),
            }),
            _ => self.parsed(parse).map(|(key, _)| key),
        }
    }

    /// Reads the unparsed text of the secret, and [`KeyFacts::made`]. Works for an expired key too.
    pub fn read(&self) -> Result<(Zeroizing<String>, Option<SystemTime>), KeyError> {
        let read = match self.place() {
            KeyPlace::File(path) => {
                file::read_with_time(&path).map_err(|error| format!("{}: {error}", path.display()))
            }
            KeyPlace::Credential { name, keys } => match keys.read_credential(&name) {
                Ok(text) => Ok((text, None)),
                Err(error) => Err(error.to_string()),
            },
            KeyPlace::Sealed { text, keys } => match keys.open(&self.name, &text) {
                Ok((text, made)) => Ok((text, Some(made))),
                Err(error) => Err(error.to_string()),
            },
        };
        read.map_err(|why| KeyError::Unreadable {
            name: self.name.clone(),
            why,
        })
    }

    fn parsed<T>(
        &self,
        parse: impl Fn(&str) -> Result<T, SecretError>,
    ) -> Result<(T, Option<SystemTime>), KeyError> {
        let (text, made) = self.read()?;
        let key = parse(&text).map_err(|error| KeyError::Malformed {
            name: self.name.clone(),
            error,
        })?;
        Ok((key, made))
    }
}

impl PskKey for NamedKey {
    fn psk(&self) -> Result<Psk, KeyError> {
        self.in_force(Psk::parse)
    }

    fn name(&self) -> Option<String> {
        Some(self.name.clone())
    }
}

impl fmt::Debug for NamedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NamedKey({})", self.name)
    }
}

//! A key of the keyring: its name, the place of its secret, and its expiry. The secret is in a
//! file, in a systemd credential, or sealed in the daemon's state. The key is for DH-HMAC-CHAP or
//! TLS-PSK, or it is a line of text, such as the password of a mail server.

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
    form: KeyForm,
    place: Mutex<KeyPlace>,
    /// Unix time in seconds; 0: never.
    expires: AtomicU64,
    /// The event about the expiry was sent.
    announced: AtomicBool,
    clock: WallClock,
}

/// The form of a key's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyForm {
    /// `DHHC-1:` or `NVMeTLSkey-1:`, as NVMe defines them.
    Nvme,
    /// A line of text.
    Text,
}

impl KeyForm {
    /// Most bytes of the key's text, with the line end.
    pub fn longest(self) -> usize {
        match self {
            Self::Nvme => Secret::MAX_TEXT,
            Self::Text => super::text::LONGEST_LINE + 2,
        }
    }

    /// Checks the text of a key, and returns it without the line end.
    pub fn parse(self, text: &str) -> Result<Zeroizing<String>, String> {
        match self {
            Self::Nvme => match KeyText::parse(text) {
                Ok(text) => Ok(text.to_text()),
                Err(error) => Err(error.to_string()),
            },
            Self::Text => super::text::line(text),
        }
    }
}

/// The place of a key's secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyPlace {
    File(PathBuf),
    /// A credential of the service manager (systemd), with its name.
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

/// The facts of a key that may be shown, because they do not reveal the secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFacts {
    /// `dhchap`, `tls` or `text`.
    pub kind: &'static str,
    /// The hash in the key's text form (`DHHC-1:` or `NVMeTLSkey-1:`), or `none`; `None` for a line
    /// of text.
    pub hash: Option<&'static str>,
    /// Eight hexadecimal digits. `None` for a line of text: a short one could be guessed from them.
    pub fingerprint: Option<String>,
    /// When the secret was sealed, or its file last modified; `None` for a credential.
    pub made: Option<SystemTime>,
}

/// The system time. Tests can advance it.
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
            form: KeyForm::Nvme,
            place: Mutex::new(place),
            expires: AtomicU64::new(0),
            announced: AtomicBool::new(false),
            clock,
        }
    }

    /// The same key, with a secret of this form.
    pub fn with_form(self, form: KeyForm) -> Self {
        Self { form, ..self }
    }

    /// A key in a file, not part of a keyring; it never expires.
    pub fn in_file(name: String, path: PathBuf) -> Self {
        Self::new(name, KeyPlace::File(path), WallClock::default())
    }

    pub fn place(&self) -> KeyPlace {
        self.place.lock().clone()
    }

    pub fn form(&self) -> KeyForm {
        self.form
    }

    pub fn is_sealed(&self) -> bool {
        matches!(self.place(), KeyPlace::Sealed { .. })
    }

    /// Changes the place of the secret. The caller moves the secret.
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
        if self.form == KeyForm::Text {
            let (_, made) = self.read()?;
            return Ok(KeyFacts {
                kind: super::text::TEXT,
                hash: None,
                fingerprint: None,
                made,
            });
        }
        let (text, made) = self.parsed(KeyText::parse)?;
        Ok(KeyFacts {
            kind: super::text::kind_name(text.kind()),
            hash: Some(text.hash()),
            fingerprint: Some(text.fingerprint()),
            made,
        })
    }

    /// Reads the secret as a line of text. Fails if the key has expired or is no text: a key of
    /// NVMe is not for other servers.
    pub fn line(&self) -> Result<Zeroizing<String>, KeyError> {
        self.check_expiry()?;
        if self.form != KeyForm::Text {
            return Err(KeyError::Unreadable {
                name: self.name.clone(),
                why: "it is a key of NVMe, and a text is needed: import one with kind text".into(),
            });
        }
        self.read().map(|(text, _)| text)
    }

    /// Reads and parses the key, for DH-HMAC-CHAP or TLS. Fails if it has expired.
    pub fn text(&self) -> Result<KeyText, KeyError> {
        self.in_force(KeyText::parse)
    }

    fn in_force<T>(&self, parse: impl Fn(&str) -> Result<T, SecretError>) -> Result<T, KeyError> {
        self.check_expiry()?;
        if self.form == KeyForm::Text {
            return Err(KeyError::Unreadable {
                name: self.name.clone(),
                why: "it is a text for another server, and no key of NVMe".into(),
            });
        }
        self.parsed(parse).map(|(key, _)| key)
    }

    fn check_expiry(&self) -> Result<(), KeyError> {
        match self.expires() {
            Some(at) if self.is_expired() => Err(KeyError::Expired {
                name: self.name.clone(),
                at: time::moment(at),
            }),
            _ => Ok(()),
        }
    }

    /// Reads the unparsed text of the secret, and [`KeyFacts::made`]. Works for an expired key too.
    pub fn read(&self) -> Result<(Zeroizing<String>, Option<SystemTime>), KeyError> {
        let read = match self.place() {
            KeyPlace::File(path) => {
                let read = file::read_at_most(&path, self.form.longest());
                read.map_err(|error| format!("{}: {error}", path.display()))
            }
            KeyPlace::Credential { name, keys } => {
                match keys.read_credential(&name, self.form.longest()) {
                    Ok(text) => Ok((text, None)),
                    Err(error) => Err(error.to_string()),
                }
            }
            KeyPlace::Sealed { text, keys } => match keys.open(&self.name, &text) {
                Ok((text, made)) => Ok((text, Some(made))),
                Err(error) => Err(error.to_string()),
            },
        };
        let of_form = read.and_then(|(text, made)| match self.form {
            KeyForm::Nvme => Ok((text, made)),
            KeyForm::Text => Ok((self.form.parse(&text)?, made)),
        });
        of_form.map_err(|why| KeyError::Unreadable {
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

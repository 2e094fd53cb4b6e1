//! Parses the ClientHello of a host, and chooses the offered PSK whose binder is valid (RFC 8446,
//! 4.2.11).
//!
//! The parser checks all lengths, and reads only the fields that the choice needs. The library that
//! does the handshake parses the same bytes again.

use std::sync::Arc;

use nacre_nvmf_wire::Nqn;

use super::alert::Alert;
use super::derive::{Derivation, binder};
use super::identity::{Identity, IdentityError};
use super::psk::PskKey;
use crate::auth::{Digest, Hash, KeyError};

const CLIENT_HELLO: u8 = 1;
const TLS_1_2: u16 = 0x0303;
const TLS_1_3: u16 = 0x0304;
const SUPPORTED_VERSIONS: u16 = 43;
const PSK_MODES: u16 = 45;
const PRE_SHARED_KEY: u16 = 41;
const PSK_DHE_KE: u8 = 1;
/// Most PSK identities of one ClientHello. Hosts offer one to three.
const MAX_OFFERED: usize = 64;
/// Most different identities of one ClientHello that are tried.
const MAX_TRIED: usize = 8;
/// Most keys read for one ClientHello, because each may be in a file.
const MAX_KEYS: usize = 32;

/// A cipher suite of NVMe/TCP. The hash function of the PSK identity selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suite {
    Aes128Sha256,
    Aes256Sha384,
}

impl Suite {
    /// `None`: no suite has this hash function.
    pub fn of(hash: Hash) -> Option<Self> {
        match hash {
            Hash::Sha256 => Some(Self::Aes128Sha256),
            Hash::Sha384 => Some(Self::Aes256Sha384),
            Hash::Sha512 => None,
        }
    }

    pub const fn id(self) -> u16 {
        match self {
            Self::Aes128Sha256 => 0x1301,
            Self::Aes256Sha384 => 0x1302,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Aes128Sha256 => "TLS_AES_128_GCM_SHA256",
            Self::Aes256Sha384 => "TLS_AES_256_GCM_SHA384",
        }
    }

    pub const fn hash(self) -> Hash {
        match self {
            Self::Aes128Sha256 => Hash::Sha256,
            Self::Aes256Sha384 => Hash::Sha384,
        }
    }

    /// Bytes of an AES key.
    pub const fn key_bytes(self) -> usize {
        match self {
            Self::Aes128Sha256 => 16,
            Self::Aes256Sha384 => 32,
        }
    }
}

/// A parsed ClientHello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello<'a> {
    suites: Vec<u16>,
    takes_tls_1_3: bool,
    takes_psk_dhe_ke: bool,
    /// Identity and binder of each offered PSK.
    offered: Vec<(&'a [u8], &'a [u8])>,
    /// The message up to the binders, which they authenticate.
    truncated: &'a [u8],
}

/// The error of bytes that are no valid ClientHello.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    #[error("the handshake does not begin with a ClientHello")]
    NotHello,
    #[error("ClientHello: {0} is too short or too long")]
    Length(&'static str),
    #[error("ClientHello: an extension stands there twice")]
    Twice,
    #[error("ClientHello: pre_shared_key is not the last extension")]
    NotLast,
    #[error("ClientHello: more than {MAX_OFFERED} PSK identities")]
    Identities,
    #[error("ClientHello: {identities} PSK identities with {binders} binders")]
    Binders { identities: usize, binders: usize },
}

impl HelloError {
    pub const fn alert(self) -> Alert {
        match self {
            Self::NotHello => Alert::UNEXPECTED_MESSAGE,
            Self::Length(_) => Alert::DECODE_ERROR,
            Self::Twice | Self::NotLast | Self::Identities | Self::Binders { .. } => {
                Alert::ILLEGAL_PARAMETER
            }
        }
    }
}

/// The source of a target's PSKs.
pub trait PskSource: Send + Sync {
    /// The PSKs that the host of an identity may use with its subsystem.
    fn psks(&self, identity: &Identity) -> Vec<Arc<dyn PskKey>>;

    /// Reports a connection that failed because of TLS.
    fn failed(&self, failure: TlsFailure) {
        let _ = failure;
    }
}

/// A connection that failed because of TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFailure {
    /// The peer with its port, and its address alone.
    pub peer: String,
    pub address: String,
    /// The NQNs of host and subsystem that the connection named, if any. They are not
    /// authenticated.
    pub names: Option<(Nqn, Nqn)>,
    pub reason: String,
    /// Number of failures: this one, and earlier ones with the same reason that were not reported.
    pub times: u64,
}

/// The PSK chosen for a ClientHello.
#[derive(Debug, Clone)]
pub struct ChosenPsk {
    /// The identity as offered.
    pub offered: Vec<u8>,
    pub identity: Identity,
    pub suite: Suite,
    pub derivation: Derivation,
    /// The source of the PSK.
    pub psk: Arc<dyn PskKey>,
    /// The TLS PSK that is derived from it.
    pub key: Digest,
}

/// The reason why no PSK was chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the host does not offer TLS 1.3")]
    Version,
    #[error("the host does not offer a PSK")]
    NoPsk,
    #[error("the host does not offer PSKs with a key exchange (psk_dhe_ke)")]
    Mode,
    #[error("identity {identity:?}: {error}")]
    Identity {
        identity: String,
        error: IdentityError,
    },
    #[error("identity {identity:?}: no PSK of this target")]
    Unknown { identity: String },
    #[error("identity {identity:?}: {error}")]
    Unreadable { identity: String, error: KeyError },
    #[error("identity {identity:?}: the binder does not match, the two ends have different PSKs")]
    Binder { identity: String },
    #[error("identity {identity:?} needs cipher suite {suite}, which the host does not offer")]
    Suite {
        identity: String,
        suite: &'static str,
    },
}

impl Refused {
    pub const fn alert(&self) -> Alert {
        match self {
            Self::Version => Alert::PROTOCOL_VERSION,
            Self::NoPsk => Alert::MISSING_EXTENSION,
            Self::Mode | Self::Suite { .. } => Alert::HANDSHAKE_FAILURE,
            Self::Identity { .. } | Self::Unknown { .. } => Alert::UNKNOWN_PSK_IDENTITY,
            Self::Unreadable {
                error: KeyError::Expired { .. },
                ..
            } => Alert::UNKNOWN_PSK_IDENTITY,
            Self::Unreadable { .. } => Alert::INTERNAL_ERROR,
            Self::Binder { .. } => Alert::DECRYPT_ERROR,
        }
    }

    /// The NQNs of host and subsystem in the refused identity.
    pub fn names(&self) -> Option<(Nqn, Nqn)> {
        match self {
            Self::Version | Self::NoPsk | Self::Mode => None,
            Self::Identity { identity, .. }
            | Self::Unknown { identity }
            | Self::Unreadable { identity, .. }
            | Self::Binder { identity }
            | Self::Suite { identity, .. } => {
                let identity = Identity::parse(identity.as_bytes()).ok()?;
                Some((identity.host, identity.subsystem))
            }
        }
    }
}

impl<'a> ClientHello<'a> {
    /// Parses a handshake message, including its header of four bytes.
    pub fn parse(message: &'a [u8]) -> Result<Self, HelloError> {
        let mut rest = message;
        if take_u8(&mut rest, "header")? != CLIENT_HELLO {
            return Err(HelloError::NotHello);
        }
        let mut body = vector(&mut rest, 3, "message")?;
        nothing_after(rest, "message")?;
        let version = take_u16(&mut body, "legacy_version")?;
        take(&mut body, 32, "random")?;
        vector(&mut body, 1, "legacy_session_id")?;
        let suites = numbers(vector(&mut body, 2, "cipher_suites")?, "cipher_suites")?;
        vector(&mut body, 1, "legacy_compression_methods")?;
        let mut hello = ClientHello {
            suites,
            takes_tls_1_3: false,
            takes_psk_dhe_ke: false,
            offered: Vec::new(),
            truncated: message,
        };
        if body.is_empty() {
            return Ok(hello);
        }
        let mut extensions = vector(&mut body, 2, "extensions")?;
        nothing_after(body, "extensions")?;
        let mut seen = Vec::new();
        while !extensions.is_empty() {
            let kind = take_u16(&mut extensions, "extension")?;
            let data = vector(&mut extensions, 2, "extension")?;
            if seen.contains(&kind) {
                return Err(HelloError::Twice);
            }
            if seen.last() == Some(&PRE_SHARED_KEY) {
                return Err(HelloError::NotLast);
            }
            seen.push(kind);
            hello.extension(kind, data, message)?;
        }
        hello.takes_tls_1_3 &= version == TLS_1_2;
        Ok(hello)
    }

    fn extension(
        &mut self,
        kind: u16,
        mut data: &'a [u8],
        message: &'a [u8],
    ) -> Result<(), HelloError> {
        match kind {
            SUPPORTED_VERSIONS => {
                let versions = vector(&mut data, 1, "supported_versions")?;
                let versions = numbers(versions, "supported_versions")?;
                self.takes_tls_1_3 = versions.contains(&TLS_1_3);
                nothing_after(data, "supported_versions")
            }
            PSK_MODES => {
                let modes = vector(&mut data, 1, "psk_key_exchange_modes")?;
                self.takes_psk_dhe_ke = modes.contains(&PSK_DHE_KE);
                nothing_after(data, "psk_key_exchange_modes")
            }
            PRE_SHARED_KEY => self.pre_shared_key(data, message),
            _ => Ok(()),
        }
    }

    fn pre_shared_key(&mut self, mut data: &'a [u8], message: &'a [u8]) -> Result<(), HelloError> {
        let mut list = vector(&mut data, 2, "identities")?;
        let mut identities = Vec::new();
        while !list.is_empty() {
            if identities.len() == MAX_OFFERED {
                return Err(HelloError::Identities);
            }
            identities.push(vector(&mut list, 2, "identity")?);
            take(&mut list, 4, "obfuscated_ticket_age")?;
        }
        // The extension is the last: its end is that of the message.
        self.truncated = &message[..message.len() - data.len()];
        let mut list = vector(&mut data, 2, "binders")?;
        let mut binders = Vec::new();
        while !list.is_empty() {
            binders.push(vector(&mut list, 1, "binder")?);
            if binders.len() > identities.len() {
                break;
            }
        }
        nothing_after(data, "pre_shared_key")?;
        if identities.is_empty() || identities.len() != binders.len() {
            return Err(HelloError::Binders {
                identities: identities.len(),
                binders: binders.len(),
            });
        }
        self.offered = identities.into_iter().zip(binders).collect();
        Ok(())
    }

    /// Identity and binder of each offered PSK.
    pub fn offered(&self) -> &[(&'a [u8], &'a [u8])] {
        &self.offered
    }

    /// True if the binder at `index` was computed with `key`.
    pub fn proves(&self, index: usize, hash: Hash, key: &[u8]) -> bool {
        let offered = self.offered.get(index);
        offered.is_some_and(|(_, theirs)| binder(hash, key, self.truncated).equals(theirs))
    }

    /// Chooses the first offered identity that has a PSK with a valid binder. Tries at most 8
    /// different identities and 32 keys.
    pub fn choose(&self, keys: &dyn PskSource) -> Result<ChosenPsk, Refused> {
        if !self.takes_tls_1_3 {
            return Err(Refused::Version);
        }
        if self.offered.is_empty() {
            return Err(Refused::NoPsk);
        }
        if !self.takes_psk_dhe_ke {
            return Err(Refused::Mode);
        }
        let mut refused = None;
        let is_first = |index: &usize| {
            let before = &self.offered[..*index];
            before.iter().all(|(one, _)| *one != self.offered[*index].0)
        };
        let tried = (0..self.offered.len()).filter(is_first);
        let mut keys_left = MAX_KEYS;
        for index in tried.take(MAX_TRIED) {
            match self.try_identity(index, keys, &mut keys_left) {
                Ok(chosen) => return Ok(chosen),
                Err(why) => refused = Some(worse(refused, why)),
            }
        }
        Err(refused.unwrap_or(Refused::NoPsk))
    }

    fn try_identity(
        &self,
        index: usize,
        keys: &dyn PskSource,
        keys_left: &mut usize,
    ) -> Result<ChosenPsk, Refused> {
        let offered = self.offered[index].0;
        // A host chooses these bytes, and they get into logs.
        let text = || {
            let end = offered.len().min(Identity::MAX_BYTES);
            String::from_utf8_lossy(&offered[..end]).into_owned()
        };
        let identity = Identity::parse(offered).map_err(|error| Refused::Identity {
            identity: text(),
            error,
        })?;
        let hash = identity.hash;
        // An identity of version 1 names the key: a wrong key is an unknown identity.
        let mut found = false;
        let mut unreadable = None;
        for source in keys.psks(&identity) {
            if *keys_left == 0 {
                break;
            }
            *keys_left -= 1;
            let psk = match source.psk() {
                Ok(psk) => psk,
                // Another key may fit, such as the former one during a rotation.
                Err(error) => {
                    unreadable.get_or_insert(error);
                    continue;
                }
            };
            for derivation in Derivation::ALL {
                let Some(key) = psk.tls_psk(&identity, derivation) else {
                    continue;
                };
                found = true;
                if !self.proves(index, hash, &key) {
                    continue;
                }
                let suite = Suite::of(hash).filter(|suite| self.suites.contains(&suite.id()));
                let Some(suite) = suite else {
                    let suite = Suite::of(hash).map_or("", Suite::name);
                    let identity = text();
                    return Err(Refused::Suite { identity, suite });
                };
                return Ok(ChosenPsk {
                    offered: offered.to_vec(),
                    identity,
                    suite,
                    derivation,
                    psk: source,
                    key,
                });
            }
        }
        let identity = text();
        Err(match unreadable {
            Some(error) => Refused::Unreadable { identity, error },
            None if found => Refused::Binder { identity },
            None => Refused::Unknown { identity },
        })
    }
}

/// The more informative refusal: of a wrong key rather than of an unknown identity.
fn worse(before: Option<Refused>, now: Refused) -> Refused {
    let says_more = matches!(
        now,
        Refused::Binder { .. } | Refused::Suite { .. } | Refused::Unreadable { .. }
    );
    match before {
        None => now,
        Some(_) if says_more => now,
        Some(before) => before,
    }
}

type Parsed<T> = Result<T, HelloError>;

fn take<'a>(rest: &mut &'a [u8], count: usize, what: &'static str) -> Parsed<&'a [u8]> {
    let (taken, after) = rest
        .split_at_checked(count)
        .ok_or(HelloError::Length(what))?;
    *rest = after;
    Ok(taken)
}

fn take_u8(rest: &mut &[u8], what: &'static str) -> Parsed<u8> {
    take(rest, 1, what).map(|bytes| bytes[0])
}

fn take_u16(rest: &mut &[u8], what: &'static str) -> Parsed<u16> {
    take(rest, 2, what).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
}

/// Bytes after their length, a big-endian number of `width` bytes.
fn vector<'a>(rest: &mut &'a [u8], width: usize, what: &'static str) -> Parsed<&'a [u8]> {
    let length = take(rest, width, what)?;
    let length = length
        .iter()
        .fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    take(rest, length, what)
}

fn numbers(bytes: &[u8], what: &'static str) -> Parsed<Vec<u16>> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    nothing_after(rest, what)?;
    Ok(pairs.iter().map(|pair| u16::from_be_bytes(*pair)).collect())
}

fn nothing_after(rest: &[u8], what: &'static str) -> Parsed<()> {
    match rest {
        [] => Ok(()),
        _ => Err(HelloError::Length(what)),
    }
}

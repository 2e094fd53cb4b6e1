//! The slow parts of a transaction, for a helper thread: reading keys, and exponentiation.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::group::{Exponent, Group};
use super::secret::Secret;
use super::text::SecretError;

/// The keys of a pair of host and subsystem.
#[derive(Debug, Clone)]
pub struct Keys {
    /// The key with which the host proves its identity.
    pub host: Secret,
    /// The key with which the controller proves its identity.
    pub controller: Option<Secret>,
}

/// The reason why keys cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("this end has no key")]
    None,
    #[error("key {name}: {why}")]
    Unreadable { name: String, why: String },
    #[error("key {name}: {error}")]
    Malformed { name: String, error: SecretError },
    #[error("key {name} expired at {at}")]
    Expired { name: String, at: String },
}

/// A source of keys. [`KeySource::keys`] may read files, so only the helper thread calls it.
pub trait KeySource: fmt::Debug + Send + Sync {
    fn keys(&self) -> Result<Keys, KeyError>;

    /// False if the source has no key of the host at present.
    fn has_host_key(&self) -> bool {
        true
    }

    /// True if the source has a key of the controller.
    fn has_controller_key(&self) -> bool;

    /// The names of the host's and of the controller's key, if keys have names.
    fn names(&self) -> (Option<String>, Option<String>) {
        (None, None)
    }
}

/// Keys in memory.
#[derive(Debug, Clone)]
pub struct FixedKeys(pub Keys);

impl KeySource for FixedKeys {
    fn keys(&self) -> Result<Keys, KeyError> {
        Ok(self.0.clone())
    }

    fn has_controller_key(&self) -> bool {
        self.0.controller.is_some()
    }
}

/// A slow computation, for any thread. Its [`Answer`] goes back to the state machine.
#[derive(Debug)]
pub struct Job {
    /// The sources of the keys to read: two during a rotation of a host's keys.
    pub(super) keys: Vec<Arc<dyn KeySource>>,
    /// Compute the public value of the exponent.
    pub(super) public: bool,
    /// Compute the shared secret with this public value.
    pub(super) peer: Option<Vec<u8>>,
    pub(super) group: Group,
    pub(super) exponent: Option<Exponent>,
}

/// The result of a [`Job`].
pub struct Answer {
    /// The keys of each source of the job, in its order.
    pub(super) keys: Vec<Result<Keys, KeyError>>,
    pub(super) public: Vec<u8>,
    pub(super) shared: Option<Zeroizing<Vec<u8>>>,
}

impl Job {
    pub fn run(self) -> Answer {
        let keys = self.keys.iter().map(|source| source.keys()).collect();
        let exponent = self.exponent.as_ref().filter(|_| self.group != Group::Null);
        let public = exponent.filter(|_| self.public);
        let shared = exponent.zip(self.peer.as_ref());
        Answer {
            keys,
            public: public.map_or(Vec::new(), |exponent| self.group.public(exponent)),
            shared: shared.map(|(exponent, peer)| self.group.shared(peer, exponent)),
        }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").finish_non_exhaustive()
    }
}

//! The slow parts of a transaction, for a helper thread: reading keys, and exponentiation.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::group::{Exponent, Group};
use super::secret::Secret;
use super::text::SecretError;

/// The keys that an end has for another.
#[derive(Debug, Clone)]
pub struct Keys {
    /// The host proves itself with this one.
    pub host: Secret,
    /// The controller proves itself with this one.
    pub controller: Option<Secret>,
}

/// Why keys cannot be read.
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

/// Where an end's keys are. A source may read files: it is used on the helper thread only.
pub trait KeySource: fmt::Debug + Send + Sync {
    fn keys(&self) -> Result<Keys, KeyError>;

    /// False if there is no key of the host at present.
    fn has_host_key(&self) -> bool {
        true
    }

    /// True if it has a key of the controller.
    fn has_controller_key(&self) -> bool;

    /// The names of both keys, where keys have names.
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

/// One piece of slow work. It may run on any thread; its [`Answer`] goes back to the machine.
#[derive(Debug)]
pub struct Job {
    /// The keys to read. A host has two sets of keys while they are rotated.
    pub(super) keys: Vec<Arc<dyn KeySource>>,
    /// The public value of the exponent is needed.
    pub(super) public: bool,
    /// The shared secret with this public value is needed.
    pub(super) peer: Option<Vec<u8>>,
    pub(super) group: Group,
    pub(super) exponent: Option<Exponent>,
}

/// The result of a [`Job`].
pub struct Answer {
    /// The keys of each source of the job.
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

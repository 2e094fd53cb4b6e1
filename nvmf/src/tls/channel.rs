//! A connection over TLS as the target sees it, and the PSKs of its hosts.

use std::fmt;
use std::sync::Arc;

use super::client_hello::Suite;
use super::derive::Derivation;
use super::identity::Identity;
use super::psk::Psk;
use crate::auth::KeyError;

/// The result of a connection's handshake: both ends have the PSK of this identity.
#[derive(Debug, Clone)]
pub struct SecureChannel {
    pub identity: Identity,
    /// Where the PSK was when the handshake began. The Connect of a host that has another one since
    /// is refused.
    pub psk: Arc<dyn PskKey>,
    pub suite: Suite,
    pub derivation: Derivation,
}

/// Where the PSK of a host is. It may be in a file: it is read for each handshake, on a thread that
/// is no reactor.
pub trait PskKey: fmt::Debug + Send + Sync {
    fn psk(&self) -> Result<Psk, KeyError>;

    /// The name of the key, where keys have names.
    fn name(&self) -> Option<String> {
        None
    }
}

impl PskKey for Psk {
    fn psk(&self) -> Result<Psk, KeyError> {
        Ok(self.clone())
    }
}

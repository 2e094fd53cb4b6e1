//! The TLS channel of a connection.

use std::sync::Arc;

use super::client_hello::Suite;
use super::derive::Derivation;
use super::identity::Identity;
use super::psk::PskKey;

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

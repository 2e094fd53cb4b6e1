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
    /// The source of the PSK at the handshake. A Connect is refused if the host has another PSK by
    /// then.
    pub psk: Arc<dyn PskKey>,
    pub suite: Suite,
    pub derivation: Derivation,
}

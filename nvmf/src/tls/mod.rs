//! TLS 1.3 with pre-shared keys for NVMe/TCP, without I/O: the keys and the first message of a host
//! (NVMe/TCP transport 3.6.1; RFC 8446).
//!
//! ```text
//!   psk           the text `NVMeTLSkey-1:..`, a configured PSK
//!   identity      the name of a PSK in a handshake: version, hash, host and subsystem
//!   derive        configured PSK -> retained PSK -> TLS PSK; the binder of a ClientHello
//!   client_hello  ClientHello: the offers of a host, and the key that fits its binder
//!   channel       the result of a handshake, and where the PSKs of hosts are
//!   alert         the names of alerts
//! ```
//!
//! libnvme before 1.16 derives its keys differently from the specification, and the identity does
//! not name the derivation. So a target computes the binder for each derivation and uses the one
//! that fits the ClientHello. A library does the handshake with that one key: `transports/tls`.
//! Nothing here has a socket, a thread or a clock.

mod alert;
mod channel;
mod client_hello;
mod derive;
pub mod fuzzing;
mod identity;
mod psk;
#[cfg(test)]
mod tests;

pub use alert::Alert;
pub use channel::SecureChannel;
pub use client_hello::{ChosenPsk, ClientHello, HelloError, PskSource, Refused, Suite, TlsFailure};
pub use derive::{Derivation, binder, expand_label};
pub use identity::{Identity, IdentityError, Version};
pub use psk::{Psk, PskKey};

//! TLS 1.3 with pre-shared keys for NVMe/TCP, over bytes in memory.
//!
//! ```text
//!   handshake   ClientHello -> the PSK of its identity -> s2n-tls -> traffic secrets
//!   library     s2n-tls over two buffers; the only unsafe code of this crate
//!   records     encrypts and decrypts one record: AES-GCM, sequence numbers, key derivation
//!   session     the record layer of a connection: both directions, KeyUpdate, alerts
//!   buffers     the buffers of the sessions of a thread, for reuse
//! ```
//!
//! s2n-tls does the handshake and never sees a data record: its key log gives the traffic secrets.
//! So our buffers hold one copy of each byte, and s2n-tls cannot send handshake messages later,
//! which Linux hosts do not accept.
//!
//! `nacre_nvmf::tls` has the keys, the PSK identities and the parser of the ClientHello. This crate
//! is separate from `nvmf` because s2n-tls is C and builds slowly. It has no sockets, threads or
//! clock.

mod buffers;
mod error;
pub mod fuzzing;
mod handshake;
mod library;
mod records;
mod session;
#[cfg(test)]
mod tests;

pub use error::Failure;
pub use handshake::{Handshake, Outcome, Role, warm_up};
pub use session::{MOST_BUFFER_BYTES, Session, SessionCounts};

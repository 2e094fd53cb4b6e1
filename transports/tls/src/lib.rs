//! TLS 1.3 with pre-shared keys for NVMe/TCP, over bytes in memory.
//!
//! ```text
//!   handshake   ClientHello -> a key that fits -> the library's handshake -> traffic secrets
//!   library     s2n-tls over two buffers; the only unsafe code of this crate
//!   records     seals and opens one record: AES-GCM, sequence numbers, KeyUpdate
//!   session     a stream of records on both sides: bytes in, bytes out
//!   buffers     the buffers of the sessions of a thread
//! ```
//!
//! The library does the handshake and never sees a data record: its key log gives the traffic
//! secrets. So a connection has one copy of each byte in our buffers, and the library cannot send
//! handshake messages later, which Linux hosts do not take.
//!
//! Keys, identities and the ClientHello are `nacre_nvmf::tls`. This crate is apart from `nvmf`,
//! because the library is C and takes its time to build. No sockets, no threads, no clock.

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

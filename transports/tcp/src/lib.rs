//! NVMe/TCP on Linux sockets: receives and sends the bytes of `nacre_nvmf::tcp`'s connection
//! machines.
//!
//! ```text
//!   TcpPlug        listeners; one thread accepts, does TLS handshakes and chooses the core
//!                                                                       (one per process)
//!     └ bounded inbox + wake ─▶ TcpTransport   all connections of one core       (one per core)
//!                                 └ TargetConn + socket, records between them over TLS
//!   TcpHost        one queue pair of the host side: HostConn + socket, with or without TLS
//! ```
//!
//! In a turn of the reactor, a connection usually costs one receive if it has input, and one
//! vectored send if it has responses. `nacre_nvmf` parses and builds the PDUs.

#![forbid(unsafe_code)]

mod accept;
mod config;
mod failure_kind;
mod handshakes;
mod host;
mod host_handshake;
mod limits;
mod plug;
mod sealed;
mod socket;
mod stats;
mod transport;

#[cfg(test)]
mod tests;

pub use config::{ConfigError, IO_SIZES, TcpConfig};
pub use host::{HostStats, TcpHost, TcpHostOptions, connect_host};
pub use host_handshake::HostTls;
pub use nacre_transport_tls::{MOST_BUFFER_BYTES as TLS_BUFFER_BYTES, warm_up as warm_up_tls};
pub use plug::TcpPlug;
pub use socket::Marking;
pub use stats::{Stats, StatsSnapshot};
pub use transport::TcpTransport;

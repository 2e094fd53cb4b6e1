//! NVMe/TCP on Linux sockets: what moves the bytes of `nacre_nvmf::tcp`'s connection machines.
//!
//! ```text
//!   TcpPlug        listeners, one thread that accepts, the choice of a core      (shared)
//!     └ bounded inbox + wake ─▶ TcpTransport   all connections of one core       (one per core)
//!                                 └ TargetConn + socket
//!   TcpHost        one queue pair of the host side: HostConn + socket
//! ```
//!
//! A turn costs one receive per connection that has something and one vectored send per connection
//! that was answered. Nothing here knows what a PDU is.

#![forbid(unsafe_code)]

mod accept;
mod config;
mod host;
mod plug;
mod socket;
mod stats;
mod transport;

#[cfg(test)]
mod tests;

pub use config::{ConfigError, TcpConfig};
pub use host::{HostOptions, HostStats, TcpHost, connect_host};
pub use plug::TcpPlug;
pub use stats::{Stats, StatsSnapshot};
pub use transport::TcpTransport;

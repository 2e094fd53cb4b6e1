//! Connectors for this process as a host, over TCP, RDMA, or RDMA with TCP as fallback. Remote
//! bdevs and tools use them.
//!
//! ```text
//!   TcpConnector    TCP                                             (connector.rs)
//!   PathConnector   RDMA, and TCP if that is allowed                (connector.rs)
//!     Rdma            RDMA of this process, opened at first use     (rdma.rs)
//!   Source          the local address of connections                (source.rs)
//!   Session         a controller driven by one thread, for tools    (session.rs)
//! ```
//!
//! The connectors implement [`nacre_nvmf::host::Connector`]. [`nacre_nvmf::host`] chooses between
//! the transports.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

mod connector;
mod rdma;
mod session;
mod source;

pub use connector::{Concatenated, PathConnector, TcpConnector};
pub use nacre_transport_tcp::HostTls;
pub use rdma::{Rdma, RdmaTuning};
pub use session::{Session, SessionError};
pub use source::Source;

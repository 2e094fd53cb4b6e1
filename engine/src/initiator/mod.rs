//! The host side for tools: blocking calls.
//!
//! ```text
//!   Connector  makes transport connections; shared by threads           (nacre_transport_connect)
//!     Rdma       RDMA of this process, opened at first use              (nacre_transport_connect)
//!   Session    a controller driven by one thread, with blocking calls   (session.rs)
//! ```
//!
//! Not for the data path, which is [`nacre_nvmf::host::IoQueue`]. `rdma_route.rs` checks whether
//! the route to a target has RDMA.

mod rdma_route;
mod session;

pub use nacre_nvmf::host::Connector;
pub use nacre_transport_connect::{PathConnector, Rdma, RdmaTuning, TcpConnector};

pub use rdma_route::check_rdma_route;
pub use session::{Session, SessionError};

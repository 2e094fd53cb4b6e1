//! The host side for tools: the address of a controller, this host's identity, and blocking calls.
//!
//! ```text
//!   Remote     address of a controller: transport, address, subsystem   (remote.rs)
//!   Identity   host NQN and identifier, stable on this machine          (identity.rs)
//!   Connector  makes transport connections; shared by threads           (nacre_bdev_remote)
//!     Rdma       RDMA of this process, opened at first use              (nacre_bdev_remote)
//!   Session    a controller driven by one thread, with blocking calls   (session.rs)
//! ```
//!
//! Not for the data path, which is [`nacre_nvmf::host::IoQueue`]. `rdma_route.rs` checks whether
//! the route to a target has RDMA.

mod identity;
mod rdma_route;
mod remote;
mod session;

pub use nacre_bdev_remote::{Connector, PathConnector, Rdma, RdmaTuning, TcpConnector};

pub use identity::{Identity, IdentityError, Origin};
pub use rdma_route::check_rdma_route;
pub use remote::{Choice, DEFAULT_PORT, DISCOVERY_PORT, Remote, RemoteError};
pub use session::{Session, SessionError};

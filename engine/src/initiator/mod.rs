//! The host side for tools: where a controller is, who we are to it, and calls that wait.
//!
//! ```text
//!   Remote     where: transport, address, subsystem                     (remote.rs)
//!   Identity   who: host NQN and identifier, stable on this machine     (identity.rs)
//!   Connector  makes transport connections; shared by threads           (connector.rs)
//!     Rdma       RDMA of this process, opened when it is asked for      (rdma.rs, way.rs)
//!   Session    a controller that one thread drives and asks             (session.rs)
//! ```
//!
//! Nothing here is on a data path: that is [`nacre_nvmf::host::IoQueue`].

mod connector;
mod identity;
mod rdma;
mod remote;
mod session;
mod way;

pub use connector::{Connector, PathConnector, TcpConnector};
pub use identity::{Identity, IdentityError, Origin};
pub use rdma::{Rdma, RdmaTuning};
pub use remote::{Choice, DEFAULT_PORT, DISCOVERY_PORT, Remote, RemoteError};
pub use session::{Session, SessionError};
pub use way::way_by_rdma;

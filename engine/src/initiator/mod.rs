//! The host side for tools: where a controller is, who we are to it, and calls that wait.
//!
//! ```text
//!   Remote     where: transport, address, subsystem                     (remote.rs)
//!   Identity   who: host NQN and identifier, stable on this machine     (identity.rs)
//!   Connector  makes transport connections; shared by threads           (nacre_bdev_remote)
//!     Rdma       RDMA of this process, opened when it is asked for      (nacre_bdev_remote, way.rs)
//!   Session    a controller that one thread drives and asks             (session.rs)
//! ```
//!
//! Nothing here is on a data path: that is [`nacre_nvmf::host::IoQueue`].

mod identity;
mod remote;
mod session;
mod way;

pub use nacre_bdev_remote::{Connector, PathConnector, Rdma, RdmaTuning, TcpConnector};

pub use identity::{Identity, IdentityError, Origin};
pub use remote::{Choice, DEFAULT_PORT, DISCOVERY_PORT, Remote, RemoteError};
pub use session::{Session, SessionError};
pub use way::way_by_rdma;

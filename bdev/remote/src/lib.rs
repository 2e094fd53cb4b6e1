//! A namespace of another target as a block device: this host's side of a remote replica.
//!
//! ```text
//!   RemoteUri    nvmf://HOST:PORT/SUBNQN?…                                (uri.rs)
//!   Attachment   one controller: its devices, how it stands               (attachment.rs, status.rs)
//!     ├ ControllerPoller   its admin queue, polled by one reactor         (poller.rs)
//!     └ RemoteBdev         a namespace: a nacre_bdev::Bdev                (device.rs)
//!         └ RemoteQueue      an I/O queue of the controller per core      (channel.rs)
//!   Connector    makes the transport connections, TCP or RDMA             (connector.rs, rdma.rs)
//! ```
//!
//! What a namespace was on attaching it has to be for as long as it is attached: after every reconnect, and
//! when the target says that it changed, its identity, block size and size are compared. One that is another
//! is never written to; one that grew has grown. Who decides what a lost connection means is above:
//! [`nacre_bdev::Bdev::losses`] tells of each, before the first answer over the next one.

#![forbid(unsafe_code)]

mod attachment;
mod channel;
mod connector;
mod device;
mod poller;
mod qids;
mod rdma;
mod status;
pub mod uri;

pub use attachment::{Attachment, Changes, Config, Select};
pub use connector::{Connector, PathConnector, Source, TcpConnector};
pub use device::{NoQueue, RemoteBdev};
pub use poller::ControllerPoller;
pub use rdma::{Rdma, RdmaTuning};
pub use status::{ControllerInfo, State, Status};
pub use uri::{RemoteUri, UriError, Way};

//! The data path of one core: its queue pairs, their commands and their devices.
//!
//! ```text
//!   Group             one per core: the transports' I/O halves, the queue pairs, the bdev queues
//!     └ QueuePair         requests of one queue, from capsule to response
//!         └ Controller        (admin queues) registers, features, logs, events
//!
//!   connect, connections   a queue pair begins and ends
//!   decode                 a command becomes a plan; pure
//!   execute, sync          the plan runs on a device: submitted, or at once
//!   completion             every command ends here
//! ```
//!
//! Management raises the attention flag of the groups that a change concerns; a group looks at it
//! in its next turn. Nothing on the data path takes a lock.

mod completion;
mod connect;
mod connections;
pub(crate) mod decode;
pub(crate) mod device;
mod execute;
pub mod group;
pub(crate) mod queue_pair;
pub(crate) mod request;
mod reservation;
mod sync;
mod waiting;

pub use group::{Group, GroupConfig};

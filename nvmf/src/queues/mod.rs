//! The data path of one core: its queue pairs, their commands and their devices.
//!
//! ```text
//!   QueueGroup        one per core: the turn
//!     ├ QueuePairs         the table of its queue pairs
//!     │   └ QueuePair        requests of one queue, from capsule to response
//!     │       └ Controller     (admin queues) registers, features, logs, events
//!     └ Resources          what a command uses beside its queue pair
//!         ├ Ports            the transports' I/O halves
//!         ├ Buffers          the pools, and the commands that wait for a buffer
//!         ├ Devices          the bdev queues, and the commands that wait for room in one
//!         └ Reserving        the reservation commands that wait for something
//!
//!   Command             a command that is being worked on: its queue pair, its index, and the
//!                       core's resources. It lives for one visit
//!
//!   connections, connect   a queue pair begins and ends
//!   authentication         before that it authenticates itself, where its host has a key
//!   admin, command, fused  a command gets its data and its other half
//!   decode                 a command becomes a plan; pure
//!   execute, sync          the plan runs on a device: submitted, or at once
//!   completion             every command ends here
//!   messages               aborts and fences of other cores
//! ```
//!
//! Management raises the attention flag of the groups that a change concerns; a group looks at it
//! in its next turn. Nothing on the data path takes a lock.

mod admin;
pub(crate) mod authentication;
mod buffers;
mod command;
mod completion;
mod connect;
mod connections;
pub(crate) mod decode;
pub(crate) mod device;
mod execute;
mod fused;
mod messages;
mod ports;
pub mod queue_group;
pub(crate) mod queue_pair;
mod queue_pairs;
pub(crate) mod request;
mod reservation;
mod resources;
mod sync;
mod waiting;

pub use queue_group::{GroupConfig, QueueGroup};

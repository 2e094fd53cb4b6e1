//! The data path of one core: its queue pairs, their commands and their devices. The engine adds
//! one [`QueueGroup`] to each reactor.
//!
//! ```text
//!   QueueGroup        one per core: the turn
//!     ├ QueuePairs         the table of its queue pairs
//!     │   └ QueuePair        requests of one queue, from capsule to response
//!     │       └ Controller     (admin queues) registers, features, logs, events
//!     └ Resources          the resources that all queue pairs share
//!         ├ Ports            the transports' I/O halves
//!         ├ Buffers          the pools, and the commands that wait for a buffer
//!         ├ Devices          the bdev queues, and the commands that wait for room in one
//!         ├ ReservationWork  the pending reservation commands
//!         └ Listings         the Get LBA Status commands that wait for their bdev
//!
//!   Command             access to the current command: its queue pair, its index in the table, and
//!                       the core's resources
//!
//!   connections, connect   create and remove queue pairs
//!   authentication, queue_auth   DH-HMAC-CHAP of a queue
//!   request, waiting       the table of a queue's commands; lists of commands that wait
//!   dispatch, fused        get a command's buffer and data, pair fused commands
//!   admin, reservation, listing   execute commands without device I/O
//!   decode                 converts a command to a plan (pure)
//!   execute, sync          execute the plan on a device: asynchronously, or synchronously
//!   completion             completes every command
//!   messages               aborts and preemptions from other cores, results of the helper thread
//! ```
//!
//! Management wakes each group that a change affects, through its `GroupHandle`. The data path
//! takes no lock, except to adopt a change and to record a failed command.

mod admin;
mod authentication;
mod buffers;
mod command;
mod completion;
mod connect;
mod connections;
pub(crate) mod decode;
pub(crate) mod device;
mod dispatch;
mod execute;
mod fused;
mod listing;
mod messages;
mod ports;
mod queue_auth;
pub mod queue_group;
pub(crate) mod queue_pair;
mod queue_pairs;
pub(crate) mod request;
mod reservation;
mod reserving;
mod resources;
mod sync;
mod waiting;

pub use queue_group::{GroupConfig, QueueGroup};

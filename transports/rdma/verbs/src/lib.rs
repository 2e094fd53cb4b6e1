//! RDMA verbs and the connection manager as traits, with two implementations: the system's
//! libibverbs and librdmacm, and a simulation in the process.
//!
//! ```text
//!   Provider                    the devices of this machine                            (shared)
//!     ├ Device                  attributes, asynchronous events                        (shared)
//!     │   └ ProtectionDomain    memory registration, makes completion and receive queues
//!     └ ConnectionManager       listen, connect, accept; events with an fd     (management thread)
//!                                  └ create_qp ─▶ QueuePair                      (one reactor)
//!   CompletionQueue, SharedReceiveQueue, QueuePair: post and poll, a call per batch (one reactor)
//! ```
//!
//! The traits are in [`provider`], the plain data of their calls in [`types`]. Posting is `unsafe`
//! there, because a device accesses memory by address: the caller must keep the memory allocated.
//! [`Lane`] and [`Receiver`] do that, and are safe.
//!
//! A device has two protection domains. The target's domain allows local access only (on iWARP
//! also remote writes, see [`Access`]); hosts never get one of its keys. The host side's domain
//! allows remote reads and writes, because an NVMe/RDMA controller moves data that way. As a
//! separate domain, its keys are of no use on the target's queue pairs.
//!
//! [`netdev`] reads a network card's statistics and LLDP frames.

pub mod netdev;
pub mod provider;
mod queues;
pub mod real;
mod ring;
pub mod sim;
mod sys;
pub mod types;

pub use provider::{
    CompletionQueue, ConnectionManager, Device, ProtectionDomain, Provider, QpInit, QueuePair,
    SharedReceiveQueue,
};
pub use queues::{Batch, Completion, Endpoint, Lane, LaneConfig, Queues, Received, Receiver};
pub use real::VerbsProvider;
pub use ring::{NotRegistered, RecvConfig, Timing};
pub use types::*;

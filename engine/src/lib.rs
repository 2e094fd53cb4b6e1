//! The daemon of Nacre: the management plane, which starts the data plane and configures it. The
//! command line is `engine/cli`.
//!
//! ```text
//!            config ─┐                                  ┌─ metrics (HTTP, Prometheus)
//!   cli ─ serve ─ daemon ──▶ Engine ◀── Registry of methods ◀── rpc (unix socket, SPDK's dialect)
//!                              │ │                                   ▲
//!                   Journal ◀──┘ └──▶ data plane (reactors,         nacre rpc, bdev, top, …,
//!                      │               devices, targets)            SPDK's rpc.py
//!                    Store (redb, helper thread)
//! ```
//!
//! - Every change is an RPC method call. The calls of clients, of startup files, of the replay of
//!   the store and of declared objects run through [`services::Engine`]. An example is
//!   [`services::Engine::call`].
//! - A method is its types ([`rpc::Method`]): parameters and reply are the schema from which
//!   reference, command line and error messages derive.
//! - A change is applied and made durable as one transaction ([`journal::Journal::commit`]) before
//!   the reply. If it cannot be stored, it is undone and the call fails.
//! - The journal is the ordered list of calls that create the current objects, including every
//!   generated identity. The store keeps it, `framework_get_config` returns it, and a start replays
//!   it. Records that fail to replay stay in it and are retried.
//! - One thread with one current-thread runtime ([`daemon`]). Changes run one at a time in order of
//!   arrival, reads see all earlier changes, and every call has a deadline.

#![forbid(unsafe_code)]

pub mod attach;
pub mod audit;
pub mod bdev_modules;
pub mod config;
mod core_dumps;
pub mod daemon;
mod descriptors;
pub mod features;
pub mod journal;
pub mod logs;
pub mod methods;
pub mod metrics;
pub mod notify;
pub mod plane;
mod refusal;
pub mod services;
pub mod signals;
pub mod store;

pub use refusal::Refusal;

use nacre_engine_doctor as doctor;
use nacre_engine_rpc as rpc;
use nacre_engine_values as values;

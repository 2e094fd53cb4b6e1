//! The daemon and the command line of Nacre: everything that manages, nothing that moves data.
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
//! - Every way to change something is an RPC method: the socket, the start-up files, the replay of
//!   the store and what the configuration declares all go through [`engine::Engine::call`].
//! - A method is its types ([`rpc::Method`]): parameters and reply are the schema that the
//!   reference, the command line and the refusals are made of.
//! - A change is applied, made durable as one transaction ([`journal::Journal::commit`]), and then
//!   answered; if it cannot be stored it is undone and refused.
//! - The journal is the ordered list of calls that make what there is, with every generated
//!   identity in them. It is what the store keeps, what `framework_get_config` answers, and what is
//!   replayed at start. What fails to come back stays in it and is tried again.
//! - One thread, one current-thread runtime ([`daemon`]); changes run one at a time in the order of
//!   their arrival, reads see the changes before them, and every call has a deadline.

#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod daemon;
pub mod declared;
pub mod deferred;
pub mod demand;
mod descriptors;
pub mod devices;
pub mod doctor;
pub mod drives;
pub mod engine;
mod files;
pub mod initiator;
pub mod journal;
mod kept;
pub mod listeners;
pub mod logs;
pub mod methods;
pub mod metrics;
pub mod notify;
pub mod perf;
pub mod plane;
pub mod rdma;
mod reload;
pub mod remotes;
pub mod rpc;
pub mod signals;
pub mod spdk_export;
pub mod spdk_file;
pub mod store;
pub mod values;
pub mod volumes;

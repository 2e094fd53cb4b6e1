//! etcd as the cluster's store: a client for several endpoints, the volumes' records, and the
//! leases of nodes.
//!
//! ```text
//!   EtcdStore   NodeLeases      records of volumes; transactions of `nacre-cluster-core`
//!        │          │
//!        └─ Client ─┘           range in pages, transactions, watches, deadlines
//!             │
//!          Endpoint (1..16)     one gRPC channel each, with TLS by rustls
//! ```
//!
//! Everything that decides is a transaction that compares revisions: reads may be stale, and watch
//! events late. Leases and locks of etcd are not used. An old leader of etcd may end them too early
//! (etcd #15247), and no client can see in time that it did. [`NodeLeases`] writes keys instead,
//! whose revisions every node watches.
//!
//! The keys with a prefix have one user. The user is a daemon that owns the prefix (`owner`), or
//! the nodes of a cluster, each with its lease (`lessee`).
//!
//! The messages are written by hand (`messages`), so that the build needs no `protoc`.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

mod auth;
mod client;
mod compaction;
mod error;
mod health;
mod keep_unknown;
mod key_watch;
mod keys;
mod lessee;
mod messages;
mod node;
mod node_leases;
mod owner;
mod pulse;
mod store;
mod stored;
mod unpublished;

pub use auth::Credentials;
pub use client::{
    Client, Copies, EndpointAddress, Endpoints, KeyValue, Member, MemberStatus, Page, Tls, Txn,
    TxnAnswer,
};
pub use compaction::Compaction;
pub use error::Error;
pub use health::Health;
pub use key_watch::{Update, Watch};
pub use keys::Prefix;
pub use node::DaemonIdentity;
pub use node_leases::{BehindCause, InEffect, LeaseKey, NodeLeases, Outcome};
pub use owner::{Before, Owner};
pub use store::EtcdStore;

//! Decides which node of a cluster serves each replicated volume. A node serves (*holds*) volumes
//! only while its lease, a key that it renews in etcd, is good. Other nodes delete the lease of a
//! silent node (they *fence* it), and then *take* its volumes. Pure state machines: no I/O, no
//! thread, and every time is an argument.
//!
//! ```text
//!              Join ──▶ Lease ──▶ Word          end of the lease, read before each response
//!   store        │        │ good since, until
//!   answers ─────┤     Observer ──▶ fence       one for each other node
//!   and watch    │        │ leases that have not ended
//!              Volume ◀───┘ ──▶ take, open, close, hand over
//!                │
//!   replicas    Gate (one per replica, on its node)     Confirmations (responses without a lease)
//! ```
//!
//! A [`Gate`] admits I/O to its replica only with the key of one holder, and a later holder's key
//! replaces it. While a holder's lease is not good, its responses to hosts wait for
//! [`Confirmations`]: the replicas' answers that they still have its key.
//!
//! Changes of the store are [`Transaction`]s: conditions and one effect. The store executes one
//! only while all conditions hold, so a transaction sent twice is executed once (`transaction`
//! names the exceptions). Safety rests on these transactions, on the gates, and on clocks whose
//! rates are each within 2.5 % of true time. It does not rest on reads of the store, on the arrival
//! of watch events, or on wall clocks.
//!
//! Three parts only plan; safety does not depend on them. `placement` chooses pools, `repair`
//! replaces replicas, `storm` stops that when many nodes are gone at once.
//!
//! `cluster/core/sim` runs the machines on several simulated nodes.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod confirmation;
pub mod gate;
pub mod ids;
pub mod intent;
pub mod join;
pub mod lease;
pub mod mutation;
pub mod observer;
pub mod placement;
pub mod ranks;
pub mod record;
pub mod repair;
pub mod slots;
pub mod storm;
pub mod time;
pub mod transaction;
pub mod volume;

#[cfg(test)]
mod tests;

pub use confirmation::Confirmations;
pub use gate::Gate;
pub use ids::{ExportId, Incarnation, NodeId, PoolId, ReplicaId, Revision, VolumeId};
pub use join::Join;
pub use lease::Lease;
pub use observer::Observer;
pub use record::{Holder, Record, Replica, ReplicaState};
pub use time::{BootTime, Timing};
pub use transaction::{Condition, Effect, End, Transaction};
pub use volume::Volume;

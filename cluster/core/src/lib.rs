//! Decides which node of a cluster serves a volume: leases, fences, takes, and the states of a
//! volume on a node. Pure state machines: no I/O, no thread, and every time is an argument.
//!
//! ```text
//!              Join ──▶ Lease ──▶ Word          read where answers leave
//!   store        │        │ good since, until
//!   answers ─────┤     Observer ──▶ fence       of each other node
//!   and watch    │        │ leases that stand
//!              Volume ◀───┘ ──▶ take, open, close, hand over
//!                │
//!   replicas    Gate (one per replica, on its node)     Confirmations (answers without a lease)
//! ```
//!
//! Changes of the store are [`Transaction`]s: conditions and one effect. The store executes one
//! only while all conditions hold, so a copy of it changes nothing (`transaction` names the
//! exceptions). Safety rests on these transactions, on the
//! gates, and on clocks whose rates differ by less than 2.5 %. It does not rest on reads of the
//! store, on the arrival of watch events, or on wall clocks.
//!
//! Three parts plan, and have no part in safety: `placement` chooses pools, `repair` replaces
//! replicas, `storm` stops that when many nodes are gone at once.
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

//! Makes the keys of a cluster again after all of etcd was lost, without a backup.
//!
//! ```text
//!   node     copy file ┐                       ┌ vol, name, pub, node, member
//!            labels of ├─▶ found/N ─▶ decide ──┤                           ─▶ as a restore
//!            devices   ┘   of all nodes        └ or: missing nodes
//! ```
//!
//! The label, metadata at the start of each replica, has which replicas of its volume are in sync.
//! Each node's [`Copy`] of the keys that it follows has the rest: publications, settings, names,
//! and the devices of replicas. The later of a volume's label and its copied record counts, as for
//! a restored backup.

mod copy;
mod decide;
mod error;
mod facts;
mod report;
mod reports;
mod run;
#[cfg(test)]
mod tests;
mod volume;

pub use copy::{Copy, CopyError};
pub use decide::{Options, Plan, decide};
pub use error::{Note, Problem, RebuildError};
pub use facts::{Device, Found, LabelFacts, LabelRead, LabelReplicaFacts, ReplicaFact};
pub use report::Request;
pub use run::{Rebuild, Rebuilt};

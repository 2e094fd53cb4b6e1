//! The target: subsystems, controllers and queue pairs.
//!
//! ```text
//!   Target            subsystems, listeners, discovery; shared, changed by management calls
//!     └ Subsystem         namespaces, hosts, listeners, and its associations
//!         └ Association       one controller as its queues on several cores see it
//!
//!   Group             one per core: the transports' I/O halves, the queue pairs, the bdev queues
//!     └ QueuePair         requests of one queue, from capsule to response
//!         └ Controller        (admin queues) registers, features, logs, events
//! ```
//!
//! Management changes shared state and raises the attention flag of the groups concerned; a group
//! looks at it in its next turn. Nothing on the data path takes a lock.

pub mod ana;
mod answer;
pub mod association;
mod at_once;
mod cntlid;
pub mod config;
mod connect;
mod controller;
mod device;
pub mod discovery;
pub mod fuzzing;
pub mod group;
mod hosts;
mod io;
mod life;
pub mod namespace;
mod places;
mod qpair;
mod request;
pub mod reservation;
mod run;
pub mod stats;
pub mod subsystem;
#[allow(clippy::module_inception)]
pub mod target;
#[cfg(test)]
mod tests;
mod waiting;
mod withheld;

pub use ana::AnaStates;
pub use association::{
    Association, ErrorRecord, GroupCounts, GroupHandle, Phase, QueueInfo, Teardown, pending,
};
pub use cntlid::{ControllerModel, MAX_CNTLID, NoSuchController};
pub use config::{QueueLimits, TargetConfig};
pub use group::{Group, GroupConfig};
pub use hosts::{HostSums, KindSum};
pub use namespace::{Backing, Namespace, NamespaceIds, View};
pub use stats::{Kind, LATENCY_BUCKETS, QueueStats, Totals, latency_bucket};
pub use subsystem::{
    NamespaceConfig, NamespaceEntry, RdmaFabric, Refusal, Subsystem, SubsystemConfig,
    SubsystemError, SubsystemKind, SubsystemListener,
};
pub use target::{ListenOptions, ListenerStats, Referral, Target, TargetError};
pub use withheld::Withheld;

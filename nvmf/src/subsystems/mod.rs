//! Subsystems with their namespaces, hosts and listeners: the state that management changes and all
//! cores read.
//!
//! ```text
//!   Target            subsystems, listeners, discovery; shared, changed by management calls
//!     └ Subsystem         namespaces, hosts, listeners, and its associations
//!         └ Association       the shared state of one controller and its queues
//! ```
//!
//! A change wakes the affected cores through their [`GroupHandle`]; each one adopts it in its
//! upkeep. The data path reads immutable snapshots ([`namespace::View`]) and updates statistics.

pub mod ana;
pub mod association;
pub mod authentication;
mod clearing;
pub(crate) mod cntlid;
pub mod config;
pub(crate) mod core_handle;
pub mod discovery;
pub mod generated;
mod hosts;
pub mod namespace;
pub mod nvmf_target;
pub(crate) mod places;
pub mod reservation;
pub(crate) mod shared_ports;
pub mod stats;
pub mod subsystem;
pub(crate) mod subsystem_config;
mod withheld;

pub use ana::AnaStates;
pub use association::{Association, ErrorRecord, Phase, QueueInfo, Teardown, pending};
pub use authentication::{Access, AuthFailure, Authentication, QueueAuthState};
pub use clearing::{ClearError, Clearing};
pub use cntlid::NoSuchController;
pub use config::{QueueLimits, TargetConfig};
pub use core_handle::{GroupCounts, GroupHandle};
pub use discovery::Referral;
pub use generated::GeneratedPsks;
pub use hosts::{HostSums, KindSum};
pub use namespace::{Backing, Namespace, NamespaceIds, View};
pub use nvmf_target::{
    ExpectedSubsystems, ListenOptions, ListenerStats, Target, TargetError, TargetPsks,
};
pub use shared_ports::{LATER_IDS, SharedPort, SharedPorts, SharedSubsystem};
pub use stats::{Kind, LATENCY_BUCKETS, QueueStats, Totals, latency_bucket};
pub use subsystem::{
    HostSecrets, NamespaceConfig, NamespaceEntry, Refusal, Rotation, SecretKind, Subsystem,
    SubsystemError, SubsystemListener,
};
pub use subsystem_config::{
    ControllerModel, MAX_CNTLID, SubsystemConfig, SubsystemKind, SubsystemOptions,
};
pub use withheld::Withheld;

//! The driver as an orchestrator sees it: gRPC over its socket. A case names the rule of the
//! interface's specification (spec.md 1.13) that it checks. Cases about the process, the records
//! and clusters, which the specification does not describe, have a goal and a method.
//!
//! The controller runs against a real daemon where it can, and against a scripted one for failures.
//! The node runs on a machine of its own, which is a directory.

mod bytes;
mod client;
mod controller;
mod failures;
mod identity;
mod in_cluster;
mod in_cluster_snapshots;
mod machine;
mod node;
mod node_paths;
mod node_records;
mod node_safety;
mod process;
mod scripted;
mod snapshots;

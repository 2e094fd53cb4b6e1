//! The simulator of clusters. It runs the machines of `nacre-cluster-core` on three to five nodes,
//! in one thread and in virtual time. Checkers verify every answer that hosts get.
//!
//! ```text
//!   World ── seed ──▶ troubles and their times
//!     ├ Node (3..5)    three cores that stall separately: management, lanes, gates; a clock that
//!     │   │            runs up to 2.4 % too fast or too slow; kill -9, with a fence or without
//!     │   ├ Control    a stand-in for the daemon's control of an open volume
//!     │   ├ Lane       a model of the data path: locks, reads, writes, held answers
//!     │   └ Replica     a model of a replica behind its shipped gate
//!     ├ Store          revisions, conditions, a watch; slow, unsure, away, full, stale reads
//!     └ Hosts          several paths, retries, late copies ──▶ Checker: linearizable registers
//! ```
//!
//! Checked: every block is a linearizable register over the answers of all nodes; at most one node
//! holds the volume with a good lease; the store's absence fences no node; the volume has a holder
//! within 10 s after the last trouble; controller ids of one host's paths differ.
//!
//! A run is determined by its seed: [`run`] with the same number repeats it. The data path is a
//! model; `bdev/replica/sim` runs the shipped one.

#![forbid(unsafe_code)]

mod checker;
mod client;
mod control;
mod copying;
mod events;
mod gates;
mod hosts;
mod lane;
mod management;
mod names;
mod node;
mod replica;
mod report;
mod requests;
mod run;
mod serving;
mod store;
mod store_side;
mod trouble;
mod ungated;
mod world;

#[cfg(feature = "mutations")]
pub use nacre_cluster_core::mutation::Mutation;
pub use report::{Options, Report};

use crate::run::Run;
use crate::world::World;

/// One run. An error describes the failure.
pub fn run(seed: u64, options: &Options) -> Result<Report, String> {
    Run(World::new(seed, options.clone())).run()
}

/// The command that repeats a run.
pub fn replay(seed: u64) -> String {
    format!("cargo xtask simulate cluster --seed {seed} --runs 1 --trace")
}

//! The simulator of clusters. It runs the state machines of `nacre-cluster-core` for three to five
//! nodes and one replicated volume, in one thread and in virtual time. Checkers verify every
//! response that hosts get.
//!
//! A *gate* is the check at a replica that admits the I/O of one holder only; it is the code of
//! `nacre-cluster-core`, too. A *trouble* is an injected failure; most of them end after a time.
//!
//! ```text
//!   World ── seed ──▶ troubles and their times
//!     ├ Node (3..5)    three cores that stall separately: management, lanes, gates; a clock that
//!     │   │            runs up to 2.4 % too fast or too slow; kill -9, with a fence or without
//!     │   ├ Control    a model of the daemon's control of an open volume
//!     │   ├ Lane       a model of the data path: locks, reads, writes, held responses
//!     │   └ Replica    a model of a replica behind its gate
//!     ├ Store          a model of etcd: slow, absent or full; lost answers, stale reads
//!     └ Hosts          several paths, retries, late copies ──▶ Checker: linearizable registers
//! ```
//!
//! The checks: every block is a linearizable register over the responses of all nodes; at most one
//! node holds the volume with a good lease; the store's absence fences no node; controller ids of
//! one host's paths differ. 10 s after the last trouble, each running node has a lease, and no dead
//! one has one. The volume has a holder by then, unless all in-sync replicas are on dead nodes.
//! 20 s later, no operation of a host is without an answer.
//!
//! A run is determined by its seed: [`run()`] with the same number repeats it. The data path here
//! is a model; `bdev/replica/sim` simulates the real one.

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

/// Runs one simulation. The error describes the failed check.
pub fn run(seed: u64, options: &Options) -> Result<Report, String> {
    Run(World::new(seed, options.clone())).run()
}

/// The command that repeats a run.
pub fn replay(seed: u64) -> String {
    format!("cargo xtask simulate cluster --seed {seed} --runs 1 --trace")
}

//! The load generator behind `nacre perf`, `nacre bench` and `nacre test`. It submits I/O as an
//! NVMe-oF host, or directly to a local block device or drive.
//!
//! ```text
//!   remote.rs   a namespace of a target: connects, polls the controller            (main thread)
//!   local.rs    a block device of this process                                     (main thread)
//!   drive.rs    a namespace of a local drive, which it attaches                    (main thread)
//!     run.rs      starts the workers, adds up                                      (main thread)
//!     worker.rs   a thread, pinned if cores are given, that polls its lanes
//!       lane.rs     one I/O queue kept full: submissions and completions
//!         access.rs   chooses blocks: random or in order, of one size or several
//!         pattern.rs  contents of written blocks, and verification of read ones
//!         ledger.rs   tracks the writes of each unit, for the verification
//!   multipath/    several paths to one namespace, for `nacre test`                    (one thread)
//!   job.rs      parameters          report.rs   results          error.rs   errors of a run
//! ```
//!
//! A unit is the granularity of the LBAs: the I/O size if it is fixed, otherwise one block.
//!
//! In a worker, the path of one I/O takes no lock and reads no clock. The worker reads the time
//! once per poll of all lanes, which is also the resolution of the latencies. Buffers are allocated
//! at the start.

#![forbid(unsafe_code)]

mod access;
mod drive;
mod error;
mod job;
mod lane;
mod ledger;
mod local;
pub mod multipath;
mod pattern;
mod remote;
mod report;
mod run;
mod worker;

pub use drive::run_drive;
pub use error::{DriveError, Owner, PerfError};
pub use job::{Area, Job, JobError, JobOptions, Limit, Rw, Sizes, Verify};
pub use local::run_device;
pub use pattern::{Stamp, Wrong};
pub use remote::run;
pub use report::{
    Direction, IoFailure, Latency, Losses, Mismatch, PathReport, Report, VerifyReport,
};
pub use run::{Progress, Watch, memory};
pub use worker::WorkerError;

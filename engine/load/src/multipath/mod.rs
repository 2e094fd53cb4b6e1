//! Verified I/O over several paths to one namespace, for `nacre test failover` and `nacre test
//! copy`. A path is a controller with one I/O queue. A unit is the block range of one I/O.
//!
//! ```text
//!   mount.rs      the paths, and their I/O in flight
//!   failover.rs   random I/O over the path with the best ANA state
//!   copy.rs       passes over each path alone, then over all at once
//!     compare.rs    passes that write, or read and compare
//!     pass.rs       each unit in order, over chosen paths
//!   choice.rs     the path of the next I/O                                (no I/O)
//!   contents.rs   the expected data of each unit                          (no I/O)
//!   record.rs     I/Os per second and path, pauses, errors                (no I/O)
//! ```
//!
//! One thread polls all paths, and sleeps 50 µs when no I/O completes: a test, not a benchmark.

mod choice;
mod compare;
mod contents;
mod copy;
mod failover;
mod mount;
mod pass;
mod record;

pub use choice::access_name;
pub use contents::{Contents, ContentsReport};
pub use copy::{CopyPath, CopyReport, copy};
pub use failover::{FailoverJob, FailoverLoad};
pub use mount::{Mount, MountError, Path, Shape};
pub use pass::PassReport;
pub use record::{PathTotals, PhaseReport, Record, Second, TestPhase};

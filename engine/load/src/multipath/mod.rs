//! Verified I/O over several paths of one namespace, for `nacre test failover` and `nacre test
//! copy`.
//!
//! ```text
//!   mount.rs      the paths, and their I/O in flight            perform
//!   failover.rs   random I/O that follows the ANA states        perform
//!   copy.rs       every path alone, then all at once          perform
//!   compare.rs    passes that write, or read and compare      perform
//!   pass.rs       every place in order, over chosen paths       perform
//!   choice.rs     the path of the next I/O                      decide
//!   contents.rs   the data of each place                        decide
//!   record.rs     I/Os per second and path, pauses, errors      decide
//! ```
//!
//! One thread polls all paths and sleeps when idle: a test, not a benchmark.

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

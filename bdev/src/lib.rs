//! The block device trait and its modules.

#![forbid(unsafe_code)]

pub mod device;
pub mod io;
pub mod queue;

pub use device::{Bdev, Geometry, Limits, OpenError, Support};
pub use io::{Completion, Extents, Flags, Io, Op, Status, Token};
pub use queue::{Busy, Done, Queue};

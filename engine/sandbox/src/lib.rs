//! The sandbox of the daemon: drops the capabilities that its features do not need, and filters
//! system calls (seccomp).
//!
//! ```text
//!   start, one thread   restrict   no_new_privs; bounding, ambient, permitted and effective set
//!   before "ready"      install    the filter, on all threads at once (TSYNC)
//!   later threads       inherit both
//! ```
//!
//! Capabilities belong to a thread, and no call changes those of all threads. So the daemon
//! gives them up before it has a second thread. The filter comes at the end of the start; TSYNC
//! puts it on threads of libraries, too.
//!
//! The filter is a list of allowed calls ([`calls`]). A refused call fails; it does not end the
//! process: a C library that uses a new call after an update must not stop a storage daemon.
//!
//! | call | answer | reason |
//! |---|---|---|
//! | on no list | ENOSYS | an older kernel gives the same, so libraries use their fallback |
//! | [`calls::DENIED`] | EPERM | there is no fallback, and the error names the cause |
//! | of another architecture | ends the process | no library makes one; only an exploit does |
//!
//! The kernel logs each refused call (`dmesg`, or the audit log), except clone3, which C
//! libraries try for each thread.
//!
//! Limits: the filter does not apply to operations inside an io_uring, which have the capabilities
//! of the thread that made the ring. It does not check paths either: the daemon's user and the
//! service manager limit the accessible files.
//!
//! Unsafe, because no crate installs a filter with the flags that the daemon needs: seccompiler
//! sets neither SECCOMP_FILTER_FLAG_LOG nor SPEC_ALLOW. Without the latter, kernels before 5.16
//! slow down all code of a filtered thread.

#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

pub mod calls;
mod capabilities;
mod error;
mod filter;
mod mode;
mod status;

pub use capabilities::{Needs, names, parse, restrict};
pub use error::SandboxError;
pub use filter::install;
pub use mode::Mode;
pub use rustix::thread::CapabilitySet;
pub use status::{Status, kernel_has_filters};

//! The credentials of the process at the other end of a Unix socket, and the ids of users and
//! groups by name.
//!
//! ```text
//!   socket ─▶ SO_PEERCRED    pid, uid, gid      at the time of connect
//!          ─▶ SO_PEERGROUPS  the other groups   at the time of connect
//!   name   ─▶ getpwnam_r, getgrnam_r            the sources in nsswitch.conf (files, LDAP)
//! ```
//!
//! The crate has unsafe code because rustix has neither SO_PEERGROUPS nor the lookups of names.
//! Also, the SO_PEERCRED of rustix cannot return the pid 0 of a process outside this PID namespace.
//! `/proc/PID/status` also lists groups, but is not safe: after the process has ended, its pid may
//! belong to a process with more rights.

#![cfg_attr(not(test), deny(clippy::cast_possible_truncation))]

mod names;
mod socket;

pub use names::{group_id, user_id};
pub use socket::{Credentials, credentials};

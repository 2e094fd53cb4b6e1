//! The process at the other end of a Unix socket, as the kernel knows it, and the ids of users and
//! groups by name.
//!
//! ```text
//!   socket ─▶ SO_PEERCRED    pid, uid, gid      at the time of connect
//!          ─▶ SO_PEERGROUPS  the other groups   at the time of connect
//!   name   ─▶ getpwnam_r, getgrnam_r            files, LDAP, whatever nsswitch.conf says
//! ```
//!
//! Unsafe, because rustix has none of these calls. The groups in `/proc/PID/status` will not do:
//! after the process has ended, its id may belong to a process with more rights.

mod names;
mod socket;

pub use names::{group_id, user_id};
pub use socket::{Credentials, credentials};

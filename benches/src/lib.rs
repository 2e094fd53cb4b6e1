//! The reference loads of `cargo xtask bench tcp`.
//!
//! [`limit`] measures bare sockets that move the same bytes as Nacre. [`idle`] opens idle
//! connections, whose cost in the daemon xtask measures.

#![forbid(unsafe_code)]

pub mod idle;
pub mod limit;

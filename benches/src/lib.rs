//! Yardsticks for Nacre's throughput and idle cost.
//!
//! [`limit`] measures bare sockets that move the same bytes, for `cargo xtask bench tcp`. [`idle`]
//! holds idle connections, so that their cost can be measured.

#![forbid(unsafe_code)]

pub mod idle;
pub mod limit;

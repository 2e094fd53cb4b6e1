//! What is fast, and how we know.
//!
//! [`limit`] is the yardstick of `cargo xtask bench tcp`: what bare sockets reach with the same bytes.
//! [`idle`] holds connections that ask for nothing, to see what those cost.

#![forbid(unsafe_code)]

pub mod idle;
pub mod limit;

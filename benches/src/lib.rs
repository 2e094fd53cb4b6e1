//! What is fast, and how we know.
//!
//! [`limit`] is the yardstick of `cargo xtask bench tcp`: what bare sockets reach with the same bytes.

#![forbid(unsafe_code)]

pub mod limit;

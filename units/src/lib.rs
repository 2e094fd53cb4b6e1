//! Parses and formats sizes and times as users write them, for the parameters of all crates: the
//! configuration, RPC and the command line accept the same texts.
//!
//! ```text
//!   size    512, 4k, 64MiB, 1.5GiB, 100GB
//!   time    250ms, 5s, 1h 30m
//!   read    a number in the unit of its field, or text with a unit
//! ```
//!
//! Crates that declare parameters depend on this crate. The engine and its commands use the same
//! items through `nacre_engine_values`, which adds addresses and files.

#![forbid(unsafe_code)]

pub mod read;
pub mod size;
pub mod time;

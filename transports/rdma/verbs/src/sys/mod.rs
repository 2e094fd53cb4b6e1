//! libibverbs and librdmacm as they are: structs of their ABI, and their functions, found when they are first
//! asked for. No header and no library is needed to build, none to start.
//!
//! ```text
//!   abi      verbs.rs, cm.rs: structs and constants under their C names; layout.rs proves them
//!   calls    api.rs: one table of functions, opened once and never closed
//! ```
//!
//! Nothing here owns or checks anything: that is [`crate::real`]'s.

pub mod api;
pub mod cm;
pub mod verbs;

#[cfg(test)]
mod layout;

pub use api::{Api, LoadError};

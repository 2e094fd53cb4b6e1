//! The ABI of libibverbs and librdmacm: their structs, and their functions, loaded at first use.
//! Building needs no header and no library, starting needs no library.
//!
//! ```text
//!   abi      verbs.rs, cm.rs: structs and constants under their C names; tests.rs proves them
//!   calls    api.rs: one table of functions, opened once and never closed
//! ```
//!
//! These are raw declarations without ownership or checks. [`crate::real`] is the safe layer above.

pub(crate) mod api;
pub(crate) mod cm;
pub(crate) mod verbs;

#[cfg(test)]
mod tests;

pub(crate) use api::{Api, LoadError};

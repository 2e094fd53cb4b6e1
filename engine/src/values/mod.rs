//! Values as users write them, parsed alike in files, the environment, the command line and RPC
//! calls.
//!
//! ```text
//!   address   [SCHEME://]HOST[:PORT][/PATH][?QUERY]
//!   size      512, 4k, 64MiB, 1.5GiB, 100GB
//!   time      250ms, 5s, 1h 30m; a plain number has the unit of its key
//!   read      parses any of these from JSON, with errors in plain English
//! ```

pub mod address;
pub mod read;
pub mod size;
pub mod time;

//! Values as people write them, read alike in the file, in the environment, on the command line and in calls.
//!
//! ```text
//!   address   [SCHEME://]HOST[:PORT][/PATH][?QUERY]
//!   size      512, 4k, 64MiB, 1.5GiB, 100GB
//!   time      250ms, 5s, 1h 30m; a number alone in the unit that the key names
//!   read      any of the above out of JSON, with errors in plain English
//! ```

pub mod address;
pub mod read;
pub mod size;
pub mod time;

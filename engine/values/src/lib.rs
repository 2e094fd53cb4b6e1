//! The text forms of values that users write, parsed equally in files, the environment, the command
//! line and RPC calls; the files that hold identities; and programs of the system.
//!
//! ```text
//!   address        [SCHEME://]HOST[:PORT][/PATH][?QUERY]
//!   selector       name:eth0, subnet:10.0.0.0/24, rdma:mlx5_0: interfaces of this machine
//!   size           512, 4k, 64MiB, 1.5GiB, 100GB
//!   time           250ms, 5s, 1h 30m; a plain number has the unit of its key
//!   read           parses any of these from JSON, with errors in plain English
//!   flatten        structs whose JSON object also has the fields of a nested struct
//!   options        options with defaults, and the parameters that set some of them, from one list
//!   suggest        the known word nearest to an unknown one
//!   files          PID files, atomic replacement of a file, the default data directory
//!   identity_file  an identity that is generated once and kept
//!   host_identity  host NQN and host identifier of this machine
//!   run            programs of the system, each with a deadline
//! ```

#![forbid(unsafe_code)]

pub mod address;
pub mod files;
pub mod flatten;
pub mod host_identity;
pub mod identity_file;
pub mod options;
pub mod read;
pub mod run;
pub mod selector;
pub mod size;
pub mod suggest;

pub use nacre_units::time;

/// A number with its noun, which takes an s except for 1: `1 warning`, `2 warnings`.
pub fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

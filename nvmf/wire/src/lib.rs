//! The structures of NVMe and NVMe over Fabrics, with their parsers: commands, completions, PDUs,
//! log pages and registers.
//!
//! A leaf crate: no I/O, no time, no allocation on the data path, no state. A structure is a
//! `zerocopy` type whose layout is asserted against the specification, so reading one is a cast and
//! not a copy. Rules that a cast cannot express (a PDU's offsets, an SGL's type, an NQN's grammar)
//! have a parser that returns a typed value or a typed refusal, and never panics on any input.
//!
//! Cited sections are those of NVM Express Base Specification 2.0 ("Base"), NVM Command Set
//! Specification 1.0 ("NVM"), and NVMe/TCP Transport Specification 1.0 ("TCP").
//!
//! ```text
//!   sqe  cqe  status  opcode      the 64-byte command and the 16-byte completion
//!   commands  fabrics             typed views of a command's dwords, and its data
//!   registers  identify  log  features  aen     a controller's description of itself
//!   tcp                           the PDUs that carry all of it over a byte stream
//!   rdma                          the private data of connection requests and replies
//! ```

#![forbid(unsafe_code)]
// zerocopy's derives declare types that nothing else names.
#![allow(unnameable_types)]

mod layout;

pub mod aen;
pub mod commands;
pub mod cqe;
pub mod fabrics;
pub mod features;
pub mod fuzzing;
pub mod identify;
pub mod log;
pub mod opcode;
pub mod rdma;
pub mod registers;
pub mod sqe;
pub mod status;
pub mod tcp;

pub use zerocopy;

pub use cqe::Cqe;
pub use fabrics::{Nqn, NqnError};
pub use sqe::{Fuse, Sgl, SglDescriptor, SglError, Sqe};
pub use status::StatusCode;

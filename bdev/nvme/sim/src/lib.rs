//! A simulated NVMe controller, in process: what the driver's tests and measurements drive instead of a drive.
//!
//! ```text
//!   driver ── Function ──► SimFunction     registers, vectors, reset; one per time that the drive is plugged in
//!                               │
//!   test ──── Drive ────────────┤          the hand on it: tick, faults, pull, plug, power, what was seen
//!                               │
//!        config  identify  admin  io  data  media  queues  post       the controller (State)
//!                               │
//!                             Iommu        all memory that it reaches: what its hook was told of, by addresses
//!                                          that do not equal those of the process
//! ```
//!
//! Nothing happens but in [`Drive::tick`], called by a test with its own time, by a [`Ticker`] on a reactor, or by
//! a thread ([`Drive::spawn`]). Commands run in order and at once, or by seeded chance late and out of order.
//!
//! It is strict. What a controller need not put up with (a doorbell out of range, a reserved field, an identifier
//! that is in use, a slot that is taken) is answered as the specification says, and noted as a
//! violation; so is an address that it was not told of. [`Drive::check`] is how every test ends.

#![deny(unsafe_code)]

mod admin;
mod config;
mod data;
mod drive;
mod faults;
mod features;
mod function;
mod identify;
mod io;
mod logs;
mod media;
#[allow(unsafe_code, reason = "copies to and from memory that others own")]
mod memory;
mod post;
mod queues;
mod random;
mod registers;
mod state;
mod strict;
mod thread;

pub use config::{Config, Format, NamespaceConfig};
pub use drive::Drive;
pub use faults::{Action, Chances, Rule, Target};
pub use function::SimFunction;
pub use logs::telemetry;
pub use media::Keep;
pub use memory::Iommu;
pub use random::Random;
pub use state::Stats;
pub use thread::{Running, Ticker};

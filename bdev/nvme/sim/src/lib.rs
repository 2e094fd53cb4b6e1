//! A simulated NVMe controller in the process: the driver's tests and benchmarks use it in place of
//! a drive.
//!
//! ```text
//! driver ── Function ──► SimFunction     registers, vectors, reset; one per plugging of the drive
//!                             │
//! test ──── Drive ────────────┤          its control: tick, faults, pull, plug, power, statistics
//!                             │
//! config  identify  admin  io  data  media  queues  post       the controller (State)
//!                             │
//!                           Iommu        all memory that it reaches: the registered regions, under
//!                                        addresses that differ from those of the process
//! ```
//!
//! All work happens in [`Drive::tick`], called by a test with its own time, by a [`Ticker`] on a
//! reactor, or by a thread ([`Drive::spawn`]). Commands complete in order and immediately, or late
//! and out of order with seeded random times.
//!
//! The simulation is strict. A driver's mistake (a doorbell out of range, a reserved field, an
//! identifier or a slot that is in use) gets the specification's answer, and is recorded as a
//! violation; so is an unregistered address. Every test ends with [`Drive::check`].

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
#[allow(unsafe_code, reason = "copies to and from memory of the driver")]
mod memory;
mod post;
mod queues;
mod registers;
mod state;
mod strict;
mod thread;

pub use config::{Config, Format, Identity, Limits, NamespaceConfig, Pace};
pub use drive::Drive;
pub use faults::{Action, Chances, Rule, Target};
pub use function::SimFunction;
pub use logs::telemetry;
pub use media::Keep;
pub use memory::Iommu;
pub use state::Stats;
pub use thread::{Running, Ticker};

//! An NVMe controller simulated in the process. The driver's tests and benchmarks use it in place
//! of a drive.
//!
//! ```text
//! driver ── Function ──► SimFunction     registers, vectors, reset; one per insertion of the drive
//!                             │
//! test ──── Drive ────────────┤          its control: tick, faults, pull, plug, power, statistics
//!                             │
//! registers  queues  post  admin                               the controller (State)
//!                             │
//! identify  features  logs  io  data  media                    its commands (Executor)
//!                             │
//!                           Iommu        the memory that it can access: registered regions, under
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
mod doorbells;
mod drive;
mod executor;
mod faults;
mod feature_commands;
mod features;
mod firmware;
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
mod shared;
mod state;
mod strict;
mod thread;

pub use config::{Config, Format, Identity, Limits, NamespaceConfig, Pace};
pub use drive::Drive;
pub use executor::Stats;
pub use faults::{Action, Chances, Rule, Target};
pub use firmware::IMAGE_MARK;
pub use function::SimFunction;
pub use logs::telemetry;
pub use media::CacheSurvival;
pub use memory::Iommu;
pub use thread::{Running, Ticker};

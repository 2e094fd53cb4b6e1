//! Pinned cores: pollers, timers, mailboxes, local futures and the clock.

pub mod clock;
pub mod poller;

pub use clock::Nanos;
pub use poller::{Idle, Poller, Work};

//! Reactors: pinned threads that run pollers, messages, timers and local futures. All I/O code runs
//! on a reactor.
//!
//! A reactor is one thread, usually pinned to one core. It owns the objects that were given to it
//! and shares nothing. Each turn, in this order:
//!
//! ```text
//!   1 clock    read once; every `now` of the turn is this one
//!   2 mailbox  closures sent by other threads (bounded per turn)
//!   3 pollers  in the order they were added, each with a budget
//!   4 futures  those that were ready when the phase began (bounded per turn)
//!   5 timers   those due at `now`; the futures they wake run in the next turn
//!   6 publish  counters to relaxed atomics, readable from any thread
//! ```
//!
//! A turn that found no work is idle. [`Mode`] decides the next step: `Poll` turns again,
//! `Interrupt` sleeps, and `Adaptive` sleeps after `busy_poll_us` of idle turns. An adaptive
//! reactor polls longer while work keeps arriving soon after it slept. Sleeping is a handshake that
//! cannot lose a wake-up, see [`doorbell`].
//!
//! In steady state a turn allocates nothing and takes no lock. Messages ([`ReactorHandle::send`])
//! and futures ([`CoreHandle::spawn_local`]) are boxed and meant for control work.
//!
//! | to | use |
//! |---|---|
//! | start a thread | [`spawn`], [`ReactorConfig`] |
//! | run a closure | [`ReactorHandle::send`], [`ReactorHandle::run`], [`ReactorHandle::call`] |
//! | run code in every turn | [`Poller`], [`CoreHandle::add_poller`] |
//! | wait, locally | [`CoreHandle::spawn_local`], [`CoreHandle::after`] |
//! | watch many sockets in one poller | [`EventSet`] |
//! | do work that takes longer than a turn may | [`Helper`] |
//! | test all that without a thread or real time | [`TestCore`] |

#![forbid(unsafe_code)]

pub mod clock;
pub mod doorbell;
pub mod poller;

mod bell;
mod config;
mod core;
mod cores;
mod event_set;
mod handle;
mod helper;
mod mailbox;
mod oneshot;
mod origin;
mod patience;
mod reactor;
mod repeats;
mod shared;
mod stats;
mod tasks;
mod test_core;
mod timers;
mod turn;
mod wake_set;
mod watchdog;

pub use bell::ReactorWaker;
pub use clock::{Clock, Nanos, VirtualClock};
pub use config::{Mode, ReactorConfig};
pub use core::{Core, CoreHandle, Elapsed, Message, Timer};
pub use cores::{CoreSet, CoreSetError, numa_node};
pub use event_set::{Event, EventSet, Events, Interest};
pub use handle::{CallError, ReactorHandle};
pub use helper::{Helper, HelperFull};
pub use mailbox::{MailboxFull, SendError};
pub use origin::Origin;
pub use poller::{Idle, Poller, Work};
pub use reactor::{SpawnError, spawn};
pub use repeats::Repeats;
pub use shared::ReactorPanicked;
pub use stats::{PollerId, PollerStats, ReactorStats, Stall};
pub use tasks::{Cancelled, LocalTask};
pub use test_core::{SleepAttempt, TestCore};
pub use wake_set::WakeFdError;
pub use watchdog::Watchdog;

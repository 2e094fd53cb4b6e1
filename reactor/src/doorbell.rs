//! The handshake between a reactor that falls asleep and the threads that wake it. No wake-up is
//! lost, and waking an awake reactor needs no system call.
//!
//! ```text
//!   sleeper                              waker
//!   announce: state = ASLEEP             push the message
//!             fence                      ring: fence
//!   poll everything once more                  if this waker changes the state from
//!   nothing: block on the eventfd                 ASLEEP to AWAKE: write the eventfd
//!   awake:    state = AWAKE
//! ```
//!
//! The two sequentially consistent fences order "store own value, then read the other's" on both
//! sides: of a push and an announcement, at least one side sees the other's. Either the second poll
//! finds the message, or the waker finds the sleeper asleep and writes. Without either fence, or
//! without the second poll, wake-ups are lost; the model in `tests/models` shows that, and that
//! none is lost with them:
//!
//! ```text
//! cargo test -p nacre-tests-models doorbell
//! ```
//!
//! This file uses nothing of this crate, so that the loom test can include it.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

// The sleeper swaps where a store would suffice, so that its changes and the wakers' form one chain
// of read-modify-writes. That is easier to reason about, and costs time only when falling asleep or
// waking.

/// The flag that shows wakers whether the sleeper must be woken. The caller provides the wake-up
/// itself, for example an eventfd.
#[derive(Debug)]
pub struct Doorbell {
    state: AtomicU32,
}

impl Doorbell {
    pub fn new() -> Self {
        Self {
            state: AtomicU32::new(AWAKE),
        }
    }

    /// Called by a waker: the sleeper sees everything pushed before this call, either without help
    /// or after `wake`. `wake` is called at most once per announcement, however many wakers ring.
    pub fn ring(&self, wake: impl FnOnce()) {
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == ASLEEP
            && self.state.swap(AWAKE, Ordering::AcqRel) == ASLEEP
        {
            wake();
        }
    }

    /// Called by the sleeper: from now on wakers call `wake`. Poll everything once more after this.
    pub fn announce(&self) {
        self.state.swap(ASLEEP, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Called by the sleeper: true if no waker has called [`Doorbell::ring`] since
    /// [`Doorbell::announce`].
    pub fn undisturbed(&self) -> bool {
        self.state.load(Ordering::Acquire) == ASLEEP
    }

    /// Called by the sleeper after it woke, for any reason.
    pub fn awake(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
    }
}

impl Default for Doorbell {
    fn default() -> Self {
        Self::new()
    }
}

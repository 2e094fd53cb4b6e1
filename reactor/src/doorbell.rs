//! How a sleeper and its wakers agree, so that no wake-up is lost and an awake sleeper costs its
//! wakers no system call.
//!
//! ```text
//!   sleeper                              waker
//!   announce: state = ASLEEP             push the message
//!             fence                      ring: fence
//!   poll everything once more                  if state == ASLEEP and I am the one who
//!   nothing: block on the eventfd                 turns it to AWAKE: write the eventfd
//!   awake:    state = AWAKE
//! ```
//!
//! The two sequentially consistent fences order "store mine, then read theirs" on both sides: of a
//! push and an announcement at least one side sees the other's. Either the second poll finds the
//! message, or the waker finds the sleeper asleep and writes. Leaving out either fence, or the
//! second poll, loses wake-ups; `tests/loom.rs` shows that, and that with them none is lost:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p nacre-reactor --release --test loom
//! ```
//!
//! The file stands alone and uses nothing of this crate, so that the model can include it.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

// The sleeper swaps where a store would do, so that its changes and the wakers' form one chain of
// read-modify-writes: easier to reason about, and paid only on the way into and out of sleep.

/// Whether the sleeper wants to be woken. What wakes it (an eventfd) is the caller's.
#[derive(Debug)]
pub struct Doorbell {
    state: AtomicU32,
}

impl Doorbell {
    pub fn new() -> Doorbell {
        Doorbell {
            state: AtomicU32::new(AWAKE),
        }
    }

    /// Waker: the sleeper sees everything pushed before this call, at once or after `wake`. `wake`
    /// is called at most once per announcement, however many wakers ring.
    pub fn ring(&self, wake: impl FnOnce()) {
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == ASLEEP
            && self.state.swap(AWAKE, Ordering::AcqRel) == ASLEEP
        {
            wake();
        }
    }

    /// Sleeper: from here on wakers will call `wake`. Poll everything once more after this.
    pub fn announce(&self) {
        self.state.swap(ASLEEP, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Sleeper: true if no waker rang since [`Doorbell::announce`].
    pub fn undisturbed(&self) -> bool {
        self.state.load(Ordering::Acquire) == ASLEEP
    }

    /// Sleeper: awake, for whatever reason.
    pub fn awake(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
    }
}

impl Default for Doorbell {
    fn default() -> Doorbell {
        Doorbell::new()
    }
}

//! Synchronises the doorbell writes of a queue pair's owner with the control, which resets the
//! controller and recreates the queue.
//!
//! ```text
//!   owner (its core)                     control (home)
//!   enter: busy = 1                      set: word = Quiescing
//!          word unchanged? ── no ─▶ leave     is_busy? wait
//!          write doorbells               the controller is reset, its queues recreated
//!   leave: busy = 0                      set: word = Live(generation + 1)
//! ```
//!
//! Both store their own word and then load the other's, with a sequentially consistent fence in
//! between. Of an owner that enters and a control that quiesces, at least one sees the other. So a
//! doorbell of the old queue is never written after the new one was created. The model in
//! `tests/models` shows that, and that weaker orderings break it:
//!
//! ```text
//! cargo test -p nacre-tests-models phase
//! ```
//!
//! This file uses nothing of this crate, so that the loom test can include it.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The owner's permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueState {
    /// The controller has no such queue yet.
    Waiting,
    /// The controller resets, or recreates the queue.
    Quiescing,
    /// The controller cannot reach memory any longer: all I/O ends.
    Gone,
    /// The queue exists; the number counts its creations.
    Live(u32),
}

const WAITING: u32 = 0;
const QUIESCING: u32 = 1;
const GONE: u32 = 2;
const LIVE: u32 = 1 << 31;

/// A [`QueueState`] as one number, to compare with.
pub(crate) type Word = u32;

#[derive(Debug)]
pub(crate) struct Phase {
    word: AtomicU32,
    busy: AtomicU32,
}

impl Phase {
    pub(crate) fn new() -> Self {
        Self {
            word: AtomicU32::new(WAITING),
            busy: AtomicU32::new(0),
        }
    }

    /// Called by the owner: its present permission. The control's earlier writes are visible.
    #[inline]
    pub(crate) fn word(&self) -> Word {
        self.word.load(Ordering::Acquire)
    }

    /// Called by the owner: true if it may write doorbells until [`Phase::leave`]. After false it
    /// has left already.
    #[inline]
    pub(crate) fn enter(&self, mine: Word) -> bool {
        self.busy.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let entered = self.word.load(Ordering::Acquire) == mine;
        if !entered {
            self.leave();
        }
        entered
    }

    #[inline]
    pub(crate) fn leave(&self) {
        self.busy.store(0, Ordering::Release);
    }

    /// Called by the control: sets the owner's permission.
    pub(crate) fn set(&self, state: QueueState) {
        self.word.store(encode(state), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Called by the control: true if the owner is inside and may not have seen the latest
    /// [`Phase::set`].
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire) != 0
    }

    pub(crate) fn state(&self) -> QueueState {
        decode(self.word())
    }
}

pub(crate) fn decode(word: Word) -> QueueState {
    match word {
        WAITING => QueueState::Waiting,
        QUIESCING => QueueState::Quiescing,
        GONE => QueueState::Gone,
        live => QueueState::Live(live & !LIVE),
    }
}

pub(crate) fn encode(state: QueueState) -> Word {
    match state {
        QueueState::Waiting => WAITING,
        QueueState::Quiescing => QUIESCING,
        QueueState::Gone => GONE,
        QueueState::Live(generation) => LIVE | generation & !LIVE,
    }
}

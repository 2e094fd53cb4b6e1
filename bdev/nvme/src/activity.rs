//! Counters of the polls, commands and doorbells of a queue pair. Its owner writes them; any thread
//! reads them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a queue pair since its owner opened it.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    pub polls: Tally,
    /// Polls that found a completion.
    pub busy_polls: Tally,
    pub submitted: Tally,
    pub completions: Tally,
    /// I/O that waited for a free command, a buffer or the queue.
    pub queued: Tally,
    pub submission: DoorbellWrites,
    pub completion: DoorbellWrites,
}

/// Writes of one doorbell: of its register, and of its shadow in memory.
#[derive(Debug, Default)]
pub(crate) struct DoorbellWrites {
    pub register: Tally,
    pub shadow: Tally,
}

/// A counter with one writer, which needs no locked instruction.
#[derive(Debug, Default)]
pub(crate) struct Tally(AtomicU64);

impl Tally {
    #[inline]
    pub(crate) fn add(&self, count: u64) {
        let sum = self.0.load(Ordering::Relaxed).wrapping_add(count);
        self.0.store(sum, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

//! The counters of an I/O queue.

use crate::transport::HostWorkRequests;

/// Counters of a queue since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStats {
    pub connections: u64,
    pub losses: u64,
    pub resent: u64,
    /// Moves to another transport without a loss.
    pub moves: u64,
    /// Bytes copied between the buffers of an I/O and the contiguous buffer of its command. I/O
    /// with one buffer needs no copy.
    pub copied_bytes: u64,
    /// Completed reads and writes, and their bytes.
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    /// I/O that completed with an error status of the target.
    pub failed: u64,
    pub activity: Activity,
}

/// Counters of the polls and commands of a queue since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activity {
    pub polls: u64,
    /// Polls that found a completion.
    pub busy_polls: u64,
    /// Commands that were sent, including those without a completion.
    pub submitted: u64,
    pub completions: u64,
    /// I/O that was not sent at once, for lack of a free entry or of a connection.
    pub queued: u64,
    pub work_requests: HostWorkRequests,
}

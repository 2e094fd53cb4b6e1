//! What a volume's machine tells its node and its hosts.

use crate::transaction::Transaction;

/// What the node does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Intent {
    /// Execute it, and call `committed`, `refused` or `unanswered` of [`crate::Volume`], each with
    /// the number.
    Commit {
        number: u64,
        transaction: Transaction,
    },
    /// Open the volume, and call [`crate::Volume::opened`] or [`crate::Volume::not_opened`] with
    /// the number. A close that has not ended comes first.
    Take { number: u64 },
    /// Refuse new commands, close the volume when none is in flight, and call
    /// [`crate::Volume::drained`] with the number.
    Close { number: u64 },
    /// Abort the commands in flight.
    Abort,
    /// Close the volume without a change of the record: another node may serve. Drop all answers
    /// and commands, and end the hosts' connections. A
    /// command that waits in a socket must not be executed if this node serves again later.
    Drop,
    /// Report that no node can take the volume, as far as this node knows.
    NoHolder,
}

/// The state that hosts see on this node's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ana {
    Optimized,
    Inaccessible,
    Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldingState {
    Standby,
    Taking,
    Holding,
    Leaving,
    Fenced,
}

//! What a volume's machine tells its node and its hosts.

use crate::gate::Key;
use crate::ids::MemberId;
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
    /// Acquire the member's gate, and call [`crate::Volume::granted`] or
    /// [`crate::Volume::gate_refused`].
    Acquire { member: MemberId, key: Key },
    /// Make the in-sync members equal where the log of any of them is dirty, then call
    /// [`crate::Volume::merged`] with the number.
    Merge { number: u64 },
    /// Open the lanes to hosts.
    Open,
    /// Refuse new commands, and call [`crate::Volume::drained`] when none is in flight.
    Close,
    /// Abort the commands in flight.
    Abort,
    /// Drop all answers and commands, and end the hosts' connections: another node may serve. A
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
pub enum State {
    Standby,
    Taking,
    Holding,
    Leaving,
    Fenced,
}

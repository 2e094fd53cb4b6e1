//! The outputs of [`crate::Volume`], the state machine of one replicated volume on one node: the
//! next action of the node, and the ANA state that hosts see on the path to it.

use crate::transaction::Transaction;

/// The next action of the node. An answer has the number of its intent, so that a late answer to
/// an earlier intent does not count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Intent {
    /// Send the transaction to etcd. Then call `committed`, `refused` or `unanswered` of
    /// [`crate::Volume`] with the number.
    Commit {
        number: u64,
        transaction: Transaction,
    },
    /// Open the volume, and call [`crate::Volume::opened`] or [`crate::Volume::not_opened`] with
    /// the number. If an earlier close has not ended, open after its end.
    Take { number: u64 },
    /// Refuse new commands, close the volume when none is in flight, and call
    /// [`crate::Volume::drained`] with the number.
    Close { number: u64 },
    /// Abort the commands in flight: the close of a handover has lasted 2 s.
    Abort,
    /// Close the volume without a change of its record in etcd: another node may serve it. Drop
    /// all responses and commands, and end the hosts' connections. A command that waits in a socket
    /// must not be executed if this node serves again later.
    Drop,
    /// Report that, as far as this node knows, no node can take the volume. It has had no live
    /// holder for at least 1 s, it is this node's turn, and this node reaches no in-sync replica.
    NoHolder,
}

/// The ANA state of the namespace in this node's controllers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ana {
    Optimized,
    Inaccessible,
    /// ANA Change state, for at most 8 s: the volume is being opened or closed here.
    Change,
}

/// The node's present part for the volume; [`crate::volume`] draws the transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldingState {
    /// Shows the volume to hosts as inaccessible.
    Standby,
    /// Is becoming the holder: changes the record, then opens the volume.
    Taking,
    /// Serves the volume.
    Holding,
    /// Is closing the volume, to hand it over or release it.
    Leaving,
    /// Another node has become the holder, or this node's incarnation has ended.
    Fenced,
}

//! The state of the model of a holder's data path (`serving.rs`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use nacre_cluster_core::Confirmations;
use nacre_cluster_core::confirmation::ReplicaIds;

use crate::client::Command;

#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub open: bool,
    /// The number of the close, until the volume is open again.
    pub closing: Option<u64>,
    /// Commands that wait for their block, or for the end of a copy.
    pub waiting: VecDeque<Command>,
    pub running: BTreeMap<u64, Running>,
    /// The operations whose answers leave at the end of the turn.
    pub collected: Vec<u64>,
    /// Answers without a lease, in order of collection: ticket and operation.
    pub held: BTreeMap<u64, u64>,
    pub last_ticket: u64,
    pub confirmations: Confirmations,
    pub round: Option<(u64, ReplicaIds)>,
    /// No operation starts while a replica is copied.
    pub frozen: bool,
    /// I/O under way.
    pub outstanding: BTreeMap<u64, Outstanding>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Outstanding {
    pub operation: u64,
    pub replica: usize,
    pub sent: u64,
}

#[derive(Debug)]
pub(crate) struct Running {
    pub command: Command,
    /// The replicas that have the write.
    pub done: BTreeSet<usize>,
    pub value: Option<u64>,
    pub is_collected: bool,
}

impl Lane {
    pub(crate) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    pub(crate) fn is_locked(&self, block: usize) -> bool {
        self.running.values().any(|o| o.command.block == block)
    }
}

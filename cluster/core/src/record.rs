//! The part of a volume's record (the key `vol/V` in the store) that decides which node serves the
//! volume.

use arrayvec::ArrayVec;

use crate::ids::{Incarnation, MAX_REPLICAS, NodeId, ReplicaId};

/// A node in one incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    pub node: NodeId,
    pub incarnation: Incarnation,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaState {
    /// It has every acknowledged write.
    InSync,
    /// It lacks writes, or may lack them.
    Out,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replica {
    pub id: ReplicaId,
    pub node: NodeId,
    pub state: ReplicaState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Incremented by each take.
    pub epoch: u64,
    /// The last epoch that was served.
    pub serving: u64,
    /// The current holder; `None` after an orderly handover.
    pub holder: Option<Holder>,
    /// The node to which the last holder handed the volume over: it is the first to take it.
    pub next: Option<NodeId>,
    pub replicas: ArrayVec<Replica, MAX_REPLICAS>,
}

impl Record {
    pub fn in_sync(&self) -> impl Iterator<Item = &Replica> {
        self.replicas
            .iter()
            .filter(|replica| replica.state == ReplicaState::InSync)
    }

    pub fn is_in_sync(&self, id: ReplicaId) -> bool {
        self.in_sync().any(|replica| replica.id == id)
    }

    pub fn set(&mut self, id: ReplicaId, state: ReplicaState) {
        if let Some(replica) = self.replicas.iter_mut().find(|replica| replica.id == id) {
            replica.state = state;
        }
    }
}

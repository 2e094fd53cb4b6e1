//! Changes of the store: conditions that are compared, and one effect.
//!
//! A transaction sent twice, to two endpoints or after a missing answer, is executed once, because
//! its effect changes a revision that it compares. [`Effect::Renew`] is the exception: executed
//! twice, it renews twice. A late copy of a creation can run again after its key was deleted: the
//! new key has no owner, and is fenced.

use arrayvec::ArrayVec;

use crate::ids::{Incarnation, NodeId, Revision, VolumeId};
use crate::mutation::Mutation;
use crate::record::{Holder, Record};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// The node's lease key was created at this revision: the incarnation stands.
    Stands(NodeId, Incarnation),
    /// The node's lease key is absent, or belongs to another incarnation.
    Ended(NodeId, Incarnation),
    /// The node has no lease key.
    NoLease(NodeId),
    /// The node's lease key was last written at this revision.
    LeaseUnchanged(NodeId, Revision),
    /// The volume's record was last written at this revision.
    VolumeUnchanged(VolumeId, Revision),
}

/// The reason for the end of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The node was silent, or an operator says that it is off.
    Fence,
    /// The node's next process has another lease.
    Replace,
    /// The node gives its lease back.
    Release,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Creates the node's lease key.
    Create { node: NodeId },
    /// Writes the node's lease key with the number of the attempt.
    Renew { node: NodeId, number: u64 },
    /// Deletes the node's lease key, and appends to the log of decisions. The log entry is a write,
    /// so a store without space refuses a fence as it refuses renewals.
    Fence { node: NodeId, why: End },
    /// Writes the volume's record.
    Commit {
        volume: VolumeId,
        record: Box<Record>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    pub conditions: ArrayVec<Condition, 3>,
    pub effect: Effect,
}

impl Transaction {
    /// A node's first write. It has no incarnation yet.
    pub fn create(node: NodeId) -> Self {
        Self {
            conditions: ArrayVec::from_iter([Condition::NoLease(node)]),
            effect: Effect::Create { node },
        }
    }

    pub fn renew(me: Holder, number: u64) -> Self {
        let node = me.node;
        Self::by(me, Effect::Renew { node, number })
    }

    /// Ends an incarnation whose lease ran out without a renewal after `revision`.
    pub fn fence(me: Holder, node: NodeId, revision: Revision) -> Self {
        let why = End::Fence;
        let mut fence = Self::by(me, Effect::Fence { node, why });
        if !Mutation::FenceWithoutRevision.is_active() {
            fence.compare(Condition::LeaseUnchanged(node, revision));
        }
        fence
    }

    /// Ends a lease before this node has one of its own: that of its own dead process, or of
    /// another machine with its id that was silent for two leases.
    pub fn replace(node: NodeId, revision: Revision) -> Self {
        Self {
            conditions: ArrayVec::from_iter([Condition::LeaseUnchanged(node, revision)]),
            effect: Effect::Fence {
                node,
                why: End::Replace,
            },
        }
    }

    /// Gives back the lease of a node that ends, or of a dead process.
    pub fn release(ended: Holder) -> Self {
        Self::end(ended, End::Release)
    }

    /// Ends an incarnation by an operator's word.
    pub fn fence_off(off: Holder) -> Self {
        Self::end(off, End::Fence)
    }

    fn end(of: Holder, why: End) -> Self {
        let node = of.node;
        Self {
            conditions: ArrayVec::from_iter([Condition::Stands(node, of.incarnation)]),
            effect: Effect::Fence { node, why },
        }
    }

    /// Makes this node the holder, unless the previous holder's lease stands.
    pub fn take(
        me: Holder,
        volume: VolumeId,
        at: Revision,
        former: Option<Holder>,
        record: Record,
    ) -> Self {
        let mut take = Self::commit(me, volume, at, record);
        if let Some(former) = former
            && !Mutation::TakeWithoutFence.is_active()
        {
            take.compare(Condition::Ended(former.node, former.incarnation));
        }
        take
    }

    pub fn commit(me: Holder, volume: VolumeId, at: Revision, record: Record) -> Self {
        let record = Box::new(record);
        let mut commit = Self::by(me, Effect::Commit { volume, record });
        commit.compare(Condition::VolumeUnchanged(volume, at));
        commit
    }

    /// Each transaction of a node is valid only while its incarnation stands: the store refuses
    /// whatever a fenced incarnation still sends.
    fn by(me: Holder, effect: Effect) -> Self {
        let mut conditions = ArrayVec::new();
        if !Mutation::NoIncarnation.is_active() {
            conditions.push(Condition::Stands(me.node, me.incarnation));
        }
        Self { conditions, effect }
    }

    fn compare(&mut self, condition: Condition) {
        self.conditions.push(condition);
    }
}

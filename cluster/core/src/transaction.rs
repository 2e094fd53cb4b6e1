//! Transactions of a cluster's store (etcd): up to three conditions, and one effect. The store
//! executes the effect only if all conditions hold, atomically.
//!
//! A node sends a transaction again, perhaps to another etcd server, if it gets no answer. Still it
//! is executed once, because its effect changes a revision that it compares. There are two
//! exceptions. [`Effect::Renew`] executed twice renews twice. A late copy of a creation may be
//! executed after its lease key was deleted; no process renews that new key, so other nodes fence
//! it.

use arrayvec::ArrayVec;

use crate::ids::{Incarnation, NodeId, Revision, VolumeId};
use crate::mutation::Mutation;
use crate::record::{Holder, Record};

/// A comparison that the store makes before it executes the effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// The node's lease key was created at this revision: the incarnation has not ended.
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
    /// The node did not renew the lease in time, or an operator has confirmed that it is off.
    Fence,
    /// The next process of the node replaces the lease by its own.
    Replace,
    /// The node stops, and its lease is deleted in order, without a wait for its expiry.
    Release,
}

/// The change that a transaction makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Creates the node's lease key.
    Create { node: NodeId },
    /// Writes the node's lease key with the number of the attempt.
    Renew { node: NodeId, number: u64 },
    /// Deletes the node's lease key, and appends to the cluster's log of ended leases. The log
    /// entry makes it a write, so a store without space refuses a fence as it refuses renewals. A
    /// plain deletion would pass, and fence nodes that only cannot renew.
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
    /// Creates the lease of a node that has none.
    pub fn create(node: NodeId) -> Self {
        Self {
            conditions: ArrayVec::from_iter([Condition::NoLease(node)]),
            effect: Effect::Create { node },
        }
    }

    /// Renews the lease of `me`. `number` counts the attempts.
    pub fn renew(me: Holder, number: u64) -> Self {
        let node = me.node;
        Self::by(me, Effect::Renew { node, number })
    }

    /// Fences `node`, whose lease has expired: deletes its lease key, unless it was renewed after
    /// `revision`. `me` is the node that fences.
    pub fn fence(me: Holder, node: NodeId, revision: Revision) -> Self {
        let why = End::Fence;
        let mut fence = Self::by(me, Effect::Fence { node, why });
        if !Mutation::FenceWithoutRevision.is_active() {
            fence.compare(Condition::LeaseUnchanged(node, revision));
        }
        fence
    }

    /// Deletes the lease key with this node's id, before the node creates its own: the lease of its
    /// former process, or of another machine with its id that has not renewed it for two leases.
    pub fn replace(node: NodeId, revision: Revision) -> Self {
        Self {
            conditions: ArrayVec::from_iter([Condition::LeaseUnchanged(node, revision)]),
            effect: Effect::Fence {
                node,
                why: End::Replace,
            },
        }
    }

    /// Deletes the lease of a node that stops.
    pub fn release(ended: Holder) -> Self {
        Self::end(ended, End::Release)
    }

    /// Ends an incarnation because an operator has confirmed that the node is off.
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

    /// Writes the volume's record, in which `me` is the holder, like [`Transaction::commit`]. Also
    /// requires that the incarnation of the `former` holder, if there is one, has ended.
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

    /// Writes the volume's record, if it was last written at revision `at` and the incarnation of
    /// `me` has not ended.
    pub fn commit(me: Holder, volume: VolumeId, at: Revision, record: Record) -> Self {
        let record = Box::new(record);
        let mut commit = Self::by(me, Effect::Commit { volume, record });
        commit.compare(Condition::VolumeUnchanged(volume, at));
        commit
    }

    /// A transaction that is executed only while the incarnation of `me` has not ended. So the
    /// store refuses everything that a fenced node still sends.
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

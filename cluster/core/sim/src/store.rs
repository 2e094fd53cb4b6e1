//! The contents of the simulated etcd: the lease keys of nodes and the record of one volume, each
//! with its revision; conditional transactions; and the log of all changes, which watches follow.
//! Delays and failures are in `store_side`.

use nacre_cluster_core::{Condition, Effect, Incarnation, NodeId, Record, Revision, Transaction};
use std::collections::BTreeMap;

/// The lease key of a node: the revisions of its creation and of its last renewal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LeaseKey {
    pub created: Incarnation,
    pub modified: Revision,
}

/// A change of the log, as a watch reports it.
#[derive(Debug, Clone)]
pub(crate) enum StoreChange {
    /// A lease was created or renewed. `number`: of the renewal, 0 for a creation.
    Lease {
        node: NodeId,
        key: LeaseKey,
        number: u64,
    },
    LeaseEnd {
        node: NodeId,
        incarnation: Incarnation,
        at: Revision,
    },
    Record(Revision, Box<Record>),
}

/// The outcome of a transaction.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// The effect was executed, at this revision.
    Made(Revision),
    /// A condition does not hold.
    Refused {
        /// The sender's incarnation has ended.
        is_gone: bool,
        /// The volume's record, with its revision.
        found: Box<(Revision, Record)>,
    },
}

#[derive(Debug)]
pub(crate) struct Store {
    revision: u64,
    pub leases: BTreeMap<NodeId, LeaseKey>,
    /// Each lease key before its last change (`None`: it did not exist), for stale reads.
    former: BTreeMap<NodeId, Option<LeaseKey>>,
    record: (Revision, Record),
    pub log: Vec<StoreChange>,
}

impl Store {
    pub(crate) fn new(record: Record) -> Self {
        let record = (Revision(1), record);
        Self {
            revision: 1,
            leases: BTreeMap::new(),
            former: BTreeMap::new(),
            log: vec![StoreChange::Record(record.0, Box::new(record.1.clone()))],
            record,
        }
    }

    /// Reads the lease key of a node; if `stale`, as it was before its last change.
    pub(crate) fn read(&self, node: NodeId, stale: bool) -> Option<LeaseKey> {
        let former = self.former.get(&node).filter(|_| stale).copied();
        former.unwrap_or_else(|| self.leases.get(&node).copied())
    }

    pub(crate) fn record(&self) -> &(Revision, Record) {
        &self.record
    }

    fn holds(&self, condition: &Condition) -> bool {
        let lease = |node: &NodeId| self.leases.get(node);
        match condition {
            Condition::Stands(node, is) => lease(node).is_some_and(|key| key.created == *is),
            Condition::Ended(node, was) => lease(node).is_none_or(|key| key.created != *was),
            Condition::NoLease(node) => lease(node).is_none(),
            Condition::LeaseUnchanged(node, at) => {
                lease(node).is_some_and(|key| key.modified == *at)
            }
            Condition::VolumeUnchanged(_, at) => self.record.0 == *at,
        }
    }

    /// Compares the conditions, and executes the effect if all hold.
    pub(crate) fn execute(&mut self, transaction: Transaction) -> Outcome {
        let is_refused = !transaction.conditions.iter().all(|c| self.holds(c));
        // A write of an absent lease key creates it: nothing but the conditions prevents that.
        let is_void = match &transaction.effect {
            Effect::Fence { node, .. } => !self.leases.contains_key(node),
            _ => false,
        };
        if is_refused || is_void {
            let mut own = transaction.conditions.iter();
            let is_gone = own.any(|c| matches!(c, Condition::Stands(..)) && !self.holds(c));
            return Outcome::Refused {
                is_gone,
                found: Box::new(self.record.clone()),
            };
        }
        self.revision += 1;
        let at = Revision(self.revision);
        match transaction.effect {
            Effect::Create { node } => self.put_lease(node, at, 0),
            Effect::Renew { node, number } => self.put_lease(node, at, number),
            Effect::Fence { node, .. } => {
                if let Some(key) = self.leases.remove(&node) {
                    self.former.insert(node, Some(key));
                    let incarnation = key.created;
                    self.log.push(StoreChange::LeaseEnd {
                        node,
                        incarnation,
                        at,
                    });
                }
            }
            Effect::Commit { record, .. } => {
                self.record = (at, *record);
                self.log
                    .push(StoreChange::Record(at, Box::new(self.record.1.clone())));
            }
        }
        Outcome::Made(at)
    }

    fn put_lease(&mut self, node: NodeId, at: Revision, number: u64) {
        let former = self.leases.get(&node).copied();
        let key = LeaseKey {
            created: former.map_or(Incarnation(at.0), |key| key.created),
            modified: at,
        };
        self.former.insert(node, former);
        self.leases.insert(node, key);
        self.log.push(StoreChange::Lease { node, key, number });
    }
}

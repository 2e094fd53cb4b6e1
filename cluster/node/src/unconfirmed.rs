//! Finds the nodes on which hosts without permission may still use a volume.
//!
//! ```text
//!   operator   pub/V without the host, at revision r
//!   node N     sees r ▸ ends the host's connections ▸ lease/N says that r is in effect
//!   here       all leases say so, and the holder has a lease ▸ the host is cut off
//! ```
//!
//! A node without a lease was fenced, and serves nothing that another node has opened. The holder
//! in the record is the exception: no node took the volume, and the holder may serve as long as its
//! replicas confirm it. So may the former holder of a volume that was taken and is not open yet:
//! the gates of the replicas still have its key. A node with a new lease takes a volume only after
//! it has listed the publications again.

use nacre_cluster_core::{Holder, NodeId, Record, VolumeId};
use nacre_cluster_etcd::{BehindCause, KeyValue, LeaseKey};

use crate::error::Error;
use crate::operator::Operator;
use crate::record;
use crate::seen_keys::SeenDeletion;

/// A node on which a host without permission may still use the volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unconfirmed {
    pub node: NodeId,
    pub doubt: Doubt,
    /// The reason for [`Doubt::NotInEffect`] that the node has written to its lease key, if any.
    pub cause: Option<BehindCause>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The node has a lease, and has not said that the publication is in effect.
    NotInEffect,
    /// The node does not say which publications are in effect: it has just started, has many
    /// volumes to change, or runs an earlier version.
    NotKnown,
    /// The node serves the volume without a lease, as long as its replicas confirm it.
    ServesWithoutLease,
    /// The volume was taken and not opened since: its former holder, which is not known, may still
    /// serve it. The node is the present holder or, without one, the node of the first replica.
    NotOpened,
}

impl Unconfirmed {
    /// The nodes that have not confirmed the present publication of the volume, or its deletion. If
    /// the list is empty, a host that the publication does not name has no connection to any node,
    /// and no command in flight.
    pub async fn all(operator: &Operator, volume: VolumeId) -> Result<Vec<Self>, Error> {
        let prefix = &operator.prefix;
        // In this order: a node that confirms in between is not missed, and one that takes the
        // volume in between has seen the publication.
        let published = operator.get(&prefix.publication(volume)).await?;
        let changed = match published {
            Some(kv) => kv.mod_revision,
            None => {
                let note = operator.get(&prefix.unpublished()).await?;
                let note = note.map_or(0, |kv| kv.mod_revision);
                let seen = operator.seen_keys();
                deleted_until(note, seen.map(|seen| seen.unpublished(volume.0)))
            }
        };
        let (leases, key) = (operator.leases(), prefix.leases());
        let decode = |kv: &KeyValue| leases.decode(kv).map_err(Error::at(&key));
        let leases = operator.list(&key).await?;
        let leases: Vec<LeaseKey> = leases.iter().map(decode).collect::<Result<_, _>>()?;
        let key = prefix.core_volume(volume);
        let record = operator.get(&key).await?;
        let record = record.map(|kv| record::decode(&kv.value).map_err(|why| why.at(&key)));
        let record = record.transpose()?.map(|(_, record)| record);
        Ok(doubts(volume, changed, &leases, record.as_ref()))
    }
}

/// The revision up to which nodes must have seen the publications, if the volume has none. An
/// earlier version deletes one without a note: then it counts that this node has seen the deletion.
fn deleted_until(note: i64, seen: Option<SeenDeletion>) -> i64 {
    match seen {
        Some(SeenDeletion::NotYet) => i64::MAX,
        Some(SeenDeletion::Until(revision)) => note.max(revision),
        // No node, so no watch.
        None => note,
    }
}

fn doubts(
    volume: VolumeId,
    changed: i64,
    leases: &[LeaseKey],
    record: Option<&Record>,
) -> Vec<Unconfirmed> {
    let doubt = |lease: &LeaseKey| match &lease.in_effect {
        None => Some(Doubt::NotKnown),
        Some(known) if known.revision < changed || known.behind.contains(&volume.0) => {
            Some(Doubt::NotInEffect)
        }
        Some(_) => None,
    };
    let of_lease = |lease: &LeaseKey| {
        let node = lease.node;
        let known = lease.in_effect.as_ref();
        doubt(lease).map(|doubt| Unconfirmed {
            node,
            doubt,
            cause: known.and_then(|known| known.causes.get(&volume.0).cloned()),
        })
    };
    let mut found: Vec<Unconfirmed> = leases.iter().filter_map(of_lease).collect();
    let Some(record) = record else { return found };
    let stands = |holder: &Holder| {
        let mut leases = leases.iter();
        leases.any(|one| (one.node, one.incarnation) == (holder.node, holder.incarnation))
    };
    if let Some(holder) = record.holder.filter(|holder| !stands(holder)) {
        found.push(Unconfirmed {
            node: holder.node,
            doubt: Doubt::ServesWithoutLease,
            cause: None,
        });
    } else if record.serving < record.epoch {
        let replica = record.replicas.first().map(|replica| replica.node);
        let node = record.holder.map(|holder| holder.node).or(replica);
        found.extend(node.map(|node| Unconfirmed {
            node,
            doubt: Doubt::NotOpened,
            cause: None,
        }));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nacre_cluster_core::record::{Replica, ReplicaState};
    use nacre_cluster_core::{Incarnation, ReplicaId};
    use nacre_cluster_etcd::InEffect;
    use uuid::Uuid;

    use super::*;
    use crate::testing;

    fn lease(number: u128, in_effect: Option<(i64, &[u128])>) -> LeaseKey {
        let in_effect = in_effect.map(|(revision, behind)| InEffect {
            revision,
            behind: behind.iter().map(|id| Uuid::from_u128(*id)).collect(),
            causes: BTreeMap::new(),
        });
        testing::lease(number, in_effect)
    }

    fn record(epoch: u64, serving: u64, holder: Option<(u128, u64)>) -> Record {
        let node = |number| NodeId(Uuid::from_u128(number));
        let holder = holder.map(|(number, incarnation)| Holder {
            node: node(number),
            incarnation: Incarnation(incarnation),
        });
        let replica = Replica {
            id: ReplicaId(Uuid::from_u128(70)),
            node: node(5),
            state: ReplicaState::InSync,
        };
        Record {
            epoch,
            serving,
            holder,
            next: None,
            replicas: [replica].into_iter().collect(),
        }
    }

    /// Goal: a host counts as cut off only when each node with a lease has confirmed this
    /// publication. The holder has a lease, and has opened the volume. Method: leases and records
    /// that lack one of the facts.
    #[test]
    fn each_node_with_a_lease_confirms() {
        let volume = VolumeId(Uuid::from_u128(7));
        let found = |leases: &[LeaseKey], record: Option<Record>| {
            let found = doubts(volume, 50, leases, record.as_ref()).into_iter();
            let short = found.map(|one| (one.node.0.as_u128(), one.doubt));
            short.collect::<Vec<_>>()
        };
        let good = [lease(1, Some((50, &[8])))];
        let held = |holder| Some(record(4, 4, Some(holder)));
        assert_eq!(found(&good, held((1, 1))), []);
        assert_eq!(
            found(&good, Some(record(4, 4, None))),
            [],
            "closed in order"
        );
        assert_eq!(found(&good, Some(record(0, 0, None))), [], "never opened");
        assert_eq!(found(&good, None), [], "deleted");
        let late = lease(2, Some((49, &[])));
        let behind = lease(3, Some((60, &[8, 7])));
        let former = lease(4, None);
        let all = [good[0].clone(), late, behind, former];
        let expected = [
            (2, Doubt::NotInEffect),
            (3, Doubt::NotInEffect),
            (4, Doubt::NotKnown),
        ];
        assert_eq!(found(&all, held((1, 1))), expected);
        // A node that is down, whose volume no node took; and the lease of a later incarnation.
        let without = |number| [(number, Doubt::ServesWithoutLease)];
        assert_eq!(found(&good, held((9, 3))), without(9));
        assert_eq!(found(&good, held((1, 0))), without(1));
        // Taken from a node that is down, and not opened: its replica is not reached.
        let taken = record(5, 4, Some((1, 1)));
        assert_eq!(found(&good, Some(taken)), [(1, Doubt::NotOpened)]);
        let given_up = record(5, 4, None);
        assert_eq!(found(&good, Some(given_up)), [(5, Doubt::NotOpened)]);
    }

    /// Goal: the end of a publication is not confirmed by nodes that have not seen it, also if an
    /// earlier version ended it, which notes nothing in etcd. Method: this node saw the deletion,
    /// or has yet to see it.
    #[test]
    fn an_end_by_an_earlier_version() {
        let volume = VolumeId(Uuid::from_u128(7));
        let leases = [lease(1, Some((61, &[]))), lease(2, Some((59, &[])))];
        let late = |changed| {
            let found = doubts(volume, changed, &leases, None).into_iter();
            found.map(|one| one.node.0.as_u128()).collect::<Vec<_>>()
        };
        let until = |revision| Some(SeenDeletion::Until(revision));
        assert_eq!(late(deleted_until(0, until(60))), [2], "without a note");
        assert_eq!(
            late(deleted_until(50, until(60))),
            [2],
            "the note of another one"
        );
        assert_eq!(
            late(deleted_until(60, until(0))),
            [2],
            "seen before the start"
        );
        let not_yet = deleted_until(50, Some(SeenDeletion::NotYet));
        assert_eq!(late(not_yet), [1, 2], "nothing is known yet");
        assert_eq!(late(deleted_until(59, until(59))), [0; 0]);
        assert_eq!(late(deleted_until(60, None)), [2], "of no node");
    }
}

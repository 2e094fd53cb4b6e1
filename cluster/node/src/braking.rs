//! Sets and releases the brake ([`BrakeKey`]): while it is set, no lost replica is replaced. The
//! node with the lowest id that has a lease sets it. It ends when all nodes for which it was set
//! are back or removed, or when an operator releases it. The transaction that places a replacement
//! compares the key.

use std::collections::BTreeMap;

use nacre_cluster_core::storm::{Loss, SeenNode, Storm};
use nacre_cluster_core::{BootTime, Incarnation, NodeId};
use nacre_cluster_etcd::Txn;
use uuid::Uuid;

use crate::brake::{Brake, BrakeKey};
use crate::error::Error;
use crate::keys::{FORMAT, NodeKey, bytes, decode};
use crate::operator::{ATTEMPTS, Operator};

/// The label whose value is the zone of a node.
pub const ZONE: &str = "zone";

/// The change of the brake by [`BrakeKey::watch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Looked {
    Nothing,
    Braked(Brake),
    /// All nodes for which it was set are back, or removed.
    Released(Brake),
}

impl BrakeKey {
    /// The key and its revision; an empty one and 0 if etcd has none.
    pub async fn read(operator: &Operator) -> Result<(Self, i64), Error> {
        let key = operator.prefix.brake();
        match operator.get(&key).await? {
            Some(kv) => Ok((decode(&kv)?, kv.mod_revision)),
            None => Ok((Self::default(), 0)),
        }
    }

    /// False: the key has changed since it was read at `revision`.
    async fn store(mut self, operator: &Operator, revision: i64) -> Result<bool, Error> {
        let key = operator.prefix.brake();
        self.v = FORMAT;
        let txn = Txn::default()
            .if_modified(&key, revision)
            .put(&key, bytes(&self));
        Ok(operator.transact(&key, txn).await?.is_made)
    }

    /// Sets the brake when many nodes have lost their leases at once, and ends it when all of them
    /// are back or removed. Of all nodes that call it, the live one with the lowest id acts. Two at
    /// once do no harm: each change compares the key.
    pub async fn watch(
        operator: &Operator,
        me: NodeId,
        storm: &mut Storm,
        nodes: &BTreeMap<NodeId, NodeKey>,
        standing: &BTreeMap<NodeId, Incarnation>,
        now: BootTime,
    ) -> Result<Looked, Error> {
        let is_first = standing.keys().next() == Some(&me);
        let (mut stored, revision) = if is_first {
            Self::read(operator).await?
        } else {
            (Self::default(), 0)
        };
        let seen = nodes.iter().map(|(node, key)| SeenNode {
            node: *node,
            zone: key.description.labels.get(ZONE).map(String::as_str),
            is_live: standing.contains_key(node),
            is_expected: key.is_left() || stored.excused.contains(&node.0),
        });
        let loss = storm.update(now, &seen.collect::<Vec<_>>());
        if !is_first {
            return Ok(Looked::Nothing);
        }
        let before = stored.clone();
        let is_away = |node: &Uuid| {
            nodes.contains_key(&NodeId(*node)) && !standing.contains_key(&NodeId(*node))
        };
        stored.excused.retain(is_away);
        let is_over = |brake: &mut Brake| !brake.gone.iter().any(is_away);
        let mut looked = match stored.brake.take_if(is_over) {
            Some(brake) => Looked::Released(brake),
            None => Looked::Nothing,
        };
        if let Some(Loss { zone, gone, of }) = loss.filter(|_| stored.brake.is_none()) {
            let gone = gone.into_iter().map(|node| node.0).collect();
            let brake = Brake { zone, gone, of };
            stored.brake = Some(brake.clone());
            looked = Looked::Braked(brake);
        }
        // Not made: another node or the operator was faster, and the next look shows it.
        if stored == before || !stored.store(operator, revision).await? {
            return Ok(Looked::Nothing);
        }
        Ok(looked)
    }

    /// Releases the brake, and returns it; `None`: no brake was set. Until they return, the nodes
    /// that have no lease now set no other brake.
    pub async fn release(operator: &Operator) -> Result<Option<Brake>, Error> {
        for _ in 0..ATTEMPTS {
            let (mut stored, revision) = Self::read(operator).await?;
            let Some(brake) = stored.brake.take() else {
                return Ok(None);
            };
            let described = operator.described().await?;
            let gone = described.iter().filter(|(_, _, has_lease)| !has_lease);
            stored.excused = gone.map(|(node, ..)| node.0).collect();
            if stored.store(operator, revision).await? {
                return Ok(Some(brake));
            }
        }
        let key = operator.prefix.brake();
        Err(Error::Contended { key })
    }
}

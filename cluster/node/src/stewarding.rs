//! Sets and releases the brake on replacements. The live node with the lowest id sets it, an
//! operator releases it, and the transaction of each replacement compares it.

use std::collections::BTreeMap;

use nacre_cluster_core::storm::{Loss, Seen, Storm};
use nacre_cluster_core::{BootTime, Incarnation, NodeId};
use nacre_cluster_etcd::Txn;
use uuid::Uuid;

use crate::brake::{Brake, Steward};
use crate::error::Error;
use crate::keys::{FORMAT, NodeKey, bytes, decode};
use crate::operator::{ATTEMPTS, Operator};

/// The label whose value is the zone of a node.
pub const ZONE: &str = "zone";

/// The part of a look at the cluster that changed `steward`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Looked {
    Nothing,
    Braked(Brake),
}

impl Operator {
    /// The key and its revision; 0: there is none.
    pub async fn steward(&self) -> Result<(Steward, i64), Error> {
        let key = self.prefix.steward();
        match self.get(&key).await? {
            Some(kv) => Ok((decode(&kv)?, kv.mod_revision)),
            None => Ok((Steward::default(), 0)),
        }
    }

    async fn set_steward(&self, mut steward: Steward, revision: i64) -> Result<bool, Error> {
        let key = self.prefix.steward();
        steward.v = FORMAT;
        let txn = Txn::default()
            .if_modified(&key, revision)
            .put(&key, bytes(&steward));
        Ok(self.transact(&key, txn).await?.is_made)
    }

    /// Looks whether many nodes are gone, and sets the brake then. Of all nodes that call it, the
    /// live one with the lowest id acts. Two at once do no harm: each change compares the key.
    pub async fn watch_for_storms(
        &self,
        me: NodeId,
        storm: &mut Storm,
        nodes: &BTreeMap<NodeId, NodeKey>,
        standing: &BTreeMap<NodeId, Incarnation>,
        now: BootTime,
    ) -> Result<Looked, Error> {
        let is_first = standing.keys().next() == Some(&me);
        let any_gone = nodes.keys().any(|node| !standing.contains_key(node));
        let (mut steward, revision) = if is_first && any_gone {
            self.steward().await?
        } else {
            (Steward::default(), 0)
        };
        let seen = nodes.iter().map(|(node, key)| Seen {
            node: *node,
            zone: key.description.labels.get(ZONE).map(String::as_str),
            is_live: standing.contains_key(node),
            is_expected: key.is_left() || steward.excused.contains(&node.0),
        });
        let loss = storm.look(now, &seen.collect::<Vec<_>>());
        if !is_first {
            return Ok(Looked::Nothing);
        }
        let former = steward.excused.len();
        let is_away = |node: &Uuid| {
            nodes.contains_key(&NodeId(*node)) && !standing.contains_key(&NodeId(*node))
        };
        steward.excused.retain(is_away);
        let loss = loss.filter(|_| steward.brake.is_none());
        if loss.is_none() && steward.excused.len() == former {
            return Ok(Looked::Nothing);
        }
        let brake = loss.map(|Loss { zone, gone, of }| Brake {
            zone,
            gone: gone.into_iter().map(|node| node.0).collect(),
            of,
        });
        let is_set = brake.is_some();
        if is_set {
            steward.brake.clone_from(&brake);
        }
        // Not made: another node or the operator was faster, and the next look shows it.
        let is_made = self.set_steward(steward, revision).await?;
        Ok(match brake.filter(|_| is_made) {
            Some(brake) => Looked::Braked(brake),
            None => Looked::Nothing,
        })
    }

    /// Releases the brake. The nodes that are gone now are excused until they return. `None`: no
    /// brake was set.
    pub async fn release_brake(&self) -> Result<Option<Brake>, Error> {
        for _ in 0..ATTEMPTS {
            let (mut steward, revision) = self.steward().await?;
            let Some(brake) = steward.brake.take() else {
                return Ok(None);
            };
            let described = self.described().await?;
            let gone = described.iter().filter(|(_, _, has_lease)| !has_lease);
            steward.excused = gone.map(|(node, ..)| node.0).collect();
            if self.set_steward(steward, revision).await? {
                return Ok(Some(brake));
            }
        }
        let key = self.prefix.steward();
        Err(Error::Contended { key })
    }

    /// Marks a node for eviction, or ends that.
    pub async fn set_evict(&self, node: NodeId, evict: bool) -> Result<(), Error> {
        let change = |key: &mut NodeKey| key.evict = evict;
        crate::keys::change(&self.client, &self.prefix, node, change).await
    }
}

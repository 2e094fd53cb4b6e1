//! The leases of nodes as keys of etcd: reads, watches, and the transactions of
//! [`nacre_cluster_core`] in etcd's form.
//!
//! A lease is the key `lease/NODE`: its creation revision is the incarnation, and each renewal
//! writes it again. etcd's own leases are not used: a node's lease ends when a node or operator
//! deletes its key.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use nacre_cluster_core::{
    Condition, Effect, End, Incarnation, NodeId, Record, Revision, Transaction,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::client::{Client, Copies, KeyValue, Txn, TxnAnswer};
use crate::error::Error;
use crate::key_watch::{Update, Watch};
use crate::keys::Prefix;

/// Version of the leases' format.
const FORMAT: u64 = 1;

/// A node's lease key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseKey {
    pub node: NodeId,
    pub incarnation: Incarnation,
    /// The revision of the last renewal.
    pub revision: Revision,
    /// The number of that renewal.
    pub number: u64,
    /// The process that wrote it.
    pub process: Uuid,
    /// The id of that process's machine; `None`: the machine has none, or the process did not say.
    pub machine: Option<Uuid>,
    /// The publications that the node has put into effect; `None`: not known.
    pub in_effect: Option<InEffect>,
    /// Names of functions that later versions added, and that the process has.
    pub features: Vec<String>,
}

/// The publications (lists of a volume's allowed hosts) that a node has put into effect: hosts that
/// they do not name have no connection to the node, and no command in flight.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InEffect {
    /// Every publication up to this revision of etcd is in effect, except those in `behind`.
    pub revision: i64,
    /// The volumes whose publications are not in effect yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub behind: Vec<Uuid>,
    /// The causes of some of these, for operators. Earlier versions write none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub causes: BTreeMap<Uuid, BehindCause>,
}

/// The reason why the publication of a volume is not in effect on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BehindCause {
    /// The time at which the node saw the publication, in seconds since 1970.
    pub since: u64,
    /// The error of the last attempt; `None`: the first attempt has not ended. Keep it short: each
    /// renewal of the lease writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// The outcome of a transaction.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// The effect was executed, at this revision.
    Made(Revision),
    /// A condition did not hold.
    Refused {
        /// The sender's incarnation has ended.
        is_gone: bool,
        /// The volume's record, if the transaction was a commit.
        record: Option<KeyValue>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
struct NodeValue {
    v: u64,
    n: u64,
    process: Uuid,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    machine: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    in_effect: Option<InEffect>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    features: Vec<String>,
}

/// Executes transactions for one process of one node.
#[derive(Debug)]
pub struct NodeLeases {
    client: Arc<Client>,
    prefix: Prefix,
    /// Unique for each start: shows the process whether a found lease key is its own.
    process: Uuid,
    machine: Option<Uuid>,
    in_effect: Mutex<Option<InEffect>>,
    features: Vec<String>,
}

impl NodeLeases {
    /// For a process that has no lease of its own: it gets a new id, and no machine.
    pub fn new(client: Arc<Client>, prefix: Prefix) -> Self {
        Self::of_process(client, prefix, Uuid::new_v4(), None)
    }

    /// For a process with this id, which must be new at each start, on this machine.
    pub fn of_process(
        client: Arc<Client>,
        prefix: Prefix,
        process: Uuid,
        machine: Option<Uuid>,
    ) -> Self {
        Self {
            client,
            prefix,
            process,
            machine,
            in_effect: Mutex::default(),
            features: Vec::new(),
        }
    }

    /// Sets [`LeaseKey::features`] for each lease key that this process writes.
    #[must_use]
    pub fn with_features(self, features: Vec<String>) -> Self {
        Self { features, ..self }
    }

    /// Sets [`LeaseKey::in_effect`] for later renewals. The creation of a lease key never has it.
    pub fn set_in_effect(&self, in_effect: Option<InEffect>) {
        *self.in_effect.lock() = in_effect;
    }

    pub fn process(&self) -> Uuid {
        self.process
    }

    /// Reads the lease key of a node; `None`: the node has no lease.
    pub async fn read(&self, node: NodeId) -> Result<Option<LeaseKey>, Error> {
        let found = self.client.get(&self.prefix.lease(node)).await?;
        found.map(|kv| self.decode(&kv)).transpose()
    }

    /// Reads all leases, and opens a watch of every later change.
    pub async fn list_and_watch(&self) -> Result<(Vec<LeaseKey>, Watch), Error> {
        let leases = self.prefix.leases();
        let page = self.client.list(&leases).await?;
        let keys: Result<Vec<LeaseKey>, Error> =
            page.keys.iter().map(|kv| self.decode(kv)).collect();
        let watch = Watch::new(Arc::clone(&self.client), &leases, page.revision + 1);
        Ok((keys?, watch))
    }

    /// Decodes an update of the watch: the node, and its lease key, or `None` if the lease has
    /// ended. An outer `None`: list the leases again, as the watch has missed changes, or etcd has
    /// other data than before.
    pub fn changed(&self, update: Update) -> Result<Option<(NodeId, Option<LeaseKey>)>, Error> {
        match update {
            Update::Put(kv) => {
                let key = self.decode(&kv)?;
                Ok(Some((key.node, Some(key))))
            }
            Update::Deleted { key, .. } => Ok(Some((self.node_of(&key)?, None))),
            Update::Compacted { .. } | Update::OtherStore { .. } => Ok(None),
        }
    }

    /// Executes a transaction in etcd. `encode` serializes the record of [`Effect::Commit`].
    pub async fn execute(
        &self,
        transaction: &Transaction,
        encode: impl Fn(&Record) -> Vec<u8>,
    ) -> Result<Outcome, Error> {
        let mut txn = Txn::default();
        for condition in &transaction.conditions {
            txn = self.compare(txn, condition);
        }
        // A late copy of a creation could create the key again after it was deleted.
        let mut copies = Copies::Several;
        let record = match &transaction.effect {
            Effect::Create { node } => {
                copies = Copies::One;
                txn = self.put(txn, *node, 0, None);
                None
            }
            Effect::Renew { node, number } => {
                let in_effect = self.in_effect.lock().clone();
                txn = self.put(txn, *node, *number, in_effect);
                None
            }
            Effect::Fence { node, why } => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                let now = now.unwrap_or_default().as_millis();
                let what = match why {
                    End::Fence => "fence",
                    End::Replace => "replace",
                    End::Release => "release",
                };
                let line = serde_json::json!({ "v": FORMAT, "what": what, "node": node.0 });
                // A write beside the deletion: without space, etcd refuses both.
                let log = self.prefix.log(now, Uuid::new_v4());
                let line = line.to_string().into_bytes();
                txn = txn.delete(&self.prefix.lease(*node)).put(&log, line);
                None
            }
            Effect::Commit { volume, record } => {
                let key = self.prefix.core_volume(*volume);
                txn = txn.put(&key, encode(record));
                Some(key)
            }
        };
        let own = transaction.conditions.iter().find_map(|c| match c {
            Condition::Stands(node, incarnation) => Some((*node, *incarnation)),
            _ => None,
        });
        let own_key = own.map(|(node, _)| self.prefix.lease(node));
        for key in own_key.iter().chain(&record) {
            txn = txn.read_on_failure(key);
        }
        let answer = self.client.transact(txn, copies).await?;
        if answer.is_made {
            return Ok(Outcome::Made(Revision(answer.revision as u64)));
        }
        Ok(refused(answer, own.map(|(_, incarnation)| incarnation)))
    }

    fn compare(&self, txn: Txn, condition: &Condition) -> Txn {
        let lease = |node: &NodeId| self.prefix.lease(*node);
        match condition {
            Condition::Stands(node, is) => txn.if_created(&lease(node), is.0 as i64),
            // A holder of a time before the cluster: no lease has this incarnation.
            Condition::Ended(_, Incarnation(0)) => txn,
            Condition::Ended(node, was) => txn.if_not_created(&lease(node), was.0 as i64),
            Condition::NoLease(node) => txn.if_created(&lease(node), 0),
            Condition::LeaseUnchanged(node, at) => txn.if_modified(&lease(node), at.0 as i64),
            Condition::VolumeUnchanged(volume, at) => {
                txn.if_modified(&self.prefix.core_volume(*volume), at.0 as i64)
            }
        }
    }

    fn put(&self, txn: Txn, node: NodeId, number: u64, in_effect: Option<InEffect>) -> Txn {
        let value = NodeValue {
            v: FORMAT,
            n: number,
            process: self.process,
            machine: self.machine,
            in_effect,
            features: self.features.clone(),
        };
        let value = serde_json::to_vec(&value).expect("plain data");
        txn.put(&self.prefix.lease(node), value)
    }

    fn node_of(&self, key: &[u8]) -> Result<NodeId, Error> {
        self.prefix.node_of(key).ok_or_else(|| Error::Damaged {
            key: String::from_utf8_lossy(key).into_owned(),
            what: "not the key of a node's lease".to_owned(),
        })
    }

    /// Decodes a lease key. Fails if it is malformed, or has a later format.
    pub fn decode(&self, kv: &KeyValue) -> Result<LeaseKey, Error> {
        let node = self.node_of(&kv.key)?;
        let damaged = |error: serde_json::Error| Error::Damaged {
            key: self.prefix.lease(node),
            what: error.to_string(),
        };
        let value: NodeValue = serde_json::from_slice(&kv.value).map_err(damaged)?;
        if value.v > FORMAT {
            return Err(Error::Newer {
                key: self.prefix.lease(node),
                found: value.v,
                known: FORMAT,
            });
        }
        Ok(LeaseKey {
            node,
            incarnation: Incarnation(kv.create_revision as u64),
            revision: Revision(kv.mod_revision as u64),
            number: value.n,
            process: value.process,
            machine: value.machine,
            in_effect: value.in_effect,
            features: value.features,
        })
    }
}

fn refused(answer: TxnAnswer, own: Option<Incarnation>) -> Outcome {
    let mut found = answer.found.into_iter();
    let is_gone = own.is_some_and(|own| {
        let key = found.next().flatten();
        key.is_none_or(|key| key.create_revision as u64 != own.0)
    });
    let record = found.next().flatten();
    Outcome::Refused { is_gone, record }
}

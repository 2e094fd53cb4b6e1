//! The keys `meta` (the cluster) and `node/N` (a node) in etcd, as JSON. A change keeps fields that
//! this version does not know.

use std::collections::BTreeMap;
use std::time::Duration;

use nacre_cluster_core::ids::MAX_NODES;
use nacre_cluster_core::{Incarnation, NodeId, Timing};
use nacre_cluster_etcd::{Client, Copies, KeyValue, Prefix, Txn};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::error::{Error, damaged};

/// Version of these formats.
pub(crate) const FORMAT: u64 = 1;
/// Attempts against other changes of the same key.
const ATTEMPTS: usize = 8;

/// The value of the key `meta`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    v: u64,
    pub id: Uuid,
    pub name: String,
    pub lease_ms: u64,
    #[serde(default)]
    pub features: Vec<String>,
    /// The id of the restore that wrote the keys into this etcd; `None`: no restore did. A change
    /// shows running nodes that this etcd counts revisions from the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restored: Option<Uuid>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl Cluster {
    /// The id of the etcd with these keys: that of the restore, or else of the cluster.
    pub fn store(&self) -> Uuid {
        self.restored.unwrap_or(self.id)
    }

    pub fn new(name: &str, lease: Duration) -> Result<Self, Error> {
        Timing::new(lease)?;
        Ok(Self {
            v: FORMAT,
            id: Uuid::new_v4(),
            name: name.to_owned(),
            lease_ms: lease.as_millis() as u64,
            features: Vec::new(),
            restored: None,
            rest: Map::new(),
        })
    }

    pub fn timing(&self) -> Result<Timing, Error> {
        Ok(Timing::new(Duration::from_millis(self.lease_ms))?)
    }

    pub async fn read(client: &Client, prefix: &Prefix) -> Result<Self, Error> {
        let key = prefix.meta();
        let found = client.get(&key).await.map_err(Error::at(&key))?;
        match found {
            Some(kv) => decode(&kv),
            None => Err(Error::NoCluster { key }),
        }
    }

    /// Creates the cluster in etcd. Fails if another cluster or a daemon uses the prefix, or if a
    /// restore of it has not ended.
    pub async fn init(&self, client: &Client, prefix: &Prefix) -> Result<(), Error> {
        client
            .check_version()
            .await
            .map_err(Error::at(&prefix.meta()))?;
        let (key, owner, restoring) = (prefix.meta(), prefix.owner(), prefix.restoring());
        let txn = Txn::default()
            .if_created(&key, 0)
            .if_created(&owner, 0)
            .if_created(&restoring, 0)
            .put(&key, bytes(self))
            .read_on_failure(&key)
            .read_on_failure(&restoring);
        let answer = client.transact(txn, Copies::Several).await;
        let answer = answer.map_err(Error::at(&key))?;
        if answer.is_made {
            return Ok(());
        }
        let mut found = answer.found.into_iter();
        match found.next().flatten() {
            Some(kv) => {
                let found: Self = decode(&kv)?;
                if found.id == self.id {
                    // An earlier copy of the transaction was made.
                    Ok(())
                } else {
                    Err(Error::ClusterExists { key, id: found.id })
                }
            }
            None if found.next().flatten().is_some() => Err(Error::Restoring { key: restoring }),
            None => Err(Error::Owned { key: owner }),
        }
    }
}

/// An address at which hosts, or other nodes, reach the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Portal {
    pub trtype: String,
    pub traddr: String,
    pub trsvcid: String,
    /// The use of TLS by hosts: `off`, `allow` or `require`, as `tls` of a listener. `None`: an
    /// address for other nodes, or of a node whose version did not write this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<String>,
}

/// A node as its daemon describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    pub name: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub machine: Option<Uuid>,
    #[serde(default)]
    pub hostnqn: String,
    #[serde(default)]
    pub portals: Vec<Portal>,
    #[serde(default, rename = "member_portals")]
    pub replica_portals: Vec<Portal>,
    #[serde(default)]
    pub version: String,
    /// Names of functions that later versions added. After a downgrade of the node they may be too
    /// many; those in the node's lease key are of the process that runs now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
}

const NODE_NQN: &str = "nqn.2025-01.io.nacre:node:";

/// The NQN of the subsystem through which other nodes reach all replicas of a node.
pub fn node_nqn(node: NodeId) -> String {
    format!("{NODE_NQN}{}", node.0)
}

/// True if the NQN has the prefix of each [`node_nqn`].
pub fn is_node_nqn(nqn: &str) -> bool {
    nqn.starts_with(NODE_NQN)
}

/// The value of the key `node/N`: the daemon writes the description, and operators the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeKey {
    v: u64,
    #[serde(flatten)]
    pub description: Description,
    /// The node gets no new replicas, and takes volumes after all other nodes.
    #[serde(default)]
    pub cordon: bool,
    /// Cordoned, and its volumes are handed over.
    #[serde(default)]
    pub drain: bool,
    /// Drained, and its replicas are moved to other nodes.
    #[serde(default)]
    pub evict: bool,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl NodeKey {
    pub(crate) fn decode(kv: &KeyValue) -> Result<Self, Error> {
        decode(kv)
    }

    /// True if the node is drained or evicted: other nodes take its volumes.
    pub fn is_left(&self) -> bool {
        self.drain || self.evict
    }

    /// True if the node is cordoned, drained or evicted.
    pub fn is_avoided(&self) -> bool {
        self.cordon || self.is_left()
    }
}

/// The revision at which the cluster has room for this node: it is described, or fewer than
/// [`MAX_NODES`] are.
pub(crate) async fn has_room(client: &Client, prefix: &Prefix, node: NodeId) -> Result<i64, Error> {
    let (key, nodes) = (prefix.node(node), prefix.nodes());
    let (count, revision) = client.count(&nodes).await.map_err(Error::at(&nodes))?;
    if count >= MAX_NODES {
        let most = MAX_NODES;
        let known = client.get(&key).await.map_err(Error::at(&key))?;
        known.ok_or(Error::TooManyNodes { key, most })?;
    }
    Ok(revision)
}

/// Changes the description of a node while its incarnation stands. False: the incarnation is gone.
/// Fails with [`Error::TooManyNodes`] if the node has none, and so many others have.
pub(crate) async fn describe(
    client: &Client,
    prefix: &Prefix,
    node: NodeId,
    incarnation: Incarnation,
    description: &Description,
) -> Result<bool, Error> {
    let key = prefix.node(node);
    for _ in 0..ATTEMPTS {
        let found = client.get(&key).await.map_err(Error::at(&key))?;
        let mut value = found.as_ref().map(NodeKey::decode).transpose()?;
        let value = value.get_or_insert_default();
        value.v = FORMAT;
        value.description = description.clone();
        let revision = found.map_or(0, |kv| kv.mod_revision);
        let lease = prefix.lease(node);
        let mut txn = Txn::default()
            .if_modified(&key, revision)
            .if_created(&lease, incarnation.0 as i64)
            .put(&key, bytes(value))
            .read_on_failure(&lease);
        if revision == 0 {
            // Of several nodes that join at once, one is the last.
            let counted = has_room(client, prefix, node).await?;
            txn = txn.if_none_created_after(&prefix.nodes(), counted);
        }
        let answer = client.transact(txn, Copies::Several).await;
        let answer = answer.map_err(Error::at(&key))?;
        let lease = answer.found.into_iter().next().flatten();
        if answer.is_made {
            return Ok(true);
        }
        if lease.is_none_or(|kv| kv.create_revision as u64 != incarnation.0) {
            return Ok(false);
        }
        // An operator changed it, another node was added, or an earlier copy of the transaction was
        // made.
    }
    Err(Error::Contended { key })
}

/// Changes a node's key for an operator.
pub(crate) async fn change(
    client: &Client,
    prefix: &Prefix,
    node: NodeId,
    change: impl Fn(&mut NodeKey),
) -> Result<(), Error> {
    let key = prefix.node(node);
    for _ in 0..ATTEMPTS {
        let found = client.get(&key).await.map_err(Error::at(&key))?;
        let Some(kv) = found else {
            return Err(Error::NoNode { key, node });
        };
        let mut value = NodeKey::decode(&kv)?;
        let before = value.clone();
        change(&mut value);
        if value == before {
            return Ok(());
        }
        let txn = Txn::default()
            .if_modified(&key, kv.mod_revision)
            .put(&key, bytes(&value));
        let answer = client.transact(txn, Copies::Several).await;
        if answer.map_err(Error::at(&key))?.is_made {
            return Ok(());
        }
    }
    Err(Error::Contended { key })
}

pub(crate) fn bytes(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data")
}

/// Refuses values of a later format.
pub(crate) fn decode<T: for<'a> Deserialize<'a>>(kv: &KeyValue) -> Result<T, Error> {
    let key = String::from_utf8_lossy(&kv.key).into_owned();
    let value: Value = serde_json::from_slice(&kv.value).map_err(|e| damaged(&key, &e))?;
    check_format(&key, &value)?;
    serde_json::from_value(value).map_err(|e| damaged(&key, &e))
}

/// Refuses a value of a later format.
pub(crate) fn check_format(key: &str, value: &Value) -> Result<(), Error> {
    match later_format(value) {
        None => Ok(()),
        Some(found) => Err(newer(key, found)),
    }
}

/// The format of the value, if it is a later one.
pub(crate) fn later_format(value: &Value) -> Option<u64> {
    value["v"].as_u64().filter(|version| *version > FORMAT)
}

pub(crate) fn newer(key: &str, found: u64) -> Error {
    let said = nacre_cluster_etcd::Error::Newer {
        key: key.to_owned(),
        found,
        known: FORMAT,
    };
    Error::at(key)(said)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::on_etcd;

    fn kv(value: &Value) -> KeyValue {
        KeyValue {
            key: b"/nacre/lab/node/x".to_vec(),
            value: value.to_string().into_bytes(),
            ..KeyValue::default()
        }
    }

    #[test]
    fn fields_of_operators_and_of_later_versions_stay() {
        let stored = json!({ "v": 1, "name": "old", "cordon": true, "later": true });
        let mut key = NodeKey::decode(&kv(&stored)).expect("a node");
        assert!(key.is_avoided());
        key.description.name = "new".to_owned();
        let value = serde_json::to_value(&key).expect("plain data");
        assert_eq!(
            (&value["name"], &value["later"]),
            (&json!("new"), &json!(true))
        );
    }

    /// Goal: a description of a node that did not say whether its ports use TLS stays readable, and
    /// an older node reads that of a newer one: there is one more field, of which it knows nothing.
    #[test]
    fn ports_without_and_with_tls() {
        let portal = json!({ "trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "4420" });
        let mut secured = portal.clone();
        secured["tls"] = json!("require");
        let stored = json!({ "v": 1, "name": "a", "portals": [portal, secured] });
        let key = NodeKey::decode(&kv(&stored)).expect("a node");
        let tls = key.description.portals.iter().map(|one| one.tls.as_deref());
        assert_eq!(tls.collect::<Vec<_>>(), [None, Some("require")]);
        let value = serde_json::to_value(&key).expect("plain data");
        assert_eq!(value["portals"], stored["portals"]);
    }

    /// Goal: nodes of other versions find the addresses for replicas. Method: the stored field has
    /// the name that it had in the first version, in both directions.
    #[test]
    fn addresses_for_replicas_keep_their_stored_name() {
        let portal = json!({ "trtype": "TCP", "traddr": "192.0.2.1", "trsvcid": "4420" });
        let stored = json!({ "v": 1, "name": "a", "member_portals": [portal] });
        let key = NodeKey::decode(&kv(&stored)).expect("a node");
        assert_eq!(key.description.replica_portals.len(), 1);
        let value = serde_json::to_value(&key).expect("plain data");
        assert_eq!(value["member_portals"], stored["member_portals"]);
    }

    #[test]
    fn a_later_format_is_refused() {
        let refused = NodeKey::decode(&kv(&json!({ "v": 2, "name": "x" })));
        let text = refused.expect_err("newer").to_string();
        assert!(
            text.contains("format 2") && text.contains("Upgrade"),
            "{text}"
        );
    }

    /// Goal: of several nodes that describe themselves at once, as many succeed as the cluster has
    /// places, and those stay. Method: three nodes with leases and one place, on a real etcd.
    #[test]
    fn the_last_place_is_given_once() {
        on_etcd("the_last_place_is_given_once", async |client, prefix| {
            let node = |number: usize| NodeId(Uuid::from_u128(number as u128));
            let others: Vec<usize> = (1000..1000 + MAX_NODES - 1).collect();
            for batch in others.chunks(100) {
                let txn = batch.iter().fold(Txn::default(), |txn, number| {
                    txn.put(&prefix.node(node(*number)), b"{}".to_vec())
                });
                let put = client.transact(txn, Copies::Several).await;
                assert!(put.expect("an answer").is_made);
            }
            let mut incarnations = Vec::new();
            for number in 0..3 {
                let txn = Txn::default().put(&prefix.lease(node(number)), b"{}".to_vec());
                let put = client.transact(txn, Copies::Several).await;
                incarnations.push(Incarnation(put.expect("an answer").revision as u64));
            }
            let described = Description::default();
            let describe = |number| {
                describe(
                    &client,
                    &prefix,
                    node(number),
                    incarnations[number],
                    &described,
                )
            };
            let (first, second, third) = tokio::join!(describe(0), describe(1), describe(2));
            let answers = [first, second, third];
            let made = answers.iter().position(|answer| *answer == Ok(true));
            let made = made.expect("one has the place");
            for (number, answer) in answers.iter().enumerate().filter(|(n, _)| *n != made) {
                let (key, most) = (prefix.node(node(number)), MAX_NODES);
                assert_eq!(*answer, Err(Error::TooManyNodes { key, most }));
            }
            assert_eq!(describe(made).await, Ok(true), "it is described again");
            assert!(has_room(&client, &prefix, node(made)).await.is_ok());
        });
    }
}

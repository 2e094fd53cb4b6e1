//! The owner of a prefix: the one daemon that uses its keys.
//!
//! ```text
//!   claim:   owner key free, ours, or taken over by name,
//!            and no cluster at the prefix                 ─▶  put it with a new claim
//!   change:  transaction with "the owner key is as claimed"  ─▶  Owned, if another daemon has it
//! ```
//!
//! The key has no time limit: a daemon that cannot reach etcd goes on serving its volumes, so that
//! silence does not prove its end. A daemon that is killed claims its key again at its next start:
//! node and machine are the same, and the lock of its data directory proves that the old process
//! has ended. A copy of the data directory on another machine is refused, until an operator names
//! the claim to take over. Each start makes another claim, so that such a permission works once.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::client::{Client, Copies, KeyValue, Txn};
use crate::error::Error;
use crate::keys::Prefix;
use crate::node::DaemonIdentity;

/// Version of the key's format.
const FORMAT: u64 = 1;
/// Attempts against other daemons that claim at the same time.
const ATTEMPTS: usize = 8;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct OwnerValue {
    v: u64,
    #[serde(flatten)]
    node: DaemonIdentity,
    claim: Uuid,
}

/// The owner key, as this daemon wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) revision: i64,
}

/// The owner of a prefix, with its claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub node: DaemonIdentity,
    pub claim: Uuid,
}

impl Owner {
    pub async fn read(client: &Client, prefix: &Prefix) -> Result<Option<Self>, Error> {
        let found = client.get(&prefix.owner()).await?;
        found.as_ref().map(decode).transpose()
    }

    /// The error of another daemon that uses `prefix`.
    pub(crate) fn refuses(self, prefix: &Prefix) -> Error {
        Error::Owned {
            prefix: prefix.to_string(),
            owner: self.node,
            claim: self.claim,
        }
    }
}

/// The conditions of a daemon's claim.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Before {
    /// The daemon claimed the prefix before. Then the claim fails if etcd has no owner of it,
    /// because etcd has lost the records of volumes too.
    pub is_claimed: bool,
    /// The claim of another daemon, which never runs again: this claim replaces it.
    pub take_over: Option<Uuid>,
}

/// Makes `node` the owner of `prefix`.
pub(crate) async fn claim(
    client: &Client,
    prefix: &Prefix,
    node: &DaemonIdentity,
    before: Before,
) -> Result<Claim, Error> {
    let (key, meta, claim) = (prefix.owner(), prefix.meta(), Uuid::new_v4());
    let value = OwnerValue {
        v: FORMAT,
        node: node.clone(),
        claim,
    };
    let value = serde_json::to_vec(&value).expect("plain data");
    let mut found = client.get(&key).await?;
    for _ in 0..ATTEMPTS {
        if let Some(kv) = &found {
            let owner = decode(kv)?;
            if owner.claim == claim {
                // An earlier copy of the transaction was executed.
                let revision = kv.mod_revision;
                return Ok(Claim { revision });
            }
            if !owner.node.is_same(node) && before.take_over != Some(owner.claim) {
                return Err(owner.refuses(prefix));
            }
        } else if before.is_claimed {
            let prefix = prefix.to_string();
            return Err(Error::Forgotten { prefix });
        }
        let last = found.as_ref().map_or(0, |kv| kv.mod_revision);
        let txn = Txn::default()
            .if_modified(&key, last)
            .if_created(&meta, 0)
            .put(&key, value.clone())
            .read_on_failure(&key)
            .read_on_failure(&meta);
        let answer = client.transact(txn, Copies::Several).await?;
        if answer.is_made {
            let revision = answer.revision;
            return Ok(Claim { revision });
        }
        let mut looked = answer.found.into_iter();
        found = looked.next().flatten();
        if looked.next().flatten().is_some() {
            let prefix = prefix.to_string();
            return Err(Error::OfCluster { prefix });
        }
    }
    Err(Error::Damaged {
        key,
        what: "other daemons change it all the time".to_owned(),
    })
}

pub(crate) fn decode(kv: &KeyValue) -> Result<Owner, Error> {
    let key = || String::from_utf8_lossy(&kv.key).into_owned();
    let damaged = |error: serde_json::Error| Error::Damaged {
        key: key(),
        what: error.to_string(),
    };
    let value: serde_json::Value = serde_json::from_slice(&kv.value).map_err(damaged)?;
    if let Some(found) = value["v"].as_u64().filter(|version| *version > FORMAT) {
        return Err(Error::Newer {
            key: key(),
            found,
            known: FORMAT,
        });
    }
    let OwnerValue { node, claim, .. } = serde_json::from_value(value).map_err(damaged)?;
    Ok(Owner { node, claim })
}

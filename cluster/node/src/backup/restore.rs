//! Writes a backup into an etcd without the cluster.
//!
//! ```text
//!   restoring: claimed ▸ no other key is there ▸ all keys, in batches ▸ one lease ▸ meta, and
//!   restoring is gone
//! ```
//!
//! Every batch demands the claim, so that one restore writes at a time. Without `meta` no node
//! joins, so that a restore that dies is repeated: the same file goes on with the keys that are
//! there. The lease is waited for because a node may have renewed its own just before etcd was
//! lost.

use std::collections::BTreeSet;
use std::time::Duration;

use nacre_cluster_core::NodeId;
use nacre_cluster_etcd::{Client, Copies, Prefix, Txn, TxnAnswer};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, sleep_until};
use uuid::Uuid;

use super::{Backup, BackupError, SavedKey, restored_record};
use crate::error::Error;
use crate::keys::{self, Cluster};

/// Keys and bytes of one transaction: etcd allows 128 operations and 1.5 MiB.
const BATCH: usize = 100;
const BATCH_BYTES: usize = 1 << 20;
/// Attempts of a request that etcd does not answer, and the pause between them.
const ATTEMPTS: usize = 8;
const PAUSE: Duration = Duration::from_millis(500);

/// `restoring`: the mark of a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    v: u64,
    /// The backup: id and revision.
    id: Uuid,
    revision: i64,
    /// This restore.
    run: Uuid,
}

/// A backup that was restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    pub keys: usize,
    pub volumes: usize,
    /// An earlier restore of the file had not ended.
    pub is_repeated: bool,
}

/// Restores the backup. `without`: nodes that never return; the replicas on them are empty.
pub async fn restore(
    client: &Client,
    prefix: &Prefix,
    backup: &Backup,
    without: &[NodeId],
) -> Result<Restored, BackupError> {
    // Everything that can be refused is refused before the first write.
    let meta = backup.meta()?;
    let lease = meta.timing()?.lease();
    let values = values(prefix, backup, without)?;
    client
        .check_version()
        .await
        .map_err(Error::at(&prefix.meta()))?;
    let mut writer = Writer::claim(client, prefix, backup).await?;
    let claimed = Instant::now();
    let known: BTreeSet<&str> = values.iter().map(|(key, _)| key.as_str()).collect();
    writer.must_be_alone(&known).await?;
    for batch in batches(&values) {
        writer.put(batch).await?;
    }
    sleep_until(claimed + lease).await;
    writer.finish(&meta).await?;
    Ok(Restored {
        keys: values.len() + 1,
        volumes: backup.volumes(),
        is_repeated: writer.is_repeated,
    })
}

/// The keys with their values, without `meta`, and without exports that no record names. Their
/// nodes would end them, and delete the lvols that the cluster made for them: of a volume that was
/// being created at the time of the backup, these have all data by now.
fn values(
    prefix: &Prefix,
    backup: &Backup,
    without: &[NodeId],
) -> Result<Vec<(String, Vec<u8>)>, BackupError> {
    let mut named = BTreeSet::new();
    for saved in backup
        .keys
        .iter()
        .filter(|saved| saved.key.starts_with("vol/"))
    {
        let devices = crate::record::devices(saved.value.as_bytes());
        named.append(&mut devices.map_err(|why| super::unusable(&saved.key, &why))?);
    }
    let is_kept = |saved: &&SavedKey| match saved.key.strip_prefix("member/") {
        Some(rest) => rest.split('/').nth(1).is_some_and(|id| named.contains(id)),
        None => saved.key != "meta",
    };
    let mut values = Vec::new();
    for saved in backup.keys.iter().filter(is_kept) {
        let value = if saved.key.starts_with("vol/") {
            restored_record(saved, without)?
        } else {
            saved.value.clone().into_bytes()
        };
        values.push((format!("{prefix}{}", saved.key), value));
    }
    Ok(values)
}

/// A volume has a transaction of its own: volumes are listed in order of their creation.
fn batches(values: &[(String, Vec<u8>)]) -> Vec<&[(String, Vec<u8>)]> {
    let is_volume = |key: &str| key.split('/').nth(3) == Some("vol");
    let (mut batches, mut from, mut bytes) = (Vec::new(), 0, 0);
    for (at, (key, value)) in values.iter().enumerate() {
        let size = key.len() + value.len();
        let is_full = at - from >= BATCH || bytes + size > BATCH_BYTES || is_volume(key);
        if is_full && at > from {
            batches.push(&values[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += size;
    }
    if from < values.len() {
        batches.push(&values[from..]);
    }
    batches
}

/// The one restore that writes.
struct Writer<'a> {
    client: &'a Client,
    prefix: &'a Prefix,
    mark: Mark,
    /// The revision of the mark.
    revision: i64,
    is_repeated: bool,
}

impl<'a> Writer<'a> {
    async fn claim(
        client: &'a Client,
        prefix: &'a Prefix,
        backup: &Backup,
    ) -> Result<Self, BackupError> {
        let key = prefix.restoring();
        let found = client.get(&key).await.map_err(Error::at(&key))?;
        if let Some(kv) = &found {
            let other: Mark = keys::decode(kv)?;
            if (other.id, other.revision) != (backup.id, backup.revision) {
                let prefix = prefix.to_string();
                return Err(BackupError::OtherRestore { key, prefix });
            }
        }
        let mut writer = Self {
            client,
            prefix,
            mark: Mark {
                v: keys::FORMAT,
                id: backup.id,
                revision: backup.revision,
                run: Uuid::new_v4(),
            },
            revision: 0,
            is_repeated: found.is_some(),
        };
        let txn = Txn::default()
            .if_modified(&key, found.map_or(0, |kv| kv.mod_revision))
            .if_created(&prefix.meta(), 0)
            .if_created(&prefix.owner(), 0)
            .put(&key, keys::bytes(&writer.mark))
            .look(&key)
            .look(&prefix.meta());
        let answer = writer.transact(&key, &txn).await?;
        let mut found = answer.found.into_iter();
        writer.revision = if answer.is_made {
            answer.revision
        } else {
            let mark = found.next().flatten();
            let is_own = |kv: &nacre_cluster_etcd::KeyValue| {
                keys::decode::<Mark>(kv).is_ok_and(|mark| mark == writer.mark)
            };
            match mark.filter(is_own) {
                // An earlier copy of the transaction was made.
                Some(kv) => kv.mod_revision,
                None if found.next().flatten().is_some() => {
                    let (key, prefix) = (prefix.meta(), prefix.to_string());
                    return Err(BackupError::NotEmpty { key, prefix });
                }
                None => return Err(BackupError::Overtaken { key }),
            }
        };
        Ok(writer)
    }

    /// Refuses other keys than those of an earlier restore of this backup.
    async fn must_be_alone(&self, known: &BTreeSet<&str>) -> Result<(), BackupError> {
        let (own, all) = (self.prefix.restoring(), self.prefix.to_string());
        let page = self.client.list(&all).await.map_err(Error::at(&all))?;
        let other = page.keys.into_iter().find_map(|kv| {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let is_ours = key == own || (self.is_repeated && known.contains(key.as_str()));
            (!is_ours).then_some(key)
        });
        let Some(key) = other else { return Ok(()) };
        if !self.is_repeated {
            // Nothing was written.
            let txn = Txn::default().if_modified(&own, self.revision).delete(&own);
            self.transact(&own, &txn).await?;
        }
        Err(BackupError::NotEmpty { key, prefix: all })
    }

    async fn put(&self, batch: &[(String, Vec<u8>)]) -> Result<(), BackupError> {
        let key = self.prefix.restoring();
        let txn = Txn::default().if_modified(&key, self.revision);
        let txn = batch
            .iter()
            .fold(txn, |txn, (key, value)| txn.put(key, value.clone()));
        if self.transact(&key, &txn).await?.is_made {
            Ok(())
        } else {
            Err(BackupError::Overtaken { key })
        }
    }

    async fn finish(&mut self, meta: &Cluster) -> Result<(), BackupError> {
        let (key, meta_key) = (self.prefix.restoring(), self.prefix.meta());
        let txn = Txn::default()
            .if_modified(&key, self.revision)
            .if_created(&meta_key, 0)
            .if_created(&self.prefix.owner(), 0)
            .put(&meta_key, keys::bytes(meta))
            .delete(&key)
            .look(&key)
            .look(&meta_key);
        let answer = self.transact(&key, &txn).await?;
        if answer.is_made {
            return Ok(());
        }
        let [mark, found] = [0, 1].map(|at| answer.found.get(at).cloned().flatten());
        let is_done = mark.is_none()
            && found.is_some_and(|kv| keys::decode::<Cluster>(&kv).as_ref() == Ok(meta));
        if is_done && answer.is_copied {
            Ok(())
        } else {
            Err(BackupError::Overtaken { key })
        }
    }

    /// Sends the transaction until it is answered. Repeating one is harmless: it demands the mark.
    async fn transact(&self, key: &str, txn: &Txn) -> Result<TxnAnswer, BackupError> {
        let mut is_copied = false;
        for attempt in 1.. {
            match self.client.transact(txn.clone(), Copies::Several).await {
                Ok(mut answer) => {
                    answer.is_copied |= is_copied;
                    return Ok(answer);
                }
                Err(error) if error.is_passing() && attempt < ATTEMPTS => {
                    is_copied = true;
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(Error::at(key)(error).into()),
            }
        }
        unreachable!("the last attempt returns")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A volume that was being created at the time of the backup may be in use by now.
    #[test]
    fn exports_without_a_volume_are_left_out() {
        let [named, making] = [1, 2].map(Uuid::from_u128);
        let record = json!({
            "epoch": 1, "serving": 1, "revision": 1, "holder": null,
            "members": [{ "id": Uuid::from_u128(9), "device": named, "state": { "state": "in_sync" } }],
        });
        let key = |key: String, value: &str| SavedKey {
            key,
            value: value.to_owned(),
        };
        let node = Uuid::from_u128(7);
        let backup = Backup {
            id: Uuid::nil(),
            name: "lab".to_owned(),
            revision: 1,
            created: 0,
            keys: vec![
                key("meta".to_owned(), "{}"),
                key(format!("member/{node}/{named}"), "{}"),
                key(format!("member/{node}/{making}"), "{}"),
                key(format!("vol/{}", Uuid::from_u128(5)), &record.to_string()),
            ],
        };
        let prefix = Prefix::new("lab").expect("a name");
        let values = values(&prefix, &backup, &[]).expect("values");
        let keys: Vec<&str> = values.iter().map(|(key, _)| key.as_str()).collect();
        let expected = [
            format!("/nacre/lab/member/{node}/{named}"),
            format!("/nacre/lab/vol/{}", Uuid::from_u128(5)),
        ];
        assert_eq!(keys, expected);
    }
}

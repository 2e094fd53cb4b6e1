//! Writes the keys of a cluster for a restore or rebuild. Every write compares the key `restoring`,
//! the mark of the run, so that only one run writes at a time.

use std::collections::BTreeSet;
use std::time::Duration;

use nacre_cluster_etcd::{Client, Copies, Prefix, Txn, TxnAnswer};
use serde::{Deserialize, Serialize};
use tokio::time::sleep;
use uuid::Uuid;

use super::BackupError;
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
pub(crate) struct Mark {
    v: u64,
    /// The backup: id and revision.
    id: Uuid,
    revision: i64,
    /// This restore.
    pub(crate) run: Uuid,
    /// `None`: the restore of a backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rebuild: Option<RebuildPhase>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RebuildPhase {
    /// etcd may have other keys of the cluster.
    Claimed,
    /// Nodes report. All keys of the cluster are those of the rebuild.
    Collecting,
}

/// The contents that a writer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Backup { id: Uuid, revision: i64 },
    Rebuild,
}

impl Mark {
    fn new(source: Source) -> Self {
        let (id, revision, rebuild) = match source {
            Source::Backup { id, revision } => (id, revision, None),
            Source::Rebuild => (Uuid::nil(), 0, Some(RebuildPhase::Claimed)),
        };
        Self {
            v: keys::FORMAT,
            id,
            revision,
            run: Uuid::new_v4(),
            rebuild,
        }
    }

    /// True if nodes are to report.
    pub(crate) fn asks(&self) -> bool {
        self.rebuild == Some(RebuildPhase::Collecting)
    }
}

/// A volume has a transaction of its own: volumes are listed in order of their creation.
pub(super) fn batches(values: &[(String, Vec<u8>)]) -> Vec<&[(String, Vec<u8>)]> {
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
pub(crate) struct Writer<'a> {
    client: &'a Client,
    prefix: &'a Prefix,
    pub(crate) mark: Mark,
    /// The revision of the mark.
    revision: i64,
    /// An earlier run has not ended: the keys are those that it wrote.
    pub(crate) is_repeated: bool,
}

impl<'a> Writer<'a> {
    pub(crate) async fn claim(
        client: &'a Client,
        prefix: &'a Prefix,
        source: Source,
    ) -> Result<Self, BackupError> {
        let key = prefix.restoring();
        let found = client.get(&key).await.map_err(Error::at(&key))?;
        let mut mark = Mark::new(source);
        let mut is_repeated = false;
        if let Some(kv) = &found {
            let other: Mark = keys::decode(kv)?;
            let prefix = prefix.to_string();
            match (mark.rebuild, other.rebuild) {
                (None, Some(_)) => return Err(BackupError::Rebuilding { key, prefix }),
                (None, None) if (other.id, other.revision) == (mark.id, mark.revision) => {
                    is_repeated = true;
                }
                (_, None) => return Err(BackupError::OtherRestore { key, prefix }),
                (Some(_), phase) => {
                    mark.rebuild = phase;
                    is_repeated = phase == Some(RebuildPhase::Collecting);
                }
            }
        }
        let mut writer = Self {
            client,
            prefix,
            mark,
            revision: 0,
            is_repeated,
        };
        let txn = Txn::default()
            .if_modified(&key, found.map_or(0, |kv| kv.mod_revision))
            .if_created(&prefix.meta(), 0)
            .if_created(&prefix.owner(), 0)
            .put(&key, keys::bytes(&writer.mark))
            .read_on_failure(&key)
            .read_on_failure(&prefix.meta());
        // One copy: after a refusal deleted the mark, a late copy would make it again.
        let answer = client.transact(txn, Copies::One).await;
        let answer = answer.map_err(Error::at(&key))?;
        let mut found = answer.found.into_iter();
        writer.revision = if answer.is_made {
            answer.revision
        } else {
            let mark = found.next().flatten();
            let is_own = |kv: &nacre_cluster_etcd::KeyValue| {
                keys::decode::<Mark>(kv).is_ok_and(|mark| mark == writer.mark)
            };
            match mark.filter(is_own) {
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
    pub(crate) async fn must_be_alone(&self, known: &BTreeSet<&str>) -> Result<(), BackupError> {
        let (own, all) = (self.prefix.restoring(), self.prefix.to_string());
        let page = self.client.list(&all).await.map_err(Error::at(&all))?;
        let other = page.keys.into_iter().find_map(|kv| {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            // Reports to a rebuild that has ended.
            let is_report = key.starts_with(&self.prefix.all_found());
            let is_ours =
                key == own || is_report || (self.is_repeated && known.contains(key.as_str()));
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

    pub(crate) async fn put(&self, batch: &[(String, Vec<u8>)]) -> Result<(), BackupError> {
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

    pub(crate) async fn finish(&mut self, meta: &Cluster) -> Result<(), BackupError> {
        let (key, meta_key) = (self.prefix.restoring(), self.prefix.meta());
        let txn = Txn::default()
            .if_modified(&key, self.revision)
            .if_created(&meta_key, 0)
            .if_created(&self.prefix.owner(), 0)
            .put(&meta_key, keys::bytes(meta))
            .delete(&key)
            .read_on_failure(&key)
            .read_on_failure(&meta_key);
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

    /// Asks the nodes for their reports. No other key of the cluster is there.
    pub(crate) async fn collect(&mut self) -> Result<(), BackupError> {
        if self.mark.asks() {
            return Ok(());
        }
        let key = self.prefix.restoring();
        self.mark.rebuild = Some(RebuildPhase::Collecting);
        let txn = Txn::default()
            .if_modified(&key, self.revision)
            .put(&key, keys::bytes(&self.mark))
            .read_on_failure(&key);
        let answer = self.transact(&key, &txn).await?;
        if answer.is_made {
            self.revision = answer.revision;
            return Ok(());
        }
        // An earlier copy of the transaction may have been made.
        let found = answer.found.into_iter().next().flatten();
        let is_own = |kv: &nacre_cluster_etcd::KeyValue| {
            keys::decode::<Mark>(kv).is_ok_and(|mark| mark == self.mark)
        };
        let Some(kv) = found.filter(is_own) else {
            return Err(BackupError::Overtaken { key });
        };
        self.revision = kv.mod_revision;
        Ok(())
    }

    /// Deletes the keys of an earlier run, and keeps the reports of nodes.
    pub(crate) async fn clear(&self) -> Result<(), BackupError> {
        let (own, reports) = (self.prefix.restoring(), self.prefix.all_found());
        let is_former = |key: &str| key != own && !key.starts_with(&reports);
        let marked = Txn::default().if_modified(&own, self.revision);
        let all = self.prefix.to_string();
        if self.delete_all(&all, is_former, &marked).await? {
            Ok(())
        } else {
            Err(BackupError::Overtaken { key: own })
        }
    }

    /// Deletes the mark, and the reports of nodes: etcd is as before.
    pub(crate) async fn withdraw(&self) -> Result<(), BackupError> {
        let own = self.prefix.restoring();
        let txn = Txn::default().if_modified(&own, self.revision).delete(&own);
        self.transact(&own, &txn).await?;
        self.forget_reports().await
    }

    /// Deletes the reports. The mark is gone, so that no node adds another one, and reports that
    /// stay are no obstacle.
    pub(crate) async fn forget_reports(&self) -> Result<(), BackupError> {
        let own = self.prefix.restoring();
        let unmarked = Txn::default().if_created(&own, 0);
        let reports = self.prefix.all_found();
        self.delete_all(&reports, |_| true, &unmarked)
            .await
            .map(drop)
    }

    /// Deletes keys while the conditions of `txn` hold. Returns false if they did not.
    async fn delete_all(
        &self,
        prefix: &str,
        is_meant: impl Fn(&str) -> bool,
        txn: &Txn,
    ) -> Result<bool, BackupError> {
        let page = self.client.list(prefix).await.map_err(Error::at(prefix))?;
        let keys = page.keys.into_iter();
        let keys = keys.map(|kv| String::from_utf8_lossy(&kv.key).into_owned());
        let keys: Vec<String> = keys.filter(|key| is_meant(key)).collect();
        for batch in keys.chunks(BATCH) {
            let txn = batch.iter().fold(txn.clone(), |txn, key| txn.delete(key));
            if !self.transact(prefix, &txn).await?.is_made {
                return Ok(false);
            }
        }
        Ok(true)
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

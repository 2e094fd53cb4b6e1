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

use nacre_cluster_etcd::{Client, Prefix};
use tokio::time::{Instant, sleep_until};

use super::writer::{Source, Writer, batches};
use super::{Backup, BackupError, Lost, SavedKey, restored_record, unread, without_hosts};
use crate::error::Error;
use crate::keys::Cluster;

/// The parameters of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RestoreOptions {
    /// Nodes and devices that never return: the replicas on them count as empty.
    pub without: Vec<Lost>,
    /// True: hosts and reservations are restored. False: no host has access until an operator
    /// admits it, because a host that was removed after the backup would have access again.
    pub publish: bool,
}

/// The result of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    pub keys: usize,
    pub volumes: usize,
    /// Published volumes that lost their list of hosts, because `publish` was false.
    pub without_hosts: usize,
    /// True: an earlier restore of the same file had not ended, and this one went on with it.
    pub is_repeated: bool,
}

/// Writes the keys of `backup`, and `meta` last, so that no node joins before. Takes at least the
/// duration of a lease.
pub async fn restore(
    client: &Client,
    prefix: &Prefix,
    backup: &Backup,
    options: &RestoreOptions,
) -> Result<Restored, BackupError> {
    // Everything that can be refused is refused before the first write.
    let meta = backup.meta()?;
    let lease = meta.timing()?.lease();
    let (values, without_hosts) = values(prefix, backup, options)?;
    client
        .check_version()
        .await
        .map_err(Error::at(&prefix.meta()))?;
    let source = Source::Backup {
        id: backup.id,
        revision: backup.revision,
    };
    let mut writer = Writer::claim(client, prefix, source).await?;
    let not_before = Instant::now() + lease;
    let known: BTreeSet<&str> = values.iter().map(|(key, _)| key.as_str()).collect();
    writer.must_be_alone(&known).await?;
    let keys = write(&mut writer, &values, meta, not_before).await?;
    Ok(Restored {
        keys,
        volumes: backup.volumes(),
        without_hosts,
        is_repeated: writer.is_repeated,
    })
}

/// Writes all keys, and `meta` last, one lease after the claim. Returns the number of keys.
async fn write(
    writer: &mut Writer<'_>,
    values: &Values,
    mut meta: Cluster,
    not_before: Instant,
) -> Result<usize, BackupError> {
    for batch in batches(values) {
        writer.put(batch).await?;
    }
    sleep_until(not_before).await;
    meta.restored = Some(writer.mark.run);
    writer.finish(&meta).await?;
    Ok(values.len() + 1)
}

/// Writes the keys of a rebuild, which collected them under the mark of `writer` since `claimed`.
/// Returns the number of keys, and of volumes whose hosts are left out.
pub(crate) async fn write_rebuilt(
    writer: &mut Writer<'_>,
    prefix: &Prefix,
    backup: &Backup,
    publish: bool,
    claimed: Instant,
) -> Result<(usize, usize), BackupError> {
    let meta = backup.meta()?;
    let not_before = claimed + meta.timing()?.lease();
    let options = RestoreOptions {
        publish,
        ..RestoreOptions::default()
    };
    let (values, without_hosts) = values(prefix, backup, &options)?;
    writer.clear().await?;
    let keys = write(writer, &values, meta, not_before).await?;
    Ok((keys, without_hosts))
}

/// Keys and values to write.
type Values = Vec<(String, Vec<u8>)>;

/// The keys with their values, without `meta`, and without exports that no record names. Their
/// nodes would end them, and delete the lvols that the cluster made for them: of a volume that was
/// being created at the time of the backup, these have all data by now. Also the number of volumes
/// whose hosts are left out.
fn values(
    prefix: &Prefix,
    backup: &Backup,
    options: &RestoreOptions,
) -> Result<(Values, usize), BackupError> {
    let mut named = BTreeSet::new();
    for saved in backup.records() {
        let devices = crate::record::devices(saved.value.as_bytes());
        named.append(&mut devices.map_err(|why| unread(&saved.key, why))?);
    }
    let is_kept = |saved: &&SavedKey| match saved.key.split_once('/') {
        Some(("member", rest)) => rest.split('/').nth(1).is_some_and(|id| named.contains(id)),
        Some(("resv", _)) => options.publish,
        // A cut compares a revision, and those of the restored etcd are others.
        Some(("snap", _)) => crate::snapshot::outlives_its_store(&saved.value),
        _ => saved.key != "meta",
    };
    let mut values = Vec::new();
    let mut without = 0;
    for saved in backup.keys.iter().filter(is_kept) {
        let value = match saved.key.split_once('/') {
            Some(("vol", _)) => restored_record(saved, &options.without)?,
            Some(("pub", _)) if !options.publish => {
                let (value, had_hosts) = without_hosts(saved)?;
                without += usize::from(had_hosts);
                value
            }
            _ => saved.value.clone().into_bytes(),
        };
        values.push((format!("{prefix}{}", saved.key), value));
    }
    Ok((values, without))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use uuid::Uuid;

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
        let options = RestoreOptions::default();
        let (values, without) = values(&prefix, &backup, &options).expect("values");
        let keys: Vec<&str> = values.iter().map(|(key, _)| key.as_str()).collect();
        let expected = [
            format!("/nacre/lab/member/{node}/{named}"),
            format!("/nacre/lab/vol/{}", Uuid::from_u128(5)),
        ];
        assert_eq!(
            (keys, without),
            (expected.iter().map(String::as_str).collect(), 0)
        );
    }

    fn saved(key: &str, value: &serde_json::Value) -> SavedKey {
        SavedKey {
            key: key.to_owned(),
            value: value.to_string(),
        }
    }

    fn backup(keys: Vec<SavedKey>) -> Backup {
        Backup {
            id: Uuid::nil(),
            name: "lab".to_owned(),
            revision: 1,
            created: 0,
            keys,
        }
    }

    fn value_of(values: &Values, key: &str) -> Option<serde_json::Value> {
        let found = values.iter().find(|(name, _)| name.ends_with(key));
        found.map(|(_, value)| serde_json::from_slice(value).expect("JSON"))
    }

    /// Goal: a host that was removed after the backup gets no access by the restore, unless the
    /// operator says so.
    #[test]
    fn hosts_and_reservations_are_left_out() {
        let published = |hosts: serde_json::Value, any: bool| json!({ "v": 1, "nqn": "nqn.a", "slots": { "x": 1 }, "hosts": hosts, "any_host": any });
        let backup = backup(vec![
            saved("meta", &json!({})),
            saved("pub/1", &published(json!(["nqn.host"]), false)),
            saved("pub/2", &published(json!([]), true)),
            saved("pub/3", &published(json!([]), false)),
            saved("resv/1", &json!({ "v": 1 })),
        ]);
        let prefix = Prefix::new("lab").expect("a name");
        let restored = |publish| {
            let options = RestoreOptions {
                publish,
                ..RestoreOptions::default()
            };
            values(&prefix, &backup, &options).expect("values")
        };
        let (values, without) = restored(false);
        assert_eq!(without, 2);
        for key in ["pub/1", "pub/2", "pub/3"] {
            let expected = published(json!([]), false);
            assert_eq!(value_of(&values, key), Some(expected));
        }
        assert_eq!(value_of(&values, "resv/1"), None);
        let (values, without) = restored(true);
        assert_eq!(without, 0);
        let expected = published(json!(["nqn.host"]), false);
        assert_eq!(value_of(&values, "pub/1"), Some(expected));
        assert_eq!(value_of(&values, "resv/1"), Some(json!({ "v": 1 })));
    }

    /// Goal: a device that is lost for good is named without the rest of its node, and a name that
    /// no replica has is refused with those that there are.
    #[test]
    fn lost_nodes_and_devices() {
        let [ant, bee] = [1, 2].map(Uuid::from_u128);
        let replica = |id: u128, node: Uuid, device: &str| {
            json!({ "id": Uuid::from_u128(id), "node": node, "node_device": device,
                    "device": Uuid::from_u128(id), "state": { "state": "in_sync" } })
        };
        let record = json!({
            "epoch": 4, "serving": 4, "revision": 9, "holder": null,
            "members": [replica(11, ant, "d1"), replica(12, bee, "d1"), replica(13, bee, "d2")],
        });
        let backup = backup(vec![
            saved(&format!("node/{ant}"), &json!({ "v": 1, "name": "ant" })),
            saved(&format!("node/{bee}"), &json!({ "v": 1, "name": "bee" })),
            saved("vol/5", &record),
        ]);
        let lost = |text: &str| {
            let without = vec![backup.lost(text).expect("known")];
            let bytes = restored_record(&backup.keys[2], &without).expect("a record");
            let value: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
            let replicas = value["members"].as_array().expect("members");
            let empty = replicas
                .iter()
                .filter(|one| one["state"]["state"] == "filling");
            let empty: Vec<serde_json::Value> = empty.map(|one| one["id"].clone()).collect();
            assert_eq!(value["restored"]["lost"], json!(empty), "{text}");
            empty.len()
        };
        assert_eq!([lost("ant"), lost("bee"), lost("bee:d2")], [1, 2, 1]);
        assert_eq!(lost(&format!("{bee}:d1")), 1);
        let refused = backup.lost("bee:d3").expect_err("unknown");
        assert!(matches!(refused, BackupError::NoDevice { .. }));
        let said = refused.to_string();
        assert!(said.contains("\"bee:d3\"; the node has d1, d2"), "{said}");
        let refused = backup.lost("cow:d1").expect_err("unknown").to_string();
        assert!(refused.contains("no node \"cow\""), "{refused}");
    }

    /// Goal: a record of a later version is refused before anything is written.
    #[test]
    fn a_later_record_is_refused() {
        let record = json!({ "v": 2, "members": [] });
        let backup = backup(vec![saved("vol/5", &record)]);
        let prefix = Prefix::new("lab").expect("a name");
        let refused = values(&prefix, &backup, &RestoreOptions::default());
        let expected = BackupError::NewerKey {
            key: "vol/5".to_owned(),
            found: 2,
            known: 1,
        };
        assert_eq!(refused.expect_err("newer"), expected);
    }
}

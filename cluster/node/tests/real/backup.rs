//! Backups on a real etcd.

use nacre_cluster_etcd::{Error as Said, Prefix};
use nacre_cluster_node::backup::{Lost, RestoreOptions, restore};
use nacre_cluster_node::{Backup, BackupError, Error};

use super::*;

/// An etcd with a client that works in its own runtime.
struct Store {
    _members: Members,
    client: Client,
    runtime: tokio::runtime::Runtime,
    prefix: Prefix,
}

impl Store {
    fn start(test: &str) -> Option<Self> {
        let members = Members::start(program(test)?, 1, &[]);
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build().expect("a runtime");
        let client = {
            let _entered = runtime.enter();
            Client::new(&members.endpoints()).expect("endpoints")
        };
        Some(Self {
            _members: members,
            client,
            runtime,
            prefix: prefix(),
        })
    }

    fn put(&self, key: &str, value: &Value) {
        let txn = Txn::default().put(&format!("{}{key}", self.prefix), value.to_string().into());
        let put = self.client.transact(txn, Copies::Several);
        assert!(self.runtime.block_on(put).expect("an answer").is_made);
    }

    fn delete(&self, key: &str) {
        let txn = Txn::default().delete(&format!("{}{key}", self.prefix));
        let deleted = self.client.transact(txn, Copies::Several);
        self.runtime.block_on(deleted).expect("an answer");
    }

    /// All keys without the prefix, in order, with their values.
    fn all(&self) -> Vec<(String, Value)> {
        let all = self.prefix.to_string();
        let page = self
            .runtime
            .block_on(self.client.list(&all))
            .expect("a list");
        let value = |kv: &nacre_cluster_etcd::KeyValue| {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let value = serde_json::from_slice(&kv.value).unwrap_or_default();
            (key[all.len()..].to_owned(), value)
        };
        page.keys.iter().map(value).collect()
    }

    fn save(&self) -> Result<Backup, BackupError> {
        self.runtime
            .block_on(Backup::save(&self.client, &self.prefix, 7))
    }

    fn restore(&self, backup: &Backup) -> Result<(), BackupError> {
        let lost = Lost {
            node: node(2),
            device: None,
        };
        let options = RestoreOptions {
            without: vec![lost],
            publish: true,
        };
        let restored = restore(&self.client, &self.prefix, backup, &options);
        self.runtime.block_on(restored).map(drop)
    }

    fn init(&self) -> Result<(), Error> {
        let cluster = Cluster::new("lab", Duration::from_secs(1)).expect("a lease");
        self.runtime
            .block_on(cluster.init(&self.client, &self.prefix))
    }
}

fn record(number: u128) -> Value {
    json!({
        "v": 1, "id": volume(number).0, "name": format!("v{number}"), "epoch": 4, "serving": 4,
        "revision": 9, "holder": node(1).0, "incarnation": 3, "next": node(2).0, "later": [1],
        "members": [
            { "id": Uuid::from_u128(31), "node": node(1).0, "state": { "state": "in_sync" } },
            { "id": Uuid::from_u128(32), "node": node(2).0, "state": { "state": "in_sync" } },
        ],
    })
}

/// Goal: a backup has what outlives the nodes, and its restore into another etcd is the cluster,
/// with volumes that no node holds; also if it dies at any place and is repeated. Keys of others
/// are never touched. Method: two etcds; keys of an interrupted restore; other keys in its way.
#[test]
fn a_backup_is_restored_into_an_empty_etcd() {
    const TEST: &str = "a_backup_is_restored_into_an_empty_etcd";
    let (Some(old), Some(new)) = (Store::start(TEST), Store::start(TEST)) else {
        return;
    };
    assert!(matches!(
        old.save(),
        Err(BackupError::Cluster(Error::NoCluster { .. }))
    ));
    old.init().expect("a new cluster");
    // More than a batch, and two volumes in another order than that of their ids.
    for number in 0..250 {
        old.put(&format!("later/{number}"), &json!({ "v": 1 }));
    }
    for number in [2, 1] {
        old.put(&format!("vol/{}", volume(number).0), &record(number));
        old.put(&format!("name/v{number}"), &json!(volume(number).0));
        old.put(&format!("op/{}", volume(number).0), &json!({ "v": 1 }));
    }
    old.put(&format!("lease/{}", node(1).0), &json!({ "v": 1, "n": 7 }));
    old.put(
        &format!("node/{}", node(1).0),
        &json!({ "v": 1, "name": "ant", "drain": true }),
    );
    old.put("log/1", &json!({}));
    old.put("steward", &json!({}));
    old.put("later/x", &json!({ "of": "a later version" }));
    let backup = old.save().expect("a backup");
    let backup = Backup::parse(&backup.encode()).expect("the same");
    assert_eq!(backup.volumes(), 2);
    assert_eq!(backup.node("ant"), Ok(node(1)));
    let unknown = backup.node("bee").expect_err("no node").to_string();
    assert!(unknown.contains("it has ant"), "{unknown}");
    let refused = old.restore(&backup).expect_err("the cluster is there");
    assert!(matches!(refused, BackupError::NotEmpty { .. }), "{refused}");
    assert!(
        old.all().iter().any(|(key, _)| key == "log/1"),
        "nothing was deleted"
    );

    // Another key, also where the cluster itself is missing.
    new.put("vol/x", &json!({}));
    let refused = new.restore(&backup).expect_err("not empty");
    assert!(
        matches!(&refused, BackupError::NotEmpty { key, .. } if key.ends_with("vol/x")),
        "{refused}"
    );
    assert_eq!(new.all().len(), 1, "no mark stays");
    new.delete("vol/x");

    // A restore that died: the mark, and some keys.
    let mark =
        |revision| json!({ "v": 1, "id": backup.id, "revision": revision, "run": Uuid::nil() });
    new.put("restoring", &mark(backup.revision));
    new.put("name/v1", &json!(volume(1).0));
    let refused = new.init().expect_err("half a cluster").to_string();
    assert!(
        refused.contains("restoring") && refused.contains("has not ended"),
        "{refused}"
    );
    new.put("restoring", &mark(backup.revision + 1));
    let refused = new.restore(&backup).expect_err("another file");
    assert!(
        matches!(refused, BackupError::OtherRestore { .. }),
        "{refused}"
    );
    new.put("restoring", &mark(backup.revision));
    new.put("other", &json!({}));
    let refused = new.restore(&backup).expect_err("a key of no backup");
    assert!(
        matches!(&refused, BackupError::NotEmpty { key, .. } if key.ends_with("other")),
        "{refused}"
    );
    new.delete("other");

    let began = Instant::now();
    new.restore(&backup).expect("restored");
    assert!(
        began.elapsed() >= Duration::from_secs(1),
        "a lease is waited for"
    );
    let transient = ["lease/", "op/", "log/", "steward"];
    let expected: Vec<(String, Value)> = old
        .all()
        .into_iter()
        .filter(|(key, _)| !transient.iter().any(|kind| key.starts_with(kind)))
        .map(|(key, mut value)| {
            if key.starts_with("vol/") {
                value["holder"] = Value::Null;
                let lost = [Uuid::from_u128(32)];
                value["restored"] = json!({ "epoch": 4, "revision": 9, "lost": lost });
                value["members"][1]["state"] = json!({ "state": "filling", "watermark": 0 });
                value["members"][1]["why"] = "it was lost when the cluster was restored".into();
                let fields = value.as_object_mut().expect("a record");
                fields.retain(|field, _| !["incarnation", "next"].contains(&field.as_str()));
            }
            (key, value)
        })
        .collect();
    let mut found = new.all();
    let meta = found.iter_mut().find(|(key, _)| key == "meta");
    let (_, meta) = meta.expect("the cluster's key");
    let restored = meta
        .as_object_mut()
        .and_then(|meta| meta.remove("restored"));
    assert!(
        restored.is_some_and(|run| run.is_string()),
        "nodes that run notice it"
    );
    assert_eq!(found, expected);
    let again = new.restore(&backup).expect_err("the cluster is there");
    assert!(matches!(again, BackupError::NotEmpty { .. }), "{again}");

    // In order of creation, as before. And a backup of the restored cluster is the same.
    let saved = new.save().expect("a backup");
    let volumes = |backup: &Backup| {
        let keys = backup.keys.iter().map(|saved| saved.key.clone());
        keys.filter(|key| key.starts_with("vol/"))
            .collect::<Vec<_>>()
    };
    assert_eq!(volumes(&saved), volumes(&backup));
    assert_eq!(volumes(&saved)[0], format!("vol/{}", volume(2).0));
}

/// Goal: a silent etcd is an error with a remedy, and not a wait without end.
#[test]
fn a_restore_without_etcd_ends() {
    let Some(old) = Store::start("a_restore_without_etcd_ends") else {
        return;
    };
    old.init().expect("a new cluster");
    let backup = old.save().expect("a backup");
    let mut endpoints = old._members.endpoints();
    endpoints.urls = vec!["http://127.0.0.1:1".to_owned()];
    endpoints.deadline = Duration::from_millis(300);
    let refused = old.runtime.block_on(async {
        let client = Client::new(&endpoints).expect("endpoints");
        restore(&client, &old.prefix, &backup, &RestoreOptions::default()).await
    });
    let Err(BackupError::Cluster(Error::Store { said, .. })) = &refused else {
        panic!("{refused:?}");
    };
    assert!(matches!(**said, Said::Unanswered { .. }), "{said}");
}

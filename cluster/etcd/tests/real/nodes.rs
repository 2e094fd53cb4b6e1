//! Records under a node's lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use nacre_bdev_replica::store::suite::{Subject, block_on, record, run};
use nacre_bdev_replica::store::{StoreError, VolumeStore};
use nacre_cluster_core::ids::MAX_VOLUMES;
use nacre_cluster_core::{Holder, Incarnation, NodeId, Record, Transaction};
use nacre_cluster_etcd::{
    Client, Copies, Endpoints, Error, EtcdStore, NodeLeases, Outcome, Prefix, Txn,
};
use nacre_cluster_etcd_members::{Members, program};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{client, prefix, runtime};

/// The holder of the suite's records, and another node.
const NODES: [NodeId; 2] = [
    NodeId(Uuid::from_bytes([7; 16])),
    NodeId(Uuid::from_bytes([8; 16])),
];

/// A node's store, with its lease.
struct OfNode {
    endpoints: Endpoints,
    prefix: Prefix,
    node: NodeId,
    incarnation: Arc<AtomicI64>,
    store: Option<Arc<EtcdStore>>,
}

impl OfNode {
    fn new(endpoints: &Endpoints, prefix: Prefix, node: NodeId) -> Self {
        let mut subject = Self {
            endpoints: endpoints.clone(),
            prefix,
            node,
            incarnation: Arc::default(),
            store: None,
        };
        subject.reopen();
        subject
    }

    /// Creates the node's lease.
    fn join(&self, etcd: &Etcd) -> Holder {
        let create = Transaction::create(self.node);
        let made = etcd.execute(&self.prefix, &create);
        let Ok(Outcome::Made(at)) = made else {
            panic!("{made:?}");
        };
        self.incarnation.store(at.0 as i64, Ordering::SeqCst);
        Holder {
            node: self.node,
            incarnation: Incarnation(at.0),
        }
    }

    fn opened(&self) -> &EtcdStore {
        self.store.as_ref().expect("open")
    }
}

impl Subject for OfNode {
    fn store(&self) -> Arc<dyn VolumeStore> {
        Arc::clone(self.store.as_ref().expect("open")) as Arc<dyn VolumeStore>
    }

    fn reopen(&mut self) {
        self.store = None;
        let incarnation = Arc::clone(&self.incarnation);
        let store =
            EtcdStore::of_node(&self.endpoints, self.prefix.clone(), self.node, incarnation);
        let store = store.expect("it opens");
        assert!(!store.is_shared(), "the lease replaces the wait");
        self.store = Some(Arc::new(store));
    }
}

/// Other requests than those of the stores.
struct Etcd {
    runtime: tokio::runtime::Runtime,
    client: Arc<Client>,
}

impl Etcd {
    fn new(members: &Members) -> Self {
        let runtime = runtime();
        let client = {
            let _entered = runtime.enter();
            client(&members.endpoints())
        };
        // A creation is sent once: etcd must have started.
        let started = runtime.block_on(client.check_version());
        started.expect("an answer");
        Self { runtime, client }
    }

    fn execute(&self, prefix: &Prefix, transaction: &Transaction) -> Result<Outcome, Error> {
        let leases = NodeLeases::new(Arc::clone(&self.client), prefix.clone());
        self.runtime
            .block_on(leases.execute(transaction, no_record))
    }

    fn put(&self, key: &str, value: String) -> i64 {
        let txn = Txn::default().put(key, value.into_bytes());
        let put = self.client.transact(txn, Copies::One);
        self.runtime.block_on(put).expect("put").revision
    }

    fn read(&self, key: &str) -> Value {
        let found = self.runtime.block_on(self.client.get(key));
        let found = found.expect("an answer").expect("a value");
        serde_json::from_slice(&found.value).expect("JSON")
    }
}

fn no_record(_: &Record) -> Vec<u8> {
    unreachable!("no commits here")
}

#[test]
fn conformance_of_a_node() {
    let Some(program) = program("conformance_of_a_node") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let etcd = Etcd::new(&members);
    // The records have this holder, or another one without a lease.
    for node in NODES {
        let mut clusters = 0;
        run(|| {
            clusters += 1;
            let name = format!("{}-{clusters}", node.0);
            let prefix = Prefix::new(&name).expect("a name");
            let subject = OfNode::new(&members.endpoints(), prefix, node);
            subject.join(&etcd);
            subject
        });
    }
}

/// Goal: etcd refuses all changes of a fenced incarnation, and those of a volume that another node
/// holds. Method: two nodes' stores, and ends of their leases in between.
#[test]
fn a_fenced_node_changes_nothing() {
    let Some(program) = program("a_fenced_node_changes_nothing") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let etcd = Etcd::new(&members);
    let [first, second] = NODES.map(|node| OfNode::new(&members.endpoints(), prefix("lab"), node));
    let ant = record("ant");
    let refused = block_on(first.opened().create(ant.clone()));
    assert!(
        matches!(&refused, Err(StoreError::Unavailable { why }) if why.contains("no lease")),
        "{refused:?}"
    );
    let holder = first.join(&etcd);
    second.join(&etcd);
    block_on(first.opened().create(ant.clone())).expect("created");
    let next = super::next(&ant);
    let held = [
        block_on(second.opened().swap(ant.version(), next.clone())),
        block_on(second.opened().delete(ant.id, ant.version())),
    ];
    for refused in held {
        assert!(
            matches!(&refused, Err(StoreError::Fenced { why }) if why.contains("another node")),
            "{refused:?}"
        );
    }
    let fence = Transaction::fence_off(holder);
    let fenced = etcd.execute(&prefix("lab"), &fence);
    assert!(matches!(fenced, Ok(Outcome::Made(_))), "{fenced:?}");
    let fenced = [
        block_on(first.opened().swap(ant.version(), next.clone())),
        block_on(first.opened().create(record("bee"))),
        block_on(first.opened().delete(ant.id, ant.version())),
    ];
    for refused in fenced {
        assert!(
            matches!(&refused, Err(StoreError::Fenced { why }) if why.contains("is over")),
            "{refused:?}"
        );
    }
    assert_eq!(block_on(second.opened().list()), Ok(vec![ant.clone()]));
    block_on(second.opened().swap(ant.version(), next)).expect("the holder's lease is over");
    // A daemon that owns the prefix excludes nodes.
    let owner = json!({ "v": 1, "id": Uuid::nil(), "host": "h", "claim": Uuid::nil() });
    etcd.put(&prefix("lab").owner(), owner.to_string());
    let refused = block_on(second.opened().create(record("cat")));
    assert!(
        matches!(refused, Err(StoreError::Owned { .. })),
        "{refused:?}"
    );
}

/// Goal: a cluster has at most 16,384 volumes, also when its nodes create the last one at the same
/// time. Method: the names of others, and two stores that create volumes at once.
#[test]
fn a_cluster_has_a_limit_of_volumes() {
    let Some(program) = program("a_cluster_has_a_limit_of_volumes") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let etcd = Etcd::new(&members);
    let prefix = prefix("lab");
    let others: Vec<usize> = (0..MAX_VOLUMES - 1).collect();
    for batch in others.chunks(100) {
        let txn = batch.iter().fold(Txn::default(), |txn, number| {
            txn.put(&prefix.name(&format!("other{number}")), b"v".to_vec())
        });
        let put = etcd.client.transact(txn, Copies::One);
        assert!(etcd.runtime.block_on(put).expect("an answer").is_made);
    }
    let nodes = NODES.map(|node| {
        let node = OfNode::new(&members.endpoints(), prefix.clone(), node);
        node.join(&etcd);
        node
    });
    // Calls are made at once. The second ones wait for the first ones.
    let calls: Vec<_> = (0..8)
        .map(|number| {
            let record = record(&format!("v{number}"));
            nodes[number % 2].opened().create(record)
        })
        .collect();
    let answers: Vec<_> = calls.into_iter().map(block_on).collect();
    let most = MAX_VOLUMES;
    let refused = Err(StoreError::TooMany { most });
    let made = answers.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(made, 1, "{answers:?}");
    assert!(answers.iter().all(|one| one.is_ok() || *one == refused));
    // A name that exists is refused as before, and a deletion makes room.
    let one = block_on(nodes[0].opened().list())
        .expect("records")
        .remove(0);
    let again = block_on(nodes[1].opened().create(record(&one.name)));
    assert!(matches!(again, Err(StoreError::Exists { .. })), "{again:?}");
    block_on(nodes[0].opened().delete(one.id, one.version())).expect("deleted");
    block_on(nodes[1].opened().create(record("bee"))).expect("created");
    assert_eq!(block_on(nodes[0].opened().create(record("cat"))), refused);
}

/// The fields of the cluster survive the changes of the holder's control, up to its last one.
#[test]
fn a_control_keeps_the_fields_of_the_cluster() {
    let Some(program) = program("a_control_keeps_the_fields_of_the_cluster") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let etcd = Etcd::new(&members);
    let node = OfNode::new(&members.endpoints(), prefix("lab"), NODES[0]);
    let holder = node.join(&etcd);
    let ant = record("ant");
    let mut stored = serde_json::to_value(&ant).expect("plain data");
    let claimed = json!({
        "v": 1, "incarnation": holder.incarnation.0, "next": NODES[1].0, "later": 1,
    });
    let fields = claimed.as_object().expect("fields").clone();
    stored.as_object_mut().expect("fields").extend(fields);
    stored["members"][0]["node"] = json!(NODES[1].0);
    let key = prefix("lab").volume(ant.id);
    etcd.put(&key, stored.to_string());
    let read = || etcd.read(&key);
    let loaded = block_on(node.opened().load(ant.id)).expect("a record");
    assert_eq!(loaded.replicas[0].node, Some(NODES[1].0));
    let mut next = super::next(&loaded);
    block_on(node.opened().swap(loaded.version(), next.clone())).expect("swapped");
    let kept = ["holder", "incarnation", "next", "later"];
    for name in kept {
        assert_eq!(read()[name], stored[name], "{name}");
    }
    assert_eq!(read()["members"][0]["node"], json!(NODES[1].0));
    // The control signs off: the machine releases the volume later.
    let open = next.version();
    next = super::next(&next);
    next.holder = None;
    block_on(node.opened().swap(open, next.clone())).expect("signed off");
    for name in kept {
        assert_eq!(read()[name], stored[name], "{name}");
    }
    assert_eq!(read()["closed"], true);
    assert_eq!(block_on(node.opened().load(ant.id)), Ok(next.clone()));
    let closed = next.version();
    next = super::next(&next);
    next.holder = Some(NODES[0].0);
    block_on(node.opened().swap(closed, next)).expect("opened again");
    assert_eq!(read().get("closed"), None);
}

/// A record of a time before the cluster has a holder without an incarnation.
#[test]
fn a_holder_without_an_incarnation_has_ended() {
    let Some(program) = program("a_holder_without_an_incarnation_has_ended") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let etcd = Etcd::new(&members);
    let node = OfNode::new(&members.endpoints(), prefix("lab"), NODES[0]);
    let me = node.join(&etcd);
    let volume = nacre_cluster_core::VolumeId(Uuid::from_u128(5));
    let put = etcd.put(&prefix("lab").core_volume(volume), "{}".to_owned());
    let at = nacre_cluster_core::Revision(put as u64);
    let former = Holder {
        node: NODES[1],
        incarnation: Incarnation(0),
    };
    let record = Record {
        epoch: 1,
        serving: 0,
        holder: Some(me),
        next: None,
        replicas: Default::default(),
    };
    let take = Transaction::take(me, volume, at, Some(former), record);
    let leases = NodeLeases::new(Arc::clone(&etcd.client), prefix("lab"));
    let take = leases.execute(&take, |_| b"{}".to_vec());
    let taken = etcd.runtime.block_on(take);
    assert!(matches!(taken, Ok(Outcome::Made(_))), "{taken:?}");
}

/// Goal: the deletion of a published volume is noted like an unpublish, at the revision at which
/// its publication went; that of an unpublished volume is not. Method: one of each, and the keys.
#[test]
fn a_deleted_volume_notes_its_publication() {
    let Some(program) = program("a_deleted_volume_notes_its_publication") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let etcd = Etcd::new(&members);
    let prefix = prefix("lab");
    let node = OfNode::new(&members.endpoints(), prefix.clone(), NODES[0]);
    node.join(&etcd);
    let delete = |name, publication: Option<nacre_cluster_core::VolumeId>| {
        let record = record(name);
        let store = node.opened();
        block_on(store.create(record.clone())).expect("created");
        if let Some(volume) = publication {
            etcd.put(&prefix.publication(volume), "{}".to_owned());
        }
        block_on(store.delete(record.id, record.version())).expect("deleted");
        record.id
    };
    let get = |key: &str| {
        etcd.runtime
            .block_on(etcd.client.get(key))
            .expect("an answer")
    };
    delete("ant", None);
    assert_eq!(get(&prefix.unpublished()), None);

    let id = nacre_cluster_core::VolumeId(record("bee").id);
    let deleted = delete("bee", Some(id));
    assert_eq!(deleted, id.0);
    assert_eq!(get(&prefix.publication(id)), None);
    let note = get(&prefix.unpublished()).expect("a note");
    let publications = prefix.publications();
    let now = etcd.client.revision(&publications);
    let now = etcd.runtime.block_on(now).expect("an answer");
    assert_eq!(note.mod_revision, now, "the transaction of the deletion");
    assert_eq!(etcd.read(&prefix.unpublished())["volume"], json!(id.0));
}

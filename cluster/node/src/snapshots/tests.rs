//! Goal: a snapshot counts only if its replica was in sync all the time, whichever node dies or
//! acts twice, and nothing of it is forgotten. Method: a real etcd, and keys as nodes write them.
//! Without etcd, the tests are skipped aloud.

use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_etcd::{Client, Copies};
use serde_json::{Value, json};

use super::*;
use crate::keys::Cluster;
use crate::snapshot::{CutProblem, MAX_CUTS, outlives_its_store};
use crate::testing::on_etcd;

const VOLUME: VolumeId = VolumeId(Uuid::from_u128(100));
const SNAPSHOT: Uuid = Uuid::from_u128(200);
const POOL: Uuid = Uuid::from_u128(50);

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

fn export(number: u128) -> ExportId {
    ExportId(Uuid::from_u128(10 + number))
}

struct Lab {
    client: Arc<Client>,
    prefix: Prefix,
    operator: Operator,
}

impl Lab {
    /// Three nodes with a replica each, in sync; 1 holds the volume.
    async fn start(client: Arc<Client>, prefix: Prefix) -> Self {
        let cluster = Cluster::new("lab", Duration::from_secs(2)).expect("a lease");
        cluster.init(&client, &prefix).await.expect("created");
        let lab = Self {
            operator: Operator::new(Arc::clone(&client), prefix.clone()),
            client,
            prefix,
        };
        for number in 1..=3 {
            lab.describe(number, &[SNAPSHOTS]).await;
            lab.lease(number, &[SNAPSHOTS]).await;
            let value = json!({
                "v": 1, "volume": VOLUME.0, "device": format!("lvol{number}"), "want": "there",
                "is": "there",
            });
            let key = lab.prefix.export(node(number), export(number));
            lab.put(&key, &value).await;
        }
        let by = lab.me(1).await;
        lab.record(Some(by), &[true; 3]).await;
        lab
    }

    async fn put(&self, key: &str, value: &Value) -> i64 {
        self.transact(Txn::default().put(key, value.to_string().into_bytes()))
            .await
    }

    async fn transact(&self, txn: Txn) -> i64 {
        let answer = self.client.transact(txn, Copies::Several).await;
        answer.expect("an answer").revision
    }

    async fn describe(&self, number: u128, features: &[&str]) {
        let value = json!({ "v": 1, "name": format!("n{number}"), "features": features });
        self.put(&self.prefix.node(node(number)), &value).await;
    }

    async fn lease(&self, number: u128, features: &[&str]) {
        let mut value = json!({ "v": 1, "n": 0, "process": Uuid::nil() });
        if !features.is_empty() {
            value["features"] = json!(features);
        }
        self.put(&self.prefix.lease(node(number)), &value).await;
    }

    async fn fence(&self, number: u128) {
        let txn = Txn::default().delete(&self.prefix.lease(node(number)));
        self.transact(txn).await;
    }

    async fn me(&self, number: u128) -> Holder {
        let key = self.prefix.lease(node(number));
        let found = self.client.get(&key).await.expect("an answer");
        Holder {
            node: node(number),
            incarnation: Incarnation(found.expect("a lease").create_revision as u64),
        }
    }

    async fn record(&self, holder: Option<Holder>, in_sync: &[bool]) -> i64 {
        let replicas = (1..).zip(in_sync).map(|(number, in_sync)| {
            let state = if *in_sync { "in_sync" } else { "out" };
            json!({
                "id": Uuid::from_u128(20 + number), "node": node(number).0,
                "device": export(number).0, "state": { "state": state },
            })
        });
        let value = json!({
            "v": 1, "name": "v", "epoch": 4, "serving": 4, "revision": 7, "block_size": 512,
            "blocks": 2048, "holder": holder.map(|holder| holder.node.0),
            "incarnation": holder.map(|holder| holder.incarnation.0),
            "members": replicas.collect::<Vec<_>>(),
        });
        self.put(&self.prefix.core_volume(VOLUME), &value).await
    }

    async fn ask(&self) -> SeenSnapshot {
        let asked = self
            .operator
            .snapshots()
            .ask(SNAPSHOT, VOLUME, "monday")
            .await;
        asked.expect("asked")
    }

    async fn seen(&self) -> SeenSnapshot {
        let found = self.operator.snapshots().get(SNAPSHOT).await;
        found.expect("an answer").expect("a snapshot")
    }

    /// Number of snapshots in etcd.
    async fn count(&self) -> usize {
        let all = self.operator.snapshots().all().await;
        all.expect("a list").len()
    }

    async fn sources(&self) -> CutSources {
        let found = self.operator.snapshots().sources(VOLUME).await;
        found.expect("an answer").expect("a volume")
    }

    async fn change(
        &self,
        by: Holder,
        seen: &SeenSnapshot,
        next: Option<SnapshotKey>,
        record: Option<i64>,
    ) -> bool {
        let change = SnapshotChange {
            id: SNAPSHOT,
            seen,
            next,
            by,
            record,
        };
        let changed = self.operator.snapshots().change(&change).await;
        changed.expect("an answer")
    }

    /// The holder has node `number` cut its replica.
    async fn choose(&self, number: u128) -> SeenSnapshot {
        let (seen, sources) = (self.seen().await, self.sources().await);
        let mut all = sources.replicas.iter();
        let source = all.find(|one| one.node == node(number)).expect("in sync");
        let next = seen
            .key
            .chosen(std::slice::from_ref(source), &sources, None);
        let by = self.me(1).await;
        assert!(
            self.change(by, &seen, Some(next), Some(sources.revision))
                .await
        );
        self.seen().await
    }

    /// The node has cut its replica. False: the cut does not count.
    async fn cut(&self, by: Holder, seen: &SeenSnapshot) -> bool {
        let own = seen.key.cuts.iter().find(|cut| cut.node == by.node.0);
        let own = own.expect("chosen");
        let next = seen.key.with_cut(own.lvol, POOL);
        let next = if next.is_cut() && next.held_by.is_none() {
            next.made(1000)
        } else {
            next
        };
        self.change(by, seen, Some(next), Some(own.revision)).await
    }

    /// The holder has all replicas cut, and holds writes back.
    async fn hold(&self) -> (Holder, SeenSnapshot) {
        let (by, seen, sources) = (self.me(1).await, self.seen().await, self.sources().await);
        let next = seen.key.chosen(&sources.replicas, &sources, Some(by));
        let record = Some(sources.revision);
        assert!(self.change(by, &seen, Some(next), record).await);
        (by, self.seen().await)
    }
}

fn run(test: &str, work: impl AsyncFnOnce(Lab)) {
    on_etcd(test, async |client, prefix| {
        work(Lab::start(client, prefix).await).await;
    });
}

/// Goal: a cut counts if the record of the volume has not changed since the choice, and only once.
/// A repeated request finds it.
#[test]
fn a_cut_of_a_replica_that_stays_in_sync_counts() {
    run(
        "a_cut_of_a_replica_that_stays_in_sync_counts",
        async |lab| {
            let sources = lab.sources().await;
            assert_eq!(sources.bytes, 1 << 20);
            assert_eq!(sources.holder, CutHolder::Stands(lab.me(1).await));
            let devices = sources.replicas.iter().map(|one| &*one.device);
            assert_eq!(devices.collect::<Vec<_>>(), ["lvol1", "lvol2", "lvol3"]);
            let asked = lab.ask().await;
            assert_eq!(asked.key.is, CutState::Asked);
            assert_eq!(lab.ask().await, asked, "idempotent");
            let chosen = lab.choose(2).await;
            let of_two = lab.me(2).await;
            assert!(lab.cut(of_two, &chosen).await);
            // The answer was lost, and the node does it again.
            assert!(lab.cut(of_two, &chosen).await);
            let made = lab.seen().await;
            assert_eq!((made.key.is, made.key.bytes), (CutState::There, 1 << 20));
            assert!(made.key.nodes().eq([node(2)]));
            assert_eq!(lab.ask().await, made, "as it is");
            // A later change of the record does not concern it.
            lab.record(None, &[true, false, true]).await;
            assert_eq!(lab.ask().await, made);
        },
    );
}

/// Goal: a replica that left the volume is never taken as in sync, also when it has returned by the
/// time that its node looks. Method: the record changes between the choice and the cut; it changes
/// twice, so that it says the same as before.
#[test]
fn a_cut_of_a_replica_that_left_meanwhile_is_given_up() {
    let name = "a_cut_of_a_replica_that_left_meanwhile_is_given_up";
    run(name, async |lab| {
        lab.ask().await;
        let chosen = lab.choose(2).await;
        let (holder, of_two) = (lab.me(1).await, lab.me(2).await);
        lab.record(Some(holder), &[true, false, true]).await;
        lab.record(Some(holder), &[true, true, true]).await;
        assert!(!lab.cut(of_two, &chosen).await);
        assert_eq!(lab.seen().await, chosen);
        assert!(
            lab.change(of_two, &chosen, Some(chosen.key.again()), None)
                .await
        );
        let again = lab.seen().await;
        assert_eq!(again.key.is, CutState::Asked);
        let lvol = chosen.key.cuts[0].lvol;
        assert_eq!(again.key.former[0].lvol, lvol, "its node deletes it");
        // A choice by an old look at the record is refused as well.
        let old = lab.sources().await;
        lab.record(Some(holder), &[true, false, true]).await;
        let next = again.key.chosen(&old.replicas[1..2], &old, None);
        assert!(
            !lab.change(holder, &again, Some(next), Some(old.revision))
                .await
        );
        let present = lab.sources().await.replicas;
        assert!(present.iter().all(|one| one.node != node(2)), "{present:?}");
    });
}

/// Goal: a snapshot of several replicas is there once each is cut, and the holder says that writes
/// were held back. The cut of one node does not undo that of another. Method: three nodes that
/// write their cuts at once, and one twice.
#[test]
fn all_replicas_are_cut_or_none() {
    run("all_replicas_are_cut_or_none", async |lab| {
        lab.ask().await;
        let (holder, chosen) = lab.hold().await;
        assert!(chosen.key.nodes().eq([node(1), node(2), node(3)]));
        let (of_two, of_three) = (lab.me(2).await, lab.me(3).await);
        assert!(lab.cut(of_two, &chosen).await);
        assert!(!lab.cut(of_three, &chosen).await, "the key has changed");
        let seen = lab.seen().await;
        assert!(lab.cut(of_three, &seen).await);
        let seen = lab.seen().await;
        assert!(!seen.key.is_cut() && seen.key.is == CutState::Chosen);
        let all = seen.key.with_cut(seen.key.cuts[0].lvol, POOL);
        assert!(all.is_cut());
        let record = Some(chosen.key.cuts[0].revision);
        assert!(
            lab.change(holder, &seen, Some(all.made(1000)), record)
                .await
        );
        let made = lab.seen().await;
        assert_eq!((made.key.is, made.key.held_by), (CutState::There, None));
        assert_eq!(made.key.cuts.len(), 3);

        // The lvol of one node is lost: the others stay.
        let why = CutProblem {
            code: -19,
            text: "it is gone".to_owned(),
        };
        let lvol = made.key.cuts[1].lvol;
        let missing = made.key.with_missing(lvol, Some(&why));
        let reasons: Vec<bool> = missing.cuts.iter().map(|cut| cut.why.is_some()).collect();
        assert_eq!(reasons, [false, true, false]);
        assert_eq!(missing.with_missing(lvol, None), made.key);
        lab.fence(3).await;
        lab.record(Some(holder), &[true, true]).await;
        lab.operator.remove(node(3)).await.expect("removed");
        let left = lab.seen().await;
        assert!(left.key.nodes().eq([node(1), node(2)]));
        assert!(
            lab.operator
                .snapshots()
                .delete(SNAPSHOT)
                .await
                .expect("done")
        );
        let former = lab.seen().await.key.former;
        assert_eq!(former.len(), 2, "each node deletes its own");
    });
}

/// Goal: cuts of a holder that ends, or of a volume whose record changes, never count together.
/// Method: the holder's lease ends before it says that writes were held back; a replica leaves.
#[test]
fn a_holder_that_dies_while_it_holds_writes_back() {
    let name = "a_holder_that_dies_while_it_holds_writes_back";
    run(name, async |lab| {
        lab.ask().await;
        let (holder, chosen) = lab.hold().await;
        let record = Some(chosen.key.cuts[0].revision);
        let mut all = chosen.key.clone();
        for cut in &chosen.key.cuts {
            all = all.with_cut(cut.lvol, POOL);
        }
        lab.record(Some(holder), &[true, true, false]).await;
        let made = all.made(1000);
        assert!(
            !lab.change(holder, &chosen, Some(made.clone()), record)
                .await
        );
        lab.fence(1).await;
        assert!(!lab.change(holder, &chosen, Some(made), None).await);
        let of_two = lab.me(2).await;
        let again = chosen.key.again();
        assert_eq!((again.is, again.held_by), (CutState::Asked, None));
        assert!(lab.change(of_two, &chosen, Some(again), None).await);
        assert_eq!(lab.seen().await.key.former.len(), 3);
    });
}

/// Goal: keys of earlier versions, with a single cut, are read, and keep what they say.
#[test]
fn a_key_with_a_single_cut() {
    let cut = json!({ "node": node(1).0, "device": "d", "lvol": SNAPSHOT, "revision": 3 });
    let value = json!({
        "v": 1, "volume": VOLUME.0, "name": "x", "want": "there", "is": "there", "cuts": 2,
        "cut": cut, "why": { "code": -19, "text": "it is gone" },
    });
    let key: SnapshotKey = serde_json::from_value(value).expect("a key");
    assert_eq!((key.attempts, key.cuts.len()), (2, 1));
    assert_eq!(key.cuts[0].lvol, SNAPSHOT);
    let found = key.with_missing(SNAPSHOT, None);
    assert_eq!(
        (found.why.is_none(), found.cuts[0].why.is_none()),
        (true, true)
    );
    let again = serde_json::to_value(&key).expect("JSON");
    assert_eq!(
        serde_json::from_value::<SnapshotKey>(again).expect("a key"),
        key
    );
    let value = json!({
        "v": 1, "volume": VOLUME.0, "name": "x", "want": "there", "is": "asked",
    });
    assert!(serde_json::from_value::<SnapshotKey>(value).is_ok_and(|key| key.cuts.is_empty()));
}

/// Goal: a node that dies between the cut and its record costs time, and its late cut never counts.
/// It deletes the lvol when it returns. Method: the node's lease ends; the holder chooses another.
#[test]
fn a_node_that_dies_after_the_cut() {
    run("a_node_that_dies_after_the_cut", async |lab| {
        lab.ask().await;
        let chosen = lab.choose(2).await;
        let (holder, dead) = (lab.me(1).await, lab.me(2).await);
        lab.fence(2).await;
        assert!(!lab.cut(dead, &chosen).await, "its lease is over");
        assert!(
            lab.change(holder, &chosen, Some(chosen.key.again()), None)
                .await
        );
        let second = lab.choose(3).await;
        let lvol = |seen: &SeenSnapshot| seen.key.cuts[0].lvol;
        assert_ne!(lvol(&second), lvol(&chosen));
        let of_three = lab.me(3).await;
        assert!(lab.cut(of_three, &second).await);
        // It returns, and does what it was about to do.
        lab.lease(2, &[SNAPSHOTS]).await;
        let back = lab.me(2).await;
        assert!(!lab.cut(back, &chosen).await);
        let seen = lab.seen().await;
        assert_eq!(seen.key.former[0].node, node(2).0);
        let next = seen.key.without(lvol(&chosen));
        assert!(lab.change(back, &seen, next, None).await);
        let seen = lab.seen().await;
        assert_eq!((seen.key.is, seen.key.former.len()), (CutState::There, 0));
        assert_eq!(lvol(&seen), lvol(&second));
    });
}

/// Goal: a deletion is recorded while the node is away, and nothing of the snapshot is used; its
/// node ends it. One of a node that never returns ends when the node is evicted, or removed.
#[test]
fn deletions_wait_for_their_node() {
    run("deletions_wait_for_their_node", async |lab| {
        let make = async || {
            lab.ask().await;
            let chosen = lab.choose(2).await;
            let of_two = lab.me(2).await;
            assert!(lab.cut(of_two, &chosen).await);
        };
        let delete = async || {
            lab.operator
                .snapshots()
                .delete(SNAPSHOT)
                .await
                .expect("done")
        };
        assert!(!delete().await, "there is none");
        lab.ask().await;
        assert!(
            delete().await,
            "it was not cut, and no node has anything of it"
        );
        assert_eq!(lab.count().await, 0);

        make().await;
        lab.fence(2).await;
        assert!(delete().await);
        assert!(delete().await, "again");
        let seen = lab.seen().await;
        assert_eq!((seen.key.want, seen.key.cuts), (Want::Gone, Vec::new()));
        let refused = lab
            .operator
            .snapshots()
            .ask(SNAPSHOT, VOLUME, "monday")
            .await;
        assert!(
            matches!(refused, Err(Error::SnapshotGoes { .. })),
            "{refused:?}"
        );
        lab.lease(2, &[SNAPSHOTS]).await;
        let seen = lab.seen().await;
        let next = seen.key.without(seen.key.former[0].lvol);
        assert_eq!(next, None, "the last lvol");
        let back = lab.me(2).await;
        assert!(lab.change(back, &seen, None, None).await);
        assert!(
            lab.change(back, &seen, None, None).await,
            "its answer was lost"
        );

        make().await;
        lab.fence(2).await;
        lab.operator
            .set_evict(node(2), true)
            .await
            .expect("evicted");
        assert!(delete().await);
        assert_eq!(lab.count().await, 0);

        lab.operator.set_evict(node(2), false).await.expect("back");
        lab.lease(2, &[SNAPSHOTS]).await;
        make().await;
        lab.fence(2).await;
        let holder = lab.me(1).await;
        lab.record(Some(holder), &[true]).await;
        lab.operator.remove(node(2)).await.expect("removed");
        assert_eq!(lab.seen().await.key.is, CutState::There, "listed as lost");
        assert!(delete().await);
        assert_eq!(lab.count().await, 0);
    });
}

/// Goal: no node chooses for a volume whose last holder may still serve it, or that comes from a
/// backup and was not opened since.
#[test]
fn volumes_in_doubt_have_no_sources() {
    run("volumes_in_doubt_have_no_sources", async |lab| {
        let holder = lab.me(2).await;
        lab.record(Some(holder), &[true; 3]).await;
        lab.fence(2).await;
        let sources = lab.sources().await;
        assert_eq!(sources.holder, CutHolder::Over(node(2)));
        let nodes = sources.replicas.iter().map(|one| one.node);
        assert_eq!(nodes.collect::<Vec<_>>(), [node(1), node(3)]);
        lab.record(None, &[true; 3]).await;
        assert_eq!(lab.sources().await.holder, CutHolder::None);
        let key = lab.prefix.core_volume(VOLUME);
        let found = lab
            .client
            .get(&key)
            .await
            .expect("an answer")
            .expect("a record");
        let mut value: Value = serde_json::from_slice(&found.value).expect("JSON");
        value["restored"] = json!({ "epoch": 4, "revision": 7 });
        lab.put(&key, &value).await;
        assert_eq!(lab.sources().await.replicas, []);
    });
}

/// Goal: snapshots are offered when every node knows them, also in a rolling upgrade. A node that
/// went back to an earlier version has the description of the later one. Method: leases and
/// descriptions of both versions.
#[test]
fn all_nodes_must_know_snapshots() {
    run("all_nodes_must_know_snapshots", async |lab| {
        let without = async || {
            lab.operator
                .snapshots()
                .nodes_without()
                .await
                .expect("an answer")
        };
        assert_eq!(without().await, [""; 0]);
        lab.fence(2).await;
        assert_eq!(without().await, [""; 0], "it is away, and said so");
        lab.lease(2, &[]).await;
        assert_eq!(without().await, ["n2"], "an earlier version");
        let in_sync = lab.sources().await.replicas;
        assert!(in_sync.iter().all(|one| one.node != node(2)), "{in_sync:?}");
        lab.fence(2).await;
        lab.describe(2, &[]).await;
        assert_eq!(without().await, ["n2"]);
    });
}

/// Goal: requests are bounded, and so are cuts of one request.
#[test]
fn snapshots_have_bounds() {
    run("snapshots_have_bounds", async |lab| {
        for number in 0..MAX_OF_VOLUME as u128 {
            let value = json!({
                "v": 1, "volume": VOLUME.0, "name": "x", "want": "there", "is": "there",
            });
            let key = lab.prefix.snapshot(Uuid::from_u128(1000 + number));
            lab.put(&key, &value).await;
        }
        let refused = lab.operator.snapshots().ask(SNAPSHOT, VOLUME, "y").await;
        assert!(
            matches!(refused, Err(Error::TooManySnapshots { of: "volume", .. })),
            "{refused:?}"
        );
        let other = VolumeId(Uuid::from_u128(101));
        let refused = lab.operator.snapshots().ask(SNAPSHOT, other, "y").await;
        assert!(
            matches!(refused, Err(Error::NoVolume { .. })),
            "{refused:?}"
        );
        let long = "x".repeat(MAX_NAME + 1);
        let refused = lab.operator.snapshots().ask(SNAPSHOT, other, &long).await;
        assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
    });
    let mut key = SnapshotKey::new(VOLUME, "z");
    let source = CutSource {
        node: node(1),
        export_id: export(1),
        device: "lvol1".to_owned(),
    };
    let of = CutSources {
        revision: 3,
        bytes: 8,
        holder: CutHolder::None,
        replicas: vec![source.clone()],
    };
    let mut cuts = 0;
    while key.is == CutState::Asked {
        key = key.chosen(&of.replicas, &of, None).again();
        cuts += 1;
    }
    assert_eq!((cuts, key.is), (MAX_CUTS, CutState::Failed));
    let mut unheld = SnapshotKey::new(VOLUME, "z");
    while unheld.is == CutState::Asked {
        unheld = unheld.not_held(5, "writes in flight");
    }
    let why = unheld.why.map(|why| why.text);
    assert_eq!(
        (unheld.attempts, why.as_deref()),
        (5, Some("writes in flight"))
    );
    assert_eq!(key.former.len(), MAX_CUTS as usize);
}

/// Goal: a backup brings back snapshots that were made, and no cut that compares revisions of the
/// lost etcd.
#[test]
fn cuts_in_progress_do_not_outlive_their_store() {
    for (is, want, expected) in [
        ("asked", "there", false),
        ("chosen", "there", false),
        ("failed", "there", false),
        ("there", "there", true),
        ("chosen", "gone", true),
    ] {
        let value = json!({ "v": 1, "is": is, "want": want });
        assert_eq!(
            outlives_its_store(&value.to_string()),
            expected,
            "{is} {want}"
        );
    }
}

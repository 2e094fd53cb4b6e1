//! Acts of operators.

use std::time::Duration;

use nacre_cluster_core::{ExportId, Holder, Incarnation, NodeId};
use nacre_cluster_etcd::{Copies, Txn};
use nacre_cluster_node::export::Is;
use nacre_cluster_node::{
    Cluster, Error, ExportState, PublishRequest, UpgradeObstacle, UpgradeStep, VolumeState, clock,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::process::{Process, prefix};
use crate::{BAR, LEASE, Lab, NODES, node, volume};

const LIMIT: Duration = Duration::from_secs(10);

/// A drained node hands its volumes over without an error, and takes one back when an operator
/// moves it there.
#[test]
fn drain_and_undrain() {
    let Some(mut lab) = Lab::start("drain_and_undrain", 1, 20) else {
        return;
    };
    lab.measure_with_etcd("longest gap of a handover", BAR, |lab| {
        let victim = lab.victim();
        let (id, count) = (victim.id, victim.held.len());
        let since = clock::now();
        lab.runtime.block_on(async {
            lab.operator.set_drain(id, true).await.expect("drained");
            lab.operator.wait_drained(id, LIMIT).await.expect("empty");
        });
        println!("{count} volumes drained in {:?}", clock::now().since(since));
        lab.settle();
        let gap = lab.longest_gap(&victim.held, since);
        let status = lab.node_status(id);
        assert!(status.key.expect("described").drain);
        assert_eq!((status.held, status.replicas), (0, lab.volumes.len()));
        let undrained = lab.runtime.block_on(lab.operator.set_drain(id, false));
        undrained.expect("undrained");
        let moved = lab.operator.move_volume(victim.held[0], id, LIMIT);
        lab.runtime.block_on(moved).expect("moved back");
        // The last answer may still be that of the former holder.
        lab.wait("its node serves", || lab.holder(victim.held[0]) == id);
        lab.settle();
        gap
    });
    lab.check();
}

/// Goal: the loop of a rolling upgrade ends with the new version on all nodes. Each node has its
/// turn once, the next one only when all is well again, and volumes are served all the time.
/// Method: drain, stop, start and undrain the node that is named, until none is.
#[test]
fn a_rolling_upgrade() {
    let Some(mut lab) = Lab::start("a_rolling_upgrade", 1, 6) else {
        return;
    };
    let next = |lab: &Lab, version: u32| {
        let version = version.to_string();
        let next = lab.runtime.block_on(lab.operator.next_upgrade(&version));
        next.expect("an answer")
    };
    let mut version = 1;
    lab.measure_with_etcd("longest gap of an upgrade", BAR, |lab| {
        version += 1;
        let since = clock::now();
        let mut left = NODES.len();
        while left > 0 {
            // A volume has no holder for the moment of a handover.
            lab.wait("a node is named", || next(lab, version).is_ok());
            let step = next(lab, version).expect("a node is named");
            let one = step.node.expect("nodes are left");
            assert_eq!((step.left, one.is_drained), (left, false), "{one:?}");
            assert_eq!(one.version, (version - 1).to_string());
            let drain = |lab: &Lab, drain| {
                let set = lab.runtime.block_on(lab.operator.set_drain(one.id, drain));
                set.expect("set");
            };
            drain(lab, true);
            lab.wait("the same node is drained", || {
                let next = next(lab, version).ok().and_then(|step| step.node);
                next.is_some_and(|next| next.id == one.id && next.is_drained)
            });
            let of = lab.nodes.iter().position(|process| process.id == one.id);
            let index = of.expect("its process");
            lab.nodes[index].leave();
            let node = one.name.clone();
            assert_eq!(next(lab, version), Err(UpgradeObstacle::Away { node }));
            lab.nodes[index].upgrade(version);
            lab.wait("only the drain is left", || {
                let node = one.name.clone();
                let is_evicted = false;
                next(lab, version) == Err(UpgradeObstacle::Drained { node, is_evicted })
            });
            assert_eq!(lab.status().volumes.healthy, lab.volumes.len());
            drain(lab, false);
            left -= 1;
        }
        lab.wait("all have the version", || {
            let done = UpgradeStep {
                left: 0,
                node: None,
            };
            next(lab, version) == Ok(done)
        });
        lab.settle();
        lab.longest_gap(&lab.volumes, since)
    });
    lab.check();
}

/// A volume moves where an operator wants it, and refusals have a reason.
#[test]
fn moves() {
    let Some(mut lab) = Lab::start("moves", 1, 1) else {
        return;
    };
    let id = lab.volumes[0];
    for _ in 0..3 {
        lab.measure_with_etcd("moved", BAR, |lab| {
            let victim = lab.victim();
            let mut others = lab.ids().into_iter().filter(|other| *other != victim.id);
            let to = others.next().expect("another");
            let since = clock::now();
            let moved = lab.operator.move_volume(id, to, LIMIT);
            lab.runtime.block_on(moved).expect("moved");
            let taken = lab.wait_taken(&victim, since);
            assert_eq!(lab.holder(id), to);
            lab.settle();
            taken
        });
    }
    let refused = lab.operator.move_volume(id, node(9), LIMIT);
    let refused = lab.runtime.block_on(refused).expect_err("no such node");
    println!("{refused}");
    assert!(matches!(refused, Error::NotMoved { .. }));
    // The request's key is gone, and the record keeps unknown fields.
    assert_eq!(lab.status().operations, 0);
    let key = prefix().core_volume(id);
    let stored = lab.runtime.block_on(lab.client.get(&key));
    let stored = stored.expect("an answer").expect("a record");
    let value: Value = serde_json::from_slice(&stored.value).expect("JSON");
    assert_eq!(value["later"], "kept");
    lab.check();
}

/// An operator's fence ends a lease at once. A node with replicas cannot be removed.
#[test]
fn fence_and_remove() {
    let Some(mut lab) = Lab::start("fence_and_remove", 1, 3) else {
        return;
    };
    let refused = lab.runtime.block_on(lab.operator.remove(node(1)));
    let refused = refused.expect_err("it has replicas");
    println!("{refused}");
    assert!(matches!(refused, Error::HasReplica { .. }));
    lab.measure_with_etcd("killed and fenced by hand", BAR, |lab| {
        let victim = lab.victim();
        let since = clock::now();
        lab.nodes[victim.index].kill();
        let fenced = lab.runtime.block_on(lab.operator.fence_off(victim.id));
        fenced.expect("fenced");
        let taken = lab.wait_taken(&victim, since);
        let again = lab.runtime.block_on(lab.operator.fence_off(victim.id));
        assert!(matches!(again, Err(Error::NoLease { .. })), "{again:?}");
        lab.restart(&victim);
        taken
    });
    lab.check();
}

/// A node without replicas: refused while it lives, removed when it is off.
#[test]
fn removal_and_status() {
    let Some(mut lab) = Lab::start("removal_and_status", 3, 0) else {
        return;
    };
    let status = lab.status();
    println!("{status:#?}");
    let leaders = status
        .etcd
        .iter()
        .filter_map(|member| member.status.as_ref().ok());
    assert_eq!(leaders.filter(|status| status.is_leader).count(), 1);
    lab.wait("all nodes have described themselves", || {
        lab.status().nodes.iter().all(|node| node.key.is_some())
    });
    lab.wait("a node knows the age of each lease", || {
        lab.nodes[0].said().matches("age: Some(").count() == 3
    });
    println!("{}", lab.nodes[0].said());
    let id: NodeId = lab.nodes[0].id;
    let refused = lab.runtime.block_on(lab.operator.remove(id));
    let refused = refused.expect_err("it lives");
    println!("{refused}");
    assert!(matches!(refused, Error::Lives { .. }));
    let unknown = lab.runtime.block_on(lab.operator.set_cordon(node(9), true));
    assert!(matches!(unknown, Err(Error::NoNode { .. })), "{unknown:?}");
    let missing = lab.operator.move_volume(volume(9), id, LIMIT);
    let missing = lab.runtime.block_on(missing);
    assert!(
        matches!(missing, Err(Error::NoVolume { .. })),
        "{missing:?}"
    );
    assert_eq!(lab.status().operations, 0, "no request is left");
    lab.nodes[0].signal(Signal::TERM);
    lab.nodes[0].kill();
    lab.wait("its lease is over", || lab.node_status(id).lease.is_none());
    let removed = lab.runtime.block_on(lab.operator.remove(id));
    removed.expect("removed");
    assert_eq!(lab.status().nodes.len(), 2);
}

/// Goal: an export ends when no record can name it any more, and not before. Method: an export that
/// the record names or not, by a maker that lives, that gave up, and whose lease is over.
#[test]
fn unused_exports() {
    let Some(lab) = Lab::start("unused_exports", 1, 1) else {
        return;
    };
    let (id, first) = (lab.volumes[0], node(1));
    let described = || lab.status().nodes.iter().all(|node| node.key.is_some());
    lab.wait("all nodes have described themselves", described);
    let operator = lab.operator.clone();
    let incarnation = lab.incarnation(first).expect("a lease");
    let by = |incarnation| {
        Some(Holder {
            node: first,
            incarnation,
        })
    };
    let former = Incarnation(incarnation.0 - 1);
    lab.runtime.block_on(async {
        let export = async |number, by| {
            let export_id = ExportId(Uuid::from_u128(number));
            let made = operator.export(first, export_id, id, "disk0", by).await;
            assert_eq!(made.expect("wanted").by(), by);
            export_id
        };
        let ended = async |export_id, gave_up| {
            let ended = operator.unexport_unused(first, export_id, gave_up).await;
            ended.expect("an answer")
        };
        let lives = export(1, by(incarnation)).await;
        assert!(!ended(lives, false).await, "its maker is at work");
        assert!(ended(lives, true).await, "its maker gave up");
        assert!(ended(lives, false).await, "it is ended already");
        let dead = export(2, by(former)).await;
        assert!(ended(dead, false).await, "its maker is gone");
        assert!(!ended(ExportId(Uuid::from_u128(9)), false).await, "none");

        // One that the record names, and names no longer.
        let named = export(3, by(former)).await;
        let key = prefix().core_volume(id);
        let rename = async |from: &str, to: &str| {
            let kv = lab.client.get(&key).await.expect("an answer");
            let text = String::from_utf8(kv.expect("a record").value).expect("text");
            let text = text.replace(from, to);
            let txn = Txn::default().put(&key, text.into_bytes());
            let made = lab.client.transact(txn, Copies::One).await;
            assert!(made.expect("an answer").is_made);
        };
        let (own, other) = (format!("\"{}\"", named.0), "\"d\"");
        rename(other, &own).await;
        assert!(!ended(named, false).await && !ended(named, true).await);
        let settled = operator.export_is_made(first, named).await;
        settled.expect("an answer");
        assert!(!ended(named, false).await, "the record names it");
        rename(&own, other).await;
        assert!(ended(named, false).await, "its replica was removed");
    });
}

/// Goal: publications and exports are what operators and nodes wrote last, within their bounds.
/// Method: the operator's acts on a cluster of three nodes, one of which writes its exports to a
/// file.
#[test]
fn publications_and_exports() {
    let Some(lab) = Lab::start("publications_and_exports", 1, 2) else {
        return;
    };
    let (id, first) = (lab.volumes[0], node(1));
    let request = PublishRequest {
        nodes: lab.ids(),
        hosts: vec!["nqn.2025-01.io.nacre:host".to_owned()],
        any_host: false,
    };
    let invalid = [
        PublishRequest::default(),
        PublishRequest {
            nodes: vec![first, first],
            ..request.clone()
        },
        PublishRequest {
            hosts: vec!["a host".to_owned()],
            ..request.clone()
        },
    ];
    let described = || lab.status().nodes.iter().all(|node| node.key.is_some());
    lab.wait("all nodes have described themselves", described);
    let operator = lab.operator.clone();
    lab.runtime.block_on(async {
        for request in invalid {
            let refused = operator.publish(id, &request).await;
            assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
        }
        let missing = operator.publish(volume(9), &request).await;
        assert!(
            matches!(missing, Err(Error::NoVolume { .. })),
            "{missing:?}"
        );
        let mut unknown = request.clone();
        unknown.nodes.push(node(9));
        let unknown = operator.publish(id, &unknown).await;
        assert!(matches!(unknown, Err(Error::NoNode { .. })), "{unknown:?}");
        let published = operator.publish(id, &request).await.expect("published");
        // The slots are those that the test's own publication had.
        assert_eq!(published.slots.of(first), Some(1));
        assert_eq!(
            (&published.order, &published.hosts),
            (&request.nodes, &request.hosts)
        );
        let all = operator.publications().await.expect("publications");
        assert_eq!((all.len(), all.get(&id)), (2, Some(&published)));

        let export_id = ExportId(Uuid::from_u128(77));
        let export = operator.export(first, export_id, id, "disk0", None).await;
        let export = export.expect("wanted");
        assert_eq!(
            operator.export(first, export_id, id, "disk0", None).await,
            Ok(export.clone())
        );
        let other = operator.export(first, export_id, id, "disk1", None).await;
        assert!(
            matches!(other, Err(Error::ExportExists { .. })),
            "{other:?}"
        );
        let exports = operator.exports(Some(id)).await;
        assert_eq!(exports, Ok(vec![(first, export_id, export)]));
        assert_eq!(operator.exports(Some(volume(9))).await, Ok(Vec::new()));
    });
    let export_id = ExportId(Uuid::from_u128(77));
    let shown = |lab: &Lab| {
        let file = lab.dir().join(format!("exports-{}", first.0));
        std::fs::read_to_string(file).unwrap_or_default()
    };
    lab.wait("its node sees the export", || {
        shown(&lab).contains("disk0 There Making")
    });
    let incarnation = lab.incarnation(first).expect("a lease");
    lab.runtime.block_on(async {
        let state = ExportState {
            is: Is::There,
            bytes: 1 << 30,
            block_size: 4096,
            nsid: 1,
            why: None,
        };
        let old = Incarnation(incarnation.0 - 1);
        let refused = operator
            .set_export_state(first, old, export_id, Some(&state))
            .await;
        assert!(matches!(refused, Err(Error::NoLease { .. })), "{refused:?}");
        let set = operator.set_export_state(first, incarnation, export_id, Some(&state));
        set.await.expect("set");
        let exports = operator.exports(None).await.expect("exports");
        assert_eq!((exports[0].2.is, exports[0].2.bytes), (Is::There, 1 << 30));
        let early = operator
            .set_export_state(first, incarnation, export_id, None)
            .await;
        assert!(
            matches!(early, Err(Error::ExportExists { .. })),
            "still wanted: {early:?}"
        );
        assert_eq!(operator.unexport(first, export_id).await, Ok(true));
    });
    lab.wait("its node sees the end", || {
        shown(&lab).contains("disk0 Gone There")
    });
    lab.runtime.block_on(async {
        let ended = operator.set_export_state(first, incarnation, export_id, None);
        ended.await.expect("ended");
        assert_eq!(operator.unexport(first, export_id).await, Ok(false));
        let late = ExportState {
            is: Is::Failed,
            bytes: 0,
            block_size: 0,
            nsid: 1,
            why: Some("gone".to_owned()),
        };
        let late = operator
            .set_export_state(first, incarnation, export_id, Some(&late))
            .await;
        assert!(matches!(late, Err(Error::NoExport { .. })), "{late:?}");
        let volumes = operator.volumes().await.expect("volumes");
        assert_eq!(volumes.len(), 2);
        assert!(
            volumes
                .iter()
                .all(|volume| volume.state == VolumeState::Healthy)
        );
        let first = &volumes[0];
        assert_eq!((&*first.name, first.id), ("v0", id));
        assert_eq!((first.replicas, first.in_sync), (3, 3));
        assert!(first.lease_stands && first.holder.is_some(), "{first:?}");
        assert_eq!(first.nodes, request.nodes);
        let holder = first.holder.expect("it is held");
        let reserved = json!({ "v": 1, "registrants": [] });
        let set = async |holder, value| operator.set_reservation(id, holder, value).await;
        assert_eq!(set(holder, Some(&reserved)).await, Ok(()));
        assert_eq!(operator.reservation(id).await, Ok(Some(reserved.clone())));
        let former = Holder {
            incarnation: Incarnation(holder.incarnation.0 - 1),
            ..holder
        };
        let refused = set(former, None).await;
        assert!(
            matches!(refused, Err(Error::NotHolder { .. })),
            "{refused:?}"
        );
        assert_eq!(set(holder, None).await, Ok(()));
        assert_eq!(operator.reservation(id).await, Ok(None));
        let names = operator.node_names().await.expect("names");
        assert_eq!(names.keys().copied().collect::<Vec<_>>(), request.nodes);
    });
    lab.wait("its node has no export", || shown(&lab).is_empty());
    lab.check();
}

/// Goal: a key that a node cannot read is an event with its name and the remedy, and changes
/// nothing else. Method: keys of a later format, damaged, and under a strange name.
#[test]
fn keys_that_nodes_cannot_read() {
    let Some(lab) = Lab::start("keys_that_nodes_cannot_read", 1, 1) else {
        return;
    };
    let before = lab.last_answers();
    let prefix = prefix();
    let strange = format!("{}strange", prefix.nodes());
    let later = prefix.node(node(8));
    let damaged = prefix.publication(volume(9));
    let keys = [
        (&strange, "{}", "ends without an id"),
        (&later, r#"{ "v": 9 }"#, "Upgrade this daemon"),
        (&damaged, "{", "Restore a backup"),
    ];
    for (key, value, why) in keys {
        let txn = Txn::default().put(key, value.as_bytes().to_vec());
        let made = lab.client.transact(txn, Copies::One);
        assert!(lab.runtime.block_on(made).expect("an answer").is_made);
        let is_event = |line: &str| {
            line.starts_with("KeyIgnored") && line.contains(key.as_str()) && line.contains(why)
        };
        lab.wait(why, || {
            let has = |process: &Process| process.said().lines().any(is_event);
            lab.nodes.iter().all(has)
        });
    }
    // The status of a cluster with such a node is refused.
    let removed = Txn::default().delete(&later);
    let removed = lab.client.transact(removed, Copies::One);
    assert!(lab.runtime.block_on(removed).expect("an answer").is_made);
    lab.settle();
    lab.check_no_take(&before);
    lab.check();
}

/// A name is used once, and not beside a daemon that owns the prefix.
#[test]
fn a_cluster_is_created_once() {
    let Some(lab) = Lab::without_nodes("a_cluster_is_created_once", 1, &[]) else {
        return;
    };
    let new = || Cluster::new("lab", LEASE).expect("valid");
    assert!(matches!(
        Cluster::new("lab", Duration::from_millis(10)),
        Err(Error::Lease(_))
    ));
    lab.runtime.block_on(async {
        let (client, prefix) = (&lab.client, prefix());
        let absent = Cluster::read(client, &prefix).await;
        assert!(matches!(absent, Err(Error::NoCluster { .. })), "{absent:?}");
        let owner = Txn::default().put(&prefix.owner(), b"{}".to_vec());
        client.transact(owner, Copies::One).await.expect("put");
        let refused = new().init(client, &prefix).await;
        assert!(matches!(refused, Err(Error::Owned { .. })), "{refused:?}");
        let freed = Txn::default().delete(&prefix.owner());
        client.transact(freed, Copies::One).await.expect("deleted");
        let first = new();
        first.init(client, &prefix).await.expect("created");
        first.init(client, &prefix).await.expect("an own copy");
        let second = new().init(client, &prefix).await;
        assert!(
            matches!(second, Err(Error::ClusterExists { .. })),
            "{second:?}"
        );
    });
}

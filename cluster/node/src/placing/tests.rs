//! Goal: no pool is promised more than it has, and nothing is placed by a daemon that is over, or
//! under the brake. Method: a real etcd, and keys as nodes write them. Without etcd, the tests are
//! skipped aloud.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_core::placement::lvol_of;
use nacre_cluster_core::storm::Storm;
use nacre_cluster_core::{BootTime, Incarnation};
use nacre_cluster_etcd::{Client, Copies};
use nacre_cluster_etcd_members::{Members, program};
use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::braking::Looked;
use crate::export::{ExportState, Is};
use crate::pools::{PoolReport, PoolState};

const GIB: u64 = 1 << 30;

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

fn pool(number: u128) -> PoolId {
    PoolId(Uuid::from_u128(100 + number))
}

fn volume(number: u128) -> VolumeId {
    VolumeId(Uuid::from_u128(1000 + number))
}

struct Lab {
    operator: Operator,
    leases: BTreeMap<NodeId, Incarnation>,
    _etcd: Members,
}

impl Lab {
    /// Nodes 1.. with a pool of 100 GiB each.
    async fn start(program: std::path::PathBuf, nodes: u128) -> Self {
        let etcd = Members::start(program, 1, &[]);
        let client = Arc::new(Client::new(&etcd.endpoints()).expect("endpoints"));
        let prefix = Prefix::new("lab").expect("a name");
        let mut lab = Self {
            operator: Operator::new(client, prefix),
            leases: BTreeMap::new(),
            _etcd: etcd,
        };
        lab.put(&lab.operator.prefix.meta(), &json!({})).await;
        for number in 1..=nodes {
            lab.lease(number).await;
            let key = lab.operator.prefix.node(node(number));
            let value = json!({ "v": 1, "name": format!("n{number}"), "labels": { "zone": number.to_string() } });
            lab.put(&key, &value).await;
            lab.report(number, &report(), &[]).await;
        }
        lab
    }

    async fn put(&self, key: &str, value: &serde_json::Value) -> i64 {
        let txn = Txn::default().put(key, value.to_string().into_bytes());
        let answer = self.operator.client.transact(txn, Copies::Several).await;
        answer.expect("an answer").revision
    }

    async fn delete(&self, key: &str) {
        let txn = Txn::default().delete(key);
        let answer = self.operator.client.transact(txn, Copies::Several).await;
        answer.expect("an answer");
    }

    async fn lease(&mut self, number: u128) {
        let key = self.operator.prefix.lease(node(number));
        let revision = self.put(&key, &json!({})).await;
        self.leases
            .insert(node(number), Incarnation(revision as u64));
    }

    async fn report(&self, number: u128, report: &PoolReport, sizes: &[(Uuid, u64)]) -> bool {
        let (of, sizes) = (node(number), sizes.iter().copied().collect());
        let (operator, incarnation) = (&self.operator, self.leases[&of]);
        let reported = PoolKey::report_to(operator, of, incarnation, pool(number), report, &sizes);
        reported.await.expect("reported")
    }

    /// The node holds the volume.
    async fn serve(&self, number: u128, by: u128) {
        self.serve_as(number, node(by), self.leases[&node(by)])
            .await;
    }

    async fn serve_as(&self, number: u128, by: NodeId, incarnation: Incarnation) {
        let record = json!({
            "v": 1, "name": format!("v{number}"), "epoch": 1, "serving": 1, "holder": by.0,
            "incarnation": incarnation.0, "members": [],
        });
        let key = self.operator.prefix.core_volume(volume(number));
        self.put(&key, &record).await;
    }

    fn placing(&self, number: u128, count: usize, bytes: u64) -> Placing {
        let maker = node(1);
        Placing {
            volume: volume(number),
            export_ids: (0..count).map(|_| ExportId(Uuid::new_v4())).collect(),
            wish: Wish {
                count,
                bytes,
                ..Wish::default()
            },
            other_nodes: Vec::new(),
            resync: None,
            left_out: Vec::new(),
            clone_of: Vec::new(),
            by: Holder {
                node: maker,
                incarnation: self.leases[&maker],
            },
        }
    }

    async fn pool(&self, number: u128) -> PoolKey {
        let pools = self.operator.pools().await.expect("pools");
        let found = pools.into_iter().find(|(id, _)| *id == pool(number));
        found.expect("a pool").1
    }
}

fn report() -> PoolReport {
    PoolReport {
        name: "p".to_owned(),
        total: 100 * GIB,
        free: 100 * GIB,
        state: PoolState::Online,
        ..PoolReport::default()
    }
}

fn run(test: &str, work: impl AsyncFnOnce(std::path::PathBuf)) {
    let Some(program) = program(test) else {
        return;
    };
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build();
    runtime.expect("a runtime").block_on(work(program));
}

fn why(refused: Result<Vec<Placed>, Error>) -> String {
    refused.expect_err("no room").to_string()
}

/// Eight creations at once, each of a third of the space: as many succeed as fit. The promises hold
/// until the lvols exist.
#[test]
fn creations_at_once_do_not_overfill_a_pool() {
    run(
        "creations_at_once_do_not_overfill_a_pool",
        async |program| {
            let lab = Lab::start(program, 3).await;
            let requests: Vec<Placing> = (0..8).map(|one| lab.placing(one, 3, 40 * GIB)).collect();
            let all = requests.iter().map(|placing| async {
                loop {
                    match lab.operator.place(placing).await {
                        Err(Error::Contended { .. }) => {}
                        done => return done,
                    }
                }
            });
            let done = futures_util::future::join_all(all).await;
            let (made, refused): (Vec<_>, Vec<_>) = done.into_iter().partition(Result::is_ok);
            assert_eq!((made.len(), refused.len()), (2, 6));
            for one in refused {
                let why = why(one);
                assert!(why.contains("3 nodes are needed"), "{why}");
                assert!(why.contains("and 0 have a pool with room for"), "{why}");
            }
            let exports = lab.operator.exports(None).await.expect("exports");
            assert_eq!(exports.len(), 6);
            for number in 1..=3 {
                assert_eq!(lab.pool(number).await.promised(false), 80 * GIB);
            }
            // A report without the lvols keeps the promises, and one with an lvol ends its promise.
            assert!(!lab.report(1, &report(), &[]).await, "no change");
            let mut of_node = exports.iter().filter(|(of, ..)| *of == node(1));
            let (_, first, _) = of_node.next().expect("two");
            let (_, second, _) = of_node.next().expect("two");
            let mut with = report();
            with.reserved = 40 * GIB;
            assert!(lab.report(1, &with, &[(lvol_of(first.0), 40 * GIB)]).await);
            assert_eq!(lab.pool(1).await.promised(false), 40 * GIB);
            // The other export is gone: its promise is void.
            lab.delete(&lab.operator.prefix.export(node(1), *second))
                .await;
            assert!(lab.report(1, &with, &[(lvol_of(first.0), 40 * GIB)]).await);
            assert_eq!(lab.pool(1).await.promised(false), 0);
            let placed = lab.operator.place(&lab.placing(9, 1, 40 * GIB)).await;
            assert_eq!(placed.expect("room on node 1")[0].node, node(1));
        },
    );
}

/// Growth promises the difference, of all replicas or of none.
#[test]
fn growth_is_promised() {
    run("growth_is_promised", async |program| {
        let lab = Lab::start(program, 2).await;
        let placed = lab.operator.place(&lab.placing(1, 2, 40 * GIB)).await;
        let placed = placed.expect("room");
        for one in &placed {
            let number = one.node.0.as_u128();
            let mut with = report();
            with.reserved = 40 * GIB;
            let lvol = (lvol_of(one.export_id.0), 40 * GIB);
            lab.report(number, &with, &[lvol]).await;
            assert_eq!(lab.pool(number).await.promised(false), 0);
        }
        let refused = lab.operator.grow_places(volume(1), 90 * GIB).await;
        let refused = refused.expect_err("no room").to_string();
        assert!(refused.contains("has room for"), "{refused}");
        for number in 1..=2 {
            assert_eq!(lab.pool(number).await.promised(false), 0, "of none");
        }
        lab.operator
            .grow_places(volume(1), 50 * GIB)
            .await
            .expect("room");
        for one in &placed {
            assert_eq!(
                lab.pool(one.node.0.as_u128()).await.promised(false),
                10 * GIB
            );
        }
        let exports = lab
            .operator
            .exports(Some(volume(1)))
            .await
            .expect("exports");
        let sizes = exports
            .iter()
            .filter_map(|(_, _, export)| Some(export.place.as_ref()?.bytes));
        assert_eq!(sizes.collect::<Vec<_>>(), [50 * GIB; 2]);
        // Again: nothing is left to promise.
        lab.operator
            .grow_places(volume(1), 50 * GIB)
            .await
            .expect("done");
        assert_eq!(lab.pool(1).await.promised(false), 10 * GIB);
    });
}

/// A maker whose lease is over places nothing, and the nodes of its exports end them.
#[test]
fn a_maker_that_is_over() {
    run("a_maker_that_is_over", async |program| {
        let mut lab = Lab::start(program, 2).await;
        let placing = lab.placing(1, 1, GIB);
        let placed = lab.operator.place(&placing).await.expect("room");
        let Placed {
            node: of,
            export_id,
            ..
        } = placed[0];
        let ended = lab.operator.unexport_unused(of, export_id, false).await;
        assert!(!ended.expect("an answer"), "its maker lives");
        lab.delete(&lab.operator.prefix.lease(node(1))).await;
        lab.lease(1).await;
        let refused = lab.operator.place(&placing).await;
        assert!(matches!(refused, Err(Error::NoLease { .. })), "{refused:?}");
        // While a backup is restored, the record may still come.
        let meta = lab.operator.prefix.meta();
        lab.delete(&meta).await;
        let ended = lab.operator.unexport_unused(of, export_id, false).await;
        assert!(!ended.expect("an answer"), "there is no cluster");
        let export = |all: Vec<(NodeId, ExportId, Export)>| all.into_iter().next().expect("one").2;
        let found = export(lab.operator.exports(None).await.expect("exports"));
        assert_eq!(found.want, Want::There);
        lab.put(&meta, &json!({})).await;
        let ended = lab.operator.unexport_unused(of, export_id, false).await;
        assert!(ended.expect("an answer"));
        // The node has deleted the lvol.
        let state = lab
            .operator
            .set_export_state(of, lab.leases[&of], export_id, None);
        state.await.expect("ended");
        assert!(lab.report(of.0.as_u128(), &report(), &[]).await);
        assert_eq!(lab.pool(of.0.as_u128()).await.promised(false), 0);
        let refused = PoolKey::end(&lab.operator, of, Incarnation(1), pool(1)).await;
        assert!(refused.is_err(), "a former incarnation");
    });
}

/// At most two replicas are filled on a pool, over all volumes. A volume whose holder is gone does
/// not count: nothing is copied for it.
#[test]
fn resyncs_of_a_pool_have_a_bound() {
    run("resyncs_of_a_pool_have_a_bound", async |program| {
        let lab = Lab::start(program, 2).await;
        let placing = |number| Placing {
            wish: Wish {
                is_resync: true,
                ..lab.placing(number, 1, GIB).wish
            },
            resync: Some(Resync::Lost),
            other_nodes: vec![node(1)],
            ..lab.placing(number, 1, GIB)
        };
        for number in 1..=2 {
            lab.serve(number, 1).await;
        }
        let first = lab.operator.place(&placing(1)).await.expect("the first");
        lab.operator.place(&placing(2)).await.expect("the second");
        let refused = why(lab.operator.place(&placing(3)).await);
        assert!(refused.contains("fills fewer than 2 replicas"), "{refused}");
        let state = ExportState {
            is: Is::There,
            bytes: GIB,
            block_size: 4096,
            nsid: 1,
            why: None,
        };
        let (of, export_id) = (first[0].node, first[0].export_id);
        let reported = lab
            .operator
            .set_export_state(of, lab.leases[&of], export_id, Some(&state));
        reported.await.expect("reported");
        lab.operator
            .resync_is_done(of, export_id)
            .await
            .expect("in sync");
        lab.operator.place(&placing(3)).await.expect("the third");
        lab.serve(3, 1).await;
        let refused = why(lab.operator.place(&placing(4)).await);
        assert!(refused.contains("fills fewer than 2"), "{refused}");
        let other = Incarnation(lab.leases[&node(1)].0 + 1);
        lab.serve_as(3, node(1), other).await;
        lab.operator
            .place(&placing(4))
            .await
            .expect("3 is not served");
        let other = Placing {
            left_out: vec![pool(2)],
            ..placing(5)
        };
        let refused = why(lab.operator.place(&other).await);
        assert!(refused.contains("none failed a moment ago"), "{refused}");
    });
}

/// The first live node sets the brake, and it stops replacements of lost replicas. An operator
/// releases it: the nodes that were gone then do not set it again, but a further one does. It ends
/// by itself once all nodes that it was set for are back.
#[test]
fn the_brake_stops_replacements() {
    run("the_brake_stops_replacements", async |program| {
        let mut lab = Lab::start(program, 6).await;
        let (mut storm, mut other) = (Storm::default(), Storm::default());
        let at = |seconds: u64| BootTime::default() + Duration::from_secs(seconds);
        let described = async |lab: &Lab| {
            let all = lab.operator.described().await.expect("nodes");
            let nodes: BTreeMap<_, _> = all.iter().map(|(id, key, _)| (*id, key.clone())).collect();
            let live = all
                .iter()
                .filter(|(_, _, lives)| *lives)
                .map(|(id, ..)| *id);
            let standing: BTreeMap<_, _> = live.map(|id| (id, lab.leases[&id])).collect();
            (nodes, standing)
        };
        let look = async |lab: &Lab, me: u128, storm: &mut Storm, now| {
            let (nodes, standing) = described(lab).await;
            let looked = BrakeKey::watch(&lab.operator, node(me), storm, &nodes, &standing, now);
            looked.await.expect("a look")
        };
        assert_eq!(look(&lab, 1, &mut storm, at(0)).await, Looked::Nothing);
        for number in [4, 5, 6] {
            lab.delete(&lab.operator.prefix.lease(node(number))).await;
        }
        assert_eq!(look(&lab, 2, &mut other, at(1)).await, Looked::Nothing);
        let Looked::Braked(brake) = look(&lab, 1, &mut storm, at(1)).await else {
            panic!("three of six are gone");
        };
        assert_eq!((brake.gone.len(), brake.of, &brake.zone), (3, 6, &None));
        assert_eq!(
            look(&lab, 1, &mut storm, at(2)).await,
            Looked::Nothing,
            "once"
        );

        let resync = |resync| Placing {
            resync: Some(resync),
            ..lab.placing(1, 1, GIB)
        };
        let lost = lab.operator.place(&resync(Resync::Lost)).await;
        assert!(matches!(lost, Err(Error::Braked { .. })), "{lost:?}");
        let evicted = lab.operator.place(&resync(Resync::Evicted)).await;
        evicted.expect("an eviction is exempt from the brake");
        let created = lab.operator.place(&lab.placing(2, 1, GIB)).await;
        created.expect("a new volume");

        let released = BrakeKey::release(&lab.operator).await.expect("an answer");
        assert_eq!(released, Some(brake));
        assert_eq!(
            BrakeKey::release(&lab.operator).await.expect("an answer"),
            None
        );
        assert_eq!(look(&lab, 1, &mut storm, at(3)).await, Looked::Nothing);
        let lost = lab.operator.place(&resync(Resync::Lost)).await;
        lost.expect("released");
        // One returns and goes again: it is not excused any more. One of six is no storm.
        lab.lease(6).await;
        assert_eq!(look(&lab, 1, &mut storm, at(4)).await, Looked::Nothing);
        let (stored, _) = BrakeKey::read(&lab.operator).await.expect("a key");
        assert_eq!(stored.excused.len(), 2);
        for number in [3, 6, 2] {
            lab.delete(&lab.operator.prefix.lease(node(number))).await;
        }
        let braked = look(&lab, 1, &mut storm, at(5)).await;
        let Looked::Braked(brake) = braked else {
            panic!("{braked:?}");
        };
        assert_eq!(brake.gone.len(), 3, "without those that are excused");
        for number in [2, 3] {
            lab.lease(number).await;
        }
        assert_eq!(look(&lab, 1, &mut storm, at(6)).await, Looked::Nothing);
        lab.delete(&lab.operator.prefix.node(node(6))).await;
        let released = look(&lab, 1, &mut storm, at(7)).await;
        assert_eq!(released, Looked::Released(brake), "back, or removed");
        // Excused nodes that are back count again, also if all nodes are live.
        for number in [4, 5] {
            lab.lease(number).await;
        }
        assert_eq!(look(&lab, 1, &mut storm, at(8)).await, Looked::Nothing);
        let (stored, _) = BrakeKey::read(&lab.operator).await.expect("a key");
        assert!(stored.excused.is_empty());
    });
}

/// A cordon that comes between the choice and the promise counts: the choice is made again.
#[test]
fn avoided_nodes_get_nothing() {
    run("avoided_nodes_get_nothing", async |program| {
        let lab = Lab::start(program, 2).await;
        lab.operator.set_evict(node(2), true).await.expect("set");
        let placed = lab.operator.place(&lab.placing(1, 1, GIB)).await;
        assert_eq!(placed.expect("room")[0].node, node(1));
        let refused = why(lab.operator.place(&lab.placing(2, 2, GIB)).await);
        assert!(
            refused.contains("neither cordoned, drained nor evicted"),
            "{refused}"
        );
        let facts = lab.operator.facts().await.expect("facts");
        lab.operator.set_evict(node(2), false).await.expect("set");
        let placing = lab.placing(3, 1, GIB);
        let choice = Choice {
            node: node(2),
            pool: pool(2),
        };
        let chosen = Chosen {
            choices: vec![choice],
            sources: Vec::new(),
        };
        let (txn, _) = lab.operator.promise(&placing, &facts, &chosen);
        let answer = lab.operator.transact("key", txn).await.expect("an answer");
        assert!(!answer.is_made, "the node's key has changed since");
        // A node that was removed has no pools.
        lab.delete(&lab.operator.prefix.lease(node(2))).await;
        lab.operator.remove(node(2)).await.expect("removed");
        assert_eq!(lab.operator.pools().await.expect("pools").len(), 1);
    });
}

/// The first replica of a clone is on the pool of its snapshot, and no other one is on that node.
/// A pool or a node that may not have it is a refusal with the demand.
#[test]
fn a_clone_is_on_the_pool_of_its_snapshot() {
    run("a_clone_is_on_the_pool_of_its_snapshot", async |program| {
        let lab = Lab::start(program, 3).await;
        let lvol = Uuid::from_u128(70);
        let source = CloneSource {
            node: node(2),
            pool: pool(2),
            lvol,
        };
        let clone = |number, count, bytes| Placing {
            clone_of: vec![source],
            ..lab.placing(number, count, bytes)
        };
        let placed = lab.operator.place(&clone(1, 3, GIB)).await.expect("room");
        let nodes: BTreeSet<_> = placed.iter().map(|one| one.node).collect();
        assert_eq!((placed[0].node, nodes.len()), (node(2), 3));
        let source_of = |placed: &Placed| placed.export.place.clone().and_then(|one| one.source);
        let sources: Vec<_> = placed.iter().map(source_of).collect();
        assert_eq!(sources, [Some(lvol), None, None]);
        let promised = lab.pool(2).await.promised(false);
        assert_eq!(promised, GIB, "as any replica");

        let named = |nodes: Vec<NodeId>, count| {
            let mut placing = clone(2, count, GIB);
            placing.wish.nodes = nodes;
            placing
        };
        let placed = lab.operator.place(&named(vec![node(2), node(3)], 2)).await;
        let nodes = placed.expect("room").into_iter().map(|one| one.node);
        assert_eq!(nodes.collect::<Vec<_>>(), [node(2), node(3)]);
        let refused = lab.operator.place(&named(vec![node(1), node(3)], 2)).await;
        let demand = |refused: Result<Vec<Placed>, Error>| match refused {
            Err(Error::NotPlaced { demand, why, .. }) => {
                assert!(why.contains("snapshot"), "{why}");
                demand
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(demand(refused), Unmet::Request);
        let mut of_class = clone(3, 1, GIB);
        of_class.wish.class = Some("nvme".to_owned());
        let refused = lab.operator.place(&of_class).await;
        assert_eq!(demand(refused), Unmet::Request);
        let refused = lab.operator.place(&clone(4, 1, 100 * GIB)).await;
        assert_eq!(demand(refused), Unmet::Room);
        lab.operator.set_cordon(node(2), true).await.expect("set");
        let refused = lab.operator.place(&clone(5, 1, GIB)).await;
        assert_eq!(demand(refused), Unmet::Nodes);
        lab.operator.set_cordon(node(2), false).await.expect("set");
        lab.delete(&lab.operator.prefix.lease(node(2))).await;
        let refused = lab.operator.place(&clone(6, 1, GIB)).await;
        assert_eq!(demand(refused), Unmet::Nodes);
    });
}

/// Goal: as many replicas as possible are clones of the snapshot's lvols, on different nodes and in
/// different failure domains. One that cannot be used is left out, and named nodes get their
/// replica. Method: lvols on three of four nodes.
#[test]
fn a_clone_uses_all_lvols_of_its_snapshot() {
    run("a_clone_uses_all_lvols_of_its_snapshot", async |program| {
        let lab = Lab::start(program, 4).await;
        let lvol = |number: u128| Uuid::from_u128(70 + number);
        let source = |number: u128| CloneSource {
            node: node(number),
            pool: pool(number),
            lvol: lvol(number),
        };
        let clone = |number, count| Placing {
            clone_of: (1..=3).map(source).collect(),
            ..lab.placing(number, count, GIB)
        };
        let place = async |placing: Placing| {
            let placed = lab.operator.place(&placing).await.expect("room");
            let shown = placed.iter().map(|one| {
                let source = one.export.place.clone().and_then(|place| place.source);
                (one.node, source)
            });
            shown.collect::<Vec<_>>()
        };
        let copy = |number: u128| (node(number), Some(lvol(number)));
        let all = [copy(1), copy(2), copy(3)];
        assert_eq!(place(clone(1, 2)).await, all[..2]);
        assert_eq!(place(clone(2, 3)).await, all);
        let four = place(clone(3, 4)).await;
        assert_eq!((&four[..3], four[3]), (&all[..], (node(4), None)));

        let named = |number, count, nodes: &[u128]| {
            let mut placing = clone(number, count);
            placing.wish.nodes = nodes.iter().map(|number| node(*number)).collect();
            placing
        };
        assert_eq!(place(named(4, 2, &[3])).await, [copy(3), copy(1)]);
        let with_other = place(named(5, 2, &[4])).await;
        assert_eq!(with_other, [copy(1), (node(4), None)]);

        // A clone that leaves no failure domain for a named node is given up.
        let zone = json!({ "v": 1, "name": "n4", "labels": { "zone": "2" } });
        lab.put(&lab.operator.prefix.node(node(4)), &zone).await;
        let mut strict = named(7, 3, &[4]);
        strict.clone_of.truncate(2);
        (strict.wish.spread, strict.wish.strict) = (vec!["zone".to_owned()], true);
        let chosen = place(strict).await;
        assert_eq!(chosen[0], copy(1));
        let others: BTreeSet<_> = chosen[1..].iter().copied().collect();
        assert_eq!(others, BTreeSet::from([(node(3), None), (node(4), None)]));

        lab.operator.set_cordon(node(1), true).await.expect("set");
        assert_eq!(place(clone(6, 2)).await, [copy(2), copy(3)]);
        lab.operator.set_cordon(node(1), false).await.expect("set");
    });
}

//! The driver without etcd: its end, its tasks, and the first lists of keys.

use nacre_cluster_core::{Holder, Revision};
use nacre_cluster_etcd::{Endpoints, KeyValue};
use serde_json::json;

use super::*;
use crate::follow::KeyChange;
use crate::tests::{Engine, Rig, at};

/// A node that has a lease, and whose etcd is gone.
fn driver(engine: Engine) -> Driver {
    let id = NodeId(Uuid::from_u128(1));
    let endpoints = Endpoints {
        urls: vec!["http://127.0.0.1:1".to_owned()],
        tls: None,
        credentials: None,
        deadline: Duration::from_millis(200),
    };
    let (state, _) = watch::channel(NodeState::Left);
    let shared = Shared {
        word: Arc::default(),
        incarnation: Arc::default(),
        events: Events::default(),
        renewals: AtomicU64::default(),
        state,
        seen: Mutex::default(),
        volumes: Mutex::default(),
        seen_keys: SeenKeys::default(),
        cluster: OnceLock::new(),
    };
    let me = Me {
        id,
        machine: None,
        process: Uuid::nil(),
        cluster: None,
        description: Description::default(),
        is_balanced: false,
    };
    let client = Arc::new(Client::new(&endpoints).expect("endpoints"));
    let prefix = Prefix::new("lab").expect("a name");
    let mut driver = Driver::new(me, client, prefix, Arc::new(shared), Box::new(engine));
    let (incarnation, now) = (Incarnation(1), clock::now());
    let node = id;
    let holder = Holder { node, incarnation };
    driver.phase = Phase::In(Lease::new(holder, Timing::default(), now, now));
    driver
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

/// etcd is gone before the first list of leases: the node ends all the same.
#[test]
fn a_node_ends_without_a_list_of_leases() {
    block_on(async {
        let driver = driver(Engine::default());
        let shared = Arc::clone(&driver.shared);
        let ((_reports, receiver), (end, ended)) =
            (mpsc::channel(1), tokio::sync::oneshot::channel());
        drop(end);
        let left = tokio::time::timeout(LEAVE, driver.run(receiver, ended));
        left.await.expect("it ends");
        assert_eq!(*shared.state.borrow(), NodeState::Left);
    });
}

/// Goal: a volume that no node could take stays where it is served. Method: a drain while etcd is
/// away, and the end of the node, which cannot wait.
#[test]
fn no_handover_without_etcd() {
    let leaving = async |away: Option<BootTime>, leave_by: Option<BootTime>| {
        let mut driver = driver(Engine::default());
        let rig = Rig::holding();
        (driver.volumes, driver.nodes) = (rig.volumes, rig.nodes);
        let mut drained = NodeKey::default();
        drained.drain = true;
        driver.nodes.describe(driver.me.id, Some(drained));
        (driver.away, driver.leave_by) = (away, leave_by);
        driver.handover(at(300));
        driver.volumes.in_state(HoldingState::Leaving).len()
    };
    block_on(async {
        assert_eq!(leaving(None, None).await, 1);
        assert_eq!(leaving(Some(at(250)), None).await, 0);
        assert_eq!(leaving(Some(at(250)), Some(at(6000))).await, 1);
    });
}

/// A task that panics ends the thread: no step waits for its answer.
#[test]
#[should_panic(expected = "a bug")]
fn a_panic_of_a_task_is_one_of_the_driver() {
    block_on(async {
        let mut driver = driver(Engine::default());
        driver.jobs.spawn(async { panic!("a bug") });
        let ((_reports, receiver), (_end, ended)) =
            (mpsc::channel(1), tokio::sync::oneshot::channel());
        let run = tokio::time::timeout(LEAVE, driver.run(receiver, ended));
        let _ = run.await;
    });
}

/// The first list of these keys: two nodes and leases, a volume, its publication, an export.
fn list(driver: &Driver, kind: Kind) -> KeyChange {
    list_at(driver, kind, 1, 4)
}

/// The list at a revision, with the record of this epoch.
fn list_at(driver: &Driver, kind: Kind, revision: i64, epoch: u64) -> KeyChange {
    let prefix = &driver.prefix;
    let node = |number| NodeId(Uuid::from_u128(number));
    let volume = Uuid::from_u128(100);
    let lease = json!({ "v": 1, "n": 0, "process": Uuid::nil() });
    let described = json!({ "v": 1, "name": "ant", "version": "0.1.0" });
    let record =
        json!({ "epoch": epoch, "serving": 4, "revision": 7, "holder": null, "members": [] });
    let export = json!({
        "v": 1, "volume": volume, "device": "disk0", "want": "there", "is": "there",
    });
    let keys = match kind {
        Kind::Leases => vec![
            (prefix.lease(node(1)), lease.clone()),
            (prefix.lease(node(2)), lease),
        ],
        Kind::Nodes => vec![
            (prefix.node(node(1)), described.clone()),
            (prefix.node(node(2)), described),
        ],
        Kind::Volumes => vec![(prefix.core_volume(VolumeId(volume)), record)],
        Kind::Publications => vec![(
            prefix.publication(VolumeId(volume)),
            json!({ "v": 1, "nqn": "nqn.a", "slots": {} }),
        )],
        Kind::Exports => {
            let export_id = ExportId(Uuid::from_u128(200));
            vec![(prefix.export(driver.me.id, export_id), export)]
        }
        Kind::Operations | Kind::Renewals | Kind::Snapshots => Vec::new(),
    };
    let keys = keys.into_iter().map(|(key, value)| KeyValue {
        key: key.into_bytes(),
        create_revision: revision,
        mod_revision: revision,
        version: 1,
        value: value.to_string().into_bytes(),
    });
    let keys = keys.collect();
    KeyChange::All { keys, revision }
}

/// Goal: the engine takes no node for one without a lease while a list is missing, and lets hosts
/// in only when it knows everything. Method: the first lists arrive in many orders.
#[test]
fn first_lists_in_any_order() {
    let kinds = AWAITED;
    let rotated = (0..kinds.len()).map(|by| {
        let mut order = kinds;
        order.rotate_left(by);
        order
    });
    let reversed = rotated.clone().map(|mut order| {
        order.reverse();
        order
    });
    block_on(async {
        for order in rotated.chain(reversed) {
            let engine = Engine::default();
            let mut driver = driver(engine.clone());
            let mut calls = Vec::new();
            for (at, kind) in order.into_iter().enumerate() {
                let change = list(&driver, kind);
                driver.news(kind, change);
                driver.show_news();
                calls.extend(engine.all_calls());
                let arrived = &order[..=at];
                let both = arrived.contains(&Kind::Leases) && arrived.contains(&Kind::Nodes);
                let has = |call: &str| calls.iter().any(|made| made == call);
                assert_eq!(has("nodes 2 2"), both, "{arrived:?}: {calls:?}");
                assert_eq!(has("listed"), arrived.len() == kinds.len(), "{arrived:?}");
            }
            let last = calls.pop();
            assert_eq!(last.as_deref(), Some("listed"), "{order:?}");
            calls.sort();
            let expected = ["exports 1", "nodes 2 2", "publish", "show"];
            assert_eq!(calls, expected, "{order:?}");
            // A compaction: the leases are listed again.
            let change = list(&driver, Kind::Leases);
            driver.news(Kind::Leases, change);
            driver.show_news();
            assert_eq!(engine.all_calls(), Vec::<String>::new());
        }
    });
}

/// Goal: a node that runs while etcd loses its data and gets a backup believes the restored keys,
/// although their revisions are earlier, and shows hosts the former ones until then. Method: the
/// watch reports the other store, or only the cluster's key shows it.
#[test]
fn a_restored_store_begins_anew() {
    let volume = VolumeId(Uuid::from_u128(100));
    for is_noticed in [true, false] {
        block_on(async {
            let engine = Engine::default();
            let mut driver = driver(engine.clone());
            let cluster = keys::Cluster::new("lab", Duration::from_secs(2)).expect("a lease");
            driver.phase = Phase::Looking {
                not_before: clock::now(),
                is_asked: true,
            };
            driver.found_cluster(Ok(cluster.clone()), clock::now());
            for kind in AWAITED {
                let change = list_at(&driver, kind, 500, 4);
                driver.news(kind, change);
            }
            driver.show_news();
            let incarnation = Incarnation(499);
            driver.phase = Phase::In(Lease::new(
                Holder {
                    node: driver.me.id,
                    incarnation,
                },
                Timing::default(),
                clock::now(),
                clock::now(),
            ));
            engine.all_calls();
            if is_noticed {
                driver.news(Kind::Nodes, KeyChange::OtherStore);
                driver.news(Kind::Volumes, KeyChange::OtherStore);
                // The empty store, before the restore.
                let (keys, revision) = (Vec::new(), 2);
                driver.news(Kind::Exports, KeyChange::All { keys, revision });
            } else {
                driver.lost(clock::now());
            }
            assert!(matches!(driver.phase, Phase::Looking { .. }));
            driver.show_news();
            let calls = engine.all_calls();
            let is_kept = |call: &String| call == "show" || call == "publish";
            assert!(calls.iter().all(is_kept), "{calls:?}");
            assert_eq!(driver.again, Again::Nothing);

            let late = Leases {
                revision: 600,
                present: BTreeSet::new(),
                keys: Vec::new(),
            };
            driver.jobs.spawn(async { Done::Looked(Ok(late)) });
            let mut restored = cluster;
            restored.restored = Some(Uuid::from_u128(7));
            driver.phase = Phase::Looking {
                not_before: clock::now(),
                is_asked: true,
            };
            driver.found_cluster(Ok(restored.clone()), clock::now());
            assert_eq!(driver.again, Again::All);
            assert!(matches!(driver.phase, Phase::Joining(_)));
            for kind in AWAITED {
                let change = list_at(&driver, kind, 3, 9);
                driver.news(kind, change);
            }
            driver.show_news();
            let epoch = driver.volumes.record_epoch(volume);
            assert_eq!(epoch, Some(9));
            let standing: Vec<u64> = driver.nodes.standing.values().map(|one| one.0).collect();
            assert_eq!(standing, [3, 3]);
            let calls = engine.all_calls();
            let has = |call: &str| calls.iter().any(|made| made == call);
            assert!(
                has("nodes 2 2") && has("exports 1") && has("publish") && !has("forget"),
                "{calls:?}"
            );

            // The read of the former store ends: it shows no end of a lease in this one.
            let wait = Duration::from_millis(100);
            while let Ok(Some(done)) = tokio::time::timeout(wait, driver.jobs.next()).await {
                driver.done(done.expect("no panic"), clock::now());
            }
            assert_eq!(driver.nodes.standing.len(), 2);

            // The same store: a node that was fenced goes on with its views.
            driver.again = Again::Nothing;
            driver.phase = Phase::Looking {
                not_before: clock::now(),
                is_asked: true,
            };
            driver.found_cluster(Ok(restored), clock::now());
            assert_eq!(driver.again, Again::Nothing);
        });
    }
}

/// Goal: a node that starts before its cluster is there, as one with a new data directory before a
/// rebuild, joins without a restart. Method: etcd has no cluster, then it has one, and loses it.
#[test]
fn a_cluster_may_come_later() {
    block_on(async {
        let mut driver = driver(Engine::default());
        let key = driver.prefix.meta();
        let look = |driver: &mut Driver, answer| {
            driver.phase = Phase::Looking {
                not_before: clock::now(),
                is_asked: true,
            };
            driver.found_cluster(answer, clock::now());
            let is_looking = matches!(
                driver.phase,
                Phase::Looking {
                    is_asked: false,
                    ..
                }
            );
            let state = driver.shared.state.borrow().clone();
            (is_looking, state)
        };
        let absent = || Err(Error::NoCluster { key: key.clone() });
        let obstacle = absent().err();
        let waits = (true, NodeState::Joining { obstacle });
        assert_eq!(look(&mut driver, absent()), waits);
        assert_eq!(driver.shared.cluster.get(), None);
        let cluster = keys::Cluster::new("lab", Duration::from_secs(2)).expect("a lease");
        assert!(!look(&mut driver, Ok(cluster.clone())).0);
        assert!(matches!(driver.phase, Phase::Joining(_)));
        assert_eq!(driver.shared.cluster.get(), Some(&cluster.id));
        let expected = cluster.id;
        let key = key.clone();
        let obstacle = Some(Error::LostCluster { key, expected });
        let waits = (true, NodeState::Joining { obstacle });
        assert_eq!(look(&mut driver, absent()), waits);
    });
}

/// Goal: a node with a new lease takes no volume before it has listed the publications again: a
/// host that lost its permission meanwhile counts as cut off. Method: lists of earlier and later
/// revisions than the lease's.
#[test]
fn a_new_lease_needs_the_publications() {
    block_on(async {
        let mut driver = driver(Engine::default());
        for kind in AWAITED {
            let change = list(&driver, kind);
            driver.news(kind, change);
        }
        driver.phase = Phase::Looking {
            not_before: clock::now(),
            is_asked: true,
        };
        let cluster = keys::Cluster::new("lab", Duration::from_secs(2)).expect("a lease");
        let now = clock::now();
        driver.found_cluster(Ok(cluster), now);
        driver.turn(now);
        driver.found_lease(Ok(None), now);
        driver.turn(now);
        driver.created(Ok(Outcome::Made(Revision(5))), now);
        assert_eq!(driver.again, Again::Publications);
        assert!(matches!(driver.phase, Phase::In(_)));
        let mut is_polled_after = |revision| {
            let change = list_at(&driver, Kind::Publications, revision, 4);
            driver.news(Kind::Publications, change);
            driver.turn(clock::now());
            driver.volumes.are_polled()
        };
        assert_eq!([3, 4, 5].map(&mut is_polled_after), [false, false, true]);
    });
}

/// Goal: a node that found no place when it described itself ends all serving, gives its lease back
/// and stays out, whose event says why. An answer to an earlier incarnation changes nothing.
/// Method: the result of the description, for two incarnations.
#[test]
fn a_node_without_a_place_stays_out() {
    block_on(async {
        let mut driver = driver(Engine::default());
        driver.shared.word.set(BootTime(u64::MAX));
        driver.shared.incarnation.store(1, Ordering::SeqCst);
        let key = driver.prefix.node(driver.me.id);
        let why = Error::TooManyNodes { key, most: 128 };
        driver.done(Done::NoRoom(Incarnation(9), why.clone()), clock::now());
        assert!(matches!(driver.phase, Phase::In(_)) && driver.jobs.is_empty());
        driver.done(Done::NoRoom(Incarnation(1), why.clone()), clock::now());
        assert!(matches!(driver.phase, Phase::Out));
        assert!(!driver.jobs.is_empty(), "the lease is given back");
        assert!(!driver.shared.word.is_good(clock::now()));
        assert_eq!(driver.shared.incarnation.load(Ordering::SeqCst), 0);
        let why_text = why.to_string();
        assert_eq!(*driver.shared.state.borrow(), NodeState::Out { why });
        let events = driver.shared.events.after(0);
        let what: Vec<Decision> = events.into_iter().map(|event| event.what).collect();
        assert_eq!(what, [Decision::NodeExcluded { why: why_text }]);
    });
}

use nacre_bdev_replica::format::label::LabelReplica;
use nacre_bdev_replica::handle::ResyncStatus;
use nacre_bdev_replica::model::Stamp;
use nacre_cluster_core::{ExportId, Incarnation, NodeId, VolumeId};

use super::*;

fn source(number: u128) -> CutSource {
    CutSource {
        node: NodeId(Uuid::from_u128(number)),
        export_id: ExportId(Uuid::from_u128(10 + number)),
        device: format!("lvol{number}"),
    }
}

fn opened(number: u128) -> ReplicaStatus {
    ReplicaStatus {
        id: Uuid::from_u128(20 + number),
        slot: number as u8,
        device: source(number).export_id.0.to_string(),
        state: ReplicaState::InSync,
        attached: true,
        offline: false,
        local: false,
        fencing: None,
        why: None,
        resync: None,
        is_unequal: false,
        last_resync: None,
        reads: 0,
        writes: 0,
        errors: 0,
    }
}

/// Goal: the holder has only a replica cut that it writes to, and none while it reconciles: a host
/// may have read other blocks than that replica has. Method: one fact of one replica is another.
#[test]
fn the_holder_knows_which_replicas_are_equal() {
    let sources = [source(1), source(2)];
    let all = || vec![opened(1), opened(2)];
    assert_eq!(used(&all(), &sources), sources);
    let mut away = all();
    away[0].attached = false;
    assert_eq!(
        used(&away, &sources),
        [source(2)],
        "its last writes may be elsewhere"
    );
    let mut out = all();
    out[1].state = ReplicaState::Filling {
        watermark: 0,
        last_label: Default::default(),
    };
    assert_eq!(
        used(&out, &sources),
        [source(1)],
        "the record is an old one"
    );
    let mut other = all();
    other.pop();
    assert_eq!(
        used(&other, &sources),
        [source(1)],
        "one that the volume does not have"
    );
    let mut unequal = all();
    unequal[1].is_unequal = true;
    assert_eq!(used(&unequal, &sources), [], "after a write that failed");
    for (kind, expected) in [
        (ResyncKind::Reconcile, 0),
        (ResyncKind::Partial, 2),
        (ResyncKind::Full, 2),
    ] {
        let mut copied = all();
        copied[1].resync = Some(ResyncStatus {
            kind,
            source: None,
            total_bytes: 1,
            left_bytes: 1,
            bytes_per_s: 0,
            left_s: None,
        });
        assert_eq!(used(&copied, &sources).len(), expected, "{kind:?}");
    }
}

/// Goal: of the nodes that look at a request, one acts at most: the holder, or without one the node
/// of the first replica. Method: all kinds of holders, for a node whose volume is not open.
#[test]
fn one_node_chooses() {
    let daemon = crate::methods::testing::test_daemon();
    let sources = [source(1), source(2)];
    let key: SnapshotKey = serde_json::from_value(serde_json::json!({
        "v": 1, "volume": Uuid::from_u128(7), "name": "s", "want": "there", "is": "asked",
    }))
    .expect("a key");
    assert_eq!(key.volume(), VolumeId(Uuid::from_u128(7)));
    let me = |number: u128| Holder {
        node: NodeId(Uuid::from_u128(number)),
        incarnation: Incarnation(5),
    };
    let of = |number, holder| candidates(&daemon.engine, me(number), &key, holder, &sources);
    assert_eq!(of(1, CutHolder::None), sources);
    assert_eq!(of(2, CutHolder::None), [], "the first one acts");
    assert_eq!(of(1, CutHolder::Stands(me(2))), []);
    assert_eq!(
        of(1, CutHolder::Stands(me(1))),
        [],
        "it has not opened the volume"
    );
    let earlier = Holder {
        incarnation: Incarnation(4),
        ..me(1)
    };
    assert_eq!(of(1, CutHolder::Stands(earlier)), []);
    for number in [1, 2] {
        let over = CutHolder::Over(NodeId(Uuid::from_u128(1)));
        assert_eq!(of(number, over), [], "it may serve by confirmation");
    }
}

/// Goal: the writes of a volume are held back for one snapshot at a time, with a pause after it.
/// Those of few volumes are at a time. The mark of a task that hangs passes. Method: given times.
#[test]
fn holds_have_a_pause_and_a_limit() {
    let key = |number: u128| {
        let value = serde_json::json!({
            "v": 1, "volume": Uuid::from_u128(number), "name": "s", "want": "there",
            "is": "asked",
        });
        serde_json::from_value::<SnapshotKey>(value).expect("a key")
    };
    let (snapshots, begun) = (Snapshots::default(), Instant::now());
    let begin = |number, now| snapshots.begin_hold(&key(number), now);
    assert!(begin(1, begun));
    assert!(!begin(1, begun), "another snapshot of the volume");
    snapshots.end_hold(&key(1), begun);
    let pause = hold_time(0);
    assert!(!begin(1, begun + pause / 2), "hosts write");
    let later = begun + 2 * pause;
    for number in 1..=MAX_HELD as u128 {
        assert!(begin(number, later), "{number}");
    }
    assert!(!begin(99, later), "too many at a time");
    snapshots.end_hold(&key(1), later);
    assert!(begin(99, later));
    assert!(begin(2, later + 3 * HANGS), "its task hangs");
}

/// Goal: a step that fails again and again keeps no other snapshot waiting. Method: looks that
/// start as many steps as they may, among several times as many snapshots.
#[test]
fn all_have_their_turn() {
    let all: BTreeMap<Uuid, ()> = (1..=40).map(|id| (Uuid::from_u128(id), ())).collect();
    let (mut last, mut started) = (Uuid::nil(), BTreeMap::<Uuid, u32>::new());
    for _ in 0..5 {
        for (id, ()) in in_turn(&all, last).take(AT_ONCE) {
            *started.entry(*id).or_default() += 1;
            last = *id;
        }
    }
    assert_eq!(started.len(), 40);
    assert!(started.values().all(|times| *times == 2), "{started:?}");
    assert_eq!(
        in_turn(&all, Uuid::max()).count(),
        40,
        "the last one is gone"
    );
}

#[test]
fn an_lvol_counts_by_its_label() {
    let volume = Uuid::from_u128(1);
    let labelled = |of: u128, state: LabelState, clean: bool, replicas: u128| Label {
        volume: Uuid::from_u128(of),
        name: String::new(),
        replica: Uuid::from_u128(7),
        slot: 0,
        stamp: Stamp::default(),
        sequence: 1,
        clean,
        block_size: 512,
        blocks: 1,
        region_shift: 20,
        replicas: (7..7 + replicas)
            .map(|id| LabelReplica {
                slot: id as u8 - 7,
                id: Uuid::from_u128(id),
                state,
            })
            .collect(),
    };
    for (of, state, clean, is_held, replicas, expected) in [
        (1, LabelState::InSync, true, false, 2, Some(true)),
        (1, LabelState::InSync, false, true, 2, Some(true)),
        // The last node did not close the volume: which replica is right is not decided.
        (1, LabelState::InSync, false, false, 2, None),
        (1, LabelState::InSync, false, false, 1, Some(true)),
        (1, LabelState::Filling, true, true, 2, Some(false)),
        (1, LabelState::Out, false, true, 2, Some(false)),
        // Another volume's.
        (2, LabelState::InSync, false, false, 2, Some(false)),
    ] {
        let label = labelled(of, state, clean, replicas);
        let found = counts(Some(&label), volume, is_held);
        let code = found.as_ref().err().map(|error| error.code);
        assert!(code.is_none_or(|code| code == -(Errno::EBUSY as i32)));
        assert_eq!(
            found.ok(),
            expected,
            "{of} {state:?} {clean} {is_held} {replicas}"
        );
    }
    assert!(!counts(None, volume, true).unwrap());
}

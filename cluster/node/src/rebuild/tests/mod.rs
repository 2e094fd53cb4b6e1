//! The decision, by tables of reports.

mod copy;
mod real;

use std::collections::BTreeMap;

use nacre_cluster_core::NodeId;
use serde_json::{Value, json};
use uuid::Uuid;

use super::copy::{CopiedRecord, Copy};
use super::*;
use crate::keys::{Cluster, Description};

const CLUSTER: Uuid = Uuid::from_u128(0xc);
pub(super) const V: Uuid = Uuid::from_u128(0x70);
const NODES: [&str; 3] = ["ant", "bee", "cow"];

pub(super) fn node(index: usize) -> Uuid {
    Uuid::from_u128(0xa0 + index as u128)
}

/// A replica of volume V, on the node of this index.
fn replica(index: usize) -> Uuid {
    Uuid::from_u128(0x10 + index as u128)
}

fn export(index: usize) -> Uuid {
    Uuid::from_u128(0xe0 + index as u128)
}

const IN: ReplicaFact = ReplicaFact::InSync;
const OUT: ReplicaFact = ReplicaFact::Out;
const FILLING: ReplicaFact = ReplicaFact::Filling;

/// The label of the replica of this index.
pub(super) fn label(index: usize, stamp: (u64, u64), states: &[ReplicaFact]) -> LabelFacts {
    let all = states.iter().enumerate();
    LabelFacts {
        volume: V,
        name: "v".to_owned(),
        replica: replica(index),
        epoch: stamp.0,
        revision: stamp.1,
        sequence: 1,
        block_size: 512,
        blocks: 4096,
        region_shift: 20,
        replicas: all
            .map(|(at, state)| LabelReplicaFacts {
                id: replica(at),
                slot: at as u8,
                state: *state,
            })
            .collect(),
    }
}

pub(super) fn device(name: &str, label: LabelFacts) -> Device {
    Device {
        name: name.to_owned(),
        aliases: vec![format!("alias-{name}")],
        label: LabelRead::Label(label),
    }
}

/// The record of V at this version, with three replicas.
pub(super) fn record(stamp: (u64, u64), states: &[&str]) -> Value {
    let replica = |(at, state): (usize, &&str)| {
        json!({
            "id": replica(at), "slot": at, "device": export(at), "node": node(at),
            "node_device": "disk", "offline": false, "state": { "state": state, "watermark": 0 },
        })
    };
    json!({
        "v": 1, "id": V, "name": "v", "block_size": 512, "blocks": 4096, "region_shift": 20,
        "epoch": stamp.0, "serving": stamp.0, "revision": stamp.1, "holder": node(0),
        "incarnation": 9, "settings": { "min_in_sync": 2 }, "later": true,
        "members": states.iter().enumerate().map(replica).collect::<Vec<_>>(),
    })
}

fn meta() -> Cluster {
    let meta = json!({ "v": 1, "id": CLUSTER, "name": "lab", "lease_ms": 3000 });
    serde_json::from_value(meta).expect("a cluster")
}

/// The copy of the node of this index, without volumes.
pub(super) fn copy(index: usize) -> Copy {
    let nodes = NODES.iter().enumerate();
    let nodes: BTreeMap<Uuid, Value> = nodes
        .map(|(at, name)| (node(at), json!({ "v": 1, "name": name, "cordon": at == 2 })))
        .collect();
    let exports = json!({
        (export(index).to_string()): {
            "v": 1, "volume": V, "device": "disk", "want": "there", "is": "there", "nsid": 5,
            "by": { "node": node(0), "incarnation": 1 },
        },
    });
    let text = json!({
        "v": 1, "meta": meta(), "revision": 100, "created": 1000, "nodes": nodes, "volumes": {},
        "publications": {}, "exports": exports,
    });
    serde_json::from_value(text).expect("a copy")
}

pub(super) fn with_record(mut copy: Copy, order: i64, value: Value) -> Copy {
    let id = value["id"].as_str().and_then(|id| id.parse().ok());
    copy.volumes
        .insert(id.expect("an id"), CopiedRecord { order, value });
    copy
}

pub(super) fn published(mut copy: Copy, value: Value) -> Copy {
    copy.publications.insert(V, value);
    copy
}

pub(super) fn found(index: usize, copy: Option<Copy>, devices: Vec<Device>) -> Found {
    let description = Description {
        name: NODES[index].to_owned(),
        version: "new".to_owned(),
        ..Description::default()
    };
    Found::new(
        NodeId(node(index)),
        description,
        copy.as_ref().map(|_| CLUSTER),
        Ok(copy),
        devices,
    )
}

fn plan_with(reports: Vec<Found>, options: &Options) -> Plan {
    let all = reports.into_iter().map(|one| (NodeId(one.node), one));
    decide("lab", &all.collect(), options).expect("one cluster")
}

fn plan(reports: Vec<Found>) -> Plan {
    plan_with(reports, &Options::default())
}

fn without(names: &[&str]) -> Options {
    Options {
        without: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Options::default()
    }
}

fn value(plan: &Plan, key: &str) -> Option<Value> {
    let saved = plan.backup.keys.iter().find(|saved| saved.key == key)?;
    Some(serde_json::from_str(&saved.value).unwrap_or_else(|_| saved.value.clone().into()))
}

fn volume(plan: &Plan) -> Value {
    value(plan, &format!("vol/{V}")).expect("the volume")
}

/// The states of the replicas.
fn states(plan: &Plan) -> Vec<(String, bool)> {
    let record = volume(plan);
    let lost = record["restored"]["lost"].clone();
    let replicas = record["members"].as_array().cloned().unwrap_or_default();
    let state = |replica: &Value| {
        let lost = lost.as_array().into_iter().flatten();
        let is_lost = lost.clone().any(|id| *id == replica["id"]);
        let state = replica["state"]["state"].as_str().unwrap_or_default();
        (state.to_owned(), is_lost)
    };
    replicas.iter().map(state).collect()
}

fn expect(plan: &Plan, expected: &[(&str, bool)]) {
    let expected = expected
        .iter()
        .map(|(state, lost)| ((*state).to_owned(), *lost));
    assert_eq!(states(plan), expected.collect::<Vec<_>>(), "{plan:#?}");
}

/// Three nodes with the copies of version (4, 9), and labels with these stamps and states.
fn three(labels: [Option<LabelFacts>; 3]) -> Vec<Found> {
    let all = labels.into_iter().enumerate();
    all.map(|(at, label)| {
        let copy = with_record(copy(at), 7, record((4, 9), &["in_sync"; 3]));
        let devices = label.map(|label| device("disk", label));
        found(at, Some(copy), devices.into_iter().collect())
    })
    .collect()
}

/// Three nodes whose labels and copies agree.
pub(super) fn labelled_three() -> Vec<Found> {
    three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))))
}

/// A name, the labels, the version that counts, and the states of the replicas.
type Case = (
    &'static str,
    [Option<LabelFacts>; 3],
    (u64, u64),
    [&'static str; 3],
);

/// Goal: the last label that a replica in sync wrote decides, and older replicas are not in sync.
/// Method: a table of labels; the copies are older.
#[test]
fn the_last_label_of_a_replica_in_sync_decides() {
    let all_in = |index| label(index, (6, 20), &[IN, IN, IN]);
    let table: [Case; 5] = [
        (
            "all are equal",
            [0, 1, 2].map(|at| Some(all_in(at))),
            (6, 20),
            ["in_sync"; 3],
        ),
        (
            "one was out before",
            [
                Some(label(0, (6, 25), &[IN, OUT, IN])),
                Some(all_in(1)),
                Some(label(2, (6, 25), &[IN, OUT, IN])),
            ],
            (6, 25),
            ["in_sync", "filling", "in_sync"],
        ),
        (
            "one that is filled has the last label of all",
            [
                Some(label(0, (6, 25), &[IN, IN, FILLING])),
                Some(label(1, (6, 25), &[IN, IN, FILLING])),
                Some(label(2, (6, 26), &[IN, IN, FILLING])),
            ],
            (6, 25),
            ["in_sync", "in_sync", "filling"],
        ),
        (
            "one says of itself that it is in sync, with a label of an earlier epoch",
            [
                Some(label(0, (8, 30), &[IN, IN, IN])),
                Some(label(1, (8, 30), &[IN, IN, IN])),
                Some(label(2, (6, 20), &[IN, IN, IN])),
            ],
            (8, 30),
            ["in_sync", "in_sync", "filling"],
        ),
        (
            "only an absent one was in sync",
            [
                None,
                Some(label(1, (6, 25), &[IN, OUT, OUT])),
                Some(label(2, (6, 25), &[IN, OUT, OUT])),
            ],
            (6, 25),
            ["in_sync", "filling", "filling"],
        ),
    ];
    for (case, labels, at, expected) in table {
        let plan = plan(three(labels));
        expect(&plan, &expected.map(|state| (state, false)));
        let record = volume(&plan);
        assert_eq!(
            (
                &record["restored"]["epoch"],
                &record["restored"]["revision"]
            ),
            (&json!(at.0), &json!(at.1)),
            "{case}"
        );
        assert_eq!(record["epoch"], at.0 + 1000, "{case}");
        assert_eq!(record["serving"], at.0, "{case}");
        assert_eq!(
            (&plan.problems, &plan.missing),
            (&vec![], &vec![]),
            "{case}"
        );
    }
}

/// Goal: a record in a copy that is later than all labels stands, with its states, as after a
/// restore.
#[test]
fn a_later_record_stands() {
    let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))));
    let later = record((6, 21), &["in_sync", "filling", "in_sync"]);
    let of = reports[1]
        .copy
        .take()
        .map(|copy| with_record(copy, 7, later));
    reports[1].copy = of;
    let stands = plan(reports);
    expect(
        &stands,
        &["in_sync", "filling", "in_sync"].map(|state| (state, false)),
    );
    assert_eq!(
        volume(&stands)["restored"],
        json!({ "epoch": 6, "revision": 21 })
    );

    // Claims of a restored volume raised its epoch, and its labels are later than the backup.
    let mut restored = record((9, 21), &["in_sync"; 3]);
    restored["restored"] = json!({ "epoch": 5, "revision": 2, "lost": [replica(2)] });
    let states = [IN, OUT, IN];
    let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &states))));
    for report in &mut reports {
        let of = report.copy.take();
        report.copy = of.map(|copy| with_record(copy, 7, restored.clone()));
    }
    let plan = plan(reports);
    expect(
        &plan,
        &["in_sync", "filling", "in_sync"].map(|state| (state, false)),
    );
    assert_eq!(volume(&plan)["epoch"], 1009);
}

/// Goal: the facts that labels lack come from the copies: settings, fields of later versions, the
/// publication with its NQN, exports with their ids, nodes with the operators' marks.
#[test]
fn copies_have_the_rest() {
    let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))));
    let old = json!({ "v": 1, "nqn": "nqn.a", "slots": {}, "hosts": [] });
    let new = json!({ "v": 1, "nqn": "nqn.a", "slots": {}, "hosts": ["nqn.host"] });
    for (report, (revision, value)) in
        reports
            .iter_mut()
            .zip([(100, &old), (120, &new), (110, &old)])
    {
        let of = report
            .copy
            .take()
            .map(|copy| published(copy, value.clone()));
        report.copy = of.map(|copy| Copy { revision, ..copy });
    }
    let plan = plan(reports);
    let record = volume(&plan);
    assert_eq!(
        (&record["later"], &record["settings"]["min_in_sync"]),
        (&json!(true), &json!(2))
    );
    assert_eq!(record["holder"], Value::Null);
    assert_eq!(value(&plan, &format!("pub/{V}")), Some(new));
    assert_eq!(value(&plan, "name/v"), Some(json!(V)));
    for at in 0..3 {
        let key = format!("member/{}/{}", node(at), export(at));
        let export = value(&plan, &key).expect("an export");
        assert_eq!((&export["nsid"], export.get("by")), (&json!(5), None));
        let replica = &record["members"][at];
        assert_eq!(replica["node_device"], "disk");
    }
    let cow = value(&plan, &format!("node/{}", node(2))).expect("a node");
    assert_eq!(
        (&cow["cordon"], &cow["version"]),
        (&json!(true), &json!("new"))
    );
    let meta = value(&plan, "meta").expect("meta");
    assert_eq!(
        (&meta["id"], &meta["lease_ms"]),
        (&json!(CLUSTER), &json!(3000))
    );
    assert_eq!((plan.backup.id, plan.notes), (CLUSTER, vec![]));
}

/// Goal: nodes that copies name are waited for, unless the operator names them; their replicas are
/// then lost. A node that has reported is not lost.
#[test]
fn missing_nodes() {
    let labels = || [0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN])));
    let two = || three(labels()).into_iter().take(2).collect::<Vec<_>>();
    let waiting = plan(two());
    assert_eq!(waiting.missing, ["cow"]);
    for name in ["cow", &node(2).to_string()] {
        let plan = plan_with(two(), &without(&[name]));
        assert_eq!((&plan.missing, &plan.refused), (&vec![], &None));
        expect(
            &plan,
            &[("in_sync", false), ("in_sync", false), ("filling", true)],
        );
    }
    for (name, part) in [("bee", "has reported"), ("dog", "nodes are ant, bee, cow")] {
        let refused = plan_with(two(), &without(&[name]))
            .refused
            .expect("refused");
        assert!(refused.to_string().contains(part), "{refused}");
    }
    // The disk of cow is in another machine now.
    let mut moved = two();
    let disk = device("new", label(2, (6, 20), &[IN, IN, IN]));
    moved[1].devices.push(disk);
    let plan = plan_with(moved, &without(&["cow"]));
    expect(&plan, &["in_sync"; 3].map(|state| (state, false)));
    let moved = &volume(&plan)["members"][2];
    assert_eq!(
        (&moved["node"], &moved["node_device"]),
        (&json!(node(1)), &json!("new"))
    );
    assert_eq!(moved["device"], json!(replica(2)));
    let export = value(&plan, &format!("member/{}/{}", node(1), replica(2)));
    assert_eq!(export.expect("an export")["device"], "new");
}

/// Goal: a device that its node has not found is waited for by the opening of its volume, unless
/// the operator names it lost.
#[test]
fn absent_devices() {
    let labels = || {
        let of = |at| Some(label(at, (6, 20), &[IN, IN, IN]));
        [of(0), of(1), None]
    };
    let there = plan(three(labels()));
    assert_eq!(there.absent, 1);
    expect(&there, &["in_sync"; 3].map(|state| (state, false)));
    let device = "cow:disk".to_owned();
    let volume = "v".to_owned();
    assert_eq!(there.notes, [Note::Absent { volume, device }]);
    for name in ["cow:disk", &replica(2).to_string()] {
        let plan = plan_with(three(labels()), &without(&[name]));
        assert_eq!((plan.absent, &plan.notes), (0, &vec![]), "{name}");
        expect(
            &plan,
            &[("in_sync", false), ("in_sync", false), ("filling", true)],
        );
    }
    let refused = plan_with(three(labels()), &without(&["cow:none"])).refused;
    assert!(refused.is_some());
    // A label that cannot be read is a device that is not found.
    let mut reports = three(labels());
    reports[2].devices.push(Device {
        name: "disk".to_owned(),
        aliases: Vec::new(),
        label: LabelRead::Unreadable("checksum".to_owned()),
    });
    let plan = plan(reports);
    assert!(matches!(plan.notes[0], Note::Unreadable { .. }));
    assert!(plan.problems.is_empty());
}

/// Goal: two devices with one replica refuse the volume, with both names. The operator decides. A
/// clone of an exported device is no second replica.
#[test]
fn two_devices_with_one_replica() {
    let labels = || [0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN])));
    let twice = |is_exported: bool| {
        let mut reports = three(labels());
        if !is_exported {
            reports[1].copy.as_mut().expect("a copy").exports.clear();
        }
        let clone = device("clone", label(1, (6, 19), &[IN, IN, IN]));
        reports[0].devices.push(clone);
        reports
    };
    let refused = plan(twice(false));
    let expected = Problem::TwoDevices {
        volume: "v".to_owned(),
        replica: replica(1),
        first: "ant:clone".to_owned(),
        second: "bee:disk".to_owned(),
    };
    assert_eq!(refused.problems, [expected]);
    assert_eq!(value(&refused, &format!("vol/{V}")), None);

    let decided = plan_with(twice(false), &without(&["ant:clone"]));
    assert_eq!(decided.problems, []);
    expect(&decided, &["in_sync"; 3].map(|state| (state, false)));
    let options = Options {
        skip: vec!["v".to_owned()],
        ..Options::default()
    };
    let skipped = plan_with(twice(false), &options);
    assert_eq!((skipped.problems.len(), skipped.backup.volumes()), (0, 0));

    let exported = plan(twice(true));
    assert_eq!(exported.problems, []);
    assert!(
        matches!(exported.notes[0], Note::Clone { .. }),
        "{:?}",
        exported.notes
    );
    assert_eq!(volume(&exported)["members"][1]["node"], json!(node(1)));
}

/// Goal: without any copy the labels are enough for the data. A replica that no node has, and whose
/// place no copy names, must be named.
#[test]
fn labels_alone() {
    let bare = |indices: &[usize]| {
        let of = |at: &usize| {
            let label = label(*at, (6, 20), &[IN, IN, IN]);
            found(*at, None, vec![device("disk", label)])
        };
        indices.iter().map(of).collect::<Vec<_>>()
    };
    let all = plan(bare(&[0, 1, 2]));
    expect(&all, &["in_sync"; 3].map(|state| (state, false)));
    let record = volume(&all);
    assert_eq!(
        (&record["blocks"], &record["name"]),
        (&json!(4096), &json!("v"))
    );
    assert!(all.notes.contains(&Note::NoCopies));
    let two = plan(bare(&[0, 1]));
    let (volume, replica) = ("v".to_owned(), replica(2));
    assert_eq!(two.problems, [Problem::NoPlace { volume, replica }]);
    let two = plan_with(bare(&[0, 1]), &without(&[&replica.to_string()]));
    assert_eq!((&two.problems, &two.refused), (&vec![], &None));
    expect(&two, &["in_sync"; 2].map(|state| (state, false)));
}

/// Goal: volumes that were deleted, or that never were of the cluster, are left out, unless the
/// operator names them. One that no copy has, and a node exports, is for the operator to decide.
#[test]
fn volumes_of_others() {
    let labels = || [0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN])));
    // The newest copy, that of ant, does not have the volume any more.
    let deleted = || {
        let mut reports = three(labels());
        let gone = Copy {
            revision: 200,
            ..copy(0)
        };
        reports[0] = found(0, Some(gone), reports[0].devices.clone());
        reports
    };
    let plan_of_deleted = plan(deleted());
    assert_eq!(plan_of_deleted.backup.volumes(), 0);
    assert!(matches!(plan_of_deleted.notes[..], [Note::Deleted { .. }]));

    let is_exported = |is_exported: bool| {
        let reports = (0..3).map(|at| {
            let mut copy = copy(at);
            if !is_exported {
                copy.exports.clear();
            }
            let label = label(at, (6, 20), &[IN, IN, IN]);
            found(at, Some(copy), vec![device("disk", label)])
        });
        reports.collect::<Vec<_>>()
    };
    let foreign = plan(is_exported(false));
    assert_eq!(foreign.backup.volumes(), 0);
    assert!(matches!(foreign.notes[..], [Note::Foreign { .. }]));
    let doubtful = plan(is_exported(true));
    assert!(matches!(&doubtful.problems[..], [Problem::Doubtful { id, .. }] if *id == V));
    let ended = is_exported(true).into_iter().map(|mut report| {
        let copy = report.copy.as_mut().expect("a copy");
        let exports = copy.exports.values_mut();
        exports.for_each(|export| export["want"] = "gone".into());
        report
    });
    let ended = plan(ended.collect());
    assert!(matches!(ended.notes[..], [Note::Foreign { .. }]));

    for name in ["v".to_owned(), V.to_string()] {
        let options = Options {
            volumes: vec![name],
            ..Options::default()
        };
        for reports in [deleted(), is_exported(false), is_exported(true)] {
            let taken = plan_with(reports, &options);
            assert_eq!((taken.backup.volumes(), &taken.refused), (1, &None));
            assert_eq!(taken.problems, []);
        }
    }
    // A name and the id of one volume together.
    let options = Options {
        volumes: vec!["v".to_owned(), V.to_string()],
        ..Options::default()
    };
    assert_eq!(plan_with(deleted(), &options).refused, None);
    let options = Options {
        volumes: vec!["w".to_owned()],
        ..Options::default()
    };
    let refused = plan_with(deleted(), &options).refused.expect("refused");
    assert!(refused.to_string().contains("--volume w"), "{refused}");
}

/// Goal: a restore lies between two copies. Which one is later, only clocks show: a volume that the
/// seemingly later one does not have is not left out without the operator. Method: either copy is
/// the later one.
#[test]
fn a_volume_of_another_store_is_not_left_out_silently() {
    let reports = |created: u64| {
        let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))));
        let mut meta = meta();
        meta.restored = Some(Uuid::from_u128(1));
        let other = Copy {
            meta,
            revision: 3,
            created,
            ..copy(1)
        };
        reports[1] = found(1, Some(other), reports[1].devices.clone());
        reports
    };
    let later = plan(reports(2000));
    assert!(matches!(&later.problems[..], [Problem::Doubtful { .. }]));
    let skip = Options {
        skip: vec![V.to_string()],
        ..Options::default()
    };
    let skipped = plan_with(reports(2000), &skip);
    assert_eq!((skipped.backup.volumes(), skipped.problems), (0, vec![]));
    let earlier = plan(reports(500));
    assert_eq!((earlier.backup.volumes(), earlier.problems), (1, vec![]));
}

/// Goal: a name of two volumes is refused with their ids, and acts on neither.
#[test]
fn a_name_of_two_volumes_is_refused() {
    let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))));
    let mut other = label(0, (6, 20), &[IN]);
    other.volume = Uuid::from_u128(0x71);
    reports[0].devices.push(device("other", other));
    let options = Options {
        skip: vec!["v".to_owned()],
        ..Options::default()
    };
    let refused = plan_with(reports, &options).refused.expect("refused");
    assert!(refused.to_string().contains(&V.to_string()), "{refused}");
}

/// Goal: of several names after --without, one that fits nothing hides no other; a lost node whose
/// name a new one has can be named.
#[test]
fn names_of_lost_nodes() {
    let two = |reports: Vec<Found>| reports.into_iter().take(2).collect::<Vec<_>>();
    let labels = || [0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN])));
    let plan = plan_with(two(three(labels())), &without(&["typo", "cow"]));
    assert_eq!(plan.missing, Vec::<String>::new());
    let refused = plan.refused.expect("refused").to_string();
    assert!(refused.contains("typo"), "{refused}");

    let with_new = || {
        let mut reports = two(three(labels()));
        let mut new = found(2, None, Vec::new());
        new.node = Uuid::from_u128(1);
        reports.push(new);
        reports
    };
    let missing = plan_with(with_new(), &Options::default()).missing;
    assert_eq!(missing, [format!("cow with the former id {}", node(2))]);
    let named = plan_with(with_new(), &without(&["cow"]));
    assert_eq!((named.missing, named.refused), (Vec::new(), None));
}

/// Goal: nodes of two clusters are refused with both names, and volumes of one name are told apart.
#[test]
fn clusters_and_names_that_collide() {
    let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))));
    reports[2].joined = Some(Uuid::from_u128(0xd));
    let all = reports.into_iter().map(|one| (NodeId(one.node), one));
    let refused = decide("lab", &all.collect(), &Options::default()).expect_err("two clusters");
    let said = refused.to_string();
    assert!(
        said.contains("ant, bee, cow is in") && said.contains("; cow is in"),
        "{said}"
    );

    let mut reports = three([0, 1, 2].map(|at| Some(label(at, (6, 20), &[IN, IN, IN]))));
    let mut other = record((2, 2), &["in_sync"]);
    let id = Uuid::from_u128(0x71 << 96);
    other["id"] = json!(id);
    let of = reports[0]
        .copy
        .take()
        .map(|copy| with_record(copy, 3, other));
    let report = found(0, of, reports[0].devices.clone());
    reports[0] = report;
    reports[0].copy.as_mut().expect("a copy").revision = 200;
    let plan = plan(reports);
    assert_eq!(value(&plan, "name/v"), Some(json!(id)));
    assert_eq!(value(&plan, "name/v-00000000"), Some(json!(V)));
    assert_eq!(volume(&plan)["name"], "v-00000000");
    assert!(
        plan.notes
            .iter()
            .any(|note| matches!(note, Note::Renamed { .. }))
    );
}

/// Goal: a volume without a replica in sync is kept, and needs the operator.
#[test]
fn nothing_in_sync() {
    let labels = [0, 1, 2].map(|at| Some(label(at, (6, 20), &[OUT, OUT, OUT])));
    let plan = plan(three(labels));
    expect(&plan, &["filling"; 3].map(|state| (state, false)));
    assert_eq!(
        plan.notes,
        [Note::Frozen {
            volume: "v".to_owned()
        }]
    );
}

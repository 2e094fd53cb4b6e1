//! Copies of the keys: read back, and refused if damaged; the part of a copy in a report.

use serde_json::{Value, json};
use uuid::Uuid;

use super::super::copy::{Copy, CopyError};
use super::super::facts::ReplicaFact::InSync;
use super::{V, copy, device, found, label, node, plan, published, record, value, with_record};

/// Goal: a copy is read back, and none that was cut or changed.
#[test]
fn damaged_copies_are_refused() {
    let copy = published(
        with_record(copy(0), 7, record((4, 9), &["in_sync"; 3])),
        json!({ "v": 1 }),
    );
    let text = copy.encode();
    assert_eq!(Copy::parse(&text).as_ref(), Ok(&copy));
    for at in 0..text.len() {
        assert!(Copy::parse(&text[..at]).is_err(), "cut at {at}");
        let mut damaged = text.clone();
        damaged[at] ^= 1;
        assert!(Copy::parse(&damaged).is_err(), "byte {at}");
    }
    let line = String::from_utf8(text.clone()).expect("text");
    let line = line
        .lines()
        .next()
        .expect("a line")
        .replacen("\"v\":1", "\"v\":2", 1);
    let sum = crate::backup::crc(line.as_bytes());
    let newer = format!("{line}\n{sum}\n");
    let found = 2;
    assert_eq!(
        Copy::parse(newer.as_bytes()),
        Err(CopyError::Newer { found })
    );
}

/// Goal: a report has the part of the copy that concerns its node, and the ids of all volumes.
#[test]
fn a_report_is_of_its_node() {
    let mut copy = with_record(copy(0), 7, record((4, 9), &["in_sync"; 3]));
    let ids = [1, 2, 3].map(|id| Uuid::from_u128(0x80 + id));
    for id in ids {
        let mut other = record((1, 1), &["in_sync"]);
        other["id"] = json!(id);
        other["members"][0]["node"] = json!(node(2));
        copy = with_record(copy, 9, other);
        let shown = if id == ids[0] { node(0) } else { node(2) };
        let slots = json!({ (shown.to_string()): 0 });
        copy.publications
            .insert(id, json!({ "v": 1, "slots": slots }));
    }
    let mut of_other = label(0, (1, 1), &[InSync]);
    of_other.volume = ids[1];
    let found = found(0, Some(copy), vec![device("old", of_other)]);
    let copied: Vec<Uuid> = found
        .copy
        .as_ref()
        .expect("a copy")
        .volumes
        .keys()
        .copied()
        .collect();
    assert_eq!(copied, [V, ids[0], ids[1]]);
    assert_eq!(found.volumes, [V, ids[0], ids[1], ids[2]]);
}

/// The value of a snapshot with an lvol on each of these nodes.
fn snapshot(is: &str, nodes: &[usize]) -> Value {
    let cut = |at: &usize| json!({ "node": node(*at), "device": "d", "lvol": V, "revision": 3 });
    json!({
        "v": 1, "volume": V, "name": "s", "want": "there", "is": is, "bytes": 8,
        "cut": nodes.iter().map(cut).collect::<Vec<_>>(),
    })
}

/// Goal: the snapshots of a lost store are there again, as the newest copy has them. Those that
/// were not made are not. Method: copies of three nodes, of which one is older.
#[test]
fn snapshots_are_listed_again() {
    let ids = [1, 2, 3].map(|id| Uuid::from_u128(0x90 + id));
    let mut reports = Vec::new();
    for at in 0..3 {
        let mut copy = with_record(copy(at), 7, record((4, 9), &["in_sync"; 3]));
        copy.revision = if at == 1 { 50 } else { 100 };
        let mut both = snapshot("there", &[1, 2]);
        if at == 1 {
            both["name"] = "former".into();
        }
        let all = [
            both,
            snapshot("there", &[0]),
            snapshot("chosen", &[0, 1, 2]),
        ];
        copy.snapshots = ids.into_iter().zip(all).collect();
        let devices = vec![device("disk", label(at, (6, 20), &[InSync; 3]))];
        reports.push(found(at, Some(copy), devices));
    }
    let reported = |at: usize| {
        let copy: &Copy = reports[at].copy.as_ref().expect("a copy");
        copy.snapshots.keys().copied().collect::<Vec<_>>()
    };
    assert_eq!(reported(0), [ids[1], ids[2]], "those with an lvol there");
    assert_eq!(reported(1), [ids[0], ids[2]]);
    let plan = plan(reports);
    let listed = ids.map(|id| value(&plan, &format!("snap/{id}")));
    assert_eq!(
        listed,
        [
            Some(snapshot("there", &[1, 2])),
            Some(snapshot("there", &[0])),
            None
        ]
    );
}

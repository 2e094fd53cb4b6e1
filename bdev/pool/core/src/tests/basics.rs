//! Single operations and their cost.

use super::content::value;
use super::disk::{ALL_SECTORS, Crash};
use super::rig::{self, HOLDER, Pending, Rig, identity};
use crate::ids::{Token, VersionId};
use crate::import::{Holder, ImportError};
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;
use uuid::Uuid;

/// Goal: a pool keeps its data over a clean end. Method: write, snapshot, write,
/// import, read.
#[test]
fn contents_survive_an_import() {
    let mut rig = Rig::create(64, 16, true);
    let volume = rig.created(1, 16, false);
    rig.wrote(volume, 3, &[(0, value(1, 12, 1)), (2, value(1, 14, 2))]);
    let snapshot = rig.snapshot(volume, 2);
    rig.wrote(volume, 3, &[(0, value(1, 12, 3)), (1, value(1, 13, 4))]);
    let check = |rig: &Rig| {
        let read = |version, granule| rig.read(version, granule).unwrap().unwrap();
        let values = |version| [12, 13, 14, 15].map(|granule| read(version, granule));
        assert_eq!(
            values(volume),
            [value(1, 12, 3), value(1, 13, 4), value(1, 14, 2), 0]
        );
        assert_eq!(values(snapshot), [value(1, 12, 1), 0, value(1, 14, 2), 0]);
        assert_eq!(rig.pool.check(), []);
    };
    check(&rig);
    rig.run(Request::Flush).unwrap();
    for crash in [Crash::Daemon, Crash::Power] {
        let disk = rig.crashed(crash, |_| 0);
        let (mut again, report) = rig::import(disk).unwrap();
        assert_eq!(report.dropped, 0);
        check(&again);
        again.finish();
        check(&again);
        rig = again;
    }
    let disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    let (again, report) = rig::import(disk).unwrap();
    assert_eq!(
        report.replayed, 0,
        "the checkpoint of the import has it all"
    );
    check(&again);
}

/// Deleting a snapshot frees what only it used.
#[test]
fn deleting_returns_space() {
    let mut rig = Rig::create(64, 16, true);
    let volume = rig.created(1, 16, false);
    for place in 0..4 {
        rig.wrote(volume, place, &[(0, value(1, place * 4, 1))]);
    }
    rig.pool.checkpoint();
    rig.finish();
    let snapshot = rig.snapshot(volume, 2);
    for place in 0..4 {
        rig.wrote(volume, place, &[(0, value(1, place * 4, 2))]);
    }
    assert_eq!(
        rig.run(Request::Delete { version: snapshot }),
        Ok(Answer::Done)
    );
    rig.finish();
    rig.pool.settle();
    rig.finish();
    assert_eq!(rig.find(2), None);
    assert_eq!(rig.pool.state().versions.len(), 1);
    assert_eq!(rig.pool.check(), []);
    let read = |granule| rig.read(volume, granule).unwrap();
    assert_eq!(read(4), Some(value(1, 4, 2)));
    assert_eq!(rig.pool.space().in_limbo(), 0);
}

/// Goal: the disk learns of space that deletions return, once, and after a checkpoint; metadata
/// that checkpoints free does not keep an idle pool busy.
#[test]
fn deleting_discards_space() {
    let mut rig = Rig::create(64, 16, true);
    let volume = rig.created(1, 16, false);
    for place in 0..12 {
        rig.wrote(volume, place, &[(0, value(1, place * 4, 1))]);
    }
    let checkpoint = |rig: &mut Rig| {
        rig.pool.settle();
        rig.finish();
        rig.pool.checkpoint();
        rig.finish();
        rig.pool.discarded_units()
    };
    let before = checkpoint(&mut rig);
    rig.run(Request::Delete { version: volume }).unwrap();
    rig.pool.settle();
    rig.finish();
    assert!(rig.pool.discarded_units() < before + 12, "before the root");
    assert!(checkpoint(&mut rig) >= before + 12);
    assert_eq!(rig.pool.check(), []);
    checkpoint(&mut rig);
    let sequence = rig.pool.superblock().sequence;
    checkpoint(&mut rig);
    assert_eq!(rig.pool.superblock().sequence, sequence, "nothing changed");
    rig.pool.discard_free();
    rig.finish();
    let free = rig.pool.space().free();
    assert!(
        rig.pool.discarded_units() > free,
        "all free space once more"
    );
    assert_eq!(rig.pool.check(), []);
}

fn waits(pending: &Pending) -> bool {
    matches!(pending, Pending::Full { .. })
}

/// Writes a granule of a place, and ends all I/O but the waits for space.
fn write(rig: &mut Rig, volume: VersionId, place: u64, number: u64) -> Token {
    let at = value(1, place * 4, number);
    let token = rig.write(volume, place, &[(0, at)], false);
    rig.finish_but(waits);
    token
}

/// Writes places until a write waits. Returns its token, and the place after it.
fn fill(rig: &mut Rig, volume: VersionId, mut place: u64) -> (Token, u64) {
    loop {
        let token = write(rig, volume, place, 1);
        place += 1;
        if rig.pool.full_writes() == 1 {
            return (token, place);
        }
        rig.take_answer(token).unwrap();
    }
}

/// Goal: a waiting write gets its answer when its pool is exported or held, and when its volume is
/// deleted. A crash loses it alone.
#[test]
fn a_waiting_write_ends_with_its_pool_or_volume() {
    let full = || {
        let mut rig = Rig::create(40, 22, true);
        let volume = rig.created(1, 16, false);
        let (token, place) = fill(&mut rig, volume, 0);
        (rig, volume, token, place - 1)
    };
    let (mut rig, _, waiting, _) = full();
    let export = rig.submit(Request::Export);
    rig.finish_but(waits);
    assert_eq!(rig.take_answer(export), Ok(Answer::Done));
    assert_eq!(rig.take_answer(waiting), Err(Refusal::Exported));
    assert_eq!(rig.pool.full_writes(), 0);

    let (mut rig, version, waiting, _) = full();
    let delete = rig.submit(Request::Delete { version });
    rig.finish_but(waits);
    assert_eq!(rig.take_answer(delete), Ok(Answer::Done));
    assert_eq!(rig.take_answer(waiting), Err(Refusal::UnknownVersion));
    assert_eq!(rig.pool.full_writes(), 0);
    assert_eq!(rig.pool.check(), []);

    let (mut rig, volume, waiting, place) = full();
    let disk = rig.crashed(Crash::Power, |_| 0);
    rig.submit(Request::Rename {
        version: volume,
        name: "renamed".to_owned(),
    });
    rig.pump();
    let is_write = |pending: &Pending| matches!(pending, Pending::Write { .. });
    let at = rig.pending.iter().position(is_write);
    rig.end_with(at.unwrap(), true);
    assert!(rig.pool.is_held());
    assert_eq!(rig.take_answer(waiting), Err(Refusal::Held));
    assert_eq!(rig.pool.full_writes(), 0);

    let (mut rig, _) = rig::import(disk).unwrap();
    rig.finish();
    assert_eq!(rig.read(volume, place * 4), Ok(Some(0)));
    assert_eq!(rig.pool.check(), []);
    let waiting = write(&mut rig, volume, place, 2);
    assert_eq!(rig.pool.full_writes(), 1, "it is full as before");
    // Metadata may take some of these units.
    for first in [0, 16] {
        rig.submit(Request::Unmap {
            version: volume,
            first,
            granules: 16,
        });
    }
    rig.finish_but(waits);
    assert_eq!(rig.take_answer(waiting), Ok(Answer::Done));
    assert_eq!(
        rig.read(volume, place * 4),
        Ok(Some(value(1, place * 4, 2)))
    );
}

/// Goal: writes to a full pool wait, up to a bound, for space that a trim or a deletion returns.
#[test]
fn space_that_returns_wakes_waiting_writes() {
    let mut rig = Rig::create(40, 22, true);
    let volume = rig.created(1, 16, false);
    let write = |rig: &mut Rig, place, number| write(rig, volume, place, number);
    let fill = |rig: &mut Rig, place: u64| fill(rig, volume, place);
    let run = |rig: &mut Rig, request| {
        let token = rig.submit(request);
        rig.finish_but(waits);
        rig.take_answer(token)
    };
    let unmap = |rig: &mut Rig, place: u64| {
        let unmap = Request::Unmap {
            version: volume,
            first: place * 4,
            granules: 4,
        };
        assert_eq!(run(rig, unmap), Ok(Answer::Done));
    };
    let (first, place) = fill(&mut rig, 0);
    assert!((10..13).contains(&place), "{place}");
    // Granules of mapped places need no unit. More writes than the bound fail at once.
    let others = [0, 1].map(|more| write(&mut rig, place + more, 1));
    let one_more = write(&mut rig, place + 2, 1);
    let full = Err(Refusal::NoSpace { returning: false });
    assert_eq!(rig.take_answer(one_more), full);
    let in_place = write(&mut rig, 0, 2);
    assert_eq!(rig.take_answer(in_place), Ok(Answer::Done));
    unmap(&mut rig, 1);
    assert_eq!(rig.take_answer(first), Ok(Answer::Done), "the oldest first");
    assert_eq!(rig.pool.full_writes(), 2);
    // A snapshot keeps the units, and its metadata takes some. Its removal returns all of them.
    let cut = Request::Snapshot(vec![(volume, identity(2))]);
    let snapshot = match run(&mut rig, cut) {
        Ok(Answer::Snapshots(snapshots)) => snapshots[0],
        other => panic!("{other:?}"),
    };
    (2..11).for_each(|place| unmap(&mut rig, place));
    assert_eq!(rig.pool.full_writes(), 2, "the snapshot has them");
    let delete = Request::Delete { version: snapshot };
    assert_eq!(run(&mut rig, delete), Ok(Answer::Done));
    for token in others {
        assert_eq!(rig.take_answer(token), Ok(Answer::Done));
    }
    // A write whose caller gives up fails.
    let (last, _) = fill(&mut rig, 1);
    let waiting = Pending::Full { token: last };
    let at = rig.pending.iter().position(|pending| *pending == waiting);
    rig.end(at.unwrap());
    rig.finish();
    assert_eq!(rig.take_answer(last), full);
    assert_eq!(rig.pool.full_writes(), 0);
    assert_eq!(rig.pool.check(), []);
}

/// A full pool refuses new units, and takes trims.
#[test]
fn a_full_pool_takes_trims() {
    let mut rig = Rig::create(40, 30, true);
    let volume = rig.created(1, 16, false);
    let mut refused = None;
    for place in 0..16 {
        let token = rig.write(volume, place, &[(1, value(1, place * 4 + 1, 1))], false);
        rig.finish();
        match rig.take_answer(token) {
            Ok(_) => {}
            Err(refusal) => {
                refused = Some((place, refusal));
                break;
            }
        }
    }
    let (place, refusal) = refused.expect("the pool is full");
    assert_eq!(refusal, Refusal::NoSpace { returning: false });
    let unmap = Request::Unmap {
        version: volume,
        first: 0,
        granules: 16,
    };
    assert_eq!(rig.run(unmap), Ok(Answer::Done));
    rig.pool.settle();
    rig.finish();
    rig.wrote(volume, place, &[(1, value(1, place * 4 + 1, 1))]);
    assert_eq!(rig.pool.check(), []);
}

/// Goal: a copy of granules has the writes in place that were in flight when a snapshot cut the
/// volume. Method: a slow write in place, two snapshots, and a write that needs the copy; the same
/// without the rule loses the slow write.
#[test]
fn a_copy_waits_for_writes_in_place() {
    let overwritten = |mutation| {
        let mut rig = Rig::create(64, 16, true);
        let volume = rig.created(1, 16, false);
        rig.wrote(volume, 0, &[(0, value(1, 0, 1)), (1, value(1, 1, 1))]);
        rig.pool.settle();
        rig.finish();
        Mutation::activate(mutation);
        let slow = rig.write(volume, 0, &[(0, value(1, 0, 2))], false);
        let is_slow =
            |pending: &Pending| matches!(pending, Pending::Data { token, .. } if *token == slow);
        let mut snapshots = Vec::new();
        for number in [2, 3] {
            snapshots.push(rig.submit(Request::Snapshot(vec![(volume, identity(number))])));
            rig.finish_but(is_slow);
            rig.write(volume, 0, &[(number as u32, value(1, number, 1))], false);
            rig.finish_but(is_slow);
        }
        rig.finish();
        Mutation::activate(None);
        for snapshot in snapshots {
            rig.take_answer(snapshot).unwrap();
        }
        assert_eq!(rig.pool.check(), []);
        rig.read(volume, 0).unwrap() == Some(value(1, 0, 2))
    };
    assert!(overwritten(None));
    assert!(!overwritten(Some(Mutation::CopyWithoutGrace)));
}

/// A smaller size forgets the data beyond it, also when the volume grows again.
#[test]
fn shrinking_forgets_data() {
    let mut rig = Rig::create(64, 16, true);
    let volume = rig.created(1, 16, false);
    for place in 0..12 {
        rig.wrote(volume, place, &[(1, value(1, place * 4 + 1, 1))]);
    }
    rig.snapshot(volume, 2);
    rig.wrote(volume, 11, &[(2, value(1, 46, 1))]);
    for units in [6, 16] {
        let version = volume;
        assert_eq!(
            rig.run(Request::Resize { version, units }),
            Ok(Answer::Done)
        );
    }
    let found: Vec<bool> = (0..16)
        .map(|place| rig.read(volume, place * 4 + 1).unwrap() != Some(0))
        .collect();
    assert_eq!(found, (0..16).map(|place| place < 6).collect::<Vec<_>>());
    assert_eq!(rig.read(volume, 46), Ok(Some(0)));
    assert_eq!(rig.pool.check(), []);
}

/// An inflated clone depends on nothing: its snapshot can be deleted, and all units that the
/// snapshot alone had are free again.
#[test]
fn an_inflated_clone_stands_alone() {
    let mut rig = Rig::create(64, 16, true);
    let volume = rig.created(1, 16, false);
    for place in 0..6 {
        rig.wrote(
            volume,
            place,
            &[(0, value(1, place * 4, 1)), (1, value(1, place * 4 + 1, 1))],
        );
    }
    let snapshot = rig.snapshot(volume, 2);
    let clone = Request::Clone {
        source: snapshot,
        identity: identity(3),
        thick: false,
    };
    let Ok(Answer::Created(clone)) = rig.run(clone) else {
        panic!("no clone");
    };
    rig.wrote(clone, 1, &[(1, value(1, 5, 2))]);
    let version = clone;
    assert_eq!(rig.run(Request::Inflate { version }), Ok(Answer::Done));
    assert_eq!(rig.pool.state().versions[&clone].parent, None);
    for version in [volume, snapshot] {
        rig.run(Request::Delete { version }).unwrap();
    }
    rig.pool.settle();
    rig.finish();
    assert_eq!(rig.pool.check(), []);
    assert_eq!(rig.pool.state().versions.len(), 1);
    let values = [4, 5, 8].map(|granule| rig.read(clone, granule).unwrap());
    assert_eq!(
        values,
        [
            Some(value(1, 4, 1)),
            Some(value(1, 5, 2)),
            Some(value(1, 8, 1))
        ]
    );
}

/// A restored volume has the contents and size of the snapshot, and keeps its name.
#[test]
fn restoring_a_volume() {
    let mut rig = Rig::create(64, 16, true);
    let version = rig.created(1, 8, false);
    rig.wrote(version, 0, &[(0, value(1, 0, 1))]);
    let source = rig.snapshot(version, 2);
    rig.wrote(version, 0, &[(0, value(1, 0, 2))]);
    rig.wrote(version, 5, &[(0, value(1, 20, 2))]);
    rig.run(Request::Resize { version, units: 16 }).unwrap();
    let name = "renamed".to_owned();
    rig.run(Request::Rename { version, name }).unwrap();
    assert_eq!(
        rig.run(Request::Restore { version, source }),
        Ok(Answer::Done)
    );
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    rig.finish();
    rig.pool.settle();
    rig.finish();
    assert_eq!(rig.read(version, 0), Ok(Some(value(1, 0, 1))));
    assert_eq!(rig.read(version, 20), Ok(Some(0)));
    let state = &rig.pool.state().versions;
    assert_eq!((state[&version].units, state.len()), (8, 2));
    assert_eq!(state[&version].identity.name, "renamed");
    assert_eq!(rig.pool.check(), []);
}

/// Another holder opens an exported pool; of an open one only by force.
#[test]
fn exporting_a_pool() {
    let mut rig = Rig::create(64, 16, true);
    let volume = rig.created(1, 16, false);
    rig.wrote(volume, 3, &[(0, value(1, 12, 1))]);
    let other = Holder {
        id: Uuid::from_u128(80),
        force: false,
    };
    let open = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    let refused = rig::import_by(open.clone(), other).map(|_| ());
    assert_eq!(refused, Err(ImportError::Foreign { holder: HOLDER.id }));
    let forced = Holder {
        force: true,
        ..other
    };
    assert!(rig::import_by(open, forced).is_ok());
    assert_eq!(rig.run(Request::Export), Ok(Answer::Done));
    assert_eq!(rig.run(Request::Flush), Err(Refusal::Exported));
    let (mut rig, report) = rig::import_by(rig.crashed(Crash::Power, |_| 0), other).unwrap();
    assert_eq!((report.replayed, report.dropped), (0, 0));
    rig.finish();
    assert_eq!(rig.read(volume, 12), Ok(Some(value(1, 12, 1))));
    let taken = rig::import(rig.crashed(Crash::Power, |_| 0)).map(|_| ());
    assert_eq!(taken, Err(ImportError::Foreign { holder: other.id }));
}

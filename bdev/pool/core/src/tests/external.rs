//! External devices below volumes: contents, crashes, trims, parents, and what an import finds.

use uuid::Uuid;

use super::content::{self, Value};
use super::disk::{ALL_SECTORS, Crash};
use super::enumeration::Run;
use super::histories::{Disks, OPS, Op};
use super::length::Length;
use super::rig::{self, Pending, Rig, identity};
use crate::format::record::Identity;
use crate::format::superblock::Feature;
use crate::ids::VersionId;
use crate::interface::{Answer, External, Refusal, Request};
use crate::map::Part;
use crate::pool::Pool;

/// The number of the family that volumes on devices are of.
const FAMILY: u64 = 1;
const DEVICES: u128 = 1 << 96;

/// What a device has at a granule.
pub(super) fn value(device: u64, granule: u64) -> Value {
    content::value(FAMILY, granule, 1 << 39 | device)
}

/// The first granules of a device.
pub(super) fn values<const N: usize>(of: u64) -> [Value; N] {
    std::array::from_fn(|granule| value(of, granule as u64))
}

pub(super) fn device(number: u64, units: u64) -> External {
    External {
        identity: Identity {
            id: Uuid::from_u128(DEVICES + u128::from(number)),
            name: format!("device{number}"),
        },
        units,
    }
}

/// The number of the device below a version.
pub(super) fn device_of(pool: &Pool, version: VersionId) -> u64 {
    let state = pool.state();
    let device = state.external_parent(version).expect("a device");
    (state.versions[&device].identity.id.as_u128() - DEVICES) as u64
}

/// The contents of a volume with its own granules over a new parent.
pub(super) fn keep_owned(rig: &Rig, volume: VersionId, contents: &mut [Value], below: &[Value]) {
    let above = rig.pool.state().own_above(volume);
    for (at, value) in contents.iter_mut().enumerate() {
        let entry = rig.pool.lookup(volume, at as u64 / 4).unwrap();
        let mut owned = entry.parts().filter(|part| part.is_exclusive(above));
        if !owned.any(|part| part.granules >> (at % 4) & 1 == 1) {
            *value = below[at];
        }
    }
}

impl Rig {
    /// A volume on a device of so many units.
    pub(super) fn on_device(&mut self, number: u64, of: u64, units: u64) -> VersionId {
        let request = Request::CloneExternal {
            device: device(of, units),
            identity: identity(number),
        };
        match self.run(request) {
            Ok(Answer::Created(version)) => version,
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn contents(rig: &Rig, version: VersionId) -> Vec<Value> {
    let units = rig.pool.state().versions[&version].units;
    let read = |granule| rig.read(version, granule).unwrap().unwrap();
    (0..units * 4).map(read).collect()
}

/// The pool after a loss of power that keeps nothing that was not flushed.
pub(super) fn again(rig: &Rig) -> Rig {
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    assert_eq!(rig.pool.check(), []);
    rig.finish();
    rig
}

pub(super) fn checkpoint(rig: &mut Rig) {
    rig.pool.settle();
    rig.finish();
    rig.pool.checkpoint();
    rig.finish();
}

fn devices(rig: &Rig) -> usize {
    rig.pool.state().externals().count()
}

/// Goal: a volume shows a device of any size, through the log and through a root; a partial write
/// leaves the rest of the unit to the device, and takes one unit.
#[test]
fn a_volume_shows_a_device() {
    for units in 1..=16 {
        let mut rig = Rig::create(96, 32, true);
        let volume = rig.on_device(1, 7, units);
        let mut expected: Vec<Value> = (0..units * 4).map(|at| value(7, at)).collect();
        assert_eq!(contents(&rig, volume), expected);
        let mut entries = (0..units).map(|place| rig.pool.lookup(volume, place).unwrap());
        assert!(entries.all(|entry| entry.units().count() == 0));
        assert_eq!(contents(&again(&rig), volume), expected, "{units}");
        checkpoint(&mut rig);
        assert_eq!(contents(&again(&rig), volume), expected, "{units}");
        let last = units - 1;
        let at = (last * 4 + 2) as usize;
        rig.wrote(volume, last, &[(2, content::value(1, at as u64, 5))]);
        expected[at] = content::value(1, at as u64, 5);
        assert_eq!(contents(&rig, volume), expected);
        let entry = rig.pool.lookup(volume, last).unwrap();
        assert_eq!(
            (entry.own.granules, entry.second.granules),
            (0b0100, 0b1011)
        );
        assert!(entry.second.is_external());
        rig.run(Request::Flush).unwrap();
        assert_eq!(contents(&again(&rig), volume), expected, "{units}");
        checkpoint(&mut rig);
        let mut rig = again(&rig);
        assert_eq!(contents(&rig, volume), expected, "{units}");
        // What the volume grows by is not of the device.
        if units < 16 {
            let more = Request::Resize {
                version: volume,
                units: units + 1,
            };
            rig.run(more).unwrap();
            expected.extend([0; 4]);
            assert_eq!(contents(&rig, volume), expected);
            assert_eq!(contents(&again(&rig), volume), expected);
        }
    }
}

/// Goal: what a trim hid never shows the device's data again: not after a write beside it, a
/// snapshot, an import, the deletion of the snapshot, nor after the volume shrinks and grows.
#[test]
fn a_trim_hides_the_device_for_good() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 8);
    let mut expected = contents(&rig, volume);
    let unmap = |version, first, granules| Request::Unmap {
        version,
        first,
        granules,
    };
    for (first, granules) in [(1, 2), (4, 4), (9, 1), (9, 3), (16, 16)] {
        rig.run(unmap(volume, first, granules)).unwrap();
        expected[first as usize..(first + granules) as usize].fill(0);
    }
    rig.wrote(volume, 1, &[(3, content::value(1, 7, 5))]);
    expected[7] = content::value(1, 7, 5);
    assert_eq!(contents(&rig, volume), expected);
    let snapshot = rig.snapshot(volume, 2);
    checkpoint(&mut rig);
    let mut rig = again(&rig);
    assert_eq!(contents(&rig, volume), expected);
    rig.wrote(volume, 4, &[(0, content::value(1, 16, 6))]);
    expected[16] = content::value(1, 16, 6);
    rig.run(unmap(volume, 16, 1)).unwrap();
    expected[16] = 0;
    rig.run(Request::Delete { version: snapshot }).unwrap();
    rig.finish();
    assert_eq!(contents(&rig, volume), expected);
    for units in [2, 8] {
        rig.run(Request::Resize {
            version: volume,
            units,
        })
        .unwrap();
        expected.resize(units as usize * 4, 0);
        assert_eq!(contents(&again(&rig), volume), expected);
    }
    rig.run(unmap(volume, 0, 16)).unwrap();
    assert!(contents(&rig, volume).iter().all(|value| *value == 0));
}

/// Goal: volumes on a device are snapshotted, cloned, restored and deleted as other volumes are,
/// and the last volume takes the device along.
#[test]
fn a_family_on_a_device() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 8);
    let original = contents(&rig, volume);
    rig.wrote(volume, 0, &[(0, content::value(1, 0, 5))]);
    let snapshot = rig.snapshot(volume, 2);
    let before = contents(&rig, snapshot);
    // Three sources of one place: the copy reads the device.
    rig.wrote(volume, 0, &[(1, content::value(1, 1, 6))]);
    let entry = rig.pool.lookup(volume, 0).unwrap();
    assert_eq!(
        (entry.own.granules, entry.second.granules),
        (0b1110, 0b0001)
    );
    let mut after = before.clone();
    after[1] = content::value(1, 1, 6);
    assert_eq!(contents(&rig, volume), after);
    let clone = Request::Clone {
        source: snapshot,
        identity: identity(3),
        thick: true,
    };
    let Ok(Answer::Created(clone)) = rig.run(clone) else {
        panic!("a clone");
    };
    assert_eq!(contents(&rig, clone), before);
    let second = rig.on_device(4, 7, 8);
    assert_eq!(contents(&rig, second), original);
    assert_eq!(devices(&rig), 1, "volumes share a device");
    let restore = Request::Restore {
        version: second,
        source: snapshot,
    };
    rig.run(restore).unwrap();
    assert_eq!(contents(&rig, second), before);
    let mut rig = again(&rig);
    for version in [snapshot, second, clone] {
        rig.run(Request::Delete { version }).unwrap();
        assert_eq!(contents(&rig, volume), after);
        assert_eq!(devices(&rig), 1);
        assert_eq!(rig.pool.check(), []);
    }
    checkpoint(&mut rig);
    let mut rig = again(&rig);
    assert_eq!(contents(&rig, volume), after);
    rig.run(Request::Delete { version: volume }).unwrap();
    checkpoint(&mut rig);
    let rig = again(&rig);
    assert!(rig.pool.state().versions.is_empty());
}

/// Goal: the copies of a separation come from the device, trims stay trims, and the device goes.
#[test]
fn a_volume_leaves_its_device() {
    for inflate in [false, true] {
        let mut rig = Rig::create(96, 32, true);
        let version = rig.on_device(1, 7, 9);
        rig.wrote(version, 2, &[(1, content::value(1, 9, 5))]);
        rig.run(Request::Unmap {
            version,
            first: 4,
            granules: 3,
        })
        .unwrap();
        let before = contents(&rig, version);
        let request = if inflate {
            Request::Inflate { version }
        } else {
            Request::Decouple { version }
        };
        assert_eq!(rig.run(request), Ok(Answer::Done));
        assert_eq!(contents(&rig, version), before);
        let state = rig.pool.state();
        assert_eq!(state.external_parent(version), None);
        let entries = (0..9).map(|place| rig.pool.lookup(version, place).unwrap());
        assert!(
            entries
                .into_iter()
                .all(|entry| !entry.parts().any(Part::is_external))
        );
        checkpoint(&mut rig);
        let rig = again(&rig);
        assert_eq!((contents(&rig, version), devices(&rig)), (before, 0));
    }
}

/// Goal: a device that does not answer holds up the writes that need it, and nothing else: roots
/// are written, the log goes round, and other writes end. Method: a read of it ends last.
#[test]
fn a_device_that_does_not_answer() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 8);
    let other = rig.created(2, 8, false);
    rig.wrote(volume, 0, &[(0, content::value(1, 0, 5))]);
    let snapshot = rig.snapshot(volume, 3);
    let mut expected = contents(&rig, volume);
    let before = expected.clone();
    // A third source of the place: the device is read first.
    let late = rig.write(volume, 0, &[(1, content::value(1, 1, 6))], false);
    expected[1] = content::value(1, 1, 6);
    let hangs = |pending: &Pending| matches!(pending, Pending::External { .. });
    rig.finish_but(hangs);
    let sequence = rig.pool.superblock().sequence;
    for round in 1..200 {
        let place = round % 8;
        let values = [(0, content::value(2, place * 4, round))];
        let trim = Request::Unmap {
            version: other,
            first: place * 4,
            granules: 4,
        };
        let trim = rig.submit(trim);
        rig.finish_but(hangs);
        assert_eq!(rig.take_answer(trim), Ok(Answer::Done), "{round}");
        let write = rig.write(other, place, &values, false);
        rig.finish_but(hangs);
        assert_eq!(rig.take_answer(write), Ok(Answer::Done), "{round}");
        if round % 16 == 0 {
            rig.pool.settle();
            rig.pool.checkpoint();
        }
    }
    assert!(rig.pool.superblock().sequence > sequence + 5);
    assert_eq!(contents(&rig, volume), before);
    assert_eq!(rig.pool.check(), []);
    // The record does not get between an image and its log.
    rig.pool.checkpoint();
    rig.pump();
    let at = rig.pending.iter().position(hangs).unwrap();
    rig.end(at);
    rig.finish();
    assert_eq!(rig.take_answer(late), Ok(Answer::Done));
    assert_eq!(contents(&rig, volume), expected);
    assert_eq!(contents(&rig, snapshot), before);
    rig.run(Request::Flush).unwrap();
    assert_eq!(contents(&again(&rig), volume), expected);
}

/// Goal: a decoupling from a snapshot on a device copies the snapshot's own granules only.
#[test]
fn a_volume_leaves_a_snapshot_on_a_device() {
    let mut rig = Rig::create(96, 32, true);
    let version = rig.on_device(1, 7, 8);
    rig.wrote(version, 1, &[(1, content::value(1, 5, 5))]);
    let snapshot = rig.snapshot(version, 2);
    let before = contents(&rig, version);
    rig.run(Request::Decouple { version }).unwrap();
    let state = rig.pool.state();
    let device = state.find_external(device(7, 8).identity.id, 8);
    assert_eq!(state.versions[&version].parent, device);
    assert!(rig.pool.lookup(version, 0).unwrap().own.is_external());
    rig.run(Request::Delete { version: snapshot }).unwrap();
    let rig = again(&rig);
    assert_eq!(contents(&rig, version), before);
}

/// Goal: a volume's own granules lie over its new device; a device that is smaller or larger than
/// the volume shows as far as both go.
#[test]
fn a_device_becomes_the_parent() {
    for units in [3, 8, 12] {
        let mut rig = Rig::create(96, 32, true);
        let version = rig.created(1, 8, false);
        rig.wrote(version, 1, &[(2, content::value(1, 6, 5))]);
        rig.wrote(version, 7, &[(0, content::value(1, 28, 5))]);
        let set = |of| Request::SetExternal {
            version,
            device: device(of, units),
        };
        let mut expected = contents(&rig, version);
        for of in [7, 8] {
            let shown = (0..32).map(|at| if at < units * 4 { value(of, at) } else { 0 });
            let shown: Vec<Value> = shown.collect();
            keep_owned(&rig, version, &mut expected, &shown);
            assert_eq!(rig.run(set(of)), Ok(Answer::Done));
            assert_eq!(contents(&rig, version), expected);
            assert_eq!(rig.run(set(of)), Err(Refusal::SameParent));
        }
        checkpoint(&mut rig);
        assert_eq!(devices(&rig), 1, "the first device is gone");
        let mut rig = again(&rig);
        assert_eq!(contents(&rig, version), expected);
        rig.run(Request::Resize { version, units: 16 }).unwrap();
        expected.resize(64, 0);
        assert_eq!(contents(&rig, version), expected);
        // A snapshot of another family takes the place of the device.
        rig.run(Request::Resize { version, units: 8 }).unwrap();
        let other = rig.created(9, 8, false);
        rig.wrote(other, 0, &[(0, content::value(1, 0, 9))]);
        let source = rig.snapshot(other, 10);
        let below = contents(&rig, source);
        let mut expected = contents(&rig, version);
        keep_owned(&rig, version, &mut expected, &below);
        rig.run(Request::SetParent { version, source }).unwrap();
        checkpoint(&mut rig);
        assert_eq!((contents(&rig, version), devices(&rig)), (expected, 0));
    }
}

#[test]
fn refusals() {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.on_device(1, 7, 8);
    let clone = |of, units, number| Request::CloneExternal {
        device: device(of, units),
        identity: identity(number),
    };
    assert_eq!(rig.run(clone(7, 8, 1)), Err(Refusal::Exists));
    assert_eq!(rig.run(clone(7, 0, 2)), Err(Refusal::OutOfRange));
    assert_eq!(rig.run(clone(7, 17, 2)), Err(Refusal::OutOfRange));
    let set = |version| Request::SetExternal {
        version,
        device: device(8, 8),
    };
    let snapshot = rig.snapshot(volume, 2);
    assert_eq!(rig.run(set(snapshot)), Err(Refusal::WrongKind));
    let thick = rig.created(3, 8, true);
    assert_eq!(rig.run(set(thick)), Err(Refusal::WrongKind));
    let empty = rig.created(4, 0, false);
    assert_eq!(rig.run(set(empty)), Err(Refusal::OtherSize));
    // The device is none of the pool's volumes, and its names are free for those.
    let (id, _) = rig.pool.state().externals().next().unwrap();
    let unknown = Err(Refusal::UnknownVersion);
    assert_eq!(rig.run(Request::Delete { version: id }), unknown);
    let identity = device(7, 8).identity;
    let named = Request::Create {
        identity,
        units: 1,
        thick: false,
    };
    assert!(rig.run(named).is_ok());
    assert_eq!(rig.pool.check(), []);
}

/// A pool without such volumes names no feature; one that has them is refused by older versions.
#[test]
fn the_feature_is_named_before_its_use() {
    let mut rig = Rig::create(96, 32, true);
    rig.created(1, 4, false);
    checkpoint(&mut rig);
    assert_eq!(rig.pool.superblock().required, 0);
    rig.submit(Request::CloneExternal {
        device: device(7, 8),
        identity: identity(2),
    });
    rig.pump();
    while let Some(at) = rig.ready().into_iter().next() {
        let (again, _) = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS)).unwrap();
        let bit = Feature::ExternalParents as u64;
        if devices(&again) > 0 {
            assert_ne!(again.pool.superblock().required & bit, 0);
        }
        rig.end(at);
    }
    assert_eq!(devices(&rig), 1);
}

/// Goal: no crash loses, mixes up or brings back data of a volume on a device. Method: as in
/// `every_short_history`, with a volume on a device, and its changes of devices.
#[test]
fn short_histories_on_a_device() {
    let on_device = [
        Op::CloneExternal,
        Op::SetExternal,
        Op::UnmapLeaf,
        Op::Shrink,
    ];
    let ops = [&OPS[..], &on_device].concat();
    let at_length = Length::of_environment() == Length::Full;
    let mut sequences: Vec<Vec<Op>> = ops.iter().map(|op| vec![*op]).collect();
    let changes = [
        Op::SetExternal,
        Op::Decouple,
        Op::Inflate,
        Op::Unmap,
        Op::Delete,
        Op::CloneExternal,
        Op::UnmapLeaf,
    ];
    for first in &ops {
        for second in &ops {
            if at_length || changes.contains(first) || changes.contains(second) {
                sequences.push(vec![*first, *second]);
            }
        }
    }
    for change in changes {
        for second in changes {
            sequences.push(vec![Op::Snapshot, change, second]);
            sequences.push(vec![change, Op::Checkpoint, second]);
        }
    }
    let mut crashes = 0;
    for (seed, sequence) in sequences.iter().enumerate() {
        crashes += Run::run(Disks::External, sequence, seed as u64);
    }
    assert!(crashes > 50 * sequences.len() as u64, "only {crashes}");
}

/// A write during the copies from a device is neither lost nor copied over.
#[test]
fn writes_during_copies_from_a_device() {
    // The first points differ: with a step of 2, the operations together come at every point.
    let step = Length::of_environment().choose(4, 2, 1);
    for (at, op) in [Op::Decouple, Op::Inflate].into_iter().enumerate() {
        for write in [Op::Write, Op::Overwrite, Op::Partial, Op::Unmap] {
            let mut ios = if step == 1 { 0 } else { at };
            while Run::run_with_a_write(Disks::External, &[], (op, write), ios) {
                ios += step;
            }
            assert!(ios > 2, "{op:?} {write:?}: {ios}");
        }
    }
}

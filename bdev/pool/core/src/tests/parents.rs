//! Other parents, the end of changes, and the features that both need.

use super::content::value;
use super::disk::{ALL_SECTORS, Crash, Disk};
use super::rig::{self, Pending, Rig, identity};
use crate::format::superblock::{Feature, Superblock};
use crate::geometry::PAGE;
use crate::ids::{Token, VersionId};
use crate::import::ImportError;
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;

/// A volume (1) over two snapshots: 2, and 3 above it. Each wrote two of four places.
fn chain() -> (Rig, [VersionId; 3]) {
    let mut rig = Rig::create(96, 32, true);
    let volume = rig.created(1, 16, false);
    rig.wrote(volume, 0, &[(0, value(1, 0, 1)), (1, value(1, 1, 1))]);
    rig.wrote(volume, 1, &[(0, value(1, 4, 1))]);
    let oldest = rig.snapshot(volume, 2);
    rig.wrote(volume, 1, &[(1, value(1, 5, 2))]);
    rig.wrote(volume, 2, &[(2, value(1, 10, 2))]);
    let newest = rig.snapshot(volume, 3);
    rig.wrote(volume, 2, &[(3, value(1, 11, 3))]);
    rig.wrote(volume, 3, &[(0, value(1, 12, 3))]);
    (rig, [volume, oldest, newest])
}

fn contents(rig: &Rig, version: VersionId) -> Vec<u64> {
    let read = |granule| rig.read(version, granule).unwrap().unwrap();
    (0..16).map(read).collect()
}

fn used(rig: &Rig, version: VersionId) -> usize {
    let entries = (0..16).map(|place| rig.pool.lookup(version, place).unwrap());
    entries.map(|entry| entry.parts().count()).sum()
}

/// Goal: a volume keeps its contents, copies what its parent owns and no more, and depends on the
/// grandparent; then the parent goes without a trace.
#[test]
fn a_decoupled_volume_hangs_on_the_grandparent() {
    let (mut rig, [volume, oldest, newest]) = chain();
    let before = contents(&rig, volume);
    let shared = rig.pool.lookup(volume, 0).unwrap();
    let decouple = Request::Decouple { version: volume };
    assert_eq!(rig.run(decouple.clone()), Ok(Answer::Done));
    assert_eq!(rig.pool.state().versions[&volume].parent, Some(oldest));
    assert_eq!(rig.pool.lookup(volume, 0).unwrap(), shared, "not copied");
    assert_eq!(contents(&rig, volume), before);
    assert_eq!(rig.pool.check(), []);
    let version = newest;
    assert_eq!(rig.run(Request::Delete { version }), Ok(Answer::Done));
    assert!(!rig.pool.state().versions.contains_key(&newest));
    assert_eq!(contents(&rig, volume), before);
    let (rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    assert_eq!(contents(&rig, volume), before);
    assert_eq!(rig.pool.state().versions[&volume].parent, Some(oldest));
    assert_eq!(rig.pool.check(), []);
    // The next one leaves no parent, and one more is refused.
    let mut rig = rig;
    rig.finish();
    assert_eq!(rig.run(decouple.clone()), Ok(Answer::Done));
    assert_eq!(rig.pool.state().versions[&volume].parent, None);
    assert_eq!(contents(&rig, volume), before);
    assert_eq!(rig.run(decouple), Err(Refusal::NoParent));
    assert_eq!(rig.pool.check(), []);
}

/// A parent that users do not see any more goes along with the one below it.
#[test]
fn a_hidden_parent_is_passed_over() {
    let (mut rig, [volume, oldest, newest]) = chain();
    let clone = Request::Clone {
        source: newest,
        identity: identity(4),
        thick: false,
    };
    rig.run(clone).unwrap();
    let version = newest;
    rig.run(Request::Delete { version }).unwrap();
    assert!(rig.pool.state().versions.contains_key(&newest), "hidden");
    let before = contents(&rig, volume);
    let decouple = Request::Decouple { version: volume };
    assert_eq!(rig.run(decouple), Ok(Answer::Done));
    assert_eq!(rig.pool.state().versions[&volume].parent, None);
    let version = oldest;
    rig.run(Request::Delete { version }).unwrap();
    assert_eq!(contents(&rig, volume), before);
    assert_eq!(rig.pool.check(), []);
}

/// Goal: the volume's own granules lie over the new parent's, also where that takes three units.
#[test]
fn a_new_parent_shows_through() {
    let (mut rig, [volume, oldest, newest]) = chain();
    let other = rig.created(9, 16, false);
    rig.wrote(other, 1, &[(2, value(1, 6, 7))]);
    rig.wrote(other, 3, &[(1, value(1, 13, 7))]);
    let refused = |rig: &mut Rig, version, source| {
        let request = Request::SetParent { version, source };
        rig.run(request).unwrap_err()
    };
    assert_eq!(refused(&mut rig, volume, newest), Refusal::SameParent);
    assert_eq!(refused(&mut rig, volume, other), Refusal::WrongKind);
    let large = rig.created(10, 15, false);
    assert_eq!(refused(&mut rig, large, newest), Refusal::OtherSize);
    let thick = rig.created(11, 16, true);
    assert_eq!(refused(&mut rig, thick, newest), Refusal::WrongKind);
    let source = newest;
    let version = other;
    let free = rig.pool.space().free();
    assert_eq!(
        rig.run(Request::SetParent { version, source }),
        Ok(Answer::Done)
    );
    let mut expected = contents(&rig, newest);
    (expected[6], expected[13]) = (value(1, 6, 7), value(1, 13, 7));
    assert_eq!(contents(&rig, other), expected);
    assert_eq!(rig.pool.state().versions[&other].parent, Some(newest));
    assert!(used(&rig, other) > 2);
    rig.pool.settle();
    rig.finish();
    rig.pool.checkpoint();
    rig.finish();
    assert_eq!(rig.pool.check(), []);
    assert!(rig.pool.space().free() + 8 > free, "the old units are free");
    // The volume takes writes again, and survives.
    rig.wrote(other, 0, &[(3, value(1, 3, 8))]);
    expected[3] = value(1, 3, 8);
    rig.run(Request::Flush).unwrap();
    let (rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    assert_eq!(contents(&rig, other), expected);
    assert_eq!(rig.pool.state().versions[&volume].parent, Some(newest));
    assert_ne!(contents(&rig, oldest), expected);
    assert_eq!(rig.pool.check(), []);
}

/// A full pool refuses the copies. The volume stays as it was, and the copies go.
#[test]
fn a_full_pool_refuses_a_new_parent() {
    let (mut rig, [_, _, newest]) = chain();
    let other = rig.created(9, 16, false);
    let mut is_full = false;
    for number in [9, 10, 11, 12] {
        let filled = rig
            .find(number)
            .unwrap_or_else(|| rig.created(number, 16, false));
        for place in 0..16 {
            let at = value(number & 1, place * 4, 7);
            let token = rig.write(filled, place, &[(0, at)], false);
            rig.finish();
            is_full |= rig.take_answer(token).is_err();
        }
    }
    assert!(is_full);
    let before = contents(&rig, other);
    let (version, source) = (other, newest);
    let refused = rig.run(Request::SetParent { version, source });
    assert!(
        matches!(refused, Err(Refusal::NoSpace { .. })),
        "{refused:?}"
    );
    assert_eq!(contents(&rig, other), before);
    rig.pool.settle();
    rig.finish();
    let hidden = rig.pool.state().versions.values();
    assert_eq!(hidden.filter(|version| version.is_hidden).count(), 0);
    assert_eq!(rig.pool.check(), []);
    let unmap = Request::Unmap {
        version,
        first: 0,
        granules: 4,
    };
    assert_eq!(rig.run(unmap), Ok(Answer::Done), "it is not frozen");
}

fn is_copy(pending: &Pending) -> bool {
    matches!(pending, Pending::Source { .. })
}

/// Submits a request, and ends all I/O but the reads of copies.
fn begin(rig: &mut Rig, request: Request) -> Token {
    let token = rig.submit(request);
    rig.finish_but(is_copy);
    token
}

/// A request that copies, on a pool of its own, and the snapshot that it depends on.
fn jobs() -> [(Rig, VersionId, VersionId, Request); 2] {
    let write = |rig: &mut Rig, version| {
        for place in 0..4 {
            rig.wrote(version, place, &[(2, value(1, place * 4 + 2, 7))]);
        }
        rig.run(Request::Flush).unwrap();
    };
    let (mut first, [version, ..]) = chain();
    write(&mut first, version);
    let newest = first.snapshot(version, 5);
    let decouple = Request::Decouple { version };
    let (mut second, [_, source, _]) = chain();
    let other = second.created(9, 16, false);
    write(&mut second, other);
    let set_parent = Request::SetParent {
        version: other,
        source,
    };
    [
        (first, version, newest, decouple),
        (second, other, source, set_parent),
    ]
}

/// Goal: between copies the snapshot stays, and a new name of the volume does as well. Method: the
/// reads of the copies end last.
#[test]
fn other_requests_between_copies() {
    for (mut rig, version, snapshot, job) in jobs() {
        let running = begin(&mut rig, job.clone());
        assert!(rig.pending.iter().any(is_copy));
        for of in [snapshot, version] {
            let delete = begin(&mut rig, Request::Delete { version: of });
            let refused = rig.take_answer(delete);
            assert_eq!(refused, Err(Refusal::Changing), "{job:?}");
        }
        let name = "renamed".to_owned();
        let rename = begin(&mut rig, Request::Rename { version, name });
        assert_eq!(rig.take_answer(rename), Ok(Answer::Done));
        rig.finish();
        assert_eq!(rig.take_answer(running), Ok(Answer::Done));
        let name = |rig: &Rig| rig.pool.state().versions[&version].identity.name.clone();
        assert_eq!(name(&rig), "renamed", "{job:?}");
        let (rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
        assert_eq!(name(&rig), "renamed", "{job:?}");
        assert_eq!(rig.pool.check(), []);
    }
}

fn is_as_before(rig: &mut Rig, version: VersionId, before: &[u64], parent: Option<VersionId>) {
    rig.pool.settle();
    rig.finish();
    let versions = &rig.pool.state().versions;
    assert!(versions.values().all(|version| !version.is_hidden));
    assert_eq!(versions[&version].parent, parent);
    assert_eq!(contents(rig, version), before);
    assert_eq!(rig.pool.check(), []);
}

/// Goal: a pool that becomes full between two copies leaves the volume as it was, and a trim makes
/// the request possible. Method: one unit more is free in each run, until all copies find one.
#[test]
fn a_pool_that_becomes_full_between_copies() {
    for kind in 0..2 {
        let mut refusals = 0;
        for left in 0.. {
            let (mut rig, version, _, job) = jobs().into_iter().nth(kind).unwrap();
            let fillers = [20, 21, 22, 23].map(|number| rig.created(number, 16, false));
            let (before, parent) = (
                contents(&rig, version),
                rig.pool.state().versions[&version].parent,
            );
            let mut places = fillers
                .iter()
                .flat_map(|of| (0..16).map(|place| (*of, place)));
            loop {
                let (free, kept) = rig.pool.free_units();
                if free <= kept + left {
                    break;
                }
                let (filler, place) = places.next().expect("the pool is small");
                rig.wrote(filler, place, &[(0, value(1, place * 4, 8))]);
            }
            let outcome = rig.run(job.clone());
            if outcome == Ok(Answer::Done) {
                break;
            }
            assert!(
                matches!(outcome, Err(Refusal::NoSpace { .. })),
                "{job:?} {outcome:?}"
            );
            refusals += 1;
            is_as_before(&mut rig, version, &before, parent);
            let unmap = |first| Request::Unmap {
                version: fillers[0],
                first,
                granules: 16,
            };
            for first in [0, 16] {
                assert_eq!(rig.run(unmap(first)), Ok(Answer::Done));
            }
            rig.pool.settle();
            rig.finish();
            assert_eq!(rig.run(job), Ok(Answer::Done));
            assert_eq!(rig.pool.check(), []);
        }
        assert!(refusals > 1, "no copy came before the refusal");
    }
}

/// Goal: a disk that fails an I/O leaves the old parent and contents, or the new ones. Method: each
/// I/O of a request fails in a run of its own. A pool that is held is imported.
#[test]
fn a_disk_that_fails_between_copies() {
    for kind in 0..2 {
        let [mut medium, mut held] = [0, 0];
        for failing in 0.. {
            let (mut rig, version, _, job) = jobs().into_iter().nth(kind).unwrap();
            let parent = |rig: &Rig| rig.pool.state().versions[&version].parent;
            let old = (parent(&rig), contents(&rig, version));
            let token = rig.submit(job.clone());
            rig.pump();
            let mut at = 0;
            while let Some(first) = rig.ready().into_iter().next() {
                rig.end_with(first, at == failing);
                at += 1;
                if rig.pool.is_held() {
                    break;
                }
            }
            let outcome = rig.take_answer(token);
            if rig.pool.is_held() {
                held += 1;
                // A later I/O of the pool may fail as well.
                assert!([Ok(Answer::Done), Err(Refusal::Held)].contains(&outcome));
                (rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
                rig.finish();
            } else if outcome.is_err() {
                medium += 1;
                assert_eq!(outcome, Err(Refusal::Medium));
                is_as_before(&mut rig, version, &old.1, old.0);
            }
            assert_eq!(rig.pool.check(), [], "{job:?} {failing}");
            if (parent(&rig), contents(&rig, version)) == old {
                assert_ne!(outcome, Ok(Answer::Done));
                assert_eq!(rig.run(job), Ok(Answer::Done));
            }
            let (mut sound, _, _, job) = jobs().into_iter().nth(kind).unwrap();
            sound.run(job).unwrap();
            assert_eq!(contents(&rig, version), contents(&sound, version));
            assert_eq!(parent(&rig), parent(&sound));
            if at <= failing {
                break;
            }
        }
        assert!(medium > 2 && held > 2, "{medium} {held}");
    }
}

/// A read-only volume refuses every change, serves clones, and stays so after an import.
#[test]
fn a_read_only_volume_does_not_change() {
    let (mut rig, [volume, ..]) = chain();
    let version = volume;
    assert_eq!(rig.run(Request::ReadOnly { version }), Ok(Answer::Done));
    assert_eq!(rig.run(Request::ReadOnly { version }), Ok(Answer::Done));
    let before = contents(&rig, volume);
    let token = rig.write(volume, 0, &[(0, value(1, 0, 9))], false);
    rig.finish();
    assert_eq!(rig.take_answer(token), Err(Refusal::WrongKind));
    let changes = [
        Request::Unmap {
            version,
            first: 0,
            granules: 1,
        },
        Request::Resize { version, units: 20 },
        Request::Snapshot(vec![(volume, identity(7))]),
        Request::Inflate { version },
        Request::Decouple { version },
    ];
    for change in changes {
        assert_eq!(rig.run(change), Err(Refusal::WrongKind));
    }
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    rig.finish();
    assert!(rig.pool.state().versions[&volume].is_read_only);
    let clone = Request::Clone {
        source: volume,
        identity: identity(8),
        thick: true,
    };
    let Ok(Answer::Created(clone)) = rig.run(clone) else {
        panic!("a read-only volume is cloned");
    };
    assert!(!rig.pool.state().versions[&clone].is_read_only);
    rig.wrote(clone, 0, &[(0, value(1, 0, 9))]);
    assert_eq!(contents(&rig, volume), before);
    rig.pool.checkpoint();
    rig.finish();
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
    rig.finish();
    assert_eq!(rig.run(Request::Delete { version }), Ok(Answer::Done));
    rig.finish();
    assert_eq!(rig.read(clone, 1), Ok(Some(value(1, 1, 1))));
    assert_eq!(rig.pool.check(), []);
}

fn superblocks(rig: &Rig, disk: &Disk) -> Vec<Superblock> {
    let offsets = rig.geometry().superblock_offsets();
    let pages = offsets.map(|offset| disk.read(offset as usize / PAGE));
    let pages = pages.into_iter().flatten();
    pages
        .filter_map(|page| Superblock::decode(page).ok())
        .collect()
}

/// Goal: wherever a record of a feature counts, no superblock lacks the feature: an older version
/// refuses the pool. Method: a crash before each I/O that keeps all of the cache.
fn features_are_named_first() -> bool {
    let (mut rig, [version, ..]) = chain();
    let named = superblocks(&rig, &rig.crashed(Crash::Power, |_| ALL_SECTORS));
    assert!(named.iter().all(|root| root.required == 0));
    rig.submit(Request::ReadOnly { version });
    rig.pump();
    let mut is_named = true;
    while let Some(at) = rig.ready().into_iter().next() {
        let disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
        let roots = superblocks(&rig, &disk);
        let (again, _) = rig::import(disk).unwrap();
        if again.pool.state().versions[&version].is_read_only {
            let bit = Feature::ReadOnly as u64;
            is_named &= roots.iter().all(|root| root.required & bit != 0);
        }
        rig.end(at);
    }
    assert!(rig.pool.state().versions[&version].is_read_only);
    is_named
}

#[test]
fn a_feature_is_named_before_its_first_use() {
    assert!(features_are_named_first());
    Mutation::activate(Some(Mutation::FeatureUnnamed));
    let is_named = features_are_named_first();
    Mutation::activate(None);
    assert!(!is_named, "the test finds it");
}

/// A pool of a newer version is refused with the names of what it needs, although older roots are
/// whole; and a newer root that is older than the present one does not matter.
#[test]
fn unknown_features_are_refused_by_name() {
    let (rig, _) = chain();
    let disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    let roots = superblocks(&rig, &disk);
    let newest = roots.iter().max_by_key(|root| root.sequence).unwrap();
    let place = Superblock::places(newest.sequence)[0];
    let block = rig.geometry().superblock_offsets()[place] as usize / PAGE;
    let with = |sequence, change: &dyn Fn(&mut [u8; PAGE])| {
        let mut page = [0; PAGE];
        let root = Superblock {
            sequence,
            ..newest.clone()
        };
        root.encode(&mut page);
        change(&mut page);
        crate::format::superblock::seal(&mut page);
        let mut disk = disk.clone();
        let write = disk.begin_write(block, std::sync::Arc::new(page), false);
        disk.complete(write);
        rig::import(disk).map(|_| ())
    };
    let named = |page: &mut [u8; PAGE]| {
        page[32..40].copy_from_slice(&(1 | 1u64 << 40 | 1 << 41).to_le_bytes());
        let names = b"\x09read-only\x0bcompression\x02\xff\xff";
        page[3088..3088 + names.len()].copy_from_slice(names);
    };
    let names = "compression, number 41".to_owned();
    let next = newest.sequence + 2;
    assert_eq!(with(next, &named), Err(ImportError::Features { names }));
    let names = "format 2".to_owned();
    let version = |page: &mut [u8; PAGE]| page[8] = 2;
    assert_eq!(with(next, &version), Err(ImportError::Features { names }));
    assert_eq!(with(newest.sequence - 2, &named), Ok(()));
}

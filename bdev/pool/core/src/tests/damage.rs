//! Goal: a damaged disk never makes an import panic, and never gives wrong data. Method: a valid
//! image; each of its blocks is zeroed, flipped or unreadable.

use std::panic::{AssertUnwindSafe, catch_unwind};

use nacre_random::Random;

use super::content::value;
use super::disk::{ALL_SECTORS, Crash, Disk};
use super::rig::{self, Rig};
use crate::format::log_page::LogPage;
use crate::format::superblock::Superblock;
use crate::geometry::PAGE;
use crate::ids::VersionId;
use crate::import::ImportError;
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;

pub(super) fn image() -> (Disk, VersionId, VersionId) {
    let mut rig = Rig::create(96, 40, true);
    let volume = rig.created(1, 16, false);
    for place in 0..10 {
        rig.wrote(volume, place, &[(1, value(1, place * 4 + 1, 1))]);
    }
    let snapshot = rig.snapshot(volume, 2);
    rig.wrote(volume, 2, &[(2, value(1, 10, 2))]);
    rig.pool.checkpoint();
    rig.finish();
    rig.wrote(volume, 3, &[(1, value(1, 13, 3))]);
    rig.run(Request::Flush).unwrap();
    (rig.crashed(Crash::Power, |_| ALL_SECTORS), volume, snapshot)
}

#[derive(Debug, Clone, Copy)]
enum Damage {
    Zeroed,
    Flipped,
    Unreadable,
}

/// Damages each written block in turn. Only the loss of a settled log page is refused.
fn damage_each_block() {
    let (disk, volume, snapshot) = image();
    let geometry = rig::import(disk.clone()).unwrap().0.geometry();
    let log = geometry.edge_bytes as usize / PAGE;
    let log = log..log + geometry.log_pages as usize;
    let (mut opened, mut healed, mut refused) = (0, 0, 0);
    for block in (0..disk.blocks()).filter(|block| disk.is_written(*block)) {
        for damage in [Damage::Zeroed, Damage::Flipped, Damage::Unreadable] {
            let mut disk = disk.clone();
            match damage {
                Damage::Zeroed => disk.corrupt(block, |bytes| *bytes = [0; PAGE]),
                Damage::Flipped => disk.corrupt(block, |bytes| bytes[100] ^= 4),
                Damage::Unreadable => drop(disk.bad.insert(block)),
            }
            let (rig, report) = match rig::import(disk) {
                Ok(opened) => opened,
                Err(ImportError::LogDamaged { .. }) if log.contains(&block) => {
                    refused += 1;
                    continue;
                }
                Err(error) => panic!("{damage:?} {block}: {error}"),
            };
            opened += 1;
            healed += report.healed;
            assert_eq!(report.lost, 0, "{damage:?} {block}: one copy is left");
            assert_eq!(rig.pool.check(), [], "{damage:?} {block}");
            for (version, last) in [(volume, 3), (snapshot, 1)] {
                for place in 0..10 {
                    let (at, _) = rig.block_of(version, place * 4 + 1).unwrap();
                    // The damaged block may be data itself, or the end of the log.
                    if at == Some(block) {
                        continue;
                    }
                    let found = rig.read(version, place * 4 + 1).unwrap();
                    let good = value(1, place * 4 + 1, 1);
                    let newer = value(1, place * 4 + 1, last);
                    assert!(
                        found == Some(good) || (place == 3 && found == Some(newer)),
                        "{damage:?} of {block}: place {place} is {found:x?}"
                    );
                }
            }
        }
    }
    assert!(opened > 0 && healed > 0, "{opened} {healed}");
    assert!(refused > 0, "no log page was settled");
}

#[test]
fn one_block_after_the_other() {
    damage_each_block();
}

/// The test above finds a page that is used although its checksum is wrong.
#[test]
fn trusting_pages() {
    Mutation::activate(Some(Mutation::TrustPages));
    let outcome = catch_unwind(AssertUnwindSafe(damage_each_block));
    Mutation::activate(None);
    assert!(outcome.is_err(), "wrong pages are not noticed");
}

/// A pool with records that one log page each holds, after its root.
fn with_records(pages: u64) -> (Rig, VersionId) {
    let mut rig = Rig::create(96, 40, true);
    let version = rig.created(1, 16, false);
    // A trim has a record where there is a leaf.
    rig.wrote(version, 3, &[(0, value(1, 12, 1))]);
    rig.pool.settle();
    rig.finish();
    rig.pool.checkpoint();
    rig.finish();
    for _ in 0..pages {
        let unmap = Request::Unmap {
            version,
            first: 0,
            granules: 1,
        };
        rig.run(unmap).unwrap();
    }
    (rig, version)
}

fn log_block(rig: &Rig, sequence: u64) -> usize {
    rig.geometry().log_offset(sequence) as usize / PAGE
}

/// Goal: a lost log page that was settled is noticed however far behind it the mark is. Method:
/// more pages than may be in flight lie between the two.
#[test]
fn a_settled_page_far_before_the_mark() {
    let (mut rig, _) = with_records(5);
    let sequence = rig.pool.superblock().log_sequence;
    let mark = log_block(&rig, sequence + 5);
    rig.pool.settle();
    rig.pump();
    // The page with the mark is also the one that makes a checkpoint due.
    while !LogPage::decode(rig.disk.read(mark).unwrap()).is_ok_and(|page| page.head.settled > 0) {
        let ready = rig.ready();
        rig.end(ready[0]);
    }
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    assert!(rig::import(disk.clone()).is_ok());
    disk.corrupt(log_block(&rig, sequence), |bytes| *bytes = [0; PAGE]);
    let outcome = rig::import(disk).map(|_| ());
    assert_eq!(outcome, Err(ImportError::LogDamaged { sequence }));
}

/// Goal: an unreadable page does not end the log when the log went on behind it. Method: records
/// that a flush made durable, and no mark.
#[test]
fn an_unreadable_page_amid_the_log() {
    let (mut rig, version) = with_records(1);
    let sequence = rig.pool.superblock().log_sequence + 2;
    for place in 0..3 {
        rig.wrote(version, place, &[(0, value(1, place * 4, 1))]);
    }
    rig.run(Request::Flush).unwrap();
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    disk.bad.insert(log_block(&rig, sequence));
    let outcome = rig::import(disk).map(|_| ());
    assert_eq!(outcome, Err(ImportError::LogDamaged { sequence }));
}

/// Places of superblocks, newest sequence first.
fn roots(disk: &Disk, rig: &Rig) -> Vec<(u64, Vec<usize>)> {
    let blocks = rig.geometry().superblock_offsets();
    let blocks = blocks.map(|offset| offset as usize / PAGE);
    let mut found: std::collections::BTreeMap<u64, Vec<usize>> = Default::default();
    for block in blocks {
        let page = disk.read(block).unwrap();
        if let Ok(root) = Superblock::decode(page) {
            found.entry(root.sequence).or_default().push(block);
        }
    }
    found.into_iter().rev().collect()
}

/// Goal: the root of an earlier import is not opened when the log has pages of a later one. Method:
/// import, change, lose both copies of the import's only root.
#[test]
fn the_only_root_of_an_import() {
    let (rig, version) = with_records(1);
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS)).unwrap();
    rig.finish();
    rig.wrote(version, 0, &[(0, value(1, 0, 1))]);
    rig.run(Request::Flush).unwrap();
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    let newest = roots(&disk, &rig).remove(0).1;
    assert_eq!(newest.len(), 2);
    for block in newest {
        disk.corrupt(block, |bytes| bytes[200] ^= 1);
    }
    let outcome = rig::import(disk.clone()).map(|_| ());
    assert!(
        matches!(outcome, Err(ImportError::LogDamaged { .. })),
        "{outcome:?}"
    );
    Mutation::activate(Some(Mutation::IgnoreLaterImports));
    let outcome = rig::import(disk);
    Mutation::activate(None);
    let (rig, _) = outcome.expect("without the rule it opens");
    assert_eq!(rig.read(version, 0), Ok(Some(0)), "and the write is lost");
}

/// Goal: a pool that falls back to the root before has its data, goes on, and can be imported
/// again. Method: both copies of the newest page map are damaged.
#[test]
fn a_root_whose_page_map_is_lost() {
    let fall_back = || {
        let mut rig = Rig::create(96, 40, true);
        let volume = rig.created(1, 16, false);
        for number in 1..6 {
            rig.wrote(volume, number, &[(1, value(1, number * 4 + 1, number))]);
            rig.pool.checkpoint();
            rig.finish();
        }
        let (mut disk, geometry) = (rig.crashed(Crash::Power, |_| ALL_SECTORS), rig.geometry());
        let map = rig.pool.superblock().page_map;
        for page in [map.a, map.b] {
            let block = geometry.page_offset(page) as usize / PAGE;
            disk.corrupt(block, |bytes| bytes[100] ^= 4);
        }
        let (mut rig, report) = rig::import(disk).unwrap();
        assert!(report.fell_back);
        let check = |rig: &Rig| {
            assert_eq!(rig.pool.check(), []);
            for number in 1..6 {
                let at = number * 4 + 1;
                assert_eq!(rig.read(volume, at), Ok(Some(value(1, at, number))));
            }
        };
        check(&rig);
        rig.finish();
        for number in 6..10 {
            rig.wrote(volume, number, &[(1, value(1, number * 4 + 1, number))]);
            rig.pool.checkpoint();
            rig.finish();
            check(&rig);
        }
        let (rig, report) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
        assert_eq!(
            (report.fell_back, report.healed, report.lost),
            (false, 0, 0)
        );
        check(&rig);
    };
    fall_back();
    Mutation::activate(Some(Mutation::KeepGarbage));
    let outcome = catch_unwind(AssertUnwindSafe(fall_back));
    Mutation::activate(None);
    assert!(
        outcome.is_err(),
        "freeing pages of the lost root is not noticed"
    );
}

/// Goal: an import gives its root a second copy before it writes a newer root. Method: one copy of
/// each root is damaged.
#[test]
fn a_root_of_which_one_copy_is_left() {
    let (rig, _) = with_records(1);
    let disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    for (sequence, blocks) in roots(&disk, &rig) {
        for block in blocks {
            let mut disk = disk.clone();
            disk.corrupt(block, |bytes| *bytes = [0; PAGE]);
            let (mut again, report) = rig::import(disk).unwrap();
            let is_newest = sequence == rig.pool.superblock().sequence;
            assert_eq!(report.healed, u64::from(is_newest));
            if is_newest {
                again.finish();
                let copy = Superblock::decode(again.disk.read(block).unwrap());
                assert_eq!(copy.map(|root| root.sequence), Ok(sequence));
            }
        }
    }
}

/// Goal: a pool that has grown can fall back to the root before, whatever the log says since.
/// Method: a full pool grows and is written to at once; both copies of the newest page map are
/// lost.
#[test]
fn falling_back_after_growth() {
    let grown = || {
        let mut rig = Rig::create_on(40, 40, 8, true);
        let volumes = [rig.created(1, 16, false), rig.created(2, 16, false)];
        let mut places = (0..32).map(|at| (at / 16 + 1, at % 16));
        let mut written = Vec::new();
        for (family, place) in places.by_ref() {
            let data = [(0, value(family, place * 4, 1))];
            let token = rig.write(volumes[family as usize - 1], place, &data, false);
            rig.finish();
            if rig.take_answer(token).is_err() {
                break;
            }
            written.push((family, place));
        }
        rig.pool.checkpoint();
        rig.finish();
        let (old, growth) = (rig.geometry().units(), rig.growth());
        rig.run(growth).unwrap();
        assert_eq!(rig.geometry().units(), 80);
        for (family, place) in places.take(12) {
            let data = [(0, value(family, place * 4, 1))];
            rig.write(volumes[family as usize - 1], place, &data, false);
            written.push((family, place));
        }
        rig.run(Request::Flush).unwrap();
        let units = written.iter().map(|(family, place)| {
            let entry = rig.pool.lookup(volumes[*family as usize - 1], *place);
            entry.unwrap().own.unit
        });
        assert!(units.max() >= Some(old), "no new unit is in use");
        let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
        let map = rig.pool.superblock().page_map;
        for page in [map.a, map.b] {
            let block = rig.geometry().page_offset(page) as usize / PAGE;
            disk.corrupt(block, |bytes| bytes[100] ^= 4);
        }
        let (rig, report) = rig::import(disk).unwrap();
        assert!(report.fell_back);
        assert_eq!(rig.geometry().units(), 80);
        assert_eq!(rig.pool.check(), []);
        for (family, place) in written {
            let found = rig.read(volumes[family as usize - 1], place * 4);
            assert_eq!(found, Ok(Some(value(family, place * 4, 1))));
        }
    };
    grown();
    Mutation::activate(Some(Mutation::GrowAfterOneRoot));
    let outcome = catch_unwind(AssertUnwindSafe(grown));
    Mutation::activate(None);
    assert!(outcome.is_err(), "the smaller root is not noticed");
}

/// Goal: a pool on a grown disk opens with its old size, also if only the superblocks at its old
/// end are left, and grows. A disk that became smaller is refused.
#[test]
fn a_disk_of_another_size() {
    let mut rig = Rig::create_on(64, 16, 16, true);
    let volume = rig.created(1, 16, false);
    rig.wrote(volume, 3, &[(0, value(1, 12, 1))]);
    rig.pool.checkpoint();
    rig.finish();
    assert_eq!(rig.pool.superblock().sequence, 2);
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    let [first, second, ..] = rig.geometry().superblock_offsets();
    disk.corrupt(first as usize / PAGE, |bytes| bytes[100] ^= 4);
    let (mut rig, report) = rig::import(disk).unwrap();
    assert_eq!((report.healed, report.replayed), (1, 0), "at the old end");
    rig.finish();
    let growth = rig.growth();
    assert_eq!(rig.run(growth.clone()), Ok(Answer::Done));
    assert_eq!(rig.pool.free_units().0, rig.pool.space().free());
    assert_eq!((rig.geometry().units(), rig.pool.check()), (80, vec![]));
    let sequence = rig.pool.superblock().sequence;
    assert_eq!(rig.run(growth), Ok(Answer::Done));
    assert_eq!(rig.pool.superblock().sequence, sequence, "it is done");
    let smaller = Request::Grow {
        disk: 0,
        disk_bytes: geometry_bytes(64),
    };
    assert_eq!(rig.run(smaller), Err(Refusal::OutOfRange));
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    for place in [first, second] {
        disk.corrupt(place as usize / PAGE, |bytes| *bytes = [0; PAGE]);
    }
    let (mut rig, _) = rig::import(disk.clone()).unwrap();
    assert_eq!(rig.read(volume, 12), Ok(Some(value(1, 12, 1))));
    rig.finish();
    disk.truncate(geometry_bytes(70) as usize / PAGE);
    let outcome = rig::import(disk).map(|_| ());
    assert_eq!(outcome, Err(ImportError::NoSuperblock));
    let mut disk = rig.crashed(Crash::Power, |_| ALL_SECTORS);
    disk.truncate(geometry_bytes(70) as usize / PAGE);
    let (expected, found) = (geometry_bytes(80), geometry_bytes(70));
    let outcome = rig::import(disk).map(|_| ());
    let disk = rig.pool.superblock().disk;
    let small = ImportError::DiskSize {
        disk,
        expected,
        found,
    };
    assert_eq!(outcome, Err(small));
}

/// A new name of the pool survives a loss of power; it needs no other change.
#[test]
fn a_pool_gets_another_name() {
    let mut rig = Rig::create(64, 16, true);
    rig.finish();
    for name in ["other", "third", "third"] {
        let name = name.to_owned();
        let rename = Request::RenamePool { name: name.clone() };
        assert_eq!(rig.run(rename), Ok(Answer::Done));
        assert_eq!(rig.pool.superblock().name, name);
        let disk = rig.crashed(Crash::Power, |_| 0);
        rig = rig::import(disk).unwrap().0;
        assert_eq!(rig.pool.superblock().name, name);
    }
    for name in ["", &"x".repeat(256)] {
        let name = name.to_owned();
        assert_eq!(
            rig.run(Request::RenamePool { name }),
            Err(Refusal::OutOfRange)
        );
    }
}

fn geometry_bytes(units: u64) -> u64 {
    rig::geometry(units).disk_bytes
}

/// Goal: an import that is interrupted leaves the data that the next one verifies. Method: the
/// record of a unit that held metadata of an older root, and later records that depend on it; the
/// import is interrupted after each of its I/Os. Returns whether the last write is always there.
fn survives_interrupted_imports(seed: u64) -> bool {
    let mut random = Random::new(seed);
    let mut rig = Rig::create(96, 40, true);
    let version = rig.created(1, 16, false);
    let other = rig.created(2, 16, false);
    for number in 0..6 {
        for _ in 0..random.below(12) {
            let (place, granule) = (random.below(15), random.below(4));
            let values = [(granule as u32, value(1, place * 4 + granule, number))];
            let version = *random.pick(&[version, other]);
            rig.wrote(version, place, &values);
        }
        rig.pool.checkpoint();
        rig.finish();
    }
    let whole = [0, 1, 2, 3].map(|granule| (granule, value(1, 60 + u64::from(granule), 100)));
    rig.wrote(version, 15, &whole);
    let unmap = Request::Unmap {
        version,
        first: 60,
        granules: 4,
    };
    rig.run(unmap).unwrap();
    rig.wrote(version, 15, &[(0, value(1, 60, 200))]);
    rig.run(Request::Flush).unwrap();
    let (mut rig, _) = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS)).unwrap();
    rig.pump();
    loop {
        let again = rig::import(rig.crashed(Crash::Power, |_| ALL_SECTORS));
        let (again, _) = again.unwrap();
        if again.read(version, 60) != Ok(Some(value(1, 60, 200))) {
            return false;
        }
        let Some(at) = rig.ready().first().copied() else {
            return true;
        };
        rig.end(at);
    }
}

#[test]
fn metadata_spares_units_of_unsettled_records() {
    let survives = |mutation| {
        Mutation::activate(mutation);
        let survives: Vec<bool> = (1..=40).map(survives_interrupted_imports).collect();
        Mutation::activate(None);
        survives
    };
    assert_eq!(survives(None), [true; 40]);
    let found = survives(Some(Mutation::ReuseUnsettledZones));
    assert!(found.contains(&false), "{found:?}");
}

/// Both copies of a leaf: its places answer errors until they are cleared; the rest is served.
#[test]
fn a_leaf_that_is_lost() {
    let (disk, volume, _) = image();
    let mut lost = 0;
    let blocks: Vec<usize> = (0..disk.blocks()).filter(|b| disk.is_written(*b)).collect();
    for (at, a) in blocks.iter().enumerate() {
        for b in &blocks[at + 1..] {
            if disk.read(*a) != disk.read(*b) {
                continue;
            }
            let mut disk = disk.clone();
            disk.bad.extend([*a, *b]);
            let Ok((mut rig, report)) = rig::import(disk) else {
                continue;
            };
            if report.lost == 0 {
                continue;
            }
            lost += 1;
            rig.finish();
            let places: Vec<u64> = (0..16)
                .filter(|p| rig.pool.lookup(volume, *p).is_err())
                .collect();
            for place in places {
                if rig.pool.lookup(volume, place).is_err() {
                    let clear = Request::Clear {
                        version: volume,
                        place,
                    };
                    rig.run(clear).unwrap();
                }
                assert_eq!(rig.read(volume, place * 4), Ok(Some(0)));
            }
            assert_eq!(rig.pool.check(), []);
        }
    }
    assert!(lost > 0);
}

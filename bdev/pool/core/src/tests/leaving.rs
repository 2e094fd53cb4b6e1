//! A disk that leaves the pool: refusals, ends, and what an import needs then.

use super::content::value;
use super::disk::Crash;
use super::rig::{self, ALLOCATION, Pending, Rig};
use crate::disks::{DiskState, Location};
use crate::format::superblock::Feature;
use crate::ids::VersionId;
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;
use crate::space::Allocation;

const REMOVE: Request = Request::RemoveDisk { disk: 1 };

/// A pool of disks with a volume whose places are on all of them, and a snapshot of it.
fn pool_of(further: &[u64], places: u64) -> (Rig, VersionId) {
    let mut rig = Rig::create_beside(96, 9, 64, true, further);
    for _ in further {
        let addition = rig.addition().unwrap();
        assert_eq!(rig.run(addition), Ok(Answer::Done));
    }
    let volume = rig.created(1, 16, false);
    for place in 0..places {
        let values = [0, 1, 2, 3].map(|bit| {
            let at = place * 4 + u64::from(bit);
            (bit, value(1, at, at + 1))
        });
        rig.wrote(volume, place, &values);
    }
    rig.snapshot(volume, 2);
    rig.wrote(volume, 0, &[(1, value(1, 1, 99))]);
    rig.pool.checkpoint();
    rig.finish();
    (rig, volume)
}

fn check_contents(rig: &Rig, places: u64) {
    for (number, second) in [(1, 99), (2, 2)] {
        let version = rig.find(number).unwrap();
        for at in 0..places * 4 {
            let wanted = value(1, at, if at == 1 { second } else { at + 1 });
            assert_eq!(rig.read(version, at), Ok(Some(wanted)), "v{number} {at}");
        }
    }
    assert_eq!(rig.pool.check(), []);
}

/// Goal: the data of a disk moves, and the pool needs no more units than before. Method:
/// the second of three disks leaves; the pool is imported without it, and takes another disk.
#[test]
fn a_disk_leaves() {
    let (mut rig, _) = pool_of(&[24, 30], 12);
    let used = |rig: &Rig| {
        (0..3)
            .map(|disk| rig.pool.space().used_of(disk))
            .sum::<u64>()
    };
    let (units, before) = (rig.pool.total_units(), used(&rig));
    assert!(rig.pool.space().used_of(1) > 4);
    let id = rig.pool.superblock().disks.disks()[1].id;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    assert_eq!(rig.left, [(id, Ok(()))]);
    assert_eq!(rig.pool.leaving(), None);
    assert_eq!(rig.pool.total_units(), units - 24);
    check_contents(&rig, 12);
    assert_eq!(rig.run(REMOVE), Err(Refusal::OutOfRange));
    let (mut rig, _) = rig::import(rig.disk).unwrap();
    rig.finish();
    check_contents(&rig, 12);
    assert!(
        used_after(&rig) <= before + 2,
        "{} {before}",
        used_after(&rig)
    );
    let table = &rig.pool.superblock().disks;
    assert_eq!(table.disks().len(), 2);
    assert_eq!(table.ranges().len(), 3);
    let named = Feature::SeveralDisks as u64 | Feature::LeavingDisks as u64;
    assert_eq!(rig.pool.superblock().required & named, named);
    // The disk is free for another pool, or for this one.
    let addition = rig.addition().unwrap();
    assert_eq!(rig.run(addition), Ok(Answer::Done));
    let (mut rig, _) = rig::import(rig.disk).unwrap();
    rig.finish();
    assert_eq!(rig.pool.total_units(), units);
    assert_eq!(rig.run(Request::RemoveDisk { disk: 2 }), Ok(Answer::Done));
    check_contents(&rig, 12);
}

fn used_after(rig: &Rig) -> u64 {
    let disks = rig.pool.superblock().disks.present();
    disks.map(|disk| rig.pool.space().used_of(disk)).sum()
}

/// Goal: the pool refuses a disk that cannot leave, with the reason, and changes nothing. Method:
/// the first disk, the last one, an unknown one, one too full for the others, a second one
/// meanwhile.
#[test]
fn disks_that_cannot_leave() {
    let mut rig = Rig::create_beside(96, 0, 64, true, &[]);
    let first = Request::RemoveDisk { disk: 0 };
    assert_eq!(rig.run(first.clone()), Err(Refusal::LastDisk));
    let (mut rig, _) = pool_of(&[24, 30], 12);
    assert_eq!(rig.run(first), Err(Refusal::FirstDisk));
    let unknown = Request::RemoveDisk { disk: 3 };
    assert_eq!(rig.run(unknown), Err(Refusal::OutOfRange));
    let keep = Request::KeepDisk { disk: 1 };
    assert_eq!(rig.run(keep.clone()), Err(Refusal::NotLeaving));
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    let other = Request::RemoveDisk { disk: 2 };
    assert_eq!(rig.run(other), Err(Refusal::DiskLeaving));
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done), "it leaves already");
    let used = rig.pool.leaving().unwrap();
    assert!(used.disk == 1 && used.left > 4 && used.left <= used.total);
    assert_eq!(rig.run(keep), Ok(Answer::Done));
    assert_eq!(rig.left.pop().unwrap().1, Err(Refusal::Cancelled));
    let (rig, _) = rig::import(rig.disk).unwrap();
    let states = rig.pool.superblock().disks.disks();
    assert!(states.iter().all(|disk| disk.state == DiskState::In));
    check_contents(&rig, 12);
}

/// Goal: the pool refuses a removal for which the other disks lack space, with the number of units.
/// If the lack arises later, the disk stays in use with all its data. Method: the other one of two
/// disks is nearly full; then a volume takes the space while the moves wait.
#[test]
fn too_little_space_before_and_meanwhile() {
    ALLOCATION.set(Allocation::Next);
    let (mut rig, _) = pool_of(&[60], 12);
    assert!(rig.pool.space().used_of(1) >= 12);
    let fill = rig.created(5, 16, false);
    let free = |rig: &Rig| {
        let (free, kept) = rig.pool.free_units();
        free - rig.pool.free_units_of(1) - kept
    };
    let (room, used) = (free(&rig), rig.pool.space().used_of(1));
    assert!(room > used, "{room} {used}");
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    let mut place = 0;
    let (free_now, kept) = rig.pool.free_units();
    while rig.pool.free_units().0 > kept + 2 && place < 16 {
        rig.wrote(fill, place, &[(0, value(5, place * 4, 1))]);
        place += 1;
    }
    assert!(free_now > rig.pool.free_units().0);
    let (left, (free, kept)) = (rig.pool.leaving().unwrap().left, rig.pool.free_units());
    rig.moves = 4;
    rig.finish();
    let (_, result) = rig.left.pop().unwrap();
    let missing = left - (free - kept);
    assert_eq!(result, Err(Refusal::NoRoom { missing }));
    check_contents(&rig, 12);
    let refused = rig.run(REMOVE);
    assert!(
        matches!(refused, Err(Refusal::NoRoom { missing }) if missing > 0),
        "{refused:?}"
    );
    // The disk is in use again.
    let before = rig.pool.free_units_of(1);
    let other = rig.created(6, 16, false);
    for place in 0..16 {
        rig.wrote(other, place, &[(0, value(6, place * 4, 1))]);
    }
    assert!(rig.pool.free_units_of(1) < before);
}

/// Goal: a disk that fails a copy stays in use, and keeps the units that have not moved. Method:
/// the copy of the first unit cannot be read, or cannot be written.
#[test]
fn a_disk_that_fails_stays() {
    for fails_read in [true, false] {
        let (mut rig, _) = pool_of(&[24], 12);
        rig.submit(REMOVE);
        rig.pump();
        let mut has_failed = false;
        for _ in 0..20_000 {
            rig.pump();
            let Some(at) = rig.ready().into_iter().next() else {
                break;
            };
            let is_it = match rig.pending[at] {
                Pending::Source { .. } => fails_read,
                Pending::Data { .. } => !fails_read,
                _ => false,
            };
            rig.end_with(at, is_it && !has_failed);
            has_failed |= is_it;
        }
        assert!(has_failed);
        assert_eq!(rig.left.pop().unwrap().1, Err(Refusal::Medium));
        check_contents(&rig, 12);
        assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
        assert_eq!(rig.left.pop().unwrap().1, Ok(()));
        check_contents(&rig, 12);
    }
}

/// Goal: when a disk has left, the root before the newest does not need it either. Method: the
/// lists of the newest root become unreadable, so that the import falls back. The fault gives the
/// disk up after one root.
#[test]
fn the_root_before_needs_no_disk_that_left() {
    for is_hasty in [false, true] {
        let (mut rig, _) = pool_of(&[24], 12);
        Mutation::activate(is_hasty.then_some(Mutation::DropAfterOneRoot));
        assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
        Mutation::activate(None);
        assert_eq!(rig.left.len(), 1);
        let mut disk = rig.crashed(Crash::Power, |_| 0xff);
        let root = rig.pool.superblock();
        for page in [root.directory.a, root.directory.b] {
            let block = disk.block(root.disks.page(page));
            disk.corrupt(block, |page| page.fill(0xee));
        }
        let outcome = rig::import(disk);
        assert_eq!(outcome.is_err(), is_hasty, "{:?}", outcome.err());
    }
}

/// Goal: two devices with the superblocks of a disk that has left do not prevent an import. Method:
/// both get the superblocks that the disk had when it left.
#[test]
fn copies_of_a_disk_that_left_do_not_matter() {
    let mut rig = Rig::create_beside(96, 9, 64, true, &[24, 24]);
    let addition = rig.addition().unwrap();
    assert_eq!(rig.run(addition), Ok(Answer::Done));
    let volume = rig.created(1, 16, false);
    (0..4).for_each(|place| rig.wrote(volume, place, &[(0, value(1, place * 4, 1))]));
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    assert!(rig.pool.leaving().is_some());
    let places = |rig: &Rig, disk| {
        let root = rig.pool.superblock();
        let at = root.disks.superblocks(1, &root.geometry);
        at.map(|at| rig.disk.block(Location { disk, ..at }))
    };
    let [before, other] = [1, 2].map(|disk| places(&rig, disk));
    let pages = before.map(|block| *rig.disk.read(block).unwrap());
    rig.moves = 4;
    rig.finish();
    assert_eq!(rig.left.len(), 1);
    let mut disk = rig.crashed(Crash::Power, |_| 0xff);
    for blocks in [before, other] {
        for (block, page) in blocks.into_iter().zip(pages) {
            disk.corrupt(block, |bytes| *bytes = page);
        }
    }
    let (rig, _) = rig::import(disk).unwrap();
    assert_eq!(rig.pool.superblock().disks.disks().len(), 1);
}

/// Goal: metadata leaves the disk, too, and a pool that is closed meanwhile goes on at its import.
/// Method: tests allocate pages on all disks in turn; the pool is exported in the middle.
#[test]
fn metadata_leaves_and_an_import_goes_on() {
    let (mut rig, _) = pool_of(&[24], 12);
    let table = rig.pool.superblock().disks.clone();
    let zones = rig.pool.zones().units();
    assert!(zones.into_iter().any(|unit| table.disk_of(unit) == 1));
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    // Two units move, and no further one.
    rig.moves = 2;
    rig.pump();
    rig.moves = 0;
    rig.finish();
    assert_eq!(rig.run(Request::Export), Ok(Answer::Done));
    assert!(rig.left.is_empty());
    let (mut rig, _) = rig::import(rig.disk).unwrap();
    let leaving = rig.pool.leaving();
    assert!(leaving.is_some_and(|of| of.left > 0), "{leaving:?}");
    rig.moves = 4;
    rig.finish();
    assert_eq!(rig.left.len(), 1);
    check_contents(&rig, 12);
    let (rig, _) = rig::import(rig.disk).unwrap();
    assert_eq!(rig.pool.superblock().disks.disks().len(), 1);
    check_contents(&rig, 12);
}

/// Goal: a read that a disk never answers holds up no write, and the removal goes on when the read
/// ends. Method: a read is in flight when four units begin to move, and a host writes to one of
/// them. The keeper's allowances go on.
#[test]
fn a_read_without_an_end_holds_up_no_write() {
    let (mut rig, volume) = pool_of(&[24], 12);
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    rig.begin_read(volume, 5, 7);
    let is_read = |pending: &Pending| matches!(pending, Pending::Read { .. });
    rig.moves = 4;
    rig.pump();
    let moving = |rig: &Rig| -> Vec<u64> {
        let is_moving = |place: &u64| {
            let entry = rig.pool.lookup(volume, *place).unwrap();
            rig.pool.is_moving(&entry)
        };
        (0..12).filter(is_moving).collect()
    };
    assert!(!moving(&rig).is_empty());
    let at = moving(&rig)[0];
    let second = if at == 0 { 99 } else { at * 4 + 2 };
    let write = rig.write(volume, at, &[(1, value(1, at * 4 + 1, second))], false);
    for _ in 0..8 {
        rig.finish_but(is_read);
        assert!(rig.answers.is_empty(), "the move waits for the read");
    }
    for _ in 0..4 {
        rig.finish_but(is_read);
    }
    assert_eq!(rig.take_answer(write), Ok(Answer::Done));
    // No move holds up a write for the same read again.
    for _ in 0..100 {
        rig.finish_but(is_read);
        assert_eq!(moving(&rig), [0; 0]);
    }
    assert!(rig.left.is_empty());
    rig.finish();
    assert_eq!(rig.left.pop().unwrap().1, Ok(()));
    check_contents(&rig, 12);
}

/// Goal: a loss of power that undoes a host's write finds the granule of before in the copy of a
/// unit, too. Method: a volume has its own unit on the second further disk, and the snapshot's unit
/// on the first one. A host writes granule 1 to the own unit, and the other unit moves to the third
/// disk. Power fails, and each write in a cache is lost once. The fault copies used granules only.
#[test]
fn a_copy_has_the_granules_that_a_loss_of_power_needs() {
    for is_faulty in [false, true] {
        ALLOCATION.set(Allocation::Next);
        // A volume stays on a disk that has room; another one begins on the disk with most room.
        let mut rig = Rig::create_beside(72, 0, 64, true, &[12, 16, 13]);
        let add = |rig: &mut Rig| {
            let addition = rig.addition().unwrap();
            assert_eq!(rig.run(addition), Ok(Answer::Done));
        };
        add(&mut rig);
        let volume = rig.created(1, 16, false);
        let values = |place| [0, 1, 2, 3].map(|bit| (bit, value(1, place * 4 + u64::from(bit), 1)));
        (0..12).for_each(|place| rig.wrote(volume, place, &values(place)));
        add(&mut rig);
        add(&mut rig);
        let snapshot = rig.snapshot(volume, 2);
        rig.wrote(volume, 0, &[(0, value(1, 0, 2))]);
        // The second further disk is full then.
        (1..16).for_each(|place| rig.wrote(volume, place, &values(place)));
        let delete = Request::Delete { version: snapshot };
        assert_eq!(rig.run(delete), Ok(Answer::Done));
        rig.moves = 0;
        assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
        rig.pool.settle();
        rig.finish();
        let disks = |rig: &Rig| {
            let entry = rig.pool.lookup(volume, 0).unwrap();
            let table = &rig.pool.superblock().disks;
            let disk = |unit| table.disks()[table.disk_of(unit)].id;
            (
                (disk(entry.own.unit), entry.own.granules),
                (disk(entry.second.unit), entry.second.granules),
            )
        };
        let table = rig.pool.superblock().disks.clone();
        let id = |at: usize| table.disks()[at].id;
        assert_eq!(disks(&rig), ((id(2), 0b0001), (id(1), 0b1110)));
        rig.wrote(volume, 0, &[(1, value(1, 1, 2))]);
        assert_eq!(disks(&rig), ((id(2), 0b0011), (id(1), 0b1100)));
        Mutation::activate(is_faulty.then_some(Mutation::MoveUsedGranules));
        rig.moves = 1;
        rig.pump();
        rig.moves = 0;
        rig.finish();
        Mutation::activate(None);
        assert_eq!(disks(&rig), ((id(2), 0b0011), (id(3), 0b1100)));
        let mut found = Vec::new();
        for lost in 0..rig.disk.losable(Crash::Power) {
            let keep = |at| if at == lost { 0 } else { 0xff };
            let (after, report) = rig::import(rig.crashed(Crash::Power, keep)).unwrap();
            if report.dropped == 1 && disks(&after) == ((id(2), 0b0001), (id(3), 0b1110)) {
                found.push(after.read(volume, 1).unwrap());
            } else {
                let read = after.read(volume, 1).unwrap().unwrap();
                assert!([1, 2].map(|number| value(1, 1, number)).contains(&read));
            }
        }
        let [read] = found[..] else {
            panic!("one write is that of the granule: {found:?}");
        };
        assert_eq!(read == Some(value(1, 1, 1)), !is_faulty, "{read:?}");
    }
}

/// Goal: a disk that stays after all discards the space that was freed before and meanwhile.
/// Method: a volume is deleted while the disk leaves; the removal is cancelled, and roots follow.
#[test]
fn a_disk_that_stays_discards_what_was_freed_meanwhile() {
    let (mut rig, _) = pool_of(&[24, 30], 12);
    let other = rig.created(5, 16, false);
    for place in 0..16 {
        rig.wrote(other, place, &[(0, value(5, place * 4, 1))]);
    }
    let table = rig.pool.superblock().disks.clone();
    let unit_of = |place| rig.pool.lookup(other, place).unwrap().own.unit;
    let on_second = (0..16).filter(|place| table.disk_of(unit_of(*place)) == 1);
    let on_second: Vec<u64> = on_second.map(unit_of).collect();
    assert!(on_second.len() > 2);
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    assert_eq!(
        rig.run(Request::Delete { version: other }),
        Ok(Answer::Done)
    );
    let rest = |rig: &mut Rig| {
        for _ in 0..3 {
            rig.pool.settle();
            rig.finish();
            rig.pool.checkpoint();
            rig.finish();
        }
    };
    rest(&mut rig);
    let is_discarded = |rig: &Rig, unit: &u64| {
        let block = rig.disk.block(table.granule(*unit, 0));
        rig.disk.read(block).unwrap() == &[0xdc; 4096]
    };
    assert!(!on_second.iter().any(|unit| is_discarded(&rig, unit)));
    assert_eq!(rig.run(Request::KeepDisk { disk: 1 }), Ok(Answer::Done));
    rest(&mut rig);
    let kept: Vec<&u64> = (on_second.iter())
        .filter(|unit| !rig.pool.space().is_used(**unit) && !is_discarded(&rig, unit))
        .collect();
    assert_eq!(kept, [&0; 0]);
    check_contents(&rig, 12);
}

/// Goal: a unit that many versions share moves alone, so that one allowance keeps the reactor for a
/// short time. Method: thirty versions share all units, and sixteen moves are allowed at once.
#[test]
fn units_of_many_versions_move_one_at_a_time() {
    let (mut rig, volume) = pool_of(&[24], 12);
    for number in 10..38 {
        rig.snapshot(volume, number);
    }
    rig.moves = 0;
    assert_eq!(rig.run(REMOVE), Ok(Answer::Done));
    rig.moves = 16;
    rig.pump();
    let is_moving = |place: &u64| {
        let entry = rig.pool.lookup(volume, *place).unwrap();
        rig.pool.is_moving(&entry)
    };
    assert_eq!((0..12).filter(is_moving).count(), 1);
    rig.finish();
    assert_eq!(rig.left.pop().unwrap().1, Ok(()));
    check_contents(&rig, 12);
}

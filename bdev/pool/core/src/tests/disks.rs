//! Pools of several disks: which devices an import needs, and which pools old versions refuse.

use uuid::Uuid;

use super::content::value;
use super::disk::Crash;
use super::rig::{self, ALLOCATION, Pending, Rig};
use crate::disks::Location;
use crate::format::superblock::{Feature, Superblock};
use crate::geometry::PAGE;
use crate::ids::VersionId;
use crate::import::ImportError;
use crate::interface::{Answer, Refusal, Request};
use crate::mutation::Mutation;
use crate::space::Allocation;

/// A pool of two disks with a volume, at rest.
fn two() -> Rig {
    let mut rig = Rig::create_beside(96, 9, 64, true, &[24]);
    let addition = rig.addition().unwrap();
    assert_eq!(rig.run(addition), Ok(Answer::Done));
    let volume = rig.created(1, 6, false);
    for place in 0..6 {
        let values = [0, 1, 2, 3].map(|bit| {
            let at = place * 4 + u64::from(bit);
            (bit, value(1, at, at + 1))
        });
        rig.wrote(volume, place, &values);
    }
    rig.pool.checkpoint();
    rig.run(Request::Flush).unwrap();
    rig.finish();
    rig
}

fn superblocks_of(rig: &Rig, disk: usize) -> Vec<Superblock> {
    let geometry = rig.geometry();
    let places = rig.pool.superblock().disks.superblocks(disk, &geometry);
    let pages = places.map(|at| Superblock::decode(rig.disk.read(rig.disk.block(at)).unwrap()));
    pages.into_iter().filter_map(Result::ok).collect()
}

/// Goal: every disk says which pool it is of, and older versions refuse the pool. Method: the
/// superblocks of both disks are read; the pool uses both for data.
#[test]
fn every_disk_has_superblocks() {
    let rig = two();
    for disk in 0..2 {
        let found = superblocks_of(&rig, disk);
        assert_eq!(found.len(), 4);
        for superblock in found {
            assert_eq!(superblock.disks, rig.pool.superblock().disks);
            assert_eq!(superblock.disk, superblock.disks.disks()[disk].id);
            assert_eq!(superblock.is_of_first_disk(), disk == 0);
            assert_eq!(superblock.required, Feature::SeveralDisks as u64);
        }
    }
    let state = rig.pool.state();
    let volume = rig.find(1).unwrap();
    let disk = |place| {
        let entry = state.entry(volume, place).unwrap();
        rig.pool.superblock().disks.disk_of(entry.own.unit)
    };
    let disks: Vec<usize> = (0..6).map(disk).collect();
    assert!(disks.contains(&0) && disks.contains(&1), "{disks:?}");
}

/// Goal: a pool with a missing disk is refused by the disk's id, whichever it is, and so is one
/// with a copy of a disk. Method: superblocks are wiped, or copied to the other disk.
#[test]
fn a_disk_that_is_missing_or_a_copy() {
    for lost in 0..2 {
        let mut rig = two();
        let geometry = rig.geometry();
        let table = rig.pool.superblock().disks.clone();
        for at in table.superblocks(lost, &geometry) {
            let block = rig.disk.block(at);
            rig.disk.corrupt(block, |page| page.fill(0));
        }
        let missing = ImportError::DiskMissing {
            disk: table.disks()[lost].id,
            number: lost + 1,
            of: 2,
        };
        assert_eq!(rig::import(rig.disk.clone()).unwrap_err(), missing);
        // A copy of the other disk's first superblock.
        let other = rig.disk.block(Location {
            disk: 1 - lost,
            offset: 0,
        });
        let copy = *rig.disk.read(other).unwrap();
        let block = rig.disk.block(Location {
            disk: lost,
            offset: 0,
        });
        rig.disk.corrupt(block, |page| *page = copy);
        let twice = ImportError::DiskTwice {
            disk: table.disks()[1 - lost].id,
        };
        assert_eq!(rig::import(rig.disk).unwrap_err(), twice);
    }
}

/// Goal: a disk whose superblocks cannot be written stays out, and the pool goes on. Method: the
/// first write to the new disk fails; then the disk is added again, and so is one too many.
#[test]
fn a_new_disk_that_fails() {
    let mut rig = Rig::create_beside(96, 0, 64, true, &[24]);
    let addition = rig.addition().unwrap();
    let token = rig.submit(addition);
    rig.pump();
    let first = rig
        .pending
        .iter()
        .position(|pending| matches!(pending, Pending::Write { .. }));
    rig.end_with(first.unwrap(), true);
    rig.finish();
    assert_eq!(rig.take_answer(token), Err(Refusal::Medium));
    assert_eq!(rig.pool.superblock().disks.disks().len(), 1);
    let units = rig.geometry().units();
    let again = rig.addition().unwrap();
    assert_eq!(rig.run(again.clone()), Ok(Answer::Done));
    assert_eq!(rig.geometry().units(), units + 24);
    // The pool has this disk already.
    let Request::AddDisk { .. } = again else {
        unreachable!("an addition");
    };
    assert_eq!(rig.run(again), Err(Refusal::DiskUnfit));
    let small = Request::AddDisk {
        id: Uuid::from_u128(5),
        disk_bytes: 2 * rig::EDGE + 7 * 4 * PAGE as u64,
    };
    assert_eq!(rig.run(small), Err(Refusal::DiskUnfit));
    assert!(!rig.pool.is_held());
}

/// Goal: each disk grows, and units keep their places. Method: the first disk grows after the
/// second one came; the pool is imported and checked.
#[test]
fn growth_of_either_disk() {
    let mut rig = two();
    let volume = rig.find(1).unwrap();
    let before: Vec<_> = (0..24).map(|at| rig.block_of(volume, at)).collect();
    let growth = rig.growth();
    assert_eq!(rig.run(growth), Ok(Answer::Done));
    assert_eq!(rig.geometry().units(), 96 + 24 + 9);
    let same = Request::Grow {
        disk: 1,
        disk_bytes: rig.disk.bytes_of(1),
    };
    assert_eq!(rig.run(same), Ok(Answer::Done));
    let unknown = Request::Grow {
        disk: 2,
        disk_bytes: 1 << 30,
    };
    assert_eq!(rig.run(unknown), Err(Refusal::OutOfRange));
    let (rig, _) = rig::import(rig.disk).unwrap();
    let after: Vec<_> = (0..24).map(|at| rig.block_of(volume, at)).collect();
    assert_eq!(before, after);
    assert_eq!(rig.pool.superblock().disks.ranges().len(), 3);
    assert_eq!(rig.pool.check(), []);
}

/// A clone in a pool whose second disk has one free unit. The clone's place 0 is of its snapshot.
fn clone_beside_a_full_disk() -> (Rig, VersionId) {
    ALLOCATION.set(Allocation::Next);
    let mut rig = Rig::create_beside(90, 0, 30, true, &[70]);
    let addition = rig.addition().unwrap();
    assert_eq!(rig.run(addition), Ok(Answer::Done));
    let volume = rig.created(1, 16, false);
    rig.wrote(volume, 0, &[(0, value(1, 0, 1)), (1, value(1, 1, 2))]);
    rig.snapshot(volume, 2);
    let source = rig.find(2).unwrap();
    let cloned = |rig: &mut Rig, number| {
        let identity = rig::identity(number);
        let clone = Request::Clone {
            source,
            identity,
            thick: false,
        };
        match rig.run(clone) {
            Ok(Answer::Created(version)) => version,
            other => panic!("{other:?}"),
        }
    };
    let clone = cloned(&mut rig, 3);
    for number in 10.. {
        let other = cloned(&mut rig, number);
        for place in 0..16 {
            if rig.pool.free_units_of(1) <= 1 {
                rig.pool.checkpoint();
                rig.finish();
                // The import flushes all disks.
                let (mut rig, _) = rig::import(rig.disk).unwrap();
                rig.finish();
                return (rig, clone);
            }
            rig.wrote(other, place, &[(0, value(number, place * 4, 1))]);
        }
    }
    unreachable!()
}

/// Goal: a host's flush makes a write durable whose place the pool itself has copied before.
/// Method: an inflation copies to the second disk, and its record is not settled. The host unmaps
/// the place, writes it on the first disk, and flushes. The import verifies the copy.
#[test]
fn a_flush_concerns_the_disks_of_copies() {
    for leaves_out in [false, true] {
        let (mut rig, clone) = clone_beside_a_full_disk();
        let disk_of = |rig: &Rig| {
            let entry = rig.pool.state().entry(clone, 0).unwrap();
            rig.pool.superblock().disks.disk_of(entry.own.unit)
        };
        rig.submit(Request::Inflate { version: clone });
        let stays = |pending: &Pending| matches!(pending, Pending::Flush { .. });
        rig.finish_but(stays);
        assert_eq!(disk_of(&rig), 1);
        let unmap = rig.submit(Request::Unmap {
            version: clone,
            first: 0,
            granules: 4,
        });
        rig.finish_but(stays);
        assert_eq!(rig.take_answer(unmap), Ok(Answer::Done));
        let written = value(3, 0, 9);
        let write = rig.write(clone, 0, &[(0, written)], false);
        rig.finish_but(stays);
        assert_eq!(rig.take_answer(write), Ok(Answer::Done));
        assert_eq!(disk_of(&rig), 0);
        Mutation::activate(leaves_out.then_some(Mutation::FlushWithoutCopies));
        rig.flush_of_host(clone);
        Mutation::activate(None);
        let (rig, _) = rig::import(rig.crashed(Crash::Power, |_| 0)).unwrap();
        let is_lost = rig.read(clone, 0) != Ok(Some(written));
        assert_eq!(is_lost, leaves_out);
    }
}

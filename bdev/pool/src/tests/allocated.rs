//! The number of blocks that volumes and snapshots take, as hosts see it.

use std::sync::Arc;

use nacre_bdev::listing::{ListAnswer, ListQuery};
use nacre_bdev::{Bdev, Status};
use uuid::Uuid;

use super::rig::{self, Home, Host, block_on, run};
use crate::{Command, PoolHandle};

/// Blocks of a unit.
const UNIT: u64 = 16;

/// The blocks that a volume or snapshot takes; `None`: it is thick.
pub(super) fn allocated(pool: &PoolHandle, id: Uuid) -> Option<u64> {
    block_on(pool.lvol(id)).unwrap().allocated_blocks()
}

/// Goal: a place with data counts once, from its first write until all of it is trimmed; a
/// snapshot and a clone have the count of that moment, which an import finds again. Method: each
/// change is compared as soon as it is answered.
#[test]
fn places_with_data_count() {
    let (home, pool, lvol, mut host) = rig::start(64, 64);
    let is_now = |units: u64| assert_eq!(allocated(&pool, lvol), Some(units * UNIT));
    is_now(0);
    assert_eq!(host.write(5, 1, 1), Status::Ok);
    is_now(1);
    assert_eq!(host.write(6, 2, 1), Status::Ok);
    is_now(1);
    assert_eq!(host.write(4096 + 8, 16, 1), Status::Ok);
    is_now(3);
    let snapshot = rig::snapshot(&pool, lvol, 2);
    assert_eq!(host.write(6, 1, 2), Status::Ok);
    // Of two units of the pool.
    is_now(3);
    assert_eq!(host.unmap(4096, 16), Status::Ok);
    is_now(2);
    assert_eq!(host.unmap(0, 5), Status::Ok);
    is_now(2);
    assert_eq!(host.unmap(0, 8192), Status::Ok);
    is_now(0);
    assert_eq!(allocated(&pool, snapshot), Some(3 * UNIT));
    let clone = rig::clone(&pool, snapshot, 3);
    assert_eq!(allocated(&pool, clone), Some(3 * UNIT));
    assert_eq!(host.write(0, 256, 2), Status::Ok);
    is_now(16);
    assert_eq!(host.flush(), Status::Ok);

    drop((host, pool));
    let home = Home::new(&home.kill());
    let (pool, _) = home.import();
    let all = [lvol, snapshot, clone].map(|id| allocated(&pool, id));
    assert_eq!(all, [16, 3, 3].map(|units| Some(units * UNIT)));
    let restore = Command::Restore { lvol, snapshot };
    run(&pool, restore).unwrap();
    assert_eq!(allocated(&pool, lvol), Some(3 * UNIT));
    let grow = Command::Resize {
        lvol,
        bytes: 128 << 20,
    };
    run(&pool, grow).unwrap();
    let shrink = Command::Resize {
        lvol,
        bytes: 16 << 20,
    };
    assert_eq!(allocated(&pool, lvol), Some(3 * UNIT));
    run(&pool, shrink).unwrap();
    assert_eq!(allocated(&pool, lvol), Some(UNIT));
    rig::check(&pool);
}

/// Goal: a thick volume reports no number, a snapshot of it does.
#[test]
fn a_thick_volume_takes_all_blocks() {
    let (_home, pool, _, _) = rig::start(64, 1);
    let id = Uuid::from_u128(9);
    let create = Command::Create {
        id,
        name: "thick".into(),
        bytes: 4 << 20,
        thick: true,
    };
    run(&pool, create).unwrap();
    let mut host = Host::on(&pool, id);
    assert_eq!(host.write(0, 1, 1), Status::Ok);
    assert_eq!(allocated(&pool, id), None);
    let snapshot = rig::snapshot(&pool, id, 10);
    assert_eq!(allocated(&pool, snapshot), Some(UNIT));
}

/// Goal: the preferred size of a write is a unit, and no write is split at its multiples.
#[test]
fn a_unit_is_the_preferred_write() {
    let (_home, pool, lvol, _) = rig::start(64, 1);
    let limits = Arc::clone(&block_on(pool.lvol(lvol)).unwrap()).limits();
    let both = (limits.optimal_write_blocks, limits.optimal_boundary_blocks);
    assert_eq!(both, (16, 0));
}

/// Goal: a list has exactly the ranges with data, clipped to the wanted one, over many leaves, and
/// says if it is cut; a thick volume has data everywhere. Method: with leaves that no lane has
/// loaded, after an import.
#[test]
fn ranges_with_data_are_listed() {
    let (home, pool, lvol, mut host) = rig::start(64, 1024);
    for lba in [5, 17, 64, 4095, 4096, 200_000] {
        assert_eq!(host.write(lba, 1, 1), Status::Ok);
    }
    assert_eq!(host.flush(), Status::Ok);
    drop((host, pool));
    let home = Home::new(&home.kill());
    let (pool, _) = home.import();
    let list = |id, range, most| {
        let (sender, answers) = std::sync::mpsc::channel();
        let answer = ListAnswer::new(move |answer| sender.send(answer).unwrap());
        let lvol = block_on(pool.lvol(id)).unwrap();
        lvol.list_allocated(ListQuery { range, most }, answer);
        let found = answers.recv().unwrap().unwrap();
        (found.ranges, found.is_complete)
    };
    let all = vec![0..32, 64..80, 4080..4112, 200_000..200_016];
    assert_eq!(list(lvol, 0..262_144, 9), (all.clone(), true));
    assert_eq!(list(lvol, 0..262_144, 4), (all.clone(), true));
    assert_eq!(list(lvol, 0..262_144, 3), (all[..3].to_vec(), false));
    assert_eq!(list(lvol, 0..262_144, 0), (vec![], false));
    assert_eq!(list(lvol, 20..70, 9), (vec![20..32, 64..70], true));
    assert_eq!(list(lvol, 32..64, 9), (vec![], true));
    assert_eq!(list(lvol, 4112..262_144, 1), (all[3..].to_vec(), true));
    assert_eq!(list(lvol, 200_016..262_144, 9), (vec![], true));

    let id = Uuid::from_u128(9);
    let create = Command::Create {
        id,
        name: "thick".into(),
        bytes: 4 << 20,
        thick: true,
    };
    run(&pool, create).unwrap();
    let whole = list(id, 3..900, 1);
    assert_eq!((whole.0.first(), whole.1), (Some(&(3..900)), true));
    let device = block_on(pool.lvol(lvol)).unwrap();
    run(&pool, Command::Close { export: false }).unwrap();
    let (sender, answers) = std::sync::mpsc::channel();
    let answer = ListAnswer::new(move |answer| sender.send(answer).unwrap());
    let range = 0..16;
    device.list_allocated(ListQuery { range, most: 1 }, answer);
    assert_eq!(answers.recv().unwrap(), Err(Status::Gone));
}

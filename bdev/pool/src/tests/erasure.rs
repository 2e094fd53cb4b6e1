//! The deletion of a pool erases its disks one after the other, and names those that it could not.

use std::sync::Arc;

use nacre_bdev::fault::{self, Action, Fault, FaultDevice};
use nacre_bdev::{Bdev, Op, Status};
use nacre_bdev_pool_core::geometry::superblock_offsets;

use super::disks::{claim, import};
use super::rig::{Home, block_on};
use crate::{Command, EDGE, NotErased, PoolError, PoolHandle};

const MEBIBYTES: u64 = 64;

/// A pool of three disks. The second one is a fault device.
fn three() -> (Home, PoolHandle, Arc<FaultDevice>) {
    let home = Home::with_disk(MEBIBYTES);
    let pool = home.create();
    home.disk("more", MEBIBYTES);
    home.disk("last", MEBIBYTES);
    let config = serde_json::from_value(serde_json::json!({ "base_name": "more" })).unwrap();
    let device = fault::create(config, &home.registry).unwrap();
    home.registry
        .register(Arc::clone(&device) as Arc<dyn Bdev>)
        .unwrap();
    for disk in ["EE_more", "last"] {
        block_on(pool.add_disk(claim(&home, disk), false)).unwrap();
    }
    (home, pool, device)
}

/// A fault for writes to one of the four superblocks.
fn at_superblock(place: usize, action: Action) -> Fault {
    let offset = superblock_offsets(MEBIBYTES << 20, EDGE)[place];
    Fault {
        ops: vec![Op::Write],
        range: Some((offset / 512, 8)),
        ..Fault::new(action)
    }
}

fn not_erased(status: Option<Status>) -> Result<(), PoolError> {
    let disk = "EE_more".to_owned();
    let disks = vec![NotErased { disk, status }];
    Err(PoolError::NotErased { disks })
}

/// Goal: the answer names the disk that fails or hangs, and all other disks are free for another
/// pool. Method: writes to one superblock fail; then the place that the last root leaves out hangs.
#[test]
fn a_deletion_names_disks_that_are_not_erased() {
    let delete = |pool: &PoolHandle| block_on(pool.run(Command::Destroy)).map(drop);
    let mut unused = None;
    for place in 0..4 {
        let (home, pool, device) = three();
        let fault = at_superblock(place, Action::FailMedium);
        device.inject(fault).unwrap();
        match delete(&pool) {
            // The last root could not be written.
            Err(PoolError::Refused(_)) => continue,
            other => assert_eq!(other, not_erased(Some(Status::WriteError))),
        }
        unused = Some(place);
        drop(pool);
        for disk in ["disk", "last"] {
            home.create_on(disk, false).unwrap();
        }
        let left = home.create_on("EE_more", false).err().unwrap();
        assert!(matches!(left, PoolError::NotEmpty { .. }), "{left:?}");
    }
    let (home, pool, device) = three();
    let fault = at_superblock(unused.unwrap(), Action::Hang);
    device.inject(fault).unwrap();
    let began = std::time::Instant::now();
    assert_eq!(delete(&pool), not_erased(None));
    assert!(began.elapsed().as_millis() < 5000);
    // The erasure ends when the disk answers.
    device.clear();
    device.resume_pending();
    drop(pool);
    for disk in ["disk", "EE_more", "last"] {
        // A claim waits until the pool has given the disk up.
        drop(claim(&home, disk));
        home.create_on(disk, false).unwrap();
    }
}

/// Goal: a deletion of healthy disks erases all of them. Method: no import finds the pool.
#[test]
fn a_deletion_erases_all_disks() {
    let (home, pool, _device) = three();
    block_on(pool.run(Command::Destroy)).unwrap();
    drop(pool);
    assert!(import(&home, &["disk", "EE_more", "last"]).is_err());
    for disk in ["disk", "EE_more", "last"] {
        home.create_on(disk, false).unwrap();
    }
}

/// Goal: an export names the disk that it waits for, and ends when the disk answers. Method: writes
/// to all superblocks of a disk hang.
#[test]
fn an_export_names_the_disk_that_it_waits_for() {
    let (_home, pool, device) = three();
    for place in 0..4 {
        let fault = at_superblock(place, Action::Hang);
        device.inject(fault).unwrap();
    }
    std::thread::scope(|scope| {
        let export = Command::Close { export: true };
        let closing = scope.spawn(|| block_on(pool.run(export)).map(drop));
        let began = std::time::Instant::now();
        while pool.late_disks() != ["EE_more"] {
            assert!(began.elapsed().as_secs() < 20, "{:?}", pool.late_disks());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        device.clear();
        device.resume_pending();
        assert_eq!(closing.join().unwrap(), Ok(()));
    });
}

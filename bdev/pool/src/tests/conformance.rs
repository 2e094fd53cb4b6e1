//! Volumes behave as every block device does: fresh ones, and clones whose data is shared.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_bdev::{Bdev, Status};

use super::external;
use super::rig::{self, Home, Host, block_on};

/// Mebibytes of a volume.
const SIZE: u64 = 4;

#[test]
fn a_fresh_volume_conforms() {
    let home = Home::with_disk(768);
    let pool = home.create();
    let next = AtomicU64::new(1);
    nacre_bdev::conformance::run(|| {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let id = rig::volume(&pool, u128::from(number), SIZE);
        block_on(pool.lvol(id)).unwrap() as Arc<dyn Bdev>
    });
    rig::check(&pool);
}

/// Half of the blocks are shared with two snapshots.
#[test]
fn a_clone_conforms() {
    let home = Home::with_disk(1024);
    let pool = home.create();
    let origin = rig::volume(&pool, 1, SIZE);
    let mut host = Host::on(&pool, origin);
    for lba in (0..SIZE * 256).step_by(6) {
        assert_eq!(host.write(lba, 3, 7), Status::Ok);
    }
    let first = rig::snapshot(&pool, origin, 2);
    let second = rig::clone(&pool, first, 3);
    let mut host = Host::on(&pool, second);
    for lba in (0..SIZE * 256).step_by(64) {
        assert_eq!(host.write(lba, 5, 8), Status::Ok);
    }
    let source = rig::snapshot(&pool, second, 4);
    let next = AtomicU64::new(10);
    nacre_bdev::conformance::run(|| {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let id = rig::clone(&pool, source, u128::from(number));
        block_on(pool.lvol(id)).unwrap() as Arc<dyn Bdev>
    });
    rig::check(&pool);
}

#[test]
fn a_volume_on_a_device_conforms() {
    let home = Home::with_disk(1024);
    let pool = home.create();
    external::device(&home, "gold", SIZE);
    let next = AtomicU64::new(10);
    nacre_bdev::conformance::run(|| {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let id = external::clone(&home, &pool, "gold", u128::from(number)).unwrap();
        block_on(pool.lvol(id)).unwrap() as Arc<dyn Bdev>
    });
    rig::check(&pool);
}

#[test]
fn a_snapshot_conforms() {
    let home = Home::with_disk(512);
    let pool = home.create();
    let origin = rig::volume(&pool, 1, SIZE);
    let source = rig::snapshot(&pool, origin, 2);
    nacre_bdev::conformance::run(|| block_on(pool.lvol(source)).unwrap() as Arc<dyn Bdev>);
}

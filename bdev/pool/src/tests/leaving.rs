//! A disk leaves a pool of RAM disks under I/O, is free then, and leaves after a restart, too.

use nacre_bdev::registry::Usage;
use nacre_bdev::{Holder, Status};
use nacre_bdev_pool_core::interface::Refusal;
use uuid::Uuid;

use super::disks::{add, byte, import, verify};
use super::rig::{self, Home, Host, block_on};
use crate::{Command, Departed, PoolError, PoolHandle};

const BLOCKS: u64 = 4096 * 3;

/// A pool of two disks with data on both, and a snapshot of it.
fn two() -> (Home, PoolHandle, Uuid, Host) {
    let (home, pool, lvol, mut host) = rig::start(128, 96);
    home.disk("more", 64);
    for lba in (0..BLOCKS / 2).step_by(16) {
        assert_eq!(host.write(lba, 16, byte(lba)), Status::Ok);
    }
    add(&home, &pool, &mut host, "more").unwrap();
    // Another volume begins on the emptier disk, which is soon the second one.
    for lba in (BLOCKS / 2..BLOCKS).step_by(16) {
        assert_eq!(host.write(lba, 16, byte(lba)), Status::Ok);
    }
    let other = rig::volume(&pool, 7, 48);
    let mut on = Host::on(&pool, other);
    for lba in (0..4096).step_by(16) {
        assert_eq!(on.write(lba, 16, byte(lba)), Status::Ok);
    }
    rig::snapshot(&pool, other, 8);
    assert_eq!(on.write(3, 1, byte(3)), Status::Ok);
    assert_eq!(on.flush(), Status::Ok);
    assert_eq!(host.flush(), Status::Ok);
    drop(on);
    (home, pool, lvol, host)
}

fn disk_id(pool: &PoolHandle, name: &str) -> Uuid {
    let disks = pool.status().disks;
    disks.iter().find(|disk| disk.name == name).unwrap().id
}

fn remove(pool: &PoolHandle, name: &str) -> Result<(), PoolError> {
    let disk = disk_id(pool, name);
    block_on(pool.run(Command::RemoveDisk { disk })).map(drop)
}

/// Does something until a removal has ended.
fn departed(pool: &PoolHandle, mut meanwhile: impl FnMut()) -> Departed {
    let began = std::time::Instant::now();
    loop {
        meanwhile();
        if let Some(departed) = pool.take_departed().pop() {
            return departed;
        }
        assert!(began.elapsed().as_secs() < 60, "{:?}", pool.status().disks);
    }
}

/// Goal: hosts notice nothing when a disk leaves, and the disk can be given to another pool.
/// Method: a host writes in place, writes first, trims and flushes while the disk leaves. All is
/// compared, also after an import with the first disk alone.
#[test]
fn a_disk_leaves_a_pool_in_use() {
    let (home, pool, lvol, mut host) = two();
    let used = |pool: &PoolHandle| {
        let status = pool.status();
        status.total_bytes - status.free_bytes
    };
    let on_second = &pool.status().disks[1];
    assert!(on_second.total_bytes - on_second.free_bytes > 8 << 20);
    let (id, before) = (disk_id(&pool, "more"), used(&pool));
    remove(&pool, "more").unwrap();
    let mut at = 0;
    let mut seen = false;
    let departed = departed(&pool, || {
        at = (at + 7 * 16) % BLOCKS;
        // In place, a trim and a first write, and a read.
        assert_eq!(host.write(at, 16, byte(at)), Status::Ok);
        assert_eq!(host.unmap(at, 16), Status::Ok);
        assert_eq!(host.write(at, 16, byte(at)), Status::Ok);
        assert_eq!(host.read(at, 16).1[0], byte(at));
        if at.is_multiple_of(160) {
            assert_eq!(host.flush(), Status::Ok);
        }
        let status = pool.status();
        seen |= status.disks.iter().any(|disk| disk.leaving.is_some());
    });
    assert!(seen, "the status has the progress");
    let name = "more".to_owned();
    let result = Ok(());
    let expected = Departed {
        disk: id,
        name,
        result,
    };
    assert_eq!(departed, expected);
    assert_eq!(pool.bases(), ["disk"]);
    // No copy of a move concerns the flushes of hosts.
    let filled = &pool.shared.filled;
    assert_eq!(filled.load(std::sync::atomic::Ordering::SeqCst), 0);
    assert!(used(&pool) < before + (1 << 20), "{} {before}", used(&pool));
    verify(&mut host, BLOCKS);
    rig::check(&pool);
    // The claim has ended, and the superblocks are gone: no force.
    let other = home.create_on("more", false).unwrap();
    assert_eq!(other.bases(), ["more"]);
    assert_eq!(host.write(0, 16, byte(0)), Status::Ok);
    assert_eq!(host.flush(), Status::Ok);
    drop((host, pool, other));
    let home = Home::new(&home.kill());
    let pool = import(&home, &["disk"]).unwrap();
    verify(&mut Host::on(&pool, lvol), BLOCKS);
    let rest = rig::list(&pool);
    for id in rest.iter().map(|lvol| lvol.id).filter(|id| *id != lvol) {
        verify(&mut Host::on(&pool, id), 4096);
    }
    rig::check(&pool);
}

/// Goal: a removal goes on after the end of the process, whenever that comes, and a disk that had
/// left by then is erased. Method: the reactor is killed after more and more of the removal; the
/// pool is imported with both disks.
#[test]
fn a_removal_goes_on_after_a_restart() {
    let (mut home, mut pool, lvol, host) = two();
    drop(host);
    remove(&pool, "more").unwrap();
    for rounds in 0.. {
        std::thread::sleep(std::time::Duration::from_millis(3 + rounds * 11));
        drop(pool);
        home = Home::new(&home.kill());
        pool = import(&home, &["more", "disk"]).unwrap();
        verify(&mut Host::on(&pool, lvol), BLOCKS);
        if pool.bases() == ["disk"] || rounds > 40 {
            break;
        }
    }
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let user = || Holder::User("test".into());
    while home
        .registry
        .claim("more", user(), Usage::Exclusive)
        .is_err()
    {
        assert!(std::time::Instant::now() < until, "the disk is not free");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    home.create_on("more", false).unwrap();
    assert_eq!(pool.bases(), ["disk"]);
    verify(&mut Host::on(&pool, lvol), BLOCKS);
    rig::check(&pool);
}

/// Goal: a cancelled removal leaves the disk in use, and refusals have their reasons. Method: the
/// removal is cancelled at once; the first disk is asked for, and a disk that is none.
#[test]
fn a_removal_is_cancelled_or_refused() {
    let (home, pool, _, mut host) = two();
    let first = remove(&pool, "disk").unwrap_err();
    assert_eq!(first, PoolError::Refused(Refusal::FirstDisk));
    let none = block_on(pool.run(Command::RemoveDisk { disk: Uuid::max() }));
    assert!(
        matches!(none, Err(PoolError::Unfit { what: "disk", .. })),
        "{none:?}"
    );
    let disk = disk_id(&pool, "more");
    let keep = || block_on(pool.run(Command::KeepDisk { disk })).map(drop);
    assert_eq!(keep(), Err(PoolError::Refused(Refusal::NotLeaving)));
    remove(&pool, "more").unwrap();
    keep().unwrap();
    let stays = departed(&pool, || {});
    assert_eq!(stays.result, Err(PoolError::Refused(Refusal::Cancelled)));
    assert_eq!(pool.bases(), ["disk", "more"]);
    verify(&mut host, BLOCKS);
    rig::check(&pool);
    drop(home);
}

/// A pool whose second disk has left, while a lane still has a queue on the disk.
fn with_a_late_lane() -> (Home, PoolHandle, Host) {
    let (home, pool, _, host) = two();
    remove(&pool, "more").unwrap();
    let began = std::time::Instant::now();
    let is_erasing = || {
        let disks = pool.status().disks;
        let leaving = disks.iter().find(|disk| disk.leaving.is_some());
        leaving.is_some_and(|disk| disk.total_bytes == 0)
    };
    while !is_erasing() {
        assert!(began.elapsed().as_secs() < 60, "{:?}", pool.status().disks);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    (home, pool, host)
}

/// Goal: a pool that is closed or exported right after a removal erases the disk that has left.
/// Method: the close comes while a lane has a queue on the disk; the lane goes a little later.
/// Another pool takes the disk without force.
#[test]
fn a_close_erases_a_disk_that_has_left() {
    for export in [false, true] {
        let (home, pool, host) = with_a_late_lane();
        let close = async {
            let goes = async {
                tokio::time::sleep(std::time::Duration::from_millis(300)).await;
                drop(host);
            };
            tokio::join!(pool.run(Command::Close { export }), goes).0
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build();
        runtime.unwrap().block_on(close).unwrap();
        drop(pool);
        home.create_on("more", false).unwrap();
        import(&home, &["disk"]).unwrap();
    }
}

/// Goal: a lane that does not answer holds up a close for a bounded time. Method: as above, but the
/// lane stays.
#[test]
fn a_close_does_not_wait_for_ever() {
    let (home, pool, host) = with_a_late_lane();
    let began = std::time::Instant::now();
    block_on(pool.run(Command::Close { export: true })).unwrap();
    let waited = began.elapsed().as_secs_f32();
    assert!((4.5..15.0).contains(&waited), "{waited}");
    drop((host, pool));
    // The next import erases the disk.
    let pool = import(&home, &["disk", "more"]).unwrap();
    departed(&pool, || {});
    drop(pool);
    home.create_on("more", false).unwrap();
}

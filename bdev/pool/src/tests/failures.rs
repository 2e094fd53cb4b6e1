//! Wrong disks, other holders, a base that goes, and commands that take long.

use std::sync::Arc;

use nacre_bdev::registry::Removal;
use nacre_bdev::{Bdev, Io, Op, Status};
use nacre_bdev_pool_core::import::ImportError;
use nacre_bdev_uring as uring;
use uuid::Uuid;

use super::rig::{self, HOLDER, Home, Host, POOL, run};
use crate::{Command, PoolError, PoolState, Refusal};

#[test]
fn a_disk_without_the_pool_is_refused() {
    let home = Home::with_disk(64);
    home.disk("other", 64);
    let nothing = home.import_by("other", None, HOLDER).err();
    assert_eq!(nothing, Some(PoolError::Import(ImportError::NoSuperblock)));
    let pool = home.create();
    run(&pool, Command::Close { export: false }).unwrap();
    drop(pool);
    let wrong = Uuid::from_u128(5);
    let other = home.import_by("disk", Some(wrong), HOLDER).err();
    let expected = PoolError::OtherPool {
        expected: wrong,
        found: POOL,
    };
    assert_eq!(other, Some(expected));
    // Nothing was written: the pool is still importable.
    home.import();
}

/// A check goes on as long as the pool has pages. A pool that closes does not wait for it.
#[test]
fn a_closing_pool_ends_its_check() {
    let home = Home::with_disk(256);
    let mut pool = home.create();
    for number in 1..64 {
        let volume = rig::volume(&pool, number, 8);
        assert_eq!(Host::on(&pool, volume).write(0, 1, 1), Status::Ok);
    }
    for export in [false, true] {
        let close = Command::Close { export };
        // The keeper finds both commands when it goes on.
        let pause = std::time::Duration::from_millis(300);
        let pause = home
            .reactor
            .run_future(move |_| async move { std::thread::sleep(pause) });
        let all = async { tokio::join!(pause, pool.run(Command::Check), pool.run(close)) };
        let (_, check, closed) = rig::block_on(all);
        assert!(closed.is_ok(), "{closed:?}");
        let closed = PoolError::Closed;
        let exported = PoolError::Refused(Refusal::Exported);
        assert_eq!(check.err(), Some(if export { exported } else { closed }));
        drop(pool);
        (pool, _) = home.import();
    }
    rig::check(&pool);
}

/// Goal: the count of one volume does not wait for lists of all. Method: the answers of twenty
/// lists of many leaves, and of a count that is sent last, in their order.
#[test]
fn a_count_does_not_wait_for_lists() {
    let home = Home::with_disk(64);
    let pool = home.create();
    let large = rig::volume(&pool, 1, 8192);
    let lvol = rig::volume(&pool, 2, 8);
    let mut host = Host::on(&pool, large);
    for leaf in 0..512 {
        assert_eq!(host.write(leaf * 4096, 1, 1), Status::Ok);
    }
    let answered = rig::block_on(async {
        let mut commands = tokio::task::JoinSet::new();
        let lists = std::iter::repeat_n(Command::List, 20);
        for command in lists.chain([Command::Count { lvol }]) {
            let pool = pool.clone();
            commands.spawn(async move {
                let is_count = matches!(command, Command::Count { .. });
                pool.run(command).await.map(|_| is_count).unwrap()
            });
        }
        let mut answered = Vec::new();
        while let Some(is_count) = commands.join_next().await {
            answered.push(is_count.unwrap());
        }
        answered
    });
    let place = answered.iter().position(|is_count| *is_count);
    assert!(place < Some(19), "{place:?}");
}

/// The status counts all versions: a busy pool does that a few times a second, not every turn.
#[test]
fn a_busy_pool_counts_seldom() {
    let (_home, pool, _, mut host) = rig::start(64, 32);
    let count = || {
        pool.shared
            .statuses
            .load(std::sync::atomic::Ordering::SeqCst)
    };
    let (before, began) = (count(), std::time::Instant::now());
    for unit in 0..400 {
        assert_eq!(host.write(unit * 16, 1, 1), Status::Ok);
    }
    let most = 2 + began.elapsed().as_millis() as u64 / 100;
    let counted = count() - before;
    assert!(counted <= most, "{counted} times, {most} expected");
    let free = pool.status().total_bytes - (400 << 16);
    let is_current = || pool.status().free_bytes <= free;
    let mut looks = 0..500;
    while !is_current() && looks.next().is_some() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(is_current(), "{:?}", pool.status());
}

#[test]
fn another_holder_imports_only_an_exported_pool() {
    let home = Home::with_disk(64);
    let pool = home.create();
    rig::volume(&pool, 1, 8);
    run(&pool, Command::Close { export: false }).unwrap();
    drop(pool);
    let other = Uuid::from_u128(100);
    let foreign = home.import_by("disk", None, other).err();
    let expected = PoolError::Import(ImportError::Foreign { holder: HOLDER });
    assert_eq!(foreign, Some(expected));
    let (pool, _) = home.import();
    run(&pool, Command::Close { export: true }).unwrap();
    assert_eq!(pool.status().state, PoolState::Closed);
    drop(pool);
    let (pool, _) = home.import_by("disk", None, other).unwrap();
    assert_eq!(rig::list(&pool).len(), 1);
    assert_eq!(pool.id(), POOL);
}

#[test]
fn a_disk_with_data_is_overwritten_by_force_only() {
    let home = Home::with_disk(64);
    let pool = home.create();
    rig::volume(&pool, 1, 8);
    run(&pool, Command::Close { export: false }).unwrap();
    drop(pool);
    let refused = home.create_on("disk", false).err();
    let what = format!("pool \"pool0\" ({POOL})");
    assert_eq!(refused, Some(PoolError::NotEmpty { what }));
    let pool = home.create_on("disk", true).unwrap();
    assert_eq!(rig::list(&pool), []);
    // A destroyed pool leaves an empty disk.
    run(&pool, Command::Destroy).unwrap();
    drop(pool);
    home.create();
}

/// Goal: the disk below gets back the space of a deleted volume. Method: the RAM disk's count of
/// unmapped bytes.
#[test]
fn a_deleted_volume_is_discarded() {
    let (home, pool, volume, mut host) = rig::start(64, 8);
    for unit in 0..128 {
        assert_eq!(host.write(unit * 16, 16, 1), Status::Ok);
    }
    drop(host);
    run(&pool, Command::Delete { lvol: volume }).unwrap();
    let layer = home.registry.get("disk").unwrap().layer;
    let unmapped = || layer.stats().snapshot().op(Op::Unmap).bytes;
    // A checkpoint comes 5 s after the last change.
    for _ in 0..1500 {
        if unmapped() >= 7 << 20 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("{} bytes are discarded", unmapped());
}

/// The disk goes under I/O: nothing hangs, and the pool is held.
#[test]
fn a_base_that_goes_ends_all_io() {
    let (home, pool, volume, mut host) = rig::start(64, 8);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    home.registry.remove("disk", Removal::Hot).unwrap();
    assert!(!host.write(64, 16, 1).is_ok());
    assert_eq!(host.read(0, 16).0, Status::Gone);
    assert!(!host.write(128, 16, 1).is_ok());
    for _ in 0..500 {
        if pool.status().state == PoolState::Held {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(pool.status().state, PoolState::Held);
    let refused = run(&pool, Command::Delete { lvol: volume }).unwrap_err();
    assert_eq!(refused, PoolError::Refused(Refusal::Held));
    run(&pool, Command::Close { export: false }).unwrap();
    assert_eq!(host.write(0, 1, 1), Status::Gone);
}

/// A deleted volume answers no I/O any more, and its number may belong to another one.
#[test]
fn a_queue_of_a_deleted_volume_reaches_no_other() {
    let (_home, pool, first, mut host) = rig::start(64, 8);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    run(&pool, Command::Delete { lvol: first }).unwrap();
    let second = rig::volume(&pool, 2, 8);
    assert_eq!(host.write(0, 16, 7), Status::Gone);
    assert_eq!(Host::on(&pool, second).read(0, 1).1[0], 0);
}

/// A size is rounded up to units; a volume shrinks, grows, and has zeroes where it was cut.
#[test]
fn a_volume_is_resized_renamed_and_restored() {
    let home = Home::with_disk(64);
    let pool = home.create();
    let volume = rig::volume(&pool, 1, 8);
    {
        let mut host = Host::on(&pool, volume);
        assert_eq!(host.write(0, 16, 1), Status::Ok);
        assert_eq!(host.write(1024, 16, 2), Status::Ok);
        let snapshot = rig::snapshot(&pool, volume, 2);
        assert_eq!(host.write(0, 16, 3), Status::Ok);
        let resize = |bytes| Command::Resize {
            lvol: volume,
            bytes,
        };
        run(&pool, resize(1 << 20)).unwrap();
        // The host's layer has the old size, and the queue refuses blocks beyond the end.
        assert_eq!(host.read(1024, 1).0, Status::OutOfRange);
        run(&pool, resize((8 << 20) - 5)).unwrap();
        assert_eq!(host.read(1024, 1), (Status::Ok, vec![0; 4096]));
        assert_eq!(host.read(0, 1).1[0], 3);
        let mut reader = Host::on(&pool, snapshot);
        assert_eq!(reader.read(1024, 1).1[0], 2);
        assert_eq!(reader.read(0, 1).1[0], 1);
        let write = Io::new(1, Op::WriteZeroes, 0, 1);
        assert_eq!(reader.run(write).status, Status::WriteProtected);
    }
    let name = "renamed".to_owned();
    run(&pool, Command::Rename { lvol: volume, name }).unwrap();
    let snapshot = Uuid::from_u128(2);
    let restore = Command::Restore {
        lvol: volume,
        snapshot,
    };
    run(&pool, restore).unwrap();
    let mut host = Host::on(&pool, volume);
    assert_eq!(host.read(0, 1).1[0], 1);
    assert_eq!(host.read(1024, 1).1[0], 2);
    let list = rig::list(&pool);
    let restored = list.iter().find(|lvol| lvol.id == volume).unwrap();
    assert_eq!(restored.name, "renamed");
    assert_eq!(restored.parent, Some(snapshot));
    assert_eq!(restored.used_bytes, 2 << 16);
    assert_eq!(restored.exclusive_bytes, 0);
    rig::check(&pool);
}

/// A pool on a disk that grew takes the rest by command, and keeps its contents; a new name stays.
#[test]
fn a_pool_grows_with_its_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    let home = Home::new(&nacre_bdev::Registry::new());
    let config = serde_json::json!({ "name": "disk", "filename": path, "block_size": 512 });
    let disk = uring::create(serde_json::from_value(config).unwrap()).unwrap();
    home.registry
        .register(Arc::clone(&disk) as Arc<dyn Bdev>)
        .unwrap();
    let pool = home.create();
    let volume = rig::volume(&pool, 1, 256);
    let mut host = Host::on(&pool, volume);
    let free = || pool.status().free_bytes;
    run(&pool, Command::Grow).unwrap();
    let before = (free(), pool.status().total_bytes);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    file.set_len(192 << 20).unwrap();
    disk.rescan(None).unwrap();
    home.registry.notify_resize("disk").unwrap();
    run(&pool, Command::Grow).unwrap();
    let more = 128 << 20;
    assert_eq!(pool.status().total_bytes, before.1 + more);
    assert_eq!(free(), before.0 + more - (64 << 10));
    // More than the disk had.
    for place in 0..1800 {
        assert_eq!(
            host.write(place * 16, 16, 1 + (place % 200) as u8),
            Status::Ok
        );
    }
    let name = "renamed".to_owned();
    run(&pool, Command::RenamePool { name }).unwrap();
    assert_eq!(pool.status().name, "renamed");
    drop((host, pool));
    let home = Home::new(&home.kill());
    let (pool, _) = home.import();
    assert_eq!(pool.status().name, "renamed");
    let mut host = Host::on(&pool, volume);
    for place in 0..1800 {
        assert_eq!(host.read(place * 16, 1).1[0], 1 + (place % 200) as u8);
    }
    rig::check(&pool);
}

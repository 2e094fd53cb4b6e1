//! Pools of several RAM disks: one joins under I/O, an import finds both in any order.

use std::sync::atomic::{AtomicBool, Ordering};

use nacre_bdev::registry::Usage;
use nacre_bdev::{Bdev, Claim, Done, Holder, Io, Op, Queue, Status};
use nacre_bdev_pool_core::format::Page;
use nacre_bdev_pool_core::format::superblock::Superblock;
use nacre_bdev_pool_core::geometry::{PAGE, superblock_offsets};
use nacre_bdev_pool_core::import::ImportError;
use nacre_reactor::Nanos;
use uuid::Uuid;

use super::rig::{self, HOLDER, Home, Host, POOL, block_on, memory};
use crate::{Command, Create, EDGE, Import, PoolError, PoolHandle, identify};

pub(super) fn claim(home: &Home, disk: &str) -> Claim {
    loop {
        let user = Holder::User("pool".into());
        match home.registry.claim(disk, user, Usage::Exclusive) {
            Ok(claim) => return claim,
            // The reactor of before is dropping its queues.
            Err(_) => std::thread::yield_now(),
        }
    }
}

pub(super) fn import(home: &Home, disks: &[&str]) -> Result<PoolHandle, PoolError> {
    let claims: Vec<Claim> = disks.iter().map(|disk| claim(home, disk)).collect();
    let wanted = Import {
        id: Some(POOL),
        open: Vec::new(),
        taken_names: Vec::new(),
        holder: HOLDER,
        force: false,
    };
    let opened = home.reactor.run_future(move |core| async move {
        crate::import(&core, memory(), claims, wanted).await
    });
    block_on(opened).unwrap().map(|(pool, _)| pool)
}

/// Adds a disk while a host does something in a loop.
fn add_beside(
    home: &Home,
    pool: &PoolHandle,
    (disk, force): (&str, bool),
    mut meanwhile: impl FnMut(),
) -> Result<(), PoolError> {
    let claim = claim(home, disk);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let adding = scope.spawn(|| {
            let added = block_on(pool.add_disk(claim, force));
            is_done.store(true, Ordering::SeqCst);
            added
        });
        while !is_done.load(Ordering::SeqCst) {
            meanwhile();
        }
        adding.join().unwrap()
    })
}

/// Adds a disk while a host reads.
pub(super) fn add(
    home: &Home,
    pool: &PoolHandle,
    host: &mut Host,
    disk: &str,
) -> Result<(), PoolError> {
    let reads = || assert_eq!(host.read(0, 1).0, Status::Ok);
    add_beside(home, pool, (disk, false), reads)
}

/// An I/O of one page on a device itself. Returns the bytes.
pub(super) fn raw(home: &Home, disk: &str, op: Op, offset: u64, page: Option<&[u8]>) -> Vec<u8> {
    let memory = memory();
    let mut queue = home
        .registry
        .lookup(disk)
        .unwrap()
        .open_queue(&memory)
        .unwrap();
    let mut buf = memory.acquire(PAGE).unwrap();
    if let Some(page) = page {
        buf.bytes_mut().unwrap().copy_from_slice(page);
    }
    let io = Io::new(1, op, offset / 512, PAGE as u32 / 512).with(buf);
    queue.submit(io).map_err(|(busy, _)| busy).unwrap();
    let mut done = Done::with_capacity(1);
    while queue.poll(Nanos(1), &mut done) == 0 {}
    let ended = done.drain().next().unwrap();
    assert_eq!(ended.status, Status::Ok);
    ended.data.iter().flat_map(|buf| buf.to_vec()).collect()
}

/// The byte of a block, so that no two blocks of one test are alike.
pub(super) fn byte(lba: u64) -> u8 {
    (lba / 16 % 251) as u8 + 1
}

pub(super) fn verify(host: &mut Host, blocks: u64) {
    for lba in (0..blocks).step_by(256) {
        let (status, bytes) = host.read(lba, 256);
        assert_eq!(status, Status::Ok);
        for (at, block) in bytes.chunks(4096).enumerate() {
            let expected = byte(lba + at as u64);
            assert!(
                block.iter().all(|found| *found == expected),
                "block {lba} + {at}"
            );
        }
    }
}

/// Goal: a volume goes on over the end of a disk, and an import finds all disks. Method: a volume
/// larger than the first disk is written while the second one joins. It is read after an import
/// that has the disks in the other order. An import with one of them names the other.
#[test]
fn a_disk_joins_a_pool_in_use() {
    let (home, pool, lvol, mut host) = rig::start(64, 96);
    home.disk("more", 64);
    let unit = |host: &mut Host, lba: u64| host.write(lba, 16, byte(lba));
    let half = 4096u64;
    for lba in (0..half).step_by(16) {
        assert_eq!(unit(&mut host, lba), Status::Ok);
    }
    let before = pool.status().total_bytes;
    add(&home, &pool, &mut host, "more").unwrap();
    let status = pool.status();
    assert_eq!(status.disks.len(), 2);
    assert_eq!(status.total_bytes, before + (62 << 20));
    assert_eq!(pool.bases(), ["disk", "more"]);
    let blocks = 5 * half;
    for lba in (half..blocks).step_by(16) {
        assert_eq!(unit(&mut host, lba), Status::Ok, "block {lba}");
    }
    // In place, on both disks and over their border.
    for lba in (0..blocks).step_by(64) {
        assert_eq!(unit(&mut host, lba), Status::Ok);
    }
    assert_eq!(host.flush(), Status::Ok);
    verify(&mut host, blocks);
    let free: Vec<u64> = pool
        .status()
        .disks
        .iter()
        .map(|disk| disk.free_bytes)
        .collect();
    assert!(free[0] < 8 << 20 && free[1] < 50 << 20, "{free:?}");
    rig::check(&pool);
    // Limits and paths of a disk are not those of its volumes.
    {
        let device = block_on(pool.lvol(lvol)).unwrap();
        assert_eq!(device.bases(), Vec::<String>::new());
        assert_eq!(device.disks(), ["disk", "more"]);
    }
    // A lane that opens later has both disks.
    let mut late = Host::on(&pool, lvol);
    verify(&mut late, blocks);
    drop((host, late));
    rig::run(&pool, Command::Close { export: false }).unwrap();
    drop(pool);

    let missing = import(&home, &["disk"]).err();
    let Some(PoolError::Import(ImportError::DiskMissing {
        number: 2, of: 2, ..
    })) = missing
    else {
        panic!("{missing:?}");
    };
    let pool = import(&home, &["more", "disk"]).unwrap();
    assert_eq!(pool.bases(), ["disk", "more"]);
    let mut host = Host::on(&pool, lvol);
    verify(&mut host, blocks);
    rig::check(&pool);
}

/// Goal: a flush reaches the disk of a first write, also if no read has loaded the map there.
/// Method: a volume that begins on the second disk is written; its set of disks to flush grows.
#[test]
fn a_flush_concerns_the_disks_of_writes() {
    let (home, pool, first, mut host) = rig::start(64, 16);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    home.disk("more", 128);
    add(&home, &pool, &mut host, "more").unwrap();
    let second = rig::volume(&pool, 2, 16);
    let [first, second] = [first, second].map(|id| block_on(pool.lvol(id)).unwrap());
    assert_eq!((first.map.disks(), second.map.disks()), (0b01, 0b01));
    let mut other = Host::on(&pool, Uuid::from_u128(2));
    assert_eq!(other.write(48, 3, 7), Status::Ok);
    assert_eq!(second.map.disks(), 0b11);
    // A volume that stays on the first disk does not wait for the second one.
    assert_eq!(host.write(16, 16, 1), Status::Ok);
    assert_eq!(first.map.disks(), 0b01);
}

/// Goal: data of others is not overwritten, and a refused disk is free again. Method: disks with
/// data, too small ones, and one that is in another pool.
#[test]
fn disks_that_cannot_join() {
    let (home, pool, _, mut host) = rig::start(64, 16);
    home.disk("small", 2);
    let refused = |found: Result<(), PoolError>| found.unwrap_err().to_string();
    let small = refused(add(&home, &pool, &mut host, "small"));
    assert!(
        small.starts_with("disk: its") || small.contains("too few"),
        "{small}"
    );
    home.disk("other", 64);
    let new = Create {
        id: Uuid::from_u128(5),
        name: "other".into(),
        holder: HOLDER,
        force: false,
    };
    let other = claim(&home, "other");
    let created = home
        .reactor
        .run_future(move |core| async move { crate::create(&core, memory(), other, new).await });
    let second = block_on(created).unwrap().unwrap();
    rig::run(&second, Command::Close { export: false }).unwrap();
    drop(second);
    let foreign = add(&home, &pool, &mut host, "other").unwrap_err();
    assert!(matches!(foreign, PoolError::NotEmpty { .. }), "{foreign}");
    assert_eq!(pool.status().disks.len(), 1);
    // The device is free again, and has its own label.
    let layer = home.registry.lookup("other").unwrap();
    let read = home
        .reactor
        .run_future(move |core| async move { identify(&core, memory(), &layer).await });
    let label = block_on(read).unwrap().unwrap().unwrap();
    assert_eq!((label.pool, label.disks.len()), (Uuid::from_u128(5), 1));
    drop(claim(&home, "other"));
    home.disk("good", 64);
    add(&home, &pool, &mut host, "good").unwrap();
    rig::check(&pool);
}

/// Goal: a disk joins although no host sends I/O, and a refused disk is free at once. Method: the
/// host's queue is polled only as idle cores do; a second disk has data of others.
#[test]
fn a_disk_joins_beside_idle_hosts() {
    let (home, pool, _, mut host) = rig::start(64, 16);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    home.disk("more", 64);
    add_beside(&home, &pool, ("more", false), || host.rest()).unwrap();
    assert_eq!(pool.status().disks.len(), 2);
    home.disk("full", 64);
    raw(&home, "full", Op::Write, 0, Some(&[7; PAGE]));
    let refused = add_beside(&home, &pool, ("full", false), || host.rest());
    assert!(
        matches!(refused, Err(PoolError::NotEmpty { .. })),
        "{refused:?}"
    );
    add_beside(&home, &pool, ("full", true), || host.rest()).unwrap();
    assert_eq!(pool.bases(), ["disk", "more", "full"]);
}

/// Goal: a core that does not answer keeps a disk out, and the disk is free again. Method: the
/// host's queue is not polled until the addition has failed.
#[test]
fn a_core_that_does_not_answer() {
    let (home, pool, _, mut host) = rig::start(64, 16);
    assert_eq!(host.write(0, 16, 1), Status::Ok);
    home.disk("more", 64);
    let late = add_beside(&home, &pool, ("more", false), || {
        // The pool does not have the disk yet.
        assert_eq!(pool.bases(), ["disk"]);
        std::thread::yield_now();
    });
    let text = late.unwrap_err().to_string();
    assert!(text.contains("a queue on it in time"), "{text}");
    host.rest();
    add_beside(&home, &pool, ("more", false), || host.rest()).unwrap();
    assert_eq!(pool.bases(), ["disk", "more"]);
    rig::check(&pool);
}

/// Goal: a host's flush makes the pool's own copies durable: records after them need them at the
/// import. Method: an inflation copies to the second disk, to which no lane of the volume wrote.
#[test]
fn a_flush_concerns_the_disks_of_copies() {
    let (home, pool, _, mut host) = rig::start(64, 16);
    home.disk("more", 128);
    add(&home, &pool, &mut host, "more").unwrap();
    let source = rig::volume(&pool, 2, 16);
    assert_eq!(Host::on(&pool, source).write(0, 16, 1), Status::Ok);
    rig::snapshot(&pool, source, 3);
    let clone = rig::clone(&pool, Uuid::from_u128(3), 4);
    let lvol = block_on(pool.lvol(clone)).unwrap();
    assert_eq!(lvol.shared.flush_set(&lvol.map), 0b01);
    rig::run(&pool, Command::Inflate { lvol: clone }).unwrap();
    assert_eq!(lvol.map.disks(), 0b01);
    assert_eq!(lvol.shared.flush_set(&lvol.map), 0b11);
    rig::check(&pool);
}

/// Goal: an addition goes on after a crash, and data that came later is not taken for one. Method:
/// superblocks with the id of a disk that no root names, as a crash leaves them: alone, with other
/// bytes, torn, and of a later state of the pool.
#[test]
fn superblocks_of_an_addition() {
    let (home, pool, _, mut host) = rig::start(64, 16);
    // Roots are at even and odd places in turn.
    let offsets = superblock_offsets(64 << 20, EDGE);
    let pages = offsets.map(|offset| raw(&home, "disk", Op::Read, offset, None));
    let ours = pages.into_iter().find(|page| page.starts_with(b"NACREPOL"));
    let ours = ours.unwrap();
    let page: &Page = ours[..].try_into().unwrap();
    let mut label = Superblock::decode(page).unwrap();
    let id = Uuid::from_u128(5);
    label.disks.add(&mut label.geometry, id, 64 << 20).unwrap();
    label.disk = id;
    label.required |= label.disks.features();
    let encoded = |label: &Superblock| {
        let mut page = [0; PAGE];
        label.encode(&mut page);
        page
    };
    let crashed = encoded(&label);
    label.sequence = 1 << 40;
    let later = encoded(&label);
    let mut torn = crashed;
    torn[512..].fill(7);
    for (name, page) in [
        ("crashed", &crashed),
        ("used", &crashed),
        ("later", &later),
        ("torn", &torn),
    ] {
        home.disk(name, 64);
        for offset in offsets {
            raw(&home, name, Op::Write, offset, Some(page));
        }
    }
    // A file system, which does not cover all superblocks.
    raw(&home, "used", Op::Write, 8192, Some(&[7; PAGE]));
    for name in ["used", "later", "torn"] {
        let refused = add(&home, &pool, &mut host, name);
        assert!(
            matches!(refused, Err(PoolError::NotEmpty { .. })),
            "{refused:?}"
        );
    }
    add(&home, &pool, &mut host, "crashed").unwrap();
    // A second device of a disk of the pool: force does not help.
    home.disk("copy", 64);
    raw(&home, "copy", Op::Write, 0, Some(&ours));
    let refused = add_beside(&home, &pool, ("copy", true), || {
        assert_eq!(host.read(0, 1).0, Status::Ok);
    });
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("disk 1 of the pool, or a copy"), "{text}");
    assert_eq!(pool.bases(), ["disk", "crashed"]);
}

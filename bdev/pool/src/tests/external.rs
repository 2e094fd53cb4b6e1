//! Volumes that show a device outside of the pool: reads, writes, restarts, and a device that goes.

use std::sync::Arc;

use nacre_bdev::registry::{DeleteTicket, Removal, Usage};
use nacre_bdev::{Bdev, Claim, Holder, Io, Op, Status, malloc};
use uuid::Uuid;

use std::time::Instant;

use super::allocated::allocated;
use super::rig::{self, Home, Host, block_on, run};
use crate::keeper::FULL_PATIENCE;
use crate::{BLOCK, Command, ExternalParent, LvolInfo, Outcome, PoolError, PoolHandle, Refusal};

/// Blocks of a unit.
pub(super) const UNIT: u64 = 16;
pub(super) const GOLD: Uuid = Uuid::from_u128(500);

/// The byte of a block of a device.
pub(super) fn byte(lba: u64) -> u8 {
    1 + (lba % 251) as u8
}

/// A RAM disk with other contents in each block.
pub(super) fn device(home: &Home, name: &str, mebibytes: u64) {
    let config = serde_json::json!({
        "name": name, "block_size": 512, "num_blocks": mebibytes * 2048, "uuid": GOLD,
    });
    let config = serde_json::from_value(config).unwrap();
    let device = malloc::create(config).unwrap();
    home.registry.register(device as Arc<dyn Bdev>).unwrap();
    let mut host = Host::on_layer(home.registry.lookup(name).unwrap());
    for lba in 0..mebibytes * 256 {
        let mut buf = host.memory.acquire(BLOCK as usize).unwrap();
        buf.bytes_mut().unwrap().fill(byte(lba));
        let write = Io::new(1, Op::Write, lba * 8, 8).with(buf);
        assert_eq!(host.run(write).status, Status::Ok);
    }
}

pub(super) fn claim(home: &Home, name: &str) -> Claim {
    let began = Instant::now();
    loop {
        let holder = Holder::User("pool pool0".into());
        match home.registry.claim(name, holder, Usage::ReadOnly) {
            Ok(claim) => return claim,
            // A queue of before is being dropped.
            Err(error) => assert!(began.elapsed().as_secs() < 60, "{error}"),
        }
        std::thread::yield_now();
    }
}

pub(super) fn clone(
    home: &Home,
    pool: &PoolHandle,
    name: &str,
    number: u128,
) -> Result<Uuid, PoolError> {
    let id = Uuid::from_u128(number);
    let claim = claim(home, name);
    match block_on(pool.clone_external(claim, id, format!("e{number}")))? {
        Outcome::Created(created) => assert_eq!(created, [id]),
        other => panic!("{other:?}"),
    }
    Ok(id)
}

/// Attaches all devices that volumes show and that are registered.
pub(super) fn attach_all(home: &Home, pool: &PoolHandle) {
    for external in pool.status().externals {
        let name = external.parent.id.to_string();
        if home.registry.lookup(&name).is_some() {
            block_on(pool.attach(claim(home, &name))).unwrap();
        }
    }
}

pub(super) fn info(pool: &PoolHandle, of: Uuid) -> LvolInfo {
    let mut list = rig::list(pool).into_iter();
    list.find(|lvol| lvol.id == of).unwrap()
}

#[track_caller]
pub(super) fn shows(host: &mut Host, lba: u64, blocks: u32, expected: impl Fn(u64) -> u8) {
    let (status, read) = host.read(lba, blocks);
    assert_eq!(status, Status::Ok);
    for (at, block) in read.chunks(BLOCK as usize).enumerate() {
        let at = lba + at as u64;
        let expected = expected(at);
        assert!(
            block.iter().all(|byte| *byte == expected),
            "block {at} has {}, not {expected}",
            block[0]
        );
    }
}

fn start(mebibytes: u64) -> (Home, PoolHandle, Uuid, Host) {
    let home = Home::with_disk(64);
    device(&home, "gold", mebibytes);
    let pool = home.create();
    let lvol = clone(&home, &pool, "gold", 1).unwrap();
    let host = Host::on(&pool, lvol);
    (home, pool, lvol, host)
}

/// Waits until nothing claims the device.
fn is_freed(home: &Home) {
    let began = Instant::now();
    let claims = || home.registry.get("gold").unwrap().claims;
    while !claims().is_empty() {
        assert!(began.elapsed().as_secs() < 60, "{:?}", claims());
        std::thread::yield_now();
    }
}

/// Goal: reads of any shape find the device's data, a partial write keeps the rest of it, a trim
/// hides it, and the volume's space is its own only.
#[test]
fn a_volume_shows_a_device() {
    let (home, pool, lvol, mut host) = start(4);
    let size = 1024;
    shows(&mut host, 0, 256, byte);
    shows(&mut host, 3, 200, byte);
    assert_eq!(info(&pool, lvol).used_bytes, 0);
    // Hosts see data of the device as they see the volume's own.
    assert_eq!(allocated(&pool, lvol), Some(size));
    assert_eq!(host.write(UNIT + 3, 2, 0xEE), Status::Ok);
    assert_eq!(host.unmap(2 * UNIT + 4, 30), Status::Ok);
    assert_eq!(allocated(&pool, lvol), Some(size - UNIT));
    let expected = |lba| match lba {
        19 | 20 => 0xEE,
        36..66 => 0,
        lba => byte(lba),
    };
    for first in 0..4 {
        for lba in (first..size - 256).step_by(61) {
            shows(&mut host, lba, 1 + (lba % 250) as u32, expected);
        }
    }
    let is_now = info(&pool, lvol);
    assert_eq!(
        (is_now.used_bytes, is_now.exclusive_bytes),
        (65_536, 65_536)
    );
    let parent = ExternalParent {
        id: GOLD,
        name: "gold".to_owned(),
    };
    assert_eq!(is_now.external_parent, Some(parent));
    assert_eq!((is_now.parent, is_now.is_degraded), (None, false));
    assert_eq!(is_now.bytes, 4 << 20);
    // Three sources of a place: the lane copies from the device.
    let snapshot = rig::snapshot(&pool, lvol, 2);
    assert_eq!(info(&pool, lvol).external_parent, None);
    assert_eq!(info(&pool, lvol).parent, Some(snapshot));
    assert!(info(&pool, snapshot).external_parent.is_some());
    assert_eq!(host.write(UNIT + 4, 1, 0xDD), Status::Ok);
    shows(&mut host, 0, 256, |lba| match lba {
        20 => 0xDD,
        lba => expected(lba),
    });
    shows(&mut Host::on(&pool, snapshot), 0, 256, expected);
    // What it grows by is empty.
    let bytes = 8 << 20;
    run(&pool, Command::Resize { lvol, bytes }).unwrap();
    let mut host = Host::on(&pool, lvol);
    shows(&mut host, size - 20, 40, |lba| match lba {
        1024.. => 0,
        lba => byte(lba),
    });
    rig::check(&pool);
    // The device is as it was.
    let mut gold = Host::on_layer(home.registry.lookup("gold").unwrap());
    for lba in 0..size {
        let buf = gold.memory.acquire(BLOCK as usize).unwrap();
        let read = gold.run(Io::new(1, Op::Read, lba * 8, 8).with(buf));
        assert!(read.data[0].iter().all(|found| *found == byte(lba)));
    }
}

/// Goal: nothing writes or removes the device while volumes show it; the last one frees it.
#[test]
fn the_device_is_kept_from_writers() {
    let (home, pool, lvol, mut host) = start(4);
    let second = clone(&home, &pool, "gold", 2).unwrap();
    shows(&mut host, 0, 16, byte);
    let writer = || Holder::User("writer".into());
    for usage in [Usage::Shared, Usage::Exclusive] {
        let refused = home.registry.claim("gold", writer(), usage).err().unwrap();
        assert!(refused.to_string().contains("pool pool0"), "{refused}");
    }
    let refused = home.registry.remove("gold", Removal::IfUnused);
    let refused = refused.err().unwrap().to_string();
    assert!(refused.contains("used by pool pool0"), "{refused}");
    run(&pool, Command::Delete { lvol }).unwrap();
    assert!(!home.registry.get("gold").unwrap().claims.is_empty());
    shows(&mut Host::on(&pool, second), 0, 16, byte);
    run(&pool, Command::Delete { lvol: second }).unwrap();
    // A queue that is still open does what an idle core does, and gives the device up.
    host.rest();
    is_freed(&home);
    assert_eq!(pool.status().externals, []);
    rig::check(&pool);
}

/// Goal: after a restart a volume without its device serves what it has of its own, and the rest
/// when the device is back.
#[test]
fn a_device_that_comes_late() {
    let (home, pool, lvol, mut host) = start(4);
    assert_eq!(host.write(3, 1, 0xEE), Status::Ok);
    assert_eq!(host.write(UNIT, UNIT as u32, 0xDD), Status::Ok);
    assert_eq!(host.flush(), Status::Ok);
    drop((host, pool));
    let home = Home::new(&home.kill());
    let (pool, _) = home.import();
    let mut host = Host::on(&pool, lvol);
    assert!(info(&pool, lvol).is_degraded);
    let missing = |pool: &PoolHandle| pool.status().externals[0].clone();
    assert_eq!(
        (missing(&pool).bytes, missing(&pool).is_present),
        (4 << 20, false)
    );
    for (lba, blocks) in [(0, 1), (2, 2), (0, 256), (UNIT - 1, 2)] {
        assert_eq!(host.read(lba, blocks).0, Status::Gone, "{lba} {blocks}");
    }
    shows(&mut host, 3, 1, |_| 0xEE);
    shows(&mut host, UNIT, UNIT as u32, |_| 0xDD);
    // Writes and trims need no copy.
    assert_eq!(host.write(2 * UNIT + 1, 1, 0xCC), Status::Ok);
    assert_eq!(host.unmap(3 * UNIT, UNIT as u32), Status::Ok);
    shows(&mut host, 3 * UNIT, UNIT as u32, |_| 0);
    let snapshot = rig::snapshot(&pool, lvol, 2);
    let degraded = [lvol, snapshot].map(|lvol| info(&pool, lvol).is_degraded);
    assert_eq!(degraded, [true, true]);
    // This one does: the third source is the device.
    assert_eq!(host.write(2 * UNIT + 2, 1, 0xBB), Status::Gone);
    for command in [Command::Inflate { lvol }, Command::Decouple { lvol }] {
        let refused = run(&pool, command).unwrap_err();
        assert!(
            matches!(&refused, PoolError::Degraded(of) if of.id == GOLD),
            "{refused}"
        );
    }
    attach_all(&home, &pool);
    assert!(missing(&pool).is_present && !info(&pool, lvol).is_degraded);
    assert_eq!(host.write(2 * UNIT + 2, 1, 0xBB), Status::Ok);
    shows(&mut host, 0, 100, |lba| match lba {
        3 => 0xEE,
        16..=31 => 0xDD,
        33 => 0xCC,
        34 => 0xBB,
        48..64 => 0,
        lba => byte(lba),
    });
    run(&pool, Command::Inflate { lvol }).unwrap();
    run(&pool, Command::Delete { lvol: snapshot }).unwrap();
    shows(
        &mut host,
        34,
        10,
        |lba| if lba == 34 { 0xBB } else { byte(lba) },
    );
    is_freed(&home);
    rig::check(&pool);
}

/// Goal: a device that is pulled out frees its name, and volumes go on when it is back, through the
/// queues that were open.
#[test]
fn a_device_that_goes() {
    let (home, pool, lvol, mut host) = start(4);
    shows(&mut host, 0, 64, byte);
    let ticket = home.registry.remove("gold", Removal::Hot).unwrap();
    assert_eq!(host.read(0, 1).0, Status::Gone);
    // Before the pool hears of the removal, and afterwards.
    let copies = || block_on(pool.run(Command::Inflate { lvol })).unwrap_err();
    assert!(info(&pool, lvol).is_degraded);
    let missing = copies();
    let PoolError::Degraded(of) = &missing else {
        panic!("{missing}");
    };
    assert_eq!(of.id, GOLD);
    block_on(pool.detach(GOLD)).unwrap();
    assert!(info(&pool, lvol).is_degraded);
    assert_eq!(copies(), missing);
    let began = Instant::now();
    while !ticket.is_done() {
        assert!(began.elapsed().as_secs() < 60, "a queue is open");
        host.rest();
        std::thread::yield_now();
    }
    assert_eq!(host.read(0, 1).0, Status::Gone);
    device(&home, "gold again", 2);
    let small = block_on(pool.attach(claim(&home, "gold again"))).unwrap_err();
    assert!(
        matches!(small, PoolError::Unfit { what: "bdev", .. }),
        "{small}"
    );
    home.registry.remove("gold again", Removal::Hot).unwrap();
    device(&home, "gold as well", 4);
    attach_all(&home, &pool);
    shows(&mut host, 0, 64, byte);
    assert!(!info(&pool, lvol).is_degraded);
    // Word of the removal that comes late does not concern the device that is there now.
    block_on(pool.detach_gone(GOLD)).unwrap();
    assert!(!info(&pool, lvol).is_degraded);
    shows(&mut host, 0, 64, byte);
    assert_eq!(pool.status().versions, 1, "a device is no volume");
    home.registry.remove("gold as well", Removal::Hot).unwrap();
    block_on(pool.detach_gone(GOLD)).unwrap();
    assert!(info(&pool, lvol).is_degraded);
}

/// Goal: a device becomes the parent of a volume, under an open queue too, then another one, then a
/// snapshot; each that is left is free.
#[test]
fn a_device_becomes_the_parent() {
    let home = Home::with_disk(64);
    device(&home, "gold", 4);
    let pool = home.create();
    let lvol = rig::volume(&pool, 1, 4);
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.write(5, 2, 0xEE), Status::Ok);
    let set = || block_on(pool.set_external_parent(claim(&home, "gold"), lvol));
    set().unwrap();
    let over = |below: fn(u64) -> u8| {
        move |lba| match lba {
            5 | 6 => 0xEE,
            lba => below(lba),
        }
    };
    shows(&mut host, 0, 64, over(byte));
    assert_eq!(set().unwrap_err(), PoolError::Refused(Refusal::SameParent));
    let other = rig::volume(&pool, 2, 4);
    assert_eq!(Host::on(&pool, other).write(0, 16, 7), Status::Ok);
    let snapshot = rig::snapshot(&pool, other, 3);
    run(&pool, Command::SetParent { lvol, snapshot }).unwrap();
    shows(&mut host, 0, 64, over(|lba| if lba < 16 { 7 } else { 0 }));
    is_freed(&home);
    set().unwrap();
    shows(&mut host, 0, 64, over(byte));
    run(&pool, Command::Decouple { lvol }).unwrap();
    shows(&mut host, 0, 256, over(byte));
    is_freed(&home);
    rig::check(&pool);
}

/// Devices that do not fit are refused, and are free again.
#[test]
fn devices_that_do_not_fit() {
    let home = Home::with_disk(64);
    let pool = home.create();
    for (block_size, num_blocks) in [(512, 8193), (8192, 64)] {
        let config = serde_json::json!({
            "name": "gold", "block_size": block_size, "num_blocks": num_blocks,
        });
        let config = serde_json::from_value(config).unwrap();
        let device = malloc::create(config).unwrap();
        home.registry.register(device as Arc<dyn Bdev>).unwrap();
        let refused = clone(&home, &pool, "gold", 1).unwrap_err();
        assert!(
            matches!(refused, PoolError::Unfit { what: "bdev", .. }),
            "{refused}"
        );
        is_freed(&home);
        home.registry.remove("gold", Removal::IfUnused).unwrap();
    }
    device(&home, "gold", 4);
    rig::volume(&pool, 1, 4);
    let taken = clone(&home, &pool, "gold", 1).unwrap_err();
    assert_eq!(taken, PoolError::Refused(Refusal::Exists));
    let unknown = block_on(pool.attach(claim(&home, "gold"))).unwrap_err();
    assert_eq!(unknown, PoolError::Unknown { id: GOLD });
    is_freed(&home);
}

/// Goal: a device that is pulled out while a command uses it is free again. Method: before the pool
/// gets it, and during the copies of a volume.
#[test]
fn a_device_that_goes_during_a_command() {
    let home = Home::with_disk(64);
    let pool = home.create();
    let lvol = rig::volume(&pool, 1, 16);
    let mut host = Host::on(&pool, lvol);
    for unit in 0..256 {
        assert_eq!(host.write(unit * UNIT, UNIT as u32, 7), Status::Ok);
    }
    let is_done = |ticket: DeleteTicket, host: &mut Host| {
        let began = Instant::now();
        while !ticket.is_done() {
            assert!(began.elapsed().as_secs() < 60, "the pool keeps the device");
            host.rest();
            std::thread::yield_now();
        }
    };
    device(&home, "gold", 16);
    let held = claim(&home, "gold");
    let ticket = home.registry.remove("gold", Removal::Hot).unwrap();
    let id = Uuid::from_u128(9);
    block_on(pool.clone_external(held, id, "e".to_owned())).unwrap_err();
    is_done(ticket, &mut host);
    assert!(pool.status().external_claims.is_empty());

    device(&home, "gold", 16);
    let held = claim(&home, "gold");
    let copies = {
        let pool = pool.clone();
        std::thread::spawn(move || block_on(pool.set_external_parent(held, lvol)))
    };
    let began = Instant::now();
    while pool.status().external_claims != [GOLD] {
        assert!(began.elapsed().as_secs() < 60);
        std::thread::yield_now();
    }
    let ticket = home.registry.remove("gold", Removal::Hot).unwrap();
    block_on(pool.detach(GOLD)).unwrap();
    is_done(ticket, &mut host);
    // The copies may have ended before the device went.
    let _ = copies.join().unwrap();
    assert!(pool.status().external_claims.is_empty());
    shows(&mut host, 0, 16, |_| 7);

    device(&home, "gold", 16);
    let shown = clone(&home, &pool, "gold", 12).unwrap();
    let copies = {
        let pool = pool.clone();
        std::thread::spawn(move || block_on(pool.run(Command::Inflate { lvol: shown })))
    };
    let began = Instant::now();
    while info(&pool, shown).used_bytes == 0 {
        assert!(began.elapsed().as_secs() < 60);
    }
    let ticket = home.registry.remove("gold", Removal::Hot).unwrap();
    match copies.join().unwrap() {
        // As above.
        Ok(_) => {}
        Err(PoolError::Degraded(of)) => assert_eq!(of.id, GOLD),
        Err(error) => panic!("{error}"),
    }
    block_on(pool.detach(GOLD)).unwrap();
    is_done(ticket, &mut host);
}

/// Goal: in a full pool, a trim of a part of a device's leaf is refused, as a write would be, and a
/// trim of the whole leaf is done. The pool opens again.
#[test]
fn trims_in_a_full_pool() {
    let home = Home::with_disk(32);
    device(&home, "gold", 512);
    let pool = home.create();
    // Little is left of the 14 MiB for units.
    let other = rig::volume(&pool, 100, 16);
    {
        let mut host = Host::on(&pool, other);
        for unit in 0..160 {
            assert_eq!(host.write(unit * UNIT, UNIT as u32, 7), Status::Ok);
        }
    }
    let mut lvols = Vec::new();
    let leaf = 256 * UNIT;
    let mut refused = false;
    'fill: for number in 1..40 {
        let Ok(lvol) = clone(&home, &pool, "gold", number) else {
            refused = true;
            break;
        };
        let mut host = Host::on(&pool, lvol);
        lvols.push(lvol);
        for at in 0..32 {
            match host.unmap(at * leaf, 1) {
                Status::Ok => shows(&mut host, at * leaf, 2, |lba| {
                    if lba % leaf == 0 { 0 } else { byte(lba) }
                }),
                Status::NoSpace | Status::Retry => {
                    refused = true;
                    shows(&mut host, at * leaf, 2, byte);
                    break 'fill;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert!(refused && lvols.len() > 1, "{}", lvols.len());
    // A trim that finds no room for long fails for good, although no write waits.
    let began = Instant::now();
    let mut host = Host::on(&pool, *lvols.last().unwrap());
    for at in (0..32).cycle() {
        match host.unmap(at * leaf + 7, 1) {
            Status::Ok | Status::Retry => assert!(began.elapsed() < 10 * FULL_PATIENCE),
            Status::NoSpace => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pool.status().waiting_writes, 0);
    drop(host);
    let mut host = Host::on(&pool, lvols[0]);
    assert_eq!(host.unmap(0, leaf as u32), Status::Ok);
    shows(&mut host, 0, 64, |_| 0);
    assert_eq!(host.flush(), Status::Ok);
    drop((host, pool));
    let home = Home::new(&home.kill());
    let (pool, _) = home.import();
    attach_all(&home, &pool);
    let mut host = Host::on(&pool, lvols[0]);
    shows(&mut host, leaf - 4, 8, |lba| {
        if lba <= leaf { 0 } else { byte(lba) }
    });
    rig::check(&pool);
}

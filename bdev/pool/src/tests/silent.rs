//! External devices that do not answer: reads of them end in time, and what they answer later harms
//! nothing.

use std::sync::Arc;
use std::time::Instant;

use nacre_bdev::fault::{self, Action, Fault, FaultDevice};
use nacre_bdev::registry::Removal;
use nacre_bdev::{Bdev, Op, Status, Token};
use nacre_hugepages::Pool;
use uuid::Uuid;

use super::external::{UNIT, byte, clone, device, shows};
use super::rig::{self, Home, Host, block_on, run};
use crate::overdue::{LIMIT, MOST};
use crate::{Command, PoolError, PoolHandle};

fn on_fault(home: &Home, base: &str) -> Arc<FaultDevice> {
    let config = serde_json::from_value(serde_json::json!({ "base_name": base })).unwrap();
    let device = fault::create(config, &home.registry).unwrap();
    let registered = Arc::clone(&device) as Arc<dyn Bdev>;
    home.registry.register(registered).unwrap();
    device
}

/// From here on, reads of the device hang.
fn hang(device: &FaultDevice) {
    let hangs = Fault::new(Action::Hang).on(&[Op::Read]);
    device.inject(hangs).unwrap();
}

fn answer(device: &FaultDevice) {
    device.clear();
    device.resume_pending();
}

fn used(memory: &Pool) -> usize {
    let stats = memory.stats();
    stats.iter().map(|class| class.count - class.free).sum()
}

fn silent(name: &str, id: Uuid, failed: Result<crate::Outcome, PoolError>) {
    let Err(PoolError::Silent(of)) = &failed else {
        panic!("{failed:?}");
    };
    assert_eq!((of.name.as_str(), of.id), (name, id));
    let text = failed.unwrap_err().to_string();
    assert!(
        text.contains(name) && text.contains("does not answer"),
        "{text}"
    );
}

/// Goal: reads of a device that does not answer, and writes that copy from it, end in time with the
/// status of a missing device. Commands name the device. Other I/O goes on. The volume is as
/// before when the device answers again.
#[test]
fn reads_of_a_silent_device_end() {
    let home = Home::with_disk(64);
    device(&home, "gold", 4);
    let slow = on_fault(&home, "gold");
    let pool = home.create();
    let lvol = clone(&home, &pool, "EE_gold", 1).unwrap();
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.write(UNIT + 1, 1, 0xEE), Status::Ok);
    rig::snapshot(&pool, lvol, 2);
    assert_eq!(host.write(UNIT + 2, 1, 0xDD), Status::Ok);
    assert_eq!(host.write(2 * UNIT + 1, 1, 0xBB), Status::Ok);
    let own = |lba| match lba {
        17 => 0xEE,
        18 => 0xDD,
        33 => 0xBB,
        lba => byte(lba),
    };
    shows(&mut host, 0, 64, own);

    hang(&slow);
    let began = Instant::now();
    // One run of the device, and parts of it between others.
    let reads = [(64, 16), (UNIT - 3, 10)].map(|(lba, blocks)| host.begin_read(lba, blocks));
    shows(&mut host, UNIT + 1, 2, own);
    for read in reads {
        assert_eq!(host.end(read), Status::Gone);
    }
    assert!(began.elapsed() >= LIMIT);
    rig::snapshot(&pool, lvol, 3);
    // The third source of the place is the device.
    assert_eq!(host.write(2 * UNIT + 2, 1, 0xCC), Status::Gone);
    shows(&mut host, UNIT + 1, 2, own);
    silent(
        "EE_gold",
        slow.uuid(),
        run(&pool, Command::Inflate { lvol }),
    );
    silent(
        "EE_gold",
        slow.uuid(),
        run(&pool, Command::Decouple { lvol }),
    );

    answer(&slow);
    shows(&mut host, 0, 128, own);
    assert_eq!(host.write(2 * UNIT + 2, 1, 0xCC), Status::Ok);
    run(&pool, Command::Inflate { lvol }).unwrap();
    shows(
        &mut host,
        0,
        128,
        |lba| if lba == 34 { 0xCC } else { own(lba) },
    );
    rig::check(&pool);
}

/// A volume on a snapshot of another pool, whose disk is a fault device: its reads cannot be
/// aborted.
fn on_another_pool() -> (Home, Arc<FaultDevice>, PoolHandle, Uuid, Host) {
    let home = Home::with_disk(64);
    home.disk("far", 64);
    let far = on_fault(&home, "far");
    let other = home.create_on("EE_far", false).unwrap();
    let gold = rig::volume(&other, 50, 4);
    let mut host = Host::on(&other, gold);
    for lba in 0..1024 {
        assert_eq!(host.write(lba, 1, byte(lba)), Status::Ok);
    }
    let gold = rig::snapshot(&other, gold, 51);
    let gold = block_on(other.lvol(gold)).unwrap();
    let name = gold.name().to_owned();
    home.registry.register(gold as Arc<dyn Bdev>).unwrap();
    let pool = home.create();
    let lvol = clone(&home, &pool, &name, 1).unwrap();
    let host = Host::on(&pool, lvol);
    (home, far, pool, lvol, host)
}

/// Goal: a device that never answers holds a bounded number of buffers until it answers. Its late
/// answers reach no buffer that has another user.
#[test]
fn late_answers_are_bounded() {
    let (_home, far, _pool, _, mut host) = on_another_pool();
    shows(&mut host, 0, 16, byte);
    let memory = host.memory.clone();
    let before = used(&memory);
    hang(&far);
    let reads: Vec<Token> = (0..MOST as u64).map(|at| host.begin_read(at, 1)).collect();
    for read in reads {
        assert_eq!(host.end(read), Status::Gone);
    }
    assert_eq!(used(&memory), before + MOST, "the device keeps its buffers");
    // No time passes from here on: further reads do not wait, and hold nothing.
    host.frozen = Some(host.now());
    for at in 0..10 {
        assert_eq!(host.read(100 + at, 1).0, Status::Gone);
    }
    assert_eq!(used(&memory), before + MOST);

    answer(&far);
    let began = Instant::now();
    while used(&memory) > before {
        assert!(began.elapsed().as_secs() < 60, "buffers are lost");
        host.rest();
        std::thread::yield_now();
    }
    shows(&mut host, 0, 256, byte);
}

/// Goal: neither a removal of a silent device nor the end of a pool waits for it.
#[test]
fn a_silent_device_is_given_back() {
    let (home, far, pool, lvol, mut host) = on_another_pool();
    hang(&far);
    assert_eq!(host.read(0, 1).0, Status::Gone);
    let device = pool.status().externals[0].parent.clone();
    silent(
        &device.name,
        device.id,
        run(&pool, Command::Inflate { lvol }),
    );
    let name = home
        .registry
        .lookup(&device.name)
        .unwrap()
        .name()
        .to_owned();
    let ticket = home.registry.remove(&name, Removal::Hot).unwrap();
    block_on(pool.detach(device.id)).unwrap();
    let began = Instant::now();
    while !ticket.is_done() {
        assert!(began.elapsed().as_secs() < 60, "the pool keeps the device");
        host.rest();
        std::thread::yield_now();
    }
    assert_eq!(host.read(0, 1).0, Status::Gone);
    assert_eq!(host.write(0, 1, 7), Status::Ok);
    drop(host);
    let export = Command::Close { export: true };
    run(&pool, export).unwrap();
    answer(&far);
}

/// Goal: a device that lost its end does not make hosts believe that their range is wrong. The
/// external device counts as missing; a disk of the pool has a medium error.
#[test]
fn devices_that_lost_their_end() {
    let home = Home::with_disk(64);
    device(&home, "gold", 4);
    let (gold, disk) = (on_fault(&home, "gold"), on_fault(&home, "disk"));
    let pool = home.create_on("EE_disk", false).unwrap();
    let lvol = clone(&home, &pool, "EE_gold", 1).unwrap();
    let mut host = Host::on(&pool, lvol);
    assert_eq!(host.write(0, 16, 7), Status::Ok);
    let fails = || Fault::new(Action::Fail(Status::OutOfRange));
    for device in [&gold, &disk] {
        device.inject(fails().on(&[Op::Read])).unwrap();
    }
    assert_eq!(host.read(64, 4).0, Status::Gone);
    assert_eq!(host.read(0, 4).0, Status::ReadError);
    disk.clear();
    shows(&mut host, 0, 4, |_| 7);
}

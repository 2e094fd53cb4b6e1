//! Tests of a holder with a lease: what it may open, and how its answers leave without the lease.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::reservation::ActiveReservation;
use nacre_bdev::{Io, Op, Status};

use super::rig::World;
use super::shared_device::InjectedFailure;
use crate::handle::{Command, VolumeError, VolumeState};
use crate::lane::tests::rig::TestLease;
use crate::model::{ReplicaState, Settings};
use crate::store::{MemoryStore, Outcome, Plan};

const ME: u8 = 1;
const RIVAL: u8 = 2;

/// A volume of `disks` disks with reservations, opened with a lease. The store says nothing of
/// other holders by itself.
fn leased(disks: usize) -> (World, Arc<TestLease>) {
    let mut world = World::shared(disks, ME);
    world.store = MemoryStore::alone();
    world.create(disks, Settings::default()).unwrap();
    let lease = TestLease::new();
    world.lease = Some(Arc::clone(&lease));
    world.open().unwrap();
    (world, lease)
}

impl World {
    fn begin_read(&mut self, lba: u64) -> u64 {
        let data = self.buf(1, 0xee);
        self.submit(Io::new(0, Op::Read, lba, 1).with(data))
    }

    fn store_away(&self, away: bool) {
        let refuse = |_: &_| Plan::outcome(Outcome::Refuse);
        self.store.plan(away.then_some(Box::new(refuse) as _));
    }
}

/// A close in order keeps former holders out: a write that is still on its way from one of them
/// changes nothing, and the next holder opens.
#[test]
fn a_former_holder_stays_out_after_a_close() {
    const DISKS: [&str; 2] = ["d0", "d1"];
    let (mut world, lease) = leased(2);
    world.write(0, 8, 1);
    DISKS.iter().for_each(|disk| world.shelf.cut(disk, true));
    lease.set(false);
    let token = world.begin_write(0, 8, 9);
    let mut rival = world.rival(RIVAL);
    rival.lease = Some(TestLease::new());
    rival.open().unwrap();
    rival.write(0, 8, 2);
    rival.close();
    for disk in DISKS {
        let known = rival.shelf.reservations(disk);
        let known = known.lock();
        assert_eq!(known.keys.keys().collect::<Vec<_>>(), [&RIVAL]);
        assert_eq!(known.held, ActiveReservation::AllRegistrants);
    }
    DISKS.iter().for_each(|disk| world.shelf.cut(disk, false));
    world.pass(Duration::from_secs(60));
    let done = world.ended(token);
    assert!(done.is_none_or(|done| done.status == Status::Gone));
    rival.open().unwrap();
    assert_eq!(rival.read(0), 2);
}

/// Without the store and without the lease, I/O goes on: the replicas confirm the holder.
#[test]
fn the_store_is_away() {
    let (mut world, lease) = leased(2);
    world.write(0, 8, 1);
    world.store_away(true);
    lease.set(false);
    let began = world.clock.now();
    for at in 0..20 {
        world.write(at * 8, 8, at as u8);
        assert_eq!(world.read(at * 8), at as u8);
    }
    let flush = world.submit(Io::new(0, Op::Flush, 0, 0));
    assert_eq!(world.wait(flush).status, Status::Ok);
    assert!(world.clock.now().since(began) < Duration::from_secs(1));
    assert_eq!(world.state(), VolumeState::Healthy);
}

/// A replica that may be in sync in the store must confirm the holder too, even when its device is
/// gone. I/O waits for it, up to the hold time, until the store has it as out.
#[test]
fn every_replica_must_confirm() {
    let (mut world, lease) = leased(2);
    world.write(0, 8, 1);
    world.store_away(true);
    lease.set(false);
    world.shelf.cut("d1", true);
    let read = world.begin_read(0);
    let write = world.begin_write(8, 8, 2);
    world.pass(Duration::from_secs(10));
    assert!(world.ended(read).is_none() && world.ended(write).is_none());
    world.pass(Duration::from_secs(15));
    assert_eq!(world.wait(read).status, Status::Gone);
    assert_eq!(world.wait(write).status, Status::Gone);
    let read = world.begin_read(0);
    world.store_away(false);
    assert_eq!(world.wait(read).status, Status::Ok);
    assert!(matches!(
        world.replica_state("d1"),
        ReplicaState::Out { .. }
    ));
    world.shelf.cut("d1", false);
    world.until_healthy();
}

/// Another holder has one of the replicas. What this holder reads from the other replica may be
/// old, so it does not leave: the report of the first one fences the volume.
#[test]
fn another_holder_has_a_replica() {
    let (mut world, lease) = leased(2);
    world.write(0, 8, 1);
    lease.set(false);
    let mut rival = world.rival(RIVAL);
    rival.shelf.cut("d0", true);
    rival.open().unwrap();
    rival.write(0, 8, 2);
    let read = world.begin_read(0);
    world.until(|world| world.state() == VolumeState::Fenced);
    lease.set(true);
    world.pass(Duration::from_secs(60));
    assert_eq!(world.ended(read).unwrap().status, Status::Gone);
    assert_eq!(rival.read(0), 2);
}

/// A report that fails, or that shows another reservation, confirms nothing. The next round may be.
#[test]
fn reports_that_do_not_confirm() {
    let (mut world, lease) = leased(1);
    world.write(0, 8, 1);
    lease.set(false);
    let fail = |world: &World, fails: bool| {
        world.shelf.reservations("d0").lock().failure = fails.then_some(InjectedFailure {
            which: |_| true,
            status: Status::DeviceError,
            once: false,
        });
    };
    fail(&world, true);
    let read = world.begin_read(0);
    world.pass(Duration::from_secs(2));
    assert!(world.ended(read).is_none());
    fail(&world, false);
    assert_eq!(world.wait(read).status, Status::Ok);
    // An older key that is still registered: that host may write.
    world.shelf.reservations("d0").lock().keys.insert(RIVAL, 7);
    let read = world.begin_read(0);
    world.pass(Duration::from_millis(100));
    assert!(world.ended(read).is_none());
    // The holder excludes the other host within a second.
    assert_eq!(world.wait(read).status, Status::Ok);
    assert_eq!(world.shelf.key("d0", RIVAL), None);
}

/// A device without reservations cannot be a replica: neither at opening, nor later. Without a
/// lease it can.
#[test]
fn devices_without_reservations() {
    let (mut world, _lease) = leased(2);
    let support = |world: &World, disk: &str, supported: bool| {
        world.shelf.reservations(disk).lock().unsupported = !supported;
    };
    world.add_disk("new", super::rig::DISK_BLOCKS);
    support(&world, "new", false);
    let add = || Command::Add {
        device: "new".into(),
        force: false,
    };
    let is_refused = |error: &VolumeError, disk: &str| matches!(error, VolumeError::NoReservations { device } if device.contains(disk));
    let error = world.run(add()).unwrap_err();
    assert!(is_refused(&error, "new"), "{error}");

    // A replica that returns without them stays out.
    world.shelf.cut("d1", true);
    world.write(0, 8, 1);
    support(&world, "d1", false);
    world.shelf.cut("d1", false);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.state(), VolumeState::Degraded);
    let why = world.status().replicas[1].why.clone().unwrap_or_default();
    assert!(why.contains("reservations"), "{why}");
    support(&world, "d1", true);
    world.until_healthy();

    world.close();
    support(&world, "d1", false);
    let error = world.open().unwrap_err();
    assert!(is_refused(&error, "d1"), "{error}");
    world.lease = None;
    world.open().unwrap();
    world.run(add()).unwrap();
}

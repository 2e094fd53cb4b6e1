//! Tests of a full resync, interrupted by failures of the daemon and of the source replica.

use std::time::Duration;

use nacre_bdev::fault::{Action, Fault};
use nacre_bdev::{Io, Op};

use super::rig::{REGION, World};
use crate::handle::{Command, ResyncKind, VolumeEventKind, VolumeState};
use crate::model::{ReplicaState, Settings};

const MIB: u64 = 1 << 20;
const REGIONS: u64 = 8;

/// A volume of so many disks of which the last one is being filled, a region each second, and has
/// some of them.
fn filling(disks: usize) -> World {
    filling_on(World::empty(disks), disks)
}

fn filling_on(mut world: World, disks: usize) -> World {
    let settings = Settings {
        resync_bytes_per_s: MIB,
        ..Settings::default()
    };
    world.create(disks, settings).unwrap();
    world.open().unwrap();
    for region in 0..REGIONS {
        world.write(region * REGION, 8, region as u8 + 1);
    }
    // Recent writes alone would cause copying after a crash.
    world.until(|world| world.status().dirty_regions == 0);
    let replica = Some(format!("d{}", disks - 1));
    world
        .run(Command::Resync {
            replica,
            full: true,
        })
        .unwrap();
    world.pass(Duration::from_secs(REGIONS / 2));
    world
}

fn watermark(world: &World) -> u64 {
    match world.record().replicas.last().unwrap().state {
        ReplicaState::Filling { watermark, .. } => watermark,
        ref state => panic!("{state:?}"),
    }
}

fn full_copies(world: &World) -> Vec<u64> {
    let ended = |what: VolumeEventKind| match what {
        VolumeEventKind::ResyncEnded { kind, bytes, .. } => {
            (kind == ResyncKind::Full).then_some(bytes)
        }
        _ => None,
    };
    world.recorded.all().into_iter().filter_map(ended).collect()
}

/// Goal: data that a rebuild has copied before the daemon died is not copied again, and later
/// writes there are kept. Method: a crash in the middle of it; the bytes that are copied after it
/// are counted.
#[test]
fn a_rebuild_resumes_after_a_crash() {
    let mut world = filling(2);
    let done = watermark(&world);
    assert!((1..REGIONS).contains(&done), "{done}");
    // Below the watermark, so it goes there, too.
    world.write(8, 1, 0xaa);
    world.crash();
    world.open().unwrap();
    assert!(watermark(&world) >= done);
    world.until_healthy();
    let copied = full_copies(&world);
    // The region that was written when the daemon died is dirty, and is made equal with the rest.
    let most = (REGIONS - done + 1) * MIB;
    assert!(copied.len() == 1 && copied[0] <= most, "{copied:?}, {done}");
    world.all_equal(&["d0", "d1"]);
    assert_eq!(world.read(8), 0xaa);
}

/// Goal: a replica's data that was only in its cache is copied again after the loss of the cache,
/// although a flush succeeds after it and the loss is still unnoticed. Method: a copied block is as
/// before, and the device reports a loss.
#[test]
fn data_lost_from_a_cache_is_copied_again() {
    let mut world = filling_on(World::shared(2, 1), 2);
    let region = watermark(&world);
    assert!((1..REGIONS).contains(&region), "{region}");
    let (lba, copied) = (region * REGION, region as u8 + 1);
    world.scribble("d1", lba, 0xee);
    while world.medium("d1")[lba as usize] != copied {
        assert_eq!(watermark(&world), region);
        world.pass(Duration::from_millis(50));
    }
    world.scribble("d1", lba, 0xee);
    world.shelf.reservations("d1").lock().losses += 1;
    world.until_healthy();
    world.all_equal(&["d0", "d1"]);
}

/// Goal: a rebuild whose source fails continues from another replica, at the same position. Method:
/// the source is removed in the middle of it.
#[test]
fn a_rebuild_continues_from_another_source() {
    let mut world = filling(3);
    let done = watermark(&world);
    assert!((1..REGIONS).contains(&done), "{done}");
    let changed = |what: &VolumeEventKind| matches!(what, VolumeEventKind::SourceChanged { .. });
    assert!(!world.has_event(changed));
    world.shelf.take("d0");
    world.write(0, 1, 0xbb);
    world.until(|world| world.replica_state("d2") == ReplicaState::InSync);
    assert!(world.has_event(changed));
    let copied = full_copies(&world);
    assert!(
        copied.iter().sum::<u64>() <= (REGIONS + 1) * MIB,
        "{copied:?}"
    );
    world.all_equal(&["d1", "d2"]);
    world.shelf.bring("d0");
    world.until_healthy();
    world.all_equal(&["d0", "d1", "d2"]);
}

/// Goal: hosts' I/O goes first. Method: the same rebuild from a slow disk, while no host has I/O
/// and while one always does: then each chunk is followed by a rest of its own duration.
#[test]
fn host_io_has_priority_over_a_rebuild() {
    let rebuild = |busy: bool| {
        let mut world = World::with(2);
        for region in 0..REGIONS {
            world.write(region * REGION, 8, region as u8 + 1);
        }
        let slow = Fault::new(Action::Delay { latency_us: 5000 }).on(&[Op::Read]);
        world.shelf.fault("d0").inject(slow).unwrap();
        let replica = Some("d1".to_owned());
        world
            .run(Command::Resync {
                replica,
                full: true,
            })
            .unwrap();
        world.until(|world| world.status().replicas[1].resync.is_some());
        let began = world.clock.now();
        let ask = |world: &mut World| {
            let data = world.buf(1, 0);
            world.submit(Io::new(0, Op::Read, 0, 1).with(data))
        };
        let mut pending = busy.then(|| ask(&mut world));
        let mut answers = 0;
        while world.state() != VolumeState::Healthy {
            world.step();
            if let Some(token) = pending
                && world.ended(token).is_some()
            {
                answers += 1;
                pending = Some(ask(&mut world));
            }
            assert!(world.clock.now().since(began) < Duration::from_secs(60));
        }
        world.all_equal(&["d0", "d1"]);
        (world.clock.now().since(began), answers)
    };
    let (idle, _) = rebuild(false);
    let (busy, answers) = rebuild(true);
    assert!(busy > idle * 2, "{busy:?} beside hosts, {idle:?} without");
    assert!(busy < idle * 20, "it does go on: {busy:?}, {idle:?}");
    // None of them waits for the copying.
    let least = busy.as_millis() / 6;
    assert!(answers > least, "{answers} in {busy:?}");
}
